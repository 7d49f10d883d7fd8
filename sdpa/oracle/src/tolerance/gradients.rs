//! How far gradients may be from the oracle's.
//!
//! Derived as those of the forward pass, from what executors do. The oracle carries these errors through to each element of a gradient,
//! to first order and as sums of magnitudes, so that cancellation is not the executor's fault. With `Σ(n) = 4·√n·e`:
//!
//! - a weight is `exp(S − stats)`: `S` is off by what the forward pass allows; scaling it, its step to powers of two and the difference
//!   round it three times, and `stats` is rounded as often: three of `|S|`, by the magnitude of that score, and three of `|stats|`. The
//!   exponential is good to `8·e`; what is off by `x` in all moves a weight by up to `eˣ − 1`;
//! - `dP` and `δ` are sums of `dim_v` products, which are subtracted: `Σ(dim_v) + 2·e` of `Σ |d_o·v|` and of `Σ |d_o·o|`; `o`, which
//!   `δ` is made of, was rounded when it was stored: `u`;
//! - `P` is rounded to the operands' type in front of its product with `d_o`, `dS` in front of those with `k` and `q`; the product with
//!   `dP − δ`, the scale and the difference are rounded in f32 besides: `u + 4·e`;
//! - the slope of a modified score is off by what its own function makes of the error of the score, and by `8·e` of itself and of 1;
//! - sums over keys, and over the queries of all heads of a group, run in f32 and are rounded: `Σ(terms) + u`, and `u` more where a
//!   group has several heads, whose parts may be rounded before they are added; those of a parameter's gradient run over up to all
//!   scores and are rounded to its own type;
//! - small numbers have no relative errors: a weight below the smallest normal f32 may be 0 (`2⁻¹²⁶`), what is rounded to f16 is off by
//!   up to `2⁻²⁵`, what is rounded to another type by up to `2⁻¹²⁶`.
//!
//! Where `o` and stats are the executor's own (a chained pass), `o` is off by what the forward pass allows, of `Σ p·|v|`, in place
//! of `u` of `|o|`; and so are stats, which the weights take over.
//!
//! The factor of 2 is there as in the forward pass. Where no query meets a key, all of it is 0: such a gradient is exactly 0.
//!
//! # Norms
//!
//! The gradient of a parameter sums up to all pairs of a query and a key, and `dq`, `dk` and `dv` sum over all keys or queries. The worst cases of many terms
//! exceed the sum itself, so that these tolerances accept zeros and twice the gradient. [`Tally::bound`] therefore also limits the norm of the error:
//! `norm.rs` says by how much. For parameters, an error of δ reaches all keys of its row: it is multiplied by the signed sum of the row's `P` times slope
//! first. `P ∘ (dP − δ)` sums to 0 over a row, so an error that all slopes share cancels.

use super::norm::{Noise, NormRow, Norms, Verdict};
use super::{Element, F32_ROUNDOFF, Wanted, Worst, sum_of};
use crate::narrow::{Narrow, products_of};
use crate::{Given, Problem, Tensor};
use std::ops::Range;

/// Errors that do not grow with a number count this often in its magnitude, as they decide nothing about how right it is.
pub(crate) const ABSOLUTE: f64 = 4.0;

/// The errors of an executor's steps. All 0: no error.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    /// Of a weight, relative.
    pub(crate) weight: f64,
    /// The same, for each unit of the magnitude of its score.
    pub(crate) score: f64,
    /// The same, for each unit of the magnitude of its row's statistic.
    pub(crate) stats: f64,
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
    /// The part of `computed_output` that comes from f32.
    pub(crate) computed_output_fine: f64,
    /// Of `o` where it is stored, and of `P` in the product that makes it.
    pub(crate) stored: f64,
    pub(crate) computed_weight: f64,
    /// Of `P` in front of its product with `d_o`.
    pub(crate) round: f64,
    /// Of `dS` in front of those with `k` and `q`.
    pub(crate) round_slope: f64,
    /// Of a slope, besides what its function makes of the error of the score.
    pub(crate) slope: f64,
    /// Of a sum over keys and its result, relative to the sum of magnitudes.
    pub(crate) over_keys: f64,
    /// The same of a sum over queries.
    pub(crate) over_queries: f64,
    /// The same of a sum over scores, without the rounding of its result.
    pub(crate) over_scores: f64,
    /// A weight below this may be 0.
    pub(crate) tiny: f64,
    /// Of a rounded number, however small it is.
    pub(crate) small: f64,
    /// Likewise of `P`, and of `dS` times the scale where that is told.
    pub(crate) small_weight: f64,
    pub(crate) small_slope: Option<f64>,
    /// Likewise of elements of `dq`, `dk` and `dv`, and of `o`.
    pub(crate) small_results: [f64; 3],
    pub(crate) small_output: f64,
    /// Of `o`, for each unit of Σ |v|.
    pub(crate) computed_output_values: f64,
}

