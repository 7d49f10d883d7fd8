//! Tests of large scores, many keys and small derivatives, where f32 loses precision.

use super::CpuExecutor;
use super::isa::Isa;
use sdpa_core::executor::Executor;
use sdpa_core::{AttentionSpec, BackwardProblem, DType, HostBackward, HostForward, Layout, Problem, ScoreMod, Shape};

/// Operands of one head, row by row, and the scale.
struct Head<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    scale: f32,
}

fn shape(seq_q: usize, seq_kv: usize, dim_qk: usize, dim_v: usize) -> Shape {
    let [seq_q, seq_kv, dim_qk, dim_v] = [seq_q, seq_kv, dim_qk, dim_v].map(|n| n as i64);
    Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q, seq_kv, dim_qk, dim_v }
}

fn spec(shape: Shape, score_mod: &str) -> AttentionSpec {
    let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).with_stats();
    if score_mod.is_empty() { spec } else { spec.score_mod(score_mod.parse::<ScoreMod>().unwrap()) }
}

/// Returns `o` and stats.
fn forward(isa: Isa, problem: &Problem, head: &Head<'_>) -> (Vec<f32>, Vec<f32>) {
    let seq_q = problem.seq_q() as usize;
    let (mut o, mut stats) = (vec![f32::NAN; seq_q * problem.dim_v() as usize], vec![f32::NAN; seq_q]);
    let call = HostForward::new(head.q, head.k, head.v, &mut o).stats(&mut stats).attn_scale(head.scale);
    CpuExecutor::with_isa(isa).prepare(problem).unwrap().forward(call).unwrap();
    (o, stats)
}

/// Returns `dq`, `dk`, `dv`.
fn backward(isa: Isa, problem: &BackwardProblem, head: &Head<'_>, [o, stats, d_o]: [&[f32]; 3]) -> [Vec<f32>; 3] {
    let mut gradients = [head.q.len(), head.k.len(), head.v.len()].map(|n| vec![f32::NAN; n]);
    let [dq, dk, dv] = &mut gradients;
    let call = HostBackward::new((head.q, head.k, head.v), (o, stats), d_o, (dq, dk, dv)).attn_scale(head.scale);
    CpuExecutor::with_isa(isa).prepare_backward(problem).unwrap().backward(call).unwrap();
    gradients
}

/// Returns pseudorandom numbers from −1 to 1.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729 + 1) as f32 * 0.618_034).sin()).collect()
}

fn near(got: f32, want: f64, relative: f64) -> bool {
    (f64::from(got) - want).abs() <= relative * want.abs()
}

/// 1 query runs the few-row kernel, 40 the tiled one.
const ROWS: [usize; 2] = [1, 40];

#[test]
fn scores_up_to_the_largest_number_are_told_apart() {
    for isa in Isa::all() {
        for seq_q in ROWS {
            let (k, v) = (numbers(6, 2), numbers(6, 1));
            let run = |text: &str, q: f32, k: &[f32]| {
                let problem = spec(shape(seq_q, 6, 1, 1), text).validate().unwrap();
                forward(isa, &problem, &Head { q: &vec![q; seq_q], k, v: &v, scale: 1.0 })
            };
            let even = (v[0] + v[2] + v[4]) / 3.0;
            let (o, stats) = run("select(k % 2 == 0, 3e38, 2.5e38)", 1.0, &k);
            assert!(o.iter().all(|o| near(*o, even.into(), 1e-6)) && stats.iter().all(|s| *s == 3e38), "{isa:?}: {o:?} {even} {stats:?}");
            // Test large scores without a score_mod too.
            let (o, stats) = run("", 1.5e19, &[2e19, 1.7e19, 2e19, -2e19, 2e19, 0.0]);
            assert!(o.iter().all(|o| near(*o, even.into(), 1e-6)) && stats.iter().all(|s| *s == 1.5e19 * 2e19), "{isa:?}: {o:?} {stats:?}");
            // Some libraries write the lowest finite f32 as the score of a key that is masked out.
            let mean = v.iter().sum::<f32>() / 6.0;
            let (o, stats) = run("-3.4028235e38 + score * 0.0", 1.0, &k);
            assert!(o.iter().all(|o| near(*o, mean.into(), 1e-5)) && stats.iter().all(|s| *s == f32::MIN), "{isa:?}: {o:?} {stats:?}");
        }
    }
}

