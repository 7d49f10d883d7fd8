"""What operators and functions are in the library's language: numbers as Python and PyTorch mean them."""

from __future__ import annotations

import math
import threading
from typing import Any, Callable

from .errors import TracingError

_I32 = range(-(2**31), 2**31)


def constant(x: bool | int | float) -> str:
    """A number or a truth value of Python's as text."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        if x not in _I32:
            raise TracingError(f"the whole number {x} is past an i32", "write it as a float")
        return str(x) if x >= 0 else f"(0 - {-x})" if x > -(2**31) else f"(0 - {2**31 - 1} - 1)"
    # As a key, a number is a constant to a compiler that follows, and no input of its graph.
    text = repr(list({float(x): None})[0])  # noqa: RUF015
    if text == "nan":
        return text
    return f"(-{text[1:]})" if text.startswith("-") else text


def _refuse(what: str, instead: str) -> Callable:
    def refused(self, *args, **kwargs):
        raise TracingError(what, instead)

    return refused


_VALUE = "it is read from the traced value, which has none while a function is traced"
_IF = "use torch.where(condition, x, y) for a choice, and & | ~ for `and`, `or`, `not` and chained comparisons"


class Operators:
    """Everything that can be done with a traced value by Python's operators and by methods."""

    __slots__ = ()
    # NumPy leaves operators to us.
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def lifted(self):
        raise NotImplementedError

    __bool__ = _refuse("a traced value is taken for true or false", _IF)
    __int__ = __index__ = _refuse("a traced value is taken for a number or an index", f"{_VALUE}; index tensors by q_idx, kv_idx, b and h as they are, and NumPy arrays through sdpa.array(...)")
    __float__ = __complex__ = _refuse("a traced value is taken for a number", _VALUE)
    # No `__len__`: PyTorch asks every index for its own, and goes on where there is none.
    __iter__ = _refuse("a traced value is taken for a sequence", "it is one number")
    __getitem__ = _refuse("a traced value is indexed", "it is one number")
    __array__ = _refuse("a traced value is taken for an index or an array of NumPy's", f"{_VALUE}; make NumPy arrays readable by sdpa.array(...)")
    item = tolist = numpy = cpu = cuda = _refuse("`.item()` or its like on a traced value", f"{_VALUE}; take numbers out of tensors before, or read tensors by index")
    detach = backward = requires_grad_ = _refuse("autograd on a traced value", "captured tensors have their gradients by themselves")

    @property
    def shape(self):
        return ()

    @property
    def ndim(self):
        return 0

    @property
    def requires_grad(self):
        return False

    @property
    def dtype(self):
        import torch

        return {"f32": torch.float32, "i32": torch.int32, "bool": torch.bool}[self.lifted().kind]

    @property
    def device(self):
        import torch

        return torch.device("cpu")


class Partial:
    """A tensor that was indexed along some of its axes."""

    def __init__(self, source, taken: tuple, trace):
        self.source, self.taken, self.trace = source, taken, trace

    def __getitem__(self, at):
        return index(self.source, at, self.taken, self.trace)

    def _whole(self, *_args, **_kwargs):
        given, axes = len(self.taken), len(self.source.shape)
        raise TracingError(f"a tensor of {axes} axes is read with {given} of them", "index every axis, each by one of b, h, q_idx, kv_idx")

    def __getattr__(self, name):
        self._whole()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _whole
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __bool__ = _whole
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from .tracing import applied

        return applied(func, args, kwargs or {})


_GATHER = (
    "an index has to be one of b, h, q_idx, kv_idx, or one of these plus a constant: make the table a tensor over (q, k) or (head, q, k) before, "
    "`bias = table[:, buckets]`, and read it as `bias[h, q_idx, kv_idx]`, with its gradient"
)


