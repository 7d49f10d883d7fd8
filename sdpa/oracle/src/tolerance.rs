//! Tolerances of results of a forward pass.
//!
//! The tolerances are derived, not tuned. With `u` the unit roundoff of the operands' type and `e` that of f32 (2⁻²⁴):
//!
//! - A score is a sum of `dim_qk` products in f32. Its error is at most about `4·√dim_qk·e` of the sum of magnitudes. Rounding errors are independent (Higham
//!   and Mary, 2019), with a factor for the tails.
//! - The error of a modified score has two parts: the effect of the error of the score, and the roundings inside the function, which the function reports.
//! - An error of `x` in a score changes its P by up to `eˣ − 1` of itself. The error of the softmax denominator changes all P of the row.
//! - P is rounded to the operands' type before the second GEMM (`u`), and the result is rounded once more (`u`).
//! - The exponential is accurate to `8·e`, in P and in the denominator.
//! - The second GEMM and the denominator run over `seq_kv` terms in f32: `4·√seq_kv·e`.
//!
//! All of it is relative to `Σ p·|v|`, not to `|o|`: cancellation in `o` is not the executor's fault. A factor of 2 covers rescaling between blocks. If the
//! oracle itself is infinite or NaN, as it is for such operands, a result must equal it. A result that is beyond the finite numbers of its type must be
//! infinite.
//!
//! The module `narrow` describes the additional roundings to 8-bit floats. They count once, without the factor.
//!
//! Rows whose every score is extremely low, such as −1e9, have right results too: f32 rounds such scores to numbers that are equal or far apart. Neither the
//! size of these scores nor that of `stats`, which cannot hold the logarithm of a sum there, excuses an error ([`of_difference`]).
//!
//! A tolerance that exceeds what was added up, `Σ p·|v|`, accepts any result: such an element is counted as *undecided*.
//!
//! These are worst cases of each element, and a sum of `n` terms counts `Σ(n) = 4·√n·e`, twice with the factor. Independent rounding errors of up to `e` of a
//! partial sum exceed that with a probability of at most `2·exp(−96) < 10⁻⁴¹` per element (Hoeffding's inequality for uniform errors). For a run that is below
//! 10⁻⁹. The module `norm` covers sums of dependent terms, and the limits of norms.

mod fixed_point;
pub(crate) mod gradients;
mod largest;
pub(crate) mod norm;

use crate::narrow::{Narrow, products_of};
pub use largest::Largest;
use norm::{Noise, NormRow, Norms, Verdict};

/// Unit roundoff of f32.
pub const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

/// The type of operands and results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// OCP's 8-bit float with 3 mantissa bits.
    E4M3,
    /// OCP's 8-bit float with 2 mantissa bits.
    E5M2,
}

impl Element {
    /// Returns the unit roundoff of the type: half the distance from 1 to the next number.
    #[must_use]
    pub fn roundoff(self) -> f64 {
        match self {
            Element::F16 => 1.0 / 2048.0,
            Element::BF16 => 1.0 / 256.0,
            Element::F32 => F32_ROUNDOFF,
            Element::E4M3 => 1.0 / 16.0,
            Element::E5M2 => 1.0 / 8.0,
        }
    }

    /// Returns the largest absolute rounding error of numbers near 0. It is half the distance between the smallest numbers for f16 and
    /// 8-bit floats. For other types it is the smallest normal number, because subnormal ones may be flushed to 0.
    #[must_use]
    pub fn least(self) -> f64 {
        match self {
            Element::F16 => 1.0 / f64::from(1u32 << 25),
            Element::BF16 | Element::F32 => f64::from(f32::MIN_POSITIVE),
            Element::E4M3 => 2f64.powi(-10),
            Element::E5M2 => 2f64.powi(-17),
        }
    }

    /// Returns the smallest magnitude that is rounded to infinity.
    fn overflow(self) -> f64 {
        match self {
            Element::F16 => 65_520.0,
            Element::BF16 => (2.0 - 2f64.powi(-8)) * 2f64.powi(127),
            Element::F32 => (2.0 - 2f64.powi(-24)) * 2f64.powi(127),
            Element::E4M3 | Element::E5M2 => f64::INFINITY,
        }
    }

    /// Returns the largest finite number of the type if conversions to it saturate; `None` if they overflow to infinity.
    pub(crate) fn saturates(self) -> Option<f64> {
        match self {
            Element::F32 | Element::F16 | Element::BF16 => None,
            Element::E4M3 => Some(448.0),
            Element::E5M2 => Some(57344.0),
        }
    }

