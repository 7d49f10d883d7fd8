//! Textbook attention in f64, which results are compared with. It shares no code with the executors: it reads named masks word
//! for word, expressions value by value, and a row's keys one by one.

pub(crate) mod backward;
pub(crate) mod rules;

use crate::data::Data;
use crate::params::Bound;
use crate::tolerance::{Distance, F32_ROUNDOFF, Row, Sizes, compare, weight_error};
use rayon::prelude::*;
use rules::{Function, Rough, Rule};
use sdpa::{AttentionSpec, Problem, TensorSpec};

/// Operands and the results to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) problem: &'a Problem,
    pub(crate) params: &'a [Bound],
    pub(crate) q: &'a Data,
    pub(crate) k: &'a Data,
    pub(crate) v: &'a Data,
    pub(crate) o: &'a Data,
    pub(crate) stats: Option<&'a [f32]>,
    pub(crate) scale: f64,
}

/// What happens to scores.
struct Rules<'a> {
    modify: Option<Function<'a>>,
    masks: Vec<Rule<'a>>,
    extents: [i64; 4],
}

impl<'a> Rules<'a> {
    fn new(call: &Call<'a>) -> Rules<'a> {
        let extents = call.problem.extents();
        Rules {
            modify: call.problem.score_mod().map(|trace| Function::new(trace, call.params, extents)),
            masks: call.spec.masks.iter().map(|m| Rule::new(m, call.params, extents)).collect(),
            extents,
        }
    }

    fn keeps(&self, index: [i64; 4]) -> bool {
        self.masks.iter().all(|m| m.keeps(index, self.extents))
    }
}

/// Rows that share keys and are done together, so that a key is converted once for all of them.
const ROWS: usize = 16;
/// Scores kept at a time by a thread, if a row has fewer.
const SCORES: usize = 1 << 21;

fn rows_together(seq_kv: usize) -> usize {
    (SCORES / seq_kv.max(1)).clamp(1, ROWS)
}

/// Bytes of memory that a check takes.
pub(crate) fn bytes(spec: &AttentionSpec) -> u128 {
    let seq_kv = usize::try_from(spec.k.dims[2]).unwrap_or(usize::MAX);
    let scores = rows_together(seq_kv) as u128 * seq_kv as u128 * (2 * size_of::<f64>() + size_of::<bool>()) as u128;
    let [batch, heads, seq_q, _] = spec.q.dims.map(|n| u128::try_from(n).unwrap_or(0));
    let distances = batch * heads * seq_q.div_ceil(rows_together(seq_kv) as u128) * size_of::<Distance>() as u128;
    scores * rayon::current_num_threads() as u128 + distances
}

/// Computes every row on all threads and compares it; `done` is told how many rows are.
pub(crate) fn check(call: &Call<'_>, done: &(dyn Fn(u64) + Sync)) -> Distance {
    let [batch, heads_q, seq_q, _] = extents(&call.spec.q);
    let together = rows_together(extents(&call.spec.k)[2]);
    let blocks = seq_q.div_ceil(together);
    let rules = Rules::new(call);
    let distances: Vec<Distance> = (0..batch * heads_q * blocks)
        .into_par_iter()
        .map(|n| {
            let (b, h, first) = (n / (heads_q * blocks), n / blocks % heads_q, n % blocks * together);
            let rows = first..(first + together).min(seq_q);
            let distance = block(call, &rules, b, h, rows.clone());
            done(rows.len() as u64);
            distance
        })
        .collect();
    // In the order of the rows, so that sums do not depend on threads.
    distances.into_iter().fold(Distance::default(), Distance::and)
}

fn extents(tensor: &TensorSpec) -> [usize; 4] {
    tensor.dims.map(|n| usize::try_from(n).unwrap_or(0))
}

/// Where a row of a tensor begins.
fn place(tensor: &TensorSpec, b: usize, h: usize, s: usize) -> usize {
    let strides = tensor.strides.map(|n| usize::try_from(n).unwrap_or(0));
    b * strides[0] + h * strides[1] + s * strides[2]
}

fn read(data: &Data, tensor: &TensorSpec, [b, h, s]: [usize; 3], to: &mut [f64]) {
    data.row(place(tensor, b, h, s), to);
}

/// Σ x·y and Σ |x·y|, in eight partial sums.
fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sums, mut sizes) = ([0f64; LANES], [0f64; LANES]);
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
            sizes[lane] += (x[lane] * y[lane]).abs();
        }
    }
    for ((x, y), (sum, size)) in x_rest.iter().zip(y_rest).zip(sums.iter_mut().zip(&mut sizes)) {
        *sum += x * y;
        *size += (x * y).abs();
    }
    (sums.iter().sum(), sizes.iter().sum())
}

