"""Every function and operator that the tracer supports, against eager PyTorch: element types, edge values, gradients, conversions."""

import math

import pytest
import torch
import torch.nn.functional as F

import sdpa
from sdpa import TracingError, flex_attention
from sdpa.table import FUNCTIONS

NAN, INF = math.nan, math.inf
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 1.5, -2.5, 2.0, 3.0, -3.0, 8.0, 1000.0, 0.1, -0.1, 1e-8, -1e-8, 3e-4, -3e-4, 1e-30, 1e-42, 80.0, -80.0, 1e5, 1e30, -1e30, 3e38, INF, -INF, NAN]
INTEGERS = {
    torch.bool: [False, True],
    torch.uint8: [0, 1, 2, 3, 7, 100, 254, 255],
    torch.int8: [0, 1, -1, 2, 3, -7, 100, 127, -127, -128],
    torch.int16: [0, 1, -1, 3, -7, 300, 32767, -32768],
    torch.int32: [0, 1, -1, 3, -7, 70000, 2**31 - 1, -(2**31) + 1, -(2**31)],
    # Products of these fit into 32 bits; the tracer rejects larger ones.
    torch.int64: [0, 1, -1, 2, 3, -7, 41, 40000, -40000],
}
TYPES = [*INTEGERS, torch.float32]


def values(dtype):
    return torch.tensor(INTEGERS.get(dtype, FLOATS), dtype=dtype)


def pairs(x, y):
    return x.repeat_interleave(len(y)), y.repeat(len(x))


def traced(fn, *given, score=None, gradients=False):
    """Evaluates `fn` on elements of tensors, and of scores. Each is the only score of its row, so the log-sum-exp equals it. Infinity becomes 3.25e38."""
    n = len(given[0]) if given else len(score)
    query = (torch.zeros(n) if score is None else score.detach()).view(1, 1, n, 1).requires_grad_(gradients)
    one = torch.ones(1, 1, 1, 1)

    def mod(s, b, h, q, k):
        of = [x[q] for x in given] if score is None else [s, *[x[q] for x in given]]
        made = fn(*of)
        made = made if made.dtype == torch.float32 else made.float()
        return torch.where(made == INF, 3.25e38, made)

    # The product with a key of 1 equals the score bit by bit, and so does the log-sum-exp of one key.
    lse = flex_attention(query, one, one, mod, scale=1.0, return_lse=True)[1]
    if not gradients:
        return lse.detach().flatten()
    wrt = [query, *[x for x in given if x.requires_grad]]
    made = torch.autograd.grad(lse.sum(), wrt, allow_unused=True)
    return [torch.zeros(n) if x is None else x.flatten() for x in made]


def agree(ours, theirs, what, exact, inputs, tolerance=(4e-6, 1e-42)):
    theirs = theirs.float().flatten()
    theirs = torch.where(theirs == INF, 3.25e38, theirs)
    relative, absolute = (0.0, 0.0) if exact else tolerance
    same = torch.isclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True) | (ours == theirs)
    if any(word in what for word in ("gelu", "lerp")):
        # A sum that may cancel completely is compared relative to its largest term.
        same |= torch.isfinite(theirs) & ((ours - theirs).abs() <= 4e-7 * torch.stack([x.flatten().float().abs() for x in inputs]).amax(0))
    if not same.all():
        n = int((~same).nonzero()[0])
        raise AssertionError(f"{what} of {[x.flatten()[n].item() for x in inputs]}: {ours[n].item()}, PyTorch has {theirs[n].item()}")


def low(x):
    """The low digits of an integer, which a float cannot represent."""
    return x % 1009


