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
    /// An earlier call failed, so the ranks may be at different steps.
    #[error("an earlier call on this rank failed ({0}); make a new group")]
    Broken(String),
}

impl From<sdpa_core::SpecErrors> for ParallelError {
    fn from(errors: sdpa_core::SpecErrors) -> ParallelError {
        ParallelError::Attention(errors.into())
    }
}
