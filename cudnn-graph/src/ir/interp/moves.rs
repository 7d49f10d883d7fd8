//! Ops that only move elements.

use super::axes::{each, place};
use super::{InterpError, State};
use crate::ir::op::{Reshape, ReshapeMode, Slice, Transpose};
use crate::ir::ty::{Dims, Strides};

/// Logical: the same row-major elements. Otherwise a view: an element of `y` is the element of `x` at the same memory offset, by the strides of both.
/// If several elements of `x` share an offset, the first one counts.
pub(super) fn reshape(state: &mut State<'_>, op: &Reshape) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let y = match op.mode {
        Some(ReshapeMode::Logical) => x.data.clone(),
        Some(ReshapeMode::ViewOnly) | None => {
            let (from, to) = (state.tensor(op.x)?, state.tensor(op.y)?);
            let mut memory: Vec<(i64, f64)> = offsets(&from.dims, &from.strides).into_iter().zip(x.data.iter().copied()).collect();
            // The sort is stable: the first of equal offsets stays first.
            memory.sort_by_key(|&(offset, _)| offset);
            let at = |offset: i64| {
                let first = memory.partition_point(|&(other, _)| other < offset);
                memory.get(first).filter(|found| found.0 == offset).map(|found| found.1)
            };
            let look = |offset| at(offset).ok_or_else(|| InterpError::View { at: state.at(), offset });
            offsets(&to.dims, &to.strides).into_iter().map(look).collect::<Result<_, _>>()?
        }
    };
    state.store(op.y, y)
}

/// Returns the memory offsets of all elements, row-major.
fn offsets(dims: &Dims, strides: &Strides) -> Vec<i64> {
    let mut all = Vec::new();
    each(&dims.0, |index| all.push(index.iter().zip(&strides.0).map(|(i, s)| i * s).sum()));
    all
}

/// Permutes axes: axis `i` of the result is axis `permutation[i]` of `x`.
pub(super) fn transpose(state: &mut State<'_>, op: &Transpose) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let mut y = Vec::with_capacity(x.data.len());
    let mut index_x = vec![0; x.dims.len()];
    each(&state.dims(op.y)?, |index| {
        for (&axis, &i) in op.permutation.iter().zip(index) {
            index_x[axis as usize] = i;
        }
        y.push(x.data[place(&x.dims, index_x.iter().copied())]);
    });
    state.store(op.y, y)
}

/// Slices per axis: index `i` of the result is index `start + i · step` of `x`.
pub(super) fn slice(state: &mut State<'_>, op: &Slice) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let mut y = Vec::new();
    each(&state.dims(op.y)?, |index| {
        let index_x = index.iter().zip(&op.start).zip(&op.step).map(|((i, start), step)| start + i * step);
        y.push(x.data[place(&x.dims, index_x)]);
    });
    state.store(op.y, y)
}
