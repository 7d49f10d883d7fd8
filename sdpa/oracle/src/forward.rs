//! Attention, one row at a time.

use crate::narrow::products_of;
use crate::tolerance::norm::TILE;
use crate::tolerance::{Distance, Element, F32_ROUNDOFF, Row, compare, sum_of, weight_error};
use crate::{Modify, Numbers, Place, Problem, Rough, Tensor, dot, largest, place};
use rayon::prelude::*;
use std::ops::Range;

/// Number of rows of one head that are computed together, so that each key is converted once for all of them.
const ROWS: usize = 16;
/// Number of scores that a thread holds at a time, unless a single row has more.
const SCORES: usize = 1 << 21;

fn rows_together(seq_kv: usize) -> usize {
    (SCORES / seq_kv.max(1)).clamp(1, ROWS)
}

/// Returns the bytes of memory that [`check`] needs for these extents.
#[must_use]
pub fn bytes([batch, heads_q, _, seq_q, seq_kv, ..]: [usize; 7]) -> u128 {
    let scores = rows_together(seq_kv) as u128 * seq_kv as u128 * (2 * size_of::<f64>() + size_of::<bool>()) as u128;
    let blocks = seq_q.div_ceil(rows_together(seq_kv));
    let distances = [batch, heads_q, blocks, size_of::<Distance>()].map(|n| n as u128).into_iter().product::<u128>();
    scores * rayon::current_num_threads() as u128 + distances
}

/// The rows of one head that are computed together.
struct Block {
    batch: usize,
    head: usize,
    rows: Range<usize>,
}

/// Computes all blocks and returns the results in the order of the rows, so that sums do not depend on threads.
fn blocks<'p, T: Send>(p: &'p Problem<'_>, of: impl Fn(Block) -> T + Sync + Send + 'p) -> Vec<T> {
    let [batch, heads_q, _, seq_q, seq_kv, ..] = p.shape;
    let together = rows_together(seq_kv);
    let blocks = seq_q.div_ceil(together);
    let at = move |n: usize| {
        let first = n % blocks * together;
        of(Block { batch: n / (heads_q * blocks), head: n / blocks % heads_q, rows: first..(first + together).min(seq_q) })
    };
    (0..batch * heads_q * blocks).into_par_iter().map(at).collect()
}

/// The results of a forward pass, and the magnitudes to which rounding errors are proportional.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The output, (batch, heads_q, seq_q, dim_v), row-major.
    pub o: Vec<f64>,
    /// The sum Σ p·|v| for each element of `o`.
    pub o_magnitude: Vec<f64>,
    /// The log-sum-exp of each row, natural logarithm: (batch, heads_q, seq_q). A row that attends to no key has −∞, or the sink.
    pub stats: Vec<f64>,
    /// The largest unmasked score of each row, or the sink if it is larger: (batch, heads_q, seq_q); −∞ if there is neither.
    pub row_max: Vec<f64>,
    /// The sum Σ exp(score − row_max) of each row over the unmasked keys and the sink: (batch, heads_q, seq_q); 0 if there is neither.
    pub sum_exp: Vec<f64>,
    /// The largest Σ |q·k|·|scale| over the unmasked keys of each row. With a score_mod, the magnitude of the modified score is added.
    pub score_magnitude: Vec<f64>,
}

/// Computes the output and the statistics of all rows.
#[must_use]
pub fn attention(p: &Problem<'_>) -> Answer {
    let mut answer = Answer::default();
    for row in blocks(p, |at| block(p, &at)).into_iter().flatten() {
        answer.o.extend(row.o);
        answer.o_magnitude.extend(row.o_magnitude);
        answer.stats.push(row.stats);
        answer.row_max.push(row.max);
        answer.sum_exp.push(row.sum);
        answer.score_magnitude.push(row.score_magnitude);
    }
    answer
}

/// Row statistics of an executor, in row-major (batch, heads_q, seq_q).
#[derive(Clone, Copy, Default)]
pub struct Statistics<'a> {
    /// The log-sum-exp of each row, natural logarithm.
    pub stats: Option<&'a dyn Numbers>,
    /// The largest unmasked score of each row, or the sink if it is larger.
    pub row_max: Option<&'a dyn Numbers>,
    /// The sum of exponentials of each row, relative to `row_max`.
    pub sum_exp: Option<&'a dyn Numbers>,
    /// The largest P, for a problem with 8-bit floats.
    pub amax_s: Option<f64>,
}

