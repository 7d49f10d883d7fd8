"""Python functions of a score as text of the library's language.

A function is run once, on values that write down what is done with them. PyTorch's functions reach them by `__torch_function__`, operators by
Python's own names; nothing of this needs PyTorch to be there.
"""

from __future__ import annotations

from typing import Any, Callable

from .errors import TracingError, one
from .table import CURRENT, FUNCTIONS, Operators, constant, current, index

AXES = ("batch", "head", "q", "k")


class Parameter:
    """A tensor that a trace reads: what of it is read, and over which axes it is declared."""

    __slots__ = ("name", "reading", "source")

    def __init__(self, name: str, source: Any, picks: tuple, order: tuple, axes: tuple, starts: tuple, dtype: str):
        self.name, self.source = name, source
        # Parameters of which this is equal read a tensor alike.
        self.reading = (picks, order, axes, starts, dtype)

    @property
    def picks(self) -> tuple:
        """The index of each axis of the tensor's that a constant takes, and none for the others."""
        return self.reading[0]

    @property
    def order(self) -> tuple:
        """The order of these others."""
        return self.reading[1]

    @property
    def axes(self) -> tuple:
        """Which axes of the scores they are."""
        return self.reading[2]

    @property
    def starts(self) -> tuple:
        """Where each begins."""
        return self.reading[3]

    @property
    def dtype(self) -> str:
        """The declared element type."""
        return self.reading[4]

    def of(self, source: Any) -> Parameter:
        """The same of another tensor."""
        made = Parameter.__new__(Parameter)
        made.name, made.source, made.reading = self.name, source, self.reading
        return made


class Traced:
    """What a function did: its text, the tensors and the scalars that it reads."""

    __slots__ = ("scalars", "tensors", "text")

    def __init__(self, text: str, tensors: tuple, scalars: tuple):
        self.text, self.tensors, self.scalars = text, tensors, scalars


class Trace:
    """One function being traced."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.lines: list[str] = []
        self.values: dict[str, Value] = {}
        self.tensors: list[Parameter] = []
        self.scalars: dict[str, Scalar] = {}

    def literal(self, x: Any, kind: str) -> Value:
        """A constant as a value."""
        return Value(self, constant(x), kind, x is True or x is False or x >= 0)

    def let(self, text: str, kind: str, positive: bool = False) -> Value:
        """A value that is given a name, once for equal ones. `positive`: known not to be negative."""
        there = self.values.get(text)
        if there is None:
            name = f"v{len(self.values)}"
            self.lines.append(f"let {name} = {text};")
            there = self.values[text] = Value(self, name, kind, positive)
        return there

    def tensor(self, source: Any, picks: tuple, places: list[tuple[str, int]]) -> Value:
        """An element of a tensor at this place of these axes, each with what is added to it; they stand in the order of the tensor's."""
        order = tuple(sorted(range(len(places)), key=lambda n: AXES.index(places[n][0])))
        told, starts = tuple(places[n][0] for n in order), tuple(places[n][1] for n in order)
        there = None
        for known in self.tensors:
            if known.source is source and (known.picks, known.order, known.axes, known.starts) == (picks, order, told, starts):
                there = known
        if there is None:
            there = Parameter(f"{self.prefix}{len(self.tensors)}", source, picks, order, told, starts, dtype_of(source))
            self.tensors.append(there)
        kind = {"i32": "i32", "bool": "bool"}.get(there.dtype, "f32")
        return Value(self, there.name, kind)

    def scalar(self, scalar: Scalar) -> Value:
        there = self.scalars.setdefault(scalar.name, scalar)
        if there is not scalar:
            raise TracingError(f"two scalars are named {scalar.name!r}", "name each once, and use the same object for both")
        return Value(self, scalar.name, "f32")

    def text(self, result: Value) -> str:
        # Calls bring the values of scalars: the text is the same for all of them.
        declared = [f"scalar {s.name} = 1.0;" for s in self.scalars.values()]
        declared += [f"tensor {t.name}[{', '.join(t.axes)}]: {t.dtype};" for t in self.tensors]
        return "\n".join([*declared, *self.lines, result.text])


class Value(Operators):
    """A value of a trace."""

    __slots__ = ("kind", "place", "positive", "text", "trace")

    def __init__(self, trace: Trace, text: str, kind: str, positive: bool = False, place: tuple[str, int] | None = None):
        self.trace, self.text, self.kind, self.positive = trace, text, kind, positive
        # An axis and a constant that is added to it, where it is no more than that.
        self.place = place

    def __repr__(self) -> str:
        return f"<traced {self.kind} {self.text}>"

    def lifted(self) -> Value:
        if getattr(CURRENT, "trace", None) is not self.trace:
            raise TracingError("a traced value is used outside of its function", "return it, and keep no traced value elsewhere")
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return applied(func, args, kwargs or {})


