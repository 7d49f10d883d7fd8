//! Textbook attention in f64, which results are compared with. It shares no code with the executors: it reads masks word
//! for word, and a row's keys one by one.

use crate::data::{Data, Element};
use crate::tolerance::{Distance, Row, Sizes, compare};
use rayon::prelude::*;
use sdpa::expr::{Place, Precision};
use sdpa::{Align, AttentionSpec, Mask, TensorSpec};

/// Operands and the results to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) q: &'a Data,
    pub(crate) k: &'a Data,
    pub(crate) v: &'a Data,
    pub(crate) o: &'a Data,
    pub(crate) stats: Option<&'a [f32]>,
    pub(crate) scale: f64,
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
    let scores = rows_together(seq_kv) as u128 * seq_kv as u128 * size_of::<f64>() as u128;
    let [batch, heads, seq_q, _] = spec.q.dims.map(|n| u128::try_from(n).unwrap_or(0));
    let distances = batch * heads * seq_q.div_ceil(rows_together(seq_kv) as u128) * size_of::<Distance>() as u128;
    scores * rayon::current_num_threads() as u128 + distances
}

fn keeps(mask: &Mask, q: i64, k: i64, seq_q: i64, seq_kv: i64) -> bool {
    match *mask {
        Mask::Window { left, right, align } => {
            let q = match align {
                Align::TopLeft => q,
                Align::BottomRight => q + seq_kv - seq_q,
            };
            // In i128, as bounds may be any i64.
            let (q, k) = (i128::from(q), i128::from(k));
            left.is_none_or(|left| k > q - i128::from(left)) && right.is_none_or(|right| k <= q + i128::from(right))
        }
        Mask::PrefixLm { len } => k <= q || k < len,
        Mask::All(ref masks) => masks.iter().all(|m| keeps(m, q, k, seq_q, seq_kv)),
        Mask::Any(ref masks) => masks.iter().any(|m| keeps(m, q, k, seq_q, seq_kv)),
        Mask::Not(ref mask) => !keeps(mask, q, k, seq_q, seq_kv),
        Mask::Traced(ref rule) => {
            let at = Place { score: 0.0, upstream: 0.0, index: [0, 0, q, k], extents: [1, 1, seq_q, seq_kv], params: &[] };
            rule.trace().eval(&at, Precision::F64)[0] != 0.0
        }
    }
}

