//! Textbook attention in f64, with what a tolerance needs to know of each result.

mod backward;

pub use backward::{Gradient, Gradients, Rates, gradients};
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

/// What a caller's own functions do with a score; each is told (batch, query head, query, key).
///
/// A score is the scaled product of a query and a key; it is modified, then masked. A modified score of −∞ drops its key.
#[derive(Clone, Copy, Default)]
pub struct Closures<'a> {
    /// The modified score.
    pub modify: Option<&'a dyn Fn(f64, [i64; 4]) -> f64>,
    /// Its derivative by the score.
    pub slope: Option<&'a dyn Fn(f64, [i64; 4]) -> f64>,
    /// Whether the key is kept, besides what the masks say.
    pub keep: Option<&'a dyn Fn([i64; 4]) -> bool>,
    /// What an executor's own roundings may move the modified score by, besides those of its size, in units of a roundoff.
    pub rounding: Option<&'a dyn Fn(f64, [i64; 4]) -> f64>,
    /// Parameters of the modification whose gradients are wanted.
    pub along: &'a [Along<'a>],
}

/// A parameter of a modification.
#[derive(Clone, Copy)]
pub struct Along<'a> {
    /// The derivative of the modified score by the element that it is made with.
    pub slope: &'a dyn Fn(f64, [i64; 4]) -> f64,
    /// Which element that is.
    pub place: &'a dyn Fn([i64; 4]) -> usize,
    /// How many there are.
    pub elements: usize,
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
    /// The largest Σ |q·k|·|scale| over a row's kept keys; of a modified score times its slope, and the score itself added.
    pub score_magnitude: Vec<f64>,
    /// The largest of the roundings of modified scores over a row's kept keys, in units of a roundoff.
    pub rounding: Vec<f64>,
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
        Mask::All(ref masks) => masks.iter().all(|m| keeps(m, q, k, seq_q, seq_kv)),
        Mask::Any(ref masks) => masks.iter().any(|m| keeps(m, q, k, seq_q, seq_kv)),
        Mask::Not(ref mask) => !keeps(mask, q, k, seq_q, seq_kv),
        // The oracle does not read traces: it would share their meaning with what it checks.
        Mask::Traced(ref rule) => panic!("{} is given to the oracle as a closure", rule.name()),
    }
}

/// A key that a row keeps.
struct Kept {
    key: usize,
    /// Scaled, not modified.
    raw: f64,
    /// The modified score.
    score: f64,
    /// Σ |q·k|·|scale|, also of a score that is modified.
    size: f64,
    weight: f64,
    slope: f64,
}

/// One query and the keys that it keeps.
struct Row {
    kept: Vec<Kept>,
    stats: f64,
    magnitude: f64,
    rounding: f64,
}

