//! A bounded folder of records, one file each, that processes of one user share.

use super::digest::Digest;
use super::error::PlanFileError;
use super::guard;
use super::head::Head;
use super::read::PlanFile;
use super::write::{self, Record};
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The extension of a record's file. Its name is the key.
const EXTENSION: &str = "record";
/// A temporary file that is older belongs to a process that was killed while it wrote.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A bounded folder of records, one file each, that processes of one user share.
///
/// - **Bounded.** [`Folder::put`] deletes the least recently used records until all together are within the limit.
/// - **Checked.** Each file is a [`PlanFile`] with one record. A record whose checksum, key or head does not match is an error or absent, never returned.
/// - **Private.** The folder is created with mode 0700. A folder or a file that another user owns or may write to is refused.
/// - **Shared.** A record is written to a temporary file in the folder and renamed, so no process reads a part of one. Readers take no lock.
///
/// ```
/// use sdpa_cache::planfile::{Digest, Folder, Head, Record};
///
/// #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
/// struct Compiler {
///     version: u32,
/// }
///
/// impl Head for Compiler {
///     type Mismatch = String;
///     fn mismatch(&self, here: &Compiler) -> Option<String> {
///         (self != here).then(|| format!("version: the file has {}, here is {}", self.version, here.version))
///     }
/// }
///
/// # let parent = tempfile::tempdir()?;
/// let folder = Folder::new(parent.path().join("kernels"), 1 << 20);
/// let (here, key) = (Compiler { version: 1 }, Digest::of(b"text"));
/// assert_eq!(folder.get(&here, &key)?, None);
/// folder.put(&here, Record { key, label: "causal".to_owned(), payload: b"machine code".to_vec() })?;
/// assert_eq!(folder.get(&here, &key)?.as_deref(), Some(&b"machine code"[..]));
/// assert_eq!(folder.clear()?.records, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    path: PathBuf,
    limit: u64,
}

/// The number of records in a folder, and their total size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of records.
    pub records: usize,
    /// Total size of the files, in bytes.
    pub bytes: u64,
}

