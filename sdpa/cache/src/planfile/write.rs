//! Atomic writes: a file exists completely or not at all.

use super::digest::Digest;
use super::error::PlanFileError;
use super::format;
use super::guard::Target;
use super::head::Head;
use super::read::PlanFile;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A plan or kernel to store in a file, with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key by which the record is found.
    pub key: Digest,
    /// A description of the record, for display.
    pub label: String,
    /// The serialised plan or kernel.
    pub payload: Vec<u8>,
}

/// Writes a plan file with exactly these records, and replaces an existing regular file. If several records have the same key, the last
/// one is written. Calls with equal arguments write identical files. It takes no lock, so records that another process adds at the same
/// time may be lost.
///
/// # Errors
/// Returns a [`PlanFileError`]. An existing file is then unchanged, unless only the flush of the new file to disk failed.
pub fn write(path: impl AsRef<Path>, header: &impl Head, records: impl IntoIterator<Item = Record>) -> Result<(), PlanFileError> {
    let target = Target::new(path.as_ref())?;
    replace(&target, header, &by_key(records))
}

/// Adds records to a plan file; they replace records with the same keys. If several processes add at once, all of their records are kept.
///
/// It creates a missing file, and replaces a file that is truncated, damaged or has a header that does not match. Existing records with a
/// damaged payload are dropped. Files of newer formats, and files that are not plan files, stay unchanged.
///
/// # Errors
/// Returns a [`PlanFileError`]. An existing file is then unchanged, unless only the flush of the new file to disk failed.
pub fn add<H: Head>(path: impl AsRef<Path>, header: &H, records: impl IntoIterator<Item = Record>) -> Result<(), PlanFileError> {
    let target = Target::new(path.as_ref())?;
    let records = by_key(records);
    let _lock = lock(&target)?;
    let there: PlanFile<H> = match PlanFile::open(&target.file) {
        Ok(file) => file,
        Err(e) if e.is_replaceable() => {
            tracing::debug!(reason = %e, "plans are written anew");
            return replace(&target, header, &records);
        }
        Err(e) => return Err(e),
    };
    if let Some(mismatch) = there.header().mismatch(header) {
        tracing::debug!(path = %target.path.display(), %mismatch, "plans are written anew");
        return replace(&target, header, &records);
    }
    let joined = there.header().joined(header);
    let (mut all, complete) = kept(&there)?;
    let known = complete && joined == *there.header() && records.iter().all(|(key, record)| all.get(key) == Some(record));
    if known {
        return Ok(());
    }
    all.extend(records);
    replace(&target, &joined, &all)
}

/// Writes a file with one record, as [`write()`] does, but without flushing it to disk.
pub(super) fn store(path: &Path, header: &impl Head, record: Record) -> Result<(), PlanFileError> {
    let target = Target::new(path)?;
    put(&target, header, &by_key([record]), |_| Ok(()))
}

fn by_key(records: impl IntoIterator<Item = Record>) -> BTreeMap<Digest, Record> {
    records.into_iter().map(|record| (record.key, record)).collect()
}

/// Returns the readable records of a file, and whether those are all.
fn kept(file: &PlanFile<impl Head>) -> Result<(BTreeMap<Digest, Record>, bool), PlanFileError> {
    let mut all = BTreeMap::new();
    let mut complete = true;
    for entry in file.entries() {
        match file.read(&entry.key) {
            Ok(payload) => all.extend(payload.map(|payload| (entry.key, Record { key: entry.key, label: entry.label.clone(), payload }))),
            Err(e) if e.is_replaceable() => {
                tracing::warn!(error = %e, "a plan is dropped");
                complete = false;
            }
            Err(e) => return Err(e),
        }
    }
    Ok((all, complete))
}

/// Locks a file for adding until the result is dropped. The lock file is never deleted: a lock on a deleted file would exclude no other process.
fn lock(target: &Target) -> Result<File, PlanFileError> {
    let mut name = target.file.clone().into_os_string();
    name.push(".lock");
    let path = PathBuf::from(name);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o644);
    let opened = match options.open(&path) {
        // Another user created the lock file; read access is enough for a lock.
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => File::open(&path),
        opened => opened,
    };
    let file = opened.map_err(PlanFileError::io(&path, "opening"))?;
    loop {
        match file.lock() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            locked => return locked.map(|()| file).map_err(PlanFileError::io(&path, "locking")),
        }
    }
}

fn replace(target: &Target, header: &impl Head, records: &BTreeMap<Digest, Record>) -> Result<(), PlanFileError> {
    put(target, header, records, File::sync_all)?;
    sync_folder(&target.folder).map_err(PlanFileError::io(&target.folder, "syncing"))
}

/// Moves a finished file over the existing one.
fn put(
    target: &Target,
    header: &impl Head,
    records: &BTreeMap<Digest, Record>,
    finish: impl Fn(&File) -> io::Result<()>,
) -> Result<(), PlanFileError> {
    let head = format::head(header, records).map_err(|fault| fault.unwritten(&target.path))?;
    let mut file = temporary(&target.folder).map_err(PlanFileError::io(&target.folder, "creating a file in"))?;
    let mut written = || -> io::Result<()> {
        file.write_all(&head)?;
        records.values().try_for_each(|record| file.write_all(&record.payload))?;
        finish(file.as_file())
    };
    written().map_err(PlanFileError::io(&target.path, "writing"))?;
    file.persist(&target.file).map_err(|e| PlanFileError::io(&target.path, "replacing")(e.error))?;
    Ok(())
}

const TEMPORARY: [&str; 2] = [".sdpa-", ".tmp"];

/// Returns whether a file name is that of an unfinished write.
pub(super) fn is_temporary(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(TEMPORARY[0]) && name.ends_with(TEMPORARY[1])
}

fn temporary(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMPORARY[0]).suffix(TEMPORARY[1]);
    // Readable by all, as far as the umask permits.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    builder.tempfile_in(folder)
}

/// Flushes the new name to disk.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // Some file systems cannot flush a folder.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}

/// Other platforms cannot open folders.
#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}
