//! How far gradients may be from the oracle's.
//!
//! Derived as those of the forward pass, as `tests/harness/compare/gradients.rs` has it. The oracle carries these errors through to
//! each element of a gradient, to first order and as sums of magnitudes. With `Σ(n) = 4·√n·e`, `n` the number of keys and `M` the
//! largest magnitude of a score in a row:
//!
//! - a weight is `exp(S − stats)`: `S` is off by what the forward pass allows, and scaling, stats and the difference round `|S| ≤ M`
//!   and `|stats| ≤ M + ln n` three times each; the exponential is good to `8·e`;
//! - `dP` and `δ` are sums of `dim_v` products, which are subtracted; `o`, which `δ` is made of, was rounded: `u`;
//! - `P` and `dS` are rounded to the operands' type in front of their products: `u + 4·e`;
//! - the slope of a modified score is off by what its own function makes of the error of the score, and by `8·e`;
//! - sums over keys, and over the queries of all heads of a group, run in f32 and are rounded: `Σ(terms) + u`, and `u` more where a
//!   group has several heads; those of a parameter's gradient run over up to all scores;
//! - small numbers have no relative errors: a weight below the smallest normal f32 may be 0, what is rounded to f16 is off by up
//!   to `2⁻²⁵`.
//!
//! Where `o` and stats were computed in the same run, they are off by what the forward pass allows, and so are the weights.

use super::{F32_ROUNDOFF, Worst, least, roundoff, sum_of};
use crate::data::{Data, Element};
use serde::Serialize;

/// The errors of an executor's steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    /// Of a weight, relative.
    pub(crate) weight: f64,
    /// The same, for each unit of its row's score magnitude.
    pub(crate) magnitude: f64,
    /// How often the error of a score counts in a weight.
    pub(crate) score: f64,
    /// Of `dP` and `δ`.
    pub(crate) product: f64,
    /// Of `o`, relative to itself.
    pub(crate) output: f64,
    /// Of `o`, relative to Σ p·|v|.
    pub(crate) computed_output: f64,
    /// The same, for each unit of a score's error.
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
            magnitude: 6.0 * e,
            score: 1.0,
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
            magnitude: alone.magnitude + 2.0 * e,
            score: 2.0,
            output: 0.0,
            computed_output: 2.0 * u + 2.0 * sum_of(seq_kv) + 16.0 * e,
            computed_output_score: 2.0,
            ..alone
        }
    }
}

/// A gradient of the oracle, and how far rounding may move each element; 0 where no query meets a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Gradient {
    pub(crate) value: Vec<f64>,
    pub(crate) error: Vec<f64>,
}

impl Gradient {
    pub(crate) fn zeros(len: usize) -> Gradient {
        Gradient { value: vec![0.0; len], error: vec![0.0; len] }
    }

    /// Adds `factor` times `row`, where `factor` may be off by `error`, and the sum by `sum` of its terms.
    pub(crate) fn add(&mut self, from: usize, row: &[f64], factor: f64, error: f64, sum: f64) {
        let error = error + sum * factor.abs();
        let (value, errors) = (&mut self.value[from..][..row.len()], &mut self.error[from..][..row.len()]);
        for ((value, errors), x) in value.iter_mut().zip(errors).zip(row) {
            *value += factor * x;
            *errors += error * x.abs();
        }
    }

    /// Adds one number.
    pub(crate) fn add_one(&mut self, at: usize, value: f64, error: f64) {
        self.value[at] += value;
        self.error[at] += error;
    }

    /// Adds another of the same length.
    pub(crate) fn merge(&mut self, other: &Gradient) {
        self.value.iter_mut().zip(&other.value).for_each(|(to, x)| *to += x);
        self.error.iter_mut().zip(&other.error).for_each(|(to, x)| *to += x);
    }

    pub(crate) fn may_be_small(&mut self, from: usize, dim: usize, small: f64) {
        self.error[from..][..dim].iter_mut().for_each(|error| *error += small);
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
        let (stored, small) = (roundoff(got.element()), least(got.element()));
        for (n, place) in range.enumerate() {
            let (got, value) = (got.get(at + n), want.value[place]);
            let error = want.error[place];
            let tolerance = 2.0 * (error + if error > 0.0 { small.max(stored * value.abs()) } else { 0.0 });
            self.worst = self.worst.worse(Worst::of(got, value, tolerance));
            if value.is_finite() {
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

    /// What is told.
    pub(crate) fn told(&self) -> Vec<GradientCheck> {
        let one = |(name, tally): &(String, Tally)| GradientCheck { name: name.clone(), relative: tally.relative(), worst: tally.worst };
        self.0.iter().map(one).collect()
    }
}