impl Rates {
    /// For the extents and types of a problem.
    pub(crate) fn new(p: &Problem<'_>, given: &Given<'_>) -> Rates {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, _, dim_v] = p.shape;
        let (element, u, e) = (p.element, p.element.roundoff(), F32_ROUNDOFF);
        let group = heads_q / heads_kv;
        let alone = Rates {
            weight: 8.0 * e,
            score: 3.0 * e,
            stats: 3.0 * e,
            sum: 0.0,
            product: sum_of(dim_v) + 2.0 * e,
            output: p.stored.roundoff(),
            computed_output: 0.0,
            computed_output_score: 0.0,
            computed_output_fine: 0.0,
            stored: p.stored.roundoff(),
            computed_weight: 0.0,
            round: u + 4.0 * e,
            round_slope: u + 4.0 * e,
            slope: 8.0 * e,
            over_keys: sum_of(seq_kv) + u,
            over_queries: sum_of(group * seq_q) + u + if group > 1 { u } else { 0.0 },
            over_scores: sum_of(batch * heads_q * seq_q * seq_kv),
            tiny: f64::from(f32::MIN_POSITIVE),
            small: element.least(),
            small_weight: element.least(),
            small_slope: None,
            small_results: [element.least(); 3],
            small_output: p.stored.least(),
            computed_output_values: 0.0,
        };
        let alone = p.narrow.map_or(alone, |narrow| alone.narrowed(p, &narrow));
        match given {
            Given::Rounded => alone,
            // They are what they are, and a statistic is rounded twice on its way into a weight.
            Given::These { .. } => Rates { output: 0.0, stored: 0.0, small_output: 0.0, stats: 2.0 * e, ..alone },
            // What `compare` allows of `o` and stats, less its factor of 2, which stands in front of everything here.
            Given::Own => Rates {
                computed_output_values: if p.narrow.is_some() { alone.small_weight } else { 0.0 },
                weight: alone.weight + sum_of(seq_kv) + 16.0 * e,
                stats: alone.stats + 2.0 * e,
                sum: 1.0,
                output: 0.0,
                computed_output: match p.narrow {
                    Some(_) => u + p.stored.roundoff() + products_of(seq_kv) + 2.0 * sum_of(seq_kv) + 16.0 * e,
                    None => 2.0 * u + 2.0 * sum_of(seq_kv) + 16.0 * e,
                },
                computed_output_score: 2.0,
                computed_output_fine: if p.narrow.is_some() { products_of(seq_kv) } else { 0.0 } + 2.0 * sum_of(seq_kv) + 16.0 * e,
                computed_weight: u,
                ..alone
            },
        }
    }
}

