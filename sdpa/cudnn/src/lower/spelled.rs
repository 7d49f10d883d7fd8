//! Graph patterns of traces and passes. Engines match patterns, which results do not show.

use super::tests::{NEW, SHAPE, backward, forward, spec};
use super::{
    Form, Job, Lowered, QueryGradient, Spelling, Supply, UNIFIED_BACKWARD_SINCE, UNIFIED_PLAIN_SINCE, UNIFIED_SINCE, forms, lower,
};
use cudnn_graph::ir::op::{Op, Pointwise};
use cudnn_graph::ir::{Mode, Scalar, Storage, Tensor, TensorId};
use cudnn_graph::{DType, Version};
use sdpa_core::Shape;

fn composite(job: &Job) -> Lowered {
    lower(job, Form::Composite, NEW).unwrap()
}

fn pointwise(lowered: &Lowered, mode: Mode) -> Vec<&Pointwise> {
    let mut found = Vec::new();
    for op in lowered.graph.graph().ops() {
        if let Op::Pointwise(p) = op
            && p.mode == mode
        {
            found.push(p);
        }
    }
    found
}

fn tables(job: &Job) -> usize {
    composite(job).supplies.iter().filter(|(_, supply)| matches!(supply, Supply::Table(_))).count()
}

fn is_virtual(lowered: &Lowered, id: TensorId) -> bool {
    lowered.graph.graph().get(id).is_some_and(|t| t.is_virtual())
}

fn scalar(tensor: &Tensor) -> Option<Scalar> {
    match tensor.storage {
        Storage::ByValue(value) => value,
        Storage::Constant(value) => Some(value),
        Storage::Device | Storage::Virtual => None,
    }
}

fn scalars(lowered: &Lowered) -> Vec<Scalar> {
    lowered.graph.graph().tensors().iter().filter_map(scalar).collect()
}

#[test]
fn the_unified_form_is_asked_for_from_the_version_that_has_it() {
    let both = |job: &Job, runtime| forms(job, runtime).contains(&Form::Unified);
    let plain = forward(SHAPE, &[], &[]);
    let others = [forward(SHAPE, &[], &["causal"]), forward(SHAPE, &["softcap:30"], &[]), forward(SHAPE, &["softcap:30"], &["causal"])];
    assert_eq!([Version::new(9, 13, 0), UNIFIED_PLAIN_SINCE, UNIFIED_SINCE].map(|v| both(&plain, v)), [false, true, true]);
    for job in &others {
        assert_eq!([Version::new(9, 20, 9), UNIFIED_PLAIN_SINCE, UNIFIED_SINCE, NEW].map(|v| both(job, v)), [false, false, true, true]);
    }
    let plain = backward(SHAPE, &[], &[]);
    assert_eq!([UNIFIED_SINCE, Version::new(9, 26, 9), UNIFIED_BACKWARD_SINCE].map(|v| both(&plain, v)), [false, false, true]);
    let mut deterministic = spec(SHAPE, &[], &[]).backward();
    deterministic.deterministic = true;
    let deterministic: Job = deterministic.validate().unwrap().into();
    for job in [deterministic, backward(SHAPE, &[], &["causal"]), backward(SHAPE, &["softcap:30"], &[])] {
        assert!(!both(&job, UNIFIED_BACKWARD_SINCE));
    }
}

#[test]
fn gradients_of_queries_come_at_once_for_equal_bits_and_for_gradients_of_parameters() {
    let usual = |wrt: bool, deterministic: bool| {
        let mut asked = spec(SHAPE, &["bias:hqk"], &[]).backward();
        if wrt {
            asked = asked.wrt("bias", sdpa_core::DType::BF16);
        }
        asked.deterministic = deterministic;
        Spelling::usual(&asked.validate().unwrap()).query_gradient
    };
    assert_eq!(usual(false, false), QueryGradient::Summed);
    for (wrt, deterministic) in [(true, false), (false, true), (true, true)] {
        assert_eq!(usual(wrt, deterministic), QueryGradient::AtOnce);
    }
}

#[test]
fn turned_scores_are_a_view_of_dense_ones() {
    let lowered = composite(&backward(SHAPE, &[], &[]));
    let graph = lowered.graph.graph();
    let mut turned = 0;
    for op in graph.ops() {
        let Op::Reshape(reshape) = op else { continue };
        let (from, to) = (graph.get(reshape.x).unwrap(), graph.get(reshape.y).unwrap());
        if from.dims.0[2..] != [SHAPE.seq_q, SHAPE.seq_kv] {
            continue;
        }
        // The dense strides of (batch, heads, seq_q, seq_kv), with the last two swapped.
        let dense = [4 * 130 * 132, 130 * 132, 132, 1];
        assert_eq!(to.dims.0[..], [2, 4, 132, 130]);
        assert_eq!(to.strides.0[..], [dense[0], dense[1], dense[3], dense[2]]);
        turned += 1;
    }
    assert!(turned > 0);
}

