//! Attention on Apple GPUs, for the `sdpa` crate: [`MetalExecutor`].
//!
//! ```
//! use metal_fallback::MetalExecutor;
//! use sdpa_core::{AttentionSpec, DType, Executor, Layout, Mask, Shape};
//!
//! let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
//! let problem = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).mask(Mask::causal()).validate()?;
//! match MetalExecutor::new().supports(&problem) {
//!     Ok(()) => println!("an Apple GPU is here and takes it"),
//!     Err(unsupported) => println!("{unsupported}"),
//! }
//! # Ok::<(), sdpa_core::SpecErrors>(())
//! ```
//!
//! # From a problem to kernels
//!
//! A [`Forward`] is a problem as plain data, and a [`Backward`] its gradient. Each makes a [`Pass`]: a list of plans to run in order. A [`Task`] adds
//! the bytes that they access of each operand. A [`Plan`] is a kernel and its dispatch: MSL source, grid, threadgroup memory and buffer table.
//! Kernels are the `.metal` files in `kernels/`, after a prelude that depends on a problem's types, dims, masks and score_mods. Lengths, strides,
//! bands and the scale are parameters of a call.
//!
//! A [`Runner`] runs passes. On Apple machines that is `apple::Gpu`, which [`system`] returns; elsewhere [`system`] returns why there is none. The
//! tests of the workspace have a runner over an emulation of MSL. The README and `docs/metal.md` of the repository list what was executed, and where.

#[cfg(target_vendor = "apple")]
pub mod apple;
mod backward;
mod captured;
mod dependencies;
mod error;
mod executor;
mod forward;
mod kernel;
mod kernels;
mod limits;
mod packed;
mod parameter;
mod params;
mod plan;
mod rows;
mod run;
mod sink;
mod source;
mod task;
mod tile_config;
mod unsupported;

pub use backward::{Along, Backward};
pub use dependencies::waits;
pub use error::Error;
pub use executor::MetalExecutor;
pub use forward::Forward;
pub use kernel::{Kernel, KernelCache, KernelKey, Math};
pub use kernels::Kernels;
pub use limits::Limits;
pub use packed::Tokens;
pub use params::Params;
pub use plan::{Binding, Operand, Pass, Plan, Scratch};
pub use run::{Call, Contents, Facts, Ran, Ready, Runner};
pub use sdpa_emit::Captured;
pub use task::Task;
pub use tile_config::{FRAGMENT, REGISTER_LIMIT, SIMD, THREADGROUP_BYTES, Tiles};
pub use unsupported::Unavailable;

use std::sync::Arc;

/// Returns this machine's Apple GPU as a runner.
///
/// # Errors
/// Fails if there is no GPU, or if the kernels do not run on it.
pub fn system() -> Result<Arc<dyn Runner>, Unavailable> {
    #[cfg(target_vendor = "apple")]
    let found = apple::Gpu::system().map(|gpu| Arc::new(gpu) as Arc<dyn Runner>);
    #[cfg(not(target_vendor = "apple"))]
    let found = Err(Unavailable::NoDevice { target_os: std::env::consts::OS.to_owned() });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_an_apple_gpu_is_told_so() {
        let told = system().map(|runner| runner.facts().name.clone());
        let other = matches!(&told, Err(Unavailable::NoDevice { target_os }) if target_os == std::env::consts::OS);
        assert_eq!(other, cfg!(not(target_vendor = "apple")), "{told:?}");
    }
}
