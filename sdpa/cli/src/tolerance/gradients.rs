//! How far gradients may be from the oracle's.
//!
//! Derived as those of the forward pass, as `tests/harness/compare/gradients.rs` has it. The oracle carries these errors through to
//! each element of a gradient, to first order and as sums of magnitudes. With `Σ(n) = 4·√n·e`, `n` the number of keys and `M` the
//! magnitude of a score:
//!
//! - a weight is `exp(S − stats)`: `S` is off by what the forward pass allows, and scaling, stats and the difference round `|S| ≤ M`
//!   and `|stats|` three times each; the exponential is good to `8·e`; what is off by `x` in all moves a weight by up to `eˣ − 1`;
//! - `dP` and `δ` are sums of `dim_v` products, which are subtracted; `o`, which `δ` is made of, was rounded: `u`;
//! - `P` and `dS` are rounded to the operands' type in front of their products: `u + 4·e`;
//! - the slope of a modified score is off by what its own function makes of the error of the score, and by `8·e`;
//! - sums over keys, and over the queries of all heads of a group, run in f32 and are rounded: `Σ(terms) + u`, and `u` more where a
//!   group has several heads; those of a parameter's gradient run over up to all scores;
//! - small numbers have no relative errors: a weight below the smallest normal f32 may be 0, what is rounded to f16 is off by up
//!   to `2⁻²⁵`.
//!
//! Where `o` and stats were computed in the same run, they are off by what the forward pass allows, and so are the weights.

use super::{F32_ROUNDOFF, Wanted, Worst, least, roundoff, sum_of};
use crate::data::{Data, Element};
use serde::Serialize;

/// Errors that do not grow with a number count this often in its magnitude, as they decide nothing about how right it is.
pub(crate) const ABSOLUTE: f64 = 4.0;

/// The errors of an executor's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    /// Of a weight, relative.
    pub(crate) weight: f64,
    /// The same, for each unit of the magnitudes of its score and of the statistic.
    pub(crate) magnitude: f64,
    /// How often the error of the sum of weights counts in a weight: once where it was computed in the same run.
    pub(crate) sum: f64,
    /// Of `dP` and `δ`.
    pub(crate) product: f64,
    /// Of `o`, relative to itself.
    pub(crate) output: f64,
    /// Of `o`, relative to Σ p·|v|.
    pub(crate) computed_output: f64,
    /// The same, for each unit of the error of the sum of weights.
    pub(crate) computed_output_score: f64,
    /// Of `P` and `dS` in front of the second products.
    pub(crate) round: f64,
    /// Of a slope, besides what its function makes of the error of the score.
    pub(crate) slope: f64,
    pub(crate) over_keys: f64,
    pub(crate) over_queries: f64,
    pub(crate) over_scores: f64,
    /// A weight below this may be 0.
    pub(crate) tiny: f64,
    /// Of a rounded number, however small it is.
    pub(crate) small: f64,
}

impl Rates {
    /// For extents (batch, heads_q, heads_kv, seq_q, seq_kv, dim_v). `chained`: `o` and stats were computed in the same run.
    pub(crate) fn new(element: Element, shape: [usize; 6], chained: bool) -> Rates {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_v] = shape;
        let (u, e) = (roundoff(element), F32_ROUNDOFF);
        let group = heads_q / heads_kv;
        let ln_n = (seq_kv as f64).ln();
        let alone = Rates {
            weight: (8.0 + 3.0 * ln_n) * e,
            magnitude: 3.0 * e,
            sum: 0.0,
            product: sum_of(dim_v) + 2.0 * e,
            output: u,
            computed_output: 0.0,
            computed_output_score: 0.0,
            round: u + 4.0 * e,
            slope: 8.0 * e,
            over_keys: sum_of(seq_kv) + u,
            over_queries: sum_of(group * seq_q) + u + if group > 1 { u } else { 0.0 },
            over_scores: sum_of(batch * heads_q * seq_q * seq_kv),
            tiny: f64::from(f32::MIN_POSITIVE),
            small: least(element),
        };
        if !chained {
            return alone;
        }
        // What `compare` allows of `o` and stats, less its factor of 2, which stands in front of everything here.
        Rates {
            weight: alone.weight + sum_of(seq_kv) + (16.0 + 2.0 * ln_n) * e,
            magnitude: alone.magnitude + e,
            sum: 1.0,
            output: 0.0,
            computed_output: 2.0 * u + 2.0 * sum_of(seq_kv) + 16.0 * e,
            computed_output_score: 2.0,
            ..alone
        }
    }
}

/// What is added to an element of a gradient, or multiplies what is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Term {
    pub(crate) value: f64,
    /// How far it may be off.
    pub(crate) error: f64,
    /// The sizes that it is a difference of, and what no number of its type is smaller than.
    pub(crate) magnitude: f64,
}

