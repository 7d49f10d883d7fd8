//! Problems without a batch entry, a query or a key, whichever executors a build has.

use sdpa::expr::{Declared, ParamKind};
use sdpa::{
    Amax, AttentionSpec, BackwardProblem, DType, Direction, Dispatcher, Elements, ElementsMut, Error, Executor, ExecutorName, F8E4M3,
    HostAmax, HostBackward, HostForward, HostGradient, Layout, Mask, Packed, Paged, Param, ParamValue, Preference, Prepared,
    PreparedBackward, Problem, Reason, SINK, ScoreMod, Shape, Statistic, StatsBase, TensorSpec, Unsupported, params,
};
use std::sync::Arc;

/// The content of results before a call, and of what lies between their rows after it.
const BEFORE: f32 = 7.0;
const SINKS: [f32; 2] = [-1.5, 2.0];

/// The dispatcher of a build, without the cuDNN and the driver of this machine.
fn dispatcher() -> Dispatcher {
    #[cfg(feature = "cudnn")]
    {
        let nowhere = |name: &str| Some(format!("/nowhere/{name}").into());
        let search = sdpa::cudnn::Search::default().with_library(nowhere("libcudnn.so.9")).with_driver(nowhere("libcuda.so.1"));
        Dispatcher::new(sdpa::cudnn::CudnnOptions::default().with_search(search))
    }
    #[cfg(not(feature = "cudnn"))]
    Dispatcher::default()
}

fn dense([batch, seq_q, seq_kv]: [i64; 3], [heads_q, heads_kv]: [i64; 2]) -> AttentionSpec {
    let shape = Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk: 4, dim_v: 3 };
    AttentionSpec::dense(DType::F32, shape, Layout::Bhsd)
}

fn len(tensor: &TensorSpec) -> usize {
    tensor.extent().unwrap() as usize
}

/// Elements of a parameter, by its type.
enum Value {
    F32(Vec<f32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

/// A value of every tensor that is declared: sinks, and ones.
fn values(declared: &[Declared], extents: [i64; 4]) -> Vec<(String, Value)> {
    let mut values = Vec::new();
    for p in declared {
        let ParamKind::Tensor { dtype, .. } = p.kind else { continue };
        let n = params::elements(p, extents) as usize;
        let value = if dtype == DType::I32 {
            Value::I32(vec![1; n])
        } else if dtype == DType::I64 {
            Value::I64(vec![1; n])
        } else {
            assert_eq!(dtype, DType::F32, "{}", p.name);
            Value::F32(if p.name == SINK { SINKS[..n].to_vec() } else { vec![1.0; n] })
        };
        values.push((p.name.clone(), value));
    }
    values
}

fn bound(values: &[(String, Value)]) -> Vec<Param<'_>> {
    fn value(value: &Value) -> ParamValue<'_> {
        match value {
            Value::F32(x) => ParamValue::F32(x),
            Value::I32(x) => ParamValue::I32(x),
            Value::I64(x) => ParamValue::I64(x),
        }
    }
    values.iter().map(|(name, x)| Param::new(name, value(x))).collect()
}

/// Results of a forward pass: the memory of `o`, and the row statistics in the order of [`Statistic::ALL`].
struct Forward {
    o: Vec<f32>,
    rows: [Vec<f32>; 3],
}

fn forward(problem: &Problem, prepared: &dyn Prepared) -> Forward {
    let values = values(problem.params(), problem.extents());
    let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(|tensor| vec![0.5; len(tensor)]);
    let mut o = vec![BEFORE; len(problem.o())];
    let mut rows = [(); 3].map(|()| vec![BEFORE; problem.stats_elements() as usize]);
    let mut given = Statistic::ALL.into_iter().zip(&mut rows).map(|(which, rows)| problem.computes(which).then_some(&mut rows[..]));
    let [stats, row_max, sum_exp] = [(); 3].map(|()| given.next().flatten());
    let params = bound(&values);
    let call = HostForward::new(&q, &k, &v, &mut o).statistics([stats, row_max, sum_exp]).params(&params);
    prepared.forward(call).unwrap();
    Forward { o, rows }
}

