//! What a cache tells about itself: plain data, in and out of JSON.

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
    /// Entries that are there now.
    pub entries: usize,
    /// Memory of those entries.
    pub weight: Weight,
    /// Lookups that found an entry, or waited for one that another thread was building.
    pub hits: u64,
    /// Lookups that built.
    pub misses: u64,
    /// Builds that failed.
    pub failures: u64,
    /// Lookups that were answered by a remembered *unsupported*.
    pub refusals: u64,
    /// Entries dropped to keep the bounds.
    pub evictions: u64,
    /// Builds of what had been evicted a short while before.
    pub rebuilt: u64,
    /// Values that were given to the caller and not kept: too heavy, or everything else was pinned.
    pub not_kept: u64,
}

/// The time that each stage of a build took. In files, times are whole microseconds. Exhaustive, so that values set what they know and leave the rest to `Default`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildTime {
    /// The whole build.
    #[serde(with = "micros")]
    pub total: Duration,
    /// From the problem to what is compiled: a graph, a text.
    #[serde(with = "micros")]
    pub lower: Duration,
    /// Asking cuDNN for its engines.
    #[serde(with = "micros")]
    pub heuristics: Duration,
    /// Compiling graphs or texts to machine code.
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
    /// The entry's number, counted from 1 in the order of builds.
    pub id: u64,
    /// The key in a few words.
    pub label: String,
    /// When the entry was made, from when the cache was.
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
/// Exhaustive: reports have a text for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There were more entries than the bound.
    Entries,
    /// The entries had more bytes than the bound.
    Bytes,
    /// The cache was cleared.
    Cleared,
    /// The bounds were made smaller.
    Resized,
}

impl Why {
    /// The reason in words.
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
/// Exhaustive: reports have a line for each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// A lookup found nothing; a build begins. With the nearest entry and the fields that differ.
    Missed {
        /// `field there ≠ asked`, of the nearest entry; empty for the first of its kind.
        nearest: Vec<String>,
        /// Why it was dropped, where it had been here before.
        evicted: Option<Why>,
    },
    /// A build ended.
    Built {
        /// The entry; 0 when it was not kept.
        id: u64,
        /// The engine or kernel that runs the value.
        engine: String,
        /// The parts of the build time.
        time: BuildTime,
        /// Memory of the value.
        weight: Weight,
    },
    /// A build failed, and is tried again.
    Failed {
        /// The error.
        error: String,
    },
    /// A build ended with a refusal, which is remembered for a while.
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
    /// Too much of what is built has been here before: the bounds are too small for the work.
    Thrashing {
        /// How many of the last builds were of what had been here before.
        rebuilt: u64,
        /// How many builds that is of.
        of: u64,
    },
    /// The cache was given new bounds.
    Resized {
        /// The new bounds.
        limits: Limits,
    },
}

/// Something that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvent {
    /// Time since the cache was made.
    #[serde(with = "micros")]
    pub at: Duration,
    /// The key in a few words; empty where it is about the whole cache.
    pub label: String,
    /// Hits of the whole cache until then, as far as threads have reported them.
    pub hits_so_far: u64,
    /// The event.
    #[serde(flatten)]
    pub what: What,
}

/// Everything that a cache knows of itself at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// The version of this format: 1.
    pub version: u32,
    /// The name that the cache was made with.
    pub name: String,
    /// Time since the cache was made.
    #[serde(with = "micros")]
    pub at: Duration,
    /// The bounds of the cache.
    pub limits: Limits,
    /// Its counters.
    pub stats: CacheStats,
    /// Entries, the most recently used first.
    pub entries: Vec<EntryFacts>,
    /// The latest events, in order; older ones are forgotten.
    pub events: Vec<CacheEvent>,
    /// Number of forgotten events.
    pub forgotten: u64,
}

/// The caches of one executor, for files: what `cargo sdpa cache report` reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTrace {
    /// The runtime that built the entries: of cuDNN, its version.
    pub cudnn: String,
    /// The device that they were built for.
    pub device: String,
    /// A snapshot of each cache.
    pub caches: Vec<CacheSnapshot>,
}

impl CacheTrace {
    /// Snapshots of the caches of one executor, on this runtime and device.
    pub fn new(cudnn: impl Into<String>, device: impl Into<String>, caches: Vec<CacheSnapshot>) -> CacheTrace {
        CacheTrace { cudnn: cudnn.into(), device: device.into(), caches }
    }
}
