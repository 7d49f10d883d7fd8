//! Rules of norms and of their statistics.

use super::{At, Class};
use crate::ir::norms::statistics;
use crate::ir::op::{BnBackwardWeights, BnFinalize, GenStats, NormBackward, NormForward, NormMode, RunningStats};
use crate::ir::tensor::TensorId;
use crate::ir::ty::{DType, Dims, Strides};

pub(super) fn forward(at: &mut At<'_>, op: &NormForward) {
    for (field, id) in [("x", op.x), ("scale", op.scale), ("y", op.y)] {
        at.type_in(field, id, Class::Float);
    }
    at.rule(op.bias.is_some() || op.mode == NormMode::Rms, || format!("bias is missing: the mode {} needs it", op.mode.name()));
    let (x, scale) = (at.dims(op.x).to_vec(), at.dims(op.scale).to_vec());
    at.extents("y", op.y, &x);
    at.strides_like("y", op.y, ("x", op.x));
    like("bias", op.bias, op.scale, at);
    by_value("epsilon", op.epsilon, DType::F32, at);
    match op.mode {
        NormMode::Rms => {
            at.rule(op.mean.is_none(), || "mean is given, expected none: the mode rms has no mean".to_owned());
        }
        NormMode::Layer | NormMode::Instance | NormMode::Batch | NormMode::AdaLayer => {
            at.rule(op.mean.is_some() == op.inv_variance.is_some(), || "mean and inv_variance are given together or not at all".to_owned());
        }
    }
    at.rule(op.mode != NormMode::Batch || op.inv_variance.is_some(), || {
        "mean and inv_variance are missing: batch norm computes them, and inference with known ones is made of pointwise ops".to_owned()
    });
    if let Some(stats) = extents(at, op.mode, &x, &scale) {
        for (field, id) in [("mean", op.mean), ("inv_variance", op.inv_variance)] {
            statistic(at, field, id, &stats);
        }
        if let (Some(mean), Some(inverse)) = (op.mean, op.inv_variance) {
            at.similar("inv_variance", inverse, ("mean", mean));
        }
        rows(at, op.mode, op.x, &stats);
        dense(at, op.mode, &[("scale", Some(op.scale)), ("mean", op.mean), ("inv_variance", op.inv_variance)]);
        if let Some(running) = &op.running
            && at.rule(op.mode == NormMode::Batch, || {
                format!("running statistics are given, expected none: the mode {} has none", op.mode.name())
            })
        {
            running_stats(at, running, &stats, op.mean);
        }
    }
}

pub(super) fn backward(at: &mut At<'_>, op: &NormBackward) {
    for (field, id) in [("x", op.x), ("dy", op.dy), ("scale", op.scale), ("dx", op.dx), ("dscale", op.dscale)] {
        at.type_in(field, id, Class::Float);
    }
    let (x, scale) = (at.dims(op.x).to_vec(), at.dims(op.scale).to_vec());
    at.extents("dy", op.dy, &x);
    at.extents("dx", op.dx, &x);
    at.strides_like("dy", op.dy, ("x", op.x));
    at.strides_like("dx", op.dx, ("x", op.x));
    at.extents("dscale", op.dscale, &scale);
    at.strides_like("dscale", op.dscale, ("scale", op.scale));
    like("dbias", op.dbias, op.scale, at);
    let rms = op.mode == NormMode::Rms;
    at.rule(rms || op.dbias.is_some(), || format!("dbias is missing: the mode {} needs it", op.mode.name()));
    at.rule(rms || op.mean.is_some(), || format!("mean is missing: the mode {} needs it", op.mode.name()));
    at.rule(!rms || op.mean.is_none(), || "mean is given, expected none: the mode rms has no mean".to_owned());
    if let Some(stats) = extents(at, op.mode, &x, &scale) {
        for (field, id) in [("mean", op.mean), ("inv_variance", Some(op.inv_variance))] {
            statistic(at, field, id, &stats);
        }
        if let Some(mean) = op.mean {
            at.similar("inv_variance", op.inv_variance, ("mean", mean));
        }
        rows(at, op.mode, op.x, &stats);
        let statistics = [("scale", Some(op.scale)), ("mean", op.mean), ("inv_variance", Some(op.inv_variance))];
        dense(at, op.mode, &statistics);
    }
}

/// Returns whether cuDNN treats the tensors of the norm as a matrix whose rows are normalized.
fn over_rows(mode: NormMode) -> bool {
    match mode {
        NormMode::Batch | NormMode::Instance => false,
        NormMode::Layer | NormMode::Rms | NormMode::AdaLayer => true,
    }
}

/// Checks that the normalized elements of norms over rows are dense, and inside of the first axis: cuDNN tells rows and columns apart by strides, also
/// if the first axis has one element. `stats` are the extents of the statistics.
fn rows(at: &mut At<'_>, mode: NormMode, x: TensorId, stats: &[i64]) {
    if !over_rows(mode) {
        return;
    }
    let tensor = at.tensor(x);
    let axes = || tensor.dims.0.iter().zip(&tensor.strides.0).zip(stats);
    let normalized: Vec<(i64, i64)> = axes().filter(|((d, _), kept)| **d > 1 && **kept == 1).map(|((&d, &s), _)| (d, s)).collect();
    let (dims, strides): (Vec<i64>, Vec<i64>) = normalized.into_iter().unzip();
    let outermost = strides.iter().copied().max().unwrap_or(1);
    let inside = tensor.dims.0[0] > 1 || tensor.strides.0[0] >= outermost;
    // With another axis between normalized ones, cuDNN calls the graph unsupported instead.
    let between = axes().any(|((&d, &s), &kept)| d > 1 && kept > 1 && s < outermost);
    let dense = between || Strides(strides).dense(&Dims(dims));
    at.rule(dense && inside, || {
        format!("x {x} has strides {}, expected dense normalized axes, and a first axis with a stride of at least theirs", tensor.strides)
    });
}

