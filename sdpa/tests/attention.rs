//! One call over slices: results of both passes beside the textbook, and what it says of wrong calls.
#![cfg(feature = "cpu")]

use sdpa::expr::{Axis, F32};
use sdpa::{
    AttentionSpec, DType, Dispatcher, Error, ExecutorName, HostGradient, Layout, Mask, Param, Preference, Problem, ScoreMod, Shape,
    attention,
};
use sdpa_oracle as oracle;

const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 11, dim_qk: 8, dim_v: 16 };
const SCALE: f32 = 0.3;

fn spec() -> AttentionSpec {
    AttentionSpec::dense(DType::F32, SHAPE, Layout::Bhsd).mask(Mask::causal_bottom_right()).with_stats()
}

/// Numbers between −1 and 1.
fn numbers(extents: [i64; 4], seed: usize) -> Vec<f32> {
    (0..extents.iter().product::<i64>() as usize).map(|n| ((n * 37 + seed * 101) % 97) as f32 / 48.0 - 1.0).collect()
}

/// `q`, `k`, `v` and `d_o`.
fn operands() -> [Vec<f32>; 4] {
    let spec = spec();
    [(spec.q, 1), (spec.k, 2), (spec.v, 3), (spec.o, 4)].map(|(tensor, seed)| numbers(tensor.dims, seed))
}

/// The textbook's, of a causal mask that is aligned to the lower right corner.
fn judged<T>([q, k, v]: [&Vec<f32>; 3], judge: impl FnOnce(&oracle::Problem<'_>) -> T) -> T {
    let spec = spec();
    let extents = |dims: [i64; 4]| dims.map(|n| n as usize);
    let tensor = |numbers, dims| oracle::Tensor::dense(numbers, extents(dims));
    let mask = [oracle::Mask::Window { left: None, right: Some(0), align: oracle::Align::BottomRight }];
    let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = SHAPE;
    judge(&oracle::Problem {
        shape: [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v].map(|n| n as usize),
        q: tensor(q, spec.q.dims),
        k: tensor(k, spec.k.dims),
        v: tensor(v, spec.v.dims),
        element: oracle::Element::F32,
        stored: oracle::Element::F32,
        scale: SCALE.into(),
        masks: &mask,
        modify: None,
        sink: None,
        dropout: None,
        narrow: None,
        fixed_point: None,
    })
}

fn assert_close(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= 2e-5 * want.abs().max(1.0);
    assert!(got.iter().zip(want).all(near), "{got:?} {want:?}");
}

#[test]
fn both_passes_are_those_of_the_textbook() {
    let [q, k, v, d_o] = &operands();
    let (mut o, mut stats) = (vec![f32::NAN; d_o.len()], vec![f32::NAN; 2 * 4 * 9]);
    let problem = spec().validate().unwrap();
    let ran = attention(&problem).attn_scale(SCALE).stats(&mut stats).forward(q, k, v, &mut o).unwrap();
    assert!(!ran.report.engine.is_empty());
    let want = judged([q, k, v], oracle::attention);
    assert_close(&o, &want.o);
    assert_close(&stats, &want.stats);

    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![f32::NAN; x.len()]);
    let problem = spec().backward().validate().unwrap();
    let gradients = (&mut dq, &mut dk, &mut dv);
    attention(&problem).attn_scale(SCALE).backward((q, k, v), (&o, &stats), d_o, gradients).unwrap();
    let extents = spec().o.dims.map(|n| n as usize);
    let want = judged([q, k, v], |p| oracle::gradients(p, oracle::Tensor::dense(d_o, extents), oracle::Given::Rounded));
    for (got, want) in [(&dq, &want.dq), (&dk, &want.dk), (&dv, &want.dv)] {
        assert_close(got, &want.value);
    }
}

