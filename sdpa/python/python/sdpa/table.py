"""Operators and functions in the library's language, with PyTorch's meaning."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, Callable

from .dtypes import BITS, KINDS, LIMITS, RULES, category, of_number, promoted, with_number, within
from .errors import TracingError

_I32 = range(-(2**31), 2**31)


def rounded(x: float) -> float:
    """The nearest f32, ties to even. A text of decimals that is read as f32 would be rounded from other decimals."""
    if x == 0.0 or x != x or x in (math.inf, -math.inf):
        return x
    step = max(math.frexp(x)[1] - 24, -149)
    return math.ldexp(float(round(math.ldexp(x, -step))), step)


def constant(x: bool | int | float) -> str:
    """A number or a truth value of Python's as text."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        if x not in _I32:
            raise TracingError(f"the whole number {x} is past an i32", "write it as a float")
        return str(x) if x >= 0 else f"(0 - {-x})" if x > -(2**31) else f"(0 - {2**31 - 1} - 1)"
    near = rounded(float(x))
    if abs(near) > _GREATEST and not math.isinf(near):
        raise TracingError(f"the number {x!r} is past an f32", "use float('inf') or torch.finfo(torch.float32).max")
    # As a key, a number is a constant to a compiler that follows, and no input of its graph.
    text = repr(list({near: None})[0])  # noqa: RUF015
    if text == "nan":
        return text
    return f"(-{text[1:]})" if text.startswith("-") else text


_GREATEST = (2.0 - 2.0**-23) * 2.0**127


def compiling() -> bool:
    """True where PyTorch's compiler follows. `flex` puts PyTorch's own function here."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def followed(fn: Callable, with_score: bool) -> None:
    """Looks at a function that PyTorch's compiler follows. `flex` puts the function of `follow` here."""


def _refuse(what: str, instead: str) -> Callable:
    def refused(self, *args, **kwargs):
        raise TracingError(what, instead)

    return refused


_VALUE = "it is read from the traced value, which has none while a function is traced"
_IF = "use torch.where(condition, x, y) for a choice, and & | ~ for `and`, `or`, `not` and chained comparisons"


class _NoAttribute(TracingError, AttributeError):
    """A traced value lacks an attribute: `hasattr` is false, and everything else is a `TracingError`."""


class Operators:
    """Everything that can be done with a traced value by Python's operators and by methods."""

    __slots__ = ()
    __hash__ = object.__hash__

    def lifted(self):
        raise NotImplementedError

    def __getattr__(self, name):
        # Protocols of other libraries are looked for by names like these.
        if name.startswith("_"):
            raise AttributeError(name)
        raise _NoAttribute(f"`.{name}` of a traced value has no counterpart", f"there are {', '.join(sorted(FUNCTIONS))}")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        made = FUNCTIONS.get(_UFUNCS.get(ufunc.__name__, "")) if method == "__call__" and not kwargs else None
        if made is None:
            name = ufunc.__name__
            raise TracingError(f"NumPy's `{name}` is applied to a traced value", f"use torch.{name}, or the method: `x.{name}()`")
        return made(*inputs)

    __bool__ = _refuse("a traced value is taken for true or false", _IF)
    __int__ = __index__ = _refuse("a traced value is taken for a number or an index", f"{_VALUE}; index tensors by q_idx, kv_idx, b and h as they are, and NumPy arrays through sdpa.array(...)")
    __float__ = __complex__ = _refuse("a traced value is taken for a number", _VALUE)
    # No `__len__`: PyTorch asks every index for its own, and goes on where there is none.
    __iter__ = _refuse("a traced value is taken for a sequence", "it is one number")
    __getitem__ = _refuse("a traced value is indexed", "it is one number")
    __matmul__ = __rmatmul__ = _refuse("`@` of a traced value", "it is one number: multiply by `*`")
    __round__ = _refuse("a traced value is rounded to the nearest", "use torch.floor(x + 0.5)")
    __divmod__ = __rdivmod__ = _refuse("`divmod` of a traced value", "use // and %")
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

        return getattr(torch, self.lifted().element)

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
    if type(x) in _NUMBERS:
        if type(x) is int and abs(x) >= 2**128:
            raise TracingError(f"a whole number of {x.bit_length()} bits is past an f32", "use float('inf')")
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


_NUMBERS = frozenset((bool, int, float))
# The types that an i32 holds more than.
_NARROW = ("uint8", "int8", "int16")
CURRENT = threading.local()


