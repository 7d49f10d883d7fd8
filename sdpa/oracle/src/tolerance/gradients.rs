//! Tolerances of gradients.
//!
//! They are derived like those of the forward pass, from the roundings that executors make. The oracle carries these errors through to each element of a
//! gradient, to first order. It sums magnitudes, so that cancellation is not the executor's fault. With `Σ(n) = 4·√n·e`:
//!
//! - P is `exp(S − stats)`. `S` is off by what the forward pass allows. The scale, the conversion to base 2 and the difference round it three times, and
//!   `stats` as often: three of `|S|`, by the magnitude of that score, and three of `|stats|`. The exponential is accurate to `8·e`. A total error of `x`
//!   changes P by up to `eˣ − 1`.
//! - `dP` and `δ` are sums of `dim_v` products, which are subtracted: `Σ(dim_v) + 2·e` of `Σ |d_o·v|` and of `Σ |d_o·o|`. The `o` in `δ` was rounded when it
//!   was stored: `u`.
//! - `P` is rounded to the operands' type before its GEMM with `d_o`, and `dS` before those with `k` and `q`. The product with `dP − δ`, the scale and the
//!   difference are rounded in f32 too: `u + 4·e`.
//! - The error of the derivative of a score_mod has two parts: the effect of the error of the score, and `8·e` of the derivative and of 1.
//! - Sums over keys, and over the queries of all heads of a GQA group, run in f32 and are rounded: `Σ(terms) + u`. A group of several heads adds another `u`,
//!   because each head's part may be rounded before the sum. Sums for a parameter's gradient run over up to all scores and are rounded to its own type.
//! - Small numbers have absolute errors: a P below the smallest normal f32 may be 0 (`2⁻¹²⁶`). Rounding to f16 is off by up to `2⁻²⁵`, and rounding to another
//!   type by up to `2⁻¹²⁶`.
//!
//! In a chained pass, `o` and stats are the executor's own. Then the error of `o` is what the forward pass allows, relative to `Σ p·|v|`, in place of `u` of
//! `|o|`. P also has the error of stats.
//!
//! The factor of 2 applies as in the forward pass. A gradient without an unmasked pair of query and key is exactly 0.
//!
//! # Norms
//!
//! The gradient of a parameter sums up to all pairs of a query and a key, and `dq`, `dk` and `dv` sum over all keys or queries. The worst cases of many terms
//! exceed the sum itself, so that these tolerances accept zeros and twice the gradient. [`Tally::bound`] therefore also limits the norm of the error; `norm.rs`
//! defines the limit. For parameters, an error of δ reaches all keys of its row. It is multiplied by the signed sum of the row's `P` times derivative. `P ∘ (dP
//! − δ)` sums to 0 over a row, so an error that all derivatives share cancels.

use super::norm::{Noise, NormRow, Norms, Verdict};
use super::{Element, F32_ROUNDOFF, Wanted, Worst, sum_of};
use crate::narrow::{Narrow, products_of};
use crate::{Given, Problem, Tensor};
use std::ops::Range;

/// Factor of absolute errors in the magnitude of an element. They do not grow with the number, so they must not make it undecided.
pub(crate) const ABSOLUTE: f64 = 4.0;

/// The error bounds of the steps of an executor's backward pass. An executor without errors has 0 everywhere.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    /// Relative error of P that does not depend on the magnitude of its score or of stats.
    pub(crate) weight: f64,
    /// Relative error of P for each unit of the magnitude of its score.
    pub(crate) score: f64,
    /// Relative error of P for each unit of the magnitude of its row's stats.
    pub(crate) stats: f64,
    /// Factor of the relative error of the softmax denominator in P: 1 if the executor's own forward pass computed the stats, and
    /// otherwise 0.
    pub(crate) sum: f64,
    /// Error of `dP` and `δ`, relative to the sum of the magnitudes of their products.
    pub(crate) product: f64,
    /// Error of the output `o` as an input of the backward pass, relative to `|o|`.
    pub(crate) output: f64,
    /// Error of the output `o` as an input of the backward pass, relative to Σ p·|v|.
    pub(crate) computed_output: f64,
    /// Error of the output `o` for each unit of the relative error of the softmax denominator.
    pub(crate) computed_output_score: f64,
    /// The part of `computed_output` that comes from f32.
    pub(crate) computed_output_fine: f64,
    /// Error of storing `o`, and error of `P` in the GEMM that computes `o`.
    pub(crate) stored: f64,
    pub(crate) computed_weight: f64,
    /// Error of rounding `P` before its GEMM with `d_o`.
    pub(crate) round: f64,
    /// Error of rounding `dS` before its GEMMs with `k` and `q`.
    pub(crate) round_slope: f64,
    /// Error of a derivative, besides the effect of the error of the score.
    pub(crate) slope: f64,
    /// Error of a sum over keys and of rounding its result, relative to the sum of the magnitudes of its terms.
    pub(crate) over_keys: f64,
    /// Error of a sum over queries and of rounding its result, relative to the sum of the magnitudes of its terms.
    pub(crate) over_queries: f64,
    /// Error of a sum over all scores, relative to the sum of the magnitudes of its terms, without the rounding of its result.
    pub(crate) over_scores: f64,
    /// The magnitude below which a P may be rounded to 0.
    pub(crate) tiny: f64,
    /// Absolute error of rounding a small number.
    pub(crate) small: f64,
    /// Absolute error of `P`, and of `dS` times the scale if the executor scales dS to 8 bits.
    pub(crate) small_weight: f64,
    pub(crate) small_slope: Option<f64>,
    /// Absolute errors of elements of `dq`, `dk` and `dv`, and of `o`.
    pub(crate) small_results: [f64; 3],
    pub(crate) small_output: f64,
    /// Error of the output `o` for each unit of Σ |v|, the sum over unmasked keys.
    pub(crate) computed_output_values: f64,
}

