//! Rules of convolutions and of pooling.

use super::{At, Class};
use crate::ir::op::{
    ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry, ResampleBackward, ResampleForward, ResampleMode, Upsample, Window,
};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn forward(at: &mut At<'_>, op: &ConvForward) {
    check(at, &op.geometry, op.compute, ("x", op.x), ("w", op.w), ("y", op.y));
}

pub(super) fn backward_data(at: &mut At<'_>, op: &ConvBackwardData) {
    check(at, &op.geometry, op.compute, ("dx", op.dx), ("w", op.w), ("dy", op.dy));
}

pub(super) fn backward_filter(at: &mut At<'_>, op: &ConvBackwardFilter) {
    check(at, &op.geometry, op.compute, ("x", op.x), ("dw", op.dw), ("dy", op.dy));
}

type Named = (&'static str, TensorId);

fn check(at: &mut At<'_>, geometry: &ConvGeometry, compute: DType, x: Named, w: Named, y: Named) {
    for (field, id) in [x, w, y] {
        at.type_in(field, id, Class::Number);
    }
    at.compute_in(compute, Class::Number);
    let (dx, dw, dy) = (at.dims(x.1).to_vec(), at.dims(w.1).to_vec(), at.dims(y.1).to_vec());
    let ranks = (3..=5).contains(&dx.len()) && dw.len() == dx.len() && dy.len() == dx.len();
    if !at.rule(ranks, || {
        format!("{}, {} and {} have ranks {}, {} and {}, expected one rank from 3 to 5", x.0, w.0, y.0, dx.len(), dw.len(), dy.len())
    }) {
        return;
    }
    for (field, id) in [x, y] {
        let tensor = at.tensor(id);
        at.rule(!tensor.strides.overlap(&tensor.dims), || format!("{field} {id} has overlapping strides {}", tensor.strides));
    }
    let filter = at.tensor(w.1);
    at.rule(filter.strides.dense(&filter.dims), || format!("{} {} has strides {}, expected dense ones", w.0, w.1, filter.strides));
    let axes = dx.len() - 2;
    let ConvGeometry { stride, dilation, pre_padding, post_padding } = geometry;
    let lists = [("stride", stride, 1), ("dilation", dilation, 1), ("pre_padding", pre_padding, 0), ("post_padding", post_padding, 0)];
    let sound = numbers(at, axes, &lists);
    at.rule(dy[0] == dx[0], || format!("{} has {} images, {} has {}", y.0, dy[0], x.0, dx[0]));
    at.rule(dy[1] == dw[0], || format!("{} has {} channels, but {} has {} filters", y.0, dy[1], w.0, dw[0]));
    if at.rule(dx[1] % dw[1] == 0, || format!("{} has {} channels, expected a multiple of the {} channels of {}", x.0, dx[1], dw[1], w.0)) {
        let groups = dx[1] / dw[1];
        at.rule(dw[0] % groups == 0, || format!("{} has {} filters, expected a multiple of the {groups} groups", w.0, dw[0]));
    }
    if !sound {
        return;
    }
    for axis in 0..axes {
        let want = geometry.outputs(axis, dx[axis + 2], dw[axis + 2]);
        spatial(at, axis, y.0, dy[axis + 2], want, || format!("the filter of {} is longer than the padded axis", dw[axis + 2]));
    }
}

/// Checks lists of one number per spatial axis, each with its least value.
fn numbers(at: &mut At<'_>, axes: usize, lists: &[(&str, &Vec<i64>, i64)]) -> bool {
    let mut sound = true;
    for &(name, list, least) in lists {
        sound &= at.rule(list.len() == axes, || format!("{name} has {} numbers, expected {axes}, one per spatial axis", list.len()));
        if let Some(wrong) = list.iter().find(|&&n| n < least || n > i64::from(i32::MAX)) {
            at.fail(format!("{name} has {wrong}, expected numbers from {least} to {}", i32::MAX));
            sound = false;
        }
    }
    sound
}

fn spatial(at: &mut At<'_>, axis: usize, field: &str, got: i64, want: Option<i64>, too_long: impl FnOnce() -> String) {
    match want {
        Some(want) => {
            at.rule(got == want, || format!("{field} has {got} elements along spatial axis {axis}, expected {want}"));
        }
        None => at.fail(format!("spatial axis {axis}: {}", too_long())),
    }
}

pub(super) fn resample_forward(at: &mut At<'_>, op: &ResampleForward) {
    windows(at, &op.window, op.compute, ("x", op.x), ("y", op.y));
    index(at, op.mode, op.index, op.y);
}

pub(super) fn resample_backward(at: &mut At<'_>, op: &ResampleBackward) {
    windows(at, &op.window, op.compute, ("dx", op.dx), ("dy", op.dy));
    index(at, op.mode, op.index, op.dy);
    at.rule(op.mode != ResampleMode::Max || op.index.is_some(), || "index is missing: the mode max needs it".to_owned());
    at.rule(op.x.is_some() == op.y.is_some(), || "x and y are given together or not at all".to_owned());
    for (field, id, like) in [("x", op.x, op.dx), ("y", op.y, op.dy)] {
        if let Some(id) = id {
            let like = at.dims(like).to_vec();
            at.extents(field, id, &like);
            at.type_in(field, id, Class::Number);
        }
    }
}

/// cuDNN takes other types and a third spatial axis too, but its kernels are for two axes of f32.
pub(super) fn upsample(at: &mut At<'_>, op: &Upsample) {
    for (field, id) in [("x", op.x), ("y", op.y)] {
        at.type_is(field, id, DType::F32);
    }
    at.compute_in(op.compute, Class::F32);
    let x = at.dims(op.x).to_vec();
    if at.rule(x.len() == 4, || format!("x has rank {}, expected 4", x.len())) {
        let doubled: Vec<i64> = x.iter().enumerate().map(|(axis, n)| if axis < 2 { *n } else { n.saturating_mul(2) }).collect();
        at.extents("y", op.y, &doubled);
    }
}

fn index(at: &mut At<'_>, mode: ResampleMode, index: Option<TensorId>, like: TensorId) {
    let Some(id) = index else { return };
    at.rule(mode == ResampleMode::Max, || format!("index is {id}, expected none: only the mode max has an index"));
    let like = at.dims(like).to_vec();
    at.extents("index", id, &like);
    at.type_in("index", id, Class::Integer);
}

fn windows(at: &mut At<'_>, window: &Window, compute: DType, x: Named, y: Named) {
    for (field, id) in [x, y] {
        at.type_in(field, id, Class::Number);
    }
    at.compute_in(compute, Class::Number);
    let (dx, dy) = (at.dims(x.1).to_vec(), at.dims(y.1).to_vec());
    let ranks = (3..=5).contains(&dx.len()) && dy.len() == dx.len();
    if !at.rule(ranks, || format!("{} and {} have ranks {} and {}, expected one rank from 3 to 5", x.0, y.0, dx.len(), dy.len())) {
        return;
    }
    let axes = dx.len() - 2;
    let Window { extent, stride, pre_padding, post_padding } = window;
    let lists = [("window", extent, 1), ("stride", stride, 1), ("pre_padding", pre_padding, 0), ("post_padding", post_padding, 0)];
    let mut sound = numbers(at, axes, &lists);
    at.rule(dy[..2] == dx[..2], || format!("{} has {:?} images and channels, {} has {:?}", y.0, &dy[..2], x.0, &dx[..2]));
    for (name, padding) in [("pre_padding", pre_padding), ("post_padding", post_padding)] {
        for (padding, extent) in padding.iter().zip(extent) {
            sound &= at.rule(padding < extent, || format!("{name} has {padding}, expected less than the window's extent of {extent}"));
        }
    }
    if !sound {
        return;
    }
    for axis in 0..axes {
        let want = window.outputs(axis, dx[axis + 2]);
        spatial(at, axis, y.0, dy[axis + 2], want, || format!("the window of {} is longer than the padded axis", window.extent[axis]));
    }
}
