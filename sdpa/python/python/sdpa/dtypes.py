"""PyTorch's element types in a trace: promotion, and the range of possible values of each traced value.

The language has i32 and f32. A traced value also has a PyTorch type, so that narrow integers wrap as in PyTorch. Positions and int64 tensors are int64 in
PyTorch: an operation on them that may exceed i32 is rejected. The ranges decide that. Most are known before a call; the others follow from the extents and
the tensors of the call.
"""

from __future__ import annotations

import math
from typing import Any, Callable

# The language's type for each PyTorch type.
KINDS = {
    "bool": "bool", "uint8": "i32", "int8": "i32", "int16": "i32", "int32": "i32", "int64": "i32", "float16": "f32", "bfloat16": "f32", "float32": "f32",
}  # fmt: skip
I32 = (-(2**31), 2**31 - 1)
# The range of each integer type. An int64 is stored in an i32 here.
LIMITS = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1), "int32": I32, "int64": I32}
BITS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
_SIGNED = ("int8", "int16", "int32", "int64")

Range = Any  # (least, greatest), or None for a float that may be anything, NaN included


def category(element: str) -> int:
    """0 for booleans, 1 for integers, 2 for floats."""
    return ("bool", "i32", "f32").index(KINDS[element])


def promoted(x: str, y: str) -> str:
    """Returns the result type of an operation on two tensors, as `torch.promote_types` does."""
    if x == y:
        return x
    if category(x) != category(y):
        return x if category(x) > category(y) else y
    if category(x) == 2:
        return "float32"
    if "uint8" in (x, y):
        other = y if x == "uint8" else x
        return "int16" if other == "int8" else other
    return _SIGNED[max(_SIGNED.index(x), _SIGNED.index(y))]


def of_number(x: Any) -> str:
    """Returns the type of a Python number, before promotion with a tensor."""
    return "bool" if isinstance(x, bool) else "int64" if isinstance(x, int) else "float32"


def with_number(element: str, x: Any) -> str:
    """Returns the result type of an operation on a tensor and a Python number: the tensor's type, unless the number has a higher category."""
    other = of_number(x)
    return element if category(element) >= category(other) else other


def _hull(*of: Any) -> Range:
    if any(x != x for x in of):
        return None
    return min(of), max(of)


def _through(f: Callable[[Any], Any], low: float = -math.inf, high: float = math.inf) -> Callable[[Range], Range]:
    """Returns the range rule of a function that is monotone between two numbers."""

    def made(x: Range) -> Range:
        if x is None or x[0] < low or x[1] > high:
            return None
        ends = []
        for end in x:
            try:
                ends.append(f(end))
            except (OverflowError, ValueError):
                ends.append(math.inf if end > 1 else -math.inf)
        return _hull(*ends)

    return made


def _pairs(f: Callable[[Any, Any], Any]) -> Callable[[Range, Range], Range]:
    def made(x: Range, y: Range) -> Range:
        return None if x is None or y is None else _hull(f(x[0], y[0]), f(x[0], y[1]), f(x[1], y[0]), f(x[1], y[1]))

    return made


def _bounded(low: float, high: float) -> Callable[[Range], Range]:
    return lambda x: None if x is None or math.isinf(x[0]) or math.isinf(x[1]) else (low, high)


def _quotient(f: Callable[[Any, Any], Any], step: int) -> Callable[[Range, Range], Range]:
    """Returns the range rule of a division, in which the divisor nearest to 0 is decisive."""

    def made(x: Range, y: Range) -> Range:
        if x is None or y is None:
            return None
        if not step:
            return None if y[0] <= 0 <= y[1] else _pairs(f)(x, y)
        near = [n for n in (y[0], y[1], -1, 1) if n != 0 and y[0] <= n <= y[1]]
        # In the language, a division by 0 gives 0.
        return _hull(0, *[f(a, b) for a in x for b in near])

    return made


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _rest(x: Range, y: Range) -> Range:
    """The range rule of a remainder with the sign of the dividend."""
    if x is None or y is None or isinstance(x[0] + x[1] + y[0] + y[1], float):
        return None
    most = max(abs(y[0]), abs(y[1]), 1) - 1
    return max(x[0], -most) if x[0] < 0 else 0, min(x[1], most) if x[1] > 0 else 0


