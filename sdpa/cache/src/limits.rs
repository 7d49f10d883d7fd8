//! Bounds of a cache, and the memory of its values.

use serde::{Deserialize, Serialize};
use std::num::NonZeroUsize;
use std::ops::AddAssign;
use std::time::Duration;

/// The memory of one value in bytes, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    /// Bytes of host memory that the value takes.
    pub host: u64,
    /// Bytes of device memory that the value takes: code and tables.
    pub device: u64,
    /// Bytes of device memory that a call needs as workspace, for a value that can be called.
    pub workspace: u64,
}

impl Weight {
    /// Returns the sum of host memory, device memory and workspace, in bytes.
    pub fn bytes(self) -> u64 {
        self.host.saturating_add(self.device).saturating_add(self.workspace)
    }
}

impl AddAssign for Weight {
    fn add_assign(&mut self, other: Weight) {
        self.host = self.host.saturating_add(other.host);
        self.device = self.device.saturating_add(other.device);
        self.workspace = self.workspace.saturating_add(other.workspace);
    }
}

/// The bounds of a cache: on its entries and on their memory. Both hold at any time: a value that would exceed one is not kept.
///
/// ```
/// use sdpa_cache::Limits;
/// use std::num::NonZeroUsize;
///
/// let limits = Limits::entries(NonZeroUsize::new(64).unwrap()).with_bytes(2 << 30);
/// assert_eq!((limits.entries.get(), limits.bytes), (64, 2 << 30));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Limits {
    /// The largest number of entries that the cache holds.
    pub entries: NonZeroUsize,
    /// The largest sum of [`Weight::bytes`] over all entries.
    pub bytes: u64,
    /// The time for which the cache remembers that a problem is *unsupported*, for at most as many keys as entries. Other failures are
    /// not remembered.
    pub refusals: Duration,
}

impl Limits {
    /// Sets the largest number of entries that the cache holds.
    #[must_use]
    pub fn with_entries(mut self, entries: NonZeroUsize) -> Self {
        self.entries = entries;
        self
    }

    /// Sets the largest sum of [`Weight::bytes`] over all entries.
    #[must_use]
    pub fn with_bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// Sets for how long the cache remembers that a problem is *unsupported*.
    #[must_use]
    pub fn with_refusals(mut self, refusals: Duration) -> Self {
        self.refusals = refusals;
        self
    }

    /// Returns bounds of this many entries and of 16 GiB of memory. Refusals of unsupported problems are remembered for one minute.
    pub fn entries(entries: NonZeroUsize) -> Limits {
        Limits { entries, bytes: 16 << 30, refusals: Duration::from_secs(60) }
    }
}

impl Default for Limits {
    /// Bounds of 256 entries and 16 GiB.
    fn default() -> Limits {
        Limits::entries(NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN))
    }
}
