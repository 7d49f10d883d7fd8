"""Bitwise operations on integers. The language does not have them, so they are computed by exact division, in two's complement."""

from __future__ import annotations

from typing import Any, Callable

from .arithmetic import floor_divide, logic, logical_not, xor
from .dtypes import BITS, category
from .errors import TracingError
from .values import NUMBERS, as_type, binary, common, computed, constant, kind_of, nonnegative, range_of, unary

# Adding it clears the sign bit of a negative number, or sets it on others.
_SIGN = constant(-(2**31))


def _integers(sign: str, x: Any, y: Any, out: Any) -> tuple:
    """Returns both operands as integers of the result's type."""
    trace, x, y = binary(x, y, out)
    element = common(x, y)
    if category(element) != 1:
        raise TracingError(f"`{sign}` is applied to {element}", "it takes integers or bools; compare first, or convert with `.int()`")
    return trace, element, as_type(x, element, trace), as_type(y, element, trace)


def _text(x: Any) -> str:
    return constant(x) if type(x) in NUMBERS else x.text


def _low(x: Any, trace: Any) -> tuple[str, int]:
    """Returns the bits of a value without its sign, as a non-negative integer, and their number."""
    if nonnegative(x):
        return x.text, range_of(x)[1].bit_length()
    return trace.let(f"select({x.text} < 0, {x.text} + {_SIGN}, {x.text})"), 31


def _common_bits(x: Any, y: Any, trace: Any) -> str:
    """Returns the text of `x & y`, an i32."""
    if type(x) in NUMBERS:
        x, y = y, x
    low, bits = _low(x, trace)
    if type(y) in NUMBERS:
        parts = [_run(low, bits, first, after) for first, after in _runs(y & (2**bits - 1))]
        total = trace.let(" + ".join(parts)) if parts else "0"
        negative = f"{x.text} < 0" if y < 0 else ""
    else:
        other, more = _low(y, trace)
        bits = min(bits, more)
        total = "0"
        for n in range(bits):
            both = trace.let(f"({_bit(low, n)}) * ({_bit(other, n)})")
            total = trace.let(f"{total} + {both} * {2**n}")
        negative = "" if nonnegative(y) else f"({x.text} < 0) & ({y.text} < 0)"
    if nonnegative(x) or not negative:
        return total
    return trace.let(f"select({negative}, {total} + {_SIGN}, {total})")


def _bit(low: str, n: int) -> str:
    return f"{low} / {2**n} % 2" if n else f"{low} % 2"


def _runs(mask: int) -> list[tuple[int, int]]:
    """Returns the start and the end of each run of ones."""
    found, n = [], 0
    while mask >> n:
        if mask >> n & 1:
            first = n
            while mask >> n & 1:
                n += 1
            found.append((first, n))
        n += 1
    return found


def _run(low: str, bits: int, first: int, after: int) -> str:
    part = f"{low} / {2**first}" if first else low
    part = f"{part} % {2 ** (after - first)}" if after < bits else part
    return f"({part}) * {2**first}" if first else part


def joined(sign: str) -> Callable:
    """`&`, `|` or `^` of booleans, or of the bits of integers."""

    def made(x: Any, y: Any, *, out: Any = None) -> Any:
        _, first, second = binary(x, y, out)
        if kind_of(first) == kind_of(second) == "bool":
            return xor(x, y) if sign == "^" else logic(sign, True)(x, y)
        trace, element, a, b = _integers(sign, x, y, out)
        both = _common_bits(a, b, trace)
        text = both if sign == "&" else f"{_text(a)} + {_text(b)} - {both}" + (f" - {both}" if sign == "^" else "")
        return trace.make(text, element, sign, a, b)

    return made


def inverted(x: Any, *, out: Any = None) -> Any:
    """`~`: `−1 − x` for an integer."""
    trace, x = unary(x, out)
    if x.kind == "bool":
        return logical_not(x)
    if x.kind == "f32":
        raise TracingError(f"`~` is applied to {x.element}", "it takes integers or bools; compare first")
    return computed(f"(0 - 1) - {x.text}", x.element, "-", trace, -1, x)


def _power(y: Any, trace: Any) -> str:
    """2 to the power of an integer from 0 to 31, which wraps at 31; some number of at least 1 for other exponents."""
    factors = [f"select({_bit(y.text, n)} == 1, {2 ** 2**n}, 1)" for n in range(5)]
    return trace.let(" * ".join(factors))


def left(x: Any, y: Any, *, out: Any = None) -> Any:
    """`x << y`: 0 if `y` is negative, or at least the number of bits of the type."""
    trace, element, a, b = _integers("<<", x, y, out)
    size = BITS[element]
    if type(b) in NUMBERS:
        if not 0 <= b < size:
            return trace.make("0", element, "either", 0, 0)
        by = _SIGN if b == 31 and element == "int32" else constant(2**b)
        return computed(f"{a.text} * {by}", element, "<<", trace, a, b)
    product = f"{_text(a)} * {_power(b, trace)}"
    # An int64 that is shifted out of 32 bits is rejected by its range.
    return computed(f"select(({b.text} >= 0) & ({b.text} < {min(size, 32)}), {product}, 0)", element, "<<", trace, a, b)


def right(x: Any, y: Any, *, out: Any = None) -> Any:
    """`x >> y`, rounding toward −∞: only the sign remains if `y` is negative, or at least the number of bits of the type."""
    trace, element, a, b = _integers(">>", x, y, out)
    if type(b) in NUMBERS and 0 <= b < 31:
        return floor_divide(a, 2**b)
    fill = f"select({_text(a)} < 0, 0 - 1, 0)"
    if type(b) in NUMBERS:
        return trace.make(fill, element, ">>", a, b)
    power = _power(b, trace)
    quotient = trace.let(f"{_text(a)} / {power}")
    if range_of(a)[0] < 0:
        quotient = trace.let(f"select({_text(a)} % {power} < 0, {quotient} - 1, {quotient})")
    return trace.make(f"select(({b.text} >= 0) & ({b.text} < 31), {quotient}, {fill})", element, ">>", a, b)


BITWISE: dict[str, Callable] = {
    **dict.fromkeys(("and", "rand", "bitwise_and"), joined("&")), **dict.fromkeys(("or", "ror", "bitwise_or"), joined("|")),
    **dict.fromkeys(("xor", "rxor", "bitwise_xor"), joined("^")), **dict.fromkeys(("invert", "bitwise_not"), inverted),
    **dict.fromkeys(("lshift", "bitwise_left_shift"), left), **dict.fromkeys(("rshift", "bitwise_right_shift"), right),
    "rlshift": lambda x, y: left(y, x), "rrshift": lambda x, y: right(y, x),
}  # fmt: skip
