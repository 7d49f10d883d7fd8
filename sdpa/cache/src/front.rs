//! Entries that a thread used last. A hit takes no lock that another thread wants, and writes to no cache line that another thread reads.
//!
//! Each thread has a few entries of each cache behind a lock of its own. Other threads take this lock only to drop an entry or to count. An evictor
//! does not wait for a front in use: it marks the front as stale, and its user drops stale entries afterwards ([`Using`]), even if a call panics.

use super::entry::{CacheValue, Entry};
use super::store::Keyed;
use super::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock, thread_local, try_lock};
use std::any::Any;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Entries of one cache in a thread's front.
const SLOTS: usize = 8;
/// Hits that a thread counts before it reports them to the entry.
const HITS_AT_ONCE: u64 = 1024;
/// Step of the cache's clock. The thread's own count orders its hits between two steps.
pub(super) const TICK: u64 = 1 << 20;

/// One entry of a front.
#[derive(Debug)]
struct Recent<K, V> {
    hash: u64,
    entry: Arc<Entry<K, V>>,
    hits: u64,
}

#[derive(Debug)]
struct Inner<K, V> {
    near: Vec<Recent<K, V>>,
    /// The most recently used one.
    last: usize,
    clock: u64,
    count: u64,
}

/// A thread's front: its entries of one cache.
#[derive(Debug)]
pub(super) struct Front<K, V> {
    inner: Mutex<Inner<K, V>>,
    stale: AtomicBool,
    hits: Arc<AtomicU64>,
}

impl<K: Eq, V: CacheValue> Front<K, V> {
    fn new(hits: Arc<AtomicU64>) -> Front<K, V> {
        let inner = Inner { near: Vec::with_capacity(SLOTS), last: 0, clock: 0, count: 0 };
        Front { inner: Mutex::new(inner), stale: AtomicBool::new(false), hits }
    }

    /// Locks the front; `None` if it is in use, by this thread inside a call, or by another that drops or counts.
    fn enter(&self) -> Option<Using<'_, K, V>> {
        Some(Using { inner: Some(try_lock(&self.inner)?), front: self })
    }

    /// Calls `call` with the value of a key if it is in the front, where it stays until `call` returns. Otherwise returns `call`.
    pub(super) fn hit<R, F: FnOnce(&V, bool) -> R>(&self, Keyed { hash, key }: Keyed<'_, K>, clock: u64, call: F) -> Result<R, F> {
        let Some(mut using) = self.enter() else { return Err(call) };
        let Some(inner) = using.inner.as_deref_mut() else { return Err(call) };
        let Some(at) = inner.near.iter().position(|n| n.hash == hash && key.is(&n.entry.key)) else { return Err(call) };
        if inner.clock != clock {
            (inner.clock, inner.count) = (clock, 1);
        } else if inner.last != at {
            inner.count = (inner.count + 1).min(TICK - 1);
        }
        let used = clock + inner.count;
        inner.last = at;
        let near = &mut inner.near[at];
        near.hits += 1;
        near.entry.touch(used);
        if near.hits == HITS_AT_ONCE {
            self.tell(near);
        }
        Ok(call(&near.entry.value, true))
    }

    fn tell(&self, near: &mut Recent<K, V>) {
        let hits = std::mem::take(&mut near.hits);
        near.entry.hit(hits);
        self.hits.fetch_add(hits, Ordering::Relaxed);
    }

    /// Adds an entry.
    pub(super) fn keep(&self, hash: u64, entry: Arc<Entry<K, V>>) {
        let Some(mut using) = self.enter() else { return };
        let Some(inner) = using.inner.as_deref_mut() else { return };
        let mut gone = None;
        if inner.near.iter().all(|n| !Arc::ptr_eq(&n.entry, &entry)) {
            if inner.near.len() == SLOTS {
                let oldest = (0..SLOTS).min_by_key(|&n| inner.near[n].entry.used()).unwrap_or(0);
                gone = Some(inner.near.swap_remove(oldest));
            }
            inner.near.push(Recent { hash, entry: entry.clone(), hits: 0 });
            inner.last = SLOTS;
        }
        // If the entry was evicted after the lookup, the evicting thread may have swept this front before the entry was added here. Mark
        // the front stale so that it is swept again.
        if entry.is_gone() {
            self.stale.store(true, Ordering::SeqCst);
        }
        drop(using);
        if let Some(mut near) = gone {
            self.tell(&mut near);
        }
    }

    /// Drops entries that have left the cache, now or after the current use of the front.
    pub(super) fn drop_gone(&self) {
        self.stale.swap(true, Ordering::SeqCst);
        self.sweep();
    }

    /// Drops stale entries. If the front is in use, its user calls this when done.
    ///
    /// Each side writes to `stale` between its own step and its check of the other's. An evictor marks and then tries the lock; a user unlocks and
    /// then looks for the mark. So one of two concurrent threads sees the other. With a load instead of the write, both might miss.
    fn sweep(&self) {
        while self.stale.fetch_or(false, Ordering::SeqCst) {
            let Some(mut inner) = try_lock(&self.inner) else { return };
            self.stale.swap(false, Ordering::SeqCst);
            let (gone, near): (Vec<_>, Vec<_>) = inner.near.drain(..).partition(|n| n.entry.is_gone());
            inner.near = near;
            inner.last = SLOTS;
            drop(inner);
            // Drop values outside the lock: unloading a kernel takes time.
            for mut near in gone {
                self.tell(&mut near);
            }
        }
    }

    /// Reports the counted hits, unless the front is in use.
    pub(super) fn tell_all(&self) {
        if let Some(mut using) = self.enter()
            && let Some(inner) = using.inner.as_deref_mut()
        {
            inner.near.iter_mut().for_each(|near| self.tell(near));
        }
    }
}