/// Computes every row on all threads and compares it; `done` is told how many rows are.
pub(crate) fn check(call: &Call<'_>, done: &(dyn Fn(u64) + Sync)) -> Distance {
    let [batch, heads_q, seq_q, _] = extents(&call.spec.q);
    let together = rows_together(extents(&call.spec.k)[2]);
    let blocks = seq_q.div_ceil(together);
    let distances: Vec<Distance> = (0..batch * heads_q * blocks)
        .into_par_iter()
        .map(|n| {
            let (b, h, first) = (n / (heads_q * blocks), n / blocks % heads_q, n % blocks * together);
            let rows = first..(first + together).min(seq_q);
            let distance = block(call, b, h, rows.clone());
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

/// Some rows of one head.
fn block(call: &Call<'_>, b: usize, h: usize, rows: std::ops::Range<usize>) -> Distance {
    let spec = call.spec;
    let [_, heads_q, seq_q, dim_qk] = extents(&spec.q);
    let [_, heads_kv, seq_kv, dim_v] = extents(&spec.v);
    let head = h / (heads_q / heads_kv);
    let kept = |i: usize, j: usize| spec.masks.iter().all(|m| keeps(m, i as i64, j as i64, seq_q as i64, seq_kv as i64));

    let mut queries = vec![0f64; rows.len() * dim_qk];
    for (i, query) in rows.clone().zip(queries.chunks_exact_mut(dim_qk)) {
        read(call.q, &spec.q, [b, h, i], query);
    }
    let mut answers: Vec<Row> =
        rows.clone().map(|_| Row { o: vec![0.0; dim_v], o_magnitude: vec![0.0; dim_v], ..Row::default() }).collect();
    let mut scores = vec![f64::NEG_INFINITY; rows.len() * seq_kv];
    let mut key = vec![0f64; dim_qk];
    for j in 0..seq_kv {
        read(call.k, &spec.k, [b, head, j], &mut key);
        for (r, _) in rows.clone().enumerate().filter(|&(_, i)| kept(i, j)) {
            let (sum, size) = dot(&queries[r * dim_qk..][..dim_qk], &key);
            scores[r * seq_kv + j] = sum * call.scale;
            answers[r].score_magnitude = answers[r].score_magnitude.max(size * call.scale.abs());
        }
    }
    // From here on `scores` are weights.
    for (i, (answer, scores)) in rows.clone().zip(answers.iter_mut().zip(scores.chunks_exact_mut(seq_kv))) {
        let of_kept = |s: &[f64]| (0..seq_kv).filter(|&j| kept(i, j)).map(|j| s[j]).collect::<Vec<f64>>();
        let max = of_kept(scores).into_iter().fold(f64::NEG_INFINITY, |a, b| {
            if b.is_nan() {
                b
            } else if a.is_nan() {
                a
            } else {
                a.max(b)
            }
        });
        let sum: f64 = of_kept(scores).into_iter().map(|s| (s - max).exp()).sum();
        // Nothing is kept, or only scores of -inf.
        let empty = max == f64::NEG_INFINITY;
        answer.stats = if empty { max } else { max + sum.ln() };
        for s in scores.iter_mut() {
            *s = if empty { f64::NAN } else { (*s - max).exp() / sum };
        }
    }
    let mut value = vec![0f64; dim_v];
    for j in 0..seq_kv {
        read(call.v, &spec.v, [b, head, j], &mut value);
        for (r, _) in rows.clone().enumerate().filter(|&(_, i)| kept(i, j)) {
            let answer = &mut answers[r];
            if answer.stats == f64::NEG_INFINITY {
                continue;
            }
            let weight = scores[r * seq_kv + j];
            for (v, (o, size)) in value.iter().zip(answer.o.iter_mut().zip(&mut answer.o_magnitude)) {
                *o += weight * v;
                *size += weight * v.abs();
            }
        }
    }
    let sizes = Sizes { element: element(call.o), dim_qk, seq_kv };
    let mut o = vec![0f64; dim_v];
    let compared = rows.zip(&answers).map(|(i, answer)| {
        read(call.o, &spec.o, [b, h, i], &mut o);
        let stats = call.stats.map(|s| f64::from(s[(b * heads_q + h) * seq_q + i]));
        compare(sizes, answer, &o, stats)
    });
    compared.fold(Distance::default(), Distance::and)
}

fn element(data: &Data) -> Element {
    match data {
        Data::F32(_) => Element::F32,
        Data::F16(_) => Element::F16,
        Data::BF16(_) => Element::BF16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::{DType, Layout, Shape};

    /// Two keys with scores 0 and ln 3: weights 1/4 and 3/4.
    #[test]
    fn a_row_that_can_be_done_by_hand() {
        let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 2, dim_qk: 1, dim_v: 2 };
        let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).with_stats();
        let (q, k, v) = (Data::F32(vec![2.0]), Data::F32(vec![0.0, 3f32.ln()]), Data::F32(vec![1.0, -2.0, 5.0, 6.0]));
        let passes = |spec: &AttentionSpec, o: [f32; 2], stats: f32| {
            let o = Data::F32(o.to_vec());
            let call = Call { spec, q: &q, k: &k, v: &v, o: &o, stats: Some(&[stats]), scale: 0.5 };
            check(&call, &|_| ()).passes()
        };
        assert!(passes(&spec, [4.0, 4.0], 4f32.ln()));
        assert!(!passes(&spec, [4.0001, 4.0], 4f32.ln()) && !passes(&spec, [4.0, 3.9999], 4f32.ln()) && !passes(&spec, [4.0, 4.0], 1.387));
        let causal = spec.clone().mask(Mask::causal());
        assert!(passes(&causal, [1.0, -2.0], 0.0) && !passes(&causal, [4.0, 4.0], 4f32.ln()));
        let nothing = spec.mask(Mask::causal()).mask(Mask::window(Some(1), Some(0), Align::BottomRight));
        assert!(passes(&nothing, [0.0, 0.0], f32::NEG_INFINITY) && !passes(&nothing, [0.0, 1e-9], f32::NEG_INFINITY));
    }

    #[test]
    fn masks_are_read_word_for_word() {
        let window = Mask::window(Some(2), Some(1), Align::TopLeft);
        assert_eq!((0..6).filter(|&k| keeps(&window, 3, k, 6, 6)).collect::<Vec<_>>(), [2, 3, 4]);
        let corner = Mask::window(Some(1), Some(0), Align::BottomRight);
        assert_eq!((0..6).filter(|&k| keeps(&corner, 0, k, 2, 6)).collect::<Vec<_>>(), [4]);
        assert_eq!((0..6).filter(|&k| keeps(&Mask::prefix_lm(3), 1, k, 6, 6)).collect::<Vec<_>>(), [0, 1, 2]);
        let far = Mask::window(Some(i64::MAX), Some(i64::MAX), Align::BottomRight);
        assert!((0..6).all(|k| keeps(&far, 5, k, 6, 6)));
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
