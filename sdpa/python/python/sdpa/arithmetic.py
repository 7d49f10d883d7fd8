"""Arithmetic, comparisons, selections and conversions in the expression language, with PyTorch's semantics."""

from __future__ import annotations

import math
from typing import Any, Callable

from .dtypes import KINDS, category, promoted
from .errors import TracingError
from .values import (
    as_text, as_type, binary, common, computed, constant, differentiable, element_of, FUNCTIONS, kind_of, may_be_nan, no_truth, nonnegative, NUMBERS,
    Operators, unary, value, wrapped,
)  # fmt: skip


def arithmetic(sign: str) -> Callable:
    def made(x, y, *, alpha=1, out=None):
        trace, x, y = binary(x, y, out)
        if sign == "-":
            no_truth(sign, x)
            no_truth(sign, y)
        no_truth(sign, x, y)
        element = common(x, y)
        if alpha != 1:
            if isinstance(alpha, float) and category(element) < 2:
                raise TracingError(f"alpha={alpha} scales integers", "use an integer, or convert with `.float()`")
            y = FUNCTIONS["mul"](as_type(y, element, trace), alpha).lifted()
        a, b = as_type(x, element, trace), as_type(y, element, trace)
        made = computed(f"{as_text(a, element, trace)} {sign} {as_text(b, element, trace)}", element, sign, trace, a, b)
        made.place = shifted(sign, x, y, element)
        return made

    return made


def shifted(sign: str, x, y, element: str) -> tuple[str, int] | None:
    """Adds a constant to a position, or subtracts it. Returns the axis and the offset, or None for other operands."""
    if sign == "+" and isinstance(x, int):
        x, y = y, x
    place = getattr(x, "place", None)
    if place is None or sign not in "+-" or isinstance(y, bool) or not isinstance(y, int) or element not in ("int32", "int64"):
        return None
    return place[0], place[1] + (y if sign == "+" else -y)


def compare(sign: str) -> Callable:
    def made(x, y, *, out=None):
        trace, x, y = binary(x, y, out)
        if kind_of(x) == kind_of(y) == "bool" and sign in ("==", "!="):
            differ = xor(x, y)
            return differ if sign == "!=" else logical_not(differ)
        element = common(x, y)
        element = "int32" if element == "bool" else element
        return trace.make(f"{as_text(x, element, trace)} {sign} {as_text(y, element, trace)}", "bool", "either", False, True)

    return made


def logic(sign: str, strict: bool) -> Callable:
    def made(x, y, *, out=None):
        trace, x, y = binary(x, y, out)
        if strict and not kind_of(x) == kind_of(y) == "bool":
            raise TracingError(f"`{sign}` is applied to a number", "it takes bools; compare first")
        x, y = as_text(x, "bool", trace), as_text(y, "bool", trace)
        neutral = "true" if sign == "&" else "false"
        text = f"{x} {sign} {y}" if neutral not in (x, y) else f"({y if x == neutral else x})"
        return trace.make(text, "bool", "either", False, True)

    return made


def logical_not(x, *, out=None):
    trace, x = unary(x, out)
    return trace.make(f"!{as_text(x, 'bool', trace)}", "bool", "either", False, True)


def xor(x, y, *, out=None):
    trace, x, y = binary(x, y, out)
    x, y = (as_text(one, "bool", trace) for one in (x, y))
    return trace.make(f"({x} & !{y}) | (!{x} & {y})", "bool", "either", False, True)


def real(name: str, rule: str = "anything", text: str | None = None) -> Callable:
    """A function of floats; other numbers are converted to float."""

    def made(x, *, out=None):
        trace, x = unary(x, out)
        x = as_type(x, floating(x), trace)
        return trace.make((text or f"{name}({{0}})").format(x.text), x.element, rule, x, smooth=x.smooth)

    return made


def floating(x) -> str:
    """Returns the result type of a division or a function of floats."""
    return element_of(x) if kind_of(x) == "f32" else "float32"


def expm1(x, *, out=None):
    """(eˣ − 1) = tanh(x / 2) · (eˣ + 1), which does not cancel near 0."""
    trace, x = unary(x, out)
    x = as_type(x, floating(x), trace)
    return trace.make(f"tanh(0.5 * {x.text}) * (exp({x.text}) + 1.0)", x.element, "anything", x, smooth=x.smooth)


