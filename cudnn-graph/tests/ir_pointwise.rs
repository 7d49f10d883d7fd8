//! Compares every mode of the interpreter with an independent plain function on awkward numbers, and every backward mode with differences of its
//! forward mode.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::Mode;
use cudnn_graph::ir::interp::{Operand, Precision, pointwise};
use cudnn_graph::ir::pointwise::{Params, Signature};

/// Awkward operands: zeros of both signs, infinities, NaN, subnormals, ties, large and small numbers.
const AWKWARD: [f64; 25] = [
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    5e-324,
    -5e-324,
    1e-310,
    f64::MIN_POSITIVE,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    -3.0,
    0.3,
    -7.25,
    88.0,
    -104.0,
    700.0,
    -746.0,
    1e18,
    -1e18,
    1e300,
    f64::MAX,
];

fn truth(holds: bool) -> f64 {
    if holds { 1.0 } else { 0.0 }
}

/// Abramowitz and Stegun 7.1.5 and 7.1.14: a series near 0, a continued fraction far from it.
fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let a = x.abs();
    let y = if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..200 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        2.0 / std::f64::consts::PI.sqrt() * sum
    } else {
        1.0 - erfc_far(a)
    };
    y.copysign(x)
}

fn erfc_far(a: f64) -> f64 {
    let mut fraction = 0.0;
    for n in (1..200).rev() {
        fraction = f64::from(n) / 2.0 / (a + fraction);
    }
    (-a * a).exp() / std::f64::consts::PI.sqrt() / (a + fraction)
}

/// Φ, accurate in the lower tail too.
fn phi(x: f64) -> f64 {
    let z = -x / 2f64.sqrt();
    if z > 1.5 { 0.5 * erfc_far(z) } else { 0.5 * (1.0 - erf(z)) }
}