def index(source, at, taken: tuple, trace):
    """An element of a captured tensor, or what is left of it to be indexed."""
    for one in at if isinstance(at, tuple) else (at,):
        if isinstance(one, Operators):
            place = one.lifted().place
            if place is None or place[1] < 0:
                raise TracingError("a tensor is indexed by something computed (a gather)", _GATHER)
            taken = (*taken, place)
        elif isinstance(one, int) and not isinstance(one, bool):
            taken = (*taken, one)
        else:
            raise TracingError(f"a tensor is indexed by {type(one).__name__}", _GATHER)
    shape = tuple(source.shape)
    if len(taken) > len(shape):
        raise TracingError(f"a tensor of {len(shape)} axes is indexed {len(taken)} times", "give one index for each axis")
    if len(taken) < len(shape):
        return Partial(source, taken, trace)
    places = [one for one in taken if isinstance(one, tuple)]
    for n in (n for n, one in enumerate(taken) if isinstance(one, int)):
        if not -shape[n] <= taken[n] < shape[n]:
            raise TracingError(f"index {taken[n]} of an axis of {shape[n]}", "an index within it")
    if len({axis for axis, _ in places}) < len(places):
        raise TracingError("a tensor is indexed twice by the same place", "take the diagonal before: `torch.diagonal(t)[q_idx]`")
    return trace.tensor(source, tuple(one if isinstance(one, int) else None for one in taken), places)


def value(x: Any, trace):
    """A value of the trace, or a number as it is."""
    if type(x) in _KINDS:
        return x
    if isinstance(x, Operators):
        return x.lifted()
    if isinstance(x, (bool, int, float)):
        return next(kind(x) for kind in (bool, int, float) if isinstance(x, kind))
    if isinstance(x, Partial):
        x._whole()
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        if x.shape == () and type(x).__module__ == "numpy":
            return value(x.item(), trace)
        if math.prod(x.shape) == 1:
            return trace.tensor(x, tuple(0 for _ in x.shape), [])
        raise TracingError(f"a tensor of shape {tuple(x.shape)} is used as one number", "index it: by b, h, q_idx, kv_idx")
    raise TracingError(f"{type(x).__name__} is used as a number", "numbers, traced values and indexed tensors can be")


# Numbers of Python's, and what they are in the language.
_KINDS = {bool: "bool", int: "i32", float: "f32"}
_NUMBERS = frozenset(_KINDS)
CURRENT = threading.local()


def current(what: str):
    """The trace that is being made."""
    trace = getattr(CURRENT, "trace", None)
    if trace is None:
        raise TracingError(f"{what} is used where nothing is traced", "use it in a score_mod or mask_mod")
    return trace


def _trace_of(args: tuple):
    return current("a traced value")


def _kind(x) -> str:
    return _KINDS.get(type(x)) or x.kind


def _positive(x) -> bool:
    return x >= 0 if type(x) in _NUMBERS else x.positive


def _as(x, kind: str, trace):
    """A value as another kind: truth values are 0 and 1, whole numbers may be floats."""
    if type(x) in _NUMBERS:
        return bool(x) if kind == "bool" else int(x) if kind == "i32" else float(x)
    have = x.kind
    if have == kind:
        return x
    if have == "bool":
        return trace.let(f"select({x.text}, 1, 0)" if kind == "i32" else f"select({x.text}, 1.0, 0.0)", kind, True)
    if kind == "bool":
        return trace.let(f"{x.text} != {constant(0 if have == 'i32' else 0.0)}", "bool")
    return trace.let(f"{kind}({x.text})", kind, x.positive)


def as_kind(x, kind: str, trace) -> str:
    """The text of a value as another kind."""
    made = _as(x, kind, trace)
    return constant(made) if type(made) in _NUMBERS else made.text


def _numbers(x, y) -> str:
    """The kind that two numbers have together: of truth values, whole numbers."""
    return "f32" if "f32" in (_kind(x), _kind(y)) else "i32"


def _folded(x, y) -> bool:
    return type(x) in _NUMBERS and type(y) in _NUMBERS


def _binary(sign: str, python: Callable, keeps: Callable[[bool, bool], bool]) -> Callable:
    def made(x, y, *, alpha=1, out=None):
        trace = _trace_of((x, y))
        x, y = value(x, trace), value(y, trace)
        if alpha != 1:
            y = FUNCTIONS["mul"](y, alpha)
        if out is not None:
            raise TracingError("`out=` is given", "use what is returned")
        if _folded(x, y):
            return python(x, y)
        if _kind(x) == _kind(y) == "bool":
            raise TracingError(f"truth values are joined by `{sign}`", "use & | ~, or convert one with `.float()` or `.int()`")
        kind = _numbers(x, y)
        made = trace.let(f"{as_kind(x, kind, trace)} {sign} {as_kind(y, kind, trace)}", kind, keeps(_positive(x), _positive(y)))
        made.place = _shifted(sign, x, y)
        return made

    return made