    /// Returns `x` times `scale`, saturated and divided by `scale` again, without rounding, and the error that rounding to this type
    /// adds.
    pub(crate) fn scaled(self, x: f64, scale: f64) -> (f64, f64) {
        let most = self.saturates().map_or(f64::INFINITY, |most| most / scale.abs());
        (if x.is_nan() { x } else { x.max(-most).min(most) }, self.roundoff() * x.abs().min(most) + self.least() / scale.abs())
    }
}

/// The expected value of an element of a result, and its tolerance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) value: f64,
    /// The largest accepted distance from `value`.
    pub(crate) tolerance: f64,
    /// The sum of the magnitudes of the terms that the element adds up. A larger tolerance accepts any result.
    pub(crate) magnitude: f64,
    /// The type to which the executor rounds the element.
    pub(crate) stored: Element,
}

/// The element of a result with the largest ratio of error and tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Worst {
    /// The executor's value.
    pub got: f64,
    /// The oracle's value.
    pub want: f64,
    /// The distance between the two.
    pub error: f64,
    /// The largest accepted distance.
    pub tolerance: f64,
    /// `error` divided by `tolerance`; above 1 the element fails.
    pub ratio: f64,
    /// Number of elements whose tolerance accepts any result.
    pub undecided: u64,
}

impl Worst {
    pub(crate) fn of(got: f64, wanted: Wanted) -> Worst {
        let Wanted { value: want, tolerance, magnitude, stored } = wanted;
        // An element whose tolerance is NaN may have any finite value.
        let tolerance = if tolerance.is_nan() { f64::INFINITY } else { tolerance };
        let overflows = got.is_infinite() && want.is_finite() && want.abs() + tolerance >= stored.overflow() && want * got > 0.0;
        let same = got == want || (got.is_nan() && want.is_nan()) || overflows;
        let error = if same { 0.0 } else { (got - want).abs() };
        let ratio = if same { 0.0 } else { error / tolerance };
        // An infinite tolerance must not accept NaN.
        let comparable = same || (want.is_finite() && got.is_finite() && !ratio.is_nan());
        Worst {
            got,
            want,
            error: if error.is_nan() { f64::INFINITY } else { error },
            tolerance,
            ratio: if comparable { ratio } else { f64::INFINITY },
            undecided: u64::from(want.is_finite() && tolerance > 0.0 && (tolerance > magnitude || magnitude.is_nan())),
        }
    }

    pub(crate) fn worse(self, other: Worst) -> Worst {
        // Among equal ratios, keep the larger tolerance, so that exact results report a tolerance above 0 too.
        let worst = if (other.ratio, other.tolerance) > (self.ratio, self.tolerance) { other } else { self };
        Worst { undecided: self.undecided + other.undecided, ..worst }
    }
}

/// The distance of an executor's forward results from the oracle's results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// The element of the output with the largest ratio of error and tolerance.
    pub o: Worst,
    /// The element of `stats` with the largest ratio, if `stats` was compared.
    pub stats: Option<Worst>,
    /// The row maximum with the largest ratio, if row maxima were compared.
    pub row_max: Option<Worst>,
    /// The sum of exponentials with the largest ratio, if these sums were compared.
    pub sum_exp: Option<Worst>,
    /// The comparison of the largest P, if the executor reported it.
    pub amax_s: Option<Worst>,
    /// The oracle's largest P, with the range that rounding allows.
    pub(crate) largest: Largest,
    /// Norms of the output, stats, row maxima and sums of exponentials.
    norms: [Norms; 4],
    squares: f64,
    norm: f64,
}

impl Distance {
    /// Returns whether every element, the norm of every tile of rows and, if it was compared, the largest P are within their tolerances.
    #[must_use]
    pub fn passes(&self) -> bool {
        let elements = self.o.ratio <= 1.0 && self.statistics().iter().chain([&self.amax_s]).flatten().all(|s| s.ratio <= 1.0);
        elements && self.norms.iter().all(|norms| norms.bound() <= 1.0)
    }