/// Multiplies `x` by a factor that vanishes faster than it grows, where f64 gives ∞ · 0.
fn times(x: f64, p: f64) -> f64 {
    if p == 0.0 && x.is_infinite() { 0.0f64.copysign(x) } else { x * p }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn extreme(o: Operand, first: bool) -> f64 {
    if o.b.is_nan() || (first && !o.x.is_nan()) { o.x } else { o.b }
}

type Plain = fn(Operand) -> f64;

/// A definition of each mode, independent of the interpreter.
const TABLE: &[(Mode, Plain)] = &[
    (Mode::Add, |o| o.x + o.b),
    (Mode::Mul, |o| o.x * o.b),
    // If one operand is NaN, the result is the other operand. −0 counts as less than 0.
    (Mode::Min, |o| extreme(o, o.x.total_cmp(&o.b).is_le())),
    (Mode::Max, |o| extreme(o, o.x.total_cmp(&o.b).is_ge())),
    (Mode::Sqrt, |o| o.x.sqrt()),
    (Mode::AddSquare, |o| o.x + o.b * o.b),
    (Mode::Div, |o| o.x / o.b),
    (Mode::Mod, |o| o.x % o.b),
    (Mode::Pow, |o| o.x.powf(o.b)),
    (Mode::Sub, |o| o.x - o.b),
    (Mode::Abs, |o| if o.x < 0.0 { -o.x } else { o.x + 0.0 }),
    (Mode::Ceil, |o| o.x.ceil()),
    (Mode::Cos, |o| o.x.cos()),
    (Mode::Exp, |o| o.x.exp()),
    (Mode::Floor, |o| o.x.floor()),
    (Mode::Log, |o| o.x.ln()),
    (Mode::Neg, |o| -o.x),
    (Mode::Rsqrt, |o| o.x.sqrt().recip()),
    (Mode::Sin, |o| o.x.sin()),
    (Mode::Tan, |o| o.x.tan()),
    (Mode::Erf, |o| erf(o.x)),
    (Mode::Identity, |o| o.x),
    (Mode::Reciprocal, |o| o.x.recip()),
    (Mode::Atan2, |o| o.x.atan2(o.b)),
    (Mode::FloorMod, |o| {
        let rest = o.x % o.b;
        if rest == 0.0 {
            0f64.copysign(o.b)
        } else if rest.signum() == o.b.signum() {
            rest
        } else {
            rest + o.b
        }
    }),
    (Mode::ReluFwd, |o| if o.x > 0.0 || o.x.is_nan() { o.x } else { 0.0 }),
    (Mode::TanhFwd, |o| o.x.tanh()),
    (Mode::SigmoidFwd, |o| sigmoid(o.x)),
    (Mode::EluFwd, |o| if o.x > 0.0 { o.x } else { o.x.exp_m1() }),
    (Mode::GeluFwd, |o| times(o.x, phi(o.x))),
    (Mode::SoftplusFwd, |o| if o.x > 40.0 { o.x } else { o.x.exp().ln_1p() }),
    (Mode::SwishFwd, |o| times(o.x, sigmoid(o.x))),
    (Mode::GeluApproxTanhFwd, |o| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (o.x + 0.044715 * o.x.powi(3));
        // 1 + tanh u cancels far below 0, so use an exponential there.
        times(o.x, if u < 0.0 { (2.0 * u).exp() / (1.0 + (2.0 * u).exp()) } else { 0.5 * (1.0 + u.tanh()) })
    }),
    (Mode::ReluBwd, |o| o.dy * if o.x.is_nan() { o.x } else { truth(o.x > 0.0) }),
    (Mode::TanhBwd, |o| o.dy * if o.x.is_nan() { o.x } else { (o.x.cosh() * o.x.cosh()).recip() }),
    (Mode::SigmoidBwd, |o| o.dy * (sigmoid(o.x) * sigmoid(-o.x))),
    (Mode::EluBwd, |o| o.dy * if o.x > 0.0 { 1.0 } else { o.x.exp() }),
    (Mode::GeluBwd, |o| o.dy * (phi(o.x) + times(o.x, (-0.5 * o.x * o.x).exp() / (2.0 * std::f64::consts::PI).sqrt()))),
    (Mode::SoftplusBwd, |o| o.dy * sigmoid(o.x)),
    (Mode::SwishBwd, |o| o.dy * (sigmoid(o.x) + times(o.x, sigmoid(o.x) * sigmoid(-o.x)))),
    (Mode::GeluApproxTanhBwd, |o| {
        let c = (2.0 / std::f64::consts::PI).sqrt();
        let u = c * (o.x + 0.044715 * o.x.powi(3));
        let du = c * (1.0 + 3.0 * 0.044715 * o.x * o.x);
        let s = sigmoid(2.0 * u);
        o.dy * (s + times(2.0 * o.x * du, s * sigmoid(-2.0 * u)))
    }),
    (Mode::CmpEq, |o| truth(o.x == o.b)),
    (Mode::CmpNeq, |o| truth(o.x != o.b)),
    (Mode::CmpGt, |o| truth(o.x > o.b)),
    (Mode::CmpGe, |o| truth(o.x >= o.b)),
    (Mode::CmpLt, |o| truth(o.x < o.b)),
    (Mode::CmpLe, |o| truth(o.x <= o.b)),
    (Mode::LogicalAnd, |o| truth(o.x != 0.0) * truth(o.b != 0.0)),
    (Mode::LogicalOr, |o| truth(o.x != 0.0).max(truth(o.b != 0.0))),
    (Mode::LogicalNot, |o| 1.0 - truth(o.x != 0.0)),
    (Mode::GenIndex, |o| o.index as f64),
    (Mode::BinarySelect, |o| if o.t == 0.0 { o.b } else { o.x }),
];

fn plain(mode: Mode) -> Plain {
    TABLE.iter().find(|row| row.0 == mode).unwrap_or_else(|| panic!("{mode} is not in the table")).1
}

/// Returns the usual compute type of a mode.
fn usual(mode: Mode) -> DType {
    match mode.signature() {
        Signature::Compare | Signature::LogicalBinary | Signature::LogicalUnary => Bool,
        Signature::Index => I64,
        Signature::Unary | Signature::Identity | Signature::Binary | Signature::Select | Signature::Backward => F64,
    }
}

