//! The gradient of textbook attention in f64, with a bound on the rounding error of each of its elements.
//!
//! With `P` the softmax probabilities of a row, `dP = d_o·vᵀ` and `δ = Σ d_o·o`: `dS = P ∘ (dP − δ)` times the derivative of the score_mod. Then `dq =
//! scale·dS·k`, `dk = scale·dSᵀ·q` and `dv = Pᵀ·d_o`. `dk` and `dv` are summed over the query heads of a GQA group. The gradient of a parameter is the sum of
//! `P ∘ (dP − δ)` times the derivative of the score_mod with respect to that parameter.

mod noise;
mod rows;

use crate::forward::{modified, score_error};
use crate::tolerance::gradients::{ABSOLUTE, Along, Gradient, GradientDistance, Piece, Rates, Tally, Term};
use crate::tolerance::norm::Noise;
use crate::tolerance::{Largest, of_difference, weight_error};
use crate::{Element, Given, Place, Problem, Rough, Tensor, dot, largest, place};
use noise::{Noises, OfRow, Pair};
use rayon::prelude::*;
use rows::Rows;
use std::ops::Range;

/// Number of queries that one thread computes together, for all query heads of a GQA group.
const ROWS: usize = 64;

/// Returns the bytes of memory that [`check_gradients`] needs for extents `shape`, if the gradients of parameters with the extents
/// `along` are checked too.
#[must_use]
pub fn gradient_bytes(shape: [usize; 7], along: &[[usize; 4]]) -> u128 {
    let [_, heads_q, heads_kv, _, seq_kv, dim_qk, dim_v] = shape.map(|n| n as u128);
    let group = heads_q / heads_kv.max(1);
    let threads = rayon::current_num_threads() as u128;
    let local = group * ROWS as u128 * seq_kv;
    let along = along.iter().map(|dims| dims.iter().map(|&n| n as u128).product::<u128>());
    let along: u128 = along.map(|all| all + threads * all.min(local)).sum();
    // Count keys and values; value, error and magnitude of each element of dK and dV; gradients of parameters; and three sums per element
    // of the dQ of one part.
    8 * (4 * threads + 3) * seq_kv * (dim_qk + dim_v) + 40 * along + 24 * (threads * group * ROWS as u128 * dim_qk)
}

/// The contribution of some rows to every gradient, computed by one thread.
struct Part {
    dq: Gradient,
    dk: Gradient,
    dv: Gradient,
    /// Whether at least one query attends to each key.
    used: Vec<bool>,
    along: Vec<Along>,
    noises: Noises,
    /// The largest `|dS|` times the scale.
    largest: Largest,
}

/// A key that a query attends to.
struct Kept {
    key: usize,
    /// The score after the score_mod, and before it.
    score: Rough,
    raw: f64,
    /// The sum of magnitudes that the error of the score is proportional to.
    magnitude: f64,
    weight: f64,
    /// The dropout factor of P.
    factor: f64,
    /// Derivatives of the score_mod: with respect to the score, and to each parameter.
    slope: Rough,
    along: Vec<Rough>,
}

/// The keys that a row attends to, its `stats`, and a bound on the error of the softmax denominator.
struct Weighed {
    keys: Vec<Kept>,
    stats: f64,
    error: f64,
}

struct Worker<'a> {
    p: &'a Problem<'a>,
    d_o: Tensor<'a>,
    given: Given<'a>,
    rates: Rates,
    /// Extents of the gradients of parameters; those of the sink come last.
    along: Vec<[usize; 4]>,
    /// Whether each parameter is a table, which the score_mod reads at computed indices.
    tables: Vec<bool>,
}

/// Reads all rows of one head.
fn rows_of(tensor: &Tensor<'_>, [b, h]: [usize; 2], [rows, dim]: [usize; 2]) -> Vec<f64> {
    let mut all = vec![0f64; rows * dim];
    for (s, row) in all.chunks_exact_mut(dim).enumerate() {
        tensor.read([b, h, s], row);
    }
    all
}

