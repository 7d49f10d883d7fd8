//! The only place with tolerances.
//!
//! They are derived, not tuned. With `u` the unit roundoff of the operands' type and `e` that of f32 (2⁻²⁴):
//!
//! - a score is a sum of `dim_qk` products in f32: its error is at most about `4·√dim_qk·e` of the sum of magnitudes
//!   (rounding errors are independent: Higham and Mary, 2019, with a factor for the tails), and a weight's relative error
//!   is as much again, and twice `8·e` for the exponential;
//! - a score that is modified is off by as much times the slope, by the rounding of its own size, and by what the modification
//!   rounds inside (`library` knows for each how much that is, in units of `e`: the angle of a cosine, the power of a slope);
//! - weights are rounded to the operands' type before the second product (`u`), the result is rounded once more (`u`);
//! - that product and the sum of weights run over `seq_kv` terms in f32: `4·√seq_kv·e`.
//!
//! All of it is relative to `Σ p·|v|`, not to `|o|`: cancellation in `o` is not the executor's fault. A factor of 2 covers what
//! this leaves out (rescaling between blocks).
//!
//! The tolerances of gradients are derived in `gradients`, in the same way.

mod gradients;

use crate::oracle::Answer;
pub use gradients::{GotAlong, GradientDistance, compare_gradients, rates};
use sdpa::DType;

const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

/// What a tally needs to know of a distance.
pub trait Measured {
    /// The largest error over its tolerance: above 1 fails.
    fn worst(&self) -> f64;
    /// How near it is, in words.
    fn told(&self) -> String;
}

/// Error of a sum of `n` terms in f32, relative to the sum of magnitudes.
fn sum_of(n: usize) -> f64 {
    4.0 * (n as f64).sqrt() * F32_ROUNDOFF
}

/// Unit roundoff: half the distance from 1 to the next number.
pub fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1.0 / 2048.0,
        DType::BF16 => 1.0 / 256.0,
        DType::F32 => F32_ROUNDOFF,
        DType::I32 | DType::Bool => 0.0,
    }
}

/// How far a number moves, however small it is, when it is rounded to a type: half the distance between the smallest f16, and everything
/// below the smallest normal number of other types.
fn least(dtype: DType) -> f64 {
    if dtype == DType::F16 { 1.0 / f64::from(1u32 << 25) } else { f64::from(f32::MIN_POSITIVE) }
}

/// How far results are from the oracle's.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Distance {
    /// ‖o − want‖ / ‖want‖.
    pub o_relative: f64,
    /// The largest |o − want| over its tolerance: above 1 fails.
    pub o_worst: f64,
    /// The largest |stats − want| over its tolerance.
    pub stats_worst: f64,
}

impl Distance {
    /// Within every tolerance; NaN is not.
    pub fn passes(&self) -> bool {
        self.o_worst <= 1.0 && self.stats_worst <= 1.0
    }
}

impl Measured for Distance {
    fn worst(&self) -> f64 {
        self.o_worst.max(self.stats_worst)
    }

    fn told(&self) -> String {
        format!("{:.1e} relative, {:.2} and {:.2} of the tolerance", self.o_relative, self.o_worst, self.stats_worst)
    }
}

/// The sizes that tolerances depend on.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Of the operands.
    pub dtype: DType,
    /// Terms of a score.
    pub dim_qk: usize,
    /// Terms of an output element.
    pub seq_kv: usize,
    /// Elements of an output row.
    pub dim_v: usize,
}