/// Results of a backward pass: `dq`, `dk`, `dv`, then gradients of parameters.
fn backward(problem: &BackwardProblem, prepared: &dyn PreparedBackward) -> [Vec<Vec<f32>>; 2] {
    let values = values(problem.params(), problem.forward().extents());
    let p = problem.forward();
    let [q, k, v, o, d_o] = [p.q(), p.k(), p.v(), p.o(), problem.d_o()].map(|tensor| vec![0.5; len(tensor)]);
    let stats = vec![0.0; p.stats_elements() as usize];
    let mut operands = [problem.dq(), problem.dk(), problem.dv()].map(|tensor| vec![BEFORE; len(tensor)]);
    let mut wrt: Vec<Vec<f32>> = problem.wrt().iter().map(|g| vec![BEFORE; problem.gradient_elements(&g.name) as usize]).collect();
    let [dq, dk, dv] = operands.each_mut().map(|x| ElementsMut::F32(x));
    let gradients = problem.wrt().iter().zip(&mut wrt).map(|(g, x)| HostGradient::new(&g.name, x));
    let params = bound(&values);
    let call = HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (dq, dk, dv)).params(&params).gradients(gradients);
    prepared.backward(call).unwrap();
    [operands.into(), wrt]
}

/// The value of a row statistic of a head where there is no key.
fn of_row(which: Statistic, base: StatsBase, sink: Option<f32>) -> f32 {
    match (which, sink) {
        (Statistic::SumExp, Some(_)) => 1.0,
        (Statistic::SumExp, None) => 0.0,
        (Statistic::RowMax, sink) => sink.unwrap_or(f32::NEG_INFINITY),
        (Statistic::Stats, None) => f32::NEG_INFINITY,
        (Statistic::Stats, Some(sink)) => match base {
            StatsBase::Natural => sink,
            StatsBase::Two => sink * std::f32::consts::LOG2_E,
        },
    }
}

fn check_forward(problem: &Problem, prepared: &dyn Prepared, what: &str) {
    let Forward { o, rows } = forward(problem, prepared);
    assert_eq!(o, vec![0.0; len(problem.o())], "o of {what}");
    let [batch, heads, seq_q, _] = problem.extents().map(|n| n as usize);
    for (which, got) in Statistic::ALL.into_iter().zip(rows).filter(|(which, _)| problem.computes(*which)) {
        let sink = |head: usize| problem.sink().then(|| SINKS[head]);
        let of_head = |n: usize| vec![of_row(which, problem.stats_base(), sink(n % heads)); seq_q];
        let want: Vec<f32> = (0..batch * heads).flat_map(of_head).collect();
        assert_eq!(got, want, "{which} of {what}");
    }
}

fn check_backward(problem: &BackwardProblem, prepared: &dyn PreparedBackward, what: &str) {
    let [operands, wrt] = backward(problem, prepared);
    for (n, (got, tensor)) in operands.iter().zip([problem.dq(), problem.dk(), problem.dv()]).enumerate() {
        let elements: i64 = tensor.dims.iter().product();
        assert_eq!(got, &vec![0.0; elements as usize], "gradient {n} of {what}");
    }
    for (got, g) in wrt.iter().zip(problem.wrt()) {
        assert_eq!(got, &vec![0.0; problem.gradient_elements(&g.name) as usize], "gradient of {} of {what}", g.name);
    }
}

/// Every specification of these extents: masks, score_mods, a sink, dropout, statistics.
fn specs(extents: [i64; 3], heads: [i64; 2]) -> Vec<AttentionSpec> {
    let masks = ["", "causal", "causal-bottom-right", "padding", "padding & causal-ends", "prefix-lm:1", "dilated:2", "document", "1 > 2"];
    let table = format!("relative-bias:{},2", heads[0]);
    let score_mods = ["", "softcap:30", "alibi-slopes", "bias:qk", &table, "scalar gain = 2.0; score * gain"];
    let mut all = Vec::new();
    for (mask, score_mod) in masks.iter().flat_map(|mask| score_mods.iter().map(move |score_mod| (mask, score_mod))) {
        let mut spec = dense(extents, heads).with_stats();
        spec.masks.extend((!mask.is_empty()).then(|| mask.parse::<Mask>().unwrap()));
        spec.score_mods.extend((!score_mod.is_empty()).then(|| score_mod.parse::<ScoreMod>().unwrap()));
        all.push(spec.clone().with_row_max().with_sum_exp());
        all.push(spec.clone().with_sink().with_row_max().with_sum_exp());
        all.push(spec.clone().with_stats_in(StatsBase::Two).with_sink());
        all.push(spec.with_dropout(0.5));
    }
    all
}

