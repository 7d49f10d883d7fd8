//! Parameter gradients summed in a fixed order: each warp writes a partial sum to its own memory, and a kernel sums these.

use crate::backward::{Along, Backward};
use crate::unsupported::Check;
use sdpa_core::expr::Axis;

/// The largest size in bytes of the partial sums of all parameter gradients of a pass.
pub(crate) const MOST_PARTIAL_BYTES: i64 = 1 << 30;

/// The partial sums of the gradient of one parameter: (batch, heads_q, slots, inner) numbers, f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WarpPartials {
    /// Number of batch entries and number of query heads. Each head of each batch entry has its own partial sums.
    pub(crate) rows: [i64; 2],
    /// Whether the gradient has a batch axis, and whether it has a head axis. Over an axis that it lacks, partial sums are added.
    pub(crate) spans: [bool; 2],
    /// Number of partial sums per head of a batch entry: one for each warp, which owns 16 keys. It is 1 if the parameter has a key axis,
    /// because each key then belongs to one warp.
    pub(crate) slots: i64,
    /// Number of elements of the gradient for one head of one batch entry.
    pub(crate) inner: i64,
    /// Whether the lanes of a warp add to the same element of the partial sum; otherwise each element belongs to one thread.
    pub(crate) shared: bool,
}

impl WarpPartials {
    /// Returns the partial sums of the gradient of `along`, for extents (batch, heads_q, seq_q, seq_kv) and KV blocks of `keys` keys.
    pub(crate) fn of(along: &Along, [batch, heads, seq_q, seq_kv]: [i64; 4], keys: u32) -> WarpPartials {
        let has = |axis| !along.axes.is_table() && along.axes.has(axis);
        let slots = if has(Axis::K) { 1 } else { seq_kv.unsigned_abs().next_multiple_of(keys.into()) as i64 / 16 };
        let extent = |axis, extent| if has(axis) { extent } else { 1 };
        let inner = if along.axes.is_table() { along.axes.extents().product() } else { extent(Axis::Q, seq_q) * extent(Axis::K, seq_kv) };
        WarpPartials { rows: [batch, heads], spans: [has(Axis::Batch), has(Axis::Head)], slots, inner, shared: !has(Axis::K) }
    }

    /// Returns whether each partial sum is already an element of the gradient, so that nothing remains to be summed.
    pub(crate) fn is_whole(&self) -> bool {
        self.slots == 1 && self.rows.iter().zip(self.spans).all(|(extent, spans)| spans || *extent == 1)
    }

    /// Returns the size of the partial sums in bytes; saturates.
    pub(crate) fn bytes(&self) -> i64 {
        let [batch, heads] = self.rows;
        [batch, heads, self.slots, self.inner].into_iter().fold(4, i64::saturating_mul)
    }

    /// Returns the number of elements of the gradient.
    pub(crate) fn elements(&self) -> i64 {
        self.rows.iter().zip(self.spans).filter(|(_, spans)| *spans).map(|(extent, _)| extent).product::<i64>() * self.inner
    }
}

impl Backward {
    /// Iterates over the parameters whose gradients are computed by kernels with KV blocks of `keys` keys. Yields the partial sums of a gradient that
    /// is summed in a fixed order, and `None` for a gradient that kernels write directly.
    pub(crate) fn warp_partials(&self, keys: u32) -> impl Iterator<Item = Option<WarpPartials>> + '_ {
        let of = move |along| {
            Some(WarpPartials::of(along, self.forward.extents, keys)).filter(|partials| self.deterministic && !partials.is_whole())
        };
        self.along.iter().map(of)
    }

    /// Checks the size of the partial sums of all parameter gradients.
    pub(crate) fn check_partials(&self, check: &mut Check, keys: u32) {
        let bytes = self.warp_partials(keys).flatten().fold(0, |bytes: i64, partials| bytes.saturating_add(partials.bytes()));
        let names: Vec<&str> = self.along.iter().map(|along| along.name.as_str()).collect();
        let field = format!("deterministic, gradients of {}", names.join(", "));
        let limit = format!("at most {MOST_PARTIAL_BYTES} bytes of partial sums per warp, which are added in a fixed order");
        check.that(bytes <= MOST_PARTIAL_BYTES, &field, format!("{bytes} bytes"), limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::DType;
    use sdpa_core::expr::Axes;

    #[test]
    fn partial_sums_are_as_many_as_the_axes_say() {
        let of =
            |axes: Axes| WarpPartials::of(&Along { name: String::new(), dtype: DType::F32, axes, reads: Vec::new() }, [3, 5, 40, 70], 64);
        let axes = |all: &[Axis]| all.iter().fold(Axes::NONE, |axes, axis| axes.with(*axis));
        // Two KV blocks of 64 keys with four warps each give eight slots.
        let scalar = of(Axes::NONE);
        assert_eq!((scalar.slots, scalar.inner, scalar.elements(), scalar.bytes()), (8, 1, 1, 4 * 3 * 5 * 8));
        let heads = of(axes(&[Axis::Head, Axis::Q]));
        assert_eq!((heads.slots, heads.inner, heads.elements(), heads.bytes()), (8, 40, 5 * 40, 4 * 3 * 5 * 8 * 40));
        let keys = of(axes(&[Axis::K]));
        assert_eq!((keys.slots, keys.inner, keys.shared, keys.is_whole()), (1, 70, false, false));
        assert!(of(axes(&Axis::ALL)).is_whole());
    }
}
