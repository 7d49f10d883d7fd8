//! Sends events of a cache to subscribers of `tracing` and, with the feature `metrics`, to counters.
//!
//! Under the lock events are only recorded. They are sent after the lock is released and the cache is consistent: a subscriber may call the cache,
//! take its time, or panic.

use super::facts::{CacheEvent, What};
use std::num::NonZeroUsize;

/// Events that are still to be sent.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct News(Vec<CacheEvent>);

impl News {
    pub(super) fn push(&mut self, event: CacheEvent) {
        self.0.push(event);
    }

    /// Sends all events of a cache with this bound on entries. Must not be called under its lock.
    pub(super) fn tell(self, cache: &str, entries: NonZeroUsize) {
        for event in self.0 {
            trace(cache, entries, &event);
            #[cfg(feature = "metrics")]
            {
                super::meter::event(cache, &event.what);
                super::meter::hits(cache, event.hits_so_far);
            }
        }
    }
}

fn trace(cache: &str, entries: NonZeroUsize, event: &CacheEvent) {
    let key = &event.label;
    match &event.what {
        What::Missed { nearest, evicted } => tracing::debug!(cache, key, differs = ?nearest, ?evicted, "miss"),
        What::Built { id, engine, time, weight } => {
            let bytes = weight.bytes();
            if *id == 0 {
                tracing::warn!(cache, key, bytes, "not kept: it does not fit beside what is pinned");
            }
            tracing::debug!(cache, key, engine, us = time.total.as_micros() as u64, bytes, "built");
        }
        What::Evicted { id: _, hits, why } => tracing::debug!(cache, key, hits, why = why.text(), "evicted"),
        What::Thrashing { rebuilt, of } => tracing::warn!(
            cache,
            rebuilt,
            of,
            entries,
            "plans are built again after they were dropped: the bounds are too small for what is used, or lengths want buckets"
        ),
        What::Failed { .. } | What::Unsupported { .. } | What::Resized { .. } => {}
    }
}