impl Worker<'_> {
    /// Extents of the gradients of parameters, and whether each parameter is a table.
    fn extents(&self) -> impl Iterator<Item = ([usize; 4], bool)> {
        self.along.iter().copied().zip(self.tables.iter().copied())
    }

    fn part(&self, at: &Rows) -> Part {
        let p = self.p;
        let [.., seq_kv, dim_qk, dim_v] = p.shape;
        let keys = rows_of(&p.k, [at.batch, at.head_kv], [seq_kv, dim_qk]);
        let values = rows_of(&p.v, [at.batch, at.head_kv], [seq_kv, dim_v]);
        let key_squares: Vec<f64> = keys.chunks_exact(dim_qk).map(|key| key.iter().map(|x| x * x).sum()).collect();
        let mut part = Part {
            dq: Gradient::zeros(at.heads.len() * at.rows.len() * dim_qk),
            dk: Gradient::zeros(keys.len()),
            dv: Gradient::zeros(values.len()),
            used: vec![false; seq_kv],
            along: self.extents().map(|(dims, table)| Along::zeros(if table { dims } else { at.part(dims) }.iter().product())).collect(),
            noises: Noises::new(at.heads.len() * at.rows.len(), seq_kv, at.heads.len()),
            largest: Largest::default(),
        };
        let mut before = [part.dk.value.clone(), part.dv.value.clone()];
        let (mut q, mut d_o, mut scratch) = (vec![0f64; dim_qk], vec![0f64; dim_v], Vec::new());
        for (n, [h, i]) in at.queries().enumerate() {
            p.q.read([at.batch, h, i], &mut q);
            self.d_o.read([at.batch, h, i], &mut d_o);
            self.row(at, [n, h, i], (&q, &d_o), (&keys, &values, &key_squares), &mut part, &mut scratch);
            if i + 1 == at.rows.end && at.heads.len() > 1 {
                part.noises.add_head(h - at.heads.start, &before, [&part.dk, &part.dv], [dim_qk, dim_v]);
                before[0].copy_from_slice(&part.dk.value);
                before[1].copy_from_slice(&part.dv.value);
            }
        }
        part
    }

    /// Computes scores and P of the keys that query `i` of head `h` attends to.
    fn keep(&self, at: &Rows, [h, i]: [usize; 2], q: &[f64], keys: &[f64], scratch: &mut Vec<Rough>) -> Weighed {
        let scale = self.p.scale;
        let mut all = Vec::new();
        for (key, k) in keys.chunks_exact(q.len()).enumerate() {
            let index = place([at.batch, h, i, key]);
            if !self.p.keeps(index) {
                continue;
            }
            let (sum, size) = dot(q, k);
            let size = size * scale.abs();
            let raw = Rough { value: sum * scale, error: score_error(self.p, q.len(), size) };
            let (factor, slope) = (self.p.factor(index), Rough::exact(1.0));
            let mut kept = Kept { key, score: raw, raw: raw.value, magnitude: 0.0, weight: 0.0, factor, slope, along: Vec::new() };
            let mut own = 0.0;
            if let Some(function) = self.p.modify {
                kept.score = modified(function, raw, index, scratch);
                let mut slopes = function.slopes(raw, index, scratch).into_iter();
                kept.slope = slopes.next().unwrap_or_default();
                kept.along = slopes.collect();
                own = kept.score.value.abs();
            }
            if kept.score.value.is_finite() {
                // A score_mod may turn an infinite or NaN score into a finite number. Leave out the magnitude of the raw score then.
                let raw = size * kept.slope.value.abs();
                kept.magnitude = own + if raw.is_finite() { raw } else { 0.0 };
            }
            all.push(kept);
        }
        let keyless = largest(all.iter().map(|kept| kept.score.value)) == f64::NEG_INFINITY;
        let [_, heads_q, _, seq_q, ..] = self.p.shape;
        let given = match self.given {
            Given::These { stats, .. } => Some(stats.get((at.batch * heads_q + h) * seq_q + i)),
            Given::Rounded | Given::Own => None,
        };
        if keyless || given == Some(f64::NEG_INFINITY) {
            return Weighed { keys: Vec::new(), stats: f64::NEG_INFINITY, error: 0.0 };
        }
        if let Some(stats) = given {
            all.iter_mut().for_each(|kept| kept.weight = (kept.score.value - stats).exp());
            return Weighed { keys: all, stats, error: 0.0 };
        }
        let sink = self.p.sink.map(|_| self.p.sink_of(h)).filter(|&sink| sink != f64::NEG_INFINITY);
        let max = largest(all.iter().map(|kept| kept.score.value).chain(sink));
        let sum: f64 = all.iter().map(|kept| kept.score.value).chain(sink).map(|score| (score - max).exp()).sum();
        all.iter_mut().for_each(|kept| kept.weight = (kept.score.value - max).exp() / sum);
        let error = all.iter().map(|kept| weight_error(kept.weight, kept.score.error)).sum();
        Weighed { keys: all, stats: max + sum.ln(), error }
    }

    /// Returns the gradients with respect to the score and the parameters if a product of `upstream` and a derivative is not finite. There, a value that the
    /// score_mod does not depend on gets the gradient 0, not NaN.
    fn exact(&self, kept: &Kept, upstream: f64, index: Place) -> Option<Vec<f64>> {
        let function = self.p.modify?;
        let finite = |slope: &Rough| (upstream * slope.value).is_finite();
        let plain = finite(&kept.slope) && kept.along.iter().all(finite);
        (!plain).then(|| function.passed_on(kept.raw, upstream, index))
    }

    /// Returns the rounding error of δ, where `size` is Σ |d_o·o|. `small` are absolute rounding errors of the elements of `o`.
    fn noise_of_delta(
        &self,
        [delta, size]: [f64; 2],
        [d_o, o, o_size, small]: [&[f64]; 4],
        (all, products): (&[Kept], &[(f64, f64)]),
    ) -> Noise {
        let (rates, square) = (&self.rates, |x: f64| x * x);
        let of_element = |((x, o), (size, small)): ((&f64, &f64), (&f64, &f64))| {
            x * x * (square(rates.stored * o) + square(*small) + square(rates.computed_output_fine * size))
        };
        let of_output: f64 = d_o.iter().zip(o).zip(o_size.iter().zip(small)).map(of_element).sum();
        let of_key = |(kept, (d_p, _)): (&Kept, &(f64, f64))| {
            let (d_p, score) = (kept.factor * d_p, weight_error(kept.weight, kept.score.error));
            let computed = square(rates.computed_weight * kept.weight * d_p) + square(rates.computed_output_values * d_p);
            // Add the effect of this score's error on `o` and on the softmax denominator.
            computed + square(rates.computed_output_score / 2.0 * score * (d_p.abs() + delta.abs()))
        };
        let of_keys: f64 = all.iter().zip(products).map(of_key).sum();
        Noise { fine: rates.product * size, variance: of_output + of_keys, ..Noise::default() }
    }

    /// Adds one row, the `n`th of its part, to the gradients.
    fn row(
        &self,
        at: &Rows,
        [n, h, i]: [usize; 3],
        (q, d_o): (&[f64], &[f64]),
        (keys, values, key_squares): (&[f64], &[f64], &[f64]),
        part: &mut Part,
        scratch: &mut Vec<Rough>,
    ) {
        let (rates, scale) = (&self.rates, self.p.scale);
        let (dim_qk, dim_v) = (q.len(), d_o.len());
        let Weighed { keys: all, stats, error } = self.keep(at, [h, i], q, keys, scratch);
        let (mut o, mut o_size) = (vec![0f64; dim_v], vec![0f64; dim_v]);
        for kept in &all {
            for (v, (o, size)) in values[kept.key * dim_v..][..dim_v].iter().zip(o.iter_mut().zip(&mut o_size)) {
                *o += kept.factor * kept.weight * v;
                *size += kept.factor * kept.weight * v.abs();
            }
        }
        // For each key: dP, and the sum of the magnitudes of its terms.
        let products: Vec<(f64, f64)> = all.iter().map(|kept| dot(d_o, &values[kept.key * dim_v..][..dim_v])).collect();
        // In 8-bit floats, the absolute error of P does not shrink with P, so it counts in full for each value.
        let lost = all.iter().zip(&products).map(|(kept, (_, size))| size * kept.factor * rates.computed_output_values);
        let lost: f64 = if rates.computed_output_values > 0.0 { lost.sum() } else { 0.0 };
        if let Given::These { o: given, .. } = self.given {
            given.read([at.batch, h, i], &mut o);
        }
        let (delta, size) = dot(d_o, &o);
        let computed: f64 = d_o.iter().zip(&o_size).map(|(x, y)| x.abs() * y).sum();
        let of_output = rates.computed_output + rates.computed_output_score * error;
        // An element of `o` that sums nothing has no rounding error.
        let small: Vec<f64> = o_size.iter().map(|&size| if size == 0.0 { 0.0 } else { rates.small_output }).collect();
        let small_output: f64 = d_o.iter().zip(&small).map(|(x, small)| x.abs() * small).sum();
        let delta_error = (rates.product + rates.output) * size + of_output * computed + lost + small_output;
        let noise = self.noise_of_delta([delta, size], [d_o, &o, &o_size, &small], (&all, &products));
        let of_row = rates.weight + rates.sum * error + of_difference(rates.stats * stats.abs());
        let common = OfRow { weight: of_row.exp_m1().min(1.0) };
        let [q_square, d_o_square] = [q, d_o].map(|row| row.iter().map(|x| x * x).sum::<f64>());
        // An error of δ enters `dq` multiplied by `of_delta`: the sum of P · k, times derivative and scale.
        let mut of_delta = vec![0f64; dim_qk];
        if self.p.sink.is_some()
            && !all.is_empty()
            && let Some((gradient, &dims)) = part.along.last_mut().zip(self.along.last())
        {
            // P of the sink is not rounded to the element type: it stays in f32.
            let weight = (self.p.sink_of(h) - stats).exp();
            let value = -weight * delta;
            let of_weight = weight_error(weight, of_row) * delta.abs();
            let error = of_weight + weight * delta_error + rates.over_scores * value.abs();
            let variance = weight * weight * noise.variance + (rates.over_scores * value).powi(2);
            // Elements of `o` that are small for their type have absolute errors, not relative ones.
            let magnitude = weight * (size + ABSOLUTE * small_output);
            let noise = Noise { fine: of_weight + weight * noise.fine, variance, ..Noise::default() };
            gradient.add(at.elements(dims, [h, i, 0]).0, Term { value, error, magnitude }, noise);
        }

        // For each read of a parameter: its index, its element, and the factor by which an error of δ enters its gradient.
        let mut reach: Vec<(usize, usize, f64)> = Vec::new();
        for (kept, (d_p, d_p_size)) in all.iter().zip(products) {
            let (k_from, v_from) = (kept.key * dim_qk, kept.key * dim_v);
            if kept.score.value == f64::NEG_INFINITY {
                // P is 0 for a score of −∞, so its gradients are exactly 0. The term is added without a product that could be NaN.
                part.dv.add(v_from, d_o, Term::default(), 0.0);
                part.dq.add(n * dim_qk, &keys[k_from..][..dim_qk], Term::default(), 0.0);
                part.dk.add(k_from, q, Term::default(), 0.0);
                continue;
            }
            let weight = kept.weight;
            let absolute = rates.tiny + rates.small_weight;
            let off = of_row + kept.score.error + of_difference(rates.score * kept.magnitude);
            let weight_error = if weight.is_finite() { weight_error(weight, off) + rates.tiny } else { f64::NAN };
            let error = weight_error + rates.round * weight + rates.small_weight;
            let magnitude = weight + ABSOLUTE * absolute;
            let factor = kept.factor;
            let left = Term { value: factor * weight, error: factor * error, magnitude: factor * magnitude };
            part.dv.add(v_from, d_o, left, rates.over_queries);
            part.noises.keys[1][kept.key].add(self.noise_of_weight(kept, &common), d_o_square);

            let (d_p, d_p_size) = (factor * d_p, factor * d_p_size);
            let d_modified = weight * (d_p - delta);
            let modified_error = weight_error * (d_p - delta).abs() + weight * (rates.product * d_p_size + delta_error);
            let size_of_modified = weight * (d_p_size + size);
            let exact = self.exact(kept, d_modified, place([at.batch, h, i, kept.key]));
            let carried = |n: usize, slope: Rough| {
                if let Some(value) = exact.as_ref().and_then(|exact| exact.get(n)) {
                    return Term { value: *value, ..Term::default() };
                }
                let value = d_modified * slope.value;
                let off = slope.error + rates.slope * (1.0 + slope.value.abs());
                let off = if self.p.modify.is_some() { off } else { 0.0 };
                let error = modified_error * (slope.value.abs() + off) + d_modified.abs() * off + rates.round_slope * value.abs();
                // The magnitude uses 1 + |derivative|: at derivative 0 there still is an error, from the terms of the difference dP − δ.
                Term { value, error, magnitude: size_of_modified * (1.0 + slope.value.abs()) + ABSOLUTE * absolute * (d_p - delta).abs() }
            };
            let d_score = carried(0, kept.slope);
            // The executor may round dS before or after it multiplies dS by the scale, so allow for the larger of the two errors.
            let small = rates.small_slope.unwrap_or(rates.small * scale.abs().max(1.0));
            let (error, magnitude) = (scale.abs() * d_score.error + small, scale.abs() * d_score.magnitude + ABSOLUTE * small);
            let factor = Term { value: scale * d_score.value, error, magnitude };
            part.dq.add(n * dim_qk, &keys[k_from..][..dim_qk], factor, rates.over_keys);
            part.dk.add(k_from, q, factor, rates.over_queries);
            if exact.is_none() {
                let off = kept.slope.error + rates.slope * (1.0 + kept.slope.value.abs());
                let off = if self.p.modify.is_some() { off } else { 0.0 };
                let pair = Pair { difference: d_p - delta, size: d_p_size, modified: d_modified, slope: d_score.value, off };
                part.largest.add(scale * pair.slope, self.error_of_slope(kept, &common, &pair, &noise));
                let [of_dq, mut of_dk] = self.noise_of_slope(kept, &common, &pair);
                let k = &keys[k_from..][..dim_qk];
                let reach = scale * weight * kept.slope.value;
                of_delta.iter_mut().zip(k).for_each(|(sum, k)| *sum += reach * k);
                of_dk.shared += reach * reach * (noise.variance + 3.0 * noise.fine * noise.fine);
                part.noises.dq[n].add(of_dq, key_squares[kept.key]);
                part.noises.keys[0][kept.key].add(of_dk, q_square);
            }
            let along = |n: usize| {
                let Term { value, error, magnitude } = carried(1 + n, kept.along[n]);
                let error = error + rates.small + rates.over_scores * value.abs();
                let slope = kept.along[n];
                let off = slope.error + rates.slope * (1.0 + slope.value.abs());
                let fine = weight_error * (d_p - delta).abs() + weight * (rates.product * d_p_size + noise.fine);
                let fine = fine * (slope.value.abs() + off);
                let independent = [(rates.round_slope + rates.over_scores) * value, d_modified * off, rates.small];
                let variance = independent.iter().map(|x| x * x).sum();
                let noise = if exact.is_some() { Noise::default() } else { Noise { fine, variance, ..Noise::default() } };
                let reach = if exact.is_some() { 0.0 } else { weight * slope.value };
                (Term { value, error, magnitude: magnitude + ABSOLUTE * rates.small }, noise, reach)
            };
            let mut add = |which: usize, element: usize, (term, noise, by): (Term, Noise, f64)| {
                part.along[which].add(element, term, noise);
                reach.push((which, element, by));
            };
            let wrt = self.along.len() - usize::from(self.p.sink.is_some());
            for (n, (dims, _)) in self.extents().enumerate().take(wrt).filter(|(_, (_, table))| !table) {
                add(n, at.elements(dims, [h, i, kept.key]).0, along(n));
            }
            let reads = self.p.modify.map_or_else(Vec::new, |function| function.reads(kept.raw, place([at.batch, h, i, kept.key])));
            for (n, (which, element)) in reads.into_iter().enumerate() {
                add(which, element, along(wrt + n));
            }
            part.used[kept.key] = true;
        }
        reach.sort_unstable_by_key(|&(which, element, _)| (which, element));
        for same in reach.chunk_by(|x, y| x.0 == y.0 && x.1 == y.1) {
            let by: f64 = same.iter().map(|(.., by)| by).sum();
            part.along[same[0].0].noise[same[0].1].variance += by * by * noise.variance;
        }
        part.noises.dq[n].add(noise, of_delta.iter().map(|x| x * x).sum());
        part.noises.dq[n].fine += common.weight * part.dq.value[n * dim_qk..][..dim_qk].iter().map(|x| x * x).sum::<f64>().sqrt();
        if !all.is_empty() {
            part.dq.may_be_small(n * dim_qk, dim_qk, rates.small_results[0]);
        }
    }
}

