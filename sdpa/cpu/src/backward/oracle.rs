//! The textbook gradient in f64, and how far an executor may be from it.
//!
//! Bounds, with `u = 2^-24`, `D = dim_qk`, `E = dim_v`, `a` the score's `scale · Σ|q||k|`, `l` its row's statistic:
//!
//! - a score is off by `(D + 3)ua` (its sum, the scaled query and the scale), the statistic by `u|l|` (its units), their
//!   difference by `u(a + |l|)`, and `exp2` by 4u: together the relative error of a weight, which is 0 below `2^-126`;
//! - `dP` and `delta` are off by `(E + 2)u` of the sums of their magnitudes, and `dS` by what follows from all that
//!   and two roundings;
//! - sums over `n` rows or keys add `(n + 8)u` of each term: a rounding a term, and parts that are merged.

use super::tests::{Inputs, dense, inputs};
use crate::tests::{Random, Tensor, U, indices, rounding};
use sdpa_core::{Align, BackwardProblem, Mask};

/// A tensor's elements in f64, in row-major order, each with what it may be off by.
pub(super) type Wanted = Vec<(f64, f64)>;

/// A tensor's elements in f64, in row-major order.
struct Dense {
    dims: [usize; 4],
    data: Vec<f64>,
}

impl Dense {
    fn of(tensor: &Tensor) -> Dense {
        let data = indices(&tensor.spec).map(|index| tensor.get(index)).collect();
        Dense { dims: tensor.spec.dims.map(|n| n as usize), data }
    }

    /// Where a row starts.
    fn place(&self, [batch, head, seq]: [usize; 3]) -> usize {
        let [_, heads, rows, dim] = self.dims;
        ((batch * heads + head) * rows + seq) * dim
    }

    fn row(&self, at: [usize; 3]) -> &[f64] {
        &self.data[self.place(at)..][..self.dims[3]]
    }
}

/// The sum of the products, and of their magnitudes.
fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    x.iter().zip(y).fold((0.0, 0.0), |(sum, size), (x, y)| (sum + x * y, size + (x * y).abs()))
}

/// One query of one head, and each key that it attends to with its score and the size of that.
struct Row {
    at: [usize; 3],
    keys: Vec<(usize, f64, f64)>,
}

fn rows(problem: &BackwardProblem, q: &Dense, k: &Dense, scale: f64) -> impl Iterator<Item = Row> {
    let problem = problem.forward();
    let (heads, seq) = (problem.heads_q() as usize, problem.seq_q() as usize);
    (0..problem.stats_elements() as usize).map(move |i| {
        let at = [i / seq / heads, i / seq % heads, i % seq];
        let keys = (0..problem.seq_kv() as usize).filter(|&key| problem.region().keeps(at[2] as i64, key as i64));
        let keys = keys.map(|key| {
            let (score, size) = dot(q.row(at), k.row([at[0], at[1] / problem.group() as usize, key]));
            (key, scale * score, (scale * size).abs())
        });
        Row { at, keys: keys.collect() }
    })
}

/// `o` and the statistics, by the book.
pub(super) fn forward(problem: &BackwardProblem, given: [&Tensor; 3], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let [q, k, v] = given.map(Dense::of);
    let group = problem.forward().group() as usize;
    let (mut o, mut stats) = (Vec::new(), Vec::new());
    for Row { at, keys } in rows(problem, &q, &k, scale) {
        let max = keys.iter().fold(f64::NEG_INFINITY, |max, key| max.max(key.1));
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let sum: f64 = keys.iter().map(|key| (key.1 - shift).exp()).sum();
        let mut out = vec![0.0; v.dims[3]];
        for &(key, score, _) in keys.iter().filter(|_| sum != 0.0) {
            let weight = (score - shift).exp() / sum;
            out.iter_mut().zip(v.row([at[0], at[1] / group, key])).for_each(|(o, v)| *o += weight * v);
        }
        o.extend(out);
        stats.push(shift + sum.ln());
    }
    (o, stats)
}

