//! Results of ranks against textbook attention of the whole problem, and against one executor.

use crate::backend;
use crate::case::{At, MASKS, MODS, STRATEGIES, shardings, value};
use crate::harness::{Data, Random, Results, run, run_forward, run_packed, run_packed_on_one, single, single_forward, spec};
use sdpa_core::{AttentionSpec, DType, Layout, Packed, Shape, StatsBase, TensorSpec};
use sdpa_oracle::{Closures, Dropout, Element, Given, Mask, Numbers, Problem, Statistics, Tensor, Verdict};
use sdpa_parallel::{ParallelSpec, Strategy};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A mask and a score_mod by their index, and whether there is a sink and dropout.
#[derive(Clone, Copy, Debug)]
struct Features {
    mask: usize,
    score_mod: usize,
    sink: bool,
    dropout: bool,
}

impl Features {
    fn on(self, mut spec: AttentionSpec) -> AttentionSpec {
        let (mask, score_mod) = (MASKS[self.mask].0, MODS[self.score_mod].0);
        if !mask.is_empty() {
            spec = spec.mask(mask.parse().unwrap_or_else(|e| panic!("{mask}: {e}")));
        }
        if !score_mod.is_empty() {
            spec = spec.score_mod(score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}")));
        }
        if self.sink {
            spec = spec.with_sink();
        }
        if self.dropout { spec.with_dropout(0.25) } else { spec }
    }
}

fn tensor<'a>(numbers: &'a dyn Numbers, spec: &TensorSpec) -> Tensor<'a> {
    Tensor { numbers, strides: spec.densely().strides.map(|s| s as usize) }
}

/// Compares results with textbook attention. Returns whether both passes are decided: zeros would not pass.
fn check(spec: &AttentionSpec, features: Features, data: &Data, got: &Results) -> Result<bool, String> {
    let (problem, element) = (
        spec.validate().unwrap(),
        match spec.dtype {
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => Element::F32,
        },
    );
    let seq = [problem.seq_q(), problem.seq_kv()];
    let (keep, modify) = (MASKS[features.mask].1, MODS[features.score_mod]);
    let sinks: Vec<f64> = (0..problem.heads_q()).map(|head| value("sink", [0, head, 0, 0])).collect();
    let masks = [Mask::Rule(Box::new(move |at: At| keep(at, seq)))];
    let shape =
        [problem.batch(), problem.heads_q(), problem.heads_kv(), seq[0], seq[1], problem.dim_qk(), problem.dim_v()].map(|n| n as usize);
    let (q, k, v) = (tensor(&data.q, &spec.q), tensor(&data.k, &spec.k), tensor(&data.v, &spec.v));
    let dropout = features.dropout.then_some(Dropout { p: 0.25, seed: 77, offset: 5 });
    let sink = features.sink.then_some(&sinks as &dyn Numbers);
    let scale = f64::from(problem.default_scale());
    let base = Problem {
        shape,
        q,
        k,
        v,
        element,
        stored: element,
        scale,
        masks: &masks,
        modify: None,
        sink,
        dropout,
        narrow: None,
        fixed_point: None,
    };
    let rounding = move |x: f64, at: At| 4.0 * (x.abs() + modify.1(x, at).abs()) + 4.0;
    let (value_of, slope) = (move |x, at| modify.1(x, at), move |x, at| modify.2(x, at));
    let closures = match features.score_mod {
        0 => Closures::default(),
        _ => Closures { modify: Some(&value_of), slope: Some(&slope), rounding: Some(&rounding), ..Closures::default() },
    };
    closures.with(&base, |p| {
        let statistics = Statistics { stats: Some(&got.stats), row_max: Some(&got.row_max), sum_exp: Some(&got.sum_exp), amax_s: None };
        let forward = sdpa_oracle::check(p, tensor(&got.o, &spec.o), statistics, &|_| ());
        let results = [tensor(&got.dq, &spec.q), tensor(&got.dk, &spec.k), tensor(&got.dv, &spec.v)];
        let backward = sdpa_oracle::check_gradients(p, tensor(&data.d_o, &spec.o), Given::Own, &results, &[], &|_| ());
        match (forward.verdict(), backward.verdict()) {
            (Verdict::Failed, _) => Err(format!("forward: {:?} {:?}", forward.o, forward.statistics())),
            (_, Verdict::Failed) => Err(format!("backward: {:?}", backward.operands)),
            (forward, backward) => Ok([forward, backward] == [Verdict::Passed; 2]),
        }
    })
}