def current(what: str):
    """The trace that is being made."""
    trace = getattr(CURRENT, "trace", None)
    if trace is None:
        raise TracingError(f"{what} is used where nothing is traced", "use it in a score_mod or mask_mod")
    return trace


def _trace():
    return current("a traced value")


def _one(x: Any, out: Any = None):
    """The trace, and an operand as a value of it."""
    if out is not None:
        raise TracingError("`out=` is given", "use the result")
    trace = _trace()
    x = value(x, trace)
    return trace, trace.literal(x) if type(x) in _NUMBERS else x


def _two(x: Any, y: Any, out: Any = None):
    """The trace, and two operands: one of them at least is a value of it, the other may be a number."""
    trace, first = _one(x, out)
    y = value(y, trace)
    return trace, first if type(y) in _NUMBERS else value(x, trace), y


def _element(x) -> str:
    return of_number(x) if type(x) in _NUMBERS else x.element


def _kind(x) -> str:
    return KINDS[_element(x)]


def _range(x):
    if type(x) in _NUMBERS:
        return (x, x) if x == x else None
    return x.range


def _positive(x) -> bool:
    known = _range(x)
    return known is not None and known[0] >= 0


def _may_be_nan(x) -> bool:
    return _range(x) is None


def _smooth(*of) -> bool:
    """True where a gradient may flow to one of these."""
    return any([x.smooth for x in of if type(x) not in _NUMBERS])


def _together(x, y) -> str:
    """The type of an operation on both, as PyTorch promotes them. Numbers of Python's have to fit it."""
    if type(x) in _NUMBERS or type(y) in _NUMBERS:
        of, number = (y, x) if type(x) in _NUMBERS else (x, y)
        element = of_number(number) if type(of) in _NUMBERS else with_number(of.element, number)
        if element in _NARROW and not within((number, number), element):
            raise TracingError(f"the number {number} does not fit {element}", "convert the tensor to int32 or int64 before, or compute with floats")
        return element
    return promoted(x.element, y.element)


def _as(x, element: str, trace):
    """A value as another type that holds all of it: what promotion does."""
    kind = KINDS[element]
    if type(x) in _NUMBERS:
        return bool(x) if kind == "bool" else int(x) if kind == "i32" else float(x)
    have = x.kind
    if have == kind:
        return x if x.element == element else trace.same(x, element)
    if have == "bool":
        return trace.make(f"select({x.text}, 1, 0)" if kind == "i32" else f"select({x.text}, 1.0, 0.0)", element, "either", x)
    if kind == "bool":
        return trace.make(f"{x.text} != {constant(0 if have == 'i32' else 0.0)}", "bool", "either", False, True)
    if kind == "i32":
        return trace.make(f"i32({x.text})", element, "long" if element == "int64" else "integer", x)
    return trace.make(f"f32({x.text})", element, "either", x)


def as_text(x, element: str, trace) -> str:
    """The text of a value as another type that holds all of it."""
    made = _as(x, element, trace)
    return constant(made) if type(made) in _NUMBERS else made.text


def _wrapped(x, element: str, trace):
    """An integer in the bits of a narrower type."""
    if within(x.range, element):
        return trace.same(x, element)
    size = 2 ** BITS[element]
    shift = 0 if LIMITS[element][0] == 0 else size // 2
    low = f"({x.text} + {shift})" if shift else x.text
    rest = f"{low} % {size}" if _positive(x) and x.range[1] + shift <= LIMITS["int32"][1] else f"({low} % {size} + {size}) % {size}"
    return trace.make(f"{rest} - {shift}" if shift else rest, element, "wrapped", x)


def _computed(text: str, element: str, rule: str, trace, *operands):
    """A number of a type, which wraps in it where it is narrow."""
    if element in _NARROW and not within(RULES[rule](*[_range(x) for x in operands]), element):
        return _wrapped(trace.make(text, "int32", rule, *operands), element, trace)
    return trace.make(text, element, rule, *operands)


def _no_truth(what: str, *of) -> None:
    if all([_element(x) == "bool" for x in of]):
        raise TracingError(f"truth values are joined by `{what}`" if len(of) > 1 else f"`{what}` of a truth value", "use & | ~, or convert one with `.float()` or `.int()`")


