//! Bounds on the rounding errors in the norms of rows of `dq`, `dk` and `dv`; see `tolerance/norm.rs`.

use super::{Kept, Worker};
use crate::narrow::products_of;
use crate::tolerance::gradients::Gradient;
use crate::tolerance::norm::Noise;
use crate::tolerance::weight_error;
use crate::{F32_ROUNDOFF, sum_of};
use std::ops::Range;

/// The noise of the gradients of one row and of each key, and the norms of each head's part of `dk` and `dv`.
pub(super) struct Noises {
    /// Noise of the rows of `dq`.
    pub(super) dq: Vec<Noise>,
    /// Noise of the rows of `dk` and `dv`.
    pub(super) keys: [Vec<Noise>; 2],
    /// Norms of the part that each head of a GQA group adds to `dk` and `dv`, one per key. Empty where a KV head has one query head.
    pub(super) heads: [Vec<f64>; 2],
}

impl Noises {
    pub(super) fn new(rows: usize, seq_kv: usize, heads: usize) -> Noises {
        let parts = || vec![0.0; if heads > 1 { heads * seq_kv } else { 0 }];
        Noises { dq: vec![Noise::default(); rows], keys: [(); 2].map(|()| vec![Noise::default(); seq_kv]), heads: [parts(), parts()] }
    }

    /// Adds the contribution of other rows to the same keys.
    pub(super) fn merge(&mut self, other: &Noises) {
        for (to, from) in self.keys.iter_mut().zip(&other.keys) {
            to.iter_mut().zip(from).for_each(|(to, from)| to.merge(*from));
        }
        for (to, from) in self.heads.iter_mut().zip(&other.heads) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }

    /// Adds the norms of the difference between `dk` and `dv` now and `before`, as the part of one head of a group.
    pub(super) fn add_head(&mut self, head: usize, before: &[Vec<f64>; 2], now: [&Gradient; 2], dims: [usize; 2]) {
        for (which, heads) in self.heads.iter_mut().enumerate().filter(|(_, heads)| !heads.is_empty()) {
            let rows = before[which].chunks_exact(dims[which]).zip(now[which].value.chunks_exact(dims[which]));
            let from = head * before[which].len() / dims[which];
            for (norm, (before, now)) in heads[from..].iter_mut().zip(rows) {
                *norm += before.iter().zip(now).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
            }
        }
    }

    /// Returns the sum of squared norms of all heads' parts of a key.
    pub(super) fn parts(&self, which: usize, key: usize) -> f64 {
        self.heads[which].iter().skip(key).step_by(self.keys[which].len().max(1)).map(|norm| norm * norm).sum()
    }
}

/// Errors that all keys of a row have in common.
pub(super) struct OfRow {
    /// The relative error in P that comes from the row's stats.
    pub(super) weight: f64,
}

/// The contribution of one query and one key to a gradient.
pub(super) struct Pair {
    /// `dP − δ`, and the sum of the magnitudes of dP.
    pub(super) difference: f64,
    pub(super) size: f64,
    /// `P ∘ (dP − δ)`.
    pub(super) modified: f64,
    /// `dS`, before the multiplication by the scale.
    pub(super) slope: f64,
    /// A bound on the error of the derivative of the score_mod.
    pub(super) off: f64,
}

