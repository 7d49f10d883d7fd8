//! A cache entry: a value with its statistics.

use super::explain::{CacheKey, Fields};
use super::facts::{BuildTime, EntryFacts};
use super::limits::Weight;
use super::store::Keyed;
use super::sync::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// A value that a cache can hold.
pub trait CacheValue {
    /// Returns the amount of memory that the value takes.
    fn weight(&self) -> Weight;

    /// Returns the name of the engine or kernel that computes the value's result, for reports.
    fn engine(&self) -> String {
        String::new()
    }

    /// Returns the time of each stage of the value's build.
    fn build_time(&self) -> BuildTime {
        BuildTime::default()
    }
}

impl<V: CacheValue> CacheValue for Arc<V> {
    fn weight(&self) -> Weight {
        V::weight(self)
    }

    fn engine(&self) -> String {
        V::engine(self)
    }

    fn build_time(&self) -> BuildTime {
        V::build_time(self)
    }
}

/// One entry.
#[derive(Debug)]
pub(super) struct Entry<K, V> {
    pub(super) hash: u64,
    pub(super) key: K,
    pub(super) value: V,
    pub(super) id: u64,
    pub(super) weight: Weight,
    pub(super) label: String,
    pub(super) engine: String,
    pub(super) fields: Arc<Fields>,
    made: Duration,
    built: BuildTime,
    hits: AtomicU64,
    /// Time of the last use, on the cache's clock.
    used: AtomicU64,
    pins: AtomicU64,
    /// Whether it has left the cache.
    gone: AtomicBool,
}

impl<K, V> Entry<K, V> {
    /// Counts lookups that found it.
    pub(super) fn hit(&self, hits: u64) {
        if hits > 0 {
            self.hits.fetch_add(hits, Ordering::Relaxed);
        }
    }

    /// Records the time of a use.
    pub(super) fn touch(&self, at: u64) {
        if at > self.used.load(Ordering::Relaxed) {
            self.used.store(at, Ordering::Relaxed);
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    pub(super) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    /// Marks it as having left the cache.
    pub(super) fn mark_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

impl<K: CacheKey, V: CacheValue> Entry<K, V> {
    pub(super) fn new(Keyed { hash, key }: Keyed<'_, K>, value: V, made: Duration, built: BuildTime) -> Entry<K, V> {
        let key = key.to_key();
        let (weight, engine, label, fields) = (value.weight(), value.engine(), key.label(), Arc::new(key.fields()));
        let zero = || AtomicU64::new(0);
        Entry {
            hash,
            key,
            value,
            id: 0,
            weight,
            label,
            engine,
            fields,
            made,
            built,
            hits: zero(),
            used: zero(),
            pins: zero(),
            gone: AtomicBool::new(false),
        }
    }

    /// Returns the key and hash by which it is found.
    pub(super) fn keyed(&self) -> Keyed<'_, K> {
        Keyed { hash: self.hash, key: &self.key }
    }

    pub(super) fn facts(&self) -> EntryFacts {
        EntryFacts {
            id: self.id,
            label: self.label.clone(),
            made: self.made,
            built: self.built,
            hits: self.hits(),
            weight: self.weight,
            engine: self.engine.clone(),
            pinned: self.is_pinned(),
        }
    }
}