def _shifted(sign: str, x, y) -> tuple[str, int] | None:
    """A place and a constant together."""
    if sign == "+" and isinstance(x, int):
        x, y = y, x
    place = getattr(x, "place", None)
    if place is None or sign not in "+-" or isinstance(y, bool) or not isinstance(y, int):
        return None
    return place[0], place[1] + (y if sign == "+" else -y)


def _compare(sign: str, python: Callable) -> Callable:
    def made(x, y):
        trace = _trace_of((x, y))
        x, y = value(x, trace), value(y, trace)
        if _folded(x, y):
            return python(x, y)
        if _kind(x) == _kind(y) == "bool" and sign in ("==", "!="):
            differ = _xor(x, y)
            return differ if sign == "!=" else _not(differ)
        kind = _numbers(x, y)
        return trace.let(f"{as_kind(x, kind, trace)} {sign} {as_kind(y, kind, trace)}", "bool")

    return made


def _logic(sign: str, python: Callable, strict: bool) -> Callable:
    def made(x, y):
        trace = _trace_of((x, y))
        x, y = value(x, trace), value(y, trace)
        if _folded(x, y):
            return python(bool(x), bool(y))
        if strict and {_kind(x), _kind(y)} != {"bool"}:
            raise TracingError(f"`{sign}` joins numbers bit by bit", "only truth values are joined: compare first, `(x & 1) != 0` is `x % 2 != 0`")
        x, y = as_kind(x, "bool", trace), as_kind(y, "bool", trace)
        neutral = "true" if sign == "&" else "false"
        if neutral in (x, y):
            return trace.let(f"({y if x == neutral else x})", "bool")
        return trace.let(f"{x} {sign} {y}", "bool")

    return made


def _not(x):
    trace = _trace_of((x,))
    x = value(x, trace)
    if isinstance(x, (bool, int, float)):
        return not x
    return trace.let(f"!{as_kind(x, 'bool', trace)}", "bool")


def _invert(x):
    trace = _trace_of((x,))
    x = value(x, trace)
    if _kind(x) != "bool":
        raise TracingError("`~` of a number", "it takes truth values: compare first")
    return _not(x)


def _xor(x, y):
    trace = _trace_of((x, y))
    x, y = (as_kind(value(one, trace), "bool", trace) for one in (x, y))
    return trace.let(f"({x} & !{y}) | (!{x} & {y})", "bool")


def _real(name: str, python: Callable, keeps: bool = False, text: str | None = None) -> Callable:
    """A function of a float; a whole number becomes one."""

    def made(x, *, out=None):
        trace = _trace_of((x,))
        x = value(x, trace)
        if isinstance(x, (bool, int, float)):
            return python(float(x))
        return trace.let((text or f"{name}({{0}})").format(as_kind(x, "f32", trace)), "f32", keeps)

    return made


def _either(name: str, python: Callable, keeps: Callable[[bool], bool], text: str | None = None) -> Callable:
    """A function of a float, or of a whole number that stays one."""

    def made(x):
        trace = _trace_of((x,))
        x = value(x, trace)
        if isinstance(x, (bool, int, float)):
            return python(x)
        kind = "i32" if _kind(x) != "f32" else "f32"
        return trace.let((text or f"{name}({{0}})").format(as_kind(x, kind, trace)), kind, keeps(_positive(x)))

    return made


def _where(condition, x=None, y=None):
    trace = _trace_of((condition, x, y))
    if x is None or y is None:
        raise TracingError("torch.where with a condition alone", "give both values: torch.where(condition, x, y)")
    condition, x, y = value(condition, trace), value(x, trace), value(y, trace)
    if isinstance(condition, (bool, int, float)):
        return x if condition else y
    test = as_kind(condition, "bool", trace)
    if _kind(x) == _kind(y) == "bool":
        x, y = as_kind(x, "bool", trace), as_kind(y, "bool", trace)
        return trace.let(f"({test} & {x}) | (!{test} & {y})", "bool")
    kind = _numbers(x, y)
    return trace.let(f"select({test}, {as_kind(x, kind, trace)}, {as_kind(y, kind, trace)})", kind, _positive(x) and _positive(y))


def _opposed(r: str, y: str, zero: str) -> str:
    return f"(({r} < {zero}) & ({y} > {zero})) | (({r} > {zero}) & ({y} < {zero}))"


