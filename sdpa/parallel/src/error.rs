//! Errors of passes over several ranks.

use crate::exchange::ExchangeError;

/// Why a pass over several ranks failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// The specification or the call breaks a rule, no executor supports a part of the problem, or an executor failed.
    #[error(transparent)]
    Attention(#[from] sdpa_core::Error),
    /// Another rank failed, or did not answer.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A call into the CUDA driver or NCCL failed, or another rank did not answer.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Device(#[from] sdpa_driver::Error),
    /// The ranks do not run the same problem.
    #[error("{field} differs between ranks: ranks {ranks:?} have another value than rank {rank}; pass equal specifications on every rank")]
    Mismatch {
        /// The first field that differs.
        field: &'static str,
        /// This rank.
        rank: usize,
        /// The ranks with another value than this rank's.
        ranks: Vec<usize>,
    },
    /// The ranks of a problem are not those of the exchange.
    #[error("the exchange: got {got} ranks, expected {expected}, the ranks of the problem")]
    Ranks {
        /// The number of ranks of the exchange.
        got: usize,
        /// The number of ranks of the problem.
        expected: usize,
    },
    /// The communicator and the planner have different devices.
    #[error("the communicator is on device {got}, expected device {expected}, for which parts are prepared")]
    Devices {
        /// The ordinal of the communicator's device.
        got: u32,
        /// The ordinal of the planner's device.
        expected: u32,
    },
    /// An earlier call failed, so the ranks may be at different steps.
    #[error("an earlier call on this rank failed ({0}); make a new group")]
    Broken(String),
}

impl From<sdpa_core::SpecErrors> for ParallelError {
    fn from(errors: sdpa_core::SpecErrors) -> ParallelError {
        ParallelError::Attention(errors.into())
    }
}
