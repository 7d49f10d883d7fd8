//! Loads shared libraries and looks up their functions.

use crate::error::{Error, Searched};
use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_LAZY};
use std::path::{Path, PathBuf};

/// A location in which to search for a library.
#[derive(Clone, Debug)]
pub enum Place {
    /// A file, by its path.
    File(PathBuf),
    /// A library name, which the system's loader resolves.
    System(&'static str),
    /// A Python environment that does not have the library, and a text about the missing package. It only appears in error messages.
    Empty(PathBuf, &'static str),
}

/// Returns the environment of the `python3` that a shell would start.
fn python_on_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folder = std::env::split_paths(&path).find(|folder| folder.is_absolute() && folder.join("python3").exists())?;
    folder.parent().map(Path::to_owned)
}

/// Returns the locations of a library in the active Python environments: those of `VIRTUAL_ENV`, `CONDA_PREFIX` and `python3`. `files`
/// receives the folder `nvidia` of each environment, and returns the candidate files. An environment without any of them gives a
/// [`Place::Empty`] with the text `none`.
pub fn in_python(none: &'static str, files: impl Fn(&Path) -> Vec<PathBuf>) -> Vec<Place> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let mut roots: Vec<PathBuf> = named.chain(python_on_path()).filter(|r| r.is_absolute()).collect();
    roots.dedup();
    let mut places = Vec::new();
    for root in roots {
        let before = places.len();
        let mut pythons: Vec<PathBuf> = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten().map(|e| e.path()).collect();
        pythons.retain(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")));
        pythons.sort();
        for python in pythons {
            places.extend(files(&python.join("site-packages/nvidia")).into_iter().filter(|p| p.exists()).map(Place::File));
        }
        if places.len() == before {
            places.push(Place::Empty(root, none));
        }
    }
    places
}

/// A loaded library that is never closed: threads of cuDNN and the driver may run until the process ends.
#[derive(Debug)]
pub struct Opened {
    dl: std::mem::ManuallyDrop<Dl>,
    /// The path or name by which the library was opened.
    pub path: PathBuf,
}

/// Loads the library at a path, for the life of the process.
///
/// # Errors
/// Returns the loader's message.
pub fn open_file(path: &Path) -> Result<Opened, String> {
    // SAFETY: loading runs the initialisers of NVIDIA's libraries, which have no preconditions.
    let dl = unsafe { Dl::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|e| {
        // The loader's message is the source of the error.
        std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string)
    })?;
    Ok(Opened { dl: std::mem::ManuallyDrop::new(dl), path: path.to_owned() })
}

/// Loads the first library that exists.
///
/// # Errors
/// Returns [`Error::Library`] with the reason for every location.
pub fn open_first(library: &'static str, places: &[Place]) -> Result<Opened, Error> {
    let mut searched = Vec::new();
    for place in places {
        let path = match place {
            Place::File(path) => path.as_path(),
            Place::System(name) => Path::new(name),
            Place::Empty(path, problem) => {
                let problem = format!("{problem} in lib/python3*/site-packages/nvidia");
                searched.push(Searched { place: path.display().to_string(), problem });
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
    /// Returns the address of a function of the library.
    ///
    /// # Safety
    /// `F` must be the function's type, as an `extern "C"` pointer.
    ///
    /// # Errors
    /// Returns [`Error::MissingSymbol`] if the library does not have the function.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, Error> {
        // SAFETY: the caller vouches for the type; the library is never closed, so the pointer stays valid.
        unsafe { self.dl.get::<F>(symbol.as_bytes()) }.map(|f| *f).map_err(|_| Error::MissingSymbol { path: self.path.clone(), symbol })
    }

    /// Returns the path of the file that the loader mapped, also for a library that was opened by name.
    pub fn mapped_path(&self) -> PathBuf {
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

/// Declares a table of functions that is loaded from one library: name, symbol and argument types of each. All return an `int`.
#[macro_export]
macro_rules! table {
    ($(#[$doc:meta])* $t:ident { $($field:ident: $symbol:literal fn($($arg:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $t {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> i32,)*
        }

        impl $t {
            pub(crate) fn load(library: &$crate::load::Opened) -> Result<$t, $crate::Error> {
                #[allow(clippy::macro_metavars_in_unsafe, reason = "symbols are literals")]
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
pub use table;