/// Error of a score that is a sum of products in f32, from the sum of their magnitudes.
fn score_error(dim_qk: usize, size: f64) -> f64 {
    4.0 * (dim_qk as f64).sqrt() * F32_ROUNDOFF * size
}

/// A modified score: its rounding is its own, and so is one more of what executors do to it.
fn modified(function: &Function<'_>, score: Rough, index: [i64; 4], scratch: &mut Vec<Rough>) -> Rough {
    let mut roots = function.rough(score, index, scratch);
    let value = roots.next().unwrap_or(score);
    let error = if value.value.is_finite() { value.error + 2.0 * F32_ROUNDOFF * value.value.abs() } else { 0.0 };
    Rough { error, ..value }
}

/// Some rows of one head.
fn block(call: &Call<'_>, rules: &Rules<'_>, b: usize, h: usize, rows: std::ops::Range<usize>) -> Distance {
    let spec = call.spec;
    let [_, heads_q, seq_q, dim_qk] = extents(&spec.q);
    let [_, heads_kv, seq_kv, dim_v] = extents(&spec.v);
    let head = h / (heads_q / heads_kv);
    let index = |i: usize, j: usize| [b, h, i, j].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    let kept: Vec<bool> = rows.clone().flat_map(|i| (0..seq_kv).map(move |j| (i, j))).map(|(i, j)| rules.keeps(index(i, j))).collect();

    let mut queries = vec![0f64; rows.len() * dim_qk];
    for (i, query) in rows.clone().zip(queries.chunks_exact_mut(dim_qk)) {
        read(call.q, &spec.q, [b, h, i], query);
    }
    let mut answers: Vec<Row> = rows
        .clone()
        .map(|_| Row { o: vec![0.0; dim_v], o_magnitude: vec![0.0; dim_v], o_error: vec![0.0; dim_v], ..Row::default() })
        .collect();
    let mut scores = vec![f64::NEG_INFINITY; rows.len() * seq_kv];
    let mut errors = vec![0f64; rows.len() * seq_kv];
    let mut key = vec![0f64; dim_qk];
    let mut scratch = Vec::new();
    for j in 0..seq_kv {
        read(call.k, &spec.k, [b, head, j], &mut key);
        for (r, i) in rows.clone().enumerate().filter(|&(r, _)| kept[r * seq_kv + j]) {
            let (sum, size) = dot(&queries[r * dim_qk..][..dim_qk], &key);
            let mut score = Rough { value: sum * call.scale, error: score_error(dim_qk, size * call.scale.abs()) };
            if let Some(function) = &rules.modify {
                score = modified(function, score, index(i, j), &mut scratch);
            }
            scores[r * seq_kv + j] = score.value;
            errors[r * seq_kv + j] = score.error;
        }
    }
    // From here on `scores` are weights, and `errors` theirs.
    let of_rows = scores.chunks_exact_mut(seq_kv).zip(errors.chunks_exact_mut(seq_kv));
    for (r, (answer, (scores, errors))) in answers.iter_mut().zip(of_rows).enumerate() {
        let of_kept = |s: &[f64]| (0..seq_kv).filter(|&j| kept[r * seq_kv + j]).map(|j| s[j]).collect::<Vec<f64>>();
        let max = largest(&of_kept(scores));
        let sum: f64 = of_kept(scores).into_iter().map(|s| (s - max).exp()).sum();
        // Nothing is kept, or only scores of -inf.
        let empty = max == f64::NEG_INFINITY;
        answer.stats = if empty { max } else { max + sum.ln() };
        for s in scores.iter_mut() {
            *s = if empty { f64::NAN } else { (*s - max).exp() / sum };
        }
        for (error, weight) in errors.iter_mut().zip(&*scores) {
            *error = weight_error(*weight, *error);
        }
        answer.weight_error = if empty { 0.0 } else { of_kept(errors).into_iter().sum() };
    }
    let mut value = vec![0f64; dim_v];
    for j in 0..seq_kv {
        read(call.v, &spec.v, [b, head, j], &mut value);
        for (r, _) in rows.clone().enumerate().filter(|&(r, _)| kept[r * seq_kv + j]) {
            let answer = &mut answers[r];
            if answer.stats == f64::NEG_INFINITY {
                continue;
            }
            let (weight, error) = (scores[r * seq_kv + j], errors[r * seq_kv + j]);
            let sums = answer.o.iter_mut().zip(&mut answer.o_magnitude).zip(&mut answer.o_error);
            for (v, ((o, size), off)) in value.iter().zip(sums) {
                *o += weight * v;
                *size += weight * v.abs();
                *off += error * v.abs();
            }
        }
    }
    let sizes = Sizes { element: call.o.element(), seq_kv };
    let mut o = vec![0f64; dim_v];
    let compared = rows.zip(&answers).map(|(i, answer)| {
        read(call.o, &spec.o, [b, h, i], &mut o);
        let stats = call.stats.map(|s| f64::from(s[(b * heads_q + h) * seq_q + i]));
        compare(sizes, answer, &o, stats)
    });
    compared.fold(Distance::default(), Distance::and)
}

