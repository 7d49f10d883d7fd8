//! How far results may be from the oracle's.
//!
//! Derived, not tuned, as `tests/harness/compare.rs` has it. With `u` the unit roundoff of the operands' type and `e` that of
//! f32 (2⁻²⁴):
//!
//! - a score is a sum of `dim_qk` products in f32: its error is at most about `4·√dim_qk·e` of the sum of magnitudes
//!   (rounding errors are independent: Higham and Mary, 2019, with a factor for the tails), and a weight's relative error
//!   is as much again, and twice `8·e` for the exponential;
//! - a score that is modified is off by what its function makes of that, and by the roundings inside (`oracle/rules.rs`);
//! - weights are rounded to the operands' type before the second product (`u`), the result is rounded once more (`u`);
//! - that product and the sum of weights run over `seq_kv` terms in f32: `4·√seq_kv·e`.
//!
//! All of it is relative to `Σ p·|v|`, not to `|o|`, and a factor of 2 covers rescaling between blocks. Where the oracle
//! itself is infinite or not a number (it is, for operands that are), a result must be the same.

pub(crate) mod gradients;

use crate::data::Element;
use serde::Serialize;

/// Unit roundoff of f32.
pub(crate) const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

/// Unit roundoff: half the distance from 1 to the next number.
fn roundoff(element: Element) -> f64 {
    match element {
        Element::F16 => 1.0 / 2048.0,
        Element::BF16 => 1.0 / 256.0,
        Element::F32 => F32_ROUNDOFF,
    }
}

/// How far a number moves, however small it is, when it is rounded: half the distance between the smallest f16, and everything below the
/// smallest normal number of other types.
fn least(element: Element) -> f64 {
    match element {
        Element::F16 => 1.0 / f64::from(1u32 << 25),
        Element::BF16 | Element::F32 => f64::from(f32::MIN_POSITIVE),
    }
}

/// The element that is furthest past, or nearest to, its tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Worst {
    /// Its distance from the oracle's.
    pub(crate) error: f64,
    /// How large that may be.
    pub(crate) tolerance: f64,
    /// The one over the other: above 1 fails.
    pub(crate) ratio: f64,
}

impl Worst {
    pub(crate) fn of(got: f64, want: f64, tolerance: f64) -> Worst {
        let same = got == want || (got.is_nan() && want.is_nan());
        let error = if same { 0.0 } else { (got - want).abs() };
        let ratio = if same { 0.0 } else { error / tolerance };
        // Infinite tolerances would forgive what is not a number.
        let comparable = same || (want.is_finite() && got.is_finite() && !ratio.is_nan());
        Worst {
            error: if error.is_nan() { f64::INFINITY } else { error },
            tolerance,
            ratio: if comparable { ratio } else { f64::INFINITY },
        }
    }

    pub(crate) fn worse(self, other: Worst) -> Worst {
        // Among equals the larger tolerance, so that perfect results have one to show.
        if (other.ratio, other.tolerance) > (self.ratio, self.tolerance) { other } else { self }
    }
}

/// How far results are from the oracle's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Distance {
    pub(crate) o: Worst,
    /// There if stats were compared.
    pub(crate) stats: Option<Worst>,
    squares: f64,
    norm: f64,
}

impl Distance {
    /// Within every tolerance.
    pub(crate) fn passes(&self) -> bool {
        self.o.ratio <= 1.0 && self.stats.is_none_or(|s| s.ratio <= 1.0)
    }

    /// ‖o − want‖ / ‖want‖, over finite elements.
    pub(crate) fn o_relative(&self) -> f64 {
        if self.norm > 0.0 { (self.squares / self.norm).sqrt() } else { self.squares.sqrt() }
    }

    /// Both together.
    pub(crate) fn and(self, other: Distance) -> Distance {
        let stats = match (self.stats, other.stats) {
            (Some(a), Some(b)) => Some(a.worse(b)),
            (a, b) => a.or(b),
        };
        Distance { o: self.o.worse(other.o), stats, squares: self.squares + other.squares, norm: self.norm + other.norm }
    }
}

/// The sizes that tolerances depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) element: Element,
    pub(crate) seq_kv: usize,
}

/// Error of a sum of `n` terms in f32, relative to the sum of magnitudes.
fn sum_of(n: usize) -> f64 {
    4.0 * (n as f64).sqrt() * F32_ROUNDOFF
}

