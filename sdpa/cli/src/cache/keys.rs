//! The cost and the use of each key.

use super::attempt::{Attempt, Ended};
use sdpa::cache::{CacheSnapshot, What, Why};
use serde::Serialize;
use std::collections::HashMap;

/// The number of entries that were removed for a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Count {
    pub(super) why: Why,
    pub(super) count: u64,
}

/// Adds one to the count of a reason.
pub(super) fn tally(counts: &mut Vec<Count>, why: Why) {
    match counts.iter_mut().find(|count| count.why == why) {
        Some(count) => count.count += 1,
        None => counts.push(Count { why, count: 1 }),
    }
}

/// All builds with one label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Key {
    pub(super) label: String,
    /// Number of builds that returned a value.
    pub(super) builds: u64,
    /// Number of builds that returned no value.
    pub(super) failed: u64,
    /// Total time of all builds.
    pub(super) total_us: u64,
    pub(super) mean_us: u64,
    /// Number of lookups that found one of the built entries.
    pub(super) hits: u64,
    pub(super) evictions: Vec<Count>,
    /// The engine and the memory of the last build.
    pub(super) engine: String,
    pub(super) bytes: u64,
}

/// Returns every key of a trace, the one with the longest total time first.
pub(super) fn keys(snapshot: &CacheSnapshot, attempts: &[Attempt<'_>]) -> Vec<Key> {
    let mut all: HashMap<&str, Key> = HashMap::new();
    for attempt in attempts {
        let key = all.entry(attempt.label).or_default();
        key.total_us = key.total_us.saturating_add(attempt.time.total);
        match attempt.ended {
            Ended::Built { engine, weight, .. } => {
                key.builds += 1;
                (key.engine, key.bytes) = (engine.to_owned(), weight.bytes());
            }
            Ended::Failed(_) | Ended::Unsupported(_) => key.failed += 1,
            Ended::Open => {}
        }
    }
    for event in &snapshot.events {
        match &event.what {
            What::Evicted { hits, why, .. } => {
                let key = all.entry(&event.label).or_default();
                key.hits = key.hits.saturating_add(*hits);
                tally(&mut key.evictions, *why);
            }
            What::Missed { .. }
            | What::Built { .. }
            | What::Failed { .. }
            | What::Unsupported { .. }
            | What::Thrashing { .. }
            | What::Resized { .. } => {}
        }
    }
    for entry in &snapshot.entries {
        let key = all.entry(&entry.label).or_default();
        key.hits = key.hits.saturating_add(entry.hits);
        // Use the engine and size of the entry itself: the trace may no longer contain the build.
        (key.engine, key.bytes) = (entry.engine.clone(), entry.weight.bytes());
    }
    let finish = |(label, key): (&str, Key)| {
        let mean_us = key.total_us / (key.builds + key.failed).max(1);
        Key { label: label.to_owned(), mean_us, ..key }
    };
    let mut all: Vec<Key> = all.into_iter().map(finish).collect();
    all.sort_by(|a, b| b.total_us.cmp(&a.total_us).then_with(|| a.label.cmp(&b.label)));
    all
}
