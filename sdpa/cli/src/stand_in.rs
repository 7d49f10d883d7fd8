//! The stand-in for the CUDA driver, with which cuDNN can plan on a machine without a driver. It cannot run anything.

use cudnn_graph::{Driver, Error, Library, Search};
use std::io::Write;
use tempfile::NamedTempFile;

/// The shared library that the build script compiled; empty on targets without shared libraries.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnull_driver.so"));

/// Loads cuDNN for planning. If neither the search nor CUDNN_GRAPH_DRIVER names a driver and the system has none, it uses the included
/// stand-in for the driver.
///
/// # Errors
/// See [`Library::load`].
pub(crate) fn load(search: &Search) -> Result<&'static Library, Error> {
    // The file is deleted at the end of this function: a loaded library stays mapped, and cuDNN finds it by its soname.
    let file = if is_needed(search) { file() } else { None };
    match &file {
        Some(file) => Library::load(&search.clone().with_driver(file.path().to_owned())),
        None => Library::load(search),
    }
}

fn is_needed(search: &Search) -> bool {
    search.driver.is_none() && std::env::var_os("CUDNN_GRAPH_DRIVER").is_none() && Driver::load(None).is_err()
}

/// Returns the stand-in as a file. If it cannot be written, the search continues without it and reports that there is no driver.
fn file() -> Option<NamedTempFile> {
    if LIBRARY.is_empty() {
        return None;
    }
    let written = || {
        let mut file = tempfile::Builder::new().prefix("sdpa-null-driver-").suffix(".so").tempfile()?;
        file.write_all(LIBRARY)?;
        std::io::Result::Ok(file)
    };
    written().inspect_err(|e| tracing::warn!("the stand-in for the CUDA driver cannot be written: {e}")).ok()
}