TWO = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "**": lambda x, y: x**y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y),
    "add alpha 0.5": lambda x, y: torch.add(x, y, alpha=0.5),
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
    "true_divide": torch.true_divide,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "max": torch.max,
    "min": torch.min,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp": lambda x, y: torch.clamp(x, y),
    "clamp max": lambda x, y: torch.clamp(x, max=y),
    "clamp_min": torch.clamp_min,
    "clamp_max": lambda x, y: x.clamp_max(y),
    "clip": lambda x, y: x.clip(y),
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "where": lambda x, y: torch.where(x > y, x, y),
    "method where": lambda x, y: x.where(y > 0, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 2, 3),
    "masked_fill of a tensor": lambda x, y: _each(lambda x, y: torch.masked_fill(x, x > y, y), x, y),
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.divide,
    "eq": torch.eq,
    "ne": torch.ne,
    "not_equal": torch.not_equal,
    "less": torch.less,
    "less_equal": torch.less_equal,
    "greater": torch.greater,
    "greater_equal": torch.greater_equal,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "product, rest": lambda x, y: x * y % 7,
    "sum, floor": lambda x, y: (x + y) // 5,
    "rest of a difference": lambda x, y: (x - y) % 5,
    "type_as": lambda x, y: x.type_as(y),
    "to a tensor": lambda x, y: x.to(y),
    "<<": lambda x, y: x << y,
    ">>": lambda x, y: x >> y,
    "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp from the end": lambda x, y: x.lerp(y, -0.75),
    "lerp of weights": lambda x, y: torch.lerp(x, y, torch.tanh(y)),
    "logaddexp": torch.logaddexp,
}
ONE = {
    **{name: (lambda x, name=name: getattr(torch, name)(x)) for name in (
        "neg negative positive abs absolute square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf sigmoid reciprocal relu floor ceil trunc fix sign sgn sinh cosh round isfinite isinf isnan isposinf isneginf "
        "logical_not bitwise_not zeros_like ones_like clone").split()},
    "negated": lambda x: -x,
    "plus": lambda x: +x,
    "~": lambda x: ~x,
    "abs()": abs,
    "contiguous": lambda x: x.contiguous(),
    "functional.relu": torch.nn.functional.relu,
    "functional.relu inplace": lambda x: torch.nn.functional.relu(x, inplace=False),
    "functional.relu in place": lambda x: _activated(F.relu, x),
    "functional.sigmoid": torch.sigmoid,
    "silu": F.silu,
    "silu in place": lambda x: _activated(F.silu, x),
    "gelu": lambda x: _gelu(x),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x, beta=2, threshold=3.5),
    "leaky_relu": F.leaky_relu,
    "leaky_relu in place": lambda x: _activated(lambda x, inplace: F.leaky_relu(x, 0.25, inplace), x),
    "logsigmoid": F.logsigmoid,
    "round to a decimal": lambda x: torch.round(x, decimals=1),
    "round to hundreds": lambda x: x.round(decimals=-2),
    "round of halves": lambda x: torch.round(x * 0.5) + torch.round(x * 0.5 + 1.0) * 100,
    "sign of 0 of round": lambda x: 1.0 / torch.round(x),
    "sign of 0 of sign": lambda x: 1.0 / torch.sign(x),
    "sign of 0 of sinh": lambda x: 1.0 / torch.sinh(x * 1e-30),
    "sign of 0 of relu": lambda x: 1.0 / F.leaky_relu(x, 0.5),
    "x & 12": lambda x: x & 12,
    "x & 1": lambda x: x & 1,
    "x & -4": lambda x: x & -4,
    "x & 0": lambda x: x & 0,
    "90 & x": lambda x: 90 & x,
    "x | 5": lambda x: x | 5,
    "x | -128": lambda x: x | -128,
    "6 | x": lambda x: 6 | x,
    "x ^ 5": lambda x: x ^ 5,
    "x ^ -3": lambda x: x ^ -3,
    "x & True": lambda x: x & True,
    "x << 5": lambda x: (x % 8 if not x.dtype == torch.bool else x) << 5,
    "x << 40": lambda x: x << 40,
    "x << -1": lambda x: x << -1,
    "x >> 40": lambda x: x >> 40,
    "x >> 31": lambda x: x >> 31,
    "x >> -1": lambda x: x >> -1,
    "x >> 0": lambda x: x >> 0,
    "5 << x": lambda x: 5 << x,
    "-100 >> x": lambda x: -100 >> x,
    "masked_fill of isnan": lambda x: x.masked_fill(x.isnan(), 2),
    "full_like": lambda x: torch.full_like(x, 3),
    "full_like a fraction": lambda x: torch.full_like(x, 1.5),
    "new_zeros": lambda x: x + x.new_zeros(()),
    "new_ones": lambda x: x * x.new_ones(()),
    "new_full": lambda x: x.new_full((), 7),
    "new_tensor": lambda x: x.new_tensor(2),
    "zeros_like of a type": lambda x: torch.zeros_like(x, dtype=torch.int32) + x,
    "x + 2": lambda x: x + 2,
    "2 - x": lambda x: 2 - x,
    "x * 3": lambda x: x * 3,
    "x * True": lambda x: x * True,
    "x * 0.3": lambda x: x * 0.3,
    "x + 2.5": lambda x: x + 2.5,
    "5 / x": lambda x: 5 / x,
    "x / 3": lambda x: x / 3,
    "x // 3": lambda x: x // 3,
    "x // 0.1": lambda x: x // 0.1,
    "x // -0.3": lambda x: x // -0.3,
    "x % 3": lambda x: x % 3,
    "x % -3": lambda x: x % -3,
    "x % 0.75": lambda x: x % 0.75,
    "x % -0.75": lambda x: x % -0.75,
    "x // -3": lambda x: x // -3,
    "fmod 3": lambda x: torch.fmod(x, 3),
    "div floor 3": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "div trunc 3": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "7 // x": lambda x: 7 // x,
    "7 % x": lambda x: 7 % x,
    "7.5 // x": lambda x: 7.5 // x,
    "x ** 2": lambda x: x**2,
    "x ** 2.0": lambda x: x**2.0,
    "x ** 3": lambda x: x**3,
    "x ** 0": lambda x: x**0,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "x ** -1.0": lambda x: x**-1.0,
    "2.0 ** x": lambda x: 2.0**x,
    "x << 2": lambda x: x << 2,
    "x >> 1": lambda x: x >> 1,
    "x < 3": lambda x: x < 3,
    "x < 2.5": lambda x: x < 2.5,
    "x == 1": lambda x: x == 1,
    "clamp of numbers": lambda x: torch.clamp(x, 1, 3),
    "clamp turned round": lambda x: torch.clamp(x, 3, 1),
    "clamp of floats": lambda x: x.clamp(min=-0.5, max=2.5),
    "clamp min": lambda x: x.clamp(min=1),
    "where of numbers": lambda x: torch.where(x > 1, 1, 0) + x,
    "where of a float": lambda x: torch.where(x > 1, x, 0.5),
    "where of truth": lambda x: torch.where(x > 1, True, x < 0),
    "where of an infinity": lambda x: torch.where(x > 1, x.float(), -INF),
    "masked_fill of an infinity": lambda x: x.float().masked_fill(x > 1, -INF),
    "rsub of a number": lambda x: torch.rsub(x, 5),
    "in place": lambda x: _in_place(x),
}
CONVERSIONS = {
    **{f".{name}()": (lambda x, name=name: getattr(x, name)()) for name in "float int long bool half bfloat16 double".split()},
    **{f"to {dtype}": (lambda x, dtype=dtype: x.to(dtype)) for dtype in (*TYPES, torch.float16, torch.bfloat16, torch.float64)},
    **{f"to dtype={dtype}": (lambda x, dtype=dtype: x.to(dtype=dtype)) for dtype in TYPES},
    **{f"to a tensor of {dtype}": (lambda x, dtype=dtype: x.to(torch.zeros((), dtype=dtype))) for dtype in (*TYPES, torch.float64)},
    **{f"type_as a tensor of {dtype}": (lambda x, dtype=dtype: x.type_as(torch.zeros((), dtype=dtype))) for dtype in (*TYPES, torch.float64)},
    **{f"type {dtype}": (lambda x, dtype=dtype: x.type(dtype)) for dtype in TYPES},
    "to a device": lambda x: x.to("cpu"),
    "to a device and int32": lambda x: x.to("cpu", torch.int32),
    "to x.dtype": lambda x: (x < 3).to(x.dtype) == x,
    "to Python's int": lambda x: x.to(int),
    "to Python's float": lambda x: x.to(float),
}
# Accurate except for the last bits.
NEAR = {
    *"sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf sigmoid reciprocal pow ** add alpha 0.5".split(), "add alpha 0.5", "add alpha", "sub alpha",
    "5 / x", "functional.sigmoid", "2.0 ** x", "x ** 3", "x ** 0.5", "x ** -0.5", "x ** -1.0", "sinh", "cosh", "silu", "silu in place", "gelu", "gelu by tanh",
    "softplus", "softplus of beta", "leaky_relu", "leaky_relu in place", "logsigmoid", "lerp", "lerp from the end", "lerp of weights", "logaddexp", "sign of 0 of sinh",
}  # fmt: skip
DIVIDES = {"//", "%", "div floor", "div trunc", "fmod", "remainder", "floor_divide", "7 // x", "7 % x"}


