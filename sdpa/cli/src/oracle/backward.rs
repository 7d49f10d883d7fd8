//! The gradient of textbook attention in f64, and how far rounding may move each of its elements.
//!
//! With `P` the weights of a row, `dP = d_o·vᵀ` and `δ = Σ d_o·o`: `dS = P ∘ (dP − δ)` times the slope of a modified score,
//! `dq = scale·dS·k`, `dk = scale·dSᵀ·q`, `dv = Pᵀ·d_o`, the last two summed over the query heads that share a key head; the
//! gradient of a parameter is the sum of `P ∘ (dP − δ)` times the derivative along it. Slopes and derivatives are those of the
//! derived gradient.

use super::rules::{Function, Rough};
use super::{Rules, dot, extents, largest, modified, place, read, score_error};
use crate::data::Data;
use crate::tolerance::gradients::{ABSOLUTE, Gradient, GradientDistance, Rates, Tally, Term};
use crate::tolerance::weight_error;
use rayon::prelude::*;
use sdpa::expr::ParamKind;
use sdpa::{BackwardProblem, BackwardSpec, TensorSpec};
use std::ops::Range;

/// A backward pass and the gradients to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) forward: super::Call<'a>,
    pub(crate) problem: &'a BackwardProblem,
    pub(crate) spec: &'a BackwardSpec,
    pub(crate) d_o: &'a Data,
    /// `dq`, `dk`, `dv`.
    pub(crate) got: [&'a Data; 3],
    pub(crate) wrt: &'a [(String, Data)],
    /// `o` and stats were computed in the same run.
    pub(crate) chained: bool,
}

/// Queries of a group of heads that are done together by a thread.
const ROWS: usize = 64;

/// The extents of the gradient of each parameter.
fn wrt_dims(problem: &BackwardProblem) -> Vec<[usize; 4]> {
    let dims = |name: &str| match problem.params().iter().find(|p| p.name == name).map(|p| p.kind) {
        Some(ParamKind::Tensor { axes, dtype: _ }) => axes.dims(problem.forward().extents()).map(|n| usize::try_from(n).unwrap_or(1)),
        Some(ParamKind::Scalar) | None => [1; 4],
    };
    problem.wrt().iter().map(|g| dims(&g.name)).collect()
}

/// Bytes of memory that a check takes.
pub(crate) fn bytes(problem: &BackwardProblem) -> u128 {
    let p = problem.forward();
    let n = |n: i64| u128::try_from(n).unwrap_or(0);
    let row = n(p.seq_kv()) * (n(p.dim_qk()) + n(p.dim_v()));
    let threads = rayon::current_num_threads() as u128;
    let local = n(p.group()) * ROWS as u128 * n(p.seq_kv());
    let wrt = wrt_dims(problem).into_iter().map(|d| d.into_iter().map(|n| n as u128).product::<u128>());
    let wrt: u128 = wrt.map(|all| all + threads * all.min(local)).sum();
    // Keys and values, and three sums for each of their elements.
    8 * (4 * threads + 3) * row + 24 * wrt
}

/// What one thread makes of some rows.
struct Part {
    dq: Tally,
    dk: Gradient,
    dv: Gradient,
    /// Keys that a query meets.
    used: Vec<bool>,
    along: Vec<Gradient>,
}

/// Rows of a group of heads.
#[derive(Clone, Debug)]
struct Rows {
    batch: usize,
    head_kv: usize,
    heads: Range<usize>,
    rows: Range<usize>,
}

impl Rows {
    /// The part of a parameter's gradient that these rows add to: its extents.
    fn part(&self, dims: [usize; 4]) -> [usize; 4] {
        let own = [1, self.heads.len(), self.rows.len(), dims[3]];
        [0, 1, 2, 3].map(|axis| if dims[axis] == 1 { 1 } else { own[axis] })
    }

    /// The element of that part at a place, and of the whole.
    fn elements(&self, dims: [usize; 4], [h, i, j]: [usize; 3]) -> (usize, usize) {
        let at = |dims: [usize; 4], place: [usize; 4]| {
            dims.iter().zip(place).fold(0, |n, (&extent, at)| n * extent + if extent == 1 { 0 } else { at })
        };
        let local = at(self.part(dims), [0, h - self.heads.start, i - self.rows.start, j]);
        (local, at(dims, [self.batch, h, i, j]))
    }
}

/// A key that a row keeps.
struct Kept {
    key: usize,
    /// As it is modified, and as it goes into that.
    score: Rough,
    raw: f64,
    /// Of the score.
    magnitude: f64,
    weight: f64,
    slope: Rough,
    along: Vec<Rough>,
}

