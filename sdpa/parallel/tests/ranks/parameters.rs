//! Gradients of declared parameters and sinks: the sum over ranks against textbook attention in f64.

use crate::backend;
use crate::case::{At, MASKS, MODS, STRATEGIES, Values, params, shardings, value, values};
use crate::harness::{Data, Rank, joined, spec};
use sdpa_core::{AttentionSpec, DType, HostBackward, HostForward, HostGradient, Layout, Packed, SINK, Shape};
use sdpa_parallel::{ParallelError, ParallelProblem, ParallelSpec, Pass, Strategy, Tensor};
use std::sync::Arc;

/// The score_mods with a tensor of their own: their index in [`MODS`], the tensor, and the derivative of the score with respect to its element.
type Case = (usize, &'static str, fn(f64, At) -> f64);

const CASES: [Case; 4] =
    [(2, "slopes", |_, at| (at[3] - at[2]) as f64), (3, "t_q", |x, _| x), (4, "t_k", |_, _| 1.0), (5, "bias", |_, _| 1.0)];

/// Returns the place of a position's element of a tensor.
fn place(name: &str, [_, head, q, k]: At, [seq_q, seq_kv]: [i64; 2]) -> usize {
    let n = match name {
        "slopes" | "sink" => head,
        "t_q" => q,
        "t_k" => k,
        "bias" => (head * seq_q + q) * seq_kv + k,
        other => panic!("{other}"),
    };
    n as usize
}

/// Returns the gradients of the tensor and of the sinks, if there are sinks, in f64. Operands are dense (batch, head, seq, dim).
fn textbook(spec: &AttentionSpec, mask: usize, (score_mod, name, slope): Case, data: &Data) -> [Vec<f64>; 2] {
    let problem = spec.validate().unwrap();
    let [batch, heads, seq_q, seq_kv] = problem.extents();
    let (group, seq, scale) = (problem.group(), [seq_q, seq_kv], f64::from(problem.default_scale()));
    let [dim_qk, dim_v] = [problem.dim_qk(), problem.dim_v()];
    let row = |x: &[f32], [b, h, n]: [i64; 3], [of_heads, rows, dim]: [i64; 3]| -> Vec<f64> {
        let first = (((b * of_heads + h) * rows + n) * dim) as usize;
        x[first..first + dim as usize].iter().map(|x| f64::from(*x)).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut sums = [vec![0.0; [heads, seq_q, seq_kv].iter().product::<i64>() as usize], vec![0.0; heads as usize]];
    for (b, h, q) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq_q).map(move |q| (b, h, q)))) {
        let own_q = row(&data.q, [b, h, q], [heads, seq_q, dim_qk]);
        let d_o = row(&data.d_o, [b, h, q], [heads, seq_q, dim_v]);
        let keys: Vec<i64> = (0..seq_kv).filter(|k| (MASKS[mask].1)([b, h, q, *k], seq)).collect();
        let before: Vec<f64> =
            keys.iter().map(|k| scale * dot(&own_q, &row(&data.k, [b, h / group, *k], [heads / group, seq_kv, dim_qk]))).collect();
        let scores: Vec<f64> = keys.iter().zip(&before).map(|(k, x)| (MODS[score_mod].1)(*x, [b, h, q, *k])).collect();
        let sink = spec.sink.then(|| value("sink", [0, h, 0, 0]));
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let of_sink = sink.map_or(0.0, |sink| (sink - max).exp());
        let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
        let total = weights.iter().sum::<f64>() + of_sink;
        if total == 0.0 {
            continue;
        }
        let d_p: Vec<f64> = keys.iter().map(|k| dot(&d_o, &row(&data.v, [b, h / group, *k], [heads / group, seq_kv, dim_v]))).collect();
        let delta = weights.iter().zip(&d_p).map(|(w, d)| w / total * d).sum::<f64>();
        for ((k, x), (w, d)) in keys.iter().zip(&before).zip(weights.iter().zip(&d_p)) {
            let at = [b, h, q, *k];
            sums[0][place(name, at, seq)] += w / total * (d - delta) * slope(*x, at);
        }
        sums[1][h as usize] -= of_sink / total * delta;
    }
    sums
}

/// Runs both passes on all ranks, and returns the sums of their gradients of these names.
fn run(problem: &Arc<ParallelProblem>, data: &Data, names: &[&str]) -> Result<Vec<Vec<f32>>, ParallelError> {
    run_with(problem, data, names, &values(problem.declared(Pass::Backward), problem.problem().extents()))
}