def _arithmetic(sign: str) -> Callable:
    def made(x, y, *, alpha=1, out=None):
        trace, x, y = _two(x, y, out)
        if sign == "-":
            _no_truth(sign, x)
            _no_truth(sign, y)
        _no_truth(sign, x, y)
        element = _together(x, y)
        if alpha != 1:
            if isinstance(alpha, float) and category(element) < 2:
                raise TracingError(f"alpha={alpha} scales integers", "a whole number, or convert with `.float()`")
            y = FUNCTIONS["mul"](_as(y, element, trace), alpha).lifted()
        a, b = _as(x, element, trace), _as(y, element, trace)
        made = _computed(f"{as_text(a, element, trace)} {sign} {as_text(b, element, trace)}", element, sign, trace, a, b)
        made.place = _shifted(sign, x, y, element)
        return made

    return made


def _shifted(sign: str, x, y, element: str) -> tuple[str, int] | None:
    """A place and a constant together."""
    if sign == "+" and isinstance(x, int):
        x, y = y, x
    place = getattr(x, "place", None)
    if place is None or sign not in "+-" or isinstance(y, bool) or not isinstance(y, int) or element not in ("int32", "int64"):
        return None
    return place[0], place[1] + (y if sign == "+" else -y)


def _compare(sign: str) -> Callable:
    def made(x, y, *, out=None):
        trace, x, y = _two(x, y, out)
        if _kind(x) == _kind(y) == "bool" and sign in ("==", "!="):
            differ = _xor(x, y)
            return differ if sign == "!=" else _not(differ)
        element = _together(x, y)
        element = "int32" if element == "bool" else element
        return trace.make(f"{as_text(x, element, trace)} {sign} {as_text(y, element, trace)}", "bool", "either", False, True)

    return made


def _logic(sign: str, strict: bool) -> Callable:
    def made(x, y, *, out=None):
        trace, x, y = _two(x, y, out)
        if strict:
            _bits(sign, x, y)
        x, y = as_text(x, "bool", trace), as_text(y, "bool", trace)
        neutral = "true" if sign == "&" else "false"
        text = f"{x} {sign} {y}" if neutral not in (x, y) else f"({y if x == neutral else x})"
        return trace.make(text, "bool", "either", False, True)

    return made


def _bits(sign: str, *of) -> None:
    if any(_kind(x) != "bool" for x in of):
        raise TracingError(f"`{sign}` joins numbers bit by bit", "only truth values are joined: compare first, `(x & 1) != 0` is `x % 2 != 0`")


def _not(x, *, out=None):
    trace, x = _one(x, out)
    return trace.make(f"!{as_text(x, 'bool', trace)}", "bool", "either", False, True)


def _invert(x, *, out=None):
    if _kind(_one(x, out)[1]) != "bool":
        raise TracingError("`~` of a number", "it takes truth values: compare first")
    return _not(x)


def _xor(x, y, *, out=None):
    trace, x, y = _two(x, y, out)
    x, y = (as_text(one, "bool", trace) for one in (x, y))
    return trace.make(f"({x} & !{y}) | (!{x} & {y})", "bool", "either", False, True)


def _xor_bits(x, y, *, out=None):
    trace, x, y = _two(x, y, out)
    _bits("^", x, y)
    return _xor(x, y)


def _real(name: str, rule: str = "anything", text: str | None = None) -> Callable:
    """A function of a float; other numbers become one."""

    def made(x, *, out=None):
        trace, x = _one(x, out)
        x = _as(x, _floating(x), trace)
        return trace.make((text or f"{name}({{0}})").format(x.text), x.element, rule, x, smooth=x.smooth)

    return made


def _floating(x) -> str:
    """The type of a quotient or of a function of floats."""
    return _element(x) if _kind(x) == "f32" else "float32"


def _expm1(x, *, out=None):
    """(eˣ − 1) = tanh(x / 2) · (eˣ + 1), which loses no digits near 0."""
    trace, x = _one(x, out)
    x = _as(x, _floating(x), trace)
    return trace.make(f"tanh(0.5 * {x.text}) * (exp({x.text}) + 1.0)", x.element, "anything", x, smooth=x.smooth)


def _log1p(x, *, out=None):
    """The logarithm of the rounded sum, and what rounding took of it, to the first order."""
    trace, x = _one(x, out)
    x = _as(x, _floating(x), trace)
    total = trace.make(f"{x.text} + 1.0", x.element, "anything", x, smooth=x.smooth).text
    lost = f"select(abs({x.text}) < 1.0, ({x.text} - ({total} - 1.0)) / {total}, 0.0)"
    return trace.make(f"log({total}) + {lost}", x.element, "anything", x, smooth=x.smooth)