def _in_place(x):
    seen = x.clone() if isinstance(x, torch.Tensor) else x
    again = seen
    seen += x * 1
    return again


def _gelu(x):
    """PyTorch's own kernel: oneDNN's returns NaN at infinity for tensors of more than one element."""
    with torch.backends.mkldnn.flags(enabled=False):
        return F.gelu(x)


def _activated(fn, x):
    """In place, observed through another reference."""
    seen = x.clone()
    again = seen
    fn(seen, inplace=True)
    return again


def _each(fn, *of):
    """Runs a function on each element separately, as FlexAttention does: some functions accept only one number."""
    return torch.vmap(fn)(*of) if isinstance(of[0], torch.Tensor) else fn(*of)


def judged(name, fn, inputs):
    """Returns the results of eager PyTorch and of the tracer, with None for one that raises an error."""
    try:
        theirs = fn(*inputs)
    except (RuntimeError, TypeError, NotImplementedError):
        theirs = None
    try:
        ours = traced(fn, *inputs)
    except TracingError:
        ours = None
    return theirs, ours


def compared(name, fn, inputs, refused):
    theirs, ours = judged(name, fn, inputs)
    what = f"{name} of {', '.join(str(x.dtype) for x in inputs)}"
    if ours is None:
        refused.append(tuple(str(x.dtype).removeprefix("torch.") for x in inputs))
        return
    assert theirs is not None, f"{what}: PyTorch refuses it"
    exact = name not in NEAR
    agree(ours, theirs, what, exact, inputs)
    if theirs.dtype in (torch.int32, torch.int64):
        agree(traced(lambda *of: low(fn(*of)), *inputs), low(theirs), f"low digits of {what}", True, inputs)
    if any(x.dtype == torch.float32 for x in inputs):
        # Applied to a score.
        at = next(n for n, x in enumerate(inputs) if x.dtype == torch.float32)
        # A score is a sum, so it is never −0.
        inputs = [x + 0.0 if n == at else x for n, x in enumerate(inputs)]
        theirs, rest = fn(*inputs), [x for n, x in enumerate(inputs) if n != at]
        of_score = lambda s, *rest: fn(*[s, *rest] if at == 0 else [*rest, s])  # noqa: E731
        agree(traced(of_score, *rest, score=inputs[at]), theirs, f"{what}, of scores", exact, inputs)


