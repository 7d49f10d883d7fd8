//! The stand-in for the CUDA driver: it lets cuDNN plan on a machine that has no driver, and runs nothing.

use cudnn_graph::{Driver, Error, Library, Search};
use std::io::Write;
use tempfile::NamedTempFile;

/// The shared library that the build script compiled; empty on targets that have none.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnull_driver.so"));

/// Loads cuDNN to plan with it. Where neither the search nor CUDNN_GRAPH_DRIVER names a driver and the system has none, the stand-in is loaded.
///
/// # Errors
/// As [`Library::load`].
pub(crate) fn load(search: &Search) -> Result<&'static Library, Error> {
    // Removed at the end of this function: what was loaded stays mapped, and cuDNN finds it by its soname.
    let file = if is_needed(search) { file() } else { None };
    match &file {
        Some(file) => Library::load(&search.clone().with_driver(file.path().to_owned())),
        None => Library::load(search),
    }
}

fn is_needed(search: &Search) -> bool {
    search.driver.is_none() && std::env::var_os("CUDNN_GRAPH_DRIVER").is_none() && Driver::load(None).is_err()
}

/// The stand-in as a file. Where it cannot be written the search goes on without it, and its error says that there is no driver.
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
