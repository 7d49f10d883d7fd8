//! Windows and prefixes as values of a trace.

use super::Align;
use crate::expr::{Axis, Binary, Builder, Const, NodeId, Unary};

/// Bounds past what 32-bit indices reach keep as much as these.
fn bound(b: &mut Builder, value: i64) -> NodeId {
    b.konst(Const::I32(value.clamp(-i64::from(i32::MAX), i64::from(i32::MAX)) as i32))
}

pub(super) fn window(b: &mut Builder, left: Option<i64>, right: Option<i64>, align: Align) -> NodeId {
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let distance = b.binary(Binary::Sub, k, q);
    let distance = match align {
        Align::TopLeft => distance,
        Align::BottomRight => {
            let (rows, keys) = (b.extent(Axis::Q), b.extent(Axis::K));
            let shift = b.binary(Binary::Sub, keys, rows);
            b.binary(Binary::Sub, distance, shift)
        }
    };
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

pub(super) fn prefix(b: &mut Builder, len: i64) -> NodeId {
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let len = bound(b, len);
    let causal = b.binary(Binary::Le, k, q);
    let early = b.binary(Binary::Lt, k, len);
    b.binary(Binary::Or, causal, early)
}