/// Does the same with these values of the parameters.
fn run_with(
    problem: &Arc<ParallelProblem>,
    data: &Data,
    names: &[&str],
    whole: &[(String, Values)],
) -> Result<Vec<Vec<f32>>, ParallelError> {
    let on_rank = |link| -> Result<Vec<Vec<f32>>, ParallelError> {
        let mut rank = joined(problem, link)?;
        let n = rank.rank();
        let split = |tensor: Tensor, whole: &[f32]| problem.split(n, tensor, whole);
        let [q, k, v] = [(Tensor::Q, &data.q), (Tensor::K, &data.k), (Tensor::V, &data.v)].map(|(tensor, whole)| split(tensor, whole));
        let d_o = split(Tensor::DO, &data.d_o);
        let len = |tensor: Tensor| problem.local(n, tensor).extent().unwrap() as usize;
        let [mut o, mut dq, mut dk, mut dv] = [Tensor::O, Tensor::DQ, Tensor::DK, Tensor::DV].map(|t| vec![f32::NAN; len(t)]);
        let [mut stats, mut row_max, mut sum_exp] = [Tensor::Stats, Tensor::RowMax, Tensor::SumExp].map(|t| vec![f32::NAN; len(t)]);
        let given = params(whole);
        let statistics = [Some(&mut stats[..]), Some(&mut row_max[..]), Some(&mut sum_exp[..])];
        rank.forward(HostForward::new(&q, &k, &v, &mut o).statistics(statistics).params(&given))?;
        let elements = |name: &str| problem.backward().unwrap().gradient_elements(name) as usize;
        let mut sums: Vec<Vec<f32>> = names.iter().map(|name| vec![f32::NAN; elements(name)]).collect();
        let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv)).params(&given);
        rank.backward(call.gradients(names.iter().zip(&mut sums).map(|(name, sums)| HostGradient::new(name, &mut sums[..]))))?;
        Ok(sums)
    };
    let parts: Result<Vec<_>, ParallelError> = std::thread::scope(|scope| {
        let threads: Vec<_> = backend::group(problem.ranks()).into_iter().map(|link| scope.spawn(|| on_rank(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let parts = parts?;
    let sum = |n: usize| (0..parts[0][n].len()).map(|at| parts.iter().map(|part| part[n][at]).sum()).collect();
    Ok((0..names.len()).map(sum).collect())
}

#[test]
fn ranks_sum_to_the_gradients_of_the_whole_problem() {
    let (mut turn, mut runs) = (0u64, 0);
    for ranks in [1, 2, 3, 4] {
        for strategy in STRATEGIES {
            for case in CASES {
                turn += 1;
                let sharding = (turn % 4) as usize;
                let mask = if strategy == Strategy::Halo { 2 } else { [0, 1, 3, 4, 5][(turn % 5) as usize] };
                let seq = if sharding == 3 { [21, 21] } else { [19, 23] };
                let heads = [[8, 8], [8, 2], [8, 1]][(turn % 3) as usize];
                let mut whole = spec(DType::F32, heads, seq, Layout::Bhsd).score_mod(MODS[case.0].0.parse().unwrap());
                if !MASKS[mask].0.is_empty() {
                    whole = whole.mask(MASKS[mask].0.parse().unwrap());
                }
                let names = if turn % 2 == 0 { vec![case.1] } else { vec![case.1, SINK] };
                whole.sink = names.len() == 2;
                let mut asked =
                    ParallelSpec::new(whole.clone(), ranks).sharding(shardings(ranks, seq[0])[sharding].clone()).strategy(strategy);
                for name in &names {
                    asked = asked.wrt(name, DType::F32);
                }
                let Ok(problem) = asked.validate().map(Arc::new) else { continue };
                let data = Data::new(&whole, turn);
                let told = format!("{ranks} ranks, {strategy}, sharding {sharding}, mask {mask}, {names:?}, heads {heads:?}");
                let got = run(&problem, &data, &names).unwrap_or_else(|e| panic!("{told}: {e}"));
                for ((name, got), expected) in names.iter().zip(&got).zip(textbook(&whole, mask, case, &data)) {
                    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let error = got.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt();
                    assert!(norm > 0.0 && error <= 1e-5 * norm, "{told}: {name} is {:e} of its norm apart", error / norm);
                }
                runs += 1;
            }
        }
    }
    assert!(runs > 80, "{runs}");
}

/// A row without keys and with a sink of −∞ has no weights: it adds nothing to the gradient of its sink.
#[test]
fn rows_without_weights_add_nothing_to_the_gradient_of_a_sink() {
    let whole = spec(DType::F32, [2, 2], [16, 16], Layout::Bhsd).mask("k >= q + 9".parse().unwrap()).with_sink();
    for ranks in [1, 2] {
        let asked = ParallelSpec::new(whole.clone(), ranks).strategy(Strategy::Ring).wrt(SINK, DType::F32);
        let problem = Arc::new(asked.validate().unwrap());
        let sinks = [(SINK.to_owned(), Values::F32(vec![f32::NEG_INFINITY, 0.5]))];
        let got = run_with(&problem, &Data::new(&whole, 3), &[SINK], &sinks).unwrap();
        assert!(got[0][0] == 0.0 && got[0][1].abs() > 1e-3 && got[0][1].is_finite(), "{ranks} ranks: {got:?}");
    }
}

#[test]
fn wrong_gradients_are_mistakes_of_the_call() {
    let whole = spec(DType::F32, [2, 2], [8, 8], Layout::Bhsd).score_mod(MODS[2].0.parse().unwrap()).with_sink();
    let unknown = ParallelSpec::new(whole.clone(), 1).wrt("other", DType::F32).validate().unwrap_err().to_string();
    assert!(unknown.contains("other"), "{unknown}");
    let problem = Arc::new(ParallelSpec::new(whole.clone(), 1).wrt("slopes", DType::F32).validate().unwrap());
    let data = Data::new(&whole, 1);
    let missing = run(&problem, &data, &[]).unwrap_err().to_string();
    assert!(missing.contains("gradient of slopes: got nothing, expected an output"), "{missing}");
    let shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 4 };
    // Ranks that ask for other gradients do not run the same problem.
    let without = ParallelSpec::new(whole, 1).with_backward().validate().unwrap();
    let [with, without] = [&*problem, &without].map(|problem| problem.digest(Pass::Backward, 1.0));
    let unlike: Vec<&str> = with.iter().zip(&without).filter(|(a, b)| a != b).map(|((field, _), _)| *field).collect();
    assert_eq!(unlike, ["backward"]);
    let packed = AttentionSpec::packed(DType::F32, shape, Packed::new()).with_sink();
    let refused = ParallelSpec::new(packed, 2).wrt(SINK, DType::F32).validate().unwrap_err().to_string();
    assert!(refused.contains("gradient of a parameter"), "{refused}");
}
