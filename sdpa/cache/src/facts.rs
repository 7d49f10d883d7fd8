//! Reports of a cache: plain data that converts to and from JSON.

use super::limits::{Limits, Weight};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Times in files are whole microseconds.
mod micros {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_micros)
    }
}

/// Counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStats {
    /// Current number of entries.
    pub entries: usize,
    /// Memory of the entries.
    pub weight: Weight,
    /// Lookups that found an entry, or waited for one that another thread was building.
    pub hits: u64,
    /// Lookups that built.
    pub misses: u64,
    /// Builds that failed.
    pub failures: u64,
    /// Lookups that returned a remembered *unsupported*.
    pub refusals: u64,
    /// Entries dropped to stay within the bounds.
    pub evictions: u64,
    /// Builds of values that had been evicted shortly before.
    pub rebuilt: u64,
    /// Values that were returned to the caller but not kept: too large, or every other entry was pinned.
    pub not_kept: u64,
}

/// The time of each stage of a build. Files store whole microseconds. Exhaustive, so that values set the known stages and leave the rest to
/// `Default`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildTime {
    /// The whole build.
    #[serde(with = "micros")]
    pub total: Duration,
    /// Lowering the problem to a graph or source.
    #[serde(with = "micros")]
    pub lower: Duration,
    /// Asking cuDNN for its engines.
    #[serde(with = "micros")]
    pub heuristics: Duration,
    /// Compiling graphs or sources to machine code.
    #[serde(with = "micros")]
    pub compile: Duration,
    /// Running every configuration to find the fastest.
    #[serde(default, with = "micros")]
    pub tune: Duration,
    /// Reading the value from a plan file.
    #[serde(with = "micros")]
    pub load: Duration,
}

/// The facts of one entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryFacts {
    /// The entry's number, counted from 1 in build order.
    pub id: u64,
    /// A short description of the key.
    pub label: String,
    /// Time of creation, since the cache was created.
    #[serde(with = "micros")]
    pub made: Duration,
    /// The duration of the build.
    pub built: BuildTime,
    /// Lookups that found the entry.
    pub hits: u64,
    /// Memory of the value.
    pub weight: Weight,
    /// The engine or kernel that runs the entry.
    pub engine: String,
    /// Whether a [`Pin`](crate::Pin) holds it.
    pub pinned: bool,
}

/// Why an entry was dropped.
///
/// Exhaustive: reports have a text for each reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There were more entries than the bound.
    Entries,
    /// The entries had more bytes than the bound.
    Bytes,
    /// The cache was cleared.
    Cleared,
    /// The bounds were reduced.
    Resized,
}

impl Why {
    /// Returns the reason as text.
    pub fn text(self) -> &'static str {
        match self {
            Why::Entries => "the bound on entries",
            Why::Bytes => "the bound on bytes",
            Why::Cleared => "the cache was cleared",
            Why::Resized => "the bounds were made smaller",
        }
    }
}

/// An event of a cache.
///
/// Exhaustive: reports have a line for each event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// A lookup missed and a build begins. Lists the fields that differ from the nearest entry.
    Missed {
        /// `field there ≠ asked`, for the nearest entry; empty for the first key of its kind.
        nearest: Vec<String>,
        /// Why it was dropped, if it was in the cache before.
        evicted: Option<Why>,
    },
    /// A build ended.
    Built {
        /// The entry; 0 if it was not kept.
        id: u64,
        /// The engine or kernel that runs the value.
        engine: String,
        /// The parts of the build time.
        time: BuildTime,
        /// Memory of the value.
        weight: Weight,
    },
    /// A build failed; a later lookup tries again.
    Failed {
        /// The error.
        error: String,
    },
    /// A build was refused; the refusal is remembered for a while.
    Unsupported {
        /// Every reason.
        error: String,
    },
    /// An entry was dropped.
    Evicted {
        /// The entry.
        id: u64,
        /// Lookups that had found it.
        hits: u64,
        /// Why it was dropped.
        why: Why,
    },
    /// Too many builds are of evicted keys: the bounds are too small for the work.
    Thrashing {
        /// Number of the last builds whose key had been evicted.
        rebuilt: u64,
        /// Number of builds considered.
        of: u64,
    },
    /// The cache has new bounds.
    Resized {
        /// The new bounds.
        limits: Limits,
    },
}

/// An event with its key and time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvent {
    /// Time since the cache was created.
    #[serde(with = "micros")]
    pub at: Duration,
    /// A short description of the key; empty for events of the whole cache.
    pub label: String,
    /// Hits of the whole cache up to then, as far as threads have reported them.
    pub hits_so_far: u64,
    /// The event.
    #[serde(flatten)]
    pub what: What,
}

/// A full record of a cache at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// The version of this format: 1.
    pub version: u32,
    /// The name of the cache.
    pub name: String,
    /// Time since the cache was created.
    #[serde(with = "micros")]
    pub at: Duration,
    /// The bounds of the cache.
    pub limits: Limits,
    /// Its counters.
    pub stats: CacheStats,
    /// Entries, most recently used first.
    pub entries: Vec<EntryFacts>,
    /// The latest events, in order; older ones are dropped.
    pub events: Vec<CacheEvent>,
    /// Number of dropped events.
    pub forgotten: u64,
}

/// The caches of one executor, for files; the input of `cargo sdpa cache report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTrace {
    /// The runtime that built the entries: the version of cuDNN.
    pub cudnn: String,
    /// The device that they were built for.
    pub device: String,
    /// A snapshot of each cache.
    pub caches: Vec<CacheSnapshot>,
}

impl CacheTrace {
    /// Creates a record of one executor's caches, on this runtime and device.
    pub fn new(cudnn: impl Into<String>, device: impl Into<String>, caches: Vec<CacheSnapshot>) -> CacheTrace {
        CacheTrace { cudnn: cudnn.into(), device: device.into(), caches }
    }
}