def _logarithm(base: float) -> Callable:
    """A logarithm that is exact where it is a whole number: `floor(log2(8))` is 3. The choice has no gradient, so it is left out for scores and tensors."""

    def made(x, *, out=None):
        trace, x = _one(x, out)
        x = _as(x, _floating(x), trace)
        near = trace.make(f"log({x.text}) / {constant(math.log(base))}", x.element, "/", _real("log", "log")(x), math.log(base), smooth=x.smooth)
        if x.smooth:
            return near
        whole = trace.let(f"floor({near.text} + 0.5)")
        return trace.make(f"select(pow({base!r}, {whole}) == {x.text}, {whole}, {near.text})", x.element, "either", near)

    return made


def _sigmoid(x, *, out=None):
    """By the exponential that is at most 1: no digits are lost far below 0, and nothing overflows in the gradient."""
    trace, x = _one(x, out)
    x = _as(x, _floating(x), trace)
    small = trace.make(f"exp(select({x.text} < 0.0, {x.text}, -{x.text}))", x.element, "sigmoid", x, smooth=x.smooth).text
    return trace.make(f"select({x.text} < 0.0, {small}, 1.0) / (1.0 + {small})", x.element, "sigmoid", x, smooth=x.smooth)


def _either(name: str, rule: str, text: str | None = None) -> Callable:
    """A function of a float, or of an integer that stays one."""

    def made(x, *, out=None):
        trace, x = _one(x, out)
        _no_truth(name, x)
        return _computed((text or f"{name}({{0}})").format(x.text), x.element, rule, trace, x)

    return made


def _positive_sign(x, *, out=None):
    _, x = _one(x, out)
    _no_truth("+", x)
    return x


def _rounding(name: str) -> Callable:
    """A function of a float; an integer is as it is."""

    def made(x, *, out=None):
        trace, x = _one(x, out)
        _no_truth(name, x)
        return _copy(x) if x.kind == "i32" else trace.make(f"{name}({x.text})", x.element, name, x, smooth=False)

    return made


def _trunc(x, *, out=None):
    trace, x = _one(x, out)
    _no_truth("trunc", x)
    if x.kind == "i32":
        return _copy(x)
    # A truncated number is 0 or on the same side of it.
    return trace.make(f"select({x.text} < 0.0, ceil({x.text}), floor({x.text}))", x.element, "either", x, 0.0, smooth=False)


def _where(condition, x=None, y=None, *, out=None):
    if x is None or y is None:
        raise TracingError("torch.where with a condition alone", "give both values: torch.where(condition, x, y)")
    trace, condition = _one(condition, out)
    if condition.kind != "bool":
        raise TracingError("the condition of a choice is a number", "compare it: `x != 0`")
    x, y = value(x, trace), value(y, trace)
    if type(x) in _NUMBERS and type(y) in _NUMBERS:
        x = trace.literal(x)
    element, test = _together(x, y), condition.text
    a, b = as_text(x, element, trace), as_text(y, element, trace)
    if element == "bool":
        return trace.make(f"({test} & {a}) | (!{test} & {b})", "bool", "either", False, True)
    return trace.make(f"select({test}, {a}, {b})", element, "either", x, y)


def _masked_fill(x, mask, fill):
    trace, x = _one(x)
    fill = value(fill, trace)
    fits = category(_element(fill)) <= category(x.element) if type(fill) in _NUMBERS else promoted(fill.element, x.element) == x.element
    if not fits:
        raise TracingError(f"masked_fill puts a {_element(fill)} into {x.element}", "convert first: `x.float().masked_fill(...)`")
    return _where(mask, _of_type(fill, x.element, trace), x)


def _opposed(r: str, y: str, zero: str) -> str:
    return f"(({r} < {zero}) & ({y} > {zero})) | (({r} > {zero}) & ({y} < {zero}))"


def _quotient_of(sign: str, x, y, out) -> tuple:
    """Both operands of a division with a rest, their type, and their texts."""
    trace, x, y = _two(x, y, out)
    _no_truth(sign, x, y)
    element = _together(x, y)
    if category(element) == 1 and type(y) in _NUMBERS and y == 0:
        raise TracingError("an integer is divided by 0", "divide by another number, or convert with `.float()`")
    return trace, x, y, element, as_text(x, element, trace), as_text(y, element, trace)


