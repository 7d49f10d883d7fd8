//! Files of cuDNN plans and native CUDA kernels, with which other processes need not build them.

use crate::cuda::dispatcher;
use crate::error::{environment, one};
use pyo3::prelude::*;
use sdpa::ExecutorName;
use sdpa::cuda::KernelHead;
use sdpa::cudnn::AttachError;
use std::path::{Path, PathBuf};

/// Converts an error of a file or of its environment.
fn of_file(path: &Path, error: AttachError) -> PyErr {
    match error {
        AttachError::Other(error) => environment(error.to_string()),
        wrong @ (AttachError::File(_) | AttachError::Mismatch(_) | _) => {
            one("path", path.display(), format!("a readable plan file: {wrong}"))
        }
    }
}

/// Adds a file in which a device's executors look for plans or kernels before they build them. Returns the number of its entries.
#[pyfunction]
pub(crate) fn attach_plans(py: Python<'_>, ordinal: u32, path: PathBuf) -> PyResult<usize> {
    let all = dispatcher(py, ordinal)?;
    py.detach(|| {
        if KernelHead::is_of(&path).map_err(|e| of_file(&path, e.into()))? {
            let cuda = all.cuda().map_err(|e| environment(e.to_string()))?;
            return cuda.attach(&path).map_err(|e| one("path", path.display(), format!("a usable kernel file: {e}")));
        }
        all.cudnn().map_err(|e| environment(e.to_string()))?.attach(&path).map_err(|e| of_file(&path, e))
    })
}

/// Appends the plans or kernels that an executor built on a device to a file. Returns the number of entries written.
#[pyfunction]
pub(crate) fn save_plans(py: Python<'_>, ordinal: u32, path: PathBuf, executor: &str) -> PyResult<usize> {
    let all = dispatcher(py, ordinal)?;
    py.detach(|| match executor {
        name if name == ExecutorName::CUDA.name() => {
            let cuda = all.cuda().map_err(|e| environment(e.to_string()))?;
            cuda.save(&path).map_err(|e| one("path", path.display(), format!("a usable kernel file: {e}")))
        }
        name if name == ExecutorName::CUDNN.name() => {
            all.cudnn().map_err(|e| environment(e.to_string()))?.save(&path).map_err(|e| of_file(&path, e))
        }
        other => Err(one("executor", format!("{other:?}"), "one that makes plans or kernels: cudnn, cuda")),
    })
}