def _floor_divide(x, y, *, out=None):
    """Toward −∞, as Python and PyTorch mean it; the language's goes toward zero."""
    trace = _trace_of((x, y))
    x, y = value(x, trace), value(y, trace)
    if _folded(x, y):
        return x // y
    kind = _numbers(x, y)
    a, b = as_kind(x, kind, trace), as_kind(y, kind, trace)
    if kind == "f32":
        return trace.let(f"floor({a} / {b})", "f32", _positive(x) and _positive(y))
    quotient = trace.let(f"{a} / {b}", "i32", True)
    if _positive(x) and _positive(y):
        return quotient
    rest = trace.let(f"{a} % {b}", "i32").text
    below = trace.let(f"{rest} < 0" if isinstance(y, int) and y > 0 else _opposed(rest, b, "0"), "bool").text
    return trace.let(f"select({below}, {quotient.text} - 1, {quotient.text})", "i32")


def _remainder(x, y, *, out=None):
    """With the sign of the divisor, as Python and PyTorch mean it; the language's has that of the dividend."""
    trace = _trace_of((x, y))
    x, y = value(x, trace), value(y, trace)
    if _folded(x, y):
        return x % y
    kind = _numbers(x, y)
    a, b = as_kind(x, kind, trace), as_kind(y, kind, trace)
    rest = trace.let(f"{a} % {b}", kind, _positive(x))
    if _positive(x) and _positive(y):
        return rest
    zero = constant(0 if kind == "i32" else 0.0)
    known = isinstance(y, (int, float)) and y > 0
    other = trace.let(f"{rest.text} < {zero}" if known else _opposed(rest.text, b, zero), "bool").text
    return trace.let(f"select({other}, {rest.text} + {b}, {rest.text})", kind, known)


def _fmod(x, y, *, out=None):
    trace = _trace_of((x, y))
    x, y = value(x, trace), value(y, trace)
    kind = _numbers(x, y)
    return trace.let(f"{as_kind(x, kind, trace)} % {as_kind(y, kind, trace)}", kind, _positive(x))


def _divide(x, y, *, rounding_mode=None, out=None):
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    trace = _trace_of((x, y))
    x, y = value(x, trace), value(y, trace)
    if rounding_mode == "trunc":
        kind = _numbers(x, y)
        quotient = trace.let(f"{as_kind(x, kind, trace)} / {as_kind(y, kind, trace)}", kind, _positive(x) and _positive(y))
        return quotient if kind == "i32" else _trunc(quotient)
    if _folded(x, y):
        return x / y
    return trace.let(f"{as_kind(x, 'f32', trace)} / {as_kind(y, 'f32', trace)}", "f32", _positive(x) and _positive(y))


def _trunc(x):
    trace = _trace_of((x,))
    x = value(x, trace)
    if _kind(x) != "f32":
        return x
    return trace.let(f"select({x.text} < 0.0, ceil({x.text}), floor({x.text}))", "f32", x.positive)


def _power(x, y, *, out=None):
    trace = _trace_of((x, y))
    x, y = value(x, trace), value(y, trace)
    if _folded(x, y):
        return x**y
    if isinstance(y, (int, float)) and y == 2:
        return _either("square", lambda x: x * x, lambda _: True)(x)
    if isinstance(y, int) and _kind(x) == "i32" and 0 <= y <= 16:
        product = 1
        for _ in range(y):
            product = FUNCTIONS["mul"](x, product)
        return product
    if _numbers(x, y) == "i32":
        raise TracingError("a power of whole numbers", "a constant exponent from 0 to 16, or convert with `.float()`")
    return trace.let(f"pow({as_kind(x, 'f32', trace)}, {as_kind(y, 'f32', trace)})", "f32", _positive(x))


def _extreme(name: str, python: Callable) -> Callable:
    def made(x, y=None, *, out=None):
        if y is None:
            raise TracingError(f"`{name}` of one value", f"give two: torch.{name}imum(x, y)")
        trace = _trace_of((x, y))
        x, y = value(x, trace), value(y, trace)
        if _folded(x, y):
            return python(x, y)
        kind = _numbers(x, y)
        positive = (_positive(x) or _positive(y)) if name == "max" else (_positive(x) and _positive(y))
        return trace.let(f"{name}({as_kind(x, kind, trace)}, {as_kind(y, kind, trace)})", kind, positive)

    return made


