//! Kernels for NVIDIA GPUs without one: an executor over the library `tests/emulated`, which compiles them for the CPU and runs them.

use sdpa::cuda::{CudaExecutor, CudaOptions};
use std::path::PathBuf;

const FILE: &str = "libemulated.so";

/// Where the library is: beside this program or one folder above, as cargo lays them out.
///
/// # Errors
/// That it is not built.
pub fn find() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let file = program.ancestors().skip(1).take(2).map(|folder| folder.join(FILE)).find(|file| file.exists());
    file.ok_or_else(|| "the emulation of CUDA is not built; cargo build --package emulated builds it".to_owned())
}

/// An executor whose driver and compiler are the library's.
///
/// # Errors
/// That it is not built, that there is no clang.
pub fn executor() -> Result<CudaExecutor, String> {
    let file = find()?;
    let options = CudaOptions { driver: Some(file.clone()), nvrtc: Some(file), ..CudaOptions::default() };
    CudaExecutor::new(options).map_err(|e| e.to_string())
}
