//! Bounds of a cache, and the memory of its values.

use serde::{Deserialize, Serialize};
use std::num::NonZeroUsize;
use std::ops::AddAssign;
use std::time::Duration;

/// Memory of one value in bytes, as far as known. A plain value, written as a literal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    /// Bytes of host memory.
    pub host: u64,
    /// Bytes of device memory: code and tables.
    pub device: u64,
    /// Bytes of device memory that a call of the value uses as workspace.
    pub workspace: u64,
}

impl Weight {
    /// Returns the sum of all three.
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

/// The bounds of a cache. Both hold at any time: a value that would exceed one is not kept.
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
    /// Number of entries.
    pub entries: NonZeroUsize,
    /// Sum of [`Weight::bytes`] over all entries.
    pub bytes: u64,
    /// How long *unsupported* is remembered, for as many keys as entries. Other failures are not remembered.
    pub refusals: Duration,
}

impl Limits {
    /// Sets the number of entries.
    #[must_use]
    pub fn with_entries(mut self, entries: NonZeroUsize) -> Self {
        self.entries = entries;
        self
    }

    /// Sets the sum of [`Weight::bytes`] over all entries.
    #[must_use]
    pub fn with_bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// Sets how long *unsupported* is remembered.
    #[must_use]
    pub fn with_refusals(mut self, refusals: Duration) -> Self {
        self.refusals = refusals;
        self
    }

    /// Returns bounds of this many entries, 16 GiB, and one minute for refusals.
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