fn extents() -> impl Iterator<Item = [i64; 3]> {
    (0..27).map(|n| [n / 9, n / 3 % 3, n % 3])
}

#[test]
fn results_are_known_whatever_a_specification_asks_for() {
    let all = dispatcher();
    let (mut filled, mut computed, mut wrt) = (0, 0, 0);
    for (extents, heads) in extents().flat_map(|extents| [[1, 1], [2, 1], [2, 2]].map(|heads| (extents, heads))) {
        for spec in specs(extents, heads) {
            let what = format!("{extents:?} {heads:?} {:?} {:?}", spec.masks, spec.score_mods);
            let problem = spec.validate().unwrap_or_else(|errors| panic!("{what}: {errors}"));
            assert!(problem.flops().is_finite(), "{what}");
            assert_eq!(problem.is_empty(), extents.contains(&0), "{what}");
            if problem.is_empty() {
                let choice = all.prepare(&problem, Preference::Auto).unwrap();
                assert_eq!((choice.executor, choice.unsupported.len()), (ExecutorName::CPU, 0), "{what}");
                check_forward(&problem, &*choice.prepared, &what);
                filled += 1;
            } else if cfg!(feature = "cpu") {
                let o = forward(&problem, &*all.prepare(&problem, Preference::Auto).unwrap().prepared).o;
                assert!(o.iter().all(|x| x.is_finite() && *x != BEFORE), "{what}: {o:?}");
                computed += 1;
            }
            let mut spec = spec;
            spec.stats_base = StatsBase::Natural;
            let mut spec = spec.backward();
            let of_scores = problem.score_mod().into_iter().flat_map(|trace| trace.params()).map(|p| p.name.as_str());
            for name in of_scores.chain(problem.sink().then_some(SINK)) {
                spec = spec.wrt(name, DType::F32);
                wrt += 1;
            }
            let problem = spec.validate().unwrap_or_else(|errors| panic!("{what}: {errors}"));
            if problem.forward().is_empty() {
                assert_eq!(problem.flops(), 0.0, "{what}");
                check_backward(&problem, &*all.prepare_backward(&problem, Preference::Auto).unwrap().prepared, &what);
            }
        }
    }
    let each = 3 * 9 * 6 * 4;
    assert_eq!((filled, computed), (19 * each, if cfg!(feature = "cpu") { 8 * each } else { 0 }));
    assert!(wrt > filled, "{wrt} gradients of parameters");
}

#[test]
fn only_elements_of_a_tensor_are_written() {
    let mut spec = dense([2, 2, 0], [2, 2]);
    // Rows of 3 every 5 elements, heads within a token.
    (spec.o.strides, spec.q.strides) = ([40, 5, 20, 1], [40, 5, 20, 1]);
    let problem = spec.validate().unwrap();
    let all = dispatcher();
    let o = forward(&problem, &*all.prepare(&problem, Preference::Auto).unwrap().prepared).o;
    let is_element = |n: usize, dim: usize| n % 20 < 10 && n % 5 < dim;
    let want = |dim: usize, len: usize| (0..len).map(|n| if is_element(n, dim) { 0.0 } else { BEFORE }).collect::<Vec<f32>>();
    assert_eq!(o, want(3, o.len()));
    let problem = spec.backward().validate().unwrap();
    let [operands, _] = backward(&problem, &*all.prepare_backward(&problem, Preference::Auto).unwrap().prepared);
    assert_eq!(operands[0], want(4, operands[0].len()));
    assert!(operands[1].is_empty() && operands[2].is_empty());
}

/// Refuses everything.
#[derive(Debug)]
struct Refuses;

impl Refuses {
    fn no<T>() -> Result<T, Unsupported> {
        Err(Unsupported::new(ExecutorName::new("refuses"), vec![Reason::Absent("it refuses".to_owned())]))
    }
}

impl Executor for Refuses {
    fn name(&self) -> ExecutorName {
        ExecutorName::new("refuses")
    }

    fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
        Refuses::no()
    }

    fn prepare(&self, _: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        Ok(Refuses::no()?)
    }

    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        Refuses::no()
    }

    fn prepare_backward(&self, _: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Ok(Refuses::no()?)
    }
}

