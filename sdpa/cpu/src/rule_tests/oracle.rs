//! Attention and its gradient by the book, in f64.

use super::case::{Masked, Modified, Values};
use crate::tests::Tensor;
use sdpa_core::Problem;

/// What elements should be, each with the size of what was added up.
pub(super) type Wanted = Vec<(f64, f64)>;

/// A problem with its closures.
pub(super) struct Book<'a> {
    pub(super) problem: &'a Problem,
    pub(super) values: &'a Values,
    pub(super) modified: &'a Modified,
    pub(super) masked: &'a Masked,
    pub(super) scale: f64,
}

/// A pair that is kept.
struct Pair {
    at: [usize; 4],
    score: f64,
    modified: f64,
}

fn row(t: &Tensor, [batch, head, seq]: [usize; 3]) -> impl Iterator<Item = f64> {
    (0..t.spec.dims[3] as usize).map(move |c| t.get([batch, head, seq, c]))
}

fn dot(x: impl Iterator<Item = f64>, y: impl Iterator<Item = f64>) -> (f64, f64) {
    x.zip(y).fold((0.0, 0.0), |(sum, size), (x, y)| (sum + x * y, size + (x * y).abs()))
}

/// The place of a row in row-major order.
fn place(t: &Tensor, [batch, head, seq]: [usize; 3]) -> usize {
    let [_, heads, rows, dim] = t.spec.dims.map(|n| n as usize);
    ((batch * heads + head) * rows + seq) * dim
}

impl Book<'_> {
    fn key_head(&self, head: usize) -> usize {
        head / self.problem.group() as usize
    }

    fn rows(&self) -> impl Iterator<Item = [usize; 3]> {
        let [batch, heads, queries, _] = self.problem.extents().map(|n| n as usize);
        (0..batch * heads * queries).map(move |n| [n / queries / heads, n / queries % heads, n % queries])
    }

    fn pairs(&self, [q, k]: [&Tensor; 2], of @ [b, h, i]: [usize; 3]) -> Vec<Pair> {
        let keys = (0..self.problem.seq_kv() as usize).map(|key| [b, h, i, key]);
        let kept = keys.filter(|&at| (self.masked.keep)(at, self.values));
        let pair = |at: [usize; 4]| {
            let score = self.scale * dot(row(q, of), row(k, [b, self.key_head(h), at[3]])).0;
            Pair { at, score, modified: (self.modified.value)(score, at, self.values) }
        };
        kept.map(pair).collect()
    }

    /// `o` with sizes, and the statistics.
    pub(super) fn forward(&self, [q, k, v]: [&Tensor; 3]) -> (Wanted, Vec<f64>) {
        let (mut o, mut stats) = (Vec::new(), Vec::new());
        for of @ [b, h, _] in self.rows() {
            let pairs = self.pairs([q, k], of);
            let max = pairs.iter().map(|pair| pair.modified).fold(f64::NEG_INFINITY, f64::max);
            let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
            let sum: f64 = pairs.iter().map(|pair| (pair.modified - shift).exp()).sum();
            let mut out = vec![(0.0, 0.0); v.spec.dims[3] as usize];
            for pair in pairs.iter().filter(|_| sum != 0.0) {
                let weight = (pair.modified - shift).exp() / sum;
                for ((o, size), v) in out.iter_mut().zip(row(v, [b, self.key_head(h), pair.at[3]])) {
                    *o += weight * v;
                    *size += (weight * v).abs();
                }
            }
            o.extend(out);
            stats.push(if sum == 0.0 { f64::NEG_INFINITY } else { shift + sum.ln() });
        }
        (o, stats)
    }

    /// The gradients by `q`, `k`, `v` and parameters.
    pub(super) fn backward(&self, [q, k, v, o, d_o]: [&Tensor; 5], stats: &[f32]) -> Vec<Wanted> {
        let mut sums: Vec<Wanted> = [q, k, v].map(|t| vec![(0.0, 0.0); t.spec.dims.iter().product::<i64>() as usize]).to_vec();
        for (name, _) in &self.modified.along {
            let (_, dims, _) = self.values.0.iter().find(|(n, ..)| n == name).unwrap();
            sums.push(vec![(0.0, 0.0); dims.iter().product()]);
        }
        for (of @ [b, h, _], &stat) in self.rows().zip(stats).filter(|(_, stat)| **stat != f32::NEG_INFINITY) {
            let delta = dot(row(d_o, of), row(o, of));
            for Pair { at, score, modified } in self.pairs([q, k], of) {
                let of_key = [b, self.key_head(h), at[3]];
                let d_p = dot(row(d_o, of), row(v, of_key));
                let weight = (modified - f64::from(stat)).exp();
                let upstream = weight * (d_p.0 - delta.0);
                let size = weight * (d_p.1 + delta.1);
                let slope = self.scale * (self.modified.slope)(score, at, self.values);
                let mut add = |to: usize, place: usize, row: &mut dyn Iterator<Item = f64>, factor: f64, size: f64| {
                    for (sum, x) in sums[to][place..].iter_mut().zip(row) {
                        *sum = (sum.0 + factor * x, sum.1 + size * x.abs());
                    }
                };
                add(0, place(q, of), &mut row(k, of_key), slope * upstream, slope.abs() * size);
                add(1, place(k, of_key), &mut row(q, of), slope * upstream, slope.abs() * size);
                add(2, place(v, of_key), &mut row(d_o, of), weight, weight);
                for (n, (name, along)) in self.modified.along.iter().enumerate() {
                    let along = along(score, at, self.values);
                    add(3 + n, self.values.place(name, at), &mut std::iter::once(1.0), along * upstream, along.abs() * size);
                }
            }
        }
        sums
    }
}