impl Rates {
    /// Returns the error bounds of an executor for the extents and types of a problem, and the given `o` and stats.
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
            // `o` and stats that the caller gave count as exact. The stats are rounded twice before they enter P.
            Given::These { .. } => Rates { output: 0.0, stored: 0.0, small_output: 0.0, stats: 2.0 * e, ..alone },
            // These are the tolerances of `o` and stats in `compare`, without its factor of 2, which applies to all tolerances here.
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
    /// Replaces errors by those of 8-bit floats, from the types and scales of `narrow`.
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

/// A number with its error, which is added to an element of a gradient or multiplies a row that is added.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Term {
    pub(crate) value: f64,
    /// Bound on the error of the value.
    pub(crate) error: f64,
    /// The sum of the magnitudes of the terms of the number, including the absolute errors of small numbers.
    pub(crate) magnitude: f64,
}

impl Term {
    /// Adds the error of a sum, which is relative to each term.
    fn in_sum(self, sum: f64) -> Term {
        Term { error: self.error + sum * self.value.abs(), ..self }
    }
}

/// A gradient that the oracle computed, with error bounds, in row-major order. It is 0 everywhere if no query attends to a key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradient {
    /// The elements of the gradient.
    pub value: Vec<f64>,
    /// The bound on the rounding error of each element.
    pub error: Vec<f64>,
    /// The sum of the magnitudes of the terms of each element.
    pub magnitude: Vec<f64>,
}

impl Gradient {
    pub(crate) fn zeros(len: usize) -> Gradient {
        Gradient { value: vec![0.0; len], error: vec![0.0; len], magnitude: vec![0.0; len] }
    }

    /// Adds `factor` times `row` to the elements from offset `from` on. `sum` is the error of the sum over terms, relative to each term.
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

    /// Adds one number, with its error and magnitude, to the element at offset `at`.
    pub(crate) fn add_one(&mut self, at: usize, term: Term) {
        self.value[at] += term.value;
        self.error[at] += term.error;
        self.magnitude[at] += term.magnitude;
    }

    /// Adds another gradient of the same length, element by element.
    pub(crate) fn merge(&mut self, other: &Gradient) {
        for (to, from) in [(&mut self.value, &other.value), (&mut self.error, &other.error), (&mut self.magnitude, &other.magnitude)] {
            to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
        }
    }

    /// Copies a range of another gradient to the offset `at`.
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

/// The gradient of a parameter, with the noise of each element for the limits of norms.
#[derive(Clone, Debug, Default)]
pub(crate) struct Along {
    pub(crate) sum: Gradient,
    pub(crate) noise: Vec<Noise>,
}

impl Along {
    pub(crate) fn zeros(len: usize) -> Along {
        Along { sum: Gradient::zeros(len), noise: vec![Noise::default(); len] }
    }

    /// Adds one number, with its error and noise, to the element at offset `at`.
    pub(crate) fn add(&mut self, at: usize, term: Term, noise: Noise) {
        self.sum.add_one(at, term);
        self.noise[at].fine += noise.fine;
        self.noise[at].variance += noise.variance;
        self.noise[at].shared += noise.shared;
    }

    /// Returns an element, with its error and noise, as a term of another sum.
    pub(crate) fn term(&self, at: usize) -> (Term, Noise) {
        (Term { value: self.sum.value[at], error: self.sum.error[at], magnitude: self.sum.magnitude[at] }, self.noise[at])
    }
}

/// An element of a gradient whose error exceeds its tolerance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct First {
    /// The index of the element in row-major order.
    pub at: usize,
    /// The executor's value.
    pub got: f64,
    /// The oracle's value.
    pub want: f64,
    /// The largest accepted distance.
    pub tolerance: f64,
}

