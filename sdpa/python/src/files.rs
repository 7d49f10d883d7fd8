//! Files of plans of cuDNN, and of native CUDA kernels: what one process made, others need not make.

use crate::cuda::dispatcher;
use crate::error::{environment, one};
use pyo3::prelude::*;
use sdpa::ExecutorName;
use sdpa::cuda::KernelHead;
use sdpa::cudnn::AttachError;
use std::path::{Path, PathBuf};

/// The fault of a file, or of what is around it.
fn of_file(path: &Path, error: AttachError) -> PyErr {
    match error {
        AttachError::Other(error) => environment(error.to_string()),
        wrong @ (AttachError::File(_) | AttachError::Mismatch(_) | _) => one("path", path.display(), wrong.to_string()),
    }
}

/// Looks for plans, or kernels, in a file from now on, before they are made on a device. Says how many it has.
#[pyfunction]
pub(crate) fn attach_plans(py: Python<'_>, ordinal: u32, path: PathBuf) -> PyResult<usize> {
    let all = dispatcher(py, ordinal)?;
    py.detach(|| {
        if KernelHead::is_of(&path).map_err(|e| of_file(&path, e.into()))? {
            let cuda = all.cuda().map_err(|e| environment(e.to_string()))?;
            return cuda.attach(&path).map_err(|e| one("path", path.display(), e.to_string()));
        }
        all.cudnn().map_err(|e| environment(e.to_string()))?.attach(&path).map_err(|e| of_file(&path, e))
    })
}

/// Adds what an executor has made on a device to a file. Says how many were written.
#[pyfunction]
pub(crate) fn save_plans(py: Python<'_>, ordinal: u32, path: PathBuf, executor: &str) -> PyResult<usize> {
    let all = dispatcher(py, ordinal)?;
    py.detach(|| match executor {
        name if name == ExecutorName::CUDA.name() => {
            let cuda = all.cuda().map_err(|e| environment(e.to_string()))?;
            cuda.save(&path).map_err(|e| one("path", path.display(), e.to_string()))
        }
        name if name == ExecutorName::CUDNN.name() => {
            all.cudnn().map_err(|e| environment(e.to_string()))?.save(&path).map_err(|e| of_file(&path, e))
        }
        other => Err(one("executor", format!("{other:?}"), "one that makes plans or kernels: cudnn, cuda")),
    })
}