/// The keys of a row, the statistic, and how far the sum of the weights may be off.
struct Weighed {
    keys: Vec<Kept>,
    stats: f64,
    error: f64,
}

struct Worker<'a> {
    call: &'a Call<'a>,
    rules: Rules<'a>,
    gradient: Option<Function<'a>>,
    rates: Rates,
    wrt: Vec<[usize; 4]>,
}

/// Rows of a head, in f64.
fn rows_of(data: &Data, tensor: &TensorSpec, b: usize, h: usize) -> Vec<f64> {
    let [_, _, seq, dim] = extents(tensor);
    let mut all = vec![0f64; seq * dim];
    for (s, row) in all.chunks_exact_mut(dim).enumerate() {
        read(data, tensor, [b, h, s], row);
    }
    all
}

impl Worker<'_> {
    fn part(&self, at: &Rows) -> Part {
        let call = self.call;
        let spec = call.forward.spec;
        let [_, _, seq_kv, dim_qk] = extents(&spec.k);
        let dim_v = extents(&spec.v)[3];
        let keys = rows_of(call.forward.k, &spec.k, at.batch, at.head_kv);
        let values = rows_of(call.forward.v, &spec.v, at.batch, at.head_kv);
        let mut part = Part {
            dq: Tally::default(),
            dk: Gradient::zeros(keys.len()),
            dv: Gradient::zeros(values.len()),
            used: vec![false; seq_kv],
            along: self.wrt.iter().map(|&dims| Gradient::zeros(at.part(dims).iter().product())).collect(),
        };
        let (mut q, mut d_o, mut scratch) = (vec![0f64; dim_qk], vec![0f64; dim_v], Vec::new());
        for h in at.heads.clone() {
            for i in at.rows.clone() {
                read(call.forward.q, &spec.q, [at.batch, h, i], &mut q);
                read(call.d_o, &call.spec.d_o, [at.batch, h, i], &mut d_o);
                let dq = self.row(at, [h, i], (&q, &d_o), (&keys, &values), &mut part, &mut scratch);
                part.dq.compare(&dq, 0..dim_qk, call.got[0], place(&call.spec.dq, at.batch, h, i));
            }
        }
        part
    }

    /// The keys of a row.
    fn keep(&self, at: &Rows, [h, i]: [usize; 2], q: &[f64], keys: &[f64], scratch: &mut Vec<Rough>) -> Weighed {
        let scale = self.call.forward.scale;
        let mut all = Vec::new();
        for (key, k) in keys.chunks_exact(q.len()).enumerate() {
            let index = [at.batch, h, i, key].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
            if !self.rules.keeps(index) {
                continue;
            }
            let (sum, size) = dot(q, k);
            let raw = Rough { value: sum * scale, error: score_error(q.len(), size * scale.abs()) };
            let (raw_value, slope) = (raw.value, Rough::exact(1.0));
            let mut kept = Kept { key, score: raw, raw: raw_value, magnitude: 0.0, weight: 0.0, slope, along: Vec::new() };
            if let Some(gradient) = &self.gradient {
                kept.score = modified(gradient, raw, index, scratch);
                let mut roots = gradient.rough(raw, index, scratch).skip(1);
                kept.slope = roots.next().unwrap_or_default();
                kept.along = roots.collect();
            }
            if kept.score.value.is_finite() {
                // A function may make a number of what is none.
                let raw = if size.is_finite() { size * scale.abs() } else { 0.0 };
                kept.magnitude = raw + kept.score.value.abs();
            }
            all.push(kept);
        }
        let max = largest(&all.iter().map(|kept| kept.score.value).collect::<Vec<_>>());
        if max == f64::NEG_INFINITY {
            return Weighed { keys: Vec::new(), stats: max, error: 0.0 };
        }
        let sum: f64 = all.iter().map(|kept| (kept.score.value - max).exp()).sum();
        all.iter_mut().for_each(|kept| kept.weight = (kept.score.value - max).exp() / sum);
        // What has no weight at all has no slope either.
        all.retain(|kept| kept.score.value != f64::NEG_INFINITY);
        let error = all.iter().map(|kept| weight_error(kept.weight, kept.score.error)).sum();
        Weighed { keys: all, stats: max + sum.ln(), error }
    }

    /// The gradients along the score and the parameters, where what comes from behind is no number, or a slope is none: what has no
    /// slope there passes nothing on.
    fn exact(&self, kept: &Kept, upstream: f64, index: [i64; 4]) -> Option<Vec<f64>> {
        let gradient = self.gradient.as_ref()?;
        let finite = |slope: &Rough| (upstream * slope.value).is_finite();
        let plain = finite(&kept.slope) && kept.along.iter().all(finite);
        (!plain).then(|| gradient.eval(kept.raw, upstream, index).split_off(1))
    }

    /// Adds one row to the gradients; that of its query.
    fn row(
        &self,
        at: &Rows,
        [h, i]: [usize; 2],
        (q, d_o): (&[f64], &[f64]),
        (keys, values): (&[f64], &[f64]),
        part: &mut Part,
        scratch: &mut Vec<Rough>,
    ) -> Gradient {
        let (rates, scale) = (&self.rates, self.call.forward.scale);
        let (dim_qk, dim_v) = (q.len(), d_o.len());
        let Weighed { keys: all, stats, error } = self.keep(at, [h, i], q, keys, scratch);
        let (mut o, mut o_size) = (vec![0f64; dim_v], vec![0f64; dim_v]);
        for kept in &all {
            for (v, (o, size)) in values[kept.key * dim_v..][..dim_v].iter().zip(o.iter_mut().zip(&mut o_size)) {
                *o += kept.weight * v;
                *size += kept.weight * v.abs();
            }
        }
        let (delta, size) = dot(d_o, &o);
        let computed: f64 = d_o.iter().zip(&o_size).map(|(x, y)| x.abs() * y).sum();
        let of_output = rates.computed_output + rates.computed_output_score * error;
        let delta_error = (rates.product + rates.output) * size + of_output * computed;
        let of_row = rates.weight + rates.sum * error + rates.magnitude * stats.abs();

        let mut dq = Gradient::zeros(dim_qk);
        for kept in &all {
            let (k_from, v_from) = (kept.key * dim_qk, kept.key * dim_v);
            let weight = kept.weight;
            let absolute = rates.tiny + rates.small;
            let off = of_row + kept.score.error + rates.magnitude * kept.magnitude;
            let weight_error = if weight.is_finite() { weight_error(weight, off) + rates.tiny } else { f64::NAN };
            let error = weight_error + rates.round * weight + rates.small;
            let magnitude = weight + ABSOLUTE * absolute;
            part.dv.add(v_from, d_o, Term { value: weight, error, magnitude }, rates.over_queries);

            let (d_p, d_p_size) = dot(d_o, &values[v_from..][..dim_v]);
            let d_modified = weight * (d_p - delta);
            let modified_error = weight_error * (d_p - delta).abs() + weight * (rates.product * d_p_size + delta_error);
            let size_of_modified = weight * (d_p_size + size);
            let index = [at.batch, h, i, kept.key].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
            let exact = self.exact(kept, d_modified, index);
            let carried = |n: usize, slope: Rough| {
                if let Some(value) = exact.as_ref().and_then(|exact| exact.get(n)) {
                    return Term { value: *value, ..Term::default() };
                }
                let value = d_modified * slope.value;
                let off = slope.error + rates.slope * (1.0 + slope.value.abs());
                let off = if self.gradient.is_some() { off } else { 0.0 };
                let error = modified_error * slope.value.abs() + d_modified.abs() * off + rates.round * value.abs();
                // What has no slope is off by the roundings of what it is made of, not by a part of itself.
                Term { value, error, magnitude: size_of_modified * (1.0 + slope.value.abs()) + ABSOLUTE * absolute * (d_p - delta).abs() }
            };
            let d_score = carried(0, kept.slope);
            // Whether dS is rounded before it is scaled or after is the executor's choice.
            let small = rates.small * scale.abs().max(1.0);
            let (error, magnitude) = (scale.abs() * d_score.error + small, scale.abs() * d_score.magnitude + ABSOLUTE * small);
            let factor = Term { value: scale * d_score.value, error, magnitude };
            dq.add(0, &keys[k_from..][..dim_qk], factor, rates.over_keys);
            part.dk.add(k_from, q, factor, rates.over_queries);
            for (n, ((&slope, gradient), &dims)) in kept.along.iter().zip(&mut part.along).zip(&self.wrt).enumerate() {
                let Term { value, error, magnitude } = carried(1 + n, slope);
                let error = error + rates.small + rates.over_scores * value.abs();
                let term = Term { value, error, magnitude: magnitude + ABSOLUTE * rates.small };
                gradient.add_one(at.elements(dims, [h, i, kept.key]).0, term);
            }
            part.used[kept.key] = true;
        }
        if !all.is_empty() {
            dq.may_be_small(0, dim_qk, rates.small);
        }
        dq
    }
}

