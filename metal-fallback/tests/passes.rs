//! Passes: their kernels, and the results that these pass to one another.

use metal_fallback::{Along, Backward, Forward, Kernels, Operand, Pass};
use sdpa_core::expr::{Axes, Axis, Builder, Trace};
use sdpa_core::{DType, Ends, Reason, Region, SINK, TensorSpec};
use std::sync::Arc;

fn tensor(dims: [i64; 4]) -> TensorSpec {
    let [_, heads, seq, dim] = dims;
    TensorSpec { dims, strides: [heads.saturating_mul(seq).saturating_mul(dim), seq.saturating_mul(dim), dim, 1], alignment: 16 }
}

fn forward(seq_q: i64, seq_kv: i64) -> Forward {
    let (q, k) = (tensor([2, 6, seq_q, 64]), tensor([2, 3, seq_kv, 64]));
    let band = Region::default();
    Forward {
        dtype: DType::F16,
        q,
        k,
        v: k,
        o: q,
        band,
        ends: Ends::default(),
        seq_len_q: false,
        seq_len_kv: false,
        packed: None,
        paged: None,
        score_mod: None,
        keep: None,
        sink: false,
        dropout: None,
        stats: true,
        row_max: false,
        sum_exp: false,
    }
}

/// Returns a score_mod that adds a scalar and a table, with its gradient.
fn with_bias(mut forward: Forward) -> Backward {
    let trace = |gradient: bool| -> Arc<Trace> {
        let mut b = Builder::new();
        let score = b.score();
        let upstream = if gradient { vec![b.upstream(); 3] } else { Vec::new() };
        Arc::new(b.finish(&[vec![score], upstream].concat()).unwrap())
    };
    forward.score_mod = Some(trace(false));
    let along = |name: &str, axes| Along { name: name.to_owned(), dtype: DType::F32, axes };
    let (q, k, gradient) = (forward.q, forward.k, Some(trace(true)));
    let along = vec![along("shift", Axes::NONE), along("table", Axes::from([Axis::Head, Axis::Q, Axis::K]))];
    Backward { forward, d_o: q, dq: q, dk: k, dv: k, gradient, along, sink_gradient: None }
}

fn entries(pass: &Pass) -> Vec<&'static str> {
    pass.plans.iter().map(|plan| plan.entry).collect()
}

/// Checks that memory is written before it is read, and that every listed operand is used.
fn check(pass: &Pass) {
    let mut written: Vec<&Operand> = Vec::new();
    for plan in &pass.plans {
        assert!(plan.buffers.is_sorted_by(|a, b| a.slot < b.slot), "{}", plan.entry);
        for binding in plan.buffers.iter().filter(|b| matches!(b.operand, Operand::Scratch(_))) {
            assert!(binding.written || written.contains(&&binding.operand), "{}: {:?}", plan.entry, binding.operand);
        }
        written.extend(plan.buffers.iter().filter(|b| b.written).map(|b| &b.operand));
    }
    let scratch = pass.scratch();
    assert_eq!(scratch.len(), written.iter().filter(|operand| matches!(operand, Operand::Scratch(_))).count());
}

#[test]
fn a_pass_takes_the_kernels_that_suit_its_lengths() {
    for (seq_q, seq_kv, kernels) in
        [(9, 5000, &["attention_forward"][..]), (8, 1023, &["attention_vector"]), (1, 1024, &["attention_vector", "attention_merge"])]
    {
        let pass = forward(seq_q, seq_kv).plan().unwrap();
        assert_eq!(entries(&pass), kernels, "{seq_q} and {seq_kv}");
        check(&pass);
    }
    let parts = forward(1, 1024).plan().unwrap();
    let scratch: Vec<(&str, i64)> = parts.scratch().into_iter().map(|s| (s.name.as_str(), s.elements)).collect();
    assert_eq!(scratch, [("sums of parts", 2 * 6 * 2 * 2), ("outputs of parts", 2 * 6 * 2 * 64)]);
}

