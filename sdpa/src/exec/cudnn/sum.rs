//! Sums of gradients after the attention plan: what they need in device memory, and what is bound to them.

use super::plan::PlannedSums;
use crate::error::Error;
use crate::lower::Sum;
use cudnn_graph::ir::Tensor;
use cudnn_graph::{Bindings, Buffer, DType, DeviceSlice, Plan, Stream};
use half::{bf16, f16};

/// The ones that a sum multiplies its terms with.
pub(super) fn ones(sum: &Sum, stream: &Stream) -> Result<Buffer, Error> {
    let terms = usize::try_from(sum.terms).unwrap_or(usize::MAX);
    let bytes = usize::try_from(sum.dtype.bytes(sum.terms.unsigned_abs())).unwrap_or(usize::MAX);
    let mut buffer = Buffer::new(stream.device(), bytes)?;
    // Terms are of these three types: see `lower::sum`.
    if sum.dtype == DType::F16 {
        buffer.upload(stream, 0, &vec![f16::ONE; terms])?;
    } else if sum.dtype == DType::BF16 {
        buffer.upload(stream, 0, &vec![bf16::ONE; terms])?;
    } else {
        buffer.upload(stream, 0, &vec![1f32; terms])?;
    }
    Ok(buffer)
}

/// Where the sums of one gradient read and write, in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Between two sums.
    pub(super) between: DeviceSlice,
    /// The last one's result.
    pub(super) result: DeviceSlice,
    /// The same in the type of the gradient.
    pub(super) rounded: DeviceSlice,
}

impl PlannedSums {
    /// Pieces of the workspace, as `take` gives them.
    pub(super) fn room(&self, mut take: impl FnMut(u64) -> DeviceSlice) -> Room {
        let bytes = |tensor: Option<&Tensor>| tensor.map_or(0, |t| t.dtype.bytes(t.dims.0.iter().product::<i64>().unsigned_abs()));
        let written = |step: Option<&(Sum, std::sync::Arc<Plan>)>| bytes(step.and_then(|(sum, _)| sum.graph.graph().get(sum.to)));
        let [between, result] = match &self.steps[..] {
            [first, .., last] => [written(Some(first)), written(Some(last))],
            steps => [0, written(steps.first())],
        };
        let (rounding, _) = &self.rounding;
        let rounded = bytes(rounding.graph.graph().get(rounding.to));
        Room { between: take(between), result: take(result), rounded: take(rounded) }
    }

    /// Each plan with what it reads and writes, first to last.
    pub(super) fn calls<'a>(
        &'a self,
        terms: DeviceSlice,
        room: Room,
        ones: impl Iterator<Item = DeviceSlice>,
    ) -> Vec<(&'a Plan, Bindings)> {
        let last = self.steps.len().saturating_sub(1);
        let step = |(n, ((sum, plan), ones)): (usize, (&'a (Sum, std::sync::Arc<Plan>), DeviceSlice))| {
            let from = if n == 0 { terms } else { room.between };
            let to = if n == last { room.result } else { room.between };
            (&**plan, Bindings::new().slice(sum.from, from).slice(sum.ones, ones).slice(sum.to, to))
        };
        let (rounding, plan) = &self.rounding;
        let rounded = (&**plan, Bindings::new().slice(rounding.from, room.result).slice(rounding.to, room.rounded));
        self.steps.iter().zip(ones).enumerate().map(step).chain([rounded]).collect()
    }
}