NAMES = [str(dtype).removeprefix("torch.") for dtype in TYPES]
NO_TRUTH = "+ * // % fmod remainder floor_divide multiply clamp clamp_min clamp_max clip".split() + ["add alpha", "div floor", "div trunc", "clamp max", "product, rest", "sum, floor"]
NO_DIFFERENCE_OF_TRUTH = ["-", "sub alpha", "rsub", "subtract", "rest of a difference"]
SUMS = ["+", "-", "*", "add alpha", "sub alpha", "rsub", "subtract", "multiply", "product, rest", "sum, floor", "rest of a difference"]


def refuses(name, x, y):
    """Returns true for pairs of types that the tracer rejects. PyTorch rejects most of them too."""
    if name in ("&", "|", "^", "bitwise_and", "bitwise_or", "bitwise_xor"):
        return "float32" in (x, y)
    if name in ("<<", "bitwise_left_shift", ">>", "bitwise_right_shift"):
        # Integers of this test shift an int64 past 32 bits.
        return "float32" in (x, y) or x == y == "bool" or ("int64" in (x, y) and y != "bool" and name in ("<<", "bitwise_left_shift"))
    if "lerp" in name:
        return (x, y) != ("float32", "float32")
    if name == "logaddexp":
        return "float32" not in (x, y)
    if name in SUMS and {x, y} == {"int32", "int64"}:
        return True  # the ends of int32, next to an int64
    if name in ("//", "div floor", "div trunc", "floor_divide") and (x, y) == ("int32", "int64"):
        return True  # the least int32, divided by −1
    if name in NO_TRUTH:
        return x == y == "bool"
    if name in NO_DIFFERENCE_OF_TRUTH:
        return "bool" in (x, y)
    if name in ("**", "pow"):
        return x == "bool" or "float32" not in (x, y)
    if name == "add alpha 0.5":
        return "float32" not in (x, y)
    if name == "masked_fill":
        return x == "bool"
    if name == "masked_fill of a tensor":
        return torch.promote_types(getattr(torch, x), getattr(torch, y)) != getattr(torch, x)
    return name in ("type_as", "to a tensor") and x == "float32" and y in ("uint8", "int8", "int16", "int64")