impl Rates {
    /// Those of 8-bit floats, by the types and scales of each.
    fn narrowed(self, p: &Problem<'_>, narrow: &Narrow) -> Rates {
        let [_, heads_q, heads_kv, seq_q, seq_kv, _, dim_v] = p.shape;
        let (e, stored) = (F32_ROUNDOFF, narrow.gradient.roundoff());
        Rates {
            product: self.product + products_of(dim_v),
            round: p.element.roundoff() + 4.0 * e,
            round_slope: narrow.slope.roundoff() + 4.0 * e,
            over_keys: sum_of(seq_kv) + products_of(seq_kv) + stored,
            over_queries: sum_of(heads_q / heads_kv * seq_q) + products_of(seq_q) + stored,
            small_weight: p.element.least() / narrow.weights,
            small_slope: Some(narrow.slope.least() / narrow.slopes),
            small_results: narrow.gradients.map(|scale| narrow.gradient.least() / scale),
            small_output: p.stored.least() / narrow.o,
            small: f64::from(f32::MIN_POSITIVE),
            ..self
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

/// A gradient of the oracle, in row-major order; all of it is 0 where no query meets a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradient {
    /// The numbers.
    pub value: Vec<f64>,
    /// How far rounding may move each.
    pub error: Vec<f64>,
    /// The sizes that each is a sum of.
    pub magnitude: Vec<f64>,
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
        for (to, from) in [(&mut self.value, &other.value), (&mut self.error, &other.error), (&mut self.magnitude, &other.magnitude)] {
            to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }

    /// Puts neighbours of another where they belong.
    pub(crate) fn place(&mut self, at: usize, from: &Gradient, range: Range<usize>) {
        let to = at..at + range.len();
        self.value[to.clone()].copy_from_slice(&from.value[range.clone()]);
        self.error[to.clone()].copy_from_slice(&from.error[range.clone()]);
        self.magnitude[to].copy_from_slice(&from.magnitude[range]);
    }

    pub(crate) fn may_be_small(&mut self, from: usize, dim: usize, small: f64) {
        self.error[from..][..dim].iter_mut().for_each(|error| *error += small);
        self.magnitude[from..][..dim].iter_mut().for_each(|magnitude| *magnitude += ABSOLUTE * small);
    }
}

/// The gradient of a parameter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Along {
    pub(crate) sum: Gradient,
    pub(crate) noise: Vec<Noise>,
}

impl Along {
    pub(crate) fn zeros(len: usize) -> Along {
        Along { sum: Gradient::zeros(len), noise: vec![Noise::default(); len] }
    }

    /// Adds one number.
    pub(crate) fn add(&mut self, at: usize, term: Term, noise: Noise) {
        self.sum.add_one(at, term);
        self.noise[at].fine += noise.fine;
        self.noise[at].variance += noise.variance;
        self.noise[at].shared += noise.shared;
    }

    /// An element as a term of another sum.
    pub(crate) fn term(&self, at: usize) -> (Term, Noise) {
        (Term { value: self.sum.value[at], error: self.sum.error[at], magnitude: self.sum.magnitude[at] }, self.noise[at])
    }
}

/// An element past its tolerance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct First {
    /// Which one, in row-major order.
    pub at: usize,
    /// What came.
    pub got: f64,
    /// The oracle's.
    pub want: f64,
    /// How far apart they may be.
    pub tolerance: f64,
}

/// How far one gradient is from the oracle's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Of all elements.
    pub worst: Worst,
    /// The first one past its tolerance.
    pub first: Option<First>,
    squares: f64,
    norm: f64,
    norms: Norms,
}

/// The elements of a row that are compared.
pub(crate) struct Piece<'a> {
    /// The oracle's.
    pub(crate) want: &'a Gradient,
    pub(crate) range: Range<usize>,
    /// Where the first of them is in the whole gradient, in row-major order.
    pub(crate) first: usize,
    /// What rounding may make of their norm.
    pub(crate) noise: Noise,
}

