//! The kernel cache on disk: on by default, for every GPU of this process.

use crate::cuda::every_dispatcher;
use crate::error::{environment, one};
use pyo3::prelude::*;
use sdpa::cuda::{KernelCache, Usage};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The setting from Python, if there is one: a cache, or none.
static SAID: Mutex<Option<Option<KernelCache>>> = Mutex::new(None);

/// Returns the disk cache of kernels with which executors are created: the one that Python set, or else the one that the environment
/// selects.
pub(crate) fn current() -> PyResult<Option<KernelCache>> {
    let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
    said.map_or_else(of_user, Ok)
}

fn of_user() -> PyResult<Option<KernelCache>> {
    KernelCache::of_user().map_err(|e| one(e.variable, format!("{:?}", e.value), e.expected))
}

/// Turns the cache on or off, for kernels that are compiled from now on.
#[pyfunction]
pub(crate) fn set_kernel_cache(py: Python<'_>, on: bool, folder: Option<PathBuf>, limit_bytes: Option<u64>) -> PyResult<()> {
    let wanted = match folder {
        _ if !on => None,
        Some(folder) if folder.is_absolute() => Some(KernelCache::new(folder)),
        Some(folder) => return Err(one("folder", folder.display(), "an absolute path")),
        // An explicit setting takes precedence over SDPA_CACHE.
        None => KernelCache::of_user_switched_on().map_err(|e| one(e.variable, format!("{:?}", e.value), e.expected))?,
    };
    if on && wanted.is_none() {
        return Err(one("folder", "None", "a folder, as neither HOME nor XDG_CACHE_HOME nor SDPA_CACHE_DIR is set"));
    }
    let wanted = match (wanted, limit_bytes) {
        (Some(cache), Some(bytes)) => Some(cache.with_limit(bytes)),
        (wanted, _) => wanted,
    };
    *SAID.lock().unwrap_or_else(PoisonError::into_inner) = Some(wanted.clone());
    py.detach(|| {
        for dispatcher in every_dispatcher() {
            // Without the native CUDA executor no kernels are compiled.
            if let Ok(cuda) = dispatcher.cuda() {
                cuda.set_kernel_cache(wanted.clone());
            }
        }
    });
    Ok(())
}

/// Folder, number of kernels, bytes, limit, and the reason if the folder is refused; `None` if the cache is off.
type Facts = (PathBuf, usize, u64, u64, Option<String>);

/// Returns the state of the cache.
#[pyfunction]
pub(crate) fn kernel_cache(py: Python<'_>) -> PyResult<Option<Facts>> {
    let Some(cache) = current()? else { return Ok(None) };
    let (Usage { records, bytes }, refused) = py.detach(|| match cache.usage() {
        Ok(usage) => (usage, None),
        Err(e) => (Usage::default(), Some(e.to_string())),
    });
    Ok(Some((cache.folder().to_owned(), records, bytes, cache.limit(), refused)))
}

/// Deletes every kernel and returns their number.
#[pyfunction]
pub(crate) fn clear_kernel_cache(py: Python<'_>) -> PyResult<usize> {
    let Some(cache) = current()? else { return Ok(0) };
    let cleared = py.detach(|| cache.clear());
    cleared.map(|usage| usage.records).map_err(|e| environment(format!("cannot clear the kernel cache: {e}")))
}