#[test]
fn an_executor_of_the_callers_is_not_asked_for_what_needs_no_kernel() {
    let all = dispatcher().with(Arc::new(Refuses));
    let spec = dense([2, 3, 0], [2, 1]).with_stats();
    let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let named = Preference::Named(ExecutorName::new("refuses"));
    for (preference, name) in [(Preference::Auto, "cpu"), (named, "refuses")] {
        let choice = all.prepare(&problem, preference).unwrap();
        assert_eq!(choice.executor.name(), name);
        check_forward(&problem, &*choice.prepared, name);
        let choice = all.prepare_backward(&gradient, preference).unwrap();
        assert_eq!(choice.executor.name(), name);
        check_backward(&gradient, &*choice.prepared, name);
    }
}

#[test]
fn an_executor_that_is_missing_is_missing_for_every_shape() {
    let spec = dense([0, 3, 5], [2, 1]);
    let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let all = dispatcher();
    let mut names = vec![ExecutorName::new("unknown")];
    names.extend(cfg!(feature = "cudnn").then_some(ExecutorName::CUDNN));
    names.extend(cfg!(all(feature = "cuda", feature = "cudnn")).then_some(ExecutorName::CUDA));
    names.extend(cfg!(all(feature = "metal", not(target_vendor = "apple"))).then_some(ExecutorName::METAL));
    for name in names {
        assert!(all.prepare(&problem, Preference::Named(name)).is_err(), "{name}");
        assert!(all.prepare_backward(&gradient, Preference::Named(name)).is_err(), "{name}");
    }
}

#[cfg(feature = "cpu")]
#[test]
fn the_cpu_executor_fills_results_when_it_is_asked_directly() {
    let spec = dense([2, 3, 0], [2, 1]).with_stats().with_sink();
    let (problem, gradient) = (spec.validate().unwrap(), spec.backward().wrt(SINK, DType::F32).validate().unwrap());
    let cpu = sdpa::cpu::CpuExecutor::new();
    assert_eq!((cpu.supports(&problem), cpu.supports_backward(&gradient)), (Ok(()), Ok(())));
    assert_eq!((cpu.workspace_bytes(&problem), cpu.backward_workspace_bytes(&gradient)), (0, 0));
    check_forward(&problem, &*cpu.prepare(&problem).unwrap(), "cpu");
    check_backward(&gradient, &*cpu.prepare_backward(&gradient).unwrap(), "cpu");
}

/// A call is checked as that of any other problem is.
#[test]
fn wrong_calls_are_refused() {
    let problem = dense([2, 3, 0], [2, 1]).with_stats().with_sink().validate().unwrap();
    let prepared = dispatcher().prepare(&problem, Preference::Auto).unwrap().prepared;
    let (q, mut o, mut stats) = (vec![0.0; len(problem.q())], vec![BEFORE; len(problem.o()) - 1], vec![BEFORE; 11]);
    let call = HostForward::new(&q, Elements::F32(&[]), Elements::F16(&[]), &mut o).stats(&mut stats).attn_scale(f32::NAN);
    let Err(Error::Spec(errors)) = prepared.forward(call) else { panic!("it was not refused") };
    let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
    assert_eq!(fields, ["v dtype", "o length", "stats length", "parameter sink", "attn_scale"]);
    assert!(o.iter().chain(&stats).all(|x| *x == BEFORE));
}

#[test]
fn eight_bit_passes_report_no_magnitude() {
    let shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 3, seq_kv: 0, dim_qk: 16, dim_v: 16 };
    let problem = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bhsd).validate().unwrap();
    let values = values(problem.params(), problem.extents());
    let q = vec![F8E4M3::from_f32(1.0); len(problem.q())];
    let mut o = vec![F8E4M3::from_f32(BEFORE); len(problem.o())];
    let asked = Amax::told(&problem, Direction::Forward);
    let mut amax = vec![BEFORE; asked.len()];
    let params = bound(&values);
    let call = HostForward::new(&q, Elements::F8E4M3(&[]), Elements::F8E4M3(&[]), &mut o)
        .params(&params)
        .amax(asked.iter().zip(&mut amax).map(|(of, value)| HostAmax::new(*of, value)));
    dispatcher().prepare(&problem, Preference::Auto).unwrap().prepared.forward(call).unwrap();
    assert!(o.iter().all(|x| x.to_bits() == 0));
    assert_eq!(amax, [0.0, 0.0]);
}