def _floor_divide(x, y, *, out=None):
    """Toward −∞, as Python and PyTorch mean it; the language's goes toward zero."""
    trace, x, y, element, a, b = _quotient_of("//", x, y, out)
    if category(element) == 2:
        return _floor_divide_floats(trace, y, element, a, b)
    quotient = _computed(f"{a} / {b}", element, "div", trace, x, y)
    if _positive(x) and _positive(y):
        return quotient
    rest = trace.make(f"{a} % {b}", element, "rest", x, y).text
    below = trace.make(f"{rest} < 0" if isinstance(y, int) and y > 0 else _opposed(rest, b, "0"), "bool", "either", False, True).text
    return trace.make(f"select({below}, {quotient.text} - 1, {quotient.text})", element, "//", x, y)


def _floor_divide_floats(trace, y, element: str, a: str, b: str):
    """By the remainder, as PyTorch and Python do: a quotient that is rounded may be a whole number where the exact one is below it."""
    name = lambda text: trace.make(text, element, "anything", smooth=False).text  # noqa: E731
    known = type(y) in _NUMBERS and y != 0 and y == y
    rest = name(f"{a} % {b}")
    near = name(f"({a} - {rest}) / {b}")
    near = name(f"select({f'{rest} < 0.0' if known and y > 0 else _opposed(rest, b, '0.0')}, {near} - 1.0, {near})")
    whole = name(f"floor({near})")
    made = f"select({near} - {whole} > 0.5, {whole} + 1.0, {whole})"
    return trace.make(made if known else f"select({b} == 0.0, floor({a} / {b}), {made})", element, "anything", smooth=False)


def _remainder(x, y, *, out=None):
    """With the sign of the divisor, as Python and PyTorch mean it; the language's has that of the dividend."""
    trace, x, y, element, a, b = _quotient_of("%", x, y, out)
    rest = trace.make(f"{a} % {b}", element, "rest", x, y)
    if category(element) == 1 and _positive(x) and _positive(y):
        return rest
    zero = constant(0 if category(element) == 1 else 0.0)
    known = type(y) in _NUMBERS and y > 0
    other = trace.make(f"{rest.text} < {zero}" if known else _opposed(rest.text, b, zero), "bool", "either", False, True).text
    return trace.make(f"select({other}, {rest.text} + {b}, {rest.text})", element, "%", x, y)


def _fmod(x, y, *, out=None):
    trace, x, y, element, a, b = _quotient_of("fmod", x, y, out)
    return trace.make(f"{a} % {b}", element, "rest", x, y)


def _divide(x, y, *, rounding_mode=None, out=None):
    if rounding_mode == "floor":
        return _floor_divide(x, y, out=out)
    if rounding_mode == "trunc":
        trace, x, y, element, a, b = _quotient_of("div", x, y, out)
        if category(element) == 1:
            return _computed(f"{a} / {b}", element, "div", trace, x, y)
        return _trunc(trace.make(f"{a} / {b}", element, "anything", smooth=False))
    if rounding_mode is not None:
        raise TracingError(f"rounding_mode is {rounding_mode!r}", "None, 'floor' or 'trunc'")
    trace, x, y = _two(x, y, out)
    element = _together(x, y)
    element = element if category(element) == 2 else "float32"
    return trace.make(f"{as_text(x, element, trace)} / {as_text(y, element, trace)}", element, "/", x, y)


def _power(x, y, *, out=None):
    trace, x, y = _two(x, y, out)
    _no_truth("**", x)
    element = _together(x, y)
    if category(element) == 1:
        if type(y) not in _NUMBERS or not 0 <= y <= 16:
            raise TracingError("a power of whole numbers", "a constant exponent from 0 to 16, or convert with `.float()`")
        if y == 0:
            return _of_type(1, element, trace)
        product = _copy(x)
        for _ in range(int(y) - 1):
            product = FUNCTIONS["mul"](product, x)
        return product
    a = _as(x, element, trace)
    if type(y) in _NUMBERS and y == 2:
        return _either("square", "square")(a)
    # PyTorch's exceptions: the root of −∞ is NaN where C's pow has +∞.
    if type(y) in _NUMBERS and y in (0.5, -0.5):
        return FUNCTIONS["sqrt" if y > 0 else "rsqrt"](a)
    return trace.make(f"pow({as_text(a, element, trace)}, {as_text(y, element, trace)})", element, "anything", x, y)