/// The distance of one of an executor's gradients from the oracle's gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// The element with the largest ratio of error and tolerance.
    pub worst: Worst,
    /// The first element past its tolerance, in row-major order; `None` if there is none.
    pub first: Option<First>,
    squares: f64,
    norm: f64,
    norms: Norms,
}

/// A range of the oracle's gradient that is compared with one row of an executor's gradient.
pub(crate) struct Piece<'a> {
    /// The oracle's gradient, of which `range` is compared.
    pub(crate) want: &'a Gradient,
    pub(crate) range: Range<usize>,
    /// The row-major index in the complete gradient of the first compared element.
    pub(crate) first: usize,
    /// Bounds on the rounding errors in the norm of the compared elements.
    pub(crate) noise: Noise,
}

impl Tally {
    /// Compares a piece with row `got.1` of the tensor `got.0`, whose elements have type `element`. `rounded` is true if the oracle's
    /// errors do not include the rounding to that type.
    pub(crate) fn compare(&mut self, piece: &Piece<'_>, got: (&Tensor<'_>, [usize; 3]), element: Element, rounded: bool) {
        let row = self.compare_elements(piece, got, element, rounded);
        let (want, magnitude) = (&piece.want.value[piece.range.clone()], &piece.want.magnitude[piece.range.clone()]);
        self.norms.add_at(got.1, &NormRow { got: &row, want, magnitude, noise: piece.noise });
    }

    /// Compares elements but no norms, and returns the executor's values.
    fn compare_elements(&mut self, piece: &Piece<'_>, got: (&Tensor<'_>, [usize; 3]), element: Element, rounded: bool) -> Vec<f64> {
        let mut row = vec![0f64; piece.range.len()];
        got.0.read(got.1, &mut row);
        let small = element.least();
        for (n, (place, &got)) in piece.range.clone().zip(&row).enumerate() {
            let (value, error) = (piece.want.value[place], piece.want.error[place]);
            // An error of 0 means that the gradient is exactly 0.
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

    /// Compares a parameter's complete gradient with the tensor `got`, whose elements have type `element`.
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
                    // The errors of δ are common to all elements of a row, so count their variance as shared.
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

    /// Returns the error of the gradient relative to its norm, ‖got − want‖ / ‖want‖, over finite elements.
    #[must_use]
    pub fn relative(&self) -> f64 {
        if self.norm > 0.0 { (self.squares / self.norm).sqrt() } else { self.squares.sqrt() }
    }

    /// Returns the largest ratio, over all tiles, of the norm of the error and its limit. Above 1, the gradient fails.
    #[must_use]
    pub fn bound(&self) -> f64 {
        self.norms.bound()
    }

    /// Returns whether every element and the norm of every tile of rows is within its tolerance.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.worst.ratio <= 1.0 && self.bound() <= 1.0
    }

    /// Returns whether rounding can change each tile of an operand's gradient, or the whole gradient of a parameter, by less than its
    /// norm. Otherwise the result is undecided: zeros, or twice the gradient, would pass.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.norms.undecided() == 0
    }
}

/// The distances of all gradients of a pass from the oracle's gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradientDistance {
    /// The distances of `dq`, `dk` and `dv`.
    pub operands: Box<[Tally; 3]>,
    /// The distances of the gradients of parameters, in the order of the request.
    pub along: Vec<Tally>,
    /// The comparison of the largest `|dS|`, if the executor reported it.
    pub amax_dp: Option<Box<Worst>>,
}

impl GradientDistance {
    /// Iterates over the distances of all gradients: `dq`, `dk`, `dv`, then those of parameters.
    pub fn all(&self) -> impl Iterator<Item = &Tally> {
        self.operands.iter().chain(&self.along)
    }

    /// Returns whether every element and every norm of every gradient is within its tolerance. The largest `|dS|` must be too, if it was
    /// compared.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.all().all(Tally::passes) && self.amax_dp.as_ref().is_none_or(|amax| amax.ratio <= 1.0)
    }

    /// Returns whether the gradients passed, failed or are undecided.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let decided = self.all().all(Tally::is_decided) && self.amax_dp.as_ref().is_none_or(|amax| amax.undecided == 0);
        Verdict::new(self.passes(), self.undecided() == 0 && decided)
    }

    /// Returns the number of elements whose tolerance accepts any result.
    #[must_use]
    pub fn undecided(&self) -> u64 {
        self.all().map(|tally| tally.worst.undecided).sum()
    }
}