#[test]
fn rows_keep_their_digits_over_any_number_of_keys() {
    for isa in Isa::all() {
        for (seq_q, seq_kv) in [(1, 3000), (40, 3000), (1, 1_000_000), (17, 1_000_000)] {
            // Choose P that f32 cannot represent exactly, so that sums round.
            let scores: Vec<f32> = (0..seq_kv).map(|key| if key % 5 == 4 { -0.7 } else { -0.1 * (key % 3) as f32 }).collect();
            let v: Vec<f32> = (0..seq_kv).map(|key| 0.3 + 0.1 * (key % 7) as f32).collect();
            let problem = spec(shape(seq_q, seq_kv, 1, 1), "").validate().unwrap();
            let (o, stats) = forward(isa, &problem, &Head { q: &vec![1.0; seq_q], k: &scores, v: &v, scale: 1.0 });
            let weights = || scores.iter().map(|s| f64::from(*s).exp());
            let sum: f64 = weights().sum();
            let want = weights().zip(&v).map(|(w, v)| w * f64::from(*v)).sum::<f64>() / sum;
            let worst = o.iter().map(|o| (f64::from(*o) / want - 1.0).abs()).fold(0.0, f64::max);
            let of_sum = stats.iter().map(|s| (f64::from(*s) - sum.ln()).abs()).fold(0.0, f64::max);
            println!("{isa:?}, {seq_q} queries, {seq_kv} keys: o is off by {worst:.1e}, the logarithm of the sum by {of_sum:.1e}");
            // The log-sum-exp is at most about 14. Its f32 rounding error is then 5e-7, which the tolerance covers.
            assert!(worst < 1e-6 && of_sum < 1.5e-6, "{isa:?}, {seq_q} queries, {seq_kv} keys: {worst:e} {of_sum:e}");
        }
    }
}

#[test]
fn the_slope_of_a_softcap_is_right_wherever_it_is_not_zero() {
    for isa in Isa::all() {
        for text in ["tanh(score / 2.0) * 2.0", "2.0 * tanh(score * 0.5)"] {
            // There are two keys, the second with score 0. dS is P(1 − P)(dP₁ − dP₂) times the derivative.
            let scores: Vec<f32> = (0..41).map(|n| (n as f32 - 20.0) * 2.0).collect();
            for score in scores {
                let problem = spec(shape(1, 2, 1, 1), text).backward().validate().unwrap();
                let head = Head { q: &[score], k: &[1.0, 0.0], v: &[1.0, 0.0], scale: 1.0 };
                let (o, stats) = forward(isa, problem.forward(), &head);
                let [dq, ..] = backward(isa, &problem, &head, [&o, &stats, &[1.0]]);
                let x = f64::from(score) / 2.0;
                let p = 1.0 / (1.0 + (-2.0 * x.tanh()).exp());
                let want = p * (1.0 - p) / x.cosh().powi(2);
                assert!(near(dq[0], want, 2e-5), "{isa:?} {text} at {score}: {:e}, not {want:e}", dq[0]);
            }
        }
    }
}

#[test]
fn weights_are_right_where_one_number_per_row_is_not_enough() {
    for isa in Isa::all() {
        for (seq_q, seq_kv) in [(1, 300), (3, 300), (70, 1100)] {
            let (dim, shift) = (8, 1e9);
            let [q, k, v, d_o] = [(seq_q, 1), (seq_kv, 2), (seq_kv, 3), (seq_q, 4)].map(|(n, seed)| numbers(n * dim, seed));
            let problem = spec(shape(seq_q, seq_kv, dim, dim), "score - 1e9").backward().validate().unwrap();
            let head = Head { q: &q, k: &k, v: &v, scale: 0.3 };
            let (o, stats) = forward(isa, problem.forward(), &head);
            assert!(stats.iter().all(|s| *s == -shift));
            // Subtracting 1e9 makes all scores equal in f32, so every P is 1 / seq_kv.
            let [dq, dk, dv] = backward(isa, &problem, &head, [&o, &stats, &d_o]);
            for c in 0..dim {
                let want: f64 = (0..seq_q).map(|row| f64::from(d_o[row * dim + c])).sum::<f64>() / seq_kv as f64;
                let size: f64 = (0..seq_q).map(|row| f64::from(d_o[row * dim + c].abs())).sum::<f64>() / seq_kv as f64;
                let off = (0..seq_kv).map(|key| (f64::from(dv[key * dim + c]) - want).abs()).fold(0.0, f64::max);
                assert!(off <= 1e-5 * size, "{isa:?}: {seq_q} queries, {seq_kv} keys, dv[{c}] is off by {off}, of {size}");
            }
            let mean: Vec<f64> = (0..dim).map(|c| (0..seq_kv).map(|j| f64::from(v[j * dim + c])).sum::<f64>() / seq_kv as f64).collect();
            for row in 0..seq_q {
                let slope = |key: usize| -> f64 {
                    (0..dim).map(|c| f64::from(d_o[row * dim + c]) * (f64::from(v[key * dim + c]) - mean[c])).sum::<f64>() / seq_kv as f64
                };
                for c in 0..dim {
                    let want: f64 = (0..seq_kv).map(|key| 0.3 * slope(key) * f64::from(k[key * dim + c])).sum();
                    let off = (f64::from(dq[row * dim + c]) - want).abs();
                    assert!(off <= 1e-5, "{isa:?}: dq of row {row} is off by {off}, of {want}");
                }
            }
            assert!(dk.iter().all(|x| x.abs() < 1.0), "{isa:?}");
        }
    }
}