/// Returns the distance of two results relative to their norm.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    let finite = a.iter().zip(b).filter(|(x, y)| x.is_finite() || y.is_finite());
    let (mut error, mut norm) = (0.0, 0.0);
    for (x, y) in finite {
        error += (f64::from(*x) - f64::from(*y)).powi(2);
        norm += f64::from(*y).powi(2);
    }
    if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() }
}

fn compare_with_one(got: &Results, one: &Results, dtype: DType, told: &str) {
    let limit = if dtype == DType::F32 { 3e-6 } else { 8e-3 };
    let pairs = [(&got.o, &one.o), (&got.stats, &one.stats), (&got.row_max, &one.row_max), (&got.sum_exp, &one.sum_exp)];
    for (n, (a, b)) in pairs.into_iter().chain([(&got.dq, &one.dq), (&got.dk, &one.dk), (&got.dv, &one.dv)]).enumerate() {
        assert!(apart(a, b) <= limit, "{told}: result {n} is {} from one executor's", apart(a, b));
    }
}

const HEADS: [[i64; 2]; 4] = [[8, 8], [8, 2], [8, 1], [9, 3]];

#[test]
fn ranks_compute_the_whole_problem() {
    let (mut runs, mut decided, mut turn, mut met) = (0usize, 0usize, 0usize, BTreeSet::new());
    for ranks in [1, 2, 3, 4, 5, 8] {
        for strategy in STRATEGIES {
            for sharding in 0..4 {
                for score_mod in 0..MODS.len() {
                    // Masks, heads and types are drawn, and must meet every strategy, sharding, score_mod and number of ranks.
                    turn += 1;
                    if !backend::runs(turn) {
                        continue;
                    }
                    let mut random = Random(turn as u64);
                    let mut draw = |n: usize| (random.next() % n as u64) as usize;
                    let mask = if strategy == Strategy::Halo { [2, 6][draw(2)] } else { draw(MASKS.len()) };
                    let heads = HEADS[draw(HEADS.len())];
                    let dtype = [DType::F32, DType::BF16, DType::F32, DType::F16, DType::F32][draw(5)];
                    let layout = Layout::ALL[draw(3)];
                    let seq = if sharding == 3 { [21, 21] } else { [19, 23] };
                    let features = Features { mask, score_mod, sink: draw(3) == 1, dropout: false };
                    let whole = features.on(spec(dtype, heads, seq, layout));
                    let asked =
                        ParallelSpec::new(whole.clone(), ranks).sharding(shardings(ranks, seq[0])[sharding].clone()).strategy(strategy);
                    let Ok(problem) = asked.with_backward().validate().map(Arc::new) else { continue };
                    let told = format!("{ranks} ranks, {strategy}, sharding {sharding}, {features:?}, heads {heads:?}, {dtype}");
                    let data = Data::new(&whole, turn as u64);
                    let got = run(&problem, &data, None);
                    decided += usize::from(check(&whole, features, &data, &got).unwrap_or_else(|e| panic!("{told}: {e}")));
                    let one = single(&whole, &data);
                    compare_with_one(&got, &one, dtype, &told);
                    // The shard of one rank is all tokens in order, but for the scattered chunks.
                    if ranks == 1 && sharding < 3 {
                        assert!(got.bits() == one.bits(), "{told}: one rank has other bits");
                    }
                    if turn % 4 == 0 {
                        let again = run(&problem, &data, Some(turn as u64));
                        assert!(got.bits() == again.bits(), "{told}: another run with delays has other bits");
                    }
                    let own =
                        [format!("p{ranks}"), format!("s{strategy}"), format!("c{sharding}"), format!("m{mask}"), format!("f{score_mod}")];
                    let own: Vec<String> =
                        own.into_iter().chain([format!("h{heads:?}"), format!("t{dtype}"), format!("k{}", features.sink)]).collect();
                    met.extend(own.iter().flat_map(|a| own.iter().map(move |b| (a.clone(), b.clone()))));
                    runs += 1;
                }
            }
        }
    }
    assert!(runs * backend::SHARES > 600 && decided * 10 >= runs * 8, "{decided} of {runs} decided");
    if backend::SHARES > 1 {
        return;
    }
    let mut missing = Vec::new();
    let mut names = BTreeSet::new();
    names.extend(met.iter().map(|(a, _)| a.clone()));
    for (a, b) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))) {
        let valid = a[..1] != b[..1] && !(a == "shalo" && b.starts_with('m')) && !(b == "shalo" && a.starts_with('m'));
        let refused =
            |a: &str, b: &str| a.starts_with("sgrid") && b.starts_with('p') || a.starts_with("sall-gather in 2") && b == "h[8, 1]";
        if valid && !refused(a, b) && !refused(b, a) && !met.contains(&(a.clone(), b.clone())) {
            missing.push(format!("{a} with {b}"));
        }
    }
    assert!(missing.is_empty(), "not met: {}", missing.join(", "));
}

