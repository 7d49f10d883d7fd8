//! What the Python package `sdpa` computes with: programs (score_mods and masks that were read), plans (a program made ready for tensors of some
//! layout), and calls of those by address.
//!
//! It knows neither PyTorch nor NumPy: memory comes in as addresses, and results are allocated by whoever calls.

// Methods have `self`, `py` and what Python passes.
#![allow(clippy::needless_pass_by_value, reason = "arguments of Python functions are owned")]

mod call;
mod chosen;
mod cuda;
mod error;
mod files;
mod kernels;
mod plan;
mod pool;
mod program;
mod tensor;

use pyo3::prelude::*;

/// The native half of the package.
#[pymodule]
#[pyo3(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    pool::loaded();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<program::Program>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<tensor::Exchange>()?;
    module.add_function(wrap_pyfunction!(cuda::use_libraries, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::cache_trace, module)?)?;
    module.add_function(wrap_pyfunction!(files::attach_plans, module)?)?;
    module.add_function(wrap_pyfunction!(files::save_plans, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::set_kernel_cache, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::kernel_cache, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::clear_kernel_cache, module)?)?;
    Ok(())
}