    /// Returns the outcome of the comparison: whether the results passed, failed or are undecided.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let decided = self.norms.iter().all(|norms| norms.undecided() == 0) && self.amax_s.is_none_or(|amax| amax.undecided == 0);
        Verdict::new(self.passes(), self.undecided() == 0 && decided)
    }

    /// Returns the norms of the errors of the output and of each row statistic: stats, `row_max`, `sum_exp`.
    #[must_use]
    pub fn norms(&self) -> [Norms; 4] {
        self.norms
    }

    /// Ends a tile of rows, whose norm is then compared with its limit.
    pub(crate) fn close(mut self) -> Distance {
        self.norms.iter_mut().for_each(Norms::close);
        self
    }

    /// Returns the worst element of each row statistic: stats, `row_max`, `sum_exp`.
    #[must_use]
    pub fn statistics(&self) -> [Option<Worst>; 3] {
        [self.stats, self.row_max, self.sum_exp]
    }

    /// Returns the number of elements whose tolerance accepts any result.
    #[must_use]
    pub fn undecided(&self) -> u64 {
        self.o.undecided + self.statistics().iter().flatten().map(|s| s.undecided).sum::<u64>()
    }

    /// Returns the error of the output relative to its norm, ‖o − want‖ / ‖want‖, over finite elements.
    #[must_use]
    pub fn o_relative(&self) -> f64 {
        if self.norm > 0.0 { (self.squares / self.norm).sqrt() } else { self.squares.sqrt() }
    }

    /// Combines the distances of two parts of the results.
    #[must_use]
    pub fn and(self, other: Distance) -> Distance {
        let worse = |a: Option<Worst>, b: Option<Worst>| match (a, b) {
            (Some(a), Some(b)) => Some(a.worse(b)),
            (a, b) => a.or(b),
        };
        let stats = worse(self.stats, other.stats);
        let [row_max, sum_exp] = [worse(self.row_max, other.row_max), worse(self.sum_exp, other.sum_exp)];
        let (amax_s, largest) = (worse(self.amax_s, other.amax_s), self.largest.and(other.largest));
        let norms = std::array::from_fn(|n| self.norms[n].and(other.norms[n]));
        let (squares, norm) = (self.squares + other.squares, self.norm + other.norm);
        Distance { o: self.o.worse(other.o), stats, row_max, sum_exp, amax_s, largest, norms, squares, norm }
    }
}

/// Returns the error of a sum of `n` terms in f32, relative to the sum of their magnitudes.
#[must_use]
pub fn sum_of(n: usize) -> f64 {
    4.0 * (n as f64).sqrt() * F32_ROUNDOFF
}

/// Returns the error of a score that its size excuses: `error` if it is at most 1, and otherwise 0. A correct executor subtracts the row
/// maximum first, and the difference of equal scores is 0 however large they are.
#[must_use]
pub fn of_difference(error: f64) -> f64 {
    if error > 1.0 { 0.0 } else { error }
}

/// The oracle's results of one row, and the magnitudes to which rounding errors are proportional.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    pub(crate) o: Vec<f64>,
    /// Σ p·|v| over the keys of the row, for each element of `o`.
    pub(crate) o_magnitude: Vec<f64>,
    /// Error of each element of `o` that comes from the errors of its own P, as a sum of magnitudes.
    pub(crate) o_error: Vec<f64>,
    /// Σ |v| over the unmasked keys, only for P in f16 or 8 bits.
    pub(crate) values: Vec<f64>,
    /// Log-sum-exp; a row that attends to no key has −∞, or the sink.
    pub(crate) stats: f64,
    /// Whether the row attends to no key, so that stats of −∞ are accepted too.
    pub(crate) keyless: bool,
    /// The largest Σ |q·k|·|scale| over the unmasked keys of the row: see [`Answer`](crate::Answer).
    pub(crate) score_magnitude: f64,
    /// Relative error of the softmax denominator.
    pub(crate) weight_error: f64,
    /// Error of stats that comes from the errors of the scores.
    pub(crate) stats_error: f64,
    /// The largest score, and the sum of exponentials relative to it.
    pub(crate) max: f64,
    pub(crate) sum: f64,
    /// Error of the largest score that comes from the errors of the scores.
    pub(crate) max_error: f64,
    pub(crate) sums: Sums,
    /// The largest P, after dropout.
    pub(crate) largest: Largest,
}

/// Sums over the keys of a row in which P is weighted by the norm ‖v‖ of each key's value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    /// Σ p·‖v‖ over the keys of the row.
    pub(crate) weights: f64,
    /// Σ p²·‖v‖² over the keys of the row.
    pub(crate) squares: f64,
    /// Σ ‖v‖ times the error of P that comes from the error of the key's own score.
    pub(crate) errors: f64,
    /// Σ ‖v‖² over the keys that dropout keeps.
    pub(crate) values: f64,
}

