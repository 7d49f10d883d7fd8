//! A bounded LRU of things that are expensive to make.
//!
//! One build per key however many threads ask; other keys never wait for it. A build that fails leaves no trace unless its
//! failure is one to remember, and the next caller tries again.

use lru::LruCache;
use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a cache has been used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheStats {
    /// Entries now.
    pub entries: usize,
    /// The bound on entries.
    pub capacity: usize,
    /// Lookups that found an entry, or waited for one that another thread was building.
    pub hits: u64,
    /// Lookups that built.
    pub misses: u64,
    /// Builds that failed.
    pub failures: u64,
    /// Entries dropped to keep the bound.
    pub evictions: u64,
}

/// What a key stands for.
#[derive(Debug)]
enum Slot<V> {
    /// Being made by some thread.
    Building(Arc<Ticket>),
    /// There.
    Ready(V),
}

/// Lets threads wait for a build.
#[derive(Debug, Default)]
struct Ticket {
    done: Mutex<bool>,
    wake: Condvar,
}

/// A bounded LRU with one build per key.
#[derive(Debug)]
pub struct PlanCache<K: Hash + Eq, V> {
    slots: Mutex<LruCache<K, Slot<V>, ahash::RandomState>>,
    capacity: NonZeroUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    failures: AtomicU64,
    evictions: AtomicU64,
}

impl<K: Hash + Eq + Clone, V: Clone> PlanCache<K, V> {
    /// A cache of at most `capacity` entries.
    pub fn new(capacity: NonZeroUsize) -> PlanCache<K, V> {
        PlanCache {
            slots: Mutex::new(LruCache::unbounded_with_hasher(ahash::RandomState::new())),
            capacity,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
        }
    }

    /// The value for a key: there already, or made by `build`, which only one thread at a time runs for a key and which runs
    /// without any lock held. The flag says whether it was there.
    ///
    /// # Errors
    /// What `build` returned to this thread. Threads that waited for a build which failed build themselves.
    pub fn get_or_build<E>(&self, key: &K, build: impl FnOnce() -> Result<V, E>) -> Result<(V, bool), E> {
        let mut build = Some(build);
        loop {
            let waiting = {
                let mut slots = self.slots.lock();
                match slots.get(key) {
                    Some(Slot::Ready(value)) => {
                        self.hits.fetch_add(1, Ordering::Relaxed);
                        return Ok((value.clone(), true));
                    }
                    Some(Slot::Building(ticket)) => Some(ticket.clone()),
                    None => None,
                }
            };
            if let Some(ticket) = waiting {
                let mut done = ticket.done.lock();
                while !*done {
                    ticket.wake.wait(&mut done);
                }
                continue;
            }
            let Some(claim) = self.claim(key) else { continue };
            let Some(build) = build.take() else { continue };
            self.misses.fetch_add(1, Ordering::Relaxed);
            return match build() {
                Ok(value) => {
                    claim.fill(value.clone());
                    Ok((value, false))
                }
                Err(error) => {
                    self.failures.fetch_add(1, Ordering::Relaxed);
                    Err(error)
                }
            };
        }
    }

    /// Marks a key as being built by this thread; `None` when another was faster.
    fn claim(&self, key: &K) -> Option<Claim<'_, K, V>> {
        let ticket = Arc::new(Ticket::default());
        let mut slots = self.slots.lock();
        if slots.contains(key) {
            return None;
        }
        slots.put(key.clone(), Slot::Building(ticket.clone()));
        Some(Claim { cache: self, key: key.clone(), ticket, filled: false })
    }

    fn trim(&self, slots: &mut LruCache<K, Slot<V>, ahash::RandomState>) -> Vec<V> {
        let mut dropped = Vec::new();
        let ready = |slots: &LruCache<K, Slot<V>, ahash::RandomState>| slots.iter().filter(|(_, s)| matches!(s, Slot::Ready(_))).count();
        let mut entries = ready(slots);
        while entries > self.capacity.get() {
            let oldest = slots.iter().rev().find(|(_, s)| matches!(s, Slot::Ready(_))).map(|(k, _)| k.clone());
            let Some(Slot::Ready(value)) = oldest.and_then(|k| slots.pop(&k)) else { break };
            dropped.push(value);
            entries -= 1;
            self.evictions.fetch_add(1, Ordering::Relaxed);
        }
        dropped
    }

    /// How it has been used so far.
    pub fn stats(&self) -> CacheStats {
        let entries = self.slots.lock().iter().filter(|(_, s)| matches!(s, Slot::Ready(_))).count();
        CacheStats {
            entries,
            capacity: self.capacity.get(),
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            evictions: self.evictions.load(Ordering::Relaxed),
        }
    }

    /// Forgets every entry; builds that are running go on.
    pub fn clear(&self) {
        let mut slots = self.slots.lock();
        let keys: Vec<K> = slots.iter().filter(|(_, s)| matches!(s, Slot::Ready(_))).map(|(k, _)| k.clone()).collect();
        let dropped: Vec<_> = keys.iter().filter_map(|k| slots.pop(k)).collect();
        drop(slots);
        // Values are dropped outside of the lock: unloading a kernel takes its time.
        drop(dropped);
    }
}