/// One row of the oracle, and the sizes that rounding errors are proportional to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    pub(crate) o: Vec<f64>,
    /// Σ p·|v|, for each element of `o`.
    pub(crate) o_magnitude: Vec<f64>,
    /// −∞ where no key is kept.
    pub(crate) stats: f64,
    /// How far a score of a kept key may be off, at most.
    pub(crate) score_error: f64,
}

/// Compares a row. One without keys must be exactly zeros and −∞.
pub(crate) fn compare(sizes: Sizes, want: &Row, o: &[f64], stats: Option<f64>) -> Distance {
    let u = roundoff(sizes.element);
    let score = want.score_error;
    let sum = sum_of(sizes.seq_kv);
    let relative = 2.0 * u + 2.0 * score + 2.0 * sum + 16.0 * F32_ROUNDOFF;
    // Below the smallest normal f16 there are no relative errors.
    let absolute = match sizes.element {
        Element::F16 => 6e-8,
        Element::F32 | Element::BF16 => 0.0,
    };
    let mut distance = Distance::default();
    for ((&got, &expected), magnitude) in o.iter().zip(&want.o).zip(&want.o_magnitude) {
        distance.o = distance.o.worse(Worst::of(got, expected, 2.0 * relative * magnitude + absolute));
        if expected.is_finite() {
            distance.squares += (got - expected).powi(2);
            distance.norm += expected * expected;
        }
    }
    distance.stats = stats.map(|got| {
        let tolerance = 2.0 * (score + sum + 16.0 * F32_ROUNDOFF + 2.0 * F32_ROUNDOFF * want.stats.abs());
        Worst::of(got, want.stats, if want.stats.is_finite() { tolerance } else { 0.0 })
    });
    distance
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { element: Element::BF16, seq_kv: 128 };
    const INF: f64 = f64::INFINITY;

    fn row(o: f64, o_magnitude: f64, stats: f64) -> Row {
        Row { o: vec![o], o_magnitude: vec![o_magnitude], stats, score_error: 32.0 * F32_ROUNDOFF }
    }

    fn passes(want: &Row, o: f64, stats: f64) -> bool {
        compare(SIZES, want, &[o], Some(stats)).passes()
    }

    #[test]
    fn errors_of_either_sign_nan_and_wrong_empty_rows_fail() {
        let (full, empty) = (row(1.0, 1.0, 2.0), row(0.0, 0.0, -INF));
        assert!(passes(&full, 1.0, 2.0) && passes(&full, 1.004, 2.0) && passes(&full, 0.996, 2.0) && passes(&empty, 0.0, -INF));
        for (o, stats) in [(1.03, 2.0), (0.97, 2.0), (f64::NAN, 2.0), (INF, 2.0), (1.0, 2.001), (1.0, 1.999), (1.0, f64::NAN), (1.0, -INF)]
        {
            assert!(!passes(&full, o, stats), "{o} {stats}");
        }
        for (o, stats) in [(1e-30, -INF), (f64::NAN, -INF), (0.0, -1e38), (0.0, f64::NAN), (0.0, INF)] {
            assert!(!passes(&empty, o, stats), "{o} {stats}");
        }
    }

    #[test]
    fn where_the_oracle_is_not_finite_results_must_be_the_same() {
        let nan = row(f64::NAN, f64::NAN, f64::NAN);
        assert!(passes(&nan, f64::NAN, f64::NAN) && !passes(&nan, 1.0, f64::NAN) && !passes(&nan, f64::NAN, 0.0));
        let infinite = row(INF, INF, 1.0);
        assert!(passes(&infinite, INF, 1.0) && !passes(&infinite, -INF, 1.0) && !passes(&infinite, 3.0, 1.0));
    }

    #[test]
    fn the_worst_of_two_rows_is_kept() {
        let good = compare(SIZES, &row(1.0, 1.0, 2.0), &[1.0], None);
        let bad = compare(SIZES, &row(1.0, 1.0, 2.0), &[2.0], None);
        assert!(good.passes() && !good.and(bad).passes() && !bad.and(good).passes());
        assert_eq!(good.and(bad).o.error, 1.0);
        assert!((good.and(bad).o_relative() - 0.5f64.sqrt()).abs() < 1e-12);
        assert!(good.o.tolerance > 0.0 && good.stats.is_none());
    }
}
