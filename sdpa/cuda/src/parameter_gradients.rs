//! Gradients of declared parameters in the schedule of a backward pass: kernels add to f32 accumulators, or to the partial sums of warps, which
//! another kernel adds in a fixed order. A last kernel rounds accumulators to other types.

use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::schedule::{Address, Builder, KernelId};
use crate::warp_partials::WarpPartials;
use crate::work::steps;
use sdpa_core::{DType, SINK};

/// Threads per block of the kernels that add and round.
const THREADS: u32 = 256;

/// The gradient of a declared parameter in a schedule: its destination and its f32 accumulator.
#[derive(Clone, Debug)]
pub(crate) struct ParameterGradient {
    dtype: DType,
    elements: i64,
    /// The caller's memory.
    to: Address,
    /// The f32 accumulator: the caller's memory, or a workspace slot that is rounded to the caller's memory.
    sum: Address,
    /// The partial sums of warps and where they are, if the order of the additions is fixed.
    partials: Option<(WarpPartials, Address)>,
}

impl ParameterGradient {
    /// Returns whether the accumulator is a workspace slot, which must be rounded to the caller's memory.
    fn is_rounded(&self) -> bool {
        self.dtype != DType::F32
    }

    /// Returns whether the main kernel adds to the caller's memory.
    pub(crate) fn is_added_in_place(&self) -> bool {
        !self.is_rounded() && self.partials.is_none()
    }

    /// Returns the address to which the main kernel adds: partial sums, or the accumulator.
    pub(crate) fn added(&self) -> Address {
        self.partials.map_or(self.sum, |(_, address)| address)
    }
}

impl Backward {
    /// Adds the slots of parameter gradients to the schedule, for kernels with KV blocks of `keys` keys, and returns the gradients. The gradient of
    /// the sinks is the last.
    pub(crate) fn parameter_gradients(&self, builder: &mut Builder<'_>, keys: u32) -> Vec<ParameterGradient> {
        let extents = self.forward.extents;
        let along = self.along.iter().zip(self.warp_partials(keys));
        let along = along.map(|(along, partials)| (along.name.as_str(), along.dtype, along.axes.dims(extents).iter().product(), partials));
        let all = along.chain(self.sink_gradient.map(|dtype| (SINK, dtype, extents[1], None)));
        all.map(|(name, dtype, elements, partials)| {
            let to = builder.gradient(name);
            let sum = if dtype == DType::F32 { to } else { builder.slot(format!("gradient of {name} in f32"), 4 * elements) };
            let partials = partials.map(|all: WarpPartials| (all, builder.slot(format!("gradient of {name}, of each warp"), all.bytes())));
            ParameterGradient { dtype, elements, to, sum, partials }
        })
        .collect()
    }

    /// Returns the address of the f32 accumulator of the sinks' gradient; [`Address::Null`] if this gradient is not computed.
    pub(crate) fn sink_gradient_of(&self, gradients: &[ParameterGradient]) -> Address {
        self.sink_gradient.and(gradients.last()).map_or(Address::Null, |gradient| gradient.sum)
    }

    /// Adds the launches that add partial sums in a fixed order.
    pub(crate) fn reduce_gradients(&self, builder: &mut Builder<'_>, kernel: KernelId, gradients: &[ParameterGradient]) {
        for (sum, partials, from) in
            gradients.iter().filter_map(|gradient| gradient.partials.map(|(partials, at)| (gradient.sum, partials, at)))
        {
            let [of_batch, of_heads] = partials.spans.map(u64::from);
            let lanes: i64 = if partials.shared { 32 } else { 1 };
            let [batch, heads] = partials.rows;
            let mut arguments = vec![builder.value(from), builder.value(sum)];
            arguments.extend([batch, heads, partials.slots, partials.inner].map(|size| builder.value(size)));
            arguments.extend([of_batch | of_heads << 1, lanes.cast_unsigned()].map(|number| builder.value(number)));
            builder.launch(kernel, EntryPoint::ReduceGradient, [steps(partials.elements() * lanes, THREADS), THREADS.into()], arguments);
        }
    }

    /// Adds the launches that round accumulators to the element types of their gradients.
    pub(crate) fn round_gradients(&self, builder: &mut Builder<'_>, kernel: KernelId, gradients: &[ParameterGradient]) {
        for gradient in gradients.iter().filter(|gradient| gradient.is_rounded()) {
            let is_f16 = u64::from(gradient.dtype == DType::F16);
            let addresses = [gradient.sum, gradient.to].map(|address| builder.value(address));
            let numbers = [gradient.elements.unsigned_abs(), is_f16].map(|number| builder.value(number));
            let grid = [steps(gradient.elements, THREADS), THREADS.into()];
            builder.launch(kernel, EntryPoint::ConvertGradient, grid, addresses.into_iter().chain(numbers));
        }
    }
}
