//! The entry points of the kernel sources: the `__global__` functions that launches name.

use std::ffi::CStr;
use std::fmt::{self, Display};

/// A `__global__` function of a kernel source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryPoint {
    /// Computes the forward pass. The WGMMA and the `mma.sync` kernel sources each have this function.
    Forward,
    /// Lists the query tiles for the forward kernel, for packed sequences and split-KV. It runs before the forward kernel.
    TileList,
    /// Merges the splits of split-KV. It runs after the forward kernel.
    Combine,
    /// Creates the block-sparse index lists of masks that read tensors. It runs before the kernels of a forward or backward pass.
    BlockLists,
    /// Computes the backward pass with `wgmma`.
    Backward,
    /// Finds the bounds of keys and values that determine the fixed-point scales of dQ. It runs before the other backward kernels.
    BackwardBounds,
    /// Computes the log-sum-exp and delta (the sum of `o` times `d_o`) of each row. It runs before the backward kernels of either family.
    BackwardPreprocess,
    /// Converts the f32 dQ accumulator to the element type of `dq`, for head dims for which the main backward kernel does not do so.
    ConvertDq,
    /// Computes dQ with `mma.sync`.
    BackwardDq,
    /// Computes dK, dV and gradients of parameters with `mma.sync`.
    BackwardDkv,
    /// Computes the gradient of the sinks in a fixed order: in the `mma.sync` family of kernels, and in deterministic passes of the WGMMA kernels.
    SinkGradient,
    /// Sums the partial sums of a parameter's gradient in a fixed order, in deterministic passes.
    ReduceGradient,
    /// Rounds the f32 gradient of a parameter to its element type.
    ConvertGradient,
}

impl EntryPoint {
    /// Returns the name of the function in the kernel source.
    pub fn name(self) -> &'static CStr {
        match self {
            EntryPoint::Forward => c"attention_forward",
            EntryPoint::TileList => c"attention_tile_list",
            EntryPoint::Combine => c"attention_combine",
            EntryPoint::BlockLists => c"attention_block_lists",
            EntryPoint::Backward => c"attention_backward",
            EntryPoint::BackwardBounds => c"attention_backward_bounds",
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