def log1p(x, *, out=None):
    """The logarithm of the rounded sum, plus a first-order correction for the rounding."""
    trace, x = unary(x, out)
    x = as_type(x, floating(x), trace)
    total = trace.make(f"{x.text} + 1.0", x.element, "anything", x, smooth=x.smooth).text
    lost = f"select(abs({x.text}) < 1.0, ({x.text} - ({total} - 1.0)) / {total}, 0.0)"
    return trace.make(f"log({total}) + {lost}", x.element, "anything", x, smooth=x.smooth)


def logarithm(base: float) -> Callable:
    """A logarithm that is exact where the result is an integer: `floor(log2(8))` is 3. The selection has no gradient, so it is omitted for scores and
    tensors."""

    def made(x, *, out=None):
        trace, x = unary(x, out)
        x = as_type(x, floating(x), trace)
        near = trace.make(f"log({x.text}) / {constant(math.log(base))}", x.element, "/", real("log", "log")(x), math.log(base), smooth=x.smooth)
        if x.smooth:
            return near
        whole = trace.let(f"floor({near.text} + 0.5)")
        return trace.make(f"select(pow({base!r}, {whole}) == {x.text}, {whole}, {near.text})", x.element, "either", near)

    return made


def sigmoid(x, *, out=None):
    """Uses an exponential of at most 1: accurate far below 0, and the gradient cannot overflow."""
    trace, x = unary(x, out)
    x = as_type(x, floating(x), trace)
    small = trace.make(f"exp(select({x.text} < 0.0, {x.text}, -{x.text}))", x.element, "sigmoid", x, smooth=x.smooth).text
    return trace.make(f"select({x.text} < 0.0, {small}, 1.0) / (1.0 + {small})", x.element, "sigmoid", x, smooth=x.smooth)


def either(name: str, rule: str, text: str | None = None) -> Callable:
    """A function of floats, or of integers, whose result is an integer then."""

    def made(x, *, out=None):
        trace, x = unary(x, out)
        no_truth(name, x)
        return computed((text or f"{name}({{0}})").format(x.text), x.element, rule, trace, x)

    return made


def positive_sign(x, *, out=None):
    _, x = unary(x, out)
    no_truth("+", x)
    return x


def rounding(name: str) -> Callable:
    """A rounding function of floats; an integer is returned unchanged."""

    def made(x, *, out=None):
        trace, x = unary(x, out)
        no_truth(name, x)
        return copied(x) if x.kind == "i32" else trace.make(f"{name}({x.text})", x.element, name, x, smooth=False)

    return made


def trunc(x, *, out=None):
    trace, x = unary(x, out)
    no_truth("trunc", x)
    if x.kind == "i32":
        return copied(x)
    # A truncated number is 0 or has the sign of the operand.
    return trace.make(f"select({x.text} < 0.0, ceil({x.text}), floor({x.text}))", x.element, "either", x, 0.0, smooth=False)


def where(condition, x=None, y=None, *, out=None):
    if x is None or y is None:
        raise TracingError("torch.where is called with a condition alone", "give both values: torch.where(condition, x, y)")
    trace, condition = unary(condition, out)
    if condition.kind != "bool":
        raise TracingError("the condition of torch.where is a number", "compare it: `x != 0`")
    x, y = value(x, trace), value(y, trace)
    if type(x) in NUMBERS and type(y) in NUMBERS:
        x = trace.literal(x)
    element, test = common(x, y), condition.text
    a, b = as_text(x, element, trace), as_text(y, element, trace)
    if element == "bool":
        return trace.make(f"({test} & {a}) | (!{test} & {b})", "bool", "either", False, True)
    return trace.make(f"select({test}, {a}, {b})", element, "either", x, y)


def masked_fill(x, mask, fill):
    trace, x = unary(x)
    fill = value(fill, trace)
    fits = category(element_of(fill)) <= category(x.element) if type(fill) in NUMBERS else promoted(fill.element, x.element) == x.element
    if not fits:
        raise TracingError(f"masked_fill puts a {element_of(fill)} into {x.element}", "convert first: `x.float().masked_fill(...)`")
    return where(mask, of_type(fill, x.element, trace), x)


