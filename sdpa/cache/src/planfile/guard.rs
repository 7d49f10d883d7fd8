//! Checks which files may be read and replaced: regular files of this user or root that not every user may write. No other user may be able to
//! replace them in their folders. Such a file is as trustworthy as the program and the libraries that the same users install.

use super::error::PlanFileError;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

/// Opens a file for reading.
pub(super) fn open(path: &Path) -> Result<File, PlanFileError> {
    // Check before opening: opening a pipe waits for its writer.
    let facts = std::fs::metadata(path).map_err(PlanFileError::io(path, "opening"))?;
    if !facts.is_file() {
        return Err(PlanFileError::NotAFile { path: path.to_owned() });
    }
    let real = std::fs::canonicalize(path).map_err(PlanFileError::io(path, "resolving"))?;
    // Check the folder of a link too: its writers may redirect the link.
    check_folder(folder(path))?;
    check_folder(folder(&real))?;
    let file = File::open(&real).map_err(PlanFileError::io(path, "opening"))?;
    let facts = file.metadata().map_err(PlanFileError::io(path, "reading the metadata of"))?;
    if !facts.is_file() {
        return Err(PlanFileError::NotAFile { path: path.to_owned() });
    }
    check_owner(path, &facts, user())?;
    match mode(&facts) {
        mode if mode & 0o002 != 0 => Err(PlanFileError::Permissions { path: path.to_owned(), mode }),
        _ => Ok(file),
    }
}

/// A path where a file can be written.
#[derive(Debug)]
pub(super) struct Target {
    /// The path from the caller.
    pub(super) path: PathBuf,
    /// The path with links resolved.
    pub(super) file: PathBuf,
    pub(super) folder: PathBuf,
}

impl Target {
    /// Checks a path where a regular file exists or can be created.
    pub(super) fn new(path: &Path) -> Result<Target, PlanFileError> {
        let not_a_file = || PlanFileError::NotAFile { path: path.to_owned() };
        let is_free = match std::fs::metadata(path) {
            Ok(facts) if facts.is_file() => false,
            Ok(_) => return Err(not_a_file()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => true,
            Err(e) => return Err(PlanFileError::io(path, "reading the metadata of")(e)),
        };
        let parent = folder(path);
        let followed = if is_free {
            None
        } else {
            check_folder(parent)?;
            match std::fs::canonicalize(path) {
                Ok(file) => Some(file),
                // Another process has just deleted the file.
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(e) => return Err(PlanFileError::io(path, "resolving")(e)),
            }
        };
        let file = match followed {
            Some(file) => file,
            // Refuse a dangling link, but not a regular file, which another process has just created.
            None if std::fs::symlink_metadata(path).is_ok_and(|facts| facts.is_symlink()) => return Err(not_a_file()),
            None => {
                let parent = std::fs::canonicalize(parent).map_err(PlanFileError::io(parent, "resolving"))?;
                parent.join(path.file_name().ok_or_else(not_a_file)?)
            }
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

/// Refuses files that another user owns or may write, even by group: a folder of kernels belongs to one user.
pub(super) fn check_private(path: &Path, facts: &Metadata) -> Result<(), PlanFileError> {
    check_owner(path, facts, user())?;
    match mode(facts) {
        mode if mode & 0o022 != 0 => Err(PlanFileError::OthersWrite { path: path.to_owned(), mode }),
        _ => Ok(()),
    }
}

/// Creates a folder, and its missing parents, for this user alone. An existing folder is unchanged.
pub(super) fn make_private(path: &Path) -> Result<(), PlanFileError> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path).map_err(PlanFileError::io(path, "making"))
}

/// Refuses a folder where another user may replace files, and any such parent. The sticky bit prevents replacing.
pub(super) fn check_folder(path: &Path) -> Result<(), PlanFileError> {
    let real = std::fs::canonicalize(path).map_err(PlanFileError::io(path, "resolving"))?;
    for folder in real.ancestors() {
        let facts = std::fs::metadata(folder).map_err(PlanFileError::io(folder, "reading the metadata of"))?;
        check_owner(folder, &facts, user())?;
        let mode = mode(&facts);
        if mode & 0o002 != 0 && mode & 0o1000 == 0 {
            return Err(PlanFileError::Permissions { path: folder.to_owned(), mode });
        }
    }
    Ok(())
}

const ROOT: u32 = 0;

/// Refuses files of users other than this one and root.
fn check_owner(path: &Path, facts: &Metadata, user: u32) -> Result<(), PlanFileError> {
    let owner = owner(facts);
    if owner == user || owner == ROOT { Ok(()) } else { Err(PlanFileError::Owner { path: path.to_owned(), owner, user }) }
}

#[cfg(unix)]
fn owner(facts: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(facts)
}

/// Other platforms have no user ids.
#[cfg(not(unix))]
fn owner(_: &Metadata) -> u32 {
    ROOT
}

#[cfg(unix)]
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(not(unix))]
fn user() -> u32 {
    ROOT
}

#[cfg(unix)]
fn mode(facts: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::mode(facts) & 0o7777
}

/// Other platforms have no permission bits.
#[cfg(not(unix))]
fn mode(_: &Metadata) -> u32 {
    0
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_somebody_else_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let facts = file.as_file().metadata().unwrap();
        let mine = owner(&facts);
        assert_eq!(mine, user());
        assert!(check_owner(file.path(), &facts, mine).is_ok());
        if mine == ROOT {
            // Root may give the file to another user; it is then not read.
            std::os::unix::fs::chown(file.path(), Some(4711), None).unwrap();
            assert!(matches!(open(file.path()), Err(PlanFileError::Owner { owner: 4711, user: ROOT, .. })));
            // A file below another user's folder is not read either.
            let folder = tempfile::tempdir().unwrap();
            let inner = folder.path().join("inner");
            std::fs::create_dir(&inner).unwrap();
            let path = inner.join("plans");
            std::fs::write(&path, b"x").unwrap();
            assert!(open(&path).is_ok());
            std::os::unix::fs::chown(folder.path(), Some(4711), None).unwrap();
            assert!(matches!(open(&path), Err(PlanFileError::Owner { owner: 4711, .. })));
            assert!(matches!(Target::new(&path), Err(PlanFileError::Owner { owner: 4711, .. })));
        } else {
            assert!(matches!(check_owner(file.path(), &facts, mine + 1), Err(PlanFileError::Owner { .. })));
        }
    }
}