def defined(name, x, y):
    """Returns where PyTorch's value is well defined."""
    integers = not (x.is_floating_point() or y.is_floating_point())
    keep = torch.ones_like(y, dtype=torch.bool)
    if name in DIVIDES and integers:
        # Division of an integer by 0 is an error, and the smallest integer divided by −1 is undefined.
        keep = (y != 0) & ~((y == -1) & (x == (torch.iinfo(x.dtype).min if x.dtype != torch.bool else 2)))
    elif name in DIVIDES:
        # PyTorch's vector instructions return NaN where the quotient is infinite.
        keep = (y == 0) | ~torch.isinf(x.float() / y.float()) | torch.isinf(x.float())
    elif "alpha" in name:
        # PyTorch's kernels multiply by alpha without rounding to infinity.
        keep = y.float().abs() != torch.tensor(3e38)
    elif "lerp" in name:
        # PyTorch's kernels add a product without rounding it to infinity.
        keep = (x.float().abs() < 1e38) & (y.float().abs() < 1e38) | torch.isinf(y.float()) | torch.isinf(x.float())
    elif name in ("type_as", "to a tensor") and x.is_floating_point():
        keep = x.abs() < 2**31
    return x[keep], y[keep]


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_values(name):
    refused = []
    for first in TYPES:
        for second in TYPES:
            compared(name, TWO[name], defined(name, *pairs(values(first), values(second))), refused)
    assert set(refused) == {(x, y) for x in NAMES for y in NAMES if refuses(name, x, y)}