/// The file of a record.
struct Kept {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Folder {
    /// Creates the description of a folder, which need not exist yet. `limit` is the limit for the total size of its files, in bytes. It
    /// does not access the disk.
    pub fn new(path: impl Into<PathBuf>, limit: u64) -> Folder {
        Folder { path: path.into(), limit }
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the limit for the total size of the files, in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the payload of a record, and marks the record as used now. Returns `None` if there is no record with this key, or if its
    /// header does not match `here`.
    ///
    /// # Errors
    /// Fails if the folder or the file is refused, damaged or cannot be read.
    pub fn get<H: Head>(&self, here: &H, key: &Digest) -> Result<Option<Vec<u8>>, PlanFileError> {
        if !self.is_there()? {
            return Ok(None);
        }
        let path = self.file(key);
        // Another process may delete the record at any time.
        let opened = PlanFile::open(&path).and_then(|file: PlanFile<H>| Ok((file, metadata(&path)?)));
        let (file, facts) = match opened {
            Err(PlanFileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        guard::check_private(&path, &facts)?;
        if let Some(mismatch) = file.header().mismatch(here) {
            tracing::debug!(path = %path.display(), %mismatch, "a record is not used");
            return Ok(None);
        }
        let payload = file.read(key)?;
        if payload.is_some() {
            // File times order the eviction. Without write permission nothing is evicted from the folder, so failures are ignored.
            File::options().write(true).open(&path).and_then(|file| file.set_modified(SystemTime::now())).ok();
        }
        Ok(payload)
    }

    /// Writes a record, which replaces a record of the same key, and then deletes the least recently used records until all are within
    /// the limit. A single record that exceeds the limit is not written. The file is not flushed to disk: after a power failure an
    /// incomplete file has a wrong checksum.
    ///
    /// # Errors
    /// Fails if the folder is refused, or if it cannot be created or written to.
    pub fn put(&self, here: &impl Head, record: Record) -> Result<(), PlanFileError> {
        if record.payload.len() as u64 > self.limit {
            let (path, bytes) = (self.path.display(), record.payload.len());
            tracing::debug!(%path, bytes, limit = self.limit, "a record is larger than the folder may be");
            return Ok(());
        }
        guard::make_private(&self.path)?;
        self.is_there()?;
        write::store(&self.file(&record.key), here, record)?;
        self.trim()
    }

    /// Returns the number of records and their total size.
    ///
    /// # Errors
    /// Fails if the folder is refused or cannot be read.
    pub fn usage(&self) -> Result<Usage, PlanFileError> {
        Ok(usage(&self.kept()?))
    }

    /// Deletes every record, and returns the number and total size of the deleted records. Other files in the folder stay.
    ///
    /// # Errors
    /// Fails if the folder is refused, or if a file cannot be deleted.
    pub fn clear(&self) -> Result<Usage, PlanFileError> {
        let kept = self.kept()?;
        kept.iter().try_for_each(|kept| remove(&kept.path))?;
        Ok(usage(&kept))
    }

    fn file(&self, key: &Digest) -> PathBuf {
        self.path.join(format!("{key}.{EXTENSION}"))
    }

    /// Returns whether the folder exists. A folder that another user may change is an error.
    fn is_there(&self) -> Result<bool, PlanFileError> {
        match metadata(&self.path) {
            Err(PlanFileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
            Ok(facts) if !facts.is_dir() => Err(PlanFileError::NotAFolder { path: self.path.clone() }),
            Ok(facts) => guard::check_private(&self.path, &facts).and_then(|()| guard::check_folder(&self.path)).map(|()| true),
        }
    }

    fn kept(&self) -> Result<Vec<Kept>, PlanFileError> {
        let mut kept = Vec::new();
        if !self.is_there()? {
            return Ok(kept);
        }
        let reading = || PlanFileError::io(&self.path, "reading");
        for entry in std::fs::read_dir(&self.path).map_err(reading())? {
            let path = entry.map_err(reading())?.path();
            // Another process may be deleting files of the folder.
            let Ok(facts) = std::fs::symlink_metadata(&path) else { continue };
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if path.extension().is_some_and(|extension| extension == EXTENSION) && facts.is_file() {
                kept.push(Kept { path, bytes: facts.len(), used });
            } else if write::is_temporary(&path) && used.elapsed().is_ok_and(|age| age > ABANDONED) {
                remove(&path)?;
            }
        }
        Ok(kept)
    }

    /// Deletes the least recently used records. Every writer does this after it has written, so the last of several leaves the folder within its
    /// limit.
    fn trim(&self) -> Result<(), PlanFileError> {
        let mut kept = self.kept()?;
        kept.sort_by_key(|kept| kept.used);
        let mut bytes = usage(&kept).bytes;
        for old in &kept {
            if bytes <= self.limit {
                break;
            }
            bytes = bytes.saturating_sub(old.bytes);
            tracing::debug!(path = %old.path.display(), bytes = old.bytes, "a record that was not used for long is deleted");
            remove(&old.path)?;
        }
        Ok(())
    }
}

fn usage(kept: &[Kept]) -> Usage {
    Usage { records: kept.len(), bytes: kept.iter().map(|kept| kept.bytes).sum() }
}

fn metadata(path: &Path) -> Result<Metadata, PlanFileError> {
    std::fs::metadata(path).map_err(PlanFileError::io(path, "reading the metadata of"))
}

/// Deletes a file. Another process may have deleted it already.
fn remove(path: &Path) -> Result<(), PlanFileError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PlanFileError::io(path, "deleting")(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Here(u32);

    impl Head for Here {
        type Mismatch = u32;

        fn mismatch(&self, here: &Here) -> Option<u32> {
            (self != here).then_some(self.0)
        }
    }

    fn record(n: u8, bytes: usize) -> Record {
        Record { key: Digest::of(&[n]), label: format!("record {n:03}"), payload: vec![n; bytes] }
    }

    fn parent() -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        (parent, path)
    }

    #[test]
    fn what_is_put_is_got_and_nothing_is_made_before() {
        let (_parent, path) = parent();
        let folder = Folder::new(&path, 1 << 20);
        assert_eq!((folder.get(&Here(1), &record(1, 9).key).unwrap(), folder.usage().unwrap()), (None, Usage::default()));
        assert_eq!(folder.clear().unwrap(), Usage::default());
        assert!(!path.exists());
        folder.put(&Here(1), record(1, 100)).unwrap();
        folder.put(&Here(1), record(2, 100)).unwrap();
        assert_eq!(folder.get(&Here(1), &record(1, 0).key).unwrap(), Some(vec![1; 100]));
        // Another head or another key finds nothing.
        assert_eq!(folder.get(&Here(2), &record(1, 0).key).unwrap(), None);
        assert_eq!(folder.get(&Here(1), &record(3, 0).key).unwrap(), None);
        assert_eq!(folder.usage().unwrap().records, 2);
        std::fs::write(path.join("letter"), "x").unwrap();
        assert_eq!(folder.clear().unwrap().records, 2);
        assert_eq!(folder.usage().unwrap(), Usage::default());
        assert!(path.join("letter").exists());
    }

    /// A file under the name of another key is not returned for that key.
    #[test]
    fn a_renamed_record_is_absent() {
        let (_parent, path) = parent();
        let folder = Folder::new(&path, 1 << 20);
        folder.put(&Here(1), record(1, 100)).unwrap();
        std::fs::rename(folder.file(&record(1, 0).key), folder.file(&record(2, 0).key)).unwrap();
        assert_eq!(folder.get(&Here(1), &record(2, 0).key).unwrap(), None);
    }

    #[test]
    fn no_byte_may_be_damaged_and_a_damaged_record_is_replaced() {
        let (_parent, path) = parent();
        let folder = Folder::new(&path, 1 << 20);
        folder.put(&Here(1), record(1, 40)).unwrap();
        let file = folder.file(&record(1, 0).key);
        let whole = std::fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&file, &bytes).unwrap();
            assert!(folder.get(&Here(1), &record(1, 0).key).is_err(), "byte {at}");
            std::fs::write(&file, &whole[..at]).unwrap();
            assert!(folder.get(&Here(1), &record(1, 0).key).is_err(), "{at} bytes");
        }
        folder.put(&Here(1), record(1, 40)).unwrap();
        assert_eq!(folder.get(&Here(1), &record(1, 0).key).unwrap(), Some(vec![1; 40]));
    }

    #[test]
    fn the_least_recently_used_records_go_first_and_the_limit_holds() {
        let (_parent, path) = parent();
        let one = {
            let folder = Folder::new(&path, u64::MAX);
            folder.put(&Here(1), record(0, 1000)).unwrap();
            folder.clear().unwrap().bytes
        };
        let folder = Folder::new(&path, 3 * one);
        let put = |n: u8, seconds: u64| {
            folder.put(&Here(1), record(n, 1000)).unwrap();
            let file = File::options().write(true).open(folder.file(&record(n, 0).key)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(1000 - seconds)).unwrap();
        };
        (0..3).for_each(|n| put(n, u64::from(n)));
        // A hit makes the oldest record the newest.
        assert!(folder.get(&Here(1), &record(0, 0).key).unwrap().is_some());
        put(3, 10);
        let there: Vec<bool> = (0..4).map(|n| folder.file(&record(n, 0).key).exists()).collect();
        assert_eq!(there, [true, false, true, true]);
        for n in 4..20 {
            put(n, u64::from(n));
            assert!(folder.usage().unwrap().bytes <= 3 * one);
        }
        // A record that is larger than the limit by itself is not stored, and evicts no other record.
        folder.put(&Here(1), record(99, 4000)).unwrap();
        assert_eq!(folder.usage().unwrap().records, 3);
        assert!(!folder.file(&record(99, 0).key).exists());
        // With a limit below the size of the folder, writing a record evicts the others.
        Folder::new(&path, one).put(&Here(1), record(50, 1000)).unwrap();
        assert_eq!(folder.usage().unwrap().records, 1);
    }

    #[test]
    fn several_writers_leave_whole_records_and_no_temporary_file() {
        let (_parent, path) = parent();
        let folder = &Folder::new(&path, 8 * 2000);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                scope.spawn(move || {
                    for n in 0..40u8 {
                        let record = record(n % 10, 1500);
                        folder.put(&Here(1), record.clone()).unwrap();
                        let got = folder.get(&Here(1), &record.key).unwrap();
                        assert!(got.is_none_or(|payload| payload == record.payload), "thread {thread}, record {n}");
                    }
                });
            }
        });
        assert!(folder.usage().unwrap().bytes <= folder.limit());
        assert!(std::fs::read_dir(&path).unwrap().all(|entry| !write::is_temporary(&entry.unwrap().path())));
    }

    #[test]
    fn abandoned_temporary_files_are_deleted() {
        let (_parent, path) = parent();
        let folder = Folder::new(&path, 1 << 20);
        folder.put(&Here(1), record(1, 10)).unwrap();
        let [old, new] = [".sdpa-old.tmp", ".sdpa-new.tmp"].map(|name| path.join(name));
        for file in [&old, &new] {
            std::fs::write(file, "half").unwrap();
        }
        let file = File::options().write(true).open(&old).unwrap();
        file.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        folder.put(&Here(1), record(2, 10)).unwrap();
        assert!(!old.exists() && new.exists());
    }

    #[cfg(unix)]
    #[test]
    fn what_others_may_write_is_refused_with_the_reason() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let (_parent, path) = parent();
        let folder = Folder::new(&path, 1 << 20);
        folder.put(&Here(1), record(1, 10)).unwrap();
        for made in [&path, &path.join("..")] {
            assert_eq!(std::fs::metadata(made).unwrap().mode() & 0o7777, 0o700, "{}", made.display());
        }
        let set = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o770, 0o707, 0o1777] {
            set(&path, mode);
            let told = folder.get(&Here(1), &record(1, 0).key).unwrap_err().to_string();
            assert!(told.contains(&format!("mode {mode:04o}: other users may write to it")) && told.contains("chmod go-w"), "{told}");
            assert_eq!(folder.put(&Here(1), record(2, 10)).unwrap_err().to_string(), told);
            assert_eq!(folder.usage().unwrap_err().to_string(), told);
            assert_eq!(folder.clear().unwrap_err().to_string(), told);
        }
        set(&path, 0o700);
        assert_eq!(folder.usage().unwrap().records, 1);
        // A file that others may write is not used, and is replaced.
        let file = folder.file(&record(1, 0).key);
        for mode in [0o620, 0o602] {
            set(&file, mode);
            assert!(folder.get(&Here(1), &record(1, 0).key).is_err());
            folder.put(&Here(1), record(1, 10)).unwrap();
            assert!(folder.get(&Here(1), &record(1, 0).key).unwrap().is_some());
        }
        // The path of a file is refused as a folder.
        let other = Folder::new(&file, 1 << 20);
        assert!(matches!(other.get(&Here(1), &record(1, 0).key), Err(PlanFileError::NotAFolder { .. })));
        assert!(other.put(&Here(1), record(1, 10)).is_err());
    }
}
