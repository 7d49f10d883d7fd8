//! Errors of proofs.

use super::About;
use std::fmt::{Display, Formatter, Result};
use std::path::PathBuf;

/// The error of a proof that cannot begin or continue. A wrong result is an answer, not an error.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProveError {
    /// The state file cannot be opened, read or written.
    Io {
        /// The path of the file or of its folder.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file does not hold the state of a proof.
    NotAState {
        /// The path of the file.
        path: PathBuf,
        /// The reason why it is not the state of a proof.
        why: String,
    },
    /// The state has answers about another executor, device or version.
    Other {
        /// The path of the file.
        path: PathBuf,
        /// The subject of the answers in the file.
        there: About,
        /// The subject of this proof.
        here: About,
    },
    /// Another process is adding answers to the state file.
    Busy {
        /// The path of the file.
        path: PathBuf,
    },
    /// A worker process did not start, or its executor is not available.
    Worker {
        /// The reason, with the output lines of the process.
        why: String,
    },
}

impl ProveError {
    pub(super) fn io(path: &std::path::Path, action: &'static str) -> impl FnOnce(std::io::Error) -> ProveError {
        let path = path.to_owned();
        move |source| ProveError::Io { path, action, source }
    }
}

impl Display for ProveError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            ProveError::Io { path, action, source } => write!(f, "{} {}: {source}", action, path.display()),
            ProveError::NotAState { path, why } => {
                write!(f, "{} is not the state of a proof: {why}", path.display())
            }
            ProveError::Other { path, there, here } => {
                let path = path.display();
                write!(f, "{path} has answers of {there}, expected answers of {here}")
            }
            ProveError::Busy { path } => {
                write!(f, "another process adds answers to {}", path.display())
            }
            ProveError::Worker { why } => write!(f, "a worker process could not open the executor: {why}"),
        }
    }
}

impl std::error::Error for ProveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ProveError::Io { source, .. } => Some(source),
            ProveError::NotAState { .. } | ProveError::Other { .. } | ProveError::Busy { .. } | ProveError::Worker { .. } => None,
        }
    }
}