NEVER_TRUTH = (
    "neg negative positive abs absolute square relu floor ceil trunc fix negated plus abs() new_zeros new_ones".split()
    + ["functional.relu", "functional.relu inplace", "2 - x", "x * True", "x ** 2", "x ** 2.0", "x ** 3", "x ** 0", "x ** 0.5", "x ** -0.5", "x ** -1.0", "rsub of a number", "in place"]
)  # fmt: skip
BITS = [
    "x & 12", "x & 1", "x & -4", "x & 0", "90 & x", "x | 5", "x | -128", "6 | x", "x ^ 5", "x ^ -3", "x & True", "x << 5", "x << 40", "x << -1", "x >> 40", "x >> 31", "x >> -1", "x >> 0", "5 << x", "-100 >> x",
]  # fmt: skip
OF_FLOATS = (
    "silu gelu softplus leaky_relu logsigmoid".split()
    + ["silu in place", "leaky_relu in place", "gelu by tanh", "softplus of beta", "round to a decimal", "round to hundreds", "sign of 0 of relu"]
)  # fmt: skip
REFUSED = {
    **{name: ["bool"] for name in NEVER_TRUTH},
    **{name: ["float32"] for name in ("~", "bitwise_not", "x << 2", "x >> 1", *BITS)},
    **{name: NAMES[:-1] for name in OF_FLOATS},
    **{name: ["bool"] for name in ("round", "functional.relu in place", "sign of 0 of round", "masked_fill of isnan")},
    # PyTorch wraps the number.
    **{name: ["uint8", "float32"] for name in ("x & -4", "x | -128", "x ^ -3", "x << -1", "x >> -1", "-100 >> x")},
    "x << 40": ["bool", "int64", "float32"],
    "5 << x": ["int64", "float32"],
    **{name: ["uint8"] for name in ("x % -3", "x // -3")},
    "x ** 3": ["bool", "int64"],  # 40000³
    "where of numbers": ["int32"],  # an int64 next to the ends of int32
    "full_like a fraction": ["uint8", "int8", "int16"],
}


def refused_conversion(name):
    if "float64" in name or "double" in name or name == "to Python's float" or "float16" in name or "half" in name:
        return NAMES
    narrow = any(word in name for word in ("uint8", "int8", "int16", "int64", "long", "Python's int"))
    return ["float32"] if narrow else []


@pytest.mark.parametrize("name", [*ONE, *CONVERSIONS])
def test_functions_of_one_value(name):
    refused = []
    for dtype in TYPES:
        x = values(dtype)
        if name in DIVIDES and not dtype.is_floating_point:
            x = x[x != 0]
        if name in CONVERSIONS and dtype.is_floating_point and "int" in name:
            # The conversion of numbers that the integer type cannot represent is undefined.
            x = x[x.abs() < 2**31]
        compared(name, (ONE | CONVERSIONS)[name], (x,), refused)
    assert [x for (x,) in refused] == (refused_conversion(name) if name in CONVERSIONS else REFUSED.get(name, []))


# Both orders of each pair, so that every value also ties with itself.
SMOOTH = [-2.5, -1.0, -0.5, -1e-4, 0.0, 3e-5, 0.25, 0.5, 1.0, 2.0, 3.0, 20.0]
NO_GRADIENT = {
    *"// floor_divide == != < <= > >= & | ^ bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor eq ne not_equal less less_equal greater greater_equal gt ge lt le".split(),
    *BITS, "<<", ">>", "bitwise_left_shift", "bitwise_right_shift", "div floor", "sum, floor", "~", "bitwise_not", "x << 2", "x >> 1", "x // 3", "x // 0.1", "x // -0.3", "x // -3", "7 // x", "7.5 // x", "7 % x", "logical_not",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in (*TWO, *ONE) if name not in NO_GRADIENT])
def test_gradients_are_pytorchs_at_ties_too(name):
    """The gradients of a score, and of a tensor combined with it."""
    fn = (TWO | ONE)[name]
    x, y = pairs(torch.tensor(SMOOTH), torch.tensor(SMOOTH)) if name in TWO else (torch.tensor(SMOOTH), None)
    for swapped in (False, True) if name in TWO else (False,):
        of = [x.clone().requires_grad_(), *([y.clone().requires_grad_()] if name in TWO else [])]
        ordered = (lambda s, t: fn(t, s)) if swapped else fn  # noqa: B023
        made = ordered(*of)
        theirs = torch.autograd.grad(made.sum(), of, allow_unused=True) if made.requires_grad else [None for _ in of]
        captured = [t.detach().clone().requires_grad_() for t in of[1:]]
        ours = traced(ordered, *captured, score=of[0], gradients=True)
        assert len(ours) == len(of)
        for which, mine, wanted in zip(("the score", "the tensor"), ours, theirs):
            wanted = torch.zeros_like(mine) if wanted is None else wanted
            # Derivatives at NaN and infinities are implementation-defined.
            usual = torch.isfinite(wanted) & torch.isfinite(made.detach())
            agree(mine[usual], wanted[usual], f"the derivative of {name} along {which}", False, [t.detach()[usual] for t in of], (2e-5, 1e-7))


