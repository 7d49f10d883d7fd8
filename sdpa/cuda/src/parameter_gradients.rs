//! Gradients of declared parameters in the schedule of a backward pass: kernels add to f32 accumulators, and another kernel rounds these
//! to other types.

use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::schedule::{Address, Builder, KernelId};
use crate::work::steps;
use sdpa_core::{DType, SINK};

/// Threads per block of the rounding kernel.
const THREADS: u32 = 256;

/// The gradient of a declared parameter in a schedule: its destination and its f32 accumulator.
#[derive(Clone, Debug)]
pub(crate) struct ParameterGradient {
    pub(crate) name: String,
    dtype: DType,
    elements: i64,
    /// The caller's memory.
    to: Address,
    /// The f32 accumulator: the caller's memory, or a workspace slot that is rounded to the caller's memory.
    pub(crate) sum: Address,
}

impl ParameterGradient {
    /// Returns whether the accumulator is a workspace slot, which must be rounded to the caller's memory.
    pub(crate) fn is_rounded(&self) -> bool {
        self.dtype != DType::F32
    }
}

impl Backward {
    /// Adds the accumulator slots of parameter gradients to the schedule, and returns the gradients. The gradient of the sinks is the
    /// last.
    pub(crate) fn parameter_gradients(&self, builder: &mut Builder<'_>) -> Vec<ParameterGradient> {
        let extents = self.forward.extents;
        let along = self.along.iter().map(|along| (along.name.as_str(), along.dtype, along.axes.dims(extents).iter().product()));
        let all = along.chain(self.sink_gradient.map(|dtype| (SINK, dtype, extents[1])));
        all.map(|(name, dtype, elements)| {
            let to = builder.gradient(name);
            let sum = if dtype == DType::F32 { to } else { builder.slot(format!("gradient of {name} in f32"), 4 * elements) };
            ParameterGradient { name: name.to_owned(), dtype, elements, to, sum }
        })
        .collect()
    }

    /// Returns the address of the f32 accumulator of the sinks' gradient; [`Address::Null`] if this gradient is not computed.
    pub(crate) fn sink_gradient_of(&self, gradients: &[ParameterGradient]) -> Address {
        self.sink_gradient.and(gradients.last()).map_or(Address::Null, |gradient| gradient.sum)
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