def _larger(name: str, x, y, element: str, trace):
    """`y` where it is beyond `x`, or NaN; else `x`, which may be NaN. No gradient reaches `y` where both are equal."""
    a, b = as_text(x, element, trace), as_text(y, element, trace)
    beyond = f"{a} {'<' if name == 'max' else '>'} {b}"
    beyond = f"({beyond}) | ({b} != {b})" if _may_be_nan(y) else beyond
    return trace.make(f"select({beyond}, {b}, {a})", element, name, x, y)


def _extreme(name: str) -> Callable:
    """`torch.maximum` and `torch.minimum`: NaN where either is, and half of the gradient each where both are equal."""

    def made(x, y, *, out=None):
        trace, x, y, element = _pair(x, y, out)
        if element == "bool":
            return (_logic("|", True) if name == "max" else _logic("&", True))(x, y)
        a, b = as_text(x, element, trace), as_text(y, element, trace)
        if category(element) == 1 or not (_smooth(x, y) or _may_be_nan(x) or _may_be_nan(y)):
            return trace.make(f"{name}({a}, {b})", element, name, x, y)
        if _may_be_nan(y) and not _may_be_nan(x):
            x, y = y, x
        made = _larger(name, x, y, element, trace)
        if not _smooth(x, y):
            return made
        return trace.make(f"select({a} == {b}, 0.5 * {a} + 0.5 * {b}, {made.text})", element, name, x, y)

    return made


def _pair(x, y, out) -> tuple:
    trace, x, y = _two(x, y, out)
    return trace, x, y, _together(x, y)


def _of_two(name: str) -> Callable:
    """`torch.max` and `torch.min` of two tensors: a number is an axis there."""

    def made(x, other=None, *, out=None):
        if other is None or isinstance(other, (bool, int, float)):
            raise TracingError(f"`{name}` of one value", f"give two: torch.{name}imum(x, y), or torch.clamp for a number")
        return FUNCTIONS[f"{name}imum"](x, other, out=out)

    return made


def _number_wins(name: str) -> Callable:
    """`torch.fmax` and `torch.fmin`: a number where one is, and the gradient of equal ones to the first."""

    def made(x, y, *, out=None):
        trace, x, y, element = _pair(x, y, out)
        if element == "bool":
            return _extreme(name)(x, y)
        return trace.make(f"{name}({as_text(x, element, trace)}, {as_text(y, element, trace)})", element, "anything" if category(element) == 2 else name, x, y)

    return made


def _clamp(x, min=None, max=None, *, out=None):  # noqa: A002 - PyTorch's names
    """NaN where it is, and the whole gradient at a bound."""
    trace, x = _one(x, out)
    bounds = [(value(bound, trace), name) for bound, name in ((min, "max"), (max, "min")) if bound is not None]
    if not bounds:
        raise TracingError("clamp without a bound", "give min=, max= or both")
    if len(bounds) == 2 and all(_smooth(bound) for bound, _ in bounds):
        raise TracingError("clamp between two tensors that may have gradients", "use torch.minimum(torch.maximum(x, low), high), or clamp twice")
    # PyTorch promotes all three at once.
    element = x.element
    for bound, _ in bounds:
        element = _together(_as(x, element, trace), bound)
    _no_truth("clamp", x, *[bound for bound, _ in bounds])
    for bound, name in bounds:
        a, b = _as(x, element, trace), _as(bound, element, trace)
        if category(element) == 1:
            x = trace.make(f"{name}({a.text}, {as_text(b, element, trace)})", element, name, a, b)
        else:
            x = _larger(name, a, b, element, trace)
    return x


def _relu(x, inplace=False):
    if inplace:
        raise TracingError("relu in place", "use its result: `score = torch.relu(score)`")
    trace, x = _one(x)
    _no_truth("relu", x)
    if x.kind == "i32":
        return trace.make(f"max({x.text}, 0)", x.element, "max", x, 0)
    # The gradient at 0 is 0, and NaN stays.
    return trace.make(f"select({x.text} <= 0.0, 0.0, {x.text})", x.element, "max", x, 0.0)


def _of_type(x, element: str, trace):
    """A value converted to a type of PyTorch's."""
    x = trace.literal(x) if type(x) in _NUMBERS else x
    have, kind = x.element, KINDS[element]
    if have == element:
        return x
    if element in ("float16", "bfloat16"):
        raise TracingError(f"a value is rounded to {element}", "leave it a float32, as scores are: the kernels compute in float32")
    if kind != "i32" or x.kind == "bool":
        return _as(x, element, trace)
    if x.kind == "i32":
        return trace.same(x, element) if element in ("int32", "int64") else _wrapped(x, element, trace)
    if element == "int64" and x.range is None:
        raise TracingError("a float of any size is converted to int64", "convert it to int32, `.int()`: integers have 32 bits here")
    if element not in ("int32", "int64"):
        raise TracingError(f"a float is converted to {element}", f"convert it to int32 first, which drops the fraction, and then to {element}, which wraps")
    return _as(x, element, trace)