impl Sums {
    /// Adds the contribution of a key: its P, the error of that P, the dropout factor, and ‖v‖².
    pub(crate) fn add(&mut self, [weight, error, factor, square]: [f64; 4]) {
        self.weights += weight * square.sqrt();
        self.squares += weight * weight * square;
        self.errors += error * square.sqrt();
        self.values += factor * factor * square;
    }
}

impl Row {
    /// Returns the rounding error of the norm of the output.
    fn noise(&self, [element, stored]: [Element; 2], (seq_kv, narrow): (usize, Option<Narrow>)) -> Noise {
        let dims = self.o.len() as f64;
        // Halve this error: it is added to `fine`, which the limit doubles.
        let coarse = if narrow.is_some() { products_of(seq_kv) / 2.0 } else { 0.0 };
        let relative = self.weight_error + 2.0 * sum_of(seq_kv) + 16.0 * F32_ROUNDOFF + coarse;
        let square: f64 = self.o.iter().map(|x| x * x).sum();
        let output = element.roundoff().powi(2) + if stored == element { 0.0 } else { stored.roundoff().powi(2) };
        let (least, small) = match narrow {
            Some(narrow) => (stored.least() / narrow.o, (element.least() / narrow.weights).powi(2) * self.sums.values),
            None => (2.0 * stored.least(), small_weights(element).powi(2) * self.sums.values),
        };
        // A sum without terms has no rounding error.
        let there = if self.sums.weights == 0.0 && square == 0.0 { 0.0 } else { 1.0 };
        Noise {
            fine: relative * self.sums.weights + self.sums.errors,
            variance: element.roundoff().powi(2) * self.sums.squares + there * small,
            shared: 0.0,
            elements: output * square,
            small: there * least * dims.sqrt(),
        }
    }
}

/// Returns the absolute error of rounding a small P to 16 bits for the second GEMM. Only f16 has one: P is at most 1, and other types have smaller numbers. The
/// caller handles P in 8 bits, together with its scale.
fn small_weights(element: Element) -> f64 {
    if element == Element::F16 { element.least() } else { 0.0 }
}

/// Returns a bound on the error of a P equal to `weight` whose score is off by `score_error`.
pub(crate) fn weight_error(weight: f64, score_error: f64) -> f64 {
    // P is at most 1, so its error is too. A P of 0 has no error.
    if weight == 0.0 { 0.0 } else { (weight * score_error.exp_m1()).min(1.0) }
}