/// A bias for each head, which both passes are given, and whose gradient is asked for.
#[test]
fn parameters_and_their_gradients_are_set_by_name() {
    let bias = ScoreMod::new("bias", |score, _, p| score + p.tensor("bias", [Axis::Head, Axis::K], F32)).unwrap();
    let spec = spec().score_mod(bias);
    let [q, k, v, d_o] = &operands();
    // A bias of nothing leaves the scores as they are.
    let bias = vec![0f32; 4 * 11];
    let params = [Param::new("bias", &bias)];
    let (mut o, mut stats) = (vec![f32::NAN; d_o.len()], vec![f32::NAN; 2 * 4 * 9]);
    attention(&spec.validate().unwrap()).attn_scale(SCALE).params(&params).stats(&mut stats).forward(q, k, v, &mut o).unwrap();
    assert_close(&o, &judged([q, k, v], oracle::attention).o);

    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![f32::NAN; x.len()]);
    let mut d_bias = vec![f32::NAN; bias.len()];
    let problem = spec.backward().wrt("bias", DType::F32).validate().unwrap();
    let call = attention(&problem).attn_scale(SCALE).params(&params).gradients([HostGradient::new("bias", &mut d_bias)]);
    call.backward((q, k, v), (&o, &stats), d_o, (&mut dq, &mut dk, &mut dv)).unwrap();
    // Gradients of a softmax sum to nothing over the keys of a row, and so over those of a head.
    for head in d_bias.chunks(11) {
        assert!(head.iter().any(|x| x.abs() > 1e-3) && head.iter().sum::<f32>().abs() < 1e-4, "{head:?}");
    }
}

/// Fields of the errors of a call.
fn fields<T: std::fmt::Debug>(result: Result<T, Error>) -> Vec<String> {
    match result {
        Err(Error::Spec(errors)) => errors.0.into_iter().map(|error| error.field).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn wrong_calls_are_refused_with_every_mistake() {
    let [q, k, v, d_o] = &operands();
    let problem: Problem = spec().validate().unwrap();
    let (mut o, mut stats) = (vec![7f32; d_o.len()], vec![7f32; 2 * 4 * 9]);
    let half = vec![half::f16::ZERO; v.len()];
    assert_eq!(fields(attention(&problem).forward(&q[1..], k, v, &mut o)), ["q length", "stats"]);
    assert_eq!(fields(attention(&problem).stats(&mut stats).forward(q, k, &half, &mut o)), ["v dtype"]);
    assert_eq!(fields(attention(&problem).stats(&mut stats[1..]).forward(q, k, v, &mut o)), ["stats length"]);
    let unknown = [Param::new("slope", 1.0)];
    assert_eq!(fields(attention(&problem).params(&unknown).stats(&mut stats).forward(q, k, v, &mut o)), ["parameter slope"]);
    assert_eq!(fields(attention(&problem).attn_scale(f32::NAN).stats(&mut stats).forward(q, k, v, &mut o)), ["attn_scale"]);

    let bias = ScoreMod::new("bias", |score, _, p| score + p.tensor("bias", [Axis::K], F32)).unwrap();
    let biased = spec().score_mod(bias);
    assert_eq!(fields(attention(&biased.validate().unwrap()).stats(&mut stats).forward(q, k, v, &mut o)), ["parameter bias"]);
    let backward = biased.backward().wrt("bias", DType::F32).validate().unwrap();
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![7f32; x.len()]);
    let bias = [0f32; 11];
    let params = [Param::new("bias", &bias)];
    let call = attention(&backward).params(&params);
    let told = fields(call.backward((q, k, v), (&o, &stats), d_o, (&mut dq, &mut dk, &mut dv[1..])));
    assert_eq!(told, ["dv length", "gradient of bias"]);
    assert!([&o, &stats, &dq, &dk, &dv].into_iter().flatten().all(|x| *x == 7.0));
}

#[test]
fn the_executor_is_named() {
    let [q, k, v, d_o] = &operands();
    let (problem, dispatcher) = (spec().validate().unwrap(), Dispatcher::default());
    let (mut o, mut stats) = (vec![f32::NAN; d_o.len()], vec![f32::NAN; 2 * 4 * 9]);
    let ran = attention(&problem).with(&dispatcher).on(ExecutorName::CPU).stats(&mut stats).forward(q, k, v, &mut o).unwrap();
    assert_eq!((ran.executor, ran.unsupported.len()), (ExecutorName::CPU, 0));
    let nobody = Preference::Named(ExecutorName::new("nobody"));
    let refused = attention(&problem).with(&dispatcher).on(nobody).stats(&mut stats).forward(q, k, v, &mut o);
    assert!(refused.is_err_and(|error| error.is_unsupported()));
}
