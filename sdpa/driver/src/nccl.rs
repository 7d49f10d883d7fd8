//! NCCL, found at run time: the library, its version, unique ids and error texts.

use crate::communicator::Functions;
use crate::driver::absolute;
use crate::error::Error;
use crate::load::{self, Opened, Place, open_first, table};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

table! {
    /// The NCCL functions that return a status.
    Table {
        version: "ncclGetVersion" fn(*mut c_int);
        unique_id: "ncclGetUniqueId" fn(*mut UniqueId);
    }
}

type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;

/// The variable with the path of the library or its folder, which takes precedence.
const VARIABLE: &str = "SDPA_NCCL";
/// The file name of every version since 2.0.
const FILE: &str = "libnccl.so.2";
/// The oldest supported version: the first with every function that [`Communicator`](crate::Communicator) needs.
const OLDEST: [i32; 3] = [2, 18, 0];

/// The id from which all ranks of a communicator are made: 128 bytes that one rank shares with the others.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId {
    /// The bytes, in the format of the NCCL version that made them.
    pub bytes: [u8; 128],
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The bytes contain the address at which a rank listens, and a secret.
        f.write_str("UniqueId")
    }
}

/// A loaded NCCL.
#[derive(Debug)]
pub struct Nccl {
    library: Opened,
    table: Table,
    error_text: ErrorText,
    functions: Functions,
    version: [i32; 3],
}

impl Nccl {
    /// Loads NCCL from `path`, which is a file or a folder that contains `libnccl.so.2`. With `None`, the path is the environment variable `SDPA_NCCL` if
    /// it is set. Otherwise it uses the library that the process has already loaded, such as PyTorch's. Two copies in one process would not share
    /// communicators. If there is none, the wheel of the active Python environment and then the search path of the system's loader are searched.
    ///
    /// It needs no GPU.
    ///
    /// # Errors
    /// Returns the paths that were searched, the name of a missing function, or [`Error::Nccl`] for a version before 2.18.
    pub fn load(path: Option<&Path>) -> Result<Nccl, Error> {
        let library = open_first("NCCL (libnccl.so.2)", &places(path))?;
        let table = Table::load(&library)?;
        // SAFETY: the type is that of NCCL's header.
        let error_text: ErrorText = unsafe { library.function("ncclGetErrorString") }?;
        let functions = Functions::load(&library)?;
        let mut nccl = Nccl { library, table, error_text, functions, version: [0; 3] };
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let code = unsafe { (nccl.table.version)(&mut version) };
        nccl.check("ncclGetVersion", code)?;
        nccl.version = numbers(version);
        if nccl.version < OLDEST {
            let text = format!("got NCCL {}, expected 2.18 or newer", nccl.version.map(|n| n.to_string()).join("."));
            return Err(Error::Nccl { call: "ncclGetVersion", code, text });
        }
        Ok(nccl)
    }

    /// Returns the path of the library file.
    pub fn path(&self) -> PathBuf {
        self.library.mapped_path()
    }

    /// Returns the version: major, minor, patch.
    pub fn version(&self) -> [i32; 3] {
        self.version
    }

    /// Makes the id of a new communicator. NCCL listens at a network address of this machine from then on; with the variable `NCCL_COMM_ID`, every process
    /// gets the same id instead.
    ///
    /// # Errors
    /// Returns [`Error::Nccl`], for example if no network interface can be used.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId { bytes: [0; 128] };
        // SAFETY: the pointer is to 128 live bytes, the size of NCCL's id.
        let code = unsafe { (self.table.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Returns NCCL's text for a status.
    pub fn error_text(&self, code: i32) -> String {
        // SAFETY: NCCL accepts any number, and returns a static zero-terminated text.
        let text = unsafe { (self.error_text)(code) };
        if text.is_null() {
            return format!("status {code}");
        }
        // SAFETY: the pointer is not null, see above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn error(&self, call: &'static str, code: c_int) -> Error {
        Error::Nccl { call, code, text: self.error_text(code) }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }
}

/// Returns the numbers of a version code: 10,000 · major + 100 · minor + patch since 2.9, with 1,000 instead of 10,000 before.
fn numbers(version: c_int) -> [i32; 3] {
    let unit = if version < 10_000 { 1000 } else { 10_000 };
    [version / unit, version % unit / 100, version % 100]
}

fn places(path: Option<&Path>) -> Vec<Place> {
    let named = path.map(Path::to_owned).or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
    if let Some(named) = named.map(absolute) {
        return vec![Place::File(if named.is_dir() { named.join(FILE) } else { named })];
    }
    let mut places = vec![Place::Loaded(FILE)];
    places.extend(load::in_python("no NCCL wheel", |nvidia| vec![nvidia.join("nccl/lib").join(FILE)]));
    places.push(Place::System(FILE));
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_are_read_in_both_formats() {
        assert_eq!(numbers(2809), [2, 8, 9]);
        assert_eq!(numbers(22809), [2, 28, 9]);
        assert_eq!(numbers(23203), [2, 32, 3]);
        assert!(numbers(21800) >= OLDEST && numbers(21701) < OLDEST);
    }
}
