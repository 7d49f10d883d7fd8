"""Traces Python functions of a score to text in the expression language.

A function runs once, with values that record the operations on them. PyTorch's functions reach them through `__torch_function__`, and operators through
Python's special methods. PyTorch is not required.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Callable

from . import table
from .dtypes import I32, KINDS, LIMITS, RULES, Ranges, Step, infinite_ends, of_number, within
from .errors import TracingError, one, source_line
from .gather import REDUCTIONS, index
from .table import called
from .values import CURRENT, FUNCTIONS, Operators, Unread, constant, current, extents, instead_of, nonnegative

AXES = ("batch", "head", "q", "k")


class Parameter:
    """A tensor that a trace reads: the part that it reads, and the declared axes."""

    __slots__ = ("name", "reading", "source")

    def __init__(self, name: str, source: Any, picks: tuple, order: tuple, axes: tuple, starts: tuple, dtype: str):
        self.name, self.source = name, source
        # Equal for parameters that read a tensor in the same way.
        self.reading = (picks, order, axes, starts, dtype)

    @property
    def picks(self) -> tuple:
        """The index of each tensor axis that is indexed with a constant, and None for the others."""
        return self.reading[0]

    @property
    def order(self) -> tuple:
        """The order of the remaining axes."""
        return self.reading[1]

    @property
    def axes(self) -> tuple:
        """The score axes that they correspond to."""
        return self.reading[2]

    @property
    def starts(self) -> tuple:
        """The start offset of each."""
        return self.reading[3]

    @property
    def dtype(self) -> str:
        """The declared element type."""
        return self.reading[4]

    @property
    def is_table(self) -> bool:
        """Whether it is a table, read at computed indices. Then `axes` has its extents, and each of `starts` is a table axis, a score axis, and the start
        offset."""
        return len(self.axes) > 0 and not isinstance(self.axes[0], str)

    @property
    def over(self) -> str:
        """The axes, or the extents of a table."""
        return ", ".join([str(axis) for axis in self.axes])

    @property
    def declared(self) -> str:
        """The declaration."""
        return f"{'table' if self.is_table else 'tensor'} {self.name}[{self.over}]: {self.dtype};"

    def of(self, source: Any) -> Parameter:
        """Returns the parameter for another tensor."""
        made = Parameter.__new__(Parameter)
        made.name, made.source, made.reading = self.name, source, self.reading
        return made


class Traced:
    """A traced function: its text, the tensors and scalars that it reads, and the ranges that a call has to check."""

    __slots__ = ("ranges", "scalars", "tensors", "text")

    def __init__(self, text: str, tensors: tuple, scalars: tuple, ranges: Ranges | None):
        self.text, self.tensors, self.scalars, self.ranges = text, tensors, scalars, ranges


class Trace:
    """A function that is being traced."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.tensors: list[Parameter] = []
        self.scalars: dict[str, Scalar] = {}
        self.steps: list[Step] = []
        # Steps on int64 that may exceed i32, as far as is known before a call.
        self.unsure: list[int] = []

    def value(
        self, text: str, element: str, known: Any, rule: str, operands: tuple = (), smooth: bool = False, place: tuple[str, int] | None = None, ends: bool = False
    ) -> Value:
        """Returns a value of a PyTorch type, with the rule of its range. `ends`: an infinite value of it is not NaN."""
        if element in LIMITS:
            low, high = LIMITS[element]
            if known is None or not within(known, element):
                if element == "int64" and known is not None:
                    self.unsure.append(len(self.steps))
                    known = max(known[0], low), min(known[1], high)
                else:
                    known = low, high
        elif known is not None and not all([abs(end) < 1e38 or (ends and math.isinf(end)) for end in known]):
            # Beyond f32 a value is infinite, and results computed from it may be NaN.
            known = None
        self.steps.append(Step(rule, operands, element, text))
        if self.unsure and self.unsure[-1] == len(self.steps) - 1 and not table.compiling():
            self.steps[-1].where = source_line()
        return Value(self, text, element, known, len(self.steps) - 1, smooth, place)

    def literal(self, x: Any) -> Value:
        """Returns a Python number as a value."""
        known = None if x != x else (x, x)
        return self.value(constant(x), of_number(x), known, "either", (known,))

    def let(self, text: str) -> str:
        """Returns a name for a text; equal texts share a name."""
        name = self.names.get(text)
        if name is None:
            name = self.names[text] = f"v{len(self.names)}"
            self.lines.append(f"let {name} = {text};")
        return name

    def make(self, text: str, element: str, rule: str, *operands: Any, smooth: bool | None = None) -> Value:
        """Returns a named value that is computed. Its range follows from the operands by a rule of `RULES`."""
        ranges: list[Any] = []
        steps: list[Any] = []
        flows = False
        for x in operands:
            if type(x) is Value:
                ranges.append(x.range)
                steps.append(x.number)
                flows = flows or x.smooth
            else:
                ranges.append(None if x != x else (x, x))
                steps.append(ranges[-1])
        smooth = flows and KINDS[element] == "f32" if smooth is None else smooth
        return self.value(self.let(text), element, RULES[rule](*ranges), rule, tuple(steps), smooth, ends=infinite_ends(rule, ranges))

    def same(self, x: Value, element: str) -> Value:
        """Returns a value under a wider type."""
        place = x.place if element in ("int32", "int64") else None
        return self.value(x.text, element, x.range, "either", (x.number,), x.smooth, place)

    def tensor(self, source: Any, picks: tuple, places: list[tuple[str, int]]) -> Value:
        """Returns the tensor element at the position of these axes plus offsets; the axes are in the tensor's order."""
        order = tuple(sorted(range(len(places)), key=lambda n: AXES.index(places[n][0])))
        told, starts = tuple(places[n][0] for n in order), tuple(places[n][1] for n in order)
        there = None
        for known in self.tensors:
            if known.source is source and (known.picks, known.order, known.axes, known.starts) == (picks, order, told, starts):
                there = known
        if there is None:
            there = Parameter(f"{self.prefix}{len(self.tensors)}", source, picks, order, told, starts, dtype_of(source))
            self.tensors.append(there)
        element = _element_of(source)
        return self.value(there.name, element, LIMITS.get(element), "tensor", (there.name,), KINDS[element] == "f32")

    def table(self, source: Any, taken: tuple) -> Value:
        """Returns a tensor element at one index per axis, each a number or a traced integer: the tensor is declared as a table."""
        shape = extents(source)
        # A table has at most four extents; with more axes, those with constant indices are selected first.
        picked = tuple([one if isinstance(one, int) and len(shape) > 4 else None for one in taken])
        left = [(one, n) for one, n, pick in zip(taken, shape, picked) if pick is None]
        axes = tuple([n for _, n in left])
        if len(axes) > 4:
            raise TracingError(f"a tensor of shape {shape} is indexed along {len(axes)} axes that are not constant", "reshape it, so that 1 to 4 such axes are left")
        if 0 in axes or math.prod(axes) >= 2**31:
            raise TracingError(f"a tensor of shape {shape} is indexed by a computed value", "use a tensor of 1 to 2^31 - 1 elements")
        # Plain positions must be within the tensor, which a call can check.
        starts = [(n, AXES.index(one.place[0]), one.place[1]) for n, (one, _) in enumerate(left) if type(one) is Value and one.place is not None]
        there = None
        for known in self.tensors:
            if known.source is source and known.is_table and (known.picks, known.axes) == (picked, axes):
                there = known
        if there is None:
            there = Parameter(f"{self.prefix}{len(self.tensors)}", source, picked, tuple(range(len(axes))), axes, (), dtype_of(source))
            self.tensors.append(there)
        if starts:
            there.reading = (*there.reading[:3], tuple(sorted({*there.starts, *starts})), there.dtype)
        element = _element_of(source)
        text = self.let(f"{there.name}[{', '.join([self._along(one, n) for one, n in left])}]")
        return self.value(text, element, LIMITS.get(element), "tensor", (there.name,), KINDS[element] == "f32")

    def _along(self, one: Any, extent: int) -> str:
        """Returns an index in the expression language; negative ones count from the end."""
        if isinstance(one, int):
            return constant(one)
        if nonnegative(one):
            return one.text
        return self.let(f"select({one.text} < 0, {one.text} + {extent}, {one.text})")

    def extent(self, axis: str) -> Value:
        """Returns the number of batch entries, heads, queries or keys."""
        text = ("batches", "heads_q", "seq_q", "seq_kv")[AXES.index(axis)]
        return self.value(text, "int64", (0, I32[1]), "extent", (AXES.index(axis),))

    def scalar(self, scalar: Scalar) -> Value:
        there = self.scalars.setdefault(scalar.name, scalar)
        if there is not scalar:
            raise TracingError(f"two scalars are named {scalar.name!r}", "give each scalar its own name, or use one scalar object in both places")
        return self.value(scalar.name, "float32", None, "scalar", (scalar,))

    def forget(self, result: Value) -> None:
        """Removes tensors that the result does not depend on: they have no gradient."""
        if self.tensors:
            live = _words(result.text)
            for line in reversed(self.lines):
                name, _, text = line[len("let ") :].partition(" = ")
                if name in live:
                    live |= _words(text)
            self.tensors = [t for t in self.tensors if t.name in live]
            self.lines = [line for line in self.lines if line[len("let ") :].partition(" = ")[0] in live]

    def text(self, result: Value) -> str:
        # Calls pass the values of scalars, so the text does not depend on them.
        declared = [f"scalar {s.name} = 1.0;" for s in self.scalars.values()]
        declared += [t.declared for t in self.tensors]
        return "\n".join([*declared, *self.lines, result.text])