def _clamp(x, min=None, max=None, *, out=None):  # noqa: A002 - PyTorch's names
    for bound, name in ((min, "max"), (max, "min")):
        x = x if bound is None else _extreme(name, {"max": builtin_max, "min": builtin_min}[name])(x, bound)
    return x


builtin_max, builtin_min = max, min


def _cast(kind: str) -> Callable:
    def made(x, *args, **kwargs):
        trace = _trace_of((x,))
        return _as(value(x, trace), kind, trace)

    return made


def _to(x, *args, **kwargs):
    """To a type; devices and other ways of keeping a tensor do not matter here. Floats of every width are f32, as scores are."""
    for one in (*args, kwargs.get("dtype")):
        name = str(one).rsplit(".", 1)[-1]
        if isinstance(one, Operators):
            name = {"f32": "float32", "i32": "int32", "bool": "bool"}[one.lifted().kind]
        if name in ("float32", "float16", "bfloat16", "float64", "float", "half", "double"):
            return _cast("f32")(x)
        if name in ("int32", "int64", "int16", "int8", "uint8", "int", "long", "short"):
            return _cast("i32")(x)
        if name == "bool":
            return _cast("bool")(x)
    return x


def _same(x, *args, **kwargs):
    return x


def _filled(default):
    def made(x, fill=default, *args, dtype=None, **kwargs):
        trace = _trace_of((x,))
        fill = default if default is not None else fill
        fill = value(fill, trace)
        kind = _kind(x.lifted()) if isinstance(x, Operators) else "f32"
        name = str(dtype).rsplit(".", 1)[-1]
        if dtype is not None:
            kind = "bool" if name == "bool" else "f32" if "float" in name else "i32"
        made = _as(fill, kind, trace)
        return trace.literal(made, kind) if isinstance(made, (bool, int, float)) else made

    return made


def _new(default):
    def made(x, *size, dtype=None, **kwargs):
        fill = size[1] if default is None and len(size) > 1 else kwargs.get("fill_value", default)
        size = size[0] if size and isinstance(size[0], (tuple, list)) else size
        if default is not None and any(n != 1 for n in size):
            raise TracingError(f"a tensor of shape {tuple(size)} is made of a traced value", "one number: ()")
        return _filled(None)(x, fill, dtype=dtype)

    return made


def _shift(left: bool) -> Callable:
    def made(x, by):
        if not isinstance(by, int) or not 0 <= by < 31:
            raise TracingError("a shift by something that is no constant", "a constant from 0 to 30")
        return FUNCTIONS["mul"](x, 1 << by) if left else _floor_divide(x, 1 << by)

    return made


def _get(tensor, at):
    return index(tensor, at, (), _trace_of((tensor, at)))


def _of_two(both: Callable[[bool, bool], bool], sign: str, python: Callable) -> Callable:
    return _binary(sign, python, both)


_all = lambda x, y: x and y  # noqa: E731
_add = _of_two(_all, "+", lambda x, y: x + y)
_sub = _of_two(lambda x, y: False, "-", lambda x, y: x - y)
_mul = _of_two(_all, "*", lambda x, y: x * y)

