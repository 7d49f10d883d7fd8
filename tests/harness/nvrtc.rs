//! NVIDIA's run-time compiler, for whatever is compiled for a GPU without one.

use crate::golden::repository;
use sdpa_driver::Nvrtc;
use std::path::PathBuf;

/// Loads it: from where `SDPA_NVRTC` says, from beside the offline runtimes of cuDNN, from where the system finds it.
///
/// # Errors
/// Why it is not there.
pub fn find() -> Result<Nvrtc, String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
    let beside = target.join("cudnn/9.27/nvidia/cu13/lib");
    let beside = (std::env::var_os("SDPA_NVRTC").is_none() && beside.exists()).then_some(beside);
    Nvrtc::load(beside.as_deref()).map_err(|e| format!("{e}; scripts/setup-tests.sh installs one, SDPA_NVRTC names another"))
}
