//! Errors of plan files.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why a plan file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFileError {
    /// The operating system refused an operation.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// The path of the file or folder.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file does not begin with the magic number of plan files.
    #[error("{} is not a plan file", path.display())]
    NotAPlanFile {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file was written by a later version of this library.
    #[error("{} has format version {found}, this release reads {known} and older", path.display())]
    Newer {
        /// The path of the file.
        path: PathBuf,
        /// The format version of the file.
        found: u32,
        /// The newest format version that this library supports.
        known: u32,
    },
    /// The file is truncated: it ends before the last of its fields and records.
    #[error("{} is cut off: it has {has} bytes, but its {what} ends at byte {needs}", path.display())]
    Truncated {
        /// The path of the file.
        path: PathBuf,
        /// The part of the file that is truncated.
        what: String,
        /// The smallest possible size of the complete file, in bytes.
        needs: u64,
        /// The actual size of the file, in bytes.
        has: u64,
    },
    /// A checksum in the file does not match its contents.
    #[error("{} is damaged: the checksum of its {what} does not match", path.display())]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The part of the file that the checksum covers.
        what: String,
    },
    /// A field of the file breaks a rule of the format.
    #[error("{} is corrupt: its {what} is {value}, expected {rule}", path.display())]
    Corrupt {
        /// The path of the file.
        path: PathBuf,
        /// The field that breaks the rule.
        what: String,
        /// The value of the field.
        value: String,
        /// The rule of the format.
        rule: String,
    },
    /// Every user may change or replace the file.
    #[error("{} has mode {mode:04o}: every user may write to it, and plans are machine code; `chmod o-w` it", path.display())]
    Permissions {
        /// The path of the file or of its folder.
        path: PathBuf,
        /// The permission bits of the path.
        mode: u32,
    },
    /// Other users may change a folder of records or a file in it.
    #[error("{} has mode {mode:04o}: other users may write to it, and kernels are machine code; `chmod go-w` it, or name another folder", path.display())]
    OthersWrite {
        /// The path of the folder, or of a file in it.
        path: PathBuf,
        /// The permission bits of the path.
        mode: u32,
    },
    /// Another user may change or replace the file.
    #[error("{} belongs to user {owner}, who is neither this user ({user}) nor root, and plans are machine code; use a file that you own", path.display())]
    Owner {
        /// The path of the file, or of a folder on the way to it.
        path: PathBuf,
        /// The user id of the path's owner.
        owner: u32,
        /// The user id of the process that reads or writes.
        user: u32,
    },
    /// The path is a folder, a device or a dangling link instead of a regular file.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The path of a folder of records is not a folder.
    #[error("{} is not a folder", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The plan to write breaks a rule of the format.
    #[error("{} was not written: the {what} is {value}, expected {rule}", path.display())]
    Refused {
        /// The path of the file.
        path: PathBuf,
        /// The field that breaks the rule.
        what: String,
        /// The value of the field.
        value: String,
        /// The rule of the format.
        rule: String,
    },
}

impl PlanFileError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> PlanFileError {
        move |source| PlanFileError::Io { path: path.to_owned(), action, source }
    }

    /// Returns whether the file can be overwritten without losing readable plans: it does not exist, or is an unreadable plan file.
    pub fn is_replaceable(&self) -> bool {
        match self {
            PlanFileError::Truncated { .. } | PlanFileError::Damaged { .. } | PlanFileError::Corrupt { .. } => true,
            PlanFileError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            PlanFileError::NotAPlanFile { .. }
            | PlanFileError::Newer { .. }
            | PlanFileError::Permissions { .. }
            | PlanFileError::Owner { .. }
            | PlanFileError::OthersWrite { .. }
            | PlanFileError::NotAFile { .. }
            | PlanFileError::NotAFolder { .. }
            | PlanFileError::Refused { .. } => false,
        }
    }
}

/// A field of a plan file that breaks a rule of the format.
#[derive(Debug)]
pub struct Fault {
    pub(super) what: String,
    pub(super) value: String,
    pub(super) rule: String,
}

impl Fault {
    /// Creates a fault from the name of the field, its value, and the rule that it breaks.
    pub fn new(what: impl Into<String>, value: impl ToString, rule: impl Into<String>) -> Fault {
        Fault { what: what.into(), value: value.to_string(), rule: rule.into() }
    }

    /// Converts the fault to the error of reading the plan file at `path`.
    pub(super) fn read(self, path: &Path) -> PlanFileError {
        PlanFileError::Corrupt { path: path.to_owned(), what: self.what, value: self.value, rule: self.rule }
    }

    /// Converts the fault to the error of writing the plan file at `path`.
    pub(super) fn unwritten(self, path: &Path) -> PlanFileError {
        PlanFileError::Refused { path: path.to_owned(), what: self.what, value: self.value, rule: self.rule }
    }
}
