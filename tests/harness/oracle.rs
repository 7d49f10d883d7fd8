//! Textbook attention in f64, with what a tolerance needs to know of each result.

use sdpa::{Align, Mask};

/// A problem's numbers, in row-major (batch, head, seq, dim).
#[derive(Clone, Debug)]
pub struct Problem<'a> {
    /// batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v.
    pub shape: [usize; 7],
    /// Queries.
    pub q: &'a [f64],
    /// Keys.
    pub k: &'a [f64],
    /// Values.
    pub v: &'a [f64],
    /// Multiplies the scores.
    pub scale: f64,
    /// All must keep a key.
    pub masks: &'a [Mask],
}

/// Results, and the sizes that rounding errors are proportional to.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// (batch, heads_q, seq_q, dim_v).
    pub o: Vec<f64>,
    /// Σ p·|v|, for each element of `o`.
    pub o_magnitude: Vec<f64>,
    /// (batch, heads_q, seq_q); −∞ where no key is kept.
    pub stats: Vec<f64>,
    /// The largest Σ |q·k|·|scale| over a row's kept keys.
    pub score_magnitude: Vec<f64>,
}

fn keeps(mask: &Mask, q: i64, k: i64, seq_q: i64, seq_kv: i64) -> bool {
    match *mask {
        Mask::Window { left, right, align } => {
            let q = match align {
                Align::TopLeft => q,
                Align::BottomRight => q + seq_kv - seq_q,
            };
            left.is_none_or(|left| k > q - left) && right.is_none_or(|right| k <= q + right)
        }
        Mask::PrefixLm { len } => k <= q || k < len,
    }
}

/// Computes attention one row at a time.
pub fn attention(p: &Problem<'_>) -> Answer {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    let mut answer = Answer::default();
    for b in 0..batch {
        for h in 0..heads_q {
            let kv = b * heads_kv + h / (heads_q / heads_kv);
            for i in 0..seq_q {
                let q = &p.q[((b * heads_q + h) * seq_q + i) * dim_qk..][..dim_qk];
                let mut scores = Vec::new();
                let mut magnitude = 0f64;
                for j in 0..seq_kv {
                    if !p.masks.iter().all(|m| keeps(m, i as i64, j as i64, seq_q as i64, seq_kv as i64)) {
                        continue;
                    }
                    let k = &p.k[(kv * seq_kv + j) * dim_qk..][..dim_qk];
                    let (mut dot, mut size) = (0f64, 0f64);
                    for (x, y) in q.iter().zip(k) {
                        dot += x * y;
                        size += (x * y).abs();
                    }
                    magnitude = magnitude.max(size * p.scale.abs());
                    scores.push((j, dot * p.scale));
                }
                let max = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s.1 - max).exp()).sum();
                let (mut o, mut size) = (vec![0f64; dim_v], vec![0f64; dim_v]);
                for &(j, s) in &scores {
                    let weight = (s - max).exp() / sum;
                    let v = &p.v[(kv * seq_kv + j) * dim_v..][..dim_v];
                    for d in 0..dim_v {
                        o[d] += weight * v[d];
                        size[d] += weight * v[d].abs();
                    }
                }
                answer.o.extend(o);
                answer.o_magnitude.extend(size);
                answer.stats.push(if scores.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
                answer.score_magnitude.push(magnitude);
            }
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two keys with scores 0 and ln 3: weights 1/4 and 3/4.
    #[test]
    fn a_row_that_can_be_done_by_hand() {
        let ln3 = 3f64.ln();
        let p = Problem { shape: [1, 1, 1, 1, 2, 1, 2], q: &[2.0], k: &[0.0, ln3], v: &[1.0, -2.0, 5.0, 6.0], scale: 0.5, masks: &[] };
        let a = attention(&p);
        assert!((a.o[0] - 4.0).abs() < 1e-14 && (a.o[1] - 4.0).abs() < 1e-14, "{:?}", a.o);
        assert!((a.o_magnitude[1] - 5.0).abs() < 1e-14);
        assert!((a.stats[0] - 4f64.ln()).abs() < 1e-14);
        let first = attention(&Problem { masks: &[Mask::causal()], ..p });
        assert_eq!((first.o, first.stats), (vec![1.0, -2.0], vec![0.0]));
    }
}
