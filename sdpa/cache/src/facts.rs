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
    /// Memory that the values of all entries take.
    pub weight: Weight,
    /// Number of lookups that found an entry, or waited for a value that another thread was building.
    pub hits: u64,
    /// Number of lookups that built a value.
    pub misses: u64,
    /// Number of builds that failed.
    pub failures: u64,
    /// Number of lookups that returned a remembered *unsupported* error.
    pub refusals: u64,
    /// Number of entries that were dropped to stay within the bounds.
    pub evictions: u64,
    /// Number of builds of values that had been evicted shortly before.
    pub rebuilt: u64,
    /// Number of values that were returned to the caller but not kept, because they were too large or every other entry was pinned.
    pub not_kept: u64,
}

/// The time of each stage of a build. Files store whole microseconds. The struct is exhaustive, so that values set the stages that they
/// know and take the others from `Default`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildTime {
    /// The time of the whole build.
    #[serde(with = "micros")]
    pub total: Duration,
    /// The time of lowering the problem to a graph or to source code.
    #[serde(with = "micros")]
    pub lower: Duration,
    /// The time of querying cuDNN for its engines.
    #[serde(with = "micros")]
    pub heuristics: Duration,
    /// The time of compiling graphs or sources to machine code.
    #[serde(with = "micros")]
    pub compile: Duration,
    /// The time of running every engine configuration to find the fastest.
    #[serde(default, with = "micros")]
    pub tune: Duration,
    /// The time of reading the value from a plan file.
    #[serde(with = "micros")]
    pub load: Duration,
}

/// Statistics of one cache entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryFacts {
    /// The number of the entry, counted from 1 in build order.
    pub id: u64,
    /// A short description of the entry's key.
    pub label: String,
    /// The time at which the entry was created, relative to the creation of the cache.
    #[serde(with = "micros")]
    pub made: Duration,
    /// The time of each stage of the entry's build.
    pub built: BuildTime,
    /// Number of lookups that found the entry.
    pub hits: u64,
    /// The amount of memory that the value takes.
    pub weight: Weight,
    /// The engine or kernel that computes the value's result.
    pub engine: String,
    /// True if a [`Pin`](crate::Pin) keeps the entry in the cache.
    pub pinned: bool,
}

/// The reason why an entry was dropped.
///
/// Exhaustive: reports have a text for each reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The cache had more entries than its bound.
    Entries,
    /// The values in the cache had more bytes than its bound.
    Bytes,
    /// The cache was cleared.
    Cleared,
    /// The bounds of the cache were reduced.
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
    /// A lookup found no entry, and a build begins. The event lists the fields that differ from the nearest entry.
    Missed {
        /// The fields that differ from the nearest entry, each as `field asked ≠ there`. Empty if there is no entry to compare with, or
        /// if the same key was dropped before.
        nearest: Vec<String>,
        /// The reason why the key's entry was dropped, if it was in the cache before.
        evicted: Option<Why>,
    },
    /// A build succeeded.
    Built {
        /// The number of the new entry; 0 if the value was returned but not kept.
        id: u64,
        /// The engine or kernel that computes the value's result.
        engine: String,
        /// The time of each stage of the build.
        time: BuildTime,
        /// The amount of memory that the value takes.
        weight: Weight,
    },
    /// A build failed. A later lookup tries again.
    Failed {
        /// The error of the build.
        error: String,
    },
    /// A build was refused as unsupported. The cache remembers the refusal for a while.
    Unsupported {
        /// The error of the build, with every reason.
        error: String,
    },
    /// An entry was dropped.
    Evicted {
        /// The number of the dropped entry.
        id: u64,
        /// The number of lookups that had found the entry before it was dropped.
        hits: u64,
        /// The reason why the entry was dropped.
        why: Why,
    },
    /// Too many builds are for keys that were evicted, because the bounds are too small for the workload.
    Thrashing {
        /// The number of recent builds whose key had been evicted.
        rebuilt: u64,
        /// The number of recent builds that were counted, whether or not their key had been evicted.
        of: u64,
    },
    /// The cache has new bounds.
    Resized {
        /// The new bounds.
        limits: Limits,
    },
}

/// An event of a cache, with its key and time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvent {
    /// The time of the event, relative to the creation of the cache.
    #[serde(with = "micros")]
    pub at: Duration,
    /// A short description of the key; empty for events of the whole cache.
    pub label: String,
    /// Number of hits in the whole cache up to this event. Threads report their hits in batches, so the latest ones may be missing.
    pub hits_so_far: u64,
    /// The kind of the event, with its details.
    #[serde(flatten)]
    pub what: What,
}

/// A full record of a cache at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// The version of the snapshot's format: 1.
    pub version: u32,
    /// The name of the cache.
    pub name: String,
    /// The time of the record, relative to the creation of the cache.
    #[serde(with = "micros")]
    pub at: Duration,
    /// The bounds of the cache.
    pub limits: Limits,
    /// The counters of the cache.
    pub stats: CacheStats,
    /// The entries, most recently used first.
    pub entries: Vec<EntryFacts>,
    /// The latest events, in order of time. Older events are dropped.
    pub events: Vec<CacheEvent>,
    /// Number of older events that were dropped.
    pub forgotten: u64,
}

/// The state of all caches of one executor. As JSON it is the input of `cargo sdpa cache report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTrace {
    /// The version of cuDNN for which the entries were built.
    pub cudnn: String,
    /// The name of the device for which the entries were built.
    pub device: String,
    /// A snapshot of each cache of the executor.
    pub caches: Vec<CacheSnapshot>,
}

impl CacheTrace {
    /// Creates a record of the caches of one executor, on this version of cuDNN and this device.
    pub fn new(cudnn: impl Into<String>, device: impl Into<String>, caches: Vec<CacheSnapshot>) -> CacheTrace {
        CacheTrace { cudnn: cudnn.into(), device: device.into(), caches }
    }
}