impl Problem<'_> {
    /// The first element of row `i` of head `h` in a tensor of `dim` elements a row.
    fn query(&self, [b, h, i]: [usize; 3], dim: usize) -> usize {
        let [_, heads_q, _, seq_q, ..] = self.shape;
        ((b * heads_q + h) * seq_q + i) * dim
    }

    /// The same of key `j`; neighbouring query heads share a key head.
    fn key(&self, [b, h]: [usize; 2], j: usize, dim: usize) -> usize {
        let [_, heads_q, heads_kv, _, seq_kv, ..] = self.shape;
        ((b * heads_kv + h / (heads_q / heads_kv)) * seq_kv + j) * dim
    }

    fn rows(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let [batch, heads_q, _, seq_q, ..] = self.shape;
        (0..batch * heads_q * seq_q).map(move |n| [n / seq_q / heads_q, n / seq_q % heads_q, n % seq_q])
    }

    fn row(&self, closures: &Closures<'_>, at: [usize; 3]) -> Row {
        let [_, _, _, seq_q, seq_kv, dim_qk, _] = self.shape;
        let [b, h, i] = at;
        let q = &self.q[self.query(at, dim_qk)..][..dim_qk];
        let mut row = Row { kept: Vec::new(), stats: f64::NEG_INFINITY, magnitude: 0.0, rounding: 0.0 };
        for key in 0..seq_kv {
            let place = [b, h, i, key].map(|n| n as i64);
            if !self.masks.iter().all(|m| keeps(m, place[2], place[3], seq_q as i64, seq_kv as i64)) {
                continue;
            }
            let k = &self.k[self.key([b, h], key, dim_qk)..][..dim_qk];
            let (mut dot, mut size) = (0f64, 0f64);
            for (x, y) in q.iter().zip(k) {
                dot += x * y;
                size += (x * y).abs();
            }
            let (raw, size) = (dot * self.scale, size * self.scale.abs());
            let score = closures.modify.map_or(raw, |modify| modify(raw, place));
            if closures.keep.is_some_and(|keep| !keep(place)) || score == f64::NEG_INFINITY {
                continue;
            }
            let slope = closures.slope.map_or(1.0, |slope| slope(raw, place));
            let own = if closures.modify.is_some() { score.abs() } else { 0.0 };
            row.magnitude = row.magnitude.max(size * slope.abs() + own);
            row.rounding = row.rounding.max(closures.rounding.map_or(0.0, |rounding| rounding(raw, place)));
            row.kept.push(Kept { key, raw, score, size, weight: 0.0, slope });
        }
        if !row.kept.is_empty() {
            let max = row.kept.iter().map(|kept| kept.score).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.kept.iter().map(|kept| (kept.score - max).exp()).sum();
            row.kept.iter_mut().for_each(|kept| kept.weight = (kept.score - max).exp() / sum);
            row.stats = max + sum.ln();
        }
        row
    }

    /// The output of a row, and Σ p·|v|.
    fn output(&self, [b, h, _]: [usize; 3], kept: &[Kept]) -> (Vec<f64>, Vec<f64>) {
        let dim_v = self.shape[6];
        let (mut o, mut size) = (vec![0f64; dim_v], vec![0f64; dim_v]);
        for kept in kept {
            let v = &self.v[self.key([b, h], kept.key, dim_v)..][..dim_v];
            for d in 0..dim_v {
                o[d] += kept.weight * v[d];
                size[d] += kept.weight * v[d].abs();
            }
        }
        (o, size)
    }
}

/// Computes attention one row at a time.
pub fn attention(p: &Problem<'_>) -> Answer {
    attention_with(p, &Closures::default())
}

/// The same with a caller's functions.
pub fn attention_with(p: &Problem<'_>, closures: &Closures<'_>) -> Answer {
    let mut answer = Answer::default();
    for at in p.rows() {
        let row = p.row(closures, at);
        let (o, size) = p.output(at, &row.kept);
        answer.o.extend(o);
        answer.o_magnitude.extend(size);
        answer.stats.push(row.stats);
        answer.score_magnitude.push(row.magnitude);
        answer.rounding.push(row.rounding);
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

    #[test]
    fn functions_of_a_caller_come_after_the_scale_and_before_the_softmax() {
        let p = Problem { shape: [1, 1, 1, 1, 3, 1, 1], q: &[2.0], k: &[0.5, 1.0, 7.0], v: &[1.0, 5.0, 100.0], scale: 0.5, masks: &[] };
        // Scores 0.5, 1 and 7 become 0, ln 3 and whatever: the last key is dropped.
        let modify = |score: f64, [.., key]: [i64; 4]| if key == 0 { score - 0.5 } else { score * 3f64.ln() };
        let dropped = |score: f64, at: [i64; 4]| if at[3] == 2 { f64::NEG_INFINITY } else { modify(score, at) };
        let keep = |[.., key]: [i64; 4]| key < 2;
        for closures in [
            Closures { modify: Some(&modify), keep: Some(&keep), ..Closures::default() },
            Closures { modify: Some(&dropped), ..Closures::default() },
        ] {
            let a = attention_with(&p, &closures);
            assert!((a.o[0] - 4.0).abs() < 1e-14 && (a.stats[0] - 4f64.ln()).abs() < 1e-14, "{a:?}");
        }
        let nothing = attention_with(&p, &Closures { keep: Some(&|_| false), ..Closures::default() });
        assert_eq!((nothing.o, nothing.stats), (vec![0.0], vec![f64::NEG_INFINITY]));
    }
}