/// Sums of a key head that are not complete yet.
struct Open {
    batch: usize,
    head: usize,
    dk: Gradient,
    dv: Gradient,
    used: Vec<bool>,
}

impl Open {
    /// Compares what is complete now.
    fn close(mut self, call: &Call<'_>, small: f64, to: &mut [Tally; 2]) {
        let spec = call.spec;
        let tensors = [(&mut self.dk, &spec.dk, call.got[1]), (&mut self.dv, &spec.dv, call.got[2])];
        for ((gradient, tensor, got), tally) in tensors.into_iter().zip(to) {
            let dim = extents(tensor)[3];
            for (key, _) in self.used.iter().enumerate() {
                if self.used[key] {
                    gradient.may_be_small(key * dim, dim, small);
                }
                tally.compare(gradient, key * dim..(key + 1) * dim, got, place(tensor, self.batch, self.head, key));
            }
        }
    }
}

/// Computes the gradients of `Σ o∘d_o` on all threads and compares them; `done` is told how many rows are.
pub(crate) fn check(call: &Call<'_>, done: &(dyn Fn(u64) + Sync)) -> GradientDistance {
    let spec = call.forward.spec;
    let [batch, heads_q, seq_q, _] = extents(&spec.q);
    let [_, heads_kv, seq_kv, dim_v] = extents(&spec.v);
    let group = heads_q / heads_kv;
    let worker = Worker {
        call,
        rules: Rules::new(&call.forward),
        gradient: call.problem.gradient().map(|g| Function::new(&g.trace, call.forward.params, call.problem.forward().extents())),
        rates: Rates::new(call.forward.o.element(), [batch, heads_q, heads_kv, seq_q, seq_kv, dim_v], call.chained),
        wrt: wrt_dims(call.problem),
    };
    let blocks = seq_q.div_ceil(ROWS);
    let work: Vec<Rows> = (0..batch * heads_kv * blocks)
        .map(|n| {
            let (batch, head_kv, first) = (n / (heads_kv * blocks), n / blocks % heads_kv, n % blocks * ROWS);
            Rows { batch, head_kv, heads: head_kv * group..(head_kv + 1) * group, rows: first..(first + ROWS).min(seq_q) }
        })
        .collect();
    let mut dq = Tally::default();
    let mut of_keys = [Tally::default(); 2];
    let mut along: Vec<Gradient> = worker.wrt.iter().map(|dims| Gradient::zeros(dims.iter().product())).collect();
    let mut open: Option<Open> = None;
    // As many at a time as there are threads bounds the memory; their order is that of the rows.
    for some in work.chunks(rayon::current_num_threads()) {
        let parts: Vec<Part> = some.par_iter().map(|at| worker.part(at)).collect();
        for (at, part) in some.iter().zip(parts) {
            dq = dq.and(part.dq);
            for ((to, from), &dims) in along.iter_mut().zip(&part.along).zip(&worker.wrt) {
                add_part(to, from, at, dims);
            }
            match &mut open {
                Some(open) if (open.batch, open.head) == (at.batch, at.head_kv) => {
                    open.dk.merge(&part.dk);
                    open.dv.merge(&part.dv);
                    open.used.iter_mut().zip(&part.used).for_each(|(to, used)| *to |= used);
                }
                Some(_) | None => {
                    let next = Open { batch: at.batch, head: at.head_kv, dk: part.dk, dv: part.dv, used: part.used };
                    if let Some(complete) = open.replace(next) {
                        complete.close(call, worker.rates.small, &mut of_keys);
                    }
                }
            }
            done((at.heads.len() * at.rows.len()) as u64);
        }
    }
    if let Some(complete) = open {
        complete.close(call, worker.rates.small, &mut of_keys);
    }
    let [dk, dv] = of_keys;
    let mut all = vec![("dq".to_owned(), dq), ("dk".to_owned(), dk), ("dv".to_owned(), dv)];
    for ((name, got), want) in call.wrt.iter().zip(&along) {
        let mut tally = Tally::default();
        tally.compare(want, 0..want.value.len(), got, 0);
        all.push((format!("d{name}"), tally));
    }
    GradientDistance(all)
}

/// Adds the part that some rows make of a parameter's gradient.
fn add_part(to: &mut Gradient, from: &Gradient, at: &Rows, dims: [usize; 4]) {
    let [_, heads, rows, keys] = at.part(dims);
    for h in 0..heads {
        for i in 0..rows {
            for j in 0..keys {
                let (local, whole) = at.elements(dims, [at.heads.start + h, at.rows.start + i, j]);
                to.add_one(whole, Term { value: from.value[local], error: from.error[local], magnitude: from.magnitude[local] });
            }
        }
    }
}
