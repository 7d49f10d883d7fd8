//! Rules of GEMMs, reductions, and ops that only move elements.

use super::{At, Class};
use crate::ir::op::{Matmul, Reduction, Reshape, Slice, Transpose};
use crate::ir::tensor::TensorId;
use crate::ir::ty::Dims;

pub(super) fn matmul(at: &mut At<'_>, op: &Matmul) {
    for (field, id) in [("a", op.a), ("b", op.b), ("c", op.c)] {
        at.type_in(field, id, Class::Number);
    }
    at.compute_in(op.compute, Class::Number);
    at.rule(!op.padding.is_some_and(f64::is_nan), || "padding is not a number".to_owned());
    let (a, b, c) = (at.dims(op.a).to_vec(), at.dims(op.b).to_vec(), at.dims(op.c).to_vec());
    let rank = a.len();
    if !at.rule(rank >= 2 && b.len() == rank && c.len() == rank, || {
        format!("a, b and c have ranks {rank}, {} and {}, expected one rank of at least 2", b.len(), c.len())
    }) {
        return;
    }
    at.rule(a[rank - 1] == b[rank - 2], || format!("a has {} inner elements, b {}", a[rank - 1], b[rank - 2]));
    at.rule(c[rank - 2] == a[rank - 2], || format!("c has {} rows, a {}", c[rank - 2], a[rank - 2]));
    at.rule(c[rank - 1] == b[rank - 1], || format!("c has {} columns, b {}", c[rank - 1], b[rank - 1]));
    for axis in 0..rank - 2 {
        let (a, b, c) = (a[axis], b[axis], c[axis]);
        if at.rule(a % b == 0 || a == 1, || format!("axis {axis} of b ({b}) does not divide that of a ({a})")) {
            at.rule(c == a.max(b), || format!("axis {axis} of c is {c}, not {}", a.max(b)));
        }
    }
    for (field, id) in [("m_override", op.m_override), ("n_override", op.n_override), ("k_override", op.k_override)] {
        let Some(id) = id else { continue };
        if at.rule(rank >= 3, || format!("{field} {id} needs a batch axis")) {
            let mut want = vec![1; rank];
            want[0] = c[0];
            at.extents(field, id, &want);
        }
        at.type_in(field, id, Class::Integer);
    }
}

pub(super) fn reduction(at: &mut At<'_>, op: &Reduction) {
    at.type_in("x", op.x, Class::Number);
    at.type_in("y", op.y, Class::Number);
    at.compute_in(op.compute, Class::Number);
    let (x, y) = (at.dims(op.x), at.dims(op.y));
    if at.rule(x.len() == y.len(), || format!("x has {} axes, y {}", x.len(), y.len())) {
        for (axis, (x, y)) in x.iter().zip(y).enumerate() {
            at.rule(x % y == 0, || format!("axis {axis} of y ({y}) does not divide that of x ({x})"));
        }
    }
}

pub(super) fn reshape(at: &mut At<'_>, op: &Reshape) {
    at.same_kind(op.x, op.y);
    let (x, y) = (at.tensor(op.x).dims.clone(), at.tensor(op.y).dims.clone());
    at.rule(x.elements() == y.elements(), || format!("x {x} and y {y} do not have the same number of elements"));
}

pub(super) fn transpose(at: &mut At<'_>, op: &Transpose) {
    at.type_like("y", op.y, ("x", op.x));
    let x = at.dims(op.x);
    let mut sorted = op.permutation.clone();
    sorted.sort_unstable();
    let permutes = sorted.iter().copied().eq(0..x.len() as i64);
    if at.rule(permutes, || format!("{} is not a permutation of the {} axes of x", Dims(op.permutation.clone()), x.len())) {
        let want: Vec<i64> = op.permutation.iter().map(|&axis| x[axis as usize]).collect();
        at.extents("y", op.y, &want);
    }
}

pub(super) fn slice(at: &mut At<'_>, op: &Slice) {
    at.type_like("y", op.y, ("x", op.x));
    let x = at.dims(op.x);
    let counts = [op.start.len(), op.limit.len(), op.step.len()];
    if !at.rule(counts == [x.len(); 3], || format!("got {counts:?} starts, limits and steps, expected {} of each", x.len())) {
        return;
    }
    let mut want = Vec::with_capacity(x.len());
    for (axis, &extent) in x.iter().enumerate() {
        let (start, limit, step) = (op.start[axis], op.limit[axis], op.step[axis]);
        let fits = at.rule(0 <= start && start < limit && limit <= extent, || {
            format!("the range {start}..{limit} is outside of axis {axis}, which has {extent} elements")
        });
        if at.rule(step >= 1, || format!("step {step} of axis {axis} is below 1")) && fits {
            want.push((limit - start - 1) / step + 1);
        }
    }
    if want.len() == x.len() {
        at.extents("y", op.y, &want);
    }
}

/// Returns the extents of `x` with the last one set to 1.
pub(super) fn rows(at: &At<'_>, x: TensorId) -> Vec<i64> {
    let mut dims = at.dims(x).to_vec();
    if let Some(last) = dims.last_mut() {
        *last = 1;
    }
    dims
}
