//! Why nothing is run here: what a machine lacks, and limits that a problem breaks.

use sdpa_core::Reason;
use serde::{Deserialize, Serialize};

/// What a machine lacks for the kernels to run on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Declined {
    /// This machine has no Apple GPU.
    #[error("this machine has no Apple GPU (the target is {target_os})")]
    NoDevice {
        /// The operating system that this was compiled for.
        target_os: String,
    },
    /// An Apple machine whose system shows no GPU to this process.
    #[error("Metal has no default device for this process")]
    NoGpu,
    /// The system does not know the version of MSL that kernels are written in.
    #[error("the system is {system}: kernels are MSL 3.1, which begins with {needs}")]
    System {
        /// The system's version, in its own words.
        system: String,
        /// The first system that knows it.
        needs: String,
    },
    /// The GPU lacks something that every kernel uses.
    #[error("{field} of {gpu} is {value}: {limit}")]
    Gpu {
        /// The GPU's name.
        gpu: String,
        /// The property that is asked for.
        field: String,
        /// The GPU's answer.
        value: String,
        /// What the kernels need.
        limit: String,
    },
}

impl From<Declined> for Reason {
    fn from(why: Declined) -> Reason {
        Reason::Absent(why.to_string())
    }
}

/// That a problem breaks a limit of the kernels.
pub(crate) fn limit(field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) -> Reason {
    Reason::Limit { field: field.to_owned(), value: value.to_string(), limit: limit.to_string() }
}

/// Collects limits that a problem breaks.
#[derive(Debug, Default)]
pub(crate) struct Check(pub(crate) Vec<Reason>);

impl Check {
    pub(crate) fn that(&mut self, holds: bool, field: &str, value: impl std::fmt::Display, limit: impl std::fmt::Display) {
        if !holds {
            self.0.push(self::limit(field, value, limit));
        }
    }
}