def _named(one: Any) -> str:
    """The name of an element type: PyTorch's, NumPy's, or Python's own as PyTorch reads it."""
    name = {bool: "bool", int: "int64", float: "float64"}.get(one) if isinstance(one, type) else None
    name = name or str(one).rsplit(".", 1)[-1]
    if name not in KINDS:
        raise TracingError(f"a value is converted to {name}", f"convert it to one of {', '.join(KINDS)}")
    return name


def _cast(element: str) -> Callable:
    def made(x, *, memory_format=None):
        trace, x = _one(x)
        return _of_type(x, element, trace)

    return made


def _to(x, *args, dtype=None, other=None, device=None, non_blocking=False, copy=False, memory_format=None):
    """To the type of an argument: a type, or a tensor's. Devices and ways of copying do not matter here."""
    trace, x = _one(x)
    element = x.element
    for one in (*args, dtype, other):
        if one is None or isinstance(one, bool) or type(one).__name__ == "device" or _is_device(one):
            continue
        element = one.lifted().element if isinstance(one, Operators) else _named(one.dtype if hasattr(one, "shape") else one)
    return _of_type(x, element, trace)


def _is_device(one: Any) -> bool:
    return isinstance(one, str) and one.split(":")[0] in ("cpu", "cuda", "mps", "meta")


def _type(x, dtype=None, non_blocking=False):
    if dtype is None:
        raise TracingError("`.type()` without a type", "`x.dtype` is the type")
    return _to(x, dtype)


def _same(x, *, memory_format=None):
    return _one(x)[1]


def _copy(x, *, memory_format=None):
    """Another value, which an operation in place on the first does not change."""
    trace, x = _one(x)
    return trace.same(x, x.element)


def _filled(default):
    def made(x, *given, fill_value=default, dtype=None, layout=None, device=None, requires_grad=False, pin_memory=False, memory_format=None):
        trace, x = _one(x)
        fill, *more = (*given, *(() if fill_value is None else (fill_value,)))
        if more:
            raise TracingError("two numbers are given for one value", "one")
        return _of_type(value(fill, trace), x.element if dtype is None else _named(dtype), trace)

    return made


def _new(default):
    def made(x, *size, dtype=None, fill_value=None, **others):
        if default is None and fill_value is None:
            if not size:
                raise TracingError("a value is made without a number", "give one: `x.new_full((), 1.0)`")
            size, fill_value = size[:-1], size[-1]
        size = others.get("size", size)
        size = size[0] if size and isinstance(size[0], (tuple, list)) else size
        if any(n != 1 for n in size):
            raise TracingError(f"a tensor of shape {tuple(size)} is made of a traced value", "one number: ()")
        return _filled(None)(x, fill_value if default is None else default, dtype=dtype)

    return made


def _shift(left: bool) -> Callable:
    def made(x, by, *, out=None):
        _, x = _one(x, out)
        if x.kind != "i32" or isinstance(by, bool) or not isinstance(by, int) or not 0 <= by < 31 or not within((1 << by, 1 << by), x.element):
            raise TracingError("a shift of something else than an integer by a small constant", "an integer, by a constant from 0 to less than the bits of its type")
        return FUNCTIONS["mul"](x, 1 << by) if left else _floor_divide(x, 1 << by)

    return made


def _get(tensor, at):
    return index(tensor, at, (), _trace())


_add, _sub, _mul = _arithmetic("+"), _arithmetic("-"), _arithmetic("*")
_and, _or, _maximum, _minimum = _logic("&", True), _logic("|", True), _extreme("max"), _extreme("min")

