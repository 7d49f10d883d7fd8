"""Activations, floating-point predicates, and rounding, with PyTorch's values and derivatives."""

from __future__ import annotations

import math
from typing import Any, Callable

from .arithmetic import copied, floating, log1p, sigmoid, where
from .errors import TracingError
from .values import FUNCTIONS, NUMBERS, as_text, as_type, binary, common, constant, kind_of, no_truth, unary, value


def _of_float(name: str, x: Any, out: Any = None) -> tuple:
    trace, x = unary(x, out)
    if x.kind != "f32":
        raise TracingError(f"`{name}` is applied to {x.element}", "convert to floats first, `.float()`")
    return trace, x


def _number(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TracingError(f"{name} is a value of type {type(x).__name__}", "use a Python number")
    return float(x)


def _activation(name: str) -> Callable:
    """Adds `inplace=True`, after which every reference to the value sees the change."""

    def wrap(fn: Callable) -> Callable:
        def made(x: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
            result = fn(x, *args, **kwargs)
            if not inplace:
                return result
            if not hasattr(x, "overwrite"):
                raise TracingError(f"`{name}` with inplace=True is applied to {type(x).__name__}", f"use the result of the function: `score = torch.nn.functional.{name}(score)`")
            return x.overwrite(name, result)

        return made

    return wrap


@_activation("relu")
def relu(x: Any) -> Any:
    """ReLU. Its gradient at 0 is 0, and NaN propagates."""
    trace, x = unary(x)
    no_truth("relu", x)
    if x.kind == "i32":
        return trace.make(f"max({x.text}, 0)", x.element, "max", x, 0)
    return trace.make(f"select({x.text} <= 0.0, 0.0, {x.text})", x.element, "max", x, 0.0)


@_activation("leaky_relu")
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """`x` above 0, else `negative_slope * x`, also at 0."""
    trace, x = _of_float("leaky_relu", x)
    slope = constant(_number("negative_slope", negative_slope))
    return trace.make(f"select({x.text} > 0.0, {x.text}, {x.text} * {slope})", x.element, "anything", x)


@_activation("silu")
def silu(x: Any) -> Any:
    """`x · sigmoid(x)`: NaN at −∞, as in PyTorch."""
    _, x = _of_float("silu", x)
    return FUNCTIONS["mul"](x, sigmoid(x))


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """GELU with the error function, or with tanh."""
    trace, x = _of_float("gelu", x)
    if approximate == "none":
        inner = f"erf({x.text} * {constant(math.sqrt(0.5))})"
    elif approximate == "tanh":
        cube = trace.let(f"{x.text} * {x.text} * {x.text}")
        inner = f"tanh({constant(math.sqrt(2.0 / math.pi))} * ({x.text} + 0.044715 * {cube}))"
    else:
        raise TracingError(f"approximate is {approximate!r}", "use 'none' or 'tanh'")
    return trace.make(f"0.5 * {x.text} * (1.0 + {inner})", x.element, "anything", x)


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """`log(1 + exp(beta · x)) / beta`, and `x` where `beta · x` exceeds the threshold."""
    trace, x = _of_float("softplus", x)
    beta, threshold = _number("beta", beta), _number("threshold", threshold)
    scaled = FUNCTIONS["mul"](x, beta)
    made = FUNCTIONS["div"](log1p(FUNCTIONS["exp"](scaled)), beta)
    return where(FUNCTIONS["gt"](scaled, threshold), x, made)


def log_sigmoid(x: Any) -> Any:
    """Computed with an exponential of at most 1, which cannot overflow."""
    trace, x = _of_float("logsigmoid", x)
    least = trace.make(f"select({x.text} < 0.0, {x.text}, 0.0)", x.element, "anything", x)
    small = trace.make(f"exp(select({x.text} < 0.0, {x.text}, -{x.text}))", x.element, "anything", x)
    return FUNCTIONS["sub"](least, log1p(small))


def sign(x: Any, *, out: Any = None) -> Any:
    """1, 0 or −1; 0 for NaN."""
    trace, x = unary(x, out)
    if x.kind == "bool":
        return copied(x)
    one, zero, less = ("1.0", "0.0", "(-1.0)") if x.kind == "f32" else ("1", "0", "(0 - 1)")
    text = f"select({x.text} > {zero}, {one}, select({x.text} < {zero}, {less}, {zero}))"
    return trace.make(text, x.element, "either", 0 if x.element == "uint8" else -1, 1, smooth=False)


def lerp(start: Any, end: Any, weight: Any, *, out: Any = None) -> Any:
    """Computed from the nearer end, as PyTorch does."""
    trace, x, y = binary(start, end, out)
    number = value(weight, trace)
    of = [one for one in (x, y, number) if type(one) not in NUMBERS]
    if type(x) in NUMBERS or type(y) in NUMBERS or kind_of(x) != "f32" or len({one.element for one in of}) > 1:
        raise TracingError("lerp is applied to values that are not floats of one type", "give two floats of one type and a weight; convert with `.float()` first")
    x, y, w = x.text, y.text, as_text(number, "float32", trace)
    near = f"{x} + {w} * ({y} - {x})"
    far = f"{y} - ({y} - {x}) * (1.0 - {w})"
    if type(number) in NUMBERS:
        text = near if abs(number) < 0.5 else far
    else:
        text = f"select(abs({w}) < 0.5, {near}, {far})"
    return trace.make(text, of[0].element, "anything", *of)


def logaddexp(x: Any, y: Any, *, out: Any = None) -> Any:
    """Computed from the larger operand. If both are equal, each gets half of the gradient."""
    trace, x, y = binary(x, y, out)
    element = common(x, y)
    if element != "float32" and not element.endswith("float16"):
        raise TracingError(f"logaddexp is applied to {element}", "convert to floats first, `.float()`")
    if type(x) in NUMBERS or type(y) in NUMBERS:
        raise TracingError("logaddexp is applied to a number", "make it a traced value: `torch.full_like(score, x)`")
    x, y = as_type(x, element, trace), as_type(y, element, trace)
    made = FUNCTIONS["add"](FUNCTIONS["maximum"](x, y), log1p(FUNCTIONS["exp"](FUNCTIONS["neg"](FUNCTIONS["abs"](FUNCTIONS["sub"](x, y))))))
    return trace.make(f"select(({x.text} == {y.text}) & (abs({x.text}) == inf), {x.text}, {made.text})", element, "anything", x, y)


def float_test(text: str, of_integers: bool) -> Callable:
    """A predicate of floats that has a constant result for integers and booleans."""

    def made(x: Any) -> Any:
        trace, x = unary(x)
        return trace.make(text.format(x.text) if x.kind == "f32" else constant(of_integers), "bool", "either", False, True)

    return made


def round_to_even(x: Any, *, decimals: int = 0, out: Any = None) -> Any:
    """Rounds to the nearest integer, ties to even. It is exact, because the fraction of a float and its remainder modulo 2 are floats."""
    trace, x = unary(x, out)
    no_truth("round", x)
    if isinstance(decimals, bool) or not isinstance(decimals, int):
        raise TracingError(f"decimals is a value of type {type(decimals).__name__}", "use an integer")
    if x.kind == "i32":
        if decimals:
            raise TracingError(f"{x.element} is rounded to {decimals} decimals", "only floats can be; convert with `.float()` first")
        return copied(x)
    if decimals:
        power = float(10 ** min(abs(decimals), 60))
        scale, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        return FUNCTIONS[back](round_to_even(FUNCTIONS[scale](x, power)), power)
    size = trace.let(f"abs({x.text})")
    whole = trace.let(f"floor({size})")
    rest = trace.let(f"{size} - {whole}")
    up = trace.let(f"({rest} > 0.5) | (({rest} == 0.5) & ({whole} % 2.0 == 1.0))")
    near = trace.let(f"select({up}, {whole} + 1.0, {whole})")
    # A negative number that is rounded to 0 keeps its sign, and so does −0, without a derivative.
    return trace.make(f"select({x.text} == 0.0, floor({x.text}), select({x.text} < 0.0, -{near}, {near}))", x.element, "nearest", x, smooth=False)


def _cosh_by_exponentials(x: Any, trace: Any) -> Any:
    """Uses the exponentials of x / 2, because the exponential of x overflows earlier than cosh."""
    half = FUNCTIONS["exp"](FUNCTIONS["mul"](x, 0.5))
    return trace.make(f"0.5 * {half.text} * {half.text} + 0.5 / {half.text} / {half.text}", x.element, "anything", x)


def sinh(x: Any, *, out: Any = None) -> Any:
    """`tanh(x) · cosh(x)`, which does not cancel near 0."""
    trace, x = unary(x, out)
    x = as_type(x, floating(x), trace)
    return FUNCTIONS["mul"](FUNCTIONS["tanh"](x), _cosh_by_exponentials(x, trace))


def cosh(x: Any, *, out: Any = None) -> Any:
    """`1 + 2 · sinh²(x / 2)`, whose derivative does not cancel near 0."""
    trace, x = unary(x, out)
    half = sinh(FUNCTIONS["mul"](as_type(x, floating(x), trace), 0.5))
    return trace.make(f"1.0 + 2.0 * {half.text} * {half.text}", half.element, "anything", half)


ACTIVATIONS: dict[str, Callable] = {
    "relu": relu, "leaky_relu": leaky_relu, "silu": silu, "gelu": gelu, "softplus": softplus, "log_sigmoid": log_sigmoid,
    "sign": sign, "sgn": sign, "lerp": lerp, "logaddexp": logaddexp, "sinh": sinh, "cosh": cosh, "round": round_to_even,
    "isfinite": float_test("abs({0}) < inf", True), "isinf": float_test("abs({0}) == inf", False), "isnan": float_test("{0} != {0}", False),
    "isposinf": float_test("{0} == inf", False), "isneginf": float_test("{0} == -inf", False),
}  # fmt: skip
