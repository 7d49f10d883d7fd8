//! Functions of one number, without branches, so that loops over them vectorise.

use std::f32::consts::LOG2_E;

/// Returns `a · b + c`, fused where an instruction exists.
#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `1.5 · 2^23`: adding it rounds to an integer.
const ROUND: f32 = 12_582_912.0;

/// ln 2 in two parts; integers up to 2^9 times the first are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// Minimax coefficients of `(e^r − 1 − r) / r²` on [−ln 2 / 2, ln 2 / 2], highest power first.
const EXP: [f32; 6] = [1.987_569_2e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// Returns the integer nearest to `x / ln 2`, and `e^r − 1` of the remainder.
#[inline(always)]
fn reduced<const FMA: bool>(x: f32) -> (f32, f32) {
    let n = (x * LOG2_E + ROUND) - ROUND;
    let r = mul_add::<FMA>(n, -LN2_LOW, mul_add::<FMA>(n, -LN2_HIGH, x));
    let mut p = EXP[0];
    for c in &EXP[1..] {
        p = mul_add::<FMA>(p, r, *c);
    }
    (n, mul_add::<FMA>(p * r, r, r))
}

/// Returns `2^n` of an integer from −126 to 127.
#[inline(always)]
fn power(n: f32) -> f32 {
    // Adding `ROUND` puts the integer into the low bits of the float, from where the shift moves it into the exponent.
    f32::from_bits((n + (ROUND + 127.0)).to_bits() << 23)
}

#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    let within = if x > 89.0 { 89.0 } else { x };
    let within = if within < -104.0 { -104.0 } else { within };
    let (n, e) = reduced::<FMA>(within);
    // Scale in two steps: the smallest results are subnormal, and for the largest x a single factor would overflow.
    let half = ((n * 0.5) + ROUND) - ROUND;
    (1.0 + e) * power(half) * power(n - half)
}

#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    // With t = e^(−2|x|) − 1, tanh |x| is −t / (t + 2); t is accurate to the last bits for small x too.
    let twice = -2.0 * x.abs();
    let twice = if twice < -40.0 { -40.0 } else { twice };
    let (n, e) = reduced::<FMA>(twice);
    let scale = power(n);
    let t = mul_add::<FMA>(scale, e, scale - 1.0);
    (-t / (t + 2.0)).copysign(x)
}

/// Returns `1 − tanh²(x)`, accurate to the last bits wherever it is not 0.
#[inline(always)]
pub(super) fn sech_squared<const FMA: bool>(x: f32) -> f32 {
    let e = exp::<FMA>(-2.0 * x.abs());
    let d = 1.0 + e;
    4.0 * e / (d * d)
}

#[inline(always)]
pub(super) fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}

/// Returns the smaller number; a number precedes NaN, and −0 is smaller than 0.
#[inline(always)]
pub(super) fn min(x: f32, y: f32) -> f32 {
    let first = (x < y) | y.is_nan() | ((x == y) & x.is_sign_negative());
    if first & !x.is_nan() { x } else { y }
}

/// Returns the larger number; a number precedes NaN, and −0 is smaller than 0.
#[inline(always)]
pub(super) fn max(x: f32, y: f32) -> f32 {
    -min(-x, -y)
}

/// Returns the quotient, rounded toward zero, or 0 for a division by 0. It uses f64, which vectorises and never rounds the quotient of two 32-bit integers to
/// another integer.
#[inline(always)]
pub(super) fn divide(x: i32, y: i32) -> i32 {
    let quotient = (f64::from(x) / f64::from(y)) as i32;
    let quotient = if y == -1 { x.wrapping_neg() } else { quotient };
    if y == 0 { 0 } else { quotient }
}

/// Returns the remainder with the sign of the first operand, or 0 for a division by 0.
#[inline(always)]
pub(super) fn remainder(x: i32, y: i32) -> i32 {
    let rest = x.wrapping_sub(divide(x, y).wrapping_mul(y));
    if y == 0 { 0 } else { rest }
}

