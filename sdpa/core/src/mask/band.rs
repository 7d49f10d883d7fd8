//! Builds windows and prefixes as values of a trace.

use super::kept::length_of;
use super::{SEQ_LEN_KV, SEQ_LEN_Q};
use crate::expr::{Axis, Binary, Builder, Const, NodeId, Unary};

/// The point of the score matrix that a diagonal goes through.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Corner {
    /// Query 0 and key 0.
    Origin,
    /// The last query and the last key.
    Extents,
    /// The last query and key of each batch entry: from the declared lengths on the sides that have them, else from the extent.
    Lengths([bool; 2]),
}

/// Clamps a bound to what 32-bit indices can reach, which keeps the same keys.
fn bound(b: &mut Builder, value: i64) -> NodeId {
    b.konst(Const::I32(value.clamp(-i64::from(i32::MAX), i64::from(i32::MAX)) as i32))
}

pub(crate) fn window(b: &mut Builder, left: Option<i64>, right: Option<i64>, corner: Corner) -> NodeId {
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let distance = b.binary(Binary::Sub, k, q);
    let ends = match corner {
        Corner::Origin => None,
        Corner::Extents => Some([b.extent(Axis::Q), b.extent(Axis::K)]),
        Corner::Lengths([of_q, of_kv]) => Some([end(b, Axis::Q, of_q.then_some(SEQ_LEN_Q)), end(b, Axis::K, of_kv.then_some(SEQ_LEN_KV))]),
    };
    let distance = ends.map_or(distance, |[rows, keys]| {
        let shift = b.binary(Binary::Sub, keys, rows);
        b.binary(Binary::Sub, distance, shift)
    });
    let right = right.map(|right| {
        let right = bound(b, right);
        b.binary(Binary::Le, distance, right)
    });
    let left = left.map(|left| {
        let left = bound(b, left);
        let least = b.unary(Unary::Neg, left);
        b.binary(Binary::Gt, distance, least)
    });
    let both = [right, left].into_iter().flatten().reduce(|x, y| b.binary(Binary::And, x, y));
    both.unwrap_or_else(|| b.konst(Const::Bool(true)))
}

/// Returns the end of a batch entry along an axis: its length, clamped to the extent, or the extent.
fn end(b: &mut Builder, axis: Axis, length: Option<&str>) -> NodeId {
    let extent = b.extent(axis);
    let Some(name) = length else { return extent };
    let length = b.param(length_of(name));
    let none = b.konst(Const::I32(0));
    let length = b.binary(Binary::Max, length, none);
    b.binary(Binary::Min, length, extent)
}

pub(super) fn prefix(b: &mut Builder, len: i64) -> NodeId {
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let len = bound(b, len);
    let causal = b.binary(Binary::Le, k, q);
    let early = b.binary(Binary::Lt, k, len);
    b.binary(Binary::Or, causal, early)
}