#[test]
fn gradients_of_parameters_follow_those_of_operands() {
    let along = ["attention_parameter", "attention_sum", "attention_parameter"];
    for (seq_q, operands) in [
        (9, &["attention_delta", "attention_dq", "attention_dkv"][..]),
        (8, &["attention_delta", "attention_vector_dq", "attention_vector_dkv"]),
    ] {
        let problem = with_bias(forward(seq_q, 100));
        let pass = problem.plan().unwrap();
        assert_eq!(entries(&pass), [operands, &along].concat());
        check(&pass);
        let mut gradients = Vec::new();
        for binding in pass.plans.iter().flat_map(|plan| &plan.buffers) {
            if let Operand::Gradient { name, dtype: _, elements } = &binding.operand {
                gradients.push((name.as_str(), *elements));
            }
        }
        assert_eq!(gradients, [("shift", 1), ("table", 6 * seq_q * 100)]);
        for kernels in Kernels::ALL {
            check(&problem.plan_with(kernels).unwrap());
        }
    }
}

/// Returns the kernels that have a sink among their operands.
fn with_sinks(pass: &Pass) -> Vec<&'static str> {
    let is_sink = |operand: &Operand| matches!(operand, Operand::Declared { name, elements: 6, .. } if name == SINK);
    pass.plans.iter().filter(|plan| plan.buffers.iter().any(|b| is_sink(&b.operand))).map(|plan| plan.entry).collect()
}

#[test]
fn sinks_are_where_rows_are_finished_and_their_gradient_is_last() {
    let sink = |seq_q, seq_kv| Forward { sink: true, ..forward(seq_q, seq_kv) };
    for (seq_q, seq_kv, kernels) in [(9, 5000, ["attention_forward"]), (8, 1023, ["attention_vector"]), (1, 1024, ["attention_merge"])] {
        let pass = sink(seq_q, seq_kv).plan().unwrap();
        assert_eq!(with_sinks(&pass), kernels, "{seq_q} and {seq_kv}");
        check(&pass);
        assert!(with_sinks(&forward(seq_q, seq_kv).plan().unwrap()).is_empty());
    }
    for seq_q in [9, 8] {
        let without = with_bias(sink(seq_q, 100));
        assert_eq!(with_sinks(&without.plan().unwrap()), ["attention_delta"], "the others have it in the log-sum-exp");
        let problem = Backward { sink_gradient: Some(DType::BF16), ..without.clone() };
        let pass = problem.plan().unwrap();
        check(&pass);
        assert_eq!(with_sinks(&pass), ["attention_delta", "attention_sink"]);
        assert_eq!(entries(&pass), [entries(&without.plan().unwrap()), vec!["attention_sink"]].concat());
        let gradient = Operand::Gradient { name: SINK.to_owned(), dtype: DType::BF16, elements: 6 };
        assert!(pass.plans.last().unwrap().buffers.iter().any(|b| b.written && b.operand == gradient));
    }
    for (sink, dtype, said) in [
        (false, DType::F32, "gradient of sink: got a request, expected none: the attention has no sink"),
        (true, DType::I32, "gradient of sink: got i32, expected one of f32, f16, bf16"),
    ] {
        let unsupported = Backward { sink_gradient: Some(dtype), ..with_bias(Forward { sink, ..forward(9, 9) }) }.supports().unwrap_err();
        assert_eq!(unsupported.iter().map(ToString::to_string).collect::<Vec<_>>(), [said]);
    }
}

#[test]
fn limits_are_reported_with_field_value_and_rule() {
    let many = forward(1 << 20, 64);
    let Err(unsupported) = many.plan_with(Kernels::Vector) else { panic!("taken") };
    assert_eq!(unsupported[0].to_string(), "queries per KV head: got 2097152, expected at most 1048576 in vector kernels");
    assert_eq!(entries(&many.plan().unwrap()), ["attention_forward"]);
    let unsupported = with_bias(forward(1 << 18, 1 << 18)).supports().unwrap_err();
    let limit =
        |why: &Reason| why.to_string() == format!("elements of the gradient of table: got {}, expected at most {}", 6i64 << 36, 1i64 << 34);
    assert!(unsupported.iter().any(limit), "{unsupported:?}");
    let mut without = with_bias(forward(4, 4));
    without.gradient = None;
    assert!(
        without.supports().unwrap_err()[0]
            .to_string()
            .starts_with("gradient: got 0 roots, expected at least 4: the modified score, its gradient"),
        "no gradient"
    );
}