impl Worker<'_> {
    fn coarse(&self, terms: usize) -> f64 {
        // Halve this error: it is added to `fine`, which the limit doubles.
        if self.p.narrow.is_some() { products_of(terms) / 2.0 } else { 0.0 }
    }

    /// Returns the noise of P in `dv`.
    pub(super) fn noise_of_weight(&self, kept: &Kept, of_row: &OfRow) -> Noise {
        let (rates, [.., seq_q, _, _, _]) = (&self.rates, self.p.shape);
        let weight = kept.factor * kept.weight;
        let independent = [rates.round, sum_of(self.p.group() * seq_q)].map(|rate| rate * weight);
        let small = kept.factor * rates.small_weight;
        Noise {
            fine: kept.factor * self.own_error(kept) + self.coarse(seq_q) * weight,
            variance: independent.into_iter().chain([small]).map(|x| x * x).sum(),
            shared: (of_row.weight * weight).powi(2),
            ..Noise::default()
        }
    }

    /// Returns the noise of `dS` in `dq` and in `dk`, without errors that are common to a row of `dq`.
    pub(super) fn noise_of_slope(&self, kept: &Kept, of_row: &OfRow, pair: &Pair) -> [Noise; 2] {
        let (rates, scale) = (&self.rates, self.p.scale.abs());
        let [.., seq_q, seq_kv, _, _] = self.p.shape;
        let value = scale * pair.slope;
        let fine = self.own_error(kept) * pair.difference.abs() + kept.weight * rates.product * pair.size;
        let fine = scale * fine * (kept.slope.value.abs() + pair.off);
        let small = rates.small_slope.unwrap_or(rates.small * scale.max(1.0));
        let of = |terms: usize, products: usize, common: f64| {
            let independent = [rates.round_slope * value, sum_of(terms) * value, scale * pair.modified * pair.off, small];
            let variance = independent.iter().map(|x| x * x).sum();
            Noise { fine: fine + self.coarse(products) * value.abs(), variance, shared: (common * value).powi(2), ..Noise::default() }
        };
        // `dq` needs no shared error: that of the stats is covered by the sixteenth of the norm (see `norm`) or by the noise of the row
        // itself.
        [of(seq_kv, seq_kv, 0.0), of(self.p.group() * seq_q, seq_q, of_row.weight)]
    }

    /// Bounds the error of `dS` times the scale before it is rounded to 8 bits, with `o` and stats taken as exact.
    pub(super) fn error_of_slope(&self, kept: &Kept, of_row: &OfRow, pair: &Pair, delta: &Noise) -> f64 {
        let own = (self.own_error(kept) + of_row.weight * kept.weight) * pair.difference.abs();
        let products = kept.weight * (self.rates.product * pair.size + delta.fine);
        let rounded = (4.0 * F32_ROUNDOFF * pair.slope + pair.modified * pair.off).abs();
        2.0 * self.p.scale.abs() * ((own + products) * (kept.slope.value.abs() + pair.off) + rounded)
    }

    /// Bounds the error of P that comes from the error of its own score.
    fn own_error(&self, kept: &Kept) -> f64 {
        let off = kept.score.error + crate::of_difference(self.rates.score * kept.magnitude);
        if kept.weight.is_finite() { weight_error(kept.weight, off) + self.rates.tiny } else { f64::NAN }
    }

    /// Adds the rounding of a complete row, and of the parts that it is a sum of.
    pub(super) fn stored(&self, which: usize, mut noise: Noise, parts: f64, gradient: &Gradient, range: Range<usize>) -> Noise {
        // An error of 0 means that the gradient is exactly 0, so there is no rounding to add.
        if gradient.error[range.clone()].iter().all(|error| *error == 0.0) {
            return noise;
        }
        let p = self.p;
        let (u, again) = match p.narrow {
            Some(narrow) => (narrow.gradient.roundoff(), 0.0),
            None if p.stored == p.element => (p.element.roundoff(), 0.0),
            None => (p.element.roundoff(), p.stored.roundoff()),
        };
        let square: f64 = gradient.value[range.clone()].iter().map(|x| x * x).sum();
        noise.elements += (u * u + again * again) * square;
        noise.variance += if p.narrow.is_some() { 0.0 } else { u * u * parts };
        noise.small += self.roundings(which) * self.rates.small_results[which] * (range.len() as f64).sqrt();
        noise
    }

    /// Returns how often an executor may round an element of dq (0), dk (1) or dv (2). It may round each query head's part of a GQA group, then their sum.
    pub(super) fn roundings(&self, which: usize) -> f64 {
        let group = self.p.group();
        if which == 0 || group == 1 { 1.0 } else { 1.0 + group as f64 }
    }
}