/// Sums of a KV head that still lack some query rows.
struct Open {
    batch: usize,
    head: usize,
    dk: Gradient,
    dv: Gradient,
    used: Vec<bool>,
    noises: Noises,
}

/// Receives complete rows: 0, 1 or 2 for dq, dk or dv; (batch, head, sequence); the sums with the range of the row in them; the noise of the row's norm.
type Sink<'s> = dyn FnMut(usize, [usize; 3], (&Gradient, Range<usize>), Noise) + 's;

impl Open {
    /// Passes all rows of dk and dv to `to`.
    fn close(mut self, worker: &Worker<'_>, to: &mut Sink<'_>) {
        let ([.., dim_qk, dim_v], small) = (worker.p.shape, worker.rates.small_results);
        for (which, gradient, dim) in [(1, &mut self.dk, dim_qk), (2, &mut self.dv, dim_v)] {
            for (key, &used) in self.used.iter().enumerate() {
                if used {
                    gradient.may_be_small(key * dim, dim, worker.roundings(which) * small[which]);
                }
                let (range, noise) = (key * dim..(key + 1) * dim, self.noises.keys[which - 1][key]);
                let noise = worker.stored(which, noise, self.noises.parts(which - 1, key), gradient, range.clone());
                to(which, [self.batch, self.head, key], (gradient, range), noise);
            }
        }
    }
}