impl Term {
    /// With what a sum of such terms may be off by, relative to each.
    fn in_sum(self, sum: f64) -> Term {
        Term { error: self.error + sum * self.value.abs(), ..self }
    }
}

/// A gradient of the oracle, and how far rounding may move each element; 0 where no query meets a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Gradient {
    pub(crate) value: Vec<f64>,
    pub(crate) error: Vec<f64>,
    pub(crate) magnitude: Vec<f64>,
}

impl Gradient {
    pub(crate) fn zeros(len: usize) -> Gradient {
        Gradient { value: vec![0.0; len], error: vec![0.0; len], magnitude: vec![0.0; len] }
    }

    /// Adds `factor` times `row`, where the sum may be off by `sum` of its terms.
    pub(crate) fn add(&mut self, from: usize, row: &[f64], factor: Term, sum: f64) {
        let factor = factor.in_sum(sum);
        let range = from..from + row.len();
        let (value, errors, sizes) = (&mut self.value[range.clone()], &mut self.error[range.clone()], &mut self.magnitude[range]);
        for (((value, errors), sizes), x) in value.iter_mut().zip(errors).zip(sizes).zip(row) {
            *value += factor.value * x;
            *errors += factor.error * x.abs();
            *sizes += factor.magnitude * x.abs();
        }
    }

    /// Adds one number.
    pub(crate) fn add_one(&mut self, at: usize, term: Term) {
        self.value[at] += term.value;
        self.error[at] += term.error;
        self.magnitude[at] += term.magnitude;
    }

    /// Adds another of the same length.
    pub(crate) fn merge(&mut self, other: &Gradient) {
        self.value.iter_mut().zip(&other.value).for_each(|(to, x)| *to += x);
        self.error.iter_mut().zip(&other.error).for_each(|(to, x)| *to += x);
        self.magnitude.iter_mut().zip(&other.magnitude).for_each(|(to, x)| *to += x);
    }

    pub(crate) fn may_be_small(&mut self, from: usize, dim: usize, small: f64) {
        self.error[from..][..dim].iter_mut().for_each(|error| *error += small);
        self.magnitude[from..][..dim].iter_mut().for_each(|magnitude| *magnitude += ABSOLUTE * small);
    }
}

/// How far one gradient is from the oracle's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    pub(crate) worst: Worst,
    squares: f64,
    norm: f64,
}

impl Tally {
    /// Compares neighbours, `got` from an element on; `stored`: what they were rounded to.
    pub(crate) fn compare(&mut self, want: &Gradient, range: std::ops::Range<usize>, got: &Data, at: usize) {
        let element = got.element();
        let (stored, small) = (roundoff(element), least(element));
        for (n, place) in range.enumerate() {
            let (got, value) = (got.get(at + n), want.value[place]);
            let error = want.error[place];
            let tolerance = 2.0 * (error + if error > 0.0 { small.max(stored * value.abs()) } else { 0.0 });
            let magnitude = want.magnitude[place] + ABSOLUTE * small;
            self.worst = self.worst.worse(Worst::of(got, Wanted { value, tolerance, magnitude, stored: element }));
            if value.is_finite() && got.is_finite() {
                self.squares += (got - value).powi(2);
                self.norm += value * value;
            }
        }
    }

    /// Both together.
    pub(crate) fn and(self, other: Tally) -> Tally {
        Tally { worst: self.worst.worse(other.worst), squares: self.squares + other.squares, norm: self.norm + other.norm }
    }

    /// ‖got − want‖ / ‖want‖, over finite elements.
    pub(crate) fn relative(&self) -> f64 {
        if self.norm > 0.0 { (self.squares / self.norm).sqrt() } else { self.squares.sqrt() }
    }
}

/// How far all gradients are, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GradientDistance(pub(crate) Vec<(String, Tally)>);

/// What is told of one gradient.
#[derive(Serialize)]
pub(crate) struct GradientCheck {
    pub(crate) name: String,
    pub(crate) relative: f64,
    #[serde(flatten)]
    pub(crate) worst: Worst,
}

impl GradientDistance {
    /// Within every tolerance.
    pub(crate) fn passes(&self) -> bool {
        self.0.iter().all(|(_, tally)| tally.worst.ratio <= 1.0)
    }

    /// How many elements no result could be wrong in.
    pub(crate) fn undecided(&self) -> u64 {
        self.0.iter().map(|(_, tally)| tally.worst.undecided).sum()
    }

    /// What is told.
    pub(crate) fn told(&self) -> Vec<GradientCheck> {
        let one = |(name, tally): &(String, Tally)| GradientCheck { name: name.clone(), relative: tally.relative(), worst: tally.worst };
        self.0.iter().map(one).collect()
    }
}