/// The gradients by `q`, `k` and `v`.
pub(super) fn oracle(problem: &BackwardProblem, given: [&Tensor; 5], stats: &[f64], scale: f64) -> [Wanted; 3] {
    let [q, k, v, o, d_o] = given.map(Dense::of);
    let forward = problem.forward();
    let group = forward.group() as usize;
    let (dim_qk, dim_v) = (forward.dim_qk() as f64, forward.dim_v() as f64);
    let (n_keys, n_rows) = (forward.seq_kv() as f64, (forward.seq_q() * forward.group()) as f64);
    let mut sums = [&q, &k, &v].map(|x| vec![(0.0, 0.0); x.data.len()]);
    for (Row { at, keys }, &stat) in rows(problem, &q, &k, scale).zip(stats).filter(|(_, stat)| **stat != f64::NEG_INFINITY) {
        let (delta, delta_size) = dot(d_o.row(at), o.row(at));
        for (key, score, size) in keys {
            let of_key = [at[0], at[1] / group, key];
            let (d_p, d_p_size) = dot(d_o.row(at), v.row(of_key));
            // A score of -inf has neither weight nor slope; of another infinite score, the sum is exact.
            let dropped = score == f64::NEG_INFINITY;
            let size = if size.is_finite() { size } else { 0.0 };
            let p = if dropped { 0.0 } else { (score - stat).exp() };
            let p_error = p * (U * ((dim_qk + 4.0) * size + 2.0 * stat.abs() + 8.0)).exp_m1() + f64::from(f32::MIN_POSITIVE);
            let d_s = if dropped { 0.0 } else { p * (d_p - delta) };
            let d_s_error = (p + p_error) * U * (dim_v + 5.0) * (d_p_size + delta_size) + p_error * (d_p - delta).abs();
            let [p_error, d_s_error] = [p_error, d_s_error].map(|error| if dropped { 0.0 } else { error });
            let mut add = |to: usize, place: usize, row: &[f64], factor: f64, error: f64, n: f64| {
                let error = error + U * (n + 8.0) * (factor.abs() + error);
                for (sum, x) in sums[to][place..].iter_mut().zip(row) {
                    sum.0 += factor * x;
                    sum.1 += error * x.abs();
                }
            };
            add(0, q.place(at), k.row(of_key), scale * d_s, scale.abs() * d_s_error, n_keys);
            add(1, k.place(of_key), q.row(at), scale * d_s, scale.abs() * d_s_error, n_rows);
            add(2, v.place(of_key), d_o.row(at), p, p_error, n_rows);
        }
    }
    let (relative, smallest) = rounding(forward.dtype());
    // What nothing was added to is 0.
    for (x, error) in sums.iter_mut().flatten().filter(|(_, error)| *error > 0.0) {
        *error += relative * (x.abs() + *error) + smallest;
    }
    sums
}

/// The derivative of `Σ o · d_o` by one element of `q`, `k` or `v`, as a difference.
fn difference(problem: &BackwardProblem, given: [&Tensor; 3], d_o: &Tensor, scale: f64, operand: usize, index: [usize; 4]) -> f64 {
    // Elements are whole multiples of 2^-18, so both steps are exact in f32.
    const STEP: f32 = 1.0 / (1 << 14) as f32;
    let value = |step: f32| -> f64 {
        let mut moved = given.map(|t| Tensor { spec: t.spec, data: t.data.clone() });
        let x = moved[operand].get(index) as f32;
        moved[operand].set(index, x + step);
        let (o, _) = forward(problem, moved.each_ref(), scale);
        o.iter().zip(indices(&d_o.spec)).map(|(o, at)| o * d_o.get(at)).sum()
    };
    (value(STEP) - value(-STEP)) / (2.0 * f64::from(STEP))
}

#[test]
fn the_oracle_is_the_limit_of_differences() {
    for masks in [vec![], vec![Mask::causal()], vec![Mask::window(Some(2), Some(1), Align::BottomRight)], vec![Mask::prefix_lm(3)]] {
        let problem = dense([2, 4, 2, 5, 6, 3, 2], &masks);
        let Inputs { q, k, v, d_o, .. } = inputs(&problem, None, &mut Random(8), |_| {});
        let scale = 0.6;
        let (out, stats) = forward(&problem, [&q, &k, &v], scale);
        // The gradient moves with o; f32 is enough of it here, as the difference is coarser.
        let mut o = Tensor::new(problem.forward().o());
        indices(problem.forward().o()).zip(out).for_each(|(index, x)| o.set(index, x as f32));
        let got = oracle(&problem, [&q, &k, &v, &o, &d_o], &stats, scale);
        for (operand, (got, tensor)) in got.iter().zip([&q, &k, &v]).enumerate() {
            for (&(got, _), index) in got.iter().zip(indices(&tensor.spec)) {
                let want = difference(&problem, [&q, &k, &v], &d_o, scale, operand, index);
                assert!((got - want).abs() < 1e-5, "{masks:?}: {got} by operand {operand} at {index:?}, the difference is {want}");
            }
        }
    }
}