def opposed(r: str, y: str, zero: str) -> str:
    return f"(({r} < {zero}) & ({y} > {zero})) | (({r} > {zero}) & ({y} < {zero}))"


def quotient_of(sign: str, x, y, out) -> tuple:
    """Returns both operands of a division with a remainder, their type, and their texts."""
    trace, x, y = binary(x, y, out)
    no_truth(sign, x, y)
    element = common(x, y)
    if category(element) == 1 and type(y) in NUMBERS and y == 0:
        raise TracingError("an integer is divided by 0", "divide by another number, or convert with `.float()`")
    return trace, x, y, element, as_text(x, element, trace), as_text(y, element, trace)


def floor_divide(x, y, *, out=None):
    """Rounds toward −∞, as in Python and PyTorch; the language's division rounds toward zero."""
    trace, x, y, element, a, b = quotient_of("//", x, y, out)
    if category(element) == 2:
        return floor_divide_floats(trace, y, element, a, b)
    quotient = computed(f"{a} / {b}", element, "div", trace, x, y)
    if nonnegative(x) and nonnegative(y):
        return quotient
    rest = trace.make(f"{a} % {b}", element, "rest", x, y).text
    below = trace.make(f"{rest} < 0" if isinstance(y, int) and y > 0 else opposed(rest, b, "0"), "bool", "either", False, True).text
    return trace.make(f"select({below}, {quotient.text} - 1, {quotient.text})", element, "//", x, y)


def floor_divide_floats(trace, y, element: str, a: str, b: str):
    """Uses the remainder, as PyTorch and Python do: a rounded quotient may be an integer where the exact one is less."""
    name = lambda text: trace.make(text, element, "anything", smooth=False).text  # noqa: E731
    known = type(y) in NUMBERS and y != 0 and y == y
    rest = name(f"{a} % {b}")
    near = name(f"({a} - {rest}) / {b}")
    near = name(f"select({f'{rest} < 0.0' if known and y > 0 else opposed(rest, b, '0.0')}, {near} - 1.0, {near})")
    whole = name(f"floor({near})")
    made = f"select({near} - {whole} > 0.5, {whole} + 1.0, {whole})"
    return trace.make(made if known else f"select({b} == 0.0, floor({a} / {b}), {made})", element, "anything", smooth=False)


def remainder(x, y, *, out=None):
    """Has the sign of the divisor, as in Python and PyTorch; the language's remainder has that of the dividend."""
    trace, x, y, element, a, b = quotient_of("%", x, y, out)
    rest = trace.make(f"{a} % {b}", element, "rest", x, y)
    if category(element) == 1 and nonnegative(x) and nonnegative(y):
        return rest
    zero = constant(0 if category(element) == 1 else 0.0)
    known = type(y) in NUMBERS and y > 0
    other = trace.make(f"{rest.text} < {zero}" if known else opposed(rest.text, b, zero), "bool", "either", False, True).text
    return trace.make(f"select({other}, {rest.text} + {b}, {rest.text})", element, "%", x, y)


def fmod(x, y, *, out=None):
    trace, x, y, element, a, b = quotient_of("fmod", x, y, out)
    return trace.make(f"{a} % {b}", element, "rest", x, y)


def divide(x, y, *, rounding_mode=None, out=None):
    if rounding_mode == "floor":
        return floor_divide(x, y, out=out)
    if rounding_mode == "trunc":
        trace, x, y, element, a, b = quotient_of("div", x, y, out)
        if category(element) == 1:
            return computed(f"{a} / {b}", element, "div", trace, x, y)
        return trunc(trace.make(f"{a} / {b}", element, "anything", smooth=False))
    if rounding_mode is not None:
        raise TracingError(f"rounding_mode is {rounding_mode!r}", "use None, 'floor' or 'trunc'")
    trace, x, y = binary(x, y, out)
    element = common(x, y)
    element = element if category(element) == 2 else "float32"
    return trace.make(f"{as_text(x, element, trace)} / {as_text(y, element, trace)}", element, "/", x, y)