class Scalar(Operators):
    """A number that may change from call to call without a new plan: `scalar("cap", 30.0)`. Setting `value` is all that a change takes."""

    def __init__(self, name: str, value: float):
        if not name.isidentifier() or len(name) > 64:
            raise one("scalar", repr(name), "a name of letters, digits and _, at most 64")
        self.name = name
        self.value = value

    @property
    def value(self) -> float:
        """The number that calls read."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        if getattr(value, "requires_grad", False):
            raise one(f"scalar {self.name}", "a tensor that requires grad", "a number, which has no gradient: capture the tensor itself, or pass `.item()`")
        self._value = float(value)

    def __repr__(self) -> str:
        return f"scalar({self.name!r}, {self.value!r})"

    def lifted(self) -> Value:
        return current(f"the scalar {self.name}").scalar(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return applied(func, args, kwargs or {})


class Array:
    """A NumPy array, or anything that has its interface, that a function reads by index: NumPy's own indices take numbers alone."""

    def __init__(self, source: Any):
        self.source = source

    def __getitem__(self, at):
        return index(self.source, at, (), current("an array"))

    def __repr__(self) -> str:
        return f"array({self.source!r})"


def scalar(name: str, value: float) -> Scalar:
    """Declares a number that may change without a new plan."""
    return Scalar(name, value)


def array(source: Any) -> Array:
    """Makes a NumPy array readable in a score_mod or mask_mod: `array(slopes)[head]`."""
    return Array(source)


def applied(func: Any, args: tuple, kwargs: dict) -> Any:
    """What a function of PyTorch's is on traced values."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    made = FUNCTIONS.get(name.strip("_"))
    if made is None:
        raise TracingError(f"torch's `{name}` has no counterpart", f"there are {', '.join(sorted(FUNCTIONS))}")
    try:
        return made(*args, **kwargs)
    except TypeError as e:
        if isinstance(e, TracingError):
            raise
        raise TracingError(f"torch's `{name}` with these arguments has no counterpart ({e})", "write it with operators") from None


DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "bool": "bool"}
# Read as another type: whole numbers of other widths, and doubles.
CONVERTED = {"int64": "i32", "int16": "i32", "int8": "i32", "uint8": "i32", "uint16": "i32", "float64": "f32"}


def dtype_of(source: Any) -> str:
    """The element type that a tensor is declared with."""
    name = str(source.dtype).rsplit(".", 1)[-1]
    known = DTYPES.get(name) or CONVERTED.get(name)
    if known is None:
        raise TracingError(f"a tensor of {name} is read", f"convert it to one of {', '.join([*DTYPES, *CONVERTED])}")
    return known


def trace(fn: Callable, prefix: str, with_score: bool) -> Traced:
    """Runs a score_mod (`score, b, h, q_idx, kv_idx`) or a mask_mod (`b, h, q_idx, kv_idx`) once."""
    trace = Trace(prefix)
    before, CURRENT.trace = getattr(CURRENT, "trace", None), trace
    try:
        places = [Value(trace, axis, "i32", True, (axis, 0)) for axis in AXES]
        score = [Value(trace, "score", "f32")] if with_score else []
        result = fn(*score, *places)
        what = "a score_mod" if with_score else "a mask_mod"
        if isinstance(result, (bool, int, float)):
            text = constant(bool(result) if not with_score else float(result))
            result = Value(trace, text, "f32" if with_score else "bool")
        if isinstance(result, Operators):
            result = result.lifted()
        else:
            result = _tensor_result(trace, result, what)
        if with_score and result.kind != "f32":
            result = FUNCTIONS["float"](result).lifted()
        if not with_score and result.kind != "bool":
            raise TracingError(f"{what} returns a number", "return a truth value: compare with something")
        return Traced(trace.text(result), tuple(trace.tensors), tuple(trace.scalars.values()))
    finally:
        CURRENT.trace = before


def _tensor_result(trace: Trace, result: Any, what: str) -> Value:
    """A tensor of one element that does not depend on the place, as `q_idx.new_ones(())` is."""
    if hasattr(result, "numel") and hasattr(result, "dtype") and result.numel() == 1:
        return trace.tensor(result, tuple(0 for _ in result.shape), [])
    raise TracingError(f"{what} returns {type(result).__name__}", "return a value made of its arguments")