/// Compares the output and the statistics of a row over `seq_kv` keys: stats, largest score, sum of exponentials. `element` is the type of the operands,
/// `stored` that of the output. A row that attends to no key must be exactly zeros, with statistics of −∞ or the sink.
pub(crate) fn compare(
    [element, stored]: [Element; 2],
    (seq_kv, narrow): (usize, Option<Narrow>),
    want: &Row,
    o: &[f64],
    [stats, max, sum_exp]: [Option<f64>; 3],
) -> Distance {
    let score = want.weight_error;
    let sum = sum_of(seq_kv);
    // `relative` counts u twice. For 8-bit floats u has half of the error of the products, and the rounding of P is added once below.
    let u = if narrow.is_some() { products_of(seq_kv) / 2.0 } else { element.roundoff() };
    let relative = 2.0 * u + score + 2.0 * sum + 16.0 * F32_ROUNDOFF;
    // Below the smallest normal number of the type, rounding errors are absolute, not relative.
    let absolute = match stored {
        Element::F16 => 6e-8,
        Element::F32 | Element::BF16 => stored.least(),
        // The absolute error of an 8-bit type depends on the scale and is added below.
        Element::E4M3 | Element::E5M2 => 0.0,
    };
    let mut distance = Distance { largest: want.largest, ..Distance::default() };
    let mut values = Vec::with_capacity(o.len());
    for (n, (((&got, &expected), magnitude), error)) in o.iter().zip(&want.o).zip(&want.o_magnitude).zip(&want.o_error).enumerate() {
        // A sum without terms has no rounding error.
        let absolute = if *magnitude == 0.0 { 0.0 } else { absolute };
        // Dropout may leave a row only tiny P, whose f16 rounding errors are not proportional to their size.
        let sizes = want.values.get(n).copied().unwrap_or(0.0);
        let small = if *magnitude == 0.0 { 0.0 } else { small_weights(element) * sizes };
        let tolerance = 2.0 * (relative * magnitude + error) + absolute + small;
        let wanted = if let Some(narrow) = narrow {
            let weights = if *magnitude == 0.0 { 0.0 } else { element.roundoff() * magnitude + element.least() / narrow.weights * sizes };
            let off = tolerance + weights;
            // Values beyond the largest number all saturate to it.
            let [low, value, high] = [-off, 0.0, off].map(|off| stored.scaled(expected + off, narrow.o).0);
            let (_, rounded) = stored.scaled(expected.abs() + off, narrow.o);
            let off = if value.is_finite() { (high - value).max(value - low) } else { off };
            let rounded = if *magnitude == 0.0 { 0.0 } else { rounded };
            Wanted {
                value,
                tolerance: off + rounded,
                magnitude: magnitude + 4.0 * (element.least() / narrow.weights * sizes + stored.least() / narrow.o),
                stored,
            }
        } else {
            // If the result is stored in another type than the operands, it is rounded once more.
            let rounded = if stored == element { 0.0 } else { stored.roundoff() * (expected.abs() + tolerance) };
            Wanted { value: expected, tolerance: tolerance + rounded, magnitude: magnitude + 2.0 * absolute + 4.0 * small, stored }
        };
        distance.o = distance.o.worse(Worst::of(got, wanted));
        values.push(wanted.value);
        if expected.is_finite() && got.is_finite() {
            distance.squares += (got - expected).powi(2);
            distance.norm += expected * expected;
        }
    }
    let noise = want.noise([element, stored], (seq_kv, narrow));
    distance.norms[0].add(&NormRow { got: o, want: &values, magnitude: &want.o_magnitude, noise });
    let mut statistics = distance.norms;
    let mut judge = |n: usize, got: f64, wanted: Wanted| {
        let Wanted { value, tolerance, magnitude, stored: _ } = wanted;
        let noise = Noise { fine: tolerance / 2.0, ..Noise::default() };
        statistics[n].add(&NormRow { got: &[got], want: &[value], magnitude: &[magnitude], noise });
        Worst::of(got, wanted)
    };
    distance.stats = stats.map(|got| {
        let tolerance = 2.0 * (want.stats_error + sum + 16.0 * F32_ROUNDOFF + 2.0 * F32_ROUNDOFF * want.stats.abs());
        // An absolute error in the log-sum-exp is a relative error in the sum, so the magnitude is at least 1.
        let (mut value, magnitude) = (want.stats, want.stats.abs().max(1.0));
        if want.keyless && got == f64::NEG_INFINITY {
            value = got;
        }
        judge(1, got, Wanted { value, tolerance: if value.is_finite() { tolerance } else { 0.0 }, magnitude, stored: Element::F32 })
    });
    // For a row that attends to no key, an executor may also report statistics without the sink.
    let none = want.keyless && max.or(stats).unwrap_or(want.max) == f64::NEG_INFINITY && sum_exp.is_none_or(|sum| sum == 0.0);
    distance.row_max = max.map(|got| {
        // If the row has a NaN score or an infinite maximum, the executor may report NaN or infinity.
        let lost = |max: f64| max.is_nan() || max == f64::INFINITY;
        let value = if none {
            f64::NEG_INFINITY
        } else if lost(want.max) && lost(got) {
            got
        } else {
            want.max
        };
        let tolerance = 2.0 * (want.max_error + 2.0 * F32_ROUNDOFF * want.max.abs());
        let magnitude = want.max.abs().max(1.0);
        judge(2, got, Wanted { value, tolerance: if value.is_finite() { tolerance } else { 0.0 }, magnitude, stored: Element::F32 })
    });
    distance.sum_exp = sum_exp.map(|got| {
        // An executor with other rounding errors in its scores has another row maximum, which changes the sum but not the stats.
        let off = want.stats_error + want.max_error;
        let value = if none || want.keyless && got == 0.0 && max.is_none() { 0.0 } else { want.sum };
        let tolerance = 2.0 * value * (off.exp_m1() + sum + 16.0 * F32_ROUNDOFF);
        judge(3, got, Wanted { value, tolerance, magnitude: value, stored: Element::F32 })
    });
    distance.norms = statistics;
    distance
}

#[cfg(test)]
mod tests {
    use super::*;

    const INF: f64 = f64::INFINITY;

