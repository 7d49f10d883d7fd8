//! Why a problem is not run here.

use serde::{Deserialize, Serialize};

/// Why a problem is not run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Declined {
    /// This machine has no Apple GPU.
    #[error("this machine has no Apple GPU (the target is {target_os})")]
    NoDevice {
        /// The operating system that this was compiled for.
        target_os: String,
    },
    /// The machine may have one; nothing here calls it yet.
    #[error("the kernels are not connected to Apple's interface yet")]
    NoHost,
    /// A limit of the kernels.
    #[error("{field} is {value}: {limit}")]
    Limit {
        /// The field.
        field: String,
        /// What it holds.
        value: String,
        /// What the kernels take.
        limit: String,
    },
}

impl Declined {
    pub(crate) fn limit(field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) -> Declined {
        Declined::Limit { field: field.to_owned(), value: value.to_string(), limit: limit.to_string() }
    }
}

/// Collects limits that a problem breaks.
#[derive(Debug, Default)]
pub(crate) struct Check(pub(crate) Vec<Declined>);

impl Check {
    pub(crate) fn that(&mut self, holds: bool, field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) {
        if !holds {
            self.0.push(Declined::limit(field, value, limit));
        }
    }
}