/// A front in use. When it is dropped, even by a panic, stale entries are dropped.
struct Using<'a, K: Eq, V: CacheValue> {
    /// `None` only during drop.
    inner: Option<MutexGuard<'a, Inner<K, V>>>,
    front: &'a Front<K, V>,
}

impl<K: Eq, V: CacheValue> Drop for Using<'_, K, V> {
    fn drop(&mut self) {
        self.inner = None;
        self.front.sweep();
    }
}

impl<K, V> Drop for Front<K, V> {
    fn drop(&mut self) {
        for near in lock(&self.inner).near.drain(..) {
            near.entry.hit(near.hits);
            self.hits.fetch_add(near.hits, Ordering::Relaxed);
        }
    }
}

/// The fronts of this thread, by cache.
struct Held {
    cache: u64,
    alive: Weak<()>,
    front: Arc<dyn Any + Send + Sync>,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

/// All threads' fronts of one cache.
#[derive(Debug)]
pub(super) struct Fronts<K, V> {
    cache: u64,
    alive: Arc<()>,
    hits: Arc<AtomicU64>,
    all: Mutex<Vec<Weak<Front<K, V>>>>,
}

/// Numbers of caches.
static CACHES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

impl<K: Eq + Send + Sync + 'static, V: CacheValue + Send + Sync + 'static> Fronts<K, V> {
    pub(super) fn new() -> Fronts<K, V> {
        let cache = CACHES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Fronts { cache, alive: Arc::new(()), hits: Arc::new(AtomicU64::new(0)), all: Mutex::new(Vec::new()) }
    }

    /// Returns this thread's front; `None` while the thread ends.
    pub(super) fn mine(&self) -> Option<Arc<Front<K, V>>> {
        let found = HELD.try_with(|held| {
            let held = held.try_borrow().ok()?;
            let front = held.iter().find(|h| h.cache == self.cache)?.front.clone();
            front.downcast::<Front<K, V>>().ok()
        });
        match found {
            Ok(Some(front)) => Some(front),
            Ok(None) => self.make(),
            Err(_) => None,
        }
    }

    fn make(&self) -> Option<Arc<Front<K, V>>> {
        let front = Arc::new(Front::new(self.hits.clone()));
        let mut all = lock(&self.all);
        all.retain(|front| front.strong_count() > 0);
        all.push(Arc::downgrade(&front));
        drop(all);
        let held = Held { cache: self.cache, alive: Arc::downgrade(&self.alive), front: front.clone() };
        let kept = HELD.try_with(|all| {
            let mut all = all.try_borrow_mut().ok()?;
            // Remove fronts of dropped caches.
            all.retain(|held| held.alive.strong_count() > 0);
            all.push(held);
            Some(())
        });
        kept.ok().flatten().map(|()| front)
    }

    fn list(&self) -> Vec<Arc<Front<K, V>>> {
        lock(&self.all).iter().filter_map(Weak::upgrade).collect()
    }

    /// Drops entries that have left the cache from every front.
    pub(super) fn drop_gone(&self) {
        self.list().iter().for_each(|front| front.drop_gone());
    }

    /// Returns the hits that fronts have reported so far.
    pub(super) fn told(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Returns the hits of fronts. For a front in use, up to 1024 of the last ones are missing.
    pub(super) fn hits(&self) -> u64 {
        self.list().iter().for_each(|front| front.tell_all());
        self.hits.load(Ordering::Relaxed)
    }
}