fn operands(mode: Mode) -> Vec<Operand> {
    let one = [1.0];
    let (x, b, t, dy): (&[f64], &[f64], &[f64], &[f64]) = match mode.signature() {
        Signature::Unary | Signature::Identity | Signature::LogicalUnary | Signature::Index => (&AWKWARD, &one, &one, &one),
        Signature::Binary | Signature::Compare | Signature::LogicalBinary => (&AWKWARD, &AWKWARD, &one, &one),
        Signature::Select => (&AWKWARD, &AWKWARD, &[0.0, 1.0, -2.0, f64::NAN], &one),
        Signature::Backward => (&AWKWARD, &one, &one, &AWKWARD),
    };
    let mut all = Vec::new();
    for &x in x {
        for &b in b {
            for &t in t {
                for (index, &dy) in (3..).zip(dy) {
                    all.push(Operand { x, b, t, dy, index });
                }
            }
        }
    }
    all
}

/// Returns whether numbers are equal, both NaN, or within the difference of two libraries: the tail of a normal distribution contains the exponential
/// of a rounded square. With `exact`, the signs of zeros must agree.
fn close(got: f64, want: f64, exact: bool) -> bool {
    if got.is_nan() || want.is_nan() {
        return got.is_nan() && want.is_nan();
    }
    if exact {
        return got.to_bits() == want.to_bits();
    }
    got == want || (want.is_finite() && (got - want).abs() <= 3e-14 * want.abs().max(1e-300))
}

/// Returns whether a mode is arithmetic, without the rounding of a function.
fn exact(mode: Mode) -> bool {
    let arithmetic = [
        Mode::Add,
        Mode::Sub,
        Mode::Mul,
        Mode::Div,
        Mode::AddSquare,
        Mode::Min,
        Mode::Max,
        Mode::Mod,
        Mode::FloorMod,
        Mode::Sqrt,
        Mode::Rsqrt,
        Mode::Reciprocal,
        Mode::Abs,
        Mode::Neg,
        Mode::Ceil,
        Mode::Floor,
        Mode::Identity,
        Mode::ReluFwd,
        Mode::BinarySelect,
        Mode::GenIndex,
        Mode::LogicalNot,
    ];
    mode.signature() == Signature::Compare || arithmetic.contains(&mode)
}

#[test]
fn every_mode_is_in_the_table_once() {
    for &mode in Mode::ALL {
        assert_eq!(TABLE.iter().filter(|row| row.0 == mode).count(), 1, "{mode}");
    }
    assert_eq!(TABLE.len(), Mode::ALL.len());
}

#[test]
fn every_mode_agrees_with_its_plain_function_on_awkward_numbers() {
    for &mode in Mode::ALL {
        for operand in operands(mode) {
            let got = pointwise(mode, &Params::default(), usual(mode), Precision::F64, operand);
            let want = plain(mode)(operand);
            assert!(close(got, want, exact(mode)), "{mode} {operand:?}: {got:e}, not {want:e}");
        }
    }
}

/// A grid between the awkward numbers, where functions curve.
#[test]
fn functions_agree_on_a_grid() {
    for &mode in Mode::ALL.iter().filter(|m| [Signature::Unary, Signature::Backward].contains(&m.signature())) {
        for i in -4000..4000 {
            let operand = Operand { x: f64::from(i) / 400.0 + 1e-3, b: 0.0, t: 0.0, dy: 0.75, index: 0 };
            let got = pointwise(mode, &Params::default(), F64, Precision::F64, operand);
            let want = plain(mode)(operand);
            // Both the test's series for erf and 1 − tanh² lose a few digits; the interpreter must not lose more.
            assert!(close(got, want, false) || (got - want).abs() <= 2e-13, "{mode} {operand:?}: {got:e}, not {want:e}");
        }
    }
}

