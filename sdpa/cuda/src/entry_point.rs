//! The entry points of the kernel sources. A launch identifies its kernel by one.

use std::ffi::CStr;
use std::fmt::{self, Display};

/// A `__global__` function of a kernel source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryPoint {
    /// The forward pass, of both families.
    Forward,
    /// Lists query tiles before the forward kernel, for packed sequences and split-KV.
    TileList,
    /// Merges the splits of split-KV, after the forward kernel.
    Combine,
    /// Makes block-sparse index lists before either pass, for masks that read tensors.
    BlockLists,
    /// The backward pass with `wgmma`.
    Backward,
    /// The log-sum-exp and delta of each row, before either backward pass.
    BackwardPreprocess,
    /// Converts the dQ accumulator, for head dims whose main kernel does not do it.
    ConvertDq,
    /// dQ with `mma.sync`.
    BackwardDq,
    /// dK, dV and gradients of parameters with `mma.sync`.
    BackwardDkv,
    /// The gradient of the sinks with `mma.sync`.
    SinkGradient,
    /// Sums a gradient of a parameter in a fixed order, with `mma.sync`.
    ReduceGradient,
    /// Rounds a gradient of a parameter to its element type.
    ConvertGradient,
}

impl EntryPoint {
    /// Returns the name of the function in the source.
    pub fn name(self) -> &'static CStr {
        match self {
            EntryPoint::Forward => c"attention_forward",
            EntryPoint::TileList => c"attention_tile_list",
            EntryPoint::Combine => c"attention_combine",
            EntryPoint::BlockLists => c"attention_block_lists",
            EntryPoint::Backward => c"attention_backward",
            EntryPoint::BackwardPreprocess => c"attention_backward_preprocess",
            EntryPoint::ConvertDq => c"attention_convert_dq",
            EntryPoint::BackwardDq => c"attention_backward_dq",
            EntryPoint::BackwardDkv => c"attention_backward_dkv",
            EntryPoint::SinkGradient => c"attention_sink_gradient",
            EntryPoint::ReduceGradient => c"attention_reduce_gradient",
            EntryPoint::ConvertGradient => c"attention_convert_gradient",
        }
    }
}

impl Display for EntryPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().to_string_lossy())
    }
}
