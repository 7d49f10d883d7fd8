//! What may be read and replaced: regular files that not everybody may write.

use super::error::PlanFileError;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// A file that is opened to be read.
pub(super) fn open(path: &Path) -> Result<File, PlanFileError> {
    // Asked before it is opened: opening a pipe waits for who writes it.
    let facts = std::fs::metadata(path).map_err(PlanFileError::io(path, "opening"))?;
    if !facts.is_file() {
        return Err(PlanFileError::NotAFile { path: path.to_owned() });
    }
    let real = std::fs::canonicalize(path).map_err(PlanFileError::io(path, "following"))?;
    // Of a link too: who writes to its folder may point it elsewhere.
    check_folder(folder(path))?;
    check_folder(folder(&real))?;
    let file = File::open(&real).map_err(PlanFileError::io(path, "opening"))?;
    let facts = file.metadata().map_err(PlanFileError::io(path, "asking about"))?;
    if !facts.is_file() {
        return Err(PlanFileError::NotAFile { path: path.to_owned() });
    }
    match mode(&facts) {
        mode if mode & 0o002 != 0 => Err(PlanFileError::Permissions { path: path.to_owned(), mode }),
        _ => Ok(file),
    }
}

/// A place for a file.
#[derive(Debug)]
pub(super) struct Target {
    /// As the caller wrote it.
    pub(super) path: PathBuf,
    /// Links followed.
    pub(super) file: PathBuf,
    pub(super) folder: PathBuf,
}

impl Target {
    /// A place where a regular file is or may be put.
    pub(super) fn new(path: &Path) -> Result<Target, PlanFileError> {
        let not_a_file = || PlanFileError::NotAFile { path: path.to_owned() };
        let is_free = match std::fs::metadata(path) {
            Ok(facts) if facts.is_file() => false,
            Ok(_) => return Err(not_a_file()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => true,
            Err(e) => return Err(PlanFileError::io(path, "asking about")(e)),
        };
        if is_free && std::fs::symlink_metadata(path).is_ok() {
            // A link to nothing.
            return Err(not_a_file());
        }
        let parent = folder(path);
        let file = if is_free {
            let parent = std::fs::canonicalize(parent).map_err(PlanFileError::io(parent, "looking for"))?;
            parent.join(path.file_name().ok_or_else(not_a_file)?)
        } else {
            check_folder(parent)?;
            std::fs::canonicalize(path).map_err(PlanFileError::io(path, "following"))?
        };
        let folder = folder(&file).to_owned();
        check_folder(&folder)?;
        Ok(Target { path: path.to_owned(), file, folder })
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        Some(_) | None => Path::new("."),
    }
}

/// Refuses folders in which everybody may replace the files of others; the sticky bit forbids that.
fn check_folder(path: &Path) -> Result<(), PlanFileError> {
    let facts = std::fs::metadata(path).map_err(PlanFileError::io(path, "asking about"))?;
    match mode(&facts) {
        mode if mode & 0o002 != 0 && mode & 0o1000 == 0 => Err(PlanFileError::Permissions { path: path.to_owned(), mode }),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn mode(facts: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::mode(facts) & 0o7777
}

/// There are no such bits elsewhere.
#[cfg(not(unix))]
fn mode(_: &Metadata) -> u32 {
    0
}