/// Returns the natural logarithm, computed in f64: that of the exponent, plus that of the fraction as a series in `(m − 1) / (m + 1)`.
#[inline(always)]
pub(super) fn log(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let bits = (if subnormal { x * 8_388_608.0 } else { x }).to_bits();
    // Split off the exponent so that the fraction is between 2/3 and 4/3: then nothing cancels near x = 1.
    let exponent = bits.wrapping_sub((2.0f32 / 3.0).to_bits()) as i32 >> 23;
    let m = f64::from(f32::from_bits(bits.wrapping_sub((exponent << 23) as u32)));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = 1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))))));
    let exponent = f64::from(exponent) - if subnormal { 23.0 } else { 0.0 };
    let y = (exponent * std::f64::consts::LN_2 + 2.0 * s * series) as f32;
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if (x < 0.0) | x.is_nan() { f32::NAN } else { y }
}

/// The largest argument for which [`sin`] and [`cos`] are accurate.
pub(super) const FAR: f32 = 1_000_000.0;

/// π/2 in two parts; integers up to 2^20 times the first are exact.
const QUARTER_HIGH: f64 = 1.570_796_326_734_125_6;
const QUARTER_LOW: f64 = 6.077_100_506_506_192e-11;

/// `1.5 · 2^52`: adding it rounds to an integer.
const ROUND_F64: f64 = 6_755_399_441_055_744.0;

/// Returns the sine of `x` plus `quarters` quarter turns.
#[inline(always)]
fn turned(x: f32, quarters: u64) -> f32 {
    let x = f64::from(x);
    let rounded = x * std::f64::consts::FRAC_2_PI + ROUND_F64;
    let n = rounded - ROUND_F64;
    let r = (x - n * QUARTER_HIGH) - n * QUARTER_LOW;
    let z = r * r;
    let sin = r + r * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0 - z / 39_916_800.0))));
    let cos =
        1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40_320.0 + z * (-1.0 / 3_628_800.0 + z / 479_001_600.0)))));
    let quarter = rounded.to_bits().wrapping_add(quarters);
    let y = if quarter & 1 == 0 { sin } else { cos };
    (if quarter & 2 == 0 { y } else { -y }) as f32
}

#[inline(always)]
pub(super) fn sin(x: f32) -> f32 {
    // Return ±0 unchanged: the sum in `turned` loses the sign of −0.
    if x == 0.0 { x } else { turned(x, 0) }
}

#[inline(always)]
pub(super) fn cos(x: f32) -> f32 {
    turned(x, 1)
}

#[inline(always)]
fn polynomial<const FMA: bool>(coefficients: &[f32], x: f32) -> f32 {
    coefficients[1..].iter().fold(coefficients[0], |p, c| mul_add::<FMA>(p, x, *c))
}

/// The error function: a polynomial near 0, and `1 − e^p(|x|)` elsewhere, both with minimax coefficients.
#[inline(always)]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    const NEAR: [f32; 6] = [-5.967_617e-4, 4.991_194_2e-3, -2.676_813_5e-2, 1.128_199_25e-1, -3.761_253_4e-1, 1.283_791_7e-1];
    const FAR: [f32; 7] =
        [-1.728_534_7e-5, 3.831_971_3e-4, -3.883_964_4e-3, 2.425_462_2e-2, -1.067_778_8e-1, -6.348_467e-1, -1.287_175_1e-1];
    let near = mul_add::<FMA>(polynomial::<FMA>(&NEAR, x * x), x, x);
    let t = x.abs();
    let t = if t > 5.0 { 5.0 } else { t };
    let far = mul_add::<FMA>(polynomial::<FMA>(&FAR, t), t, -t);
    let far = (1.0 - exp::<FMA>(far)).copysign(x);
    if x.abs() > 0.927_734_4 { far } else { near }
}