def _modulo(x: Range, y: Range) -> Range:
    """The range rule of a remainder with the sign of the divisor."""
    if x is None or y is None or isinstance(x[0] + x[1] + y[0] + y[1], float):
        return None
    low, high = y[0] + 1 if y[0] < 0 else 0, y[1] - 1 if y[1] > 0 else 0
    return (low, min(high, x[1])) if x[0] >= 0 and low == 0 else (low, high)


def _absolute(x: Range) -> Range:
    return None if x is None else (0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1])), max(abs(x[0]), abs(x[1])))


def _either(*of: Range) -> Range:
    return None if None in of else (min(x[0] for x in of), max(x[1] for x in of))


def _long(x: Range) -> Range:
    """The range rule of a conversion from float to int64. The float may have been rounded, so the range is widened. PyTorch leaves infinities undefined."""
    if x is None:
        return None
    low = I32[0] if x[0] == -math.inf else math.floor(x[0] - abs(x[0]) * 1e-5)
    return low, I32[1] if x[1] == math.inf else math.ceil(x[1] + abs(x[1]) * 1e-5)


def _integer(x: Range) -> Range:
    """The range rule of a conversion from float to int32. PyTorch leaves floats out of range undefined; here they give the nearest int32."""
    made = _long(x)
    return I32 if made is None else (min(max(made[0], I32[0]), I32[1]), max(min(made[1], I32[1]), I32[0]))


def _all_bits(*of: Range) -> int:
    return max((end if end >= 0 else -1 - end).bit_length() for x in of for end in x)


def _and_bits(x: Range, y: Range) -> Range:
    most = [one[1] for one in (x, y) if one[0] >= 0]
    bits = _all_bits(x, y)
    return (0, min(most)) if most else (-(2**bits), 2**bits - 1)


def _or_bits(x: Range, y: Range) -> Range:
    bits = _all_bits(x, y)
    return (0 if x[0] >= 0 and y[0] >= 0 else -(2**bits), 2**bits - 1)


def _shifted_left(x: Range, y: Range) -> Range:
    """A shift by a negative number of bits, or by more than 63, gives 0."""
    least, most = max(y[0], 0), min(y[1], 63)
    return (0, 0) if most < least else _hull(0, *[end << by for end in x for by in (least, most)])