def _words(text: str) -> set[str]:
    for sign in "[]();,-+!":
        text = text.replace(sign, " ")
    return set(text.split())


class Value(Operators):
    """A traced value."""

    __slots__ = ("element", "number", "place", "range", "smooth", "text", "trace")

    def __init__(self, trace: Trace, text: str, element: str, known: Any, number: int, smooth: bool, place: tuple[str, int] | None):
        self.trace, self.text, self.element, self.range, self.number = trace, text, element, known, number
        # True if gradients flow to it.
        self.smooth = smooth
        # An axis and a constant offset, if the value is just that.
        self.place = place

    def __repr__(self) -> str:
        return f"<traced {self.element} {self.text}>"

    @property
    def kind(self) -> str:
        """Its type in the expression language."""
        return KINDS[self.element]

    def lifted(self) -> Value:
        if getattr(CURRENT, "trace", None) is not self.trace:
            raise TracingError("a traced value is used outside of its function", "return it, and keep no traced value elsewhere")
        return self

    def overwrite(self, name: str, made: Value) -> Value:
        """Replaces this value by a result; every reference to it sees the change."""
        if made.element != self.element:
            raise TracingError(f"`{name}` in place would change the type of a value from {self.element} to {made.element}", "write `x = x + y`")
        self.text, self.range, self.number, self.smooth, self.place = made.text, made.range, made.number, made.smooth, made.place
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return applied(func, args, kwargs or {})