/// Not-a-number where one of them is; −∞ of none.
fn largest(scores: &[f64]) -> f64 {
    scores.iter().fold(f64::NEG_INFINITY, |a, &b| {
        if b.is_nan() {
            b
        } else if a.is_nan() {
            a
        } else {
            a.max(b)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{Align, DType, Layout, Mask, Shape};

    /// Two keys with scores 0 and ln 3: weights 1/4 and 3/4.
    #[test]
    fn a_row_that_can_be_done_by_hand() {
        let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 2, dim_qk: 1, dim_v: 2 };
        let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).with_stats();
        let (q, k, v) = (Data::F32(vec![2.0]), Data::F32(vec![0.0, 3f32.ln()]), Data::F32(vec![1.0, -2.0, 5.0, 6.0]));
        let passes = |spec: &AttentionSpec, o: [f32; 2], stats: f32| {
            let o = Data::F32(o.to_vec());
            let problem = spec.validate().unwrap();
            let call = Call { spec, problem: &problem, params: &[], q: &q, k: &k, v: &v, o: &o, stats: Some(&[stats]), scale: 0.5 };
            check(&call, &|_| ()).passes()
        };
        assert!(passes(&spec, [4.0, 4.0], 4f32.ln()));
        assert!(!passes(&spec, [4.0001, 4.0], 4f32.ln()) && !passes(&spec, [4.0, 3.9999], 4f32.ln()) && !passes(&spec, [4.0, 4.0], 1.387));
        let causal = spec.clone().mask(Mask::causal());
        assert!(passes(&causal, [1.0, -2.0], 0.0) && !passes(&causal, [4.0, 4.0], 4f32.ln()));
        // Scores become ln 3 and 0.
        let turned = spec.clone().score_mod(format!("{:?} - score", 3f32.ln()).parse().unwrap());
        assert!(passes(&turned, [2.0, 0.0], 4f32.ln()) && !passes(&turned, [4.0, 4.0], 4f32.ln()));
        let nothing = spec.mask(Mask::causal()).mask(Mask::window(Some(1), Some(0), Align::BottomRight));
        assert!(passes(&nothing, [0.0, 0.0], f32::NEG_INFINITY) && !passes(&nothing, [0.0, 1e-9], f32::NEG_INFINITY));
    }

    #[test]
    fn sums_in_lanes_are_sums() {
        for n in [0usize, 1, 7, 8, 9, 31] {
            let x: Vec<f64> = (0..n).map(|i| i as f64 - 3.0).collect();
            let y: Vec<f64> = (0..n).map(|i| 2.0 * i as f64 - 9.0).collect();
            let want: (f64, f64) = x.iter().zip(&y).fold((0.0, 0.0), |(a, b), (x, y)| (a + x * y, b + (x * y).abs()));
            assert_eq!(dot(&x, &y), want, "{n}");
        }
    }
}
