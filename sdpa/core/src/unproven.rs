//! Problems that an executor's ledger does not cover. A ledger records which features an executor computes correctly on a library and
//! device.

use crate::error::ExecutorName;
use serde::Serialize;
use std::fmt;

/// Features of a problem that were not tested enough on an executor's library and device. A ledger records the tested features.
///
/// ```
/// use sdpa_core::{ExecutorName, Unproven, Untested};
///
/// let features = vec!["bool tensor in a mask with tensor over batch in a mask".to_owned()];
/// let unproven = Unproven::new(ExecutorName::CUDNN, "cuDNN 9.19.0, sm 90", Untested::Features(features));
/// assert_eq!(unproven.to_string(), "unproven on cuDNN 9.19.0, sm 90: bool tensor in a mask with tensor over batch in a mask");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unproven {
    /// The executor whose ledger of tested features lacks the evidence.
    pub executor: ExecutorName,
    /// The executor's library and device: version and compute capability.
    pub runtime: String,
    /// The evidence that is missing: all of it, or that for some features.
    pub what: Untested,
}

/// The evidence that an executor's ledger of tested features lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Untested {
    /// There is no ledger of tested features for this library and device.
    Everything,
    /// The ledger of tested features has too few right results for these features, or for these pairs of features.
    Features(Vec<String>),
}

impl Unproven {
    /// Describes a problem that is unproven on an executor's library and device.
    pub fn new(executor: ExecutorName, runtime: impl Into<String>, what: Untested) -> Unproven {
        Unproven { executor, runtime: runtime.into(), what }
    }

    /// Returns whether there is a ledger of tested features for the executor's library and device.
    pub fn has_ledger(&self) -> bool {
        match self.what {
            Untested::Everything => false,
            Untested::Features(_) => true,
        }
    }
}

/// The most features that a message names.
const NAMED: usize = 3;

impl fmt::Display for Unproven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unproven on {}: ", self.runtime)?;
        match &self.what {
            Untested::Everything => f.write_str("there is no ledger for this version and architecture"),
            Untested::Features(features) => {
                f.write_str(&features[..features.len().min(NAMED)].join("; "))?;
                if features.len() > NAMED {
                    write!(f, "; and {} more", features.len() - NAMED)?;
                }
                Ok(())
            }
        }
    }
}
