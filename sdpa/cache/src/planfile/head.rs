//! Headers of plan files: the compiler and target of all records.

use super::error::Fault;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::{Debug, Display};

/// The header of a plan file: the compiler and target of all its records. It is stored as JSON before the records.
pub trait Head: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// The type that describes why the records of a file cannot be used in this process.
    type Mismatch: Display;

    /// Returns the reason why records with this header cannot be used in a process with the header `here`; `None` if they can.
    fn mismatch(&self, here: &Self) -> Option<Self::Mismatch>;

    /// Returns the header of a file that holds the records of two files with these headers. The headers must match.
    #[must_use]
    fn joined(&self, other: &Self) -> Self {
        let _ = other;
        self.clone()
    }

    /// Checks that the header may be stored in a file.
    ///
    /// # Errors
    /// Returns the field that is invalid.
    fn check(&self) -> Result<(), Fault> {
        Ok(())
    }
}