    fn row(o: f64, o_magnitude: f64, stats: f64) -> Row {
        let error = 32.0 * F32_ROUNDOFF;
        Row {
            o: vec![o],
            o_magnitude: vec![o_magnitude],
            o_error: vec![error * o_magnitude],
            stats,
            weight_error: error,
            stats_error: error,
            ..Row::default()
        }
    }

    fn passes(want: &Row, o: f64, stats: f64) -> bool {
        compare([Element::BF16; 2], (128, None), want, &[o], [Some(stats), None, None]).passes()
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

    /// Dropout keeps one of two keys, with a P of 3.13 times the smallest number of f16.
    #[test]
    fn weights_that_f16_rounds_by_much_of_themselves_are_right() {
        let least = 2f64.powi(-24);
        let [weight, value] = [3.13 * least, 16.0];
        let want = Row { values: vec![value], ..row(weight * value, weight * value, 0.0) };
        let verdict = |element, o: f64| compare([element; 2], (2, None), &want, &[o], [Some(0.0), None, None]).passes();
        let rounded = 3.0 * least * value;
        assert!(verdict(Element::F16, rounded) && verdict(Element::F16, weight * value));
        assert!(!verdict(Element::F16, 2.0 * weight * value) && !verdict(Element::F16, 0.0) && !verdict(Element::F16, -rounded));
        assert!(!verdict(Element::F32, rounded) && !verdict(Element::BF16, rounded * 0.9));
    }

    #[test]
    fn where_the_oracle_is_not_finite_results_must_be_the_same() {
        let nan = row(f64::NAN, f64::NAN, f64::NAN);
        assert!(passes(&nan, f64::NAN, f64::NAN) && !passes(&nan, 1.0, f64::NAN) && !passes(&nan, f64::NAN, 0.0));
        let infinite = row(INF, INF, 1.0);
        assert!(passes(&infinite, INF, 1.0) && !passes(&infinite, -INF, 1.0) && !passes(&infinite, 3.0, 1.0));
    }

    #[test]
    fn a_scale_that_is_no_number_is_no_panic() {
        for scale in [f64::NAN, INF, -INF, 0.0] {
            for x in [1.0, INF, f64::NAN] {
                let (value, off) = Element::E4M3.scaled(x, scale);
                assert!(value.is_nan() == x.is_nan() && (off.is_nan() || off >= 0.0), "{x} {scale}");
            }
        }
    }

    #[test]
    fn what_is_too_large_for_the_type_is_to_be_infinite() {
        let passes = |want: f64, got: f64| {
            compare([Element::F16; 2], (128, None), &row(want, want.abs(), 1.0), &[got], [Some(1.0), None, None]).passes()
        };
        assert!(passes(70_000.0, INF) && passes(-70_000.0, -INF) && passes(65_510.0, INF) && passes(65_510.0, 65_504.0));
        assert!(!passes(70_000.0, -INF) && !passes(70_000.0, 65_504.0) && !passes(60_000.0, INF) && !passes(70_000.0, f64::NAN));
    }

    #[test]
    fn a_tolerance_that_forgives_anything_decides_nothing() {
        let undecided = |score_error: f64| {
            let off = weight_error(0.5, score_error);
            let row = Row {
                o: vec![1.0],
                o_magnitude: vec![1.0],
                o_error: vec![off],
                stats: 2.0,
                weight_error: off,
                stats_error: score_error,
                ..Row::default()
            };
            compare([Element::BF16; 2], (128, None), &row, &[1.0], [Some(2.0), None, None]).undecided()
        };
        assert_eq!((undecided(1e-5), undecided(0.1), undecided(60.0), undecided(INF)), (0, 0, 2, 2));
        // A P of 0 has no error, however large the error of its score is.
        assert_eq!(weight_error(0.0, INF), 0.0);
    }

    #[test]
    fn the_worst_of_two_rows_is_kept() {
        let good = compare([Element::BF16; 2], (128, None), &row(1.0, 1.0, 2.0), &[1.0], [None; 3]);
        let bad = compare([Element::BF16; 2], (128, None), &row(1.0, 1.0, 2.0), &[2.0], [None; 3]);
        assert!(good.passes() && !good.and(bad).passes() && !bad.and(good).passes());
        assert_eq!(good.and(bad).o.error, 1.0);
        assert!((good.and(bad).o_relative() - 0.5f64.sqrt()).abs() < 1e-12);
        assert!(good.o.tolerance > 0.0 && good.stats.is_none());
    }
}