impl<'a> Statistics<'a> {
    /// Creates statistics that have only `stats`, if given.
    #[must_use]
    pub fn of(stats: Option<&'a dyn Numbers>) -> Statistics<'a> {
        Statistics { stats, ..Statistics::default() }
    }
}

/// Computes every row on all threads and compares an executor's `o` and statistics. `done` receives the number of rows that each step completed.
pub fn check(p: &Problem<'_>, o: Tensor<'_>, statistics: Statistics<'_>, done: &(dyn Fn(u64) + Sync)) -> Distance {
    check_each(p, &[(o, statistics)], done).pop().unwrap_or_default()
}

/// Computes every row once, and compares the results of several executors or runs with the computed rows. `done` receives the number of
/// rows that each step completed.
pub fn check_each(p: &Problem<'_>, results: &[(Tensor<'_>, Statistics<'_>)], done: &(dyn Fn(u64) + Sync)) -> Vec<Distance> {
    let [_, heads_q, _, seq_q, seq_kv, _, dim_v] = p.shape;
    let distances = blocks(p, |at| {
        let mut got = vec![0f64; dim_v];
        let answers = block(p, &at);
        let mut of = |(o, statistics): &(Tensor<'_>, Statistics<'_>)| {
            let compared = at.rows.clone().zip(&answers).map(|(i, answer)| {
                o.read([at.batch, at.head, i], &mut got);
                let of_row = |all: Option<&dyn Numbers>| all.map(|all| all.get((at.batch * heads_q + at.head) * seq_q + i));
                let Statistics { stats, row_max, sum_exp, amax_s: _ } = *statistics;
                compare([p.element, p.stored], (seq_kv, p.narrow), answer, &got, [stats, row_max, sum_exp].map(of_row))
            });
            compared.fold(Distance::default(), Distance::and)
        };
        let distances: Vec<Distance> = results.iter().map(&mut of).collect();
        done(at.rows.len() as u64);
        (at.rows.end, distances)
    });
    let mut all = vec![Distance::default(); results.len()];
    for (end, block) in distances {
        for (all, block) in all.iter_mut().zip(block) {
            *all = all.and(block);
            if end % TILE == 0 || end == seq_q {
                *all = all.close();
            }
        }
    }
    for (distance, (_, statistics)) in all.iter_mut().zip(results) {
        distance.amax_s = statistics.amax_s.map(|got| distance.largest.compare(got));
    }
    all
}

/// Returns a bound on the error of a score in f32, which sums `dim_qk` products whose magnitudes add up to `size`.
pub(crate) fn score_error(p: &Problem<'_>, dim_qk: usize, size: f64) -> f64 {
    (sum_of(dim_qk) + if p.narrow.is_some() { products_of(dim_qk) } else { 0.0 }) * size
}

/// Evaluates a score_mod with a bound on its error. An infinite result counts as exact.
pub(crate) fn modified(function: &dyn Modify, score: Rough, at: Place, scratch: &mut Vec<Rough>) -> Rough {
    let value = function.value(score, at, scratch);
    let error = if value.value.is_finite() { value.error } else { 0.0 };
    Rough { error, ..value }
}

/// Bounds the error of the row maximum: the distance between the maxima of the scores with and without their errors.
fn of_largest(scores: &[f64], errors: &[f64], sink: f64) -> f64 {
    let reach = |sign: f64| largest(scores.iter().zip(errors).map(|(score, error)| score + sign * error).chain([sink]));
    let max = largest(scores.iter().copied().chain([sink]));
    (reach(1.0) - max).max(max - reach(-1.0))
}

fn block(p: &Problem<'_>, at: &Block) -> Vec<Row> {
    let [.., seq_kv, dim_qk, dim_v] = p.shape;
    let Block { batch, head, ref rows } = *at;
    let (key_head, sink) = (head / p.group(), p.sink_of(head));
    let index = |i: usize, j: usize| place([batch, head, i, j]);
    let kept: Vec<bool> = rows.clone().flat_map(|i| (0..seq_kv).map(move |j| (i, j))).map(|(i, j)| p.keeps(index(i, j))).collect();

    let mut queries = vec![0f64; rows.len() * dim_qk];
    for (i, query) in rows.clone().zip(queries.chunks_exact_mut(dim_qk)) {
        p.q.read([batch, head, i], query);
    }
    let values = vec![0.0; if p.narrow.is_some() || p.element == Element::F16 { dim_v } else { 0 }];
    let empty = Row { values, o: vec![0.0; dim_v], o_magnitude: vec![0.0; dim_v], o_error: vec![0.0; dim_v], ..Row::default() };
    let mut answers: Vec<Row> = vec![empty; rows.len()];
    let mut scores = vec![f64::NEG_INFINITY; rows.len() * seq_kv];
    let mut errors = vec![0f64; rows.len() * seq_kv];
    let mut key = vec![0f64; dim_qk];
    let mut scratch = Vec::new();
    for j in 0..seq_kv {
        p.k.read([batch, key_head, j], &mut key);
        for (r, i) in rows.clone().enumerate().filter(|&(r, _)| kept[r * seq_kv + j]) {
            let (sum, size) = dot(&queries[r * dim_qk..][..dim_qk], &key);
            let size = size * p.scale.abs();
            let mut score = Rough { value: sum * p.scale, error: score_error(p, dim_qk, size) };
            let mut magnitude = size;
            if let Some(function) = p.modify {
                score = modified(function, score, index(i, j), &mut scratch);
                magnitude += score.value.abs();
            }
            answers[r].score_magnitude = answers[r].score_magnitude.max(magnitude);
            scores[r * seq_kv + j] = score.value;
            errors[r * seq_kv + j] = score.error;
        }
    }
    // From here on `scores` holds P, and `errors` holds the errors of P.
    for (r, answer) in answers.iter_mut().enumerate() {
        let keys = r * seq_kv..(r + 1) * seq_kv;
        let (scores, errors, kept) = (&mut scores[keys.clone()], &mut errors[keys.clone()], &kept[keys]);
        let of_kept = |numbers: &[f64]| numbers.iter().zip(kept).filter(|(_, kept)| **kept).map(|(x, _)| *x).collect::<Vec<f64>>();
        // `empty` means that every key is masked out or has a score of −∞.
        let in_sum = |scores: Vec<f64>| scores.into_iter().chain((sink != f64::NEG_INFINITY).then_some(sink));
        let max = largest(in_sum(of_kept(scores)));
        let empty = largest(of_kept(scores).into_iter()) == f64::NEG_INFINITY;
        let sum: f64 = in_sum(of_kept(scores)).map(|s| (s - max).exp()).sum();
        answer.keyless = empty;
        (answer.max, answer.sum) = (max, if max == f64::NEG_INFINITY { 0.0 } else { sum });
        answer.stats = if max == f64::NEG_INFINITY { max } else { max + sum.ln() };
        if !empty {
            // The log-sum-exp moves furthest if all scores move by their errors in one direction. Unlike P, it is not limited to 1.
            let moved = |sign: f64| {
                let moved = of_kept(scores).iter().zip(of_kept(errors)).map(|(score, error)| score + sign * error).collect();
                let moved: Vec<f64> = in_sum(moved).collect();
                let max = largest(moved.iter().copied());
                (max + moved.iter().map(|s| (s - max).exp()).sum::<f64>().ln() - answer.stats).abs()
            };
            answer.stats_error = moved(1.0).max(moved(-1.0));
            answer.max_error = of_largest(&of_kept(scores), &of_kept(errors), sink);
        }
        for s in scores.iter_mut() {
            *s = if empty { f64::NAN } else { (*s - max).exp() / sum };
        }
        for (error, weight) in errors.iter_mut().zip(scores.iter()) {
            *error = weight_error(*weight, *error);
        }
        answer.weight_error = if empty { 0.0 } else { of_kept(errors).into_iter().sum() };
    }
    let mut value = vec![0f64; dim_v];
    for j in 0..seq_kv {
        p.v.read([batch, key_head, j], &mut value);
        let square = value.iter().map(|v| v * v).sum::<f64>();
        for (r, answer) in answers.iter_mut().enumerate() {
            if !kept[r * seq_kv + j] || answer.keyless {
                continue;
            }
            let factor = p.factor(index(rows.start + r, j));
            let (weight, error) = (factor * scores[r * seq_kv + j], factor * errors[r * seq_kv + j]);
            answer.sums.add([weight, error, factor, square]);
            // For the amax of P: bound its error before it is rounded to 8 bits.
            let common = answer.weight_error + 2.0 * sum_of(seq_kv) + 16.0 * F32_ROUNDOFF;
            answer.largest.add(weight, 2.0 * (error + weight * common));
            let sums = answer.o.iter_mut().zip(&mut answer.o_magnitude).zip(&mut answer.o_error);
            for (v, ((o, size), off)) in value.iter().zip(sums) {
                *o += weight * v;
                *size += weight * v.abs();
                *off += error * v.abs();
            }
            answer.values.iter_mut().zip(&value).for_each(|(sum, v)| *sum += factor * v.abs());
        }
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Align, Closures, Element, Mask};

    const CAUSAL: Mask<'static> = Mask::Window { left: None, right: Some(0), align: Align::TopLeft };
    const LAST: Mask<'static> = Mask::Window { left: Some(1), right: Some(0), align: Align::BottomRight };

    /// One query, scale 0.5.
    fn with<T>(keys: &[f64], values: &[f64], masks: &[Mask<'_>], call: impl FnOnce(&Problem<'_>) -> T) -> T {
        let (seq_kv, dim_v) = (keys.len(), values.len() / keys.len());
        call(&Problem {
            shape: [1, 1, 1, 1, seq_kv, 1, dim_v],
            q: Tensor::dense(&vec![2.0], [1, 1, 1, 1]),
            k: Tensor::dense(&keys, [1, 1, seq_kv, 1]),
            v: Tensor::dense(&values, [1, 1, seq_kv, dim_v]),
            element: Element::F32,
            stored: Element::F32,
            scale: 0.5,
            masks,
            modify: None,
            sink: None,
            dropout: None,
            narrow: None,
            fixed_point: None,
        })
    }

    /// Two keys with scores 0 and ln 3: P is 1/4 and 3/4.
    #[test]
    fn a_row_that_can_be_done_by_hand() {
        let (keys, values) = ([0.0, 3f64.ln()], [1.0, -2.0, 5.0, 6.0]);
        let a = with(&keys, &values, &[], attention);
        assert!((a.o[0] - 4.0).abs() < 1e-14 && (a.o[1] - 4.0).abs() < 1e-14, "{a:?}");
        assert!((a.o_magnitude[1] - 5.0).abs() < 1e-14 && (a.score_magnitude[0] - 3f64.ln()).abs() < 1e-14);
        assert!((a.stats[0] - 4f64.ln()).abs() < 1e-14);
        let first = with(&keys, &values, &[CAUSAL], attention);
        assert_eq!((first.o, first.stats), (vec![1.0, -2.0], vec![0.0]));

        let passes = |masks: &[Mask<'_>], closures: Closures<'_>, o: [f32; 2], stats: f32| {
            let o = o.to_vec();
            let judged = |p: &Problem<'_>| check(p, Tensor::dense(&o, [1, 1, 1, 2]), Statistics::of(Some(&vec![stats])), &|_| ()).passes();
            with(&keys, &values, masks, |p| closures.with(p, judged))
        };
        let (plain, ln4) = (Closures::default(), 4f32.ln());
        assert!(passes(&[], plain, [4.0, 4.0], ln4));
        assert!(!passes(&[], plain, [4.0001, 4.0], ln4) && !passes(&[], plain, [4.0, 3.9999], ln4));
        assert!(!passes(&[], plain, [4.0, 4.0], 1.387));
        assert!(passes(&[CAUSAL], plain, [1.0, -2.0], 0.0) && !passes(&[CAUSAL], plain, [4.0, 4.0], ln4));
        // The score_mod turns the scores into ln 3 and 0.
        let turned = Closures { modify: Some(&|score, _| 3f64.ln() - score), slope: Some(&|_, _| -1.0), ..plain };
        assert!(passes(&[], turned, [2.0, 0.0], ln4) && !passes(&[], turned, [4.0, 4.0], ln4));
        let nothing = [CAUSAL, LAST];
        assert!(passes(&nothing, plain, [0.0, 0.0], f32::NEG_INFINITY) && !passes(&nothing, plain, [0.0, 1e-9], f32::NEG_INFINITY));
    }

    /// Scores 0 and ln 3, and a sink of ln 4, which has no value: P is 1/8 and 3/8.
    #[test]
    fn a_sink_is_a_key_without_a_value() {
        let (keys, values) = ([0.0, 3f64.ln()], [1.0, -2.0, 5.0, 6.0]);
        let sink = vec![4f64.ln()];
        let of = |masks: &[Mask<'_>], sink: &Vec<f64>| with(&keys, &values, masks, |p| attention(&Problem { sink: Some(sink), ..*p }));
        let a = of(&[], &sink);
        assert!((a.o[0] - 2.0).abs() < 1e-14 && (a.o[1] - 2.0).abs() < 1e-14 && (a.stats[0] - 8f64.ln()).abs() < 1e-14, "{a:?}");
        let large = of(&[], &vec![600.0]);
        assert!(large.o[0] > 0.0 && large.o[0] < 1e-250 && large.stats == [600.0], "{large:?}");
        let none = of(&[], &vec![f64::NEG_INFINITY]);
        assert_eq!((none.o, none.stats), with(&keys, &values, &[], |p| (attention(p).o, attention(p).stats)));
        let nothing = [CAUSAL, LAST];
        assert_eq!((of(&nothing, &sink).o, of(&nothing, &sink).stats), (vec![0.0; 2], sink.clone()));
        for (o, stats, right) in [(0f32, 4f32.ln(), true), (0.0, f32::NEG_INFINITY, true), (0.0, 0.0, false), (1e-9, 4f32.ln(), false)] {
            let o = vec![o; 2];
            let judged = |p: &Problem<'_>| {
                check(&Problem { sink: Some(&sink), ..*p }, Tensor::dense(&o, [1, 1, 1, 2]), Statistics::of(Some(&vec![stats])), &|_| ())
                    .passes()
            };
            assert_eq!(with(&keys, &values, &nothing, judged), right, "{o:?} {stats}");
        }
    }

    #[test]
    fn stats_are_off_by_as_much_as_scores_however_large_these_are() {
        let passes = |stats: f32| {
            let o = vec![1f32, -2.0];
            let judged = |p: &Problem<'_>| check(p, Tensor::dense(&o, [1, 1, 1, 2]), Statistics::of(Some(&vec![stats])), &|_| ()).passes();
            with(&[1e9, 0.0], &[1.0, -2.0, 5.0, 6.0], &[], judged)
        };
        // In f32, half a unit in the last place of 1e9 is 32. An error of 8 times that passes, one of 64 times does not.
        assert!(passes(1e9) && passes(1e9 + 256.0) && passes(1e9 - 256.0));
        assert!(!passes(1e9 + 2048.0) && !passes(1e9 - 2048.0));
    }

    #[test]
    fn functions_of_a_caller_come_after_the_scale_and_before_the_softmax() {
        // Scores 0.5 and 1 become 0 and ln 3. The last key, of score 7, is masked out.
        let modify = |score: f64, [.., key]: Place| if key == 0 { score - 0.5 } else { score * 3f64.ln() };
        let dropped = |score: f64, at: Place| if at[3] == 2 { f64::NEG_INFINITY } else { modify(score, at) };
        let keep = |[.., key]: Place| key < 2;
        let of = |closures: Closures<'_>| with(&[0.5, 1.0, 7.0], &[1.0, 5.0, 100.0], &[], |p| closures.with(p, attention));
        for closures in [
            Closures { modify: Some(&modify), keep: Some(&keep), ..Closures::default() },
            Closures { modify: Some(&dropped), ..Closures::default() },
        ] {
            let a = of(closures);
            assert!((a.o[0] - 4.0).abs() < 1e-14 && (a.stats[0] - 4f64.ln()).abs() < 1e-14, "{a:?}");
        }
        let nothing = of(Closures { keep: Some(&|_| false), ..Closures::default() });
        assert_eq!((nothing.o, nothing.stats), (vec![0.0], vec![f64::NEG_INFINITY]));
    }

    /// The closure and the mask each mask out a key that the other does not.
    #[test]
    fn closures_and_masks_both_drop() {
        let keep = |[.., key]: Place| key == 0;
        let closures = Closures { keep: Some(&keep), ..Closures::default() };
        let a = with(&[1.0, 2.0], &[3.0, 4.0], &[LAST], |p| closures.with(p, attention));
        assert_eq!((a.o, a.stats), (vec![0.0], vec![f64::NEG_INFINITY]));
    }
}