FUNCTIONS: dict[str, Callable] = {
    "add": _add, "sub": _sub, "subtract": _sub, "mul": _mul, "multiply": _mul,
    "div": _divide, "divide": _divide, "true_divide": _divide, "truediv": _divide,
    "floor_divide": _floor_divide, "floordiv": _floor_divide, "remainder": _remainder, "mod": _remainder, "fmod": _fmod,
    "pow": _power, "float_power": _power,
    "radd": lambda x, y: _add(y, x), "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha), "rmul": lambda x, y: _mul(y, x),
    "rtruediv": lambda x, y: _divide(y, x), "rdiv": lambda x, y: _divide(y, x), "rfloordiv": lambda x, y: _floor_divide(y, x),
    "rmod": lambda x, y: _remainder(y, x), "rpow": lambda x, y: _power(y, x),
    "eq": _compare("==", lambda x, y: x == y), "ne": _compare("!=", lambda x, y: x != y), "not_equal": _compare("!=", lambda x, y: x != y),
    "lt": _compare("<", lambda x, y: x < y), "less": _compare("<", lambda x, y: x < y),
    "le": _compare("<=", lambda x, y: x <= y), "less_equal": _compare("<=", lambda x, y: x <= y),
    "gt": _compare(">", lambda x, y: x > y), "greater": _compare(">", lambda x, y: x > y),
    "ge": _compare(">=", lambda x, y: x >= y), "greater_equal": _compare(">=", lambda x, y: x >= y),
    "and": _logic("&", lambda x, y: x and y, True), "or": _logic("|", lambda x, y: x or y, True),
    "rand": _logic("&", lambda x, y: x and y, True), "ror": _logic("|", lambda x, y: x or y, True),
    "bitwise_and": _logic("&", lambda x, y: x and y, True), "bitwise_or": _logic("|", lambda x, y: x or y, True),
    "logical_and": _logic("&", lambda x, y: x and y, False), "logical_or": _logic("|", lambda x, y: x or y, False),
    "xor": _xor, "rxor": _xor, "bitwise_xor": _xor, "logical_xor": _xor, "logical_not": _not, "invert": _invert, "bitwise_not": _invert,
    "lshift": _shift(True), "rshift": _shift(False),
    "neg": _either("-", lambda x: -x, lambda _: False, "-{0}"), "negative": _either("-", lambda x: -x, lambda _: False, "-{0}"), "pos": _same, "positive": _same,
    "abs": _either("abs", abs, lambda _: True), "absolute": _either("abs", abs, lambda _: True),
    "square": _either("square", lambda x: x * x, lambda _: True),
    "sqrt": _real("sqrt", math.sqrt, True), "rsqrt": _real("rsqrt", lambda x: x**-0.5, True), "exp": _real("exp", math.exp, True),
    "exp2": _real("exp2", lambda x: 2.0**x, True, f"exp({{0}} * {math.log(2)!r})"), "expm1": _real("expm1", math.expm1, False, "exp({0}) - 1.0"),
    "log": _real("log", math.log), "log2": _real("log2", math.log2, False, f"log({{0}}) * {1 / math.log(2)!r}"),
    "log10": _real("log10", math.log10, False, f"log({{0}}) * {1 / math.log(10)!r}"), "log1p": _real("log1p", math.log1p, False, "log({0} + 1.0)"),
    "sin": _real("sin", math.sin), "cos": _real("cos", math.cos), "tan": _real("tan", math.tan, False, "sin({0}) / cos({0})"),
    "tanh": _real("tanh", math.tanh), "erf": _real("erf", math.erf), "sigmoid": _real("sigmoid", lambda x: 1 / (1 + math.exp(-x)), True),
    "reciprocal": _real("reciprocal", lambda x: 1 / x, False, "1.0 / {0}"), "relu": lambda x: _extreme("max", builtin_max)(x, 0),
    "floor": _real("floor", math.floor), "ceil": _real("ceil", math.ceil), "trunc": _trunc, "fix": _trunc,
    "minimum": _extreme("min", builtin_min), "maximum": _extreme("max", builtin_max), "fmin": _extreme("min", builtin_min), "fmax": _extreme("max", builtin_max),
    "min": _extreme("min", builtin_min), "max": _extreme("max", builtin_max), "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min), "clamp_max": lambda x, max: _clamp(x, None, max),
    "where": _where, "getitem": _get,
    "float": _cast("f32"), "double": _cast("f32"), "half": _cast("f32"), "bfloat16": _cast("f32"), "int": _cast("i32"), "long": _cast("i32"),
    "bool": _cast("bool"), "to": _to, "type": _to, "type_as": _to,
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _filled(None),
    "new_zeros": _new(0), "new_ones": _new(1), "new_full": _new(None), "new_tensor": lambda x, data, **kwargs: _filled(None)(x, data, **kwargs),
    "clone": _same, "contiguous": _same,
}


def _operator(name: str) -> Callable:
    def method(self, *args, **kwargs):
        return FUNCTIONS[name](self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow and or xor rand ror rxor "
    "eq ne lt le gt ge neg pos abs invert lshift rshift floor ceil trunc"
).split():
    setattr(Operators, f"__{_name}__", _operator(_name))
for _name in FUNCTIONS:
    if _name.isidentifier() and not hasattr(Operators, _name) and _name not in ("and", "or", "getitem"):
        setattr(Operators, _name, _operator(_name))