impl Tally {
    /// Compares neighbours with what is at `row` of a result of a type. `rounded`: the oracle's errors lack the rounding to that type.
    pub(crate) fn compare(&mut self, piece: &Piece<'_>, got: (&Tensor<'_>, [usize; 3]), element: Element, rounded: bool) {
        let row = self.compare_elements(piece, got, element, rounded);
        let (want, magnitude) = (&piece.want.value[piece.range.clone()], &piece.want.magnitude[piece.range.clone()]);
        self.norms.add_at(got.1, &NormRow { got: &row, want, magnitude, noise: piece.noise });
    }

    /// Compares elements alone; what came.
    fn compare_elements(&mut self, piece: &Piece<'_>, got: (&Tensor<'_>, [usize; 3]), element: Element, rounded: bool) -> Vec<f64> {
        let mut row = vec![0f64; piece.range.len()];
        got.0.read(got.1, &mut row);
        let small = element.least();
        for (n, (place, &got)) in piece.range.clone().zip(&row).enumerate() {
            let (value, error) = (piece.want.value[place], piece.want.error[place]);
            // An error of 0 is that of a gradient which is exactly 0.
            let stored = if rounded && error > 0.0 { small.max(element.roundoff() * value.abs()) } else { 0.0 };
            let tolerance = 2.0 * (error + stored);
            let magnitude = piece.want.magnitude[place] + ABSOLUTE * small;
            let worst = Worst::of(got, Wanted { value, tolerance, magnitude, stored: element });
            if worst.ratio > 1.0 && self.first.is_none() {
                self.first = Some(First { at: piece.first + n, got, want: value, tolerance });
            }
            self.worst = self.worst.worse(worst);
            if value.is_finite() && got.is_finite() {
                self.squares += (got - value).powi(2);
                self.norm += value * value;
            }
        }
        row
    }

    /// Compares all of a parameter's gradient, of these extents.
    pub(crate) fn compare_along(&mut self, want: &Along, [_, heads, rows, dim]: [usize; 4], got: &Tensor<'_>, element: Element) {
        let len = want.noise.len();
        self.norms = Norms::of_parameter();
        let piece = Piece { want: &want.sum, range: 0..len, first: 0, noise: Noise::default() };
        let all = self.compare_elements(&piece, (got, [0; 3]), element, true);
        for (n, got) in all.chunks(dim.max(1)).enumerate() {
            let range = n * dim..n * dim + got.len();
            let mut noise = Noise::default();
            for at in range.clone() {
                let (Term { value, error, .. }, of) = want.term(at);
                if error > 0.0 {
                    // Elements of a row share the errors of δ.
                    noise.shared += of.variance;
                    noise.elements += (element.roundoff() * value).powi(2);
                    noise.fine = noise.fine.hypot(of.fine);
                    noise.small = noise.small.hypot(element.least());
                }
            }
            let row = NormRow { got, want: &want.sum.value[range.clone()], magnitude: &want.sum.magnitude[range], noise };
            self.norms.add_at([n / rows / heads, n / rows % heads, n % rows], &row);
        }
        self.norms.close();
    }

    /// ‖got − want‖ / ‖want‖, over finite elements.
    #[must_use]
    pub fn relative(&self) -> f64 {
        if self.norm > 0.0 { (self.squares / self.norm).sqrt() } else { self.squares.sqrt() }
    }

    /// The norm of the error of a tile over its limit, of the worst tile. Above 1 fails.
    #[must_use]
    pub fn bound(&self) -> f64 {
        self.norms.bound()
    }

    /// Within every tolerance.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.worst.ratio <= 1.0 && self.bound() <= 1.0
    }

    /// False where rounding may change a tile of an operand's gradient, or all of a parameter's, by more than its norm: zeros pass, and so does twice
    /// the gradient.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.norms.undecided() == 0
    }
}

/// How far all gradients are: of `q`, `k` and `v`, and of each parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradientDistance {
    /// Of `q`, `k` and `v`.
    pub operands: Box<[Tally; 3]>,
    /// Of the parameters, as they were asked for.
    pub along: Vec<Tally>,
    /// There if the largest gradient of a score was compared.
    pub amax_dp: Option<Box<Worst>>,
}

impl GradientDistance {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Tally> {
        self.operands.iter().chain(&self.along)
    }

    /// Within every tolerance.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.all().all(Tally::passes) && self.amax_dp.as_ref().is_none_or(|amax| amax.ratio <= 1.0)
    }

    /// Passed, failed or undecided.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let decided = self.all().all(Tally::is_decided) && self.amax_dp.as_ref().is_none_or(|amax| amax.undecided == 0);
        Verdict::new(self.passes(), self.undecided() == 0 && decided)
    }

    /// How many elements no result could be wrong in.
    #[must_use]
    pub fn undecided(&self) -> u64 {
        self.all().map(|tally| tally.worst.undecided).sum()
    }
}
