//! Attention on Apple GPUs.
//!
//! The kernels are not written yet: every problem is declined, with a typed reason, so that callers can already treat this
//! executor like the others.

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
    /// The machine may have one; there is no kernel for it yet.
    #[error("no Metal kernel is written yet")]
    NoKernel,
}

/// Whether attention runs on this machine's Apple GPU.
///
/// # Errors
/// Why not; at present always.
pub fn supports() -> Result<(), Declined> {
    if cfg!(target_vendor = "apple") {
        Err(Declined::NoKernel)
    } else {
        Err(Declined::NoDevice { target_os: std::env::consts::OS.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_is_told_why() {
        let reason = supports().unwrap_err();
        assert_eq!(matches!(reason, Declined::NoKernel), cfg!(target_vendor = "apple"), "{reason}");
    }
}