/// Computes everything on all threads and passes rows of dq, dk and dv to `to`. Returns the gradients of parameters and the largest `|dS|` times the scale.
/// `done` receives the number of rows that each step completed.
fn compute(worker: &Worker<'_>, done: &(dyn Fn(u64) + Sync), to: &mut Sink<'_>) -> (Vec<Along>, Largest) {
    let [batch, _, heads_kv, seq_q, _, dim_qk, _] = worker.p.shape;
    let group = worker.p.group();
    // Without queries there is one block without rows, so that the gradients of keys and values are zeros.
    let blocks = seq_q.div_ceil(ROWS).max(1);
    let work: Vec<Rows> = (0..batch * heads_kv * blocks)
        .map(|n| {
            let (batch, head_kv, first) = (n / (heads_kv * blocks), n / blocks % heads_kv, n % blocks * ROWS);
            Rows { batch, head_kv, heads: head_kv * group..(head_kv + 1) * group, rows: first..(first + ROWS).min(seq_q) }
        })
        .collect();
    let mut along: Vec<Along> = worker.along.iter().map(|dims| Along::zeros(dims.iter().product())).collect();
    let mut open: Option<Open> = None;
    let mut largest = Largest::default();
    // To bound memory, process as many blocks at a time as there are threads. Chunks follow the order of the rows.
    for some in work.chunks(rayon::current_num_threads()) {
        let parts: Vec<Part> = some.par_iter().map(|at| worker.part(at)).collect();
        for (at, part) in some.iter().zip(parts) {
            largest = largest.and(part.largest);
            for (n, [h, i]) in at.queries().enumerate() {
                let range = n * dim_qk..(n + 1) * dim_qk;
                let noise = worker.stored(0, part.noises.dq[n], 0.0, &part.dq, range.clone());
                to(0, [at.batch, h, i], (&part.dq, range), noise);
            }
            for ((to, from), (dims, table)) in along.iter_mut().zip(&part.along).zip(worker.extents()) {
                if table { add_table(to, from) } else { add_part(to, from, at, dims) }
            }
            match &mut open {
                Some(open) if (open.batch, open.head) == (at.batch, at.head_kv) => {
                    open.dk.merge(&part.dk);
                    open.dv.merge(&part.dv);
                    open.noises.merge(&part.noises);
                    open.used.iter_mut().zip(&part.used).for_each(|(to, used)| *to |= used);
                }
                Some(_) | None => {
                    let Part { dk, dv, used, noises, .. } = part;
                    let next = Open { batch: at.batch, head: at.head_kv, dk, dv, used, noises };
                    if let Some(complete) = open.replace(next) {
                        complete.close(worker, to);
                    }
                }
            }
            done((at.heads.len() * at.rows.len()) as u64);
        }
    }
    if let Some(complete) = open {
        complete.close(worker, to);
    }
    (along, largest)
}

