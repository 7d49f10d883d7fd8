"""Traced values: operators and methods, numbers as operands, and helpers for the functions of the table."""

from __future__ import annotations

import math
import threading
from typing import Any, Callable

from .dtypes import BITS, KINDS, LIMITS, RULES, of_number, promoted, with_number, within
from .errors import TracingError

# Every function by its name; filled by `table`.
FUNCTIONS: dict[str, Callable] = {}
# The ufuncs that NumPy scalars call for operators; filled by `table`.
UFUNCS: dict[str, str] = {}

_I32 = range(-(2**31), 2**31)


def rounded(x: float) -> float:
    """Returns the nearest f32, ties to even. Decimal text that is parsed as f32 could round differently."""
    if x == 0.0 or x != x or x in (math.inf, -math.inf):
        return x
    step = max(math.frexp(x)[1] - 24, -149)
    return math.ldexp(float(round(math.ldexp(x, -step))), step)


def constant(x: bool | int | float) -> str:
    """Returns a Python number or boolean as text."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        if x not in _I32:
            raise TracingError(f"the integer {x} does not fit an i32", "write it as a float")
        return str(x) if x >= 0 else f"(0 - {-x})" if x > -(2**31) else f"(0 - {2**31 - 1} - 1)"
    near = rounded(float(x))
    if abs(near) > _GREATEST and not math.isinf(near):
        raise TracingError(f"the number {x!r} does not fit an f32", "use float('inf') or torch.finfo(torch.float32).max")
    # As a dictionary key, a number is a constant for the compiler, not an input of its graph.
    text = repr(list({near: None})[0])  # noqa: RUF015
    if text == "nan":
        return text
    return f"(-{text[1:]})" if text.startswith("-") else text


_GREATEST = (2.0 - 2.0**-23) * 2.0**127

def _refuse(what: str, instead: str) -> Callable:
    def refused(self, *args, **kwargs):
        raise TracingError(what, instead)

    return refused


_VALUE = "it is read from the traced value, which has none while a function is traced"
_IF = "use torch.where(condition, x, y) for a choice, and & | ~ for `and`, `or`, `not` and chained comparisons"


class _NoAttribute(TracingError, AttributeError):
    """A traced value lacks an attribute: `hasattr` is false, and any other use raises a `TracingError`."""


def no_attribute(name: str) -> TracingError:
    """Returns the error for an unsupported method."""
    return _NoAttribute(f"`.{name}` of a traced value is not supported in a score_mod or mask_mod", instead_of(name))


# Unsupported functions, with the alternative.
_INSTEAD = {
    "softmax": "a score_mod sees one score, and attention takes the softmax of what it returns: return the score",
    "log_softmax": "a score_mod sees one score, and attention takes the softmax of what it returns: return the score",
    "norm": "take the root of the sum of squares: `(x ** 2).sum().sqrt()`",
    "cdist": "unroll the distance: `((x[q_idx] - y[kv_idx]) ** 2).sum().sqrt()`",
    "dropout": "draw the mask before the call, into a tensor over (batch, head, q, k), and read it",
    "einsum": "join rows by `(x * y).sum()` or torch.dot",
    "gather": "index the tensor: `table[head, index]`", "take": "index the tensor: `table[index]`", "index_select": "index the tensor: `table[index]`",
    "embedding": "index the weight: `weight[index, h]`", "one_hot": "compare: `(index == n).float()`",
    **dict.fromkeys(
        ("atan2", "arctan2", "atan", "arctan", "angle", "asin", "arcsin", "acos", "arccos"),
        "the kernels have no inverse of a sine, cosine or tangent: compute the angles before the call, into a tensor, and read it by b, h, q_idx, kv_idx or as a table",
    ),
}  # fmt: skip


def instead_of(name: str) -> str:
    """Returns the alternative to an unsupported function."""
    import difflib

    known = _INSTEAD.get(name.strip("_")) or _INSTEAD.get(name.rsplit("_", 1)[-1])
    if known is not None:
        return known
    near = difflib.get_close_matches(name.strip("_").lower(), sorted(n for n in FUNCTIONS if not n.startswith("r") or n[1:] not in FUNCTIONS), 1, 0.6)
    nearest = f"the nearest name is `{near[0]}`; " if near else ""
    return f"{nearest}write it with operators, or compute it before the call, into a tensor, and read it by index"


class Operators:
    """The operators and methods of traced values."""

    __slots__ = ()
    __hash__ = object.__hash__

    def lifted(self):
        raise NotImplementedError

    def __getattr__(self, name):
        # Other libraries look for protocols with such names.
        if name.startswith("_"):
            raise AttributeError(name)
        raise no_attribute(name)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        made = FUNCTIONS.get(UFUNCS.get(ufunc.__name__, "")) if method == "__call__" and not kwargs else None
        if made is None:
            name = ufunc.__name__
            raise TracingError(f"NumPy's `{name}` is applied to a traced value", f"use torch.{name}, or the method: `x.{name}()`")
        return made(*inputs)

    __bool__ = _refuse("a traced value is used as true or false", _IF)
    __int__ = __index__ = _refuse("a traced value is used as a number or an index", f"{_VALUE}; index tensors by q_idx, kv_idx, b and h as they are, and NumPy arrays through sdpa.array(...)")
    __float__ = __complex__ = _refuse("a traced value is used as a number", _VALUE)
    # No `__len__`: PyTorch queries it on every index, and continues if it is missing.
    __iter__ = _refuse("a traced value is used as a sequence", "it is one number")
    __getitem__ = _refuse("a traced value is indexed", "it is one number")
    __matmul__ = __rmatmul__ = _refuse("`@` of a traced value", "it is one number: multiply by `*`")
    __round__ = _refuse("a traced value is rounded by Python's `round`, which tensors do not support", "use torch.round(x)")
    __divmod__ = __rdivmod__ = _refuse("`divmod` of a traced value", "use // and %")
    __array__ = _refuse("a traced value is used as an index or an array of NumPy", f"{_VALUE}; make NumPy arrays readable by sdpa.array(...)")
    item = tolist = numpy = cpu = cuda = _refuse("`.item()` or its like on a traced value", f"{_VALUE}; take numbers out of tensors before, or read tensors by index")
    detach = backward = requires_grad_ = _refuse("autograd on a traced value", "captured tensors get their gradients without it")

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

class Unread:
    """A tensor that is not read completely, and so is not an operand."""

    def elements(self) -> tuple:
        """Its elements, if it is a row."""
        raise NotImplementedError


def extents(source: Any) -> tuple:
    """Returns the shape of a captured tensor. As dictionary keys, numbers are constants for the compiler: the text of a table contains its extents."""
    return tuple([list({int(n): None})[0] for n in source.shape])  # noqa: RUF015


def value(x: Any, trace):
    """Returns a traced value, or a number unchanged."""
    if type(x) in NUMBERS:
        if type(x) is int and abs(x) >= 2**128:
            raise TracingError(f"an integer of {x.bit_length()} bits does not fit an f32", "use float('inf')")
        return x
    if isinstance(x, Operators):
        return x.lifted()
    if isinstance(x, (bool, int, float)):
        return next(kind(x) for kind in (bool, int, float) if isinstance(x, kind))
    if isinstance(x, Unread):
        raise TracingError(f"a row of {len(x.elements())} elements is used as one number", "index it, or reduce it by `.sum()`")
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        if x.shape == () and type(x).__module__ == "numpy":
            return value(x.item(), trace)
        if math.prod(x.shape) == 1:
            return trace.tensor(x, tuple(0 for _ in x.shape), [])
        raise TracingError(f"a tensor of shape {tuple(x.shape)} is used as one number", "index it: by b, h, q_idx, kv_idx")
    raise TracingError(f"{type(x).__name__} is used as a number", "numbers, traced values and indexed tensors can be")


NUMBERS = frozenset((bool, int, float))
# The types that are narrower than i32.
NARROW = ("uint8", "int8", "int16")
CURRENT = threading.local()


def current(what: str):
    """Returns the active trace."""
    trace = getattr(CURRENT, "trace", None)
    if trace is None:
        raise TracingError(f"{what} is used where nothing is traced", "use it in a score_mod or mask_mod")
    return trace


def running():
    return current("a traced value")


def unary(x: Any, out: Any = None):
    """Returns the trace, and the operand as a value of it."""
    if out is not None:
        raise TracingError("`out=` is given", "use the result")
    trace = running()
    x = value(x, trace)
    return trace, trace.literal(x) if type(x) in NUMBERS else x


def binary(x: Any, y: Any, out: Any = None):
    """Returns the trace, and two operands: at least one is a value of it, the other may be a number."""
    trace, first = unary(x, out)
    y = value(y, trace)
    return trace, first if type(y) in NUMBERS else value(x, trace), y


def element_of(x) -> str:
    return of_number(x) if type(x) in NUMBERS else x.element


def kind_of(x) -> str:
    return KINDS[element_of(x)]


def range_of(x):
    if type(x) in NUMBERS:
        return (x, x) if x == x else None
    return x.range


def nonnegative(x) -> bool:
    known = range_of(x)
    return known is not None and known[0] >= 0


def may_be_nan(x) -> bool:
    return range_of(x) is None


def differentiable(*of) -> bool:
    """Returns true if gradients flow to one of these."""
    return any([x.smooth for x in of if type(x) not in NUMBERS])


def common(x, y) -> str:
    """Returns the result type, as PyTorch promotes. Python numbers have to fit it."""
    if type(x) in NUMBERS or type(y) in NUMBERS:
        of, number = (y, x) if type(x) in NUMBERS else (x, y)
        element = of_number(number) if type(of) in NUMBERS else with_number(of.element, number)
        if element in NARROW and not within((number, number), element):
            raise TracingError(f"the number {number} does not fit {element}", "convert the tensor to int32 or int64 first, or compute with floats")
        return element
    return promoted(x.element, y.element)


def as_type(x, element: str, trace):
    """Promotes a value to a wider type."""
    kind = KINDS[element]
    if type(x) in NUMBERS:
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
    """Returns the text of a value, promoted to a wider type."""
    made = as_type(x, element, trace)
    return constant(made) if type(made) in NUMBERS else made.text


def wrapped(x, element: str, trace):
    """Wraps an integer to a narrower type."""
    if within(x.range, element):
        return trace.same(x, element)
    size = 2 ** BITS[element]
    shift = 0 if LIMITS[element][0] == 0 else size // 2
    low = f"({x.text} + {shift})" if shift else x.text
    rest = f"{low} % {size}" if nonnegative(x) and x.range[1] + shift <= LIMITS["int32"][1] else f"({low} % {size} + {size}) % {size}"
    return trace.make(f"{rest} - {shift}" if shift else rest, element, "wrapped", x)


def computed(text: str, element: str, rule: str, trace, *operands):
    """Returns a computed number of a type, wrapped if the type is narrow."""
    if element in NARROW and not within(RULES[rule](*[range_of(x) for x in operands]), element):
        return wrapped(trace.make(text, "int32", rule, *operands), element, trace)
    return trace.make(text, element, rule, *operands)


def no_truth(what: str, *of) -> None:
    if all([element_of(x) == "bool" for x in of]):
        raise TracingError(f"`{what}` does not take {'two bools' if len(of) > 1 else 'a bool'}", "use & | ~, or convert one with `.float()` or `.int()`")