#[test]
fn sums_that_are_computed_once_more_do_not_depend_on_threads() {
    let (seq_q, seq_kv, dim) = (3, 5000, 4);
    let [q, k, v, d_o] = [(seq_q, 1), (seq_kv, 2), (seq_kv, 3), (seq_q, 4)].map(|(n, seed)| numbers(n * dim, seed));
    let problem = spec(shape(seq_q, seq_kv, dim, dim), "score + 600.0").backward().validate().unwrap();
    let head = Head { q: &q, k: &k, v: &v, scale: 3.0 };
    let isa = Isa::detect();
    let (o, stats) = forward(isa, problem.forward(), &head);
    assert!(stats.iter().all(|s| *s > 600.0));
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let gradients = pool.install(|| backward(isa, &problem, &head, [&o, &stats, &d_o]));
        gradients.map(|x| x.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
    };
    let one = on(1);
    assert!([2, 3, 7].into_iter().all(|threads| on(threads) == one));
}

#[test]
fn statistics_of_other_keys_too_are_believed() {
    for isa in Isa::all() {
        let (seq_q, half, dim) = (5, 48, 4);
        let [q, k, v, d_o] = [(seq_q, 1), (2 * half, 2), (2 * half, 3), (seq_q, 4)].map(|(n, seed)| numbers(n * dim, seed));
        let all = spec(shape(seq_q, 2 * half, dim, dim), "score + 700.0").backward().validate().unwrap();
        let part = spec(shape(seq_q, half, dim, dim), "score + 700.0").backward().validate().unwrap();
        let head = Head { q: &q, k: &k, v: &v, scale: 0.5 };
        let (o, stats) = forward(isa, all.forward(), &head);
        let [_, _, whole] = backward(isa, &all, &head, [&o, &stats, &d_o]);
        for (n, of_whole) in whole.chunks(half * dim).enumerate() {
            let keys = n * half * dim..(n + 1) * half * dim;
            let head = Head { k: &k[keys.clone()], v: &v[keys], ..head };
            let [_, _, dv] = backward(isa, &part, &head, [&o, &stats, &d_o]);
            let size = of_whole.iter().fold(0f32, |size, x| size.max(x.abs()));
            // The tolerance covers the rounding error of f32 stats near 700, which is 3e-5 and becomes a relative error of P.
            assert!(dv.iter().zip(of_whole).all(|(x, y)| (x - y).abs() < 1e-4 * size), "{isa:?}, half {n}");
        }
    }
}

#[test]
fn no_weight_is_above_one() {
    for isa in Isa::all() {
        for seq_q in [1, 33] {
            let dim = 4;
            let [q, k, v, d_o] = [(seq_q, 1), (9, 2), (9, 3), (seq_q, 4)].map(|(n, seed)| numbers(n * dim, seed));
            let problem = spec(shape(seq_q, 9, dim, dim), "").backward().validate().unwrap();
            let head = Head { q: &q, k: &k, v: &v, scale: 1e8 };
            let (o, stats) = forward(isa, problem.forward(), &head);
            let [dq, dk, dv] = backward(isa, &problem, &head, [&o, &stats, &d_o]);
            // One key of each row has P near 1, so dS is nearly 0 and a row of dv is a sum of rows of d_o.
            let most: f32 = d_o.iter().map(|x| x.abs()).sum();
            assert!(dv.iter().all(|x| x.abs() <= most), "{isa:?}: {dv:?}");
            assert!(dq.iter().chain(&dk).all(|x| x.is_finite()), "{isa:?}: {dq:?} {dk:?}");
            // Lower the stats slightly, as if another implementation had rounded its sums differently. P must not exceed 1.
            let lower: Vec<f32> = stats.iter().map(|s| s - 20.0 * (s.abs().next_up() - s.abs())).collect();
            let [_, _, dv] = backward(isa, &problem, &head, [&o, &lower, &d_o]);
            assert!(dv.iter().all(|x| x.abs() <= most), "{isa:?}: {dv:?}");
        }
    }
}