/// Adds what some rows contribute to the gradient of a table.
fn add_table(to: &mut Along, from: &Along) {
    for at in 0..from.noise.len() {
        let (term, noise) = from.term(at);
        to.add(at, term, noise);
    }
}

/// Adds what some rows contribute to the gradient of a parameter of extents `dims`.
fn add_part(to: &mut Along, from: &Along, at: &Rows, dims: [usize; 4]) {
    let [_, heads, rows, keys] = at.part(dims);
    for h in 0..heads {
        for i in 0..rows {
            for j in 0..keys {
                let (local, whole) = at.elements(dims, [at.heads.start + h, at.rows.start + i, j]);
                let (term, noise) = from.term(local);
                to.add(whole, term, noise);
            }
        }
    }
}

fn worker<'a>(p: &'a Problem<'a>, d_o: Tensor<'a>, given: Given<'a>, rates: Rates) -> Worker<'a> {
    let mut along = p.modify.map_or_else(Vec::new, |function| function.along());
    let mut tables: Vec<bool> = p.modify.map_or_else(Vec::new, |function| (0..along.len()).map(|n| function.is_table(n)).collect());
    along.extend(p.sink.map(|_| [1, p.shape[1], 1, 1]));
    tables.resize(along.len(), false);
    Worker { p, d_o, given, rates, along, tables }
}

