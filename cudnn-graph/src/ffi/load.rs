//! Opening shared libraries, and looking functions up.

use crate::error::{Error, Searched};
use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_LAZY};
use std::path::{Path, PathBuf};

/// One place to try.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// A file, by its path.
    File(PathBuf),
    /// A name that the system's loader resolves.
    System(&'static str),
    /// A folder in which there is nothing to open, and what was looked for in it.
    Empty(PathBuf, &'static str),
}

/// An open library that is never closed: cuDNN's and the driver's threads outlive any scope of ours.
#[derive(Debug)]
pub(super) struct Opened {
    dl: std::mem::ManuallyDrop<Dl>,
    pub(super) path: PathBuf,
}

pub(super) fn open_file(path: &Path) -> Result<Opened, String> {
    // SAFETY: running the initialisers of NVIDIA's libraries is what loading them means; they have no preconditions.
    let dl = unsafe { Dl::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|e| {
        // The loader's own words are behind the error, not in it.
        std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string)
    })?;
    Ok(Opened { dl: std::mem::ManuallyDrop::new(dl), path: path.to_owned() })
}

pub(super) fn open_first(library: &'static str, places: &[Place]) -> Result<Opened, Error> {
    let mut searched = Vec::new();
    for place in places {
        let path = match place {
            Place::File(path) => path.as_path(),
            Place::System(name) => Path::new(name),
            Place::Empty(path, problem) => {
                searched.push(Searched { place: path.display().to_string(), problem: (*problem).to_owned() });
                continue;
            }
        };
        match open_file(path) {
            Ok(opened) => return Ok(opened),
            Err(problem) => searched.push(Searched { place: path.display().to_string(), problem }),
        }
    }
    Err(Error::Library { library, searched })
}

impl Opened {
    /// Looks a function up.
    ///
    /// # Safety
    /// `F` must be the function's type, as an `extern "C"` pointer.
    pub(super) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, Error> {
        // SAFETY: the caller vouches for the type; the library is never closed, so the pointer stays valid.
        unsafe { self.dl.get::<F>(symbol.as_bytes()) }.map(|f| *f).map_err(|_| Error::MissingSymbol { path: self.path.clone(), symbol })
    }

    /// The file that the loader mapped for a library opened by name.
    pub(super) fn mapped_path(&self) -> PathBuf {
        if self.path.is_absolute() {
            return self.path.clone();
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let name = self.path.to_string_lossy().into_owned();
        let stem = name.split(".so").next().unwrap_or(&name).to_owned();
        maps.lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .map(Path::new)
            .find(|p| p.file_name().is_some_and(|f| f.to_string_lossy().starts_with(&format!("{stem}.so"))))
            .map_or_else(|| self.path.clone(), Path::to_owned)
    }
}

/// Declares a table of functions that is filled from one library.
macro_rules! table {
    ($(#[$doc:meta])* $t:ident { $($field:ident: $symbol:literal fn($($arg:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $t {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> i32,)*
        }

        impl $t {
            pub(super) fn load(library: &$crate::ffi::load::Opened) -> Result<$t, $crate::error::Error> {
                // SAFETY: the types are those of NVIDIA's public headers.
                unsafe { Ok($t { $($field: library.function($symbol)?,)* }) }
            }
        }

        impl std::fmt::Debug for $t {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($t))
            }
        }
    };
}
pub(super) use table;
