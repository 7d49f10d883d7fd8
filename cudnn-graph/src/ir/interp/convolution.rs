//! Convolutions, pooling and upsampling.

use super::axes::{count, each, place};
use super::{InterpError, State, accumulate};
use crate::ir::op::{
    ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry, ResampleBackward, ResampleForward, ResampleMode, Upsample, Window,
};

/// Calls `f` with the position of each image element and filter element whose product is a term of the output element at `index`.
fn taps(geometry: &ConvGeometry, x: &[i64], w: &[i64], index: &[i64], mut f: impl FnMut(usize, usize)) {
    let group = index[1] / (w[0] / (x[1] / w[1]));
    each(&w[1..], |tap| {
        let mut at = vec![index[0], group * w[1] + tap[0]];
        for (axis, (&o, &t)) in index[2..].iter().zip(&tap[1..]).enumerate() {
            let i = o * geometry.stride[axis] + t * geometry.dilation[axis] - geometry.pre_padding[axis];
            if !(0..x[axis + 2]).contains(&i) {
                return;
            }
            at.push(i);
        }
        f(place(x, at), place(w, std::iter::once(index[1]).chain(tap.iter().copied())));
    });
}

/// Computes each output as the sum over its taps, in row-major order of the filter.
pub(super) fn forward(state: &mut State<'_>, op: &ConvForward) -> Result<(), InterpError> {
    let (x, w, dims) = (state.value(op.x)?, state.value(op.w)?, state.dims(op.y)?);
    let mut y = Vec::with_capacity(count(&dims));
    each(&dims, |index| {
        let mut sum = 0.0;
        taps(&op.geometry, &x.dims, &w.dims, index, |i, j| {
            sum = accumulate(state.precision, op.compute, sum, x.data[i] * w.data[j]);
        });
        y.push(sum);
    });
    state.store(op.y, y)
}

/// Adds `dy · w` of every tap to its image element.
pub(super) fn backward_data(state: &mut State<'_>, op: &ConvBackwardData) -> Result<(), InterpError> {
    let (dy, w, dims) = (state.value(op.dy)?, state.value(op.w)?, state.dims(op.dx)?);
    let mut dx = vec![0.0; count(&dims)];
    each(&dy.dims, |index| {
        let dy = dy.data[place(&dy.dims, index.iter().copied())];
        taps(&op.geometry, &dims, &w.dims, index, |i, j| {
            dx[i] = accumulate(state.precision, op.compute, dx[i], dy * w.data[j]);
        });
    });
    state.store(op.dx, dx)
}

/// Adds `dy · x` of every tap to its filter element.
pub(super) fn backward_filter(state: &mut State<'_>, op: &ConvBackwardFilter) -> Result<(), InterpError> {
    let (dy, x, dims) = (state.value(op.dy)?, state.value(op.x)?, state.dims(op.dw)?);
    let mut dw = vec![0.0; count(&dims)];
    each(&dy.dims, |index| {
        let dy = dy.data[place(&dy.dims, index.iter().copied())];
        taps(&op.geometry, &x.dims, &dims, index, |i, j| {
            dw[j] = accumulate(state.precision, op.compute, dw[j], dy * x.data[i]);
        });
    });
    state.store(op.dw, dw)
}

/// Returns the elements of the window of output `index`: the row-major position in the window, and in `x`.
fn members(window: &Window, x: &[i64], index: &[i64]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    each(&window.extent, |tap| {
        let inputs = index[2..].iter().zip(tap).enumerate().map(|(axis, (&o, &t))| o * window.stride[axis] + t - window.pre_padding[axis]);
        let inputs: Vec<i64> = inputs.collect();
        if inputs.iter().zip(&x[2..]).all(|(i, n)| (0..*n).contains(i)) {
            let at = index[..2].iter().copied().chain(inputs);
            found.push((place(&window.extent, tap.iter().copied()), place(x, at)));
        }
    });
    found
}

/// Returns the number by which the sum of a window is divided.
fn divisor(mode: ResampleMode, window: &Window, members: usize) -> f64 {
    match mode {
        ResampleMode::AverageIncludePadding => count(&window.extent) as f64,
        ResampleMode::AverageExcludePadding => members as f64,
        ResampleMode::Max => 1.0,
    }
}

/// The maximum is the first of equal elements. NaN counts as larger than every number.
pub(super) fn resample(state: &mut State<'_>, op: &ResampleForward) -> Result<(), InterpError> {
    let (x, dims) = (state.value(op.x)?, state.dims(op.y)?);
    let (mut y, mut positions) = (Vec::with_capacity(count(&dims)), Vec::with_capacity(count(&dims)));
    each(&dims, |index| {
        let members = members(&op.window, &x.dims, index);
        match op.mode {
            ResampleMode::Max => {
                let mut best = (0, f64::NEG_INFINITY);
                for (n, &(tap, at)) in members.iter().enumerate() {
                    let x = x.data[at];
                    if n == 0 || x > best.1 || (x.is_nan() && !best.1.is_nan()) {
                        best = (tap, x);
                    }
                }
                positions.push(best.0 as f64);
                y.push(best.1);
            }
            ResampleMode::AverageIncludePadding | ResampleMode::AverageExcludePadding => {
                let sum = members.iter().fold(0.0, |sum, &(_, at)| accumulate(state.precision, op.compute, sum, x.data[at]));
                y.push(state.precision.convert(sum / divisor(op.mode, &op.window, members.len()), op.compute));
            }
        }
    });
    state.store(op.y, y)?;
    state.store_optional(op.index, positions)
}

/// A maximum's gradient goes to the element that the index names, a mean's to every element of the window in equal parts.
pub(super) fn resample_backward(state: &mut State<'_>, op: &ResampleBackward) -> Result<(), InterpError> {
    let (dy, index, dims) = (state.value(op.dy)?, state.optional(op.index)?, state.dims(op.dx)?);
    let mut dx = vec![0.0; count(&dims)];
    each(&dy.dims, |output| {
        let here = place(&dy.dims, output.iter().copied());
        let members = members(&op.window, &dims, output);
        let share = dy.data[here] / divisor(op.mode, &op.window, members.len());
        for (tap, at) in members {
            if index.is_none_or(|index| index.data[here] == tap as f64) {
                dx[at] = accumulate(state.precision, op.compute, dx[at], share);
            }
        }
    });
    state.store(op.dx, dx)
}

/// Each result is the mean of four elements: along each axis the two neighbours of its position, which are one if the position is an element's.
pub(super) fn upsample(state: &mut State<'_>, op: &Upsample) -> Result<(), InterpError> {
    let (x, dims) = (state.value(op.x)?, state.dims(op.y)?);
    let mut y = Vec::with_capacity(count(&dims));
    each(&dims, |index| {
        let mut sum = 0.0;
        each(&[2, 2], |tap| {
            let source = |axis: usize| ((index[axis + 2] + tap[axis]) / 2).min(x.dims[axis + 2] - 1);
            let at = [index[0], index[1], source(0), source(1)];
            sum = accumulate(state.precision, op.compute, sum, x.data[place(&x.dims, at)]);
        });
        y.push(state.precision.convert(sum * 0.25, op.compute));
    });
    state.store(op.y, y)
}