/// Returns the extents (batch, heads, sequence, dim) of dq, dk and dv.
fn dims(p: &Problem<'_>) -> [[usize; 4]; 3] {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    [[batch, heads_q, seq_q, dim_qk], [batch, heads_kv, seq_kv, dim_qk], [batch, heads_kv, seq_kv, dim_v]]
}

/// Returns the row-major offset of a row.
fn dense([_, heads, rows, dim]: [usize; 4], [b, h, s]: [usize; 3]) -> usize {
    ((b * heads + h) * rows + s) * dim
}

/// The gradients with respect to `q`, `k`, `v` and parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// The gradient `dq`, (batch, heads_q, seq_q, dim_qk).
    pub dq: Gradient,
    /// The gradient `dk`, (batch, heads_kv, seq_kv, dim_qk), summed over the query heads of a GQA group.
    pub dk: Gradient,
    /// The gradient `dv`, (batch, heads_kv, seq_kv, dim_v), summed over the query heads of a GQA group.
    pub dv: Gradient,
    /// Gradients of the requested parameters of the score_mod. If the problem has a sink, the gradient of the sink comes last.
    pub along: Vec<Gradient>,
}

/// Computes the gradients of `Σ o∘d_o` with respect to the operands and the requested parameters.
#[must_use]
pub fn gradients(p: &Problem<'_>, d_o: Tensor<'_>, given: Given<'_>) -> Gradients {
    gradients_with(p, d_o, given, Rates::new(p, &given).in_fixed_point(p, &d_o))
}

