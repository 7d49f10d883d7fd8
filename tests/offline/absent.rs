//! Loading where something is missing, is no library, lacks functions, or is another library: a typed error with the place, never a
//! panic. Each in a process of its own, since a process loads once.

use conformance::golden::repository;
use conformance::offline::{RUNTIMES, Runtime};
use conformance::say::skip;
use std::path::{Path, PathBuf};

fn worker() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_offline"))
}

/// The kind of error that loading ends with, and its text.
fn load(library: &Path, driver: &Path, what: &str) -> (String, String) {
    let runtime = Runtime { name: "as told", library: library.to_owned(), driver: driver.to_owned() };
    let mut lines: Vec<(String, String)> = runtime.worker(worker(), &["load", what]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(lines.len(), 1);
    lines.remove(0)
}

/// Asserts the kind of an error and words of its text.
fn expect((kind, text): &(String, String), want: &str, words: &[&str]) {
    assert_eq!(kind, want, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

const NOWHERE: &str = "/nowhere/at/all";

/// A file that is no library.
fn text_file() -> PathBuf {
    std::fs::canonicalize(repository("Cargo.toml")).unwrap()
}

/// A library that is neither cuDNN nor the driver: the C library of this very process.
fn libc() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so") || path.contains("/libc-"));
    PathBuf::from(path.expect("this process has a C library"))
}

/// The stand-in driver, if it is built.
fn stand_in() -> Option<PathBuf> {
    let driver = worker().with_file_name("libnull_driver.so");
    if driver.exists() {
        return Some(driver);
    }
    skip("offline", "the stand-in driver is not built; cargo build --package null-driver builds it");
    None
}

#[test]
fn a_driver_that_cannot_be_loaded_is_named() {
    for what in ["library", "executor"] {
        expect(&load(Path::new(NOWHERE), Path::new(NOWHERE), what), "Library", &["libcuda.so.1", NOWHERE]);
        let file = text_file();
        expect(&load(Path::new(NOWHERE), &file, what), "Library", &["libcuda.so.1", "Cargo.toml"]);
        let libc = libc();
        expect(&load(Path::new(NOWHERE), &libc, what), "MissingSymbol", &["cuInit", &libc.display().to_string()]);
    }
}

#[test]
fn a_cudnn_that_cannot_be_loaded_is_named() {
    let Some(driver) = stand_in() else { return };
    expect(&load(Path::new(NOWHERE), &driver, "library"), "Library", &["libcudnn.so.9", NOWHERE]);
    expect(&load(&text_file(), &driver, "library"), "Library", &["libcudnn.so.9", "Cargo.toml"]);
    // A folder that is there and does not hold it.
    let folder = std::fs::canonicalize(repository("tests")).unwrap();
    expect(&load(&folder, &driver, "library"), "Library", &[&folder.join("libcudnn.so.9").display().to_string()]);
    let libc = libc();
    expect(&load(&libc, &driver, "library"), "MissingSymbol", &["cudnnGetVersion", &libc.display().to_string()]);
    expect(&load(&driver, &driver, "library"), "MissingSymbol", &["cudnnGetVersion", "libnull_driver.so"]);
}

/// Both runtimes, or a word about it.
fn runtimes() -> Option<[Runtime; 2]> {
    let found = RUNTIMES.map(|name| Runtime::find(name, worker()));
    match found {
        [Ok(old), Ok(new)] => Some([old, new]),
        [Err(why), _] | [_, Err(why)] => {
            skip("offline", &why);
            None
        }
    }
}

#[test]
fn without_a_device_cudnn_loads_and_the_executor_says_that_there_is_none() {
    let Some(runtimes) = runtimes() else { return };
    for Runtime { library, driver, .. } in &runtimes {
        assert_eq!(load(library, driver, "library").0, "Ok");
        expect(&load(library, driver, "executor"), "Driver", &["cuInit", "NO_DEVICE", "there is no device"]);
    }
}

#[test]
fn a_second_library_in_one_process_is_refused() {
    let Some([old, new]) = runtimes() else { return };
    let (first, second) = (old.library.display().to_string(), new.library.display().to_string());
    expect(&load(&old.library, &old.driver, &second), "OtherLibrary", &[&first, &second]);
    expect(&load(&new.library, &new.driver, NOWHERE), "OtherLibrary", &[&second, NOWHERE]);
    // The same one, by folder and by file.
    assert_eq!(load(&old.library, &old.driver, &first).0, "Ok");
    let file = old.library.join("libcudnn.so.9").display().to_string();
    assert_eq!(load(&old.library, &old.driver, &file).0, "Ok");
}
