//! Loads shared libraries and looks up their functions.

use crate::error::{Error, Searched};
use libloading::os::unix::{Library as Dl, RTLD_GLOBAL, RTLD_LAZY};
use std::path::{Path, PathBuf};

/// A location in which to search for a library.
#[derive(Clone, Debug)]
pub enum Place {
    /// A file, by its path.
    File(PathBuf),
    /// A library name, if the process has already loaded a library of this name.
    Loaded(&'static str),
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

/// `RTLD_NOLOAD` of the system's header: `dlopen` fails if the library is not loaded.
const RTLD_NOLOAD: i32 = if cfg!(target_vendor = "apple") { 0x10 } else { 0x4 };

/// Returns the library of this name that the process has already loaded.
fn loaded(name: &'static str) -> Result<Opened, String> {
    // SAFETY: nothing is loaded, so no initialiser runs.
    let dl = unsafe { Dl::open(Some(name), RTLD_LAZY | RTLD_NOLOAD) }.map_err(|_| "not loaded by this process yet".to_owned())?;
    Ok(Opened { dl: std::mem::ManuallyDrop::new(dl), path: PathBuf::from(name) })
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
            Place::System(name) | Place::Loaded(name) => Path::new(name),
            Place::Empty(path, problem) => {
                let problem = format!("{problem} in lib/python3*/site-packages/nvidia");
                searched.push(Searched { place: path.display().to_string(), problem });
                continue;
            }
        };
        let opened = match place {
            Place::Loaded(name) => loaded(name),
            Place::File(_) | Place::System(_) | Place::Empty(..) => open_file(path),
        };
        match opened {
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_loaded_library_is_found_first_and_nothing_is_loaded_for_it() {
        // The C library of every test process; no process has the other one.
        let found =
            open_first("a library", &[Place::Loaded("libnever-there.so.9"), Place::Loaded("libc.so.6"), Place::System("libm.so.6")])
                .unwrap();
        assert_eq!(found.path, Path::new("libc.so.6"));
        assert!(found.mapped_path().is_absolute());
        let told = open_first("a library", &[Place::Loaded("libnever-there.so.9")]).unwrap_err().to_string();
        assert!(told.contains("libnever-there.so.9") && told.contains("not loaded by this process yet"), "{told}");
    }
}