fn gradients_with(p: &Problem<'_>, d_o: Tensor<'_>, given: Given<'_>, rates: Rates) -> Gradients {
    let dims = dims(p);
    let mut all = dims.map(|dims| Gradient::zeros(dims.iter().product()));
    let (along, _) = compute(&worker(p, d_o, given, rates), &|_| (), &mut |which, row, (from, range), _| {
        all[which].place(dense(dims[which], row), from, range);
    });
    let [dq, dk, dv] = all;
    Gradients { dq, dk, dv, along: along.into_iter().map(|along| along.sum).collect() }
}

/// Returns the largest `|dS|`, times the scale, of a backward pass that receives this `o` and these stats.
#[must_use]
pub fn largest_slope(p: &Problem<'_>, d_o: Tensor<'_>, (o, stats): (Tensor<'_>, &dyn crate::Numbers)) -> Largest {
    let given = Given::These { o, stats };
    compute(&worker(p, d_o, given, Rates::new(p, &given)), &|_| (), &mut |_, _, _, _| ()).1
}

/// The results of an executor's backward pass, to be compared with the oracle's gradients.
#[derive(Clone, Copy)]
pub struct Results<'a> {
    /// The executor's `dq`, `dk` and `dv`.
    pub operands: [Tensor<'a>; 3],
    /// The executor's gradients of parameters, that of the sink last, each with the element type to which it was rounded.
    pub along: &'a [(Tensor<'a>, Element)],
}

