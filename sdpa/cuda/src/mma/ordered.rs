//! Gradients of parameters that are added up in one order: each warp leaves what its scores give in a place of its own, and a kernel adds these up.

use super::cut::Cut;
use crate::backward::{Along, Backward};
use sdpa_core::expr::Axis;

/// Bytes that what warps leave may have, of all gradients of a pass together.
pub const MOST_LEFT_BYTES: i64 = 1 << 30;

/// What warps leave of one gradient: (batch, heads_q, slots, inner) numbers, f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    /// Batch entries and query heads.
    pub(crate) rows: [i64; 2],
    /// Which of these the gradient has elements of its own for.
    pub(crate) spans: [bool; 2],
    /// Warps that have keys, 16 each; 1 where the parameter spans keys, each of which is one warp's.
    pub(crate) slots: i64,
    /// Elements of the gradient of one head of one batch entry.
    pub(crate) inner: i64,
    /// Whether lanes of a warp share the numbers of an element; else a thread has them all.
    pub(crate) shared: bool,
}

impl Left {
    /// Of a gradient, in blocks of keys of this cut.
    pub(crate) fn of(along: &Along, [batch, heads, seq_q, seq_kv]: [i64; 4], cut: &Cut) -> Left {
        let has = |axis| !along.axes.is_table() && along.axes.has(axis);
        let slots = if has(Axis::K) { 1 } else { seq_kv.unsigned_abs().next_multiple_of(cut.own.into()) as i64 / 16 };
        let extent = |axis, extent| if has(axis) { extent } else { 1 };
        let inner = if along.axes.is_table() { along.axes.extents().product() } else { extent(Axis::Q, seq_q) * extent(Axis::K, seq_kv) };
        Left { rows: [batch, heads], spans: [has(Axis::Batch), has(Axis::Head)], slots, inner, shared: !has(Axis::K) }
    }

    /// Whether every number is an element of the gradient: nothing is left to add up.
    pub(crate) fn is_whole(&self) -> bool {
        self.slots == 1 && self.rows.iter().zip(self.spans).all(|(extent, spans)| spans || *extent == 1)
    }

    /// Bytes of all numbers, at most the largest i64.
    pub(crate) fn bytes(&self) -> i64 {
        let [batch, heads] = self.rows;
        [batch, heads, self.slots, self.inner].into_iter().fold(4, i64::saturating_mul)
    }

    /// Elements of the gradient.
    pub(crate) fn elements(&self) -> i64 {
        self.rows.iter().zip(self.spans).filter(|(_, spans)| *spans).map(|(extent, _)| extent).product::<i64>() * self.inner
    }
}

impl Backward {
    /// What warps leave of each gradient of a parameter, where these are added up in one order; `None` of one that they write as it is.
    pub(crate) fn left<'a>(&'a self, cut: &'a Cut) -> impl Iterator<Item = Option<Left>> + 'a {
        let of = |along| Some(Left::of(along, self.forward.extents, cut)).filter(|left| self.deterministic && !left.is_whole());
        self.along.iter().map(of)
    }

    /// Bytes of all of them.
    pub(crate) fn left_bytes(&self, cut: &Cut) -> i64 {
        self.left(cut).flatten().fold(0, |bytes, left| bytes.saturating_add(left.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::expr::Axes;
    use sdpa_core::{DType, Direction};

    #[test]
    fn warps_leave_as_much_as_the_axes_say() {
        let cut = Cut::of(Direction::Backward, DType::BF16, 64, 64).unwrap();
        let of = |axes: Axes| Left::of(&Along { name: String::new(), dtype: DType::F32, axes, reads: Vec::new() }, [3, 5, 40, 70], &cut);
        let axes = |all: &[Axis]| all.iter().fold(Axes::NONE, |axes, axis| axes.with(*axis));
        // Two blocks of 64 keys, of four warps each.
        let scalar = of(Axes::NONE);
        assert_eq!((scalar.slots, scalar.inner, scalar.elements(), scalar.bytes()), (8, 1, 1, 4 * 3 * 5 * 8));
        let heads = of(axes(&[Axis::Head, Axis::Q]));
        assert_eq!((heads.slots, heads.inner, heads.elements(), heads.bytes()), (8, 40, 5 * 40, 4 * 3 * 5 * 8 * 40));
        let keys = of(axes(&[Axis::K]));
        assert_eq!((keys.slots, keys.inner, keys.shared, keys.is_whole()), (1, 70, false, false));
        assert!(of(axes(&Axis::ALL)).is_whole());
    }
}