def _in_place(name: str) -> Callable:
    def method(self: Value, other: Any) -> Value:
        """Every reference to the value sees the change, as with PyTorch's in-place operators."""
        made = FUNCTIONS[name](self, other)
        return self.overwrite(name, made)

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(Value, f"__i{_name}__", _in_place(_name))


class Scalar(Operators):
    """A number that may change from call to call without a new plan: `scalar("cap", 30.0)`. To change it, set `value`."""

    def __init__(self, name: str, value: float):
        if not name.isidentifier() or len(name) > 64:
            raise one("scalar", repr(name), "a name of 1 to 64 letters, digits and _ that does not begin with a digit")
        self.name = name
        self.value = value

    @property
    def value(self) -> float:
        """The number that calls read."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        if getattr(value, "requires_grad", False):
            raise one(f"scalar {self.name}", "a tensor that requires grad", "a number: a scalar has no gradient; capture the tensor itself, or pass `.item()`")
        self._value = float(value)

    def __repr__(self) -> str:
        return f"scalar({self.name!r}, {self.value!r})"

    def lifted(self) -> Value:
        return current(f"the scalar {self.name}").scalar(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return applied(func, args, kwargs or {})


class Array:
    """A NumPy array, or an object with its interface, that a function can index: NumPy arrays themselves accept only numbers as indices."""

    def __init__(self, source: Any):
        self.source = source

    def __getitem__(self, at):
        return index(self.source, at, None, current("an array"))

    def __repr__(self) -> str:
        return f"array({self.source!r})"


def scalar(name: str, value: float) -> Scalar:
    """Declares a number that may change without a new plan."""
    return Scalar(name, value)


def array(source: Any) -> Array:
    """Makes a NumPy array readable in a score_mod or mask_mod: `array(slopes)[head]`."""
    return Array(source)


def applied(func: Any, args: tuple, kwargs: dict) -> Any:
    """Applies a PyTorch function to traced values."""
    if func is operator.getitem:
        # Under torch.export(strict=True), which cannot read its name.
        return called("getitem", "torch.getitem", args, kwargs)
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if name.endswith("_") and not name.endswith("__"):
        raise TracingError(f"torch's `{name}` works in place", f"use torch.{name[:-1]} and its result")
    known = name.strip("_") in FUNCTIONS or (name.strip("_") in REDUCTIONS and any(isinstance(x, Unread) for x in args))
    if not known:
        raise TracingError(f"torch's `{name}` is not supported in a score_mod or mask_mod", instead_of(name))
    if name == "where" and type(func).__name__ == "method_descriptor":
        # As a method it has the condition second.
        return Operators.where(*args, **kwargs)
    return called(name.strip("_"), f"torch.{name}", args, kwargs)


DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "bool": "bool"}
# Integers of other widths are read as i32: int64 elements are checked first, and the other types fit.
CONVERTED = {"int64": "i32", "int16": "i32", "int8": "i32", "uint8": "i32"}
# The element types that each declared type can represent.
HELD = {
    "f32": ("float32", "float16", "bfloat16"), "f16": ("float16",), "bf16": ("bfloat16",), "i32": ("int32", *CONVERTED), "bool": ("bool",),
}  # fmt: skip


def _element_of(source: Any) -> str:
    name = str(source.dtype).rsplit(".", 1)[-1]
    if name not in KINDS:
        raise TracingError(f"a tensor of {name} is read", f"first convert it to one of {', '.join(KINDS)}, for instance with `.float()`")
    return name


def dtype_of(source: Any) -> str:
    """Returns the element type that a tensor is declared with."""
    name = _element_of(source)
    return DTYPES.get(name) or CONVERTED[name]


def trace(fn: Callable, prefix: str, with_score: bool) -> Traced:
    """Runs a score_mod (`score, b, h, q_idx, kv_idx`) or a mask_mod (`b, h, q_idx, kv_idx`) once."""
    trace = Trace(prefix)
    before, CURRENT.trace = getattr(CURRENT, "trace", None), trace
    try:
        places = [trace.value(axis, "int64", (0, I32[1]), "axis", (n,), place=(axis, 0)) for n, axis in enumerate(AXES)]
        score = [trace.value("score", "float32", None, "anything", smooth=True)] if with_score else []
        result = _run(fn, (*score, *places))
        what = "a score_mod" if with_score else "a mask_mod"
        if isinstance(result, (bool, int, float)):
            result = trace.literal(float(result) if with_score else bool(result))
        if isinstance(result, Operators):
            result = result.lifted()
        else:
            result = _tensor_result(trace, result, what)
        if with_score and result.kind != "f32":
            result = FUNCTIONS["float"](result).lifted()
        if not with_score and result.kind != "bool":
            raise TracingError(f"{what} returns a number", "return a bool: compare with something")
        trace.forget(result)
        ranges = Ranges(trace.steps, trace.unsure) if trace.unsure else None
        return Traced(trace.text(result), tuple(trace.tensors), tuple(trace.scalars.values()), ranges)
    finally:
        CURRENT.trace = before


def _run(fn: Callable, args: tuple) -> Any:
    """Runs the function. With PyTorch loaded, it rejects random numbers and autograd functions with custom gradients: a text cannot express either."""
    if table.compiling():
        table.followed(fn, len(args) > len(AXES))
        return fn(*args)
    if "torch" not in sys.modules:
        return fn(*args)
    from .watch import watched

    return watched(fn, args)


def _tensor_result(trace: Trace, result: Any, what: str) -> Value:
    """Reads a one-element tensor that does not depend on the position, such as `q_idx.new_ones(())`."""
    if hasattr(result, "numel") and hasattr(result, "dtype") and result.numel() == 1:
        return trace.tensor(result, tuple(0 for _ in result.shape), [])
    if isinstance(result, Unread):
        raise TracingError(f"{what} returns a row of a tensor", "index every axis, or reduce the row, for instance by `.sum()`")
    raise TracingError(f"{what} returns {type(result).__name__}", "return a value made of its arguments")
