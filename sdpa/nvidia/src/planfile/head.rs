//! What all records of a file were made by and for.

use super::error::Fault;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::{Debug, Display};

/// What all records of a file were made by and for: stands in front of them as JSON.
pub trait Head: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// Why records of a file are of no use here.
    type Mismatch: Display;

    /// Why records under this head are none under the one `here`; `None` when they are.
    fn mismatch(&self, here: &Self) -> Option<Self::Mismatch>;

    /// The head of a file with records of both, which do not mismatch.
    #[must_use]
    fn joined(&self, other: &Self) -> Self {
        let _ = other;
        self.clone()
    }

    /// Whether it may stand in a file.
    ///
    /// # Errors
    /// The field that may not.
    fn check(&self) -> Result<(), Fault> {
        Ok(())
    }
}