def test_every_function_is_run(monkeypatch):
    seen = set()
    for known, function in FUNCTIONS.items():
        monkeypatch.setitem(FUNCTIONS, known, lambda *args, known=known, function=function, **kwargs: (seen.add(known), function(*args, **kwargs))[1])
    more = [
        lambda x, y: 1.0 + x, lambda x, y: 2 * x, lambda x, y: 2.0 // y, lambda x, y: 2.5 % x, lambda x, y: True & (x > y), lambda x, y: False | (x > y), lambda x, y: True ^ (x > y),
        lambda x, y: math.floor(x), lambda x, y: x.unsqueeze(-1),
    ]  # fmt: skip
    functions = [*TWO.values(), *[lambda x, y, fn=fn: fn(x) for fn in (ONE | CONVERSIONS).values()], *more]
    for fn in functions:
        for first in (torch.float32, torch.int32, torch.bool):
            x = torch.ones(3, dtype=first)
            try:
                sdpa.ScoreMod(lambda s, b, h, q, k: (x[q], fn(x[q], x[q]), s)[2])  # noqa: B023
            except (TracingError, AttributeError):
                pass
    assert set(FUNCTIONS) - seen == set(), set(FUNCTIONS) - seen


def test_logarithms_and_powers_of_positions_are_exact_where_they_are_whole():
    q = torch.arange(4096)
    for fn in (lambda x: torch.floor(torch.log2(x + 1)), lambda x: torch.log2((x + 1).float()).int(), lambda x: torch.floor(torch.log10(x + 1.0)), lambda x: torch.exp2(x % 120), lambda x: 2.0 ** (x % 120)):
        query, one = torch.zeros(1, 1, 4096, 1), torch.ones(1, 1, 1, 1)
        ours = flex_attention(query, one, one, lambda s, b, h, i, j: fn(i).float(), scale=1.0, return_lse=True)[1].flatten()  # noqa: B023
        agree(ours, fn(q), "a logarithm or a power", True, (q,))


def test_int64_are_shifted_and_joined_within_32_bits():
    x = torch.tensor([0, 1, -1, 5, -7, 1000, -1000, 2**30, -(2**31), 2**31 - 1, 123456789, -987654321])
    y = torch.tensor([0, 1, 3, 7, 13, 19])
    small, by = pairs(torch.tensor([0, 1, -1, 5, -7, 1000, -1000]), y)
    agree(traced(lambda x, y: low(x << y), small, by), low(small << by), "<<", True, (small, by))
    agree(traced(lambda y: low(1 << y), y), low(1 << y), "<<", True, (y,))
    left, right = pairs(x, x)
    for fn in (lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y, lambda x, y: x >> (y & 31), lambda x, y: ~x ^ y, lambda x, y: x & 0x7FFF0FF0 | y & -(2**31)):
        agree(traced(lambda x, y: low(fn(x, y)), left, right), low(fn(left, right)), "bits", True, (left, right))  # noqa: B023
    with pytest.raises(TracingError, match="an int64 value may range"):
        traced(lambda x, y: x << y, left, by.repeat(24))
    # Bits of positions.
    q = torch.arange(4096)
    for fn in (lambda q: q & 0xF0, lambda q: (q ^ (q >> 1)) & 255, lambda q: (q | 6) - (1 << (q & 7)), lambda q: ~q & 7, lambda q: q ^ (q * 5)):
        agree(traced(lambda x: low(fn(torch.zeros_like(x) + x)), q), low(fn(q)), "bits", True, (q,))  # noqa: B023