/// Digits from a table, more precise than f64.
#[test]
fn erf_is_right_to_the_last_place() {
    let table = [
        (0.5, 0.520_499_877_813_046_5),
        (1.0, 0.842_700_792_949_714_9),
        (2.0, 0.995_322_265_018_952_7),
        (3.0, 0.999_977_909_503_001_4),
        (1e-10, 1.128_379_167_095_512_6e-10),
    ];
    for (x, want) in table {
        for sign in [1.0, -1.0] {
            let got = pointwise(Mode::Erf, &Params::default(), F64, Precision::F64, Operand { x: sign * x, ..Operand::default() });
            assert!((got - sign * want).abs() <= f64::EPSILON * want, "erf({x}) = {got:e}, not {want:e}");
        }
    }
}

/// Returns non-default constants for the modes that have some.
fn variants(mode: Mode) -> Vec<Params> {
    let none = Params::default();
    let mut all = vec![none];
    if [Mode::ReluFwd, Mode::ReluBwd].contains(&mode) {
        all.push(Params { relu_lower_clip: Some(-0.25), relu_upper_clip: Some(0.75), relu_lower_slope: Some(0.125), ..none });
    }
    if [Mode::EluFwd, Mode::EluBwd].contains(&mode) {
        all.push(Params { elu_alpha: Some(1.7), ..none });
    }
    if [Mode::SoftplusFwd, Mode::SoftplusBwd].contains(&mode) {
        all.extend([2.5, -1.5].map(|beta| Params { softplus_beta: Some(beta), ..none }));
    }
    if [Mode::SwishFwd, Mode::SwishBwd].contains(&mode) {
        all.extend([0.5, -2.0].map(|beta| Params { swish_beta: Some(beta), ..none }));
    }
    all
}

const PAIRS: [(Mode, Mode); 8] = [
    (Mode::ReluBwd, Mode::ReluFwd),
    (Mode::TanhBwd, Mode::TanhFwd),
    (Mode::SigmoidBwd, Mode::SigmoidFwd),
    (Mode::EluBwd, Mode::EluFwd),
    (Mode::GeluBwd, Mode::GeluFwd),
    (Mode::SoftplusBwd, Mode::SoftplusFwd),
    (Mode::SwishBwd, Mode::SwishFwd),
    (Mode::GeluApproxTanhBwd, Mode::GeluApproxTanhFwd),
];

#[test]
fn backward_modes_are_slopes_of_forward_modes() {
    assert_eq!(PAIRS.len(), Mode::ALL.iter().filter(|m| m.signature() == Signature::Backward).count());
    for (backward, forward) in PAIRS {
        for params in variants(backward) {
            // Avoid the kinks of the functions, which are at round numbers.
            for i in -60..60 {
                let x = f64::from(i) / 10.0 + 0.013;
                let at = |x| pointwise(forward, &params, F64, Precision::F64, Operand { x, ..Operand::default() });
                let h = 1e-5;
                let slope = (at(x + h) - at(x - h)) / (2.0 * h);
                for dy in [1.0, -2.5] {
                    let got = pointwise(backward, &params, F64, Precision::F64, Operand { x, dy, ..Operand::default() });
                    assert!((got - dy * slope).abs() < 1e-8, "{backward} {params:?} at {x}: {got}, not {}", dy * slope);
                }
            }
        }
    }
}

#[test]
fn constants_default_to_what_the_modes_say() {
    let of = |mode, params: &Params, x: f64| pointwise(mode, params, F64, Precision::F64, Operand { x, dy: 1.0, ..Operand::default() });
    let relu = variants(Mode::ReluFwd)[1];
    assert_eq!([-1.25, -0.25, 0.5, 0.75, 2.0].map(|x| of(Mode::ReluFwd, &relu, x)), [-0.375, -0.25, 0.5, 0.75, 0.75]);
    // At the lower clip the derivative is the one from below; at the upper clip it is 0.
    assert_eq!([-1.25, -0.25, 0.5, 0.75, 2.0].map(|x| of(Mode::ReluBwd, &relu, x)), [0.125, 0.125, 1.0, 0.0, 0.0]);
    assert_eq!(of(Mode::ReluFwd, &Params::default(), f64::NEG_INFINITY), 0.0, "a slope of 0 takes −∞ to the clip");
    assert_eq!(of(Mode::EluBwd, &Params { elu_alpha: Some(2.0), ..Params::default() }, 0.0), 2.0);
}

