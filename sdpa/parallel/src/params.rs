//! Values of declared parameters for one part of the problem.

use crate::problem::ParallelProblem;
use crate::schedule::Attend;
use sdpa_core::expr::{Axis, Declared, ParamKind};
use sdpa_core::half::{bf16, f16};
use sdpa_core::{Chunk, DROPOUT_OFFSET, F8E8M0, Param, ParamValue, Placement};

/// A parameter's value for one part: a part of a tensor, or a number.
#[derive(Debug)]
pub(crate) enum Owned {
    Scalar(f32),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
    I64(Vec<i64>),
    Bool(Vec<bool>),
    F8E8M0(Vec<F8E8M0>),
}

impl Owned {
    pub(crate) fn param<'a>(&'a self, name: &'a str) -> Param<'a> {
        let value = match self {
            Owned::Scalar(x) => ParamValue::Scalar(*x),
            Owned::F32(x) => x.into(),
            Owned::F16(x) => x.into(),
            Owned::BF16(x) => x.into(),
            Owned::I32(x) => x.into(),
            Owned::I64(x) => x.into(),
            Owned::Bool(x) => x.into(),
            Owned::F8E8M0(x) => x.into(),
        };
        Param::new(name, value)
    }
}

/// Returns the part of a tensor along each of its axes, outermost first; `None` if every part reads all of it.
pub(crate) fn chunks(kind: ParamKind, at: &Placement, extents: [i64; 4]) -> Option<Vec<(Axis, Chunk)>> {
    let ParamKind::Tensor { axes, dtype: _ } = kind else { return None };
    if axes.is_table() || axes.has_end() || !axes.iter().any(|axis| axis != Axis::Batch) {
        return None;
    }
    let of = |axis: Axis| match axis {
        Axis::Batch => Chunk::new(0, 1, axes.dims(extents)[0]),
        Axis::Head => Chunk::new(at.heads_q.start, 1, at.heads_q.end - at.heads_q.start),
        Axis::Q => at.q,
        Axis::K => at.k,
    };
    Some(axes.iter().map(|axis| (axis, of(axis))).collect())
}

/// Returns the indices of the part's elements in the whole tensor of a parameter, in memory order.
pub(crate) fn indices(kind: ParamKind, at: &Placement, extents: [i64; 4]) -> Vec<usize> {
    let ParamKind::Tensor { axes, dtype: _ } = kind else { return vec![0] };
    let dims = axes.dims(extents);
    let Some(chunks) = chunks(kind, at, extents) else {
        return (0..axes.elements(extents).max(0).unsigned_abs() as usize).collect();
    };
    let along = |axis: Axis| -> Vec<i64> {
        let chunk = chunks.iter().find(|(own, _)| *own == axis).map_or(Chunk::new(0, 1, 1), |(_, chunk)| *chunk);
        (0..chunk.len).map(|i| chunk.at(i)).collect()
    };
    let [batch, head, q, k] = Axis::ALL.map(along);
    let mut all = Vec::with_capacity(batch.len() * head.len() * q.len() * k.len());
    for b in &batch {
        for h in &head {
            for i in &q {
                all.extend(k.iter().map(|j| (((b * dims[1] + h) * dims[2] + i) * dims[3] + j).unsigned_abs() as usize));
            }
        }
    }
    all
}

/// Returns the part of a parameter's value. `dropout_offset` is added to the parameter [`DROPOUT_OFFSET`].
pub(crate) fn part(declared: &Declared, value: ParamValue<'_>, at: &Placement, extents: [i64; 4], dropout_offset: i64) -> Owned {
    fn pick<T: Copy>(all: &[T], indices: &[usize]) -> Vec<T> {
        indices.iter().filter_map(|&i| all.get(i).copied()).collect()
    }
    let indices = indices(declared.kind, at, extents);
    match value {
        ParamValue::Scalar(x) => Owned::Scalar(x),
        ParamValue::F32(x) => Owned::F32(pick(x, &indices)),
        ParamValue::F16(x) => Owned::F16(pick(x, &indices)),
        ParamValue::BF16(x) => Owned::BF16(pick(x, &indices)),
        ParamValue::I32(x) => Owned::I32(pick(x, &indices)),
        ParamValue::I64(x) if declared.name == DROPOUT_OFFSET => {
            Owned::I64(x.iter().map(|offset| offset.wrapping_add(dropout_offset)).collect())
        }
        ParamValue::I64(x) => Owned::I64(pick(x, &indices)),
        ParamValue::Bool(x) => Owned::Bool(pick(x, &indices)),
        ParamValue::F8E8M0(x) => Owned::F8E8M0(pick(x, &indices)),
    }
}

impl ParallelProblem {
    /// Returns the part of a declared tensor that a step reads, along each axis of the tensor, outermost first. `None` if the step reads all of it, as it
    /// does for tables.
    pub fn parameter(&self, declared: &Declared, attend: &Attend) -> Option<Vec<Chunk>> {
        let found = chunks(declared.kind, &self.placement(attend), self.problem().extents())?;
        Some(found.into_iter().map(|(_, chunk)| chunk).collect())
    }
}