def test_activations_in_place_are_seen_under_every_name():
    x = torch.tensor(FLOATS)

    def mod(x, act):
        seen = x.clone()
        again = seen
        act(seen, inplace=True)
        return torch.where(again == seen, again, 77.0)

    for act in (F.relu, F.silu, F.leaky_relu):
        agree(traced(lambda x: mod(x, act), x), mod(x, act), "in place", False, (x,))  # noqa: B023
    with pytest.raises(TracingError, match="`relu` with inplace=True is applied to Scalar"):
        sdpa.ScoreMod(lambda s, *_: F.relu(sdpa.scalar("cap", 1.0), inplace=True))


def test_infinity_less_infinity_is_known_to_be_nan():
    query, one = torch.zeros(1, 1, 5, 1), torch.ones(1, 1, 1, 1)

    def mod(s, b, h, i, j):
        huge = (i + 1).float() * 3e38 * 10.0
        return torch.maximum(huge - huge, torch.zeros_like(huge))

    assert flex_attention(query, one, one, mod, scale=1.0, return_lse=True)[1].isnan().all()


def test_methods_of_captured_tensors_take_traced_values():
    number = torch.tensor(0.75)
    x = torch.tensor([-1.0, 0.5, 2.0])
    for fn in (lambda x: number.where(x > 0, x), lambda x: number.maximum(x), lambda x: number.masked_fill(x > 0, 3.0), lambda x: number - x, lambda x: number.clamp(x)):
        agree(traced(fn, x), fn(x) if fn(x).shape == x.shape else _each(fn, x), "a method", True, (x,))


def test_sixteen_bits_are_read_as_they_are_and_not_rounded_again():
    """Computed in f32, as in kernels of a compiled FlexAttention."""
    for dtype in (torch.float16, torch.bfloat16):
        x, y = pairs(torch.tensor([1.0, 3.0, 0.1, 255.0], dtype=dtype), torch.tensor([1.0, 0.3, 257.0], dtype=dtype))
        agree(traced(lambda x, y: x * y + 1, x, y), x.float() * y.float() + 1, str(dtype), True, (x, y))
        agree(traced(lambda x, y: x.to(y.dtype) - y.type_as(x), x, y), x.float() - y.float(), str(dtype), True, (x, y))
        with pytest.raises(TracingError, match=f"rounded to {str(dtype)[6:]}"):
            sdpa.ScoreMod(lambda s, b, h, q, k: s.to(x[q].dtype))  # noqa: B023


def test_the_logarithm_of_0_is_no_nan_and_what_may_be_one_is_known():
    """The range of a value that may be infinite is kept if it cannot lead to NaN: otherwise `maximum` needs extra text for NaN."""
    q = torch.arange(9)
    zero, one = torch.zeros(1, 1, 9, 1), torch.ones(1, 1, 1, 1)
    lows = lambda x: torch.log(x.float())  # noqa: E731
    for fn in (
        lambda x: lows(x) / 2.0 * 3.0 + 1.0 - 2,
        lambda x: lows(x) - lows(x),
        lambda x: lows(x) * 0.0,
        lambda x: lows(x) * (x.float() - 1.0),
        lambda x: (x.float() - 1.0) / lows(x),
        lambda x: lows(x) / lows(x),
        lambda x: lows(x) + (x + 1).float() * 3e38 * 10.0,
        lambda x: torch.tanh(lows(x)) + torch.exp(lows(x)),
        lambda x: torch.sin(lows(x)),
        lambda x: torch.sqrt(lows(x)),
        lambda x: lows(x) % 2.0,
        lambda x: lows(x) // 2.0,
        lambda x: abs(lows(x)) - abs(lows(x)),
        lambda x: -lows(x) + lows(x),
    ):
        bounded = lambda x: torch.maximum(fn(x), torch.full_like(x, 0.5, dtype=torch.float32)).clamp(max=100.0)  # noqa: B023, E731
        ours = flex_attention(zero, one, one, lambda s, b, h, i, j: bounded(i), scale=1.0, return_lse=True)[1].flatten()  # noqa: B023
        agree(ours, bounded(q), "what follows from a logarithm of 0", False, (q,))
