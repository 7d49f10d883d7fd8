//! The definition of every [`Mode`] on one element.
//!
//! NaN propagates, with these exceptions:
//! - `min` and `max` return the operand that is not NaN.
//! - Comparisons are false, but ≠ is true.
//! - Logic treats it as true, because it is not 0.
//! - Selects ignore the branch that is not selected.
//! - Powers follow C: `x⁰ = 1ʸ = 1`.
//!
//! Where a formula gives ∞ · 0, its limit is used: gelu and swish of −∞ are −0.
//!
//! Functions come from `libm`, so every machine gets the same bits. Each is computed in f64, within about one unit in the last place (3e-14 of its
//! value for activations, which combine several). A mode is rounded once, at its end.

use super::number::Precision;
use crate::ir::pointwise::{Mode, Params};
use crate::ir::ty::DType;
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// The operands of a pointwise mode for one element. A mode ignores the operands that it does not use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Operand {
    /// First operand; the forward input of backward modes.
    pub x: f64,
    /// Second operand.
    pub b: f64,
    /// Condition of a select.
    pub t: f64,
    /// Incoming gradient of backward modes.
    pub dy: f64,
    /// Index of the element along [`Params::axis`].
    pub index: i64,
}

/// Evaluates `mode` for one element, in arithmetic of the type `compute`. Unless the type is bool, the operands are first converted to
/// it, and so is the result at the end.
pub fn pointwise(mode: Mode, params: &Params, compute: DType, precision: Precision, operand: Operand) -> f64 {
    let into = |x: f64| if compute == DType::Bool { x } else { precision.convert(x, compute) };
    let Operand { x, b, t, dy, index } = operand;
    let (x, b, dy) = (into(x), into(b), into(dy));
    if compute.is_integer()
        && let Some(y) = integer(mode, x as i64, b as i64)
    {
        // `integer` computes in 64 bits with wraparound. An i32 result wraps here.
        return if compute == DType::I32 { f64::from(y as i32) } else { y as f64 };
    }
    let truth = |holds: bool| f64::from(u8::from(holds));
    let y = match mode {
        Mode::Add => x + b,
        Mode::Sub => x - b,
        Mode::Mul => x * b,
        Mode::Div => x / b,
        Mode::AddSquare => x + b * b,
        Mode::Min => least(x, b),
        Mode::Max => -least(-x, -b),
        Mode::Mod => libm::fmod(x, b),
        Mode::FloorMod => floor_mod(x, b),
        Mode::Pow => libm::pow(x, b),
        Mode::Atan2 => libm::atan2(x, b),
        Mode::Sqrt => libm::sqrt(x),
        Mode::Rsqrt => 1.0 / libm::sqrt(x),
        Mode::Reciprocal => 1.0 / x,
        Mode::Abs => x.abs(),
        Mode::Neg => -x,
        Mode::Ceil => libm::ceil(x),
        Mode::Floor => libm::floor(x),
        Mode::Cos => libm::cos(x),
        Mode::Sin => libm::sin(x),
        Mode::Tan => libm::tan(x),
        Mode::Exp => libm::exp(x),
        Mode::Log => libm::log(x),
        Mode::Erf => libm::erf(x),
        Mode::Identity => x,
        Mode::TanhFwd => libm::tanh(x),
        Mode::SigmoidFwd => sigmoid(x),
        Mode::ReluFwd => relu(params, x).0,
        Mode::EluFwd => elu(params, x).0,
        Mode::GeluFwd => vanishing(x, normal_below(x)),
        Mode::SoftplusFwd => softplus(params.softplus_beta.unwrap_or(1.0), x),
        Mode::SwishFwd => vanishing(x, sigmoid(params.swish_beta.unwrap_or(1.0) * x)),
        Mode::GeluApproxTanhFwd => vanishing(x, sigmoid(2.0 * gelu_angle(x))),
        Mode::ReluBwd => dy * relu(params, x).1,
        Mode::EluBwd => dy * elu(params, x).1,
        Mode::TanhBwd => dy * (4.0 * sigmoid(2.0 * x) * sigmoid(-2.0 * x)),
        Mode::SigmoidBwd => dy * (sigmoid(x) * sigmoid(-x)),
        Mode::GeluBwd => dy * (normal_below(x) + vanishing(x, normal_density(x))),
        Mode::SoftplusBwd => dy * sigmoid(params.softplus_beta.unwrap_or(1.0) * x),
        Mode::SwishBwd => {
            let beta = params.swish_beta.unwrap_or(1.0);
            let (s, rest) = (sigmoid(beta * x), sigmoid(-beta * x));
            dy * (s + vanishing(beta * x, s * rest))
        }
        Mode::GeluApproxTanhBwd => {
            let (s, rest) = (sigmoid(2.0 * gelu_angle(x)), sigmoid(-2.0 * gelu_angle(x)));
            dy * (s + vanishing(2.0 * x * gelu_angle_slope(x), s * rest))
        }
        Mode::CmpEq => truth(x == b),
        Mode::CmpNeq => truth(x != b),
        Mode::CmpGt => truth(x > b),
        Mode::CmpGe => truth(x >= b),
        Mode::CmpLt => truth(x < b),
        Mode::CmpLe => truth(x <= b),
        Mode::LogicalAnd => truth(x != 0.0 && b != 0.0),
        Mode::LogicalOr => truth(x != 0.0 || b != 0.0),
        Mode::LogicalNot => truth(x == 0.0),
        Mode::GenIndex => index as f64,
        Mode::BinarySelect => {
            if t != 0.0 {
                x
            } else {
                b
            }
        }
    };
    into(y)
}