/// Checks tensors of norms over rows, which cuDNN reads without strides.
fn dense(at: &mut At<'_>, mode: NormMode, tensors: &[(&str, Option<TensorId>)]) {
    if !over_rows(mode) {
        return;
    }
    for &(field, id) in tensors {
        let Some(id) = id else { continue };
        let tensor = at.tensor(id);
        at.rule(tensor.strides.dense(&tensor.dims), || format!("{field} {id} has strides {}, expected dense ones", tensor.strides));
    }
}

fn extents(at: &mut At<'_>, mode: NormMode, x: &[i64], scale: &[i64]) -> Option<Vec<i64>> {
    match statistics(mode, x, scale) {
        Ok(stats) => Some(stats),
        Err(message) => {
            at.fail(message);
            None
        }
    }
}

fn statistic(at: &mut At<'_>, field: &str, id: Option<TensorId>, extents: &[i64]) {
    if let Some(id) = id {
        at.extents(field, id, extents);
        at.type_is(field, id, DType::F32);
    }
}

fn like(field: &str, id: Option<TensorId>, scale: TensorId, at: &mut At<'_>) {
    if let Some(id) = id {
        let want = at.dims(scale).to_vec();
        at.extents(field, id, &want);
        at.strides_like(field, id, ("scale", scale));
        at.type_in(field, id, Class::Float);
    }
}

fn by_value(field: &str, id: TensorId, dtype: DType, at: &mut At<'_>) {
    let dims = at.tensor(id).dims.clone();
    at.rule(dims.elements() == Some(1), || format!("{field} {id} is {dims}, not one element"));
    at.type_is(field, id, dtype);
    at.host_value(field, id);
}

fn running_stats(at: &mut At<'_>, running: &RunningStats, extents: &[i64], mean_of: Option<TensorId>) {
    let RunningStats { factor, mean, variance, next_mean, next_variance } = *running;
    by_value("factor", factor, DType::F32, at);
    for (field, id) in
        [("running_mean", mean), ("running_variance", variance), ("next_running_mean", next_mean), ("next_running_variance", next_variance)]
    {
        statistic(at, field, Some(id), extents);
        if let Some(like) = mean_of {
            at.similar(field, id, ("mean", like));
        }
    }
}

fn channels(x: &[i64]) -> Vec<i64> {
    x.iter().enumerate().map(|(axis, &n)| if axis == 1 { n } else { 1 }).collect()
}

pub(super) fn gen_stats(at: &mut At<'_>, op: &GenStats) {
    at.type_in("x", op.x, Class::Float);
    at.compute_in(op.compute, Class::Float);
    let x = at.dims(op.x).to_vec();
    if at.rule(x.len() >= 2, || format!("x has {} axes, expected at least 2", x.len())) {
        for (field, id) in [("sum", op.sum), ("square_sum", op.square_sum)] {
            statistic(at, field, Some(id), &channels(&x));
        }
    }
}

pub(super) fn bn_finalize(at: &mut At<'_>, op: &BnFinalize) {
    at.compute_in(op.compute, Class::Float);
    let sum = at.dims(op.sum).to_vec();
    let want = channels(&sum);
    if !at.rule(sum.len() >= 2 && sum == want, || format!("sum {} is not (1, c, 1, …)", op.sum)) {
        return;
    }
    for (field, id) in [
        ("sum", op.sum),
        ("square_sum", op.square_sum),
        ("scale", op.scale),
        ("bias", op.bias),
        ("mean", op.mean),
        ("inv_variance", op.inv_variance),
        ("eq_scale", op.eq_scale),
        ("eq_bias", op.eq_bias),
    ] {
        statistic(at, field, Some(id), &want);
    }
    at.similar("square_sum", op.square_sum, ("sum", op.sum));
    at.similar("eq_bias", op.eq_bias, ("eq_scale", op.eq_scale));
    for (field, id) in [("bias", op.bias), ("mean", op.mean), ("inv_variance", op.inv_variance)] {
        at.similar(field, id, ("scale", op.scale));
    }
    by_value("epsilon", op.epsilon, DType::F32, at);
    by_value("count", op.count, DType::I64, at);
    running_stats(at, &op.running, &want, Some(op.mean));
}

pub(super) fn bn_backward_weights(at: &mut At<'_>, op: &BnBackwardWeights) {
    at.type_in("x", op.x, Class::Float);
    at.type_in("dy", op.dy, Class::Float);
    at.compute_in(op.compute, Class::Float);
    let x = at.dims(op.x).to_vec();
    at.extents("dy", op.dy, &x);
    if at.rule(x.len() >= 2, || format!("x has {} axes, expected at least 2", x.len())) {
        for (field, id) in [
            ("scale", op.scale),
            ("mean", op.mean),
            ("inv_variance", op.inv_variance),
            ("dscale", op.dscale),
            ("dbias", op.dbias),
            ("eq_scale_dy", op.eq_scale_dy),
            ("eq_scale_x", op.eq_scale_x),
            ("eq_bias", op.eq_bias),
        ] {
            statistic(at, field, Some(id), &channels(&x));
        }
    }
}
