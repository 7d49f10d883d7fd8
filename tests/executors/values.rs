//! One plan, two values.

use conformance::say::skip;
use sdpa::library::softcap;
use sdpa::{AttentionSpec, DType, Executor, ExecutorName, HostForward, Layout, Param, Shape};

/// One program, two values of a scalar: bound, and by default. A cache must not keep the value of the first problem.
pub(crate) fn keeps_values_apart(executor: &dyn Executor) {
    let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 2, dim_qk: 8, dim_v: 8 };
    let problems = [1.0, 4.0].map(|cap| AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).score_mod(softcap(cap)).validate().unwrap());
    assert_eq!(problems[0], problems[1]);
    if let Err(e) = executor.supports(&problems[0]) {
        assert!(executor.name() != ExecutorName::CPU, "{e}");
        return skip(executor.name().name(), &format!("values of scalars: {e}"));
    }
    let half = |x: f32| half::f16::from_f32(x);
    // Scores 0 and 8.
    let (q, k) = ([half(1.0); 8], [[half(0.0); 8], [half(1.0); 8]].concat());
    let v = [[half(0.0); 8], [half(1.0); 8]].concat();
    let prepared = problems.each_ref().map(|p| executor.prepare(p).unwrap());
    let run = |which: usize, cap: Option<f32>| {
        let mut o = [half(f32::NAN); 8];
        let params: Vec<Param<'_>> = cap.map(|cap| Param::new("cap", cap)).into_iter().collect();
        let call = HostForward::new(&q, &k, &v, &mut o).attn_scale(1.0).params(&params);
        prepared[which].forward(call).unwrap();
        f64::from(o[0])
    };
    let want = |cap: f64| 1.0 / (1.0 + (-cap * (8.0 / cap).tanh()).exp());
    for (which, cap, means) in
        [(0, None, 1.0), (1, None, 4.0), (0, Some(2.0), 2.0), (1, Some(2.0), 2.0), (0, None, 1.0), (1, Some(1.0), 1.0)]
    {
        let got = run(which, cap);
        assert!((got - want(means)).abs() < 2e-3, "problem {which}, {cap:?}: {got}, not {}", want(means));
    }
}