/// Integer arithmetic. It wraps, and division by zero is zero. `None` for modes that are not arithmetic.
fn integer(mode: Mode, x: i64, b: i64) -> Option<i64> {
    match mode {
        Mode::Add => Some(x.wrapping_add(b)),
        Mode::Sub => Some(x.wrapping_sub(b)),
        Mode::Mul => Some(x.wrapping_mul(b)),
        Mode::AddSquare => Some(x.wrapping_add(b.wrapping_mul(b))),
        Mode::Div => Some(if b == 0 { 0 } else { x.wrapping_div(b) }),
        Mode::Mod => Some(if b == 0 { 0 } else { x.wrapping_rem(b) }),
        Mode::FloorMod => {
            let rest = if b == 0 { 0 } else { x.wrapping_rem(b) };
            Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
        }
        Mode::Min => Some(x.min(b)),
        Mode::Max => Some(x.max(b)),
        Mode::Abs => Some(x.wrapping_abs()),
        Mode::Neg => Some(x.wrapping_neg()),
        Mode::Sqrt
        | Mode::Pow
        | Mode::Ceil
        | Mode::Cos
        | Mode::Exp
        | Mode::Floor
        | Mode::Log
        | Mode::Rsqrt
        | Mode::Sin
        | Mode::Tan
        | Mode::Erf
        | Mode::Identity
        | Mode::Reciprocal
        | Mode::Atan2
        | Mode::ReluFwd
        | Mode::TanhFwd
        | Mode::SigmoidFwd
        | Mode::EluFwd
        | Mode::GeluFwd
        | Mode::SoftplusFwd
        | Mode::SwishFwd
        | Mode::GeluApproxTanhFwd
        | Mode::ReluBwd
        | Mode::TanhBwd
        | Mode::SigmoidBwd
        | Mode::EluBwd
        | Mode::GeluBwd
        | Mode::SoftplusBwd
        | Mode::SwishBwd
        | Mode::GeluApproxTanhBwd
        | Mode::CmpEq
        | Mode::CmpNeq
        | Mode::CmpGt
        | Mode::CmpGe
        | Mode::CmpLt
        | Mode::CmpLe
        | Mode::LogicalAnd
        | Mode::LogicalOr
        | Mode::LogicalNot
        | Mode::GenIndex
        | Mode::BinarySelect => None,
    }
}

/// Returns the smaller of two numbers. −0 is smaller than 0, and NaN loses to a number.
pub(super) fn least(x: f64, b: f64) -> f64 {
    if x.is_nan() {
        return b;
    }
    if x < b || b.is_nan() || (x == b && x.is_sign_negative()) { x } else { b }
}

/// Returns the remainder with the sign of `b`.
fn floor_mod(x: f64, b: f64) -> f64 {
    let rest = libm::fmod(x, b);
    if rest == 0.0 {
        rest.copysign(b)
    } else if (rest < 0.0) != (b < 0.0) {
        rest + b
    } else {
        rest
    }
}

/// Returns `x · p` for a `p` that falls to 0 faster than `x` grows.
fn vanishing(x: f64, p: f64) -> f64 {
    if p == 0.0 && !x.is_nan() { p.copysign(x) } else { x * p }
}

fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + libm::exp(-x))
    } else {
        let e = libm::exp(x);
        e / (1.0 + e)
    }
}

/// Returns value and derivative. At the lower clip the derivative is the lower slope, at the upper clip 0.
fn relu(params: &Params, x: f64) -> (f64, f64) {
    let lower = params.relu_lower_clip.unwrap_or(0.0);
    let upper = params.relu_upper_clip.unwrap_or(f64::INFINITY);
    let slope = params.relu_lower_slope.unwrap_or(0.0);
    let (y, dy) = if x.is_nan() || x > lower {
        (x, if x.is_nan() { x } else { 1.0 })
    } else if slope == 0.0 {
        (lower, 0.0)
    } else {
        (lower + slope * (x - lower), slope)
    };
    if y >= upper && upper != f64::INFINITY { (upper, 0.0) } else { (y, dy) }
}

/// Returns value and derivative; at 0 the derivative is that from below.
fn elu(params: &Params, x: f64) -> (f64, f64) {
    let alpha = params.elu_alpha.unwrap_or(1.0);
    if x > 0.0 { (x, 1.0) } else { (alpha * libm::expm1(x), alpha * libm::exp(x)) }
}

fn softplus(beta: f64, x: f64) -> f64 {
    let z = beta * x;
    // If z is NaN, `max` returns 0, but the logarithm is NaN, so the result is NaN.
    (z.max(0.0) + libm::log1p(libm::exp(-z.abs()))) / beta
}

/// Returns Φ, the probability that a normal variable is below `x`.
fn normal_below(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

fn normal_density(x: f64) -> f64 {
    libm::exp(-0.5 * x * x) / (2.0 * PI).sqrt()
}

/// Returns the argument of the tanh in gelu_approx_tanh: `0.5 · (1 + tanh u) = sigmoid(2u)`.
fn gelu_angle(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)
}

fn gelu_angle_slope(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x)
}