/// Dropout drops the same elements as on one rank, where each rank has all tokens of its heads.
#[test]
fn head_exchange_drops_the_same_elements() {
    for (ranks, heads, mask, score_mod) in [(1, [8, 8], 1, 0), (2, [8, 2], 0, 2), (4, [8, 1], 2, 5), (3, [9, 3], 4, 1), (8, [8, 8], 1, 6)] {
        // The chunks of one rank must be one run.
        for sharding in shardings(ranks, 21).into_iter().take(if ranks == 1 { 3 } else { 4 }) {
            let features = Features { mask, score_mod, sink: true, dropout: true };
            let mut whole = spec(DType::F32, heads, [21, 21], Layout::Bhsd);
            for tensor in [&mut whole.q, &mut whole.k, &mut whole.v, &mut whole.o] {
                tensor.dims[0] = 1;
                *tensor = tensor.densely();
            }
            let whole = features.on(whole);
            let asked = ParallelSpec::new(whole.clone(), ranks).sharding(sharding).strategy(Strategy::HeadExchange);
            let problem = Arc::new(asked.with_backward().validate().unwrap());
            let data = Data::new(&whole, ranks as u64);
            let got = run(&problem, &data, None);
            check(&whole, features, &data, &got).unwrap_or_else(|e| panic!("{ranks}: {e}"));
            compare_with_one(&got, &single(&whole, &data), DType::F32, &format!("{ranks} ranks"));
        }
    }
}

/// Rows without keys are 0, and their statistics those of no key, with and without a sink.
#[test]
fn rows_without_keys_are_exact() {
    for strategy in STRATEGIES.into_iter().filter(|s| *s != Strategy::Halo) {
        for (sink, base) in [(false, StatsBase::Natural), (true, StatsBase::Natural), (true, StatsBase::Two)] {
            let mut whole = spec(DType::F32, [8, 4], [19, 19], Layout::Bhsd).mask("k >= q + 9".parse().unwrap()).with_stats_in(base);
            whole.sink = sink;
            for ranks in [2, 6] {
                let Ok(problem) = ParallelSpec::new(whole.clone(), ranks).strategy(strategy).validate().map(Arc::new) else { continue };
                let got = run_forward(&problem, &Data::new(&whole, 3));
                let one = single_forward(&whole, &Data::new(&whole, 3));
                for row in (0..2 * 8 * 19).filter(|row| row % 19 >= 10) {
                    assert!(got[0][4 * row..4 * row + 4].iter().all(|x| *x == 0.0), "{strategy} {row}");
                    for n in 1..4 {
                        assert!(got[n][row] == one[n][row], "{strategy} {sink} {n}: {} {}", got[n][row], one[n][row]);
                    }
                }
                for (got, one) in got.iter().zip(&one) {
                    assert!(apart(got, one) < 3e-6, "{strategy} {sink} {base}");
                }
            }
        }
    }
}