def power(x, y, *, out=None):
    trace, x, y = binary(x, y, out)
    no_truth("**", x)
    element = common(x, y)
    if category(element) == 1:
        if type(y) not in NUMBERS or not 0 <= y <= 16:
            raise TracingError("an integer is raised to a power", "use a constant exponent from 0 to 16, or convert with `.float()`")
        if y == 0:
            return of_type(1, element, trace)
        product = copied(x)
        for _ in range(int(y) - 1):
            product = FUNCTIONS["mul"](product, x)
        return product
    a = as_type(x, element, trace)
    if type(y) in NUMBERS and y == 2:
        return either("square", "square")(a)
    # PyTorch's special cases: the root of −∞ is NaN, where C's pow returns +∞.
    if type(y) in NUMBERS and y in (0.5, -0.5):
        return FUNCTIONS["sqrt" if y > 0 else "rsqrt"](a)
    return trace.make(f"pow({as_text(a, element, trace)}, {as_text(y, element, trace)})", element, "anything", x, y)


def larger(name: str, x, y, element: str, trace):
    """`y` where it is beyond `x`, or NaN; else `x`, which may be NaN. No gradient reaches `y` where both are equal."""
    a, b = as_text(x, element, trace), as_text(y, element, trace)
    beyond = f"{a} {'<' if name == 'max' else '>'} {b}"
    beyond = f"({beyond}) | ({b} != {b})" if may_be_nan(y) else beyond
    return trace.make(f"select({beyond}, {b}, {a})", element, name, x, y)


def extreme(name: str) -> Callable:
    """`torch.maximum` and `torch.minimum`: NaN if an operand is NaN. If both are equal, each gets half of the gradient."""

    def made(x, y, *, out=None):
        trace, x, y, element = pair(x, y, out)
        if element == "bool":
            return (logic("|", True) if name == "max" else logic("&", True))(x, y)
        a, b = as_text(x, element, trace), as_text(y, element, trace)
        if category(element) == 1 or not (differentiable(x, y) or may_be_nan(x) or may_be_nan(y)):
            return trace.make(f"{name}({a}, {b})", element, name, x, y)
        if may_be_nan(y) and not may_be_nan(x):
            x, y = y, x
        made = larger(name, x, y, element, trace)
        if not differentiable(x, y):
            return made
        return trace.make(f"select({a} == {b}, 0.5 * {a} + 0.5 * {b}, {made.text})", element, name, x, y)

    return made


def pair(x, y, out) -> tuple:
    trace, x, y = binary(x, y, out)
    return trace, x, y, common(x, y)


def of_two(name: str) -> Callable:
    """`torch.max` and `torch.min` of two tensors; a number as the second argument is an axis there."""

    def made(x, other=None, *, out=None):
        if other is None or isinstance(other, (bool, int, float)):
            raise TracingError(f"`{name}` needs two traced values or tensors", f"use torch.{name}imum(x, y), or torch.clamp to bound x by a number")
        return FUNCTIONS[f"{name}imum"](x, other, out=out)

    return made


def number_wins(name: str) -> Callable:
    """`torch.fmax` and `torch.fmin`: the other operand if one is NaN. If both are equal, the first gets the gradient."""

    def made(x, y, *, out=None):
        trace, x, y, element = pair(x, y, out)
        if element == "bool":
            return extreme(name)(x, y)
        return trace.make(f"{name}({as_text(x, element, trace)}, {as_text(y, element, trace)})", element, "anything" if category(element) == 2 else name, x, y)

    return made


def clamp(x, min=None, max=None, *, out=None):  # noqa: A002 - PyTorch's names
    """NaN propagates, and `x` gets the full gradient at a bound."""
    trace, x = unary(x, out)
    bounds = [(value(bound, trace), name) for bound, name in ((min, "max"), (max, "min")) if bound is not None]
    if not bounds:
        raise TracingError("clamp is called without a bound", "give min=, max= or both")
    if len(bounds) == 2 and all(differentiable(bound) for bound, _ in bounds):
        raise TracingError("both bounds of clamp are tensors that may have gradients", "use torch.minimum(torch.maximum(x, low), high), or clamp twice")
    # PyTorch promotes all three operands together.
    element = x.element
    for bound, _ in bounds:
        element = common(as_type(x, element, trace), bound)
    no_truth("clamp", x, *[bound for bound, _ in bounds])
    for bound, name in bounds:
        a, b = as_type(x, element, trace), as_type(bound, element, trace)
        if category(element) == 1:
            x = trace.make(f"{name}({a.text}, {as_text(b, element, trace)})", element, name, a, b)
        else:
            x = larger(name, a, b, element, trace)
    return x


