//! What a cache tells about itself: plain data, in and out of JSON.

use super::limits::{Limits, Weight};
use serde::{Deserialize, Serialize};

/// How a cache has been used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStats {
    /// Entries that are there now.
    pub entries: usize,
    /// What they weigh.
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

/// Where the time of a build went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildTime {
    /// All of it.
    pub total: u64,
    /// From the problem to a graph.
    pub lower: u64,
    /// cuDNN's list of engines.
    pub heuristics: u64,
    /// Compiling what the runtime chose.
    pub compile: u64,
    /// Timing of every configuration.
    #[serde(default)]
    pub tune: u64,
    /// Out of a plan file.
    pub load: u64,
}

/// What is known of one entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryFacts {
    /// Counted from 1, in the order of builds.
    pub id: u64,
    /// The key in a few words.
    pub label: String,
    /// When it was made: microseconds since the cache was.
    pub made: u64,
    /// How long that took.
    pub built: BuildTime,
    /// Lookups that found it.
    pub hits: u64,
    /// What it weighs.
    pub weight: Weight,
    /// What runs the entry, in a word.
    pub engine: String,
    /// Held by somebody who does not want it dropped.
    pub pinned: bool,
}

/// Why an entry went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The bound on entries.
    Entries,
    /// The bound on bytes.
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

/// What happened to a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// A lookup found nothing; a build begins. With the nearest entry and the fields that differ.
    Missed {
        /// `field there ≠ asked`, of the nearest entry; empty for the first of its kind.
        nearest: Vec<String>,
        /// It had been here, and went for this reason.
        evicted: Option<Why>,
    },
    /// A build ended.
    Built {
        /// The entry; 0 when it was not kept.
        id: u64,
        /// Its engine.
        engine: String,
        /// Where the time went.
        time: BuildTime,
        /// What it weighs.
        weight: Weight,
    },
    /// A build failed, and is tried again.
    Failed {
        /// Why.
        error: String,
    },
    /// There is no engine; remembered for a while.
    Unsupported {
        /// Every reason.
        error: String,
    },
    /// An entry went.
    Evicted {
        /// The entry.
        id: u64,
        /// Its lookups.
        hits: u64,
        /// Why.
        why: Why,
    },
    /// Too much of what is built has been here before.
    Thrashing {
        /// So many of the builds,
        rebuilt: u64,
        /// of the last so many.
        of: u64,
    },
    /// The cache was given new bounds.
    Resized {
        /// They.
        limits: Limits,
    },
}

/// Something that happened to a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvent {
    /// Microseconds since the cache was made.
    pub at: u64,
    /// The key in a few words; empty where it is about the whole cache.
    pub label: String,
    /// Hits of the whole cache until then, as far as threads have told of them.
    pub hits_so_far: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// Everything that a cache knows of itself at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// Of this format: 1.
    pub version: u32,
    /// What the cache is of.
    pub name: String,
    /// Microseconds since the cache was made.
    pub at: u64,
    /// The bounds of the cache.
    pub limits: Limits,
    /// How it has been used so far.
    pub stats: CacheStats,
    /// Entries, the most recently used first.
    pub entries: Vec<EntryFacts>,
    /// What happened, the latest last; older events are forgotten.
    pub events: Vec<CacheEvent>,
    /// How many were forgotten.
    pub forgotten: u64,
}

/// The caches of one executor, for files: what `cargo sdpa cache report` reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTrace {
    /// The runtime that built.
    pub cudnn: String,
    /// The device that it was built for.
    pub device: String,
    /// A snapshot of each cache.
    pub caches: Vec<CacheSnapshot>,
}
