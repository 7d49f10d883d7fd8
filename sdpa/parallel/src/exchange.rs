//! The one thing that ranks need of each other: a grouped exchange of bytes.

use std::fmt::Debug;
use std::time::Duration;

/// Bytes for another rank.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The rank that receives them.
    pub peer: usize,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Memory for bytes of another rank.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// The rank that sends them.
    pub peer: usize,
    /// The memory: as long as what is sent.
    pub bytes: &'a mut [u8],
}

/// A rank's connection with the other ranks of its group, over host memory.
///
/// Implement it for a process group that exists, such as MPI's or PyTorch's: one method moves bytes, as `MPI_Isend` and `MPI_Irecv` followed by a wait do,
/// or grouped `ncclSend` and `ncclRecv`.
pub trait Exchange: Debug + Send {
    /// Returns this rank, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Sends and receives, and returns when all of it is done. Transfers of one call progress together; those between two ranks keep their order, across
    /// calls too.
    ///
    /// # Errors
    /// Fails if another rank failed, is gone, sends another number of bytes or does not answer before the deadline. The group is then of no further
    /// use.
    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<(), ExchangeError>;

    /// Tells the other ranks that this one failed, so that they need not wait for the deadline.
    fn abort(&mut self, reason: &str);
}

/// Why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// A rank did not answer in time.
    #[error("rank {peer} did not answer within {after:?}; it may be stopped, or wait for another exchange")]
    Timeout {
        /// The rank that was waited for.
        peer: usize,
        /// The deadline.
        after: Duration,
    },
    /// A rank reported a failure.
    #[error("rank {peer} failed: {reason}")]
    Failed {
        /// The rank that failed.
        peer: usize,
        /// Its own error.
        reason: String,
    },
    /// A rank left the group.
    #[error("rank {peer} left the group before it sent what this rank waits for")]
    Gone {
        /// The rank that left.
        peer: usize,
    },
    /// A rank sent another number of bytes than this rank expects.
    #[error("rank {peer}: got {got} bytes, expected {expected}; the ranks do not run the same problem")]
    Length {
        /// The rank that sent them.
        peer: usize,
        /// The number of bytes that it sent.
        got: usize,
        /// The number of bytes that this rank expects.
        expected: usize,
    },
    /// There is no such rank in the group.
    #[error("rank {peer}: got a transfer, expected a rank below {size} other than this one")]
    Peer {
        /// The rank that a transfer names.
        peer: usize,
        /// The number of ranks.
        size: usize,
    },
}
