//! Rules of random numbers, softmax and band masks.

use super::linear::rows;
use super::{At, Class};
use crate::ir::op::{BandMask, BandSide, Distribution, Rng, Seed, Softmax};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn rng(at: &mut At<'_>, op: &Rng) {
    at.type_in("y", op.y, Class::Number);
    match op.distribution {
        Distribution::Bernoulli(p) => at.rule((0.0..=1.0).contains(&p), || format!("probability {p} is not in [0, 1]")),
        Distribution::Uniform(a, b) => at.rule(a.is_finite() && b.is_finite() && a < b, || format!("the interval {a} to {b} is empty")),
        Distribution::Normal(mean, deviation) => at.rule(mean.is_finite() && deviation.is_finite() && deviation >= 0.0, || {
            format!("mean {mean} and deviation {deviation} describe no distribution")
        }),
    };
    match op.seed {
        Seed::Value(_) => {}
        Seed::Tensor(id) => state(at, "seed", id),
    }
    if let Some(id) = op.offset {
        state(at, "offset", id);
    }
}

fn state(at: &mut At<'_>, field: &str, id: TensorId) {
    at.one(field, id, Class::Integer);
    let strides = &at.tensor(id).strides;
    at.rule(strides.0.iter().all(|&s| s == 1), || format!("{field} {id} has strides {strides}, expected 1 along every axis"));
}

pub(super) fn softmax(at: &mut At<'_>, op: &Softmax) {
    at.type_in("x", op.x, Class::Float);
    at.type_in("y", op.y, Class::Float);
    let x = at.dims(op.x).to_vec();
    at.extents("y", op.y, &x);
    let rows = rows(at, op.x);
    for (field, id) in [("stats", op.stats), ("max", op.max), ("sum_exp", op.sum_exp)] {
        if let Some(id) = id {
            at.extents(field, id, &rows);
            at.type_is(field, id, DType::F32);
        }
    }
    if let Some(id) = op.sink {
        at.type_is("sink", id, DType::F32);
        if at.rule(x.len() == 4, || format!("sink {id} needs scores (b, h, s_q, s_kv)")) {
            at.extents("sink", id, &[1, x[1], 1, 1]);
        }
    }
    at.rule(!op.stats_log2 || op.stats.is_some(), || "stats_log2 is set, but there is no stats".to_owned());
}

pub(super) fn band_mask(at: &mut At<'_>, op: &BandMask) {
    at.type_in("x", op.x, Class::Float);
    at.type_in("y", op.y, Class::Float);
    let x = at.dims(op.x).to_vec();
    at.rule(x.len() == 4, || format!("x {} is not (b, h, s_q, s_kv)", op.x));
    at.extents("y", op.y, &x);
    at.one("fill", op.fill, Class::F32);
    at.host_value("fill", op.fill);
    if let Some(id) = op.shift_right
        && at.rule(op.side == BandSide::Right, || {
            format!("shift_right is {id}, expected none: only a mask of the right side has shift_right")
        })
    {
        at.one("shift_right", id, Class::Integer);
        at.host_value("shift_right", id);
    }
    match (op.side, op.left) {
        (BandSide::Right, None) => {}
        (BandSide::Right, Some(id)) => at.fail(format!("left is {id}, expected none: only a mask of the left side has left")),
        (BandSide::Left, None) => at.fail("the attribute `left` is missing: a band mask of the side Left needs it"),
        (BandSide::Left, Some(id)) => {
            at.one("left", id, Class::Number);
            at.host_value("left", id);
        }
    }
    at.rule(op.seq_q.is_some() == op.seq_kv.is_some(), || "seq_q and seq_kv are given together or not at all".to_owned());
    for (field, id) in [("seq_q", op.seq_q), ("seq_kv", op.seq_kv)] {
        if let Some(id) = id {
            at.type_in(field, id, Class::IntegerArithmetic);
            let dims = at.tensor(id).dims.clone();
            let one = at.tensor(id).is_scalar_value() && dims.elements() == Some(1);
            let each = x.first().is_some_and(|&b| dims.0 == [b, 1, 1, 1]);
            at.rule(one || each, || format!("{field} {id} is {dims}, expected one length by value, or one per batch entry as [b,1,1,1]"));
        }
    }
}
