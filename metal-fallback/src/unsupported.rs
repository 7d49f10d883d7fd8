//! Reasons why a problem cannot run: a missing capability of the machine, or a broken limit.

use sdpa_core::Reason;
use serde::{Deserialize, Serialize};

/// The reason why the Metal kernels cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Unavailable {
    /// This machine has no Apple GPU.
    #[error("this machine has no Apple GPU (the target is {target_os})")]
    NoDevice {
        /// The operating system of the compilation target.
        target_os: String,
    },
    /// This Apple machine does not offer a GPU to this process.
    #[error("Metal has no default device for this process")]
    NoGpu,
    /// The system does not support the MSL version of the kernels.
    #[error("the system is {system}, expected {needs} or newer: the kernels need MSL 3.1")]
    System {
        /// The version of the system.
        system: String,
        /// The first version of the system that supports the kernels.
        needs: String,
    },
    /// The GPU does not have a capability that every kernel uses.
    #[error("{field} of {gpu}: got {value}, expected {limit}")]
    Gpu {
        /// The name of the GPU.
        gpu: String,
        /// The property that does not suffice.
        field: String,
        /// The value of the property on this GPU.
        value: String,
        /// The value that the kernels require.
        limit: String,
    },
}

impl From<Unavailable> for Reason {
    fn from(why: Unavailable) -> Reason {
        Reason::Absent(why.to_string())
    }
}

/// Creates the reason for a broken limit of the kernels: the field, its value, and the limit.
pub(crate) fn limit(field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) -> Reason {
    Reason::Limit { field: field.to_owned(), value: value.to_string(), limit: limit.to_string() }
}

/// The limits of the kernels that a problem breaks, one reason for each.
#[derive(Debug, Default)]
pub(crate) struct Check(pub(crate) Vec<Reason>);

impl Check {
    pub(crate) fn that(&mut self, holds: bool, field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) {
        if !holds {
            self.0.push(self::limit(field, value, limit));
        }
    }
}
