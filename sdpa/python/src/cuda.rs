//! The executors of this process's NVIDIA GPUs, and what their caches know of themselves.

use crate::error::{environment, one};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sdpa::cudnn::{BackendError, CudnnExecutor, CudnnOptions, Search};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Which cuDNN to use: the file that PyTorch has loaded.
static CUDNN: OnceLock<Option<PathBuf>> = OnceLock::new();

/// The process that the GPU was first used in: no context survives a fork.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Whether this process was forked from that. Asking the system at each call would cost a call of the system's.
static FORKED: AtomicBool = AtomicBool::new(false);

static EXECUTORS: Mutex<Option<HashMap<u32, Arc<CudnnExecutor>>>> = Mutex::new(None);

/// Names the cuDNN that is used from here on: the file that PyTorch has loaded, or none for the usual search. Said before the first call on a GPU;
/// later it changes nothing.
#[pyfunction]
#[pyo3(signature = (path))]
pub(crate) fn use_cudnn(path: Option<PathBuf>) {
    let _ = CUDNN.set(path);
}

/// Python says it in the child.
#[pyfunction]
fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

pub(crate) fn same_process() -> PyResult<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(one(
        "process",
        format!("{}, forked from {}, which uses the GPU", std::process::id(), PROCESS.get().copied().unwrap_or_default()),
        "a process that was started anew (multiprocessing's `spawn`): a GPU does not survive a fork",
    ))
}

/// From here on a fork is noticed.
fn notice_forks(py: Python<'_>) -> PyResult<()> {
    if PROCESS.set(std::process::id()).is_ok() {
        let said = PyDict::new(py);
        said.set_item("after_in_child", wrap_pyfunction!(forked, py)?)?;
        py.import("os")?.call_method("register_at_fork", (), Some(&said))?;
    }
    Ok(())
}

/// The executor of a device. What is missing is looked for again by the next call.
pub(crate) fn executor(py: Python<'_>, ordinal: u32) -> PyResult<Arc<CudnnExecutor>> {
    same_process()?;
    notice_forks(py)?;
    let make = || -> Result<Arc<CudnnExecutor>, BackendError> {
        let mut executors = EXECUTORS.lock().unwrap_or_else(PoisonError::into_inner);
        let executors = executors.get_or_insert_default();
        if let Some(there) = executors.get(&ordinal) {
            return Ok(there.clone());
        }
        let search = Search { library: CUDNN.get().cloned().flatten(), ..Search::default() };
        let made = CudnnExecutor::new(CudnnOptions { search, ordinal, ..CudnnOptions::default() })?;
        Ok(executors.entry(ordinal).or_insert(Arc::new(made)).clone())
    };
    py.detach(make).map_err(|e| environment(format!("cudnn: {e}")))
}

/// What the caches of a device's plans know of themselves, as JSON; `None` where the device was not used.
#[pyfunction]
pub(crate) fn cache_trace(py: Python<'_>, ordinal: u32) -> PyResult<Option<String>> {
    let there = py.detach(|| {
        let executors = EXECUTORS.lock().unwrap_or_else(PoisonError::into_inner);
        executors.as_ref().and_then(|executors| executors.get(&ordinal).cloned())
    });
    let told = there.map(|executor| serde_json::to_string(&executor.cache_trace()));
    told.transpose().map_err(|e| environment(format!("cudnn: the report: {e}")))
}