#[test]
fn integers_wrap_truncate_and_divide_by_zero_to_zero() {
    let of = |mode, compute, x: f64, b: f64| {
        pointwise(mode, &Params::default(), compute, Precision::F64, Operand { x, b, ..Operand::default() })
    };
    let (top, bottom) = (f64::from(i32::MAX), f64::from(i32::MIN));
    assert_eq!(of(Mode::Add, I32, top, 1.0), bottom);
    assert_eq!(of(Mode::Sub, I32, bottom, 1.0), top);
    assert_eq!(of(Mode::Mul, I32, 65536.0, 65536.0), 0.0);
    assert_eq!(of(Mode::AddSquare, I32, 1.0, 65536.0), 1.0);
    assert_eq!(of(Mode::Neg, I32, bottom, 0.0), bottom);
    assert_eq!(of(Mode::Abs, I32, bottom, 0.0), bottom);
    assert_eq!(of(Mode::Add, I64, top, 1.0), top + 1.0);
    assert_eq!(
        [(7.0, 2.0), (-7.0, 2.0), (7.0, -2.0), (7.0, 0.0), (bottom, -1.0)].map(|(x, b)| of(Mode::Div, I32, x, b)),
        [3.0, -3.0, -3.0, 0.0, bottom]
    );
    assert_eq!([(7.0, 3.0), (-7.0, 3.0), (7.0, -3.0), (7.0, 0.0)].map(|(x, b)| of(Mode::Mod, I32, x, b)), [1.0, -1.0, 1.0, 0.0]);
    assert_eq!([(7.0, 3.0), (-7.0, 3.0), (7.0, -3.0), (7.0, 0.0)].map(|(x, b)| of(Mode::FloorMod, I32, x, b)), [1.0, 2.0, -2.0, 0.0]);
    assert_eq!(of(Mode::Min, I32, -3.0, 2.0), -3.0);
    assert_eq!(of(Mode::Max, I32, -3.0, 2.0), 2.0);
    // Operands are converted to integers first.
    assert_eq!(of(Mode::Add, I32, 2.9, -1.9), 1.0);
    // These two integers above 2²⁴ would be equal in f32.
    assert_eq!(of(Mode::CmpLt, I32, 16_777_216.0, 16_777_217.0), 1.0);
}

#[test]
fn f32_precision_rounds_to_the_arithmetic() {
    let of = |mode, compute, x: f64, b: f64| {
        pointwise(mode, &Params::default(), compute, Precision::F32, Operand { x, b, ..Operand::default() })
    };
    assert_eq!(of(Mode::Add, F32, 1e8, 1.0), 1e8);
    assert_eq!(of(Mode::Add, F64, 1e8, 1.0), 1e8 + 1.0);
    assert_eq!(of(Mode::Add, F16, 2048.0, 1.0), 2048.0);
    assert_eq!(of(Mode::Add, BF16, 256.0, 1.0), 256.0);
    assert_eq!(of(Mode::Mul, F32, 1e30, 1e30), f64::INFINITY);
    // Subnormal results are kept, not flushed to 0.
    assert_eq!(of(Mode::Mul, F32, 2f64.powi(-100), 2f64.powi(-49)), 2f64.powi(-149));
    assert_eq!(of(Mode::CmpEq, F32, 16_777_216.0, 16_777_217.0), 1.0);
    assert_eq!(of(Mode::CmpEq, Bool, 16_777_216.0, 16_777_217.0), 0.0);
    for (x, b) in [(0.1f32, 0.7f32), (3.3, -9.1), (1e-40, 2e-5)] {
        let (wide_x, wide_b) = (f64::from(x), f64::from(b));
        for (mode, want) in [(Mode::Add, x + b), (Mode::Sub, x - b), (Mode::Mul, x * b), (Mode::Div, x / b)] {
            assert_eq!(of(mode, F32, wide_x, wide_b), f64::from(want), "{mode} {x} {b}");
        }
    }
}