#[test]
fn functions_of_batch_entry_and_head_alone_are_tables() {
    let of = |score_mod: &str| tables(&forward(SHAPE, &[score_mod], &[]));
    for once in ["score + f32(head)", "score * f32(batch * 4 + head)"] {
        assert_eq!(of(once), 1, "{once}");
    }
    for none in [
        "score * 2.0",
        "tanh(score)",
        "score + f32(q)",
        "score + f32(k)",
        "score + f32(q - k)",
        "tensor gain[head]: f32; score * gain",
        "scalar cap = 1.0; score * cap",
        "scalar cap = 1.0; score + f32(q) * cap",
    ] {
        assert_eq!(of(none), 0, "{none}");
    }
}

#[test]
fn keys_are_counted_by_a_table_for_one_query() {
    let one = Shape { seq_q: 1, ..SHAPE };
    let mask = "k % 3 == 0";
    assert_eq!([tables(&forward(one, &[], &[mask])), tables(&forward(SHAPE, &[], &[mask]))], [1, 0]);
}

#[test]
fn truth_values_in_memory_are_compared_as_whole_numbers() {
    let lowered = composite(&forward(SHAPE, &[], &["tensor keep[q, k]: bool; keep"]));
    let graph = lowered.graph.graph();
    let dtype = |id| graph.get(id).map(|t| t.dtype);
    let conversions = pointwise(&lowered, Mode::Identity);
    let whole: Vec<_> = conversions.iter().filter(|p| dtype(p.y) == Some(DType::I32)).collect();
    assert_eq!(whole.len(), 1);
    let compared = pointwise(&lowered, Mode::CmpNeq);
    assert!(compared.len() == 1 && compared[0].x == whole[0].y);
    // A tensor of integers needs no conversion.
    let lowered = composite(&forward(SHAPE, &[], &["tensor keep[q, k]: i32; keep != 0"]));
    assert_eq!(pointwise(&lowered, Mode::Identity).len(), 0);
}

#[test]
fn the_first_of_two_is_made_inside_the_kernel_without_an_addition_where_the_other_is() {
    let compared = |mask: &str, mode: Mode| {
        let lowered = composite(&forward(SHAPE, &[], &[mask]));
        let ops = pointwise(&lowered, mode);
        assert_eq!(ops.len(), 1, "{mask}");
        assert!(is_virtual(&lowered, ops[0].x), "{mask}");
        pointwise(&lowered, Mode::Add).len()
    };
    let (outside, inside) = ("tensor from[batch, q]: i32; from < k", "tensor from[batch, q]: i32; k > from");
    assert_eq!([compared(outside, Mode::CmpGt), compared(inside, Mode::CmpGt)], [0, 0]);
    // Both operands are inside the kernel, so the comparison stays as written.
    let lowered = composite(&forward(SHAPE, &[], &["q % 3 < k % 5"]));
    let [op] = pointwise(&lowered, Mode::CmpLt)[..] else { panic!("another comparison") };
    let index = |of: TensorId| pointwise(&lowered, Mode::Mod).into_iter().find(|p| p.y == of).map(|p| p.x);
    assert!(index(op.x).is_some() && index(op.x) < op.b.and_then(index));
}

#[test]
fn a_number_that_is_chosen_comes_second() {
    // If the constant is the first value of the select, the comparison is negated and the values are swapped. If it is the second,
    // nothing changes.
    for (score_mod, mode) in [("select(q > k, 1.5, score)", Mode::CmpLe), ("select(q > k, score, 1.5)", Mode::CmpGt)] {
        let lowered = composite(&forward(SHAPE, &[score_mod], &[]));
        assert_eq!((pointwise(&lowered, mode).len(), pointwise(&lowered, Mode::Add).len()), (1, 0), "{score_mod}");
    }
    // Both values are computed inside the kernel, so the comparison stays as written.
    let lowered = composite(&forward(SHAPE, &["select(q > k, score * 2.0, tanh(score))"], &[]));
    assert_eq!(pointwise(&lowered, Mode::CmpGt).len(), 1);
}

#[test]
fn floats_are_compared_by_rounding_what_lies_between_two_whole_numbers() {
    let of = |score_mod: &str| {
        let lowered = composite(&forward(SHAPE, &[score_mod], &[]));
        let has = |x: Scalar| scalars(&lowered).contains(&x);
        let rounds = [Mode::Ceil, Mode::Floor].map(|mode| pointwise(&lowered, mode).len());
        (rounds, has(Scalar::F32(-1.0)) && has(Scalar::I32(-1)), has(Scalar::F32(1.0)))
    };
    assert_eq!(of("select(score > 0.5, score, score * 2.0)"), ([1, 0], false, true));
    assert_eq!(of("select(score >= 0.5, score, score * 2.0)"), ([0, 1], true, false));
}

#[test]
fn gradients_that_tell_nothing_of_the_score_are_made_of_what_comes_from_behind() {
    let noughts = |score_mod: &str| {
        let lowered = composite(&backward(Shape { seq_q: 128, seq_kv: 256, ..SHAPE }, &[score_mod], &[]));
        let nought = |id: Option<TensorId>| id.and_then(|id| scalar(lowered.graph.graph().get(id)?)) == Some(Scalar::F32(0.0));
        pointwise(&lowered, Mode::Mul).into_iter().filter(|p| nought(p.b)).count()
    };
    assert_eq!([noughts("f32(q - k)"), noughts("score * 2.0"), noughts("score * score")], [1, 0, 0]);
}