FUNCTIONS: dict[str, Callable] = {
    "add": _add, "sub": _sub, "subtract": _sub, "mul": _mul, "multiply": _mul,
    "div": _divide, "divide": _divide, "true_divide": _divide, "truediv": _divide,
    "floor_divide": _floor_divide, "floordiv": _floor_divide, "remainder": _remainder, "mod": _remainder, "fmod": _fmod,
    "pow": _power,
    "radd": lambda x, y: _add(y, x), "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha), "rmul": lambda x, y: _mul(y, x),
    "rtruediv": lambda x, y: _divide(y, x), "rfloordiv": lambda x, y: _floor_divide(y, x),
    "rmod": lambda x, y: _remainder(y, x), "rpow": lambda x, y: _power(y, x),
    "eq": _compare("=="), "ne": _compare("!="), "not_equal": _compare("!="), "lt": _compare("<"), "less": _compare("<"),
    "le": _compare("<="), "less_equal": _compare("<="), "gt": _compare(">"), "greater": _compare(">"), "ge": _compare(">="), "greater_equal": _compare(">="),
    "and": _and, "or": _or, "rand": _and, "ror": _or, "bitwise_and": _and, "bitwise_or": _or,
    "logical_and": _logic("&", False), "logical_or": _logic("|", False),
    "xor": _xor_bits, "rxor": _xor_bits, "bitwise_xor": _xor_bits, "logical_xor": _xor, "logical_not": _not, "invert": _invert, "bitwise_not": _invert,
    "lshift": _shift(True), "rshift": _shift(False),
    "neg": _either("-", "negate", "-{0}"), "negative": _either("-", "negate", "-{0}"), "pos": _positive_sign, "positive": _positive_sign,
    "abs": _either("abs", "abs"), "absolute": _either("abs", "abs"), "square": _either("square", "square"),
    "sqrt": _real("sqrt", "sqrt"), "rsqrt": _real("rsqrt"), "exp": _real("exp", "exp"), "exp2": _real("exp2", text="pow(2.0, {0})"), "expm1": _expm1,
    "log": _real("log", "log"), "log2": _logarithm(2.0), "log10": _logarithm(10.0), "log1p": _log1p,
    "sin": _real("sin", "sin"), "cos": _real("cos", "cos"), "tan": _real("tan", text="sin({0}) / cos({0})"),
    "tanh": _real("tanh", "tanh"), "erf": _real("erf", "erf"), "sigmoid": _sigmoid, "reciprocal": _real("reciprocal", text="1.0 / {0}"), "relu": _relu,
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "trunc": _trunc, "fix": _trunc,
    "minimum": _minimum, "maximum": _maximum, "fmin": _number_wins("min"), "fmax": _number_wins("max"), "min": _of_two("min"), "max": _of_two("max"),
    "clamp": _clamp, "clip": _clamp, "clamp_min": lambda x, min: _clamp(x, min), "clamp_max": lambda x, max: _clamp(x, None, max),
    "where": _where, "masked_fill": _masked_fill, "getitem": _get,
    "float": _cast("float32"), "int": _cast("int32"), "long": _cast("int64"), "half": _cast("float16"), "bfloat16": _cast("bfloat16"), "bool": _cast("bool"),
    "to": _to, "type": _type, "type_as": _to,
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": _filled(None),
    "new_zeros": _new(0), "new_ones": _new(1), "new_full": _new(None), "new_tensor": _filled(None),
    "clone": _copy, "contiguous": _same,
}  # fmt: skip

# The ufuncs that NumPy's own numbers call for operators.
_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "floor_divide": "floor_divide", "remainder": "remainder",
    "power": "pow", "equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip


def _operator(name: str) -> Callable:
    def method(self, *args, **kwargs):
        return called(name, name, (self, *args), kwargs)

    method.__name__ = name
    return method


def called(name: str, said: str, args: tuple, kwargs: dict) -> Any:
    """A function of `FUNCTIONS`: arguments that it does not take are an error of tracing."""
    # Nothing of the user's runs in here: the profiler of `watch` would only cost time.
    watch = getattr(CURRENT, "watch", None)
    if watch is not None:
        sys.setprofile(None)
    try:
        return FUNCTIONS[name](*args, **kwargs)
    except TypeError as e:
        if isinstance(e, TracingError):
            raise
        raise TracingError(f"`{said}` with these arguments has no counterpart ({e})", "write it with operators") from None
    finally:
        if watch is not None:
            sys.setprofile(watch)


for _name in (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow and or xor rand ror rxor "
    "eq ne lt le gt ge neg pos abs invert lshift rshift floor ceil trunc"
).split():
    setattr(Operators, f"__{_name}__", _operator(_name))
for _name in FUNCTIONS:
    if _name.isidentifier() and not hasattr(Operators, _name) and _name not in ("and", "or", "getitem", "where"):
        setattr(Operators, _name, _operator(_name))
# A method's first operand is the choice where the condition holds.
Operators.where = lambda self, condition, other: _where(condition, self, other)
