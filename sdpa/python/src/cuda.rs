//! The dispatcher of each NVIDIA GPU in this process, and the traces of their caches.

use crate::error::{environment, one};
use crate::kernels;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sdpa::Dispatcher;
use sdpa::cuda::CudaOptions;
use sdpa::cudnn::ledger::{Ledger, LedgerError};
use sdpa::cudnn::{CudnnOptions, Search};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The library files to load: those that PyTorch loads.
#[derive(Clone, Debug, Default)]
struct Libraries {
    cudnn: Option<PathBuf>,
    nvrtc: Option<PathBuf>,
}

static LIBRARIES: OnceLock<Libraries> = OnceLock::new();

/// The process that used a GPU first: CUDA contexts do not survive a fork.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Whether this process is a fork of that one. A query of the process id on each call would cost a system call.
static FORKED: AtomicBool = AtomicBool::new(false);

static DISPATCHERS: Mutex<Option<HashMap<u32, Arc<Dispatcher>>>> = Mutex::new(None);

/// Sets the cuDNN and the NVRTC to load: the files that PyTorch loads, or `None` for the default search. It has an effect only before the first call on a GPU.
#[pyfunction]
#[pyo3(signature = (cudnn, nvrtc))]
pub(crate) fn use_libraries(cudnn: Option<PathBuf>, nvrtc: Option<PathBuf>) {
    let _ = LIBRARIES.set(Libraries { cudnn, nvrtc });
}

/// Python calls this in the child process.
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
        "a process that was not forked after its parent used the GPU (use multiprocessing's `spawn`): CUDA contexts do not survive a fork",
    ))
}

/// Registers a callback for forks.
fn notice_forks(py: Python<'_>) -> PyResult<()> {
    if PROCESS.set(std::process::id()).is_ok() {
        let said = PyDict::new(py);
        said.set_item("after_in_child", wrap_pyfunction!(forked, py)?)?;
        py.import("os")?.call_method("register_at_fork", (), Some(&said))?;
    }
    Ok(())
}

/// Returns the dispatcher of a device. If no executor is available, the next call tries again.
pub(crate) fn dispatcher(py: Python<'_>, ordinal: u32) -> PyResult<Arc<Dispatcher>> {
    same_process()?;
    notice_forks(py)?;
    let kernel_cache = kernels::current()?;
    let made = py.detach(|| {
        let mut dispatchers = DISPATCHERS.lock().unwrap_or_else(PoisonError::into_inner);
        let dispatchers = dispatchers.get_or_insert_default();
        if let Some(there) = dispatchers.get(&ordinal) {
            return Ok(there.clone());
        }
        let ledgers = Ledger::all_of_user()?;
        let Libraries { cudnn, nvrtc } = LIBRARIES.get().cloned().unwrap_or_default();
        let search = Search::default().with_library(cudnn);
        let options = CudnnOptions::default().with_search(search).with_ordinal(ordinal).with_ledgers(ledgers);
        let made = Arc::new(
            Dispatcher::new(options)
                .with_kernels(CudaOptions::default().with_nvrtc(nvrtc).with_ordinal(ordinal).with_kernel_cache(kernel_cache)),
        );
        if made.device().is_ok() {
            dispatchers.insert(ordinal, made.clone());
        }
        Ok(made)
    });
    made.map_err(|e: LedgerError| environment(format!("{e}; run `cargo sdpa prove cudnn` to write it again")))
}

/// Returns the dispatchers of the devices that this process used.
pub(crate) fn every_dispatcher() -> Vec<Arc<Dispatcher>> {
    if FORKED.load(Ordering::Relaxed) {
        return Vec::new();
    }
    DISPATCHERS.lock().unwrap_or_else(PoisonError::into_inner).iter().flat_map(HashMap::values).cloned().collect()
}

/// Returns the cache traces of a device's executors as JSON, or `None` if the device was not used.
#[pyfunction]
pub(crate) fn cache_trace(py: Python<'_>, ordinal: u32) -> PyResult<Option<String>> {
    let there = py.detach(|| {
        let dispatchers = DISPATCHERS.lock().unwrap_or_else(PoisonError::into_inner);
        dispatchers.as_ref().and_then(|dispatchers| dispatchers.get(&ordinal).cloned())
    });
    let told = there.and_then(|all| all.cache_trace()).map(|trace| serde_json::to_string(&trace));
    told.transpose().map_err(|e| environment(format!("the report of GPU {ordinal}: {e}")))
}