def of_type(x, element: str, trace):
    """Converts a value to a PyTorch type."""
    x = trace.literal(x) if type(x) in NUMBERS else x
    have, kind = x.element, KINDS[element]
    if have == element:
        return x
    if element in ("float16", "bfloat16"):
        raise TracingError(f"a value is rounded to {element}", "leave it a float32, as scores are: the kernels compute in float32")
    if kind != "i32" or x.kind == "bool":
        return as_type(x, element, trace)
    if x.kind == "i32":
        return trace.same(x, element) if element in ("int32", "int64") else wrapped(x, element, trace)
    if element == "int64" and x.range is None:
        raise TracingError("a float of unknown range is converted to int64", "convert it to int32, `.int()`: integers have 32 bits here")
    if element not in ("int32", "int64"):
        raise TracingError(f"a float is converted to {element}", f"convert it to int32 first, which drops the fraction, and then to {element}, which wraps")
    return as_type(x, element, trace)


def named(one: Any) -> str:
    """Returns the name of an element type of PyTorch, NumPy, or Python (as PyTorch interprets it)."""
    name = {bool: "bool", int: "int64", float: "float64"}.get(one) if isinstance(one, type) else None
    name = name or str(one).rsplit(".", 1)[-1]
    if name not in KINDS:
        raise TracingError(f"a value is converted to {name}", f"convert it to one of {', '.join(KINDS)}")
    return name


def cast(element: str) -> Callable:
    def made(x, *, memory_format=None):
        trace, x = unary(x)
        return of_type(x, element, trace)

    return made


def to(x, *args, dtype=None, other=None, device=None, non_blocking=False, copy=False, memory_format=None):
    """Converts to the type of an argument: a dtype, or a tensor's dtype. Devices and memory formats have no effect."""
    trace, x = unary(x)
    element = x.element
    for one in (*args, dtype, other):
        if one is None or isinstance(one, bool) or type(one).__name__ == "device" or is_device(one):
            continue
        element = one.lifted().element if isinstance(one, Operators) else named(one.dtype if hasattr(one, "shape") else one)
    return of_type(x, element, trace)


def is_device(one: Any) -> bool:
    return isinstance(one, str) and one.split(":")[0] in ("cpu", "cuda", "mps", "meta")


def to_type(x, dtype=None, non_blocking=False):
    if dtype is None:
        raise TracingError("`.type()` is called without a type", "use `x.dtype` to read the type")
    return to(x, dtype)


def same(x, *, memory_format=None):
    return unary(x)[1]


def unsqueezed(x, dim):
    """Returns a value itself: next to a row it is a row of one element, which is broadcast."""
    trace, x = unary(x)
    if dim not in (0, -1):
        raise TracingError(f"`unsqueeze({dim})` is applied to a value without axes", "use unsqueeze(-1) or unsqueeze(0)")
    return x


def copied(x, *, memory_format=None):
    """Returns a copy, which an in-place operation on the original does not change."""
    trace, x = unary(x)
    return trace.same(x, x.element)


def filled(default):
    def made(x, *given, fill_value=default, dtype=None, layout=None, device=None, requires_grad=False, pin_memory=False, memory_format=None):
        trace, x = unary(x)
        fill, *more = (*given, *(() if fill_value is None else (fill_value,)))
        if more:
            raise TracingError("fill_value is given twice", "give it once, by position or by name")
        return of_type(value(fill, trace), x.element if dtype is None else named(dtype), trace)

    return made


def new(default):
    def made(x, *size, dtype=None, fill_value=None, **others):
        if default is None and fill_value is None:
            if not size:
                raise TracingError("`new_full` is called without a number", "give one: `x.new_full((), 1.0)`")
            size, fill_value = size[:-1], size[-1]
        size = others.get("size", size)
        size = size[0] if size and isinstance(size[0], (tuple, list)) else size
        if any(n != 1 for n in size):
            raise TracingError(f"a tensor of shape {tuple(size)} is made of a traced value", "make one number, of shape ()")
        return filled(None)(x, fill_value if default is None else default, dtype=dtype)

    return made
