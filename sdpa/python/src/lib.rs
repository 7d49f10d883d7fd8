//! The native module of the Python package `sdpa`. It has programs (parsed score_mods and masks), plans (a program that was prepared for tensors of some
//! layout), and calls of plans by address.
//!
//! It depends neither on PyTorch nor on NumPy: memory is passed as addresses, and the caller allocates results.

// Methods have `self`, `py` and the arguments from Python.
#![allow(clippy::needless_pass_by_value, reason = "arguments of Python functions are owned")]

mod call;
mod chosen;
mod cuda;
mod error;
mod files;
mod kernels;
mod parallel;
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
    module.add_class::<parallel::Parallel>()?;
    module.add_class::<tensor::Exchange>()?;
    module.add_function(wrap_pyfunction!(parallel::shards, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::use_libraries, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::cache_trace, module)?)?;
    module.add_function(wrap_pyfunction!(files::attach_plans, module)?)?;
    module.add_function(wrap_pyfunction!(files::save_plans, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::set_kernel_cache, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::kernel_cache, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::clear_kernel_cache, module)?)?;
    Ok(())
}