/// Packed sequences against one executor's packed pass, with an empty sequence, and tokens after the last one.
#[test]
fn packed_sequences_are_those_of_one_executor() {
    let cu: [i32; 6] = [0, 7, 7, 16, 17, 25];
    let shape = Shape { batch: 5, heads_q: 8, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 4 };
    let masks = ["", "causal", "window:4,1", "prefix-lm:3", "causal-ends", "(q + batch) % 3 != k % 2", "k < 6 & !window:3,0:bottom-right"];
    let mods = [
        "",
        "alibi",
        "score + 0.25 * f32((q * 7 + k * 3 + head * 5 + batch * 2 + seq_q) % 11)",
        "tensor slopes[head]: f32; score + slopes * f32(k - q)",
    ];
    let mut runs = 0;
    for (n, mask) in masks.iter().enumerate() {
        for (m, score_mod) in mods.iter().enumerate() {
            let mut spec = AttentionSpec::packed(DType::F32, shape, Packed::of(27)).with_stats();
            spec.masks.extend((!mask.is_empty()).then(|| mask.parse().unwrap_or_else(|e| panic!("{mask}: {e}"))));
            spec.score_mods.extend((!score_mod.is_empty()).then(|| score_mod.parse().unwrap_or_else(|e| panic!("{score_mod}: {e}"))));
            spec.sink = n % 2 == 1;
            let one = run_packed_on_one(&spec, &cu);
            for ranks in [1, 2, 3, 5] {
                for (strategy, sharding) in STRATEGIES.into_iter().zip([0, 3, 1, 2, 0, 3, 1]) {
                    if (n + m + ranks) % 2 == 0 && ranks > 1 {
                        continue;
                    }
                    let asked = ParallelSpec::new(spec.clone(), ranks).sharding(shardings(ranks, 27)[sharding].clone()).strategy(strategy);
                    let Ok(problem) = asked.with_backward().validate().map(Arc::new) else { continue };
                    let got = run_packed(&problem, &cu);
                    for (which, (got, one)) in got.iter().zip(&one).enumerate() {
                        let row = got.len() / 27;
                        assert!(apart(&got[..25 * row], &one[..25 * row]) < 4e-6, "{mask:?} {score_mod:?} {ranks} {strategy} {which}");
                        // Rows after the last sequence attend to no key, and no query attends to them.
                        assert!(
                            which == 1 || got[25 * row..].iter().all(|x| *x == 0.0),
                            "{mask:?} {score_mod:?} {ranks} {strategy} {which}"
                        );
                    }
                    runs += 1;
                }
            }
        }
    }
    assert!(runs > 150, "{runs}");
}

#[test]
fn packed_problems_that_cannot_be_right_are_refused() {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 4 };
    let packed = |packed: Packed| AttentionSpec::packed(DType::F32, shape, packed);
    let told = |spec: AttentionSpec| {
        let error = ParallelSpec::new(spec, 2).validate().unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        error.to_string()
    };
    assert!(told(packed(Packed::new())).contains("the number of tokens"));
    assert!(told(packed(Packed::of(12).with_cross(true))).contains("cu_seqlens of their own"));
    assert!(told(packed(Packed::of(12)).with_dropout(0.5)).contains("dropout"));
    assert!(told(packed(Packed::of(12)).score_mod("tensor bias[q, k]: f32; score + bias".parse().unwrap())).contains("a tensor [q, k]"));
    assert!(told(packed(Packed::of(12)).mask("tensor lens[batch]: i32; k < lens".parse().unwrap())).contains("a tensor [batch]"));
    let problem = Arc::new(ParallelSpec::new(packed(Packed::of(12)), 1).validate().unwrap());
    let error = |cu: &[i32]| {
        let exchange = sdpa_parallel::InProcess::group(1, crate::harness::DEADLINE).remove(0);
        let mut rank = sdpa_parallel::ContextParallel::new(&sdpa_cpu::CpuExecutor::default(), problem.clone(), exchange).unwrap();
        let (q, k, v) = (vec![0.0; 12 * 32], vec![0.0; 12 * 16], vec![0.0; 12 * 8]);
        let mut o = vec![0.0; 12 * 16];
        let params = [sdpa_core::Param::new("cu_seqlens", cu)];
        rank.forward(sdpa_core::HostForward::new(&q, &k, &v, &mut o).params(&params)).map_err(|error| error.to_string())
    };
    assert_eq!(error(&[0, 4, 12]), Ok(()));
    assert!(error(&[0, 5, 14]).unwrap_err().contains("at most 12, the tokens of the problem"));
    assert!(error(&[0, 5, 4]).unwrap_err().contains("cu_seqlens[2]"));
    assert!(error(&[0, 5]).unwrap_err().contains("3 elements"));
}

/// A mask that reads keys only is a band for a single query, which may be empty where the bands of the whole problem are not.
#[test]
fn single_queries_without_keys_are_zero() {
    let whole = spec(DType::F32, [8, 4], [8, 8], Layout::Bhsd).mask("k >= 9".parse().unwrap());
    for strategy in [Strategy::AllGather { head_groups: 1 }, Strategy::Ring, Strategy::HeadExchange] {
        let problem = Arc::new(ParallelSpec::new(whole.clone(), 8).strategy(strategy).with_backward().validate().unwrap());
        let got = run(&problem, &Data::new(&whole, 5), None);
        assert!(got.o.iter().chain(&got.dq).chain(&got.dk).chain(&got.dv).all(|x| *x == 0.0), "{strategy}");
        assert!(got.stats.iter().all(|x| *x == f32::NEG_INFINITY), "{strategy}");
    }
}