RULES: dict[str, Callable] = {
    "+": lambda x, y: None if x is None or y is None else _hull(x[0] + y[0], x[1] + y[1]),
    "-": lambda x, y: None if x is None or y is None else _hull(x[0] - y[1], x[1] - y[0]),
    "*": _pairs(lambda x, y: x * y),
    "/": _quotient(lambda x, y: x / y if not math.isinf(y) else math.nan, 0),
    "//": _quotient(lambda x, y: x // y, 1), "div": _quotient(_truncated, 1), "%": _modulo, "rest": _rest,
    "negate": lambda x: None if x is None else (-x[1], -x[0]), "abs": _absolute,
    "square": lambda x: None if x is None else tuple(end * end for end in _absolute(x)),
    "max": lambda x, y: None if x is None or y is None else (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: None if x is None or y is None else (min(x[0], y[0]), min(x[1], y[1])),
    "either": _either, "integer": _integer, "long": _long, "wrapped": lambda x: I32,
    "sqrt": _through(lambda x: math.sqrt(x), 0.0), "exp": _through(math.exp), "log": _through(math.log, 0.0),
    "floor": _through(lambda x: x if math.isinf(x) else math.floor(x)), "ceil": _through(lambda x: x if math.isinf(x) else math.ceil(x)),
    "tanh": _bounded(-1.0, 1.0), "erf": _bounded(-1.0, 1.0), "sin": _bounded(-1.0, 1.0), "cos": _bounded(-1.0, 1.0), "sigmoid": _bounded(0.0, 1.0),
    "&": _and_bits, "|": _or_bits, "^": _or_bits, "<<": _shifted_left,
    ">>": lambda x, y: (x[0] if x[0] < 0 else 0, x[1] if x[1] >= 0 else -1),
    "nearest": _through(lambda x: x if math.isinf(x) else round(x)),
    "anything": lambda *_: None,
}  # fmt: skip


def infinite_ends(rule: str, ranges: list) -> bool:
    """Returns true if a bound of a result may be infinite without the result being NaN: the logarithm of 0, and functions of it with finite numbers."""
    if rule == "log":
        return True
    if rule not in ("+", "-", "*", "/") or None in ranges:
        return False
    finite = [all([abs(end) < 1e38 for end in x]) for x in ranges]
    if rule in ("+", "-"):
        return any(finite)
    return any([sure and not other[0] <= 0 <= other[1] for sure, other in zip(finite, ranges)][1 if rule == "/" else 0 :])


class Step:
    """The origin of a value: a rule of `RULES` with operands, or an input; its type; and the source line if it may exceed i32."""

    __slots__ = ("element", "operands", "rule", "text", "where")

    def __init__(self, rule: str, operands: tuple, element: str, text: str):
        self.rule, self.operands, self.element, self.text = rule, operands, element, text
        self.where = ""


def within(x: Range, element: str) -> bool:
    """Returns true if an integer type contains a range."""
    return LIMITS[element][0] <= x[0] and x[1] <= LIMITS[element][1]


class Ranges:
    """The steps of a trace, for calls that must check that int64 values fit into i32."""

    __slots__ = ("_fits", "steps", "unsure")

    def __init__(self, steps: list[Step], unsure: list[int]):
        self.steps, self.unsure = steps[: unsure[-1] + 1], unsure
        # By extents: whether the extents alone are sufficient.
        self._fits: dict[tuple, bool] = {}

    def outside(self, extents: tuple, of_input: Callable[[Step], Range]) -> tuple[Step, Range] | None:
        """Returns the first step that may exceed i32, with its range."""
        found: list[Range] = []
        unsure = set(self.unsure)
        for n, step in enumerate(self.steps):
            if step.rule == "axis":
                made: Range = (0, extents[step.operands[0]] - 1)
            elif step.rule == "extent":
                made = (extents[step.operands[0]], extents[step.operands[0]])
            elif step.rule in ("tensor", "scalar"):
                made = of_input(step)
            else:
                made = RULES[step.rule](*[found[x] if isinstance(x, int) else x for x in step.operands])
            if step.element in LIMITS and (made is None or not within(made, step.element)):
                if n in unsure:
                    return step, made
                made = LIMITS[step.element]
            found.append(made)
        return None

    def check(self, extents: tuple, sources: dict[str, Any], span: Callable[[Any], tuple[int, int] | None]) -> tuple[Step, Range] | None:
        """Checks like `outside` for these tensors. `span` returns the smallest and the largest element of a tensor, or None if it cannot be read."""
        if 0 in extents:  # nothing is computed, and an axis without indices has no range
            return None
        fits = self._fits.get(extents)
        if fits is None:
            if len(self._fits) >= 64:
                self._fits.clear()
            fits = self._fits[extents] = self.outside(extents, _declared) is None
        if fits:
            return None

        def of_input(step: Step) -> Range:
            if step.rule == "scalar":
                value = step.operands[0].value
                return (value, value) if math.isfinite(value) else None
            limits = LIMITS.get(step.element)
            return limits if limits is None or step.operands[0] not in sources else span(sources[step.operands[0]]) or limits

        return self.outside(extents, of_input)


def _declared(step: Step) -> Range:
    """Returns the range of an input's type."""
    return LIMITS.get(step.element)
