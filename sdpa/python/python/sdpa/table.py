"""Every function and operator of a traced value by its name, with its translation to the expression language and PyTorch's semantics."""

from __future__ import annotations

import sys
from typing import Any, Callable

from .activations import ACTIVATIONS
from .arithmetic import (
    arithmetic, cast, clamp, compare, copied, divide, either, expm1, extreme, filled, floor_divide, fmod, log1p, logarithm, logic, logical_not,
    masked_fill, new, number_wins, of_two, positive_sign, power, real, remainder, rounding, same, sigmoid, to, to_type, trunc, unsqueezed, where, xor,
)  # fmt: skip
from .bits import BITWISE
from .errors import TracingError
from .gather import index, mapped
from .values import CURRENT, FUNCTIONS, UFUNCS, Operators, Unread, running


def compiling() -> bool:
    """Returns true under `torch.compile`. `flex` replaces this function with PyTorch's."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def followed(fn: Callable, with_score: bool) -> None:
    """Examines a function under `torch.compile`. `flex` replaces this function with that of `follow`."""


def _get(tensor, at):
    return index(tensor, at, None, running())


_add, _sub, _mul = arithmetic("+"), arithmetic("-"), arithmetic("*")
_maximum, _minimum = extreme("max"), extreme("min")

FUNCTIONS |= {
    "add": _add, "sub": _sub, "subtract": _sub, "mul": _mul, "multiply": _mul,
    "div": divide, "divide": divide, "true_divide": divide, "truediv": divide,
    "floor_divide": floor_divide, "floordiv": floor_divide, "remainder": remainder, "mod": remainder, "fmod": fmod,
    "pow": power,
    "radd": lambda x, y: _add(y, x), "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha), "rmul": lambda x, y: _mul(y, x),
    "rtruediv": lambda x, y: divide(y, x), "rfloordiv": lambda x, y: floor_divide(y, x),
    "rmod": lambda x, y: remainder(y, x), "rpow": lambda x, y: power(y, x),
    "eq": compare("=="), "ne": compare("!="), "not_equal": compare("!="), "lt": compare("<"), "less": compare("<"),
    "le": compare("<="), "less_equal": compare("<="), "gt": compare(">"), "greater": compare(">"), "ge": compare(">="), "greater_equal": compare(">="),
    "logical_and": logic("&", False), "logical_or": logic("|", False),
    "logical_xor": xor, "logical_not": logical_not,
    "neg": either("-", "negate", "-{0}"), "negative": either("-", "negate", "-{0}"), "pos": positive_sign, "positive": positive_sign,
    "abs": either("abs", "abs"), "absolute": either("abs", "abs"), "square": either("square", "square"),
    "sqrt": real("sqrt", "sqrt"), "rsqrt": real("rsqrt"), "exp": real("exp", "exp"), "exp2": real("exp2", text="pow(2.0, {0})"), "expm1": expm1,
    "log": real("log", "log"), "log2": logarithm(2.0), "log10": logarithm(10.0), "log1p": log1p,
    "sin": real("sin", "sin"), "cos": real("cos", "cos"), "tan": real("tan", text="sin({0}) / cos({0})"),
    "tanh": real("tanh", "tanh"), "erf": real("erf", "erf"), "sigmoid": sigmoid, "reciprocal": real("reciprocal", text="1.0 / {0}"),
    "floor": rounding("floor"), "ceil": rounding("ceil"), "trunc": trunc, "fix": trunc,
    "minimum": _minimum, "maximum": _maximum, "fmin": number_wins("min"), "fmax": number_wins("max"), "min": of_two("min"), "max": of_two("max"),
    "clamp": clamp, "clip": clamp, "clamp_min": lambda x, min: clamp(x, min), "clamp_max": lambda x, max: clamp(x, None, max),
    "where": where, "masked_fill": masked_fill, "getitem": _get,
    "float": cast("float32"), "int": cast("int32"), "long": cast("int64"), "half": cast("float16"), "bfloat16": cast("bfloat16"), "bool": cast("bool"),
    "to": to, "type": to_type, "type_as": to,
    "zeros_like": filled(0), "ones_like": filled(1), "full_like": filled(None),
    "new_zeros": new(0), "new_ones": new(1), "new_full": new(None), "new_tensor": filled(None),
    "clone": copied, "contiguous": same, "unsqueeze": unsqueezed, **ACTIVATIONS, **BITWISE,
}  # fmt: skip

UFUNCS |= {
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
    """Calls a function of `FUNCTIONS`; unsupported arguments raise a `TracingError`."""
    # User code does not run in here, so the profiler of `watch` would only cost time.
    watch = getattr(CURRENT, "watch", None)
    if watch is not None:
        sys.setprofile(None)
    try:
        if name != "getitem" and any([isinstance(x, Unread) for x in (*args, *kwargs.values())]):
            return mapped(name, args, kwargs)
        return FUNCTIONS[name](*args, **kwargs)
    except TypeError as e:
        if isinstance(e, TracingError):
            raise
        raise TracingError(f"`{said}` with these arguments is not supported in a score_mod or mask_mod ({e})", "write it with operators") from None
    finally:
        if watch is not None:
            sys.setprofile(watch)


for _name in (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow and or xor rand ror rxor "
    "eq ne lt le gt ge neg pos abs invert lshift rshift rlshift rrshift floor ceil trunc"
).split():
    setattr(Operators, f"__{_name}__", _operator(_name))
for _name in FUNCTIONS:
    if _name.isidentifier() and not hasattr(Operators, _name) and _name not in ("and", "or", "getitem", "where"):
        setattr(Operators, _name, _operator(_name))
# As a method, the first operand is the value where the condition holds.
Operators.where = lambda self, condition, other: where(condition, self, other)