/// Compares outputs, in the oracle's order, with the oracle's. A row without keys must be exactly zeros and −∞.
pub fn compare(sizes: Sizes, want: &Answer, o: &[f64], stats: Option<&[f64]>) -> Distance {
    let u = roundoff(sizes.dtype);
    let score = |row: usize| sum_of(sizes.dim_qk) * want.score_magnitude[row] + F32_ROUNDOFF * want.rounding[row];
    let sum = sum_of(sizes.seq_kv);
    let mut distance = Distance::default();
    let (mut squares, mut norm) = (0f64, 0f64);
    for (n, (&got, &expected)) in o.iter().zip(&want.o).enumerate() {
        let row = n / sizes.dim_v;
        let relative = 2.0 * u + 2.0 * score(row) + 2.0 * sum + 16.0 * F32_ROUNDOFF;
        // Below the smallest normal f16 there are no relative errors.
        // A tolerance of all that was added up forgives anything: such a case tests nothing.
        if 2.0 * relative > 1.0 {
            distance.o_worst = f64::INFINITY;
        }
        let tolerance = 2.0 * relative * want.o_magnitude[n] + if sizes.dtype == DType::F16 { 6e-8 } else { 0.0 };
        distance.o_worst = worst(distance.o_worst, got - expected, tolerance);
        squares += (got - expected).powi(2);
        norm += expected * expected;
    }
    if o.len() != want.o.len() {
        distance.o_worst = f64::INFINITY;
    }
    distance.o_relative = if norm > 0.0 { (squares / norm).sqrt() } else { squares.sqrt() };
    if let Some(stats) = stats {
        for (row, (&got, &expected)) in stats.iter().zip(&want.stats).enumerate() {
            if expected == f64::NEG_INFINITY {
                distance.stats_worst = worst(distance.stats_worst, if got == expected { 0.0 } else { 1.0 }, 0.0);
                continue;
            }
            let tolerance = 2.0 * (score(row) + sum + 16.0 * F32_ROUNDOFF + 2.0 * F32_ROUNDOFF * expected.abs());
            distance.stats_worst = worst(distance.stats_worst, got - expected, tolerance);
        }
        if stats.len() != want.stats.len() {
            distance.stats_worst = f64::INFINITY;
        }
    }
    distance
}

/// The larger of two ratios of error and tolerance; NaN counts as infinite.
fn worst(before: f64, error: f64, tolerance: f64) -> f64 {
    let ratio = if error == 0.0 { 0.0 } else { error.abs() / tolerance };
    if ratio.is_nan() { f64::INFINITY } else { before.max(ratio) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> Answer {
        Answer {
            o: vec![1.0, -0.5, 0.0],
            o_magnitude: vec![1.0, 1.0, 0.0],
            stats: vec![2.0, 3.0, f64::NEG_INFINITY],
            score_magnitude: vec![1.0; 3],
            rounding: vec![0.0; 3],
        }
    }

    const SIZES: Sizes = Sizes { dtype: DType::BF16, dim_qk: 64, seq_kv: 128, dim_v: 1 };

    fn passes(o: [f64; 3], stats: [f64; 3]) -> bool {
        compare(SIZES, &answer(), &o, Some(&stats)).passes()
    }

    #[test]
    fn errors_of_either_sign_nan_and_wrong_empty_rows_fail() {
        let inf = f64::NEG_INFINITY;
        let (o, s) = ([1.0, -0.5, 0.0], [2.0, 3.0, inf]);
        assert!(passes(o, s));
        assert!(passes([1.004, -0.504, 0.0], s));
        for (o, s) in [
            ([1.03, -0.5, 0.0], s),
            ([0.97, -0.5, 0.0], s),
            ([1.0, -0.5, 1e-30], s),
            ([f64::NAN, -0.5, 0.0], s),
            ([1.0, -0.5, f64::NAN], s),
            (o, [2.001, 3.0, inf]),
            (o, [1.999, 3.0, inf]),
            (o, [2.0, f64::NAN, inf]),
            (o, [2.0, 3.0, -1e38]),
            (o, [2.0, 3.0, f64::NAN]),
        ] {
            assert!(!passes(o, s), "{o:?} {s:?}");
        }
        assert!(!compare(SIZES, &answer(), &o[..2], None).passes());
        // Scores so large that any weight is right.
        let vague = Answer { score_magnitude: vec![1e6; 3], ..answer() };
        assert!(!compare(SIZES, &vague, &o, Some(&s)).passes());
    }
}