/// A sink of −∞ is none. One of +∞ makes the sum NaN, as a score of +∞ does.
#[test]
fn infinite_sinks() {
    let problem = dense([1, 1, 0], [2, 1]).with_stats().with_row_max().with_sum_exp().with_sink().validate().unwrap();
    let prepared = dispatcher().prepare(&problem, Preference::Auto).unwrap().prepared;
    let (mut o, mut rows) = ([BEFORE; 6], [[BEFORE; 2]; 3]);
    let [stats, row_max, sum_exp] = rows.each_mut().map(|rows| Some(&mut rows[..]));
    let params = [Param::new(SINK, &[f32::NEG_INFINITY, f32::INFINITY])];
    let (q, o) = (Elements::F32(&[0.0; 8]), ElementsMut::F32(&mut o));
    let (k, v) = (Elements::F32(&[]), Elements::F32(&[]));
    prepared.forward(HostForward::new(q, k, v, o).statistics([stats, row_max, sum_exp]).params(&params)).unwrap();
    let [stats, row_max, sum_exp] = rows;
    assert_eq!((stats[0], row_max, sum_exp[0]), (f32::NEG_INFINITY, [f32::NEG_INFINITY, f32::INFINITY], 0.0));
    assert!(stats[1].is_nan() && sum_exp[1].is_nan());
}

#[test]
fn extents_that_stay_errors() {
    let refused = |spec: &AttentionSpec| {
        let errors = spec.validate().unwrap_err().0;
        errors.into_iter().map(|e| format!("{}: {}", e.field, e.rule)).collect::<Vec<_>>()
    };
    let base = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 2, seq_kv: 2, dim_qk: 32, dim_v: 32 };
    for shape in [
        Shape { heads_q: 0, heads_kv: 0, ..base },
        Shape { dim_qk: 0, ..base },
        Shape { dim_v: 0, ..base },
        Shape { heads_kv: 0, ..base },
        Shape { seq_q: -1, ..base },
        Shape { batch: -1, ..base },
    ] {
        assert!(!refused(&AttentionSpec::dense(DType::F32, shape, Layout::Bhsd)).is_empty(), "{shape:?}");
    }
    for shape in [Shape { batch: 0, ..base }, Shape { seq_q: 0, ..base }, Shape { seq_kv: 0, ..base }] {
        let cases = [
            (AttentionSpec::packed(DType::F32, shape, Packed::new().with_cross(true)), "equal offsets in cu_seqlens"),
            (AttentionSpec::paged(DType::F32, shape, Paged::new(4, 3)), "seq_len_kv"),
            (AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bhsd).with_block_scales(), "whole tiles"),
        ];
        for (spec, why) in cases {
            let told = refused(&spec);
            assert!(told.iter().any(|error| error.contains("between 1 and") && error.contains(why)), "{shape:?}: {told:?}");
        }
    }
}

/// Code that looks at a problem without preparing it: texts of kernels, notes on masks, pieces, buckets.
#[cfg(all(feature = "cudnn", feature = "cuda"))]
#[test]
fn compiling_without_a_pass_is_unsupported() {
    use sdpa::cudnn::{Pieces, cost, pieces};
    use sdpa::nvidia::Job;
    let (all, target) = (dispatcher(), sdpa::cuda::Target::new(90, 132));
    let buckets = || sdpa::seq::Buckets::doubling(4, 16).ok();
    let policy = sdpa::seq::SeqPolicy::new(buckets(), buckets());
    for extents in extents().filter(|extents| extents.contains(&0)) {
        for mut spec in specs(extents, [2, 1]) {
            (spec.dtype, spec.stats_base) = (DType::BF16, StatsBase::Natural);
            let (problem, gradient) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
            assert_eq!(all.executors_for(&problem), all.executors());
            assert_eq!(all.executors_for_backward(&gradient), all.executors());
            for job in [Job::from(problem), Job::from(gradient)] {
                let why = target.kernels(&job).unwrap_err().to_string();
                assert!(why.contains("(batch, seq_q, seq_kv): got"), "{why}");
                assert!(cost::notes(&job, Pieces::Always).is_empty());
                assert!(pieces::parts(&job).is_none() && pieces::worthwhile(&job).is_none(), "{extents:?} {:?}", spec.masks);
            }
            if let Ok(bucketed) = policy.bucket(&spec) {
                assert!(bucketed.cost.is_finite());
            }
        }
    }
}