/// Computes the gradients on all threads and compares an executor's results with them. `done` receives the number of rows that each step
/// completed. It needs less memory than [`gradients`].
pub fn check_gradients(
    p: &Problem<'_>,
    d_o: Tensor<'_>,
    given: Given<'_>,
    got: &[Tensor<'_>; 3],
    along: &[(Tensor<'_>, Element)],
    done: &(dyn Fn(u64) + Sync),
) -> GradientDistance {
    let mut all = check_each_gradients(p, d_o, given, &[Results { operands: *got, along }], done);
    all.pop().unwrap_or_default()
}

/// Computes the gradients once, and compares the results of several executors or runs with them. `done` receives the number of rows that
/// each step completed.
pub fn check_each_gradients(
    p: &Problem<'_>,
    d_o: Tensor<'_>,
    given: Given<'_>,
    results: &[Results<'_>],
    done: &(dyn Fn(u64) + Sync),
) -> Vec<GradientDistance> {
    let dims = dims(p);
    let mut distances = vec![GradientDistance::default(); results.len()];
    let worker = worker(p, d_o, given, Rates::new(p, &given).in_fixed_point(p, &d_o));
    let (want, _) = compute(&worker, done, &mut |which, row, (want, range), noise| {
        let piece = Piece { want, range, first: dense(dims[which], row), noise };
        let (stored, rounded) = p.narrow.map_or((p.stored, p.stored != p.element), |narrow| (narrow.gradient, false));
        for (distance, result) in distances.iter_mut().zip(results) {
            distance.operands[which].compare(&piece, (&result.operands[which], row), stored, rounded);
        }
    });
    for (distance, result) in distances.iter_mut().zip(results) {
        for ((want, &dims), (got, element)) in want.iter().zip(&worker.along).zip(result.along) {
            let mut tally = Tally::default();
            tally.compare_along(want, dims, got, *element);
            distance.along.push(tally);
        }
    }
    distances
}

#[cfg(test)]
#[path = "backward/tests.rs"]
mod tests;
