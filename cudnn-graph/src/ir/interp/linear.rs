//! GEMMs and reductions.

use super::axes::{count, each, place};
use super::scalar::least;
use super::{InterpError, State, accumulate};
use crate::ir::op::{Matmul, Reduction, ReductionMode};

/// Computes `c[.., i, j] = Σ_k a[.., i, k] · b[.., k, j]`, in the order of `k`. Along a leading axis, index `i` of `c` reads index `i` of an operand
/// of the same extent and 0 of one of extent 1. Of a shorter `b` it reads `i / (a's extent / b's extent)`, so adjacent heads share one. Rows, columns
/// and inner elements past an override are invalid: such rows and columns are the padding value, or 0.
pub(super) fn matmul(state: &mut State<'_>, op: &Matmul) -> Result<(), InterpError> {
    let dims = state.dims(op.c)?;
    let (a, b) = (state.value(op.a)?, state.value(op.b)?);
    let overrides = [op.m_override, op.n_override, op.k_override];
    let [m, n, k] = overrides.map(|id| state.optional(id));
    let (m, n, k) = (m?, n?, k?);
    let batch_axes = dims.len().saturating_sub(2);
    let inner = a.dims.last().copied().unwrap_or(0);
    let shared =
        |have: &[i64], index: &[i64]| -> Vec<i64> { (0..batch_axes).map(|axis| index[axis] / (dims[axis] / have[axis])).collect() };
    let mut c = Vec::with_capacity(count(&dims));
    each(&dims, |index| {
        let (i, j) = (index[batch_axes], index[batch_axes + 1]);
        let limit = |value: Option<&super::Value>, all: i64| value.map_or(all, |v| (v.data[index[0] as usize] as i64).min(all));
        if i >= limit(m, i64::MAX) || j >= limit(n, i64::MAX) {
            c.push(op.padding.unwrap_or(0.0));
            return;
        }
        let (in_a, in_b) = (shared(&a.dims, index), shared(&b.dims, index));
        let mut sum = 0.0;
        for k in 0..limit(k, inner) {
            let left = a.data[place(&a.dims, in_a.iter().copied().chain([i, k]))];
            let right = b.data[place(&b.dims, in_b.iter().copied().chain([k, j]))];
            sum = accumulate(state.precision, op.compute, sum, left * right);
        }
        c.push(sum);
    });
    state.store(op.c, c)
}

/// Reduces the neighbours `j·g .. (j+1)·g` of `x` to element `j` of `y` along each axis, where `g` is the ratio of their extents.
pub(super) fn reduction(state: &mut State<'_>, op: &Reduction) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let dims = state.dims(op.y)?;
    let start = match op.mode {
        ReductionMode::Add => 0.0,
        // Extremes start from NaN, to which every number is preferred.
        ReductionMode::Min | ReductionMode::Max | ReductionMode::Amax => f64::NAN,
        ReductionMode::Mul => 1.0,
    };
    let mut y = vec![start; count(&dims)];
    let mut from = x.data.iter().map(|&x| state.precision.convert(x, op.compute));
    each(&x.dims, |index| {
        let folds = index.iter().zip(&x.dims).zip(&dims).map(|((&i, &x), &y)| i / (x / y));
        let (into, Some(x)) = (&mut y[place(&dims, folds)], from.next()) else { return };
        let folded = match op.mode {
            ReductionMode::Add => *into + x,
            ReductionMode::Mul => *into * x,
            ReductionMode::Min => least(*into, x),
            ReductionMode::Max => -least(-*into, -x),
            ReductionMode::Amax => -least(-*into, -x.abs()),
        };
        *into = state.precision.convert(folded, op.compute);
    });
    state.store(op.y, y)
}