/// The right to build a key. Dropped without a value, also by a panic, it takes the mark away and wakes the others.
struct Claim<'a, K: Hash + Eq + Clone, V: Clone> {
    cache: &'a PlanCache<K, V>,
    key: K,
    ticket: Arc<Ticket>,
    filled: bool,
}

impl<K: Hash + Eq + Clone, V: Clone> Claim<'_, K, V> {
    fn fill(mut self, value: V) {
        self.filled = true;
        let mut slots = self.cache.slots.lock();
        let mark = slots.put(self.key.clone(), Slot::Ready(value));
        let dropped = self.cache.trim(&mut slots);
        drop(slots);
        drop((mark, dropped));
    }
}

impl<K: Hash + Eq + Clone, V: Clone> Drop for Claim<'_, K, V> {
    fn drop(&mut self) {
        if !self.filled {
            self.cache.slots.lock().pop(&self.key);
        }
        *self.ticket.done.lock() = true;
        self.ticket.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    fn cache(n: usize) -> PlanCache<u32, u32> {
        PlanCache::new(NonZeroUsize::new(n).unwrap())
    }

    fn ok(v: u32) -> impl FnOnce() -> Result<u32, String> {
        move || Ok(v)
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let c = cache(2);
        for key in [1, 2, 1, 3] {
            c.get_or_build(&key, ok(key * 10)).unwrap();
        }
        assert_eq!(c.get_or_build(&1, ok(0)).unwrap(), (10, true));
        assert_eq!(c.get_or_build(&3, ok(0)).unwrap(), (30, true));
        assert_eq!(c.get_or_build(&2, ok(99)).unwrap(), (99, false));
        assert_eq!(c.stats(), CacheStats { entries: 2, capacity: 2, hits: 3, misses: 4, failures: 0, evictions: 2 });
    }

    #[test]
    fn a_failed_build_is_tried_again() {
        let c = cache(2);
        assert_eq!(c.get_or_build(&1, || Err("no")).unwrap_err(), "no");
        assert_eq!(c.get_or_build(&1, ok(5)).unwrap(), (5, false));
        assert_eq!(c.stats().failures, 1);
    }

    #[test]
    fn a_build_that_panics_does_not_lock_its_key() {
        let c = cache(2);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| c.get_or_build::<String>(&1, || panic!("on purpose"))));
        assert!(panicked.is_err());
        assert_eq!(c.get_or_build(&1, ok(5)).unwrap(), (5, false));
    }

    #[test]
    fn many_threads_build_once_and_other_keys_do_not_wait() {
        let c = cache(8);
        let builds = AtomicUsize::new(0);
        let (start, building, other_done) = (Barrier::new(8), Barrier::new(2), Barrier::new(2));
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    start.wait();
                    let (v, _) = c
                        .get_or_build::<String>(&1, || {
                            builds.fetch_add(1, Ordering::Relaxed);
                            building.wait();
                            // Only released once a lookup of another key has come and gone.
                            other_done.wait();
                            std::thread::sleep(Duration::from_millis(20));
                            Ok(7)
                        })
                        .unwrap();
                    assert_eq!(v, 7);
                });
            }
            building.wait();
            assert_eq!(c.get_or_build(&2, ok(3)).unwrap(), (3, false));
            other_done.wait();
        });
        assert_eq!(builds.load(Ordering::Relaxed), 1);
        assert_eq!((c.stats().hits, c.stats().misses), (7, 2));
    }
}
