#![doc = include_str!("../README.md")]
//!
//! # Guarantees
//!
//! - **One build per key**, however many threads look it up; other keys never wait for it. A failed build leaves nothing in the cache, but
//!   *unsupported* is remembered for a while.
//! - **Two bounds**, on entries and on bytes, which hold at any time. The least recently used entry is evicted first; pinned ones stay. Hits of other
//!   threads between two misses count as simultaneous.
//! - **A hit takes no lock that another thread wants.** Each thread has a front with its last entries (`front`).
//! - **Every miss has a reason**: [`PlanCache::explain`], events through `tracing`, [`PlanCache::snapshot`] for files.
//!
//! | file | contents |
//! |---|---|
//! | `limits` | bounds, weights |
//! | `store` | entries in order of use; single-threaded |
//! | `front` | entries that a thread used last |
//! | `entry` | a value with its statistics |
//! | `facts`, `journal`, `past`, `explain` | reports |
//! | `news` | events for subscribers, sent after the lock is released |
//! | `meter` | events as counters, with the feature `metrics` |
//! | `planfile` | files of compiled plans |
//! | `sync` | primitives, real ones or those of a model checker |

mod entry;
mod explain;
mod facts;
mod front;
mod journal;
mod limits;
#[cfg(feature = "metrics")]
mod meter;
#[cfg(all(test, feature = "model"))]
mod model;
mod news;
mod past;
#[cfg(not(feature = "model"))]
pub mod planfile;
mod store;
mod sync;
#[cfg(all(test, not(feature = "model")))]
mod tests;

pub use entry::CacheValue;
pub use explain::{CacheKey, Difference, Explanation, Fields, Nearest, Query, State};
pub use facts::{BuildTime, CacheEvent, CacheSnapshot, CacheStats, CacheTrace, EntryFacts, What, Why};
pub use limits::{Limits, Weight};

use entry::Entry;
use front::{Fronts, TICK};
use journal::Journal;
use news::News;
use past::Past;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Dropped, Keyed, Slot, Store};
use sync::{AtomicU64, Condvar, Mutex, Ordering, lock, wait};

/// An error of building a value. The cache remembers a refusal (the problem is *unsupported*), and forgets any other error.
pub trait BuildError: fmt::Display + Sized {
    /// The part of an *unsupported* error that the cache remembers: the reasons, for later callers.
    type Refusal: Clone + fmt::Display + Send + Sync;

    /// Returns the refusal that the cache remembers, if this error means *unsupported*. Returns `None` for any other error, after which a
    /// later build may succeed.
    fn refusal(&self) -> Option<Self::Refusal>;

    /// Creates the error for a later caller of the same key, from a remembered refusal.
    fn again(refusal: Self::Refusal) -> Self;
}

/// Lets threads wait for a build.
#[derive(Debug)]
struct Ticket {
    done: Mutex<bool>,
    wake: Condvar,
}

/// All data behind the cache's lock.
#[derive(Debug)]
struct Inner<K: CacheKey, V, U> {
    store: Store<K, V, Ticket, U>,
    journal: Journal,
    past: Past<K>,
    stats: CacheStats,
    /// The next entry's number.
    next: u64,
}

/// A bounded cache with one build per key, for any number of threads. `U` is the type of remembered refusals: [`BuildError::Refusal`].
#[derive(Debug)]
pub struct PlanCache<K: CacheKey + Send + Sync + 'static, V: CacheValue + Send + Sync + 'static, U> {
    name: String,
    inner: Mutex<Inner<K, V, U>>,
    fronts: Fronts<K, V>,
    hasher: ahash::RandomState,
    /// Advances by [`TICK`] whenever a thread takes the lock for a key.
    clock: AtomicU64,
    since: Instant,
}

/// Keeps an entry in its cache as long as this guard lives; see [`PlanCache::pin`].
#[derive(Debug)]
pub struct Pin<K, V> {
    entry: Arc<Entry<K, V>>,
}

impl<K, V: CacheValue> Pin<K, V> {
    /// Returns the value of the entry.
    pub fn value(&self) -> &V {
        &self.entry.value
    }
}

impl<K, V> Drop for Pin<K, V> {
    fn drop(&mut self) {
        self.entry.unpin();
    }
}

/// The result of a lookup under the lock.
enum Found<K, V, U> {
    Ready(Arc<Entry<K, V>>),
    Building(Arc<Ticket>),
    Refused(U),
    /// The caller builds. The fields of present and past entries serve to explain the miss.
    Claimed(Arc<Ticket>, Vec<Arc<Fields>>),
}

impl<K: CacheKey + Send + Sync + 'static, V: CacheValue + Clone + Send + Sync + 'static, U: Clone + fmt::Display> PlanCache<K, V, U> {
    /// Creates a cache with these bounds. `name` appears in events and snapshots.
    pub fn new(name: &str, limits: Limits) -> PlanCache<K, V, U> {
        let inner =
            Inner { store: Store::new(limits), journal: Journal::default(), past: Past::default(), stats: CacheStats::default(), next: 1 };
        PlanCache {
            name: name.to_owned(),
            inner: Mutex::new(inner),
            fronts: Fronts::new(),
            hasher: ahash::RandomState::new(),
            clock: AtomicU64::new(TICK),
            since: Instant::now(),
        }
    }

    /// Returns the value of a key. The flag is true if it was in the cache, and false if `build` built it now. Only one thread at a time
    /// runs `build` for a key, and it holds no lock.
    ///
    /// # Errors
    /// Returns the error of `build`, or a remembered *unsupported* error. If a build fails with any other error, threads that waited for
    /// it call `build` themselves.
    pub fn get_or_build<E: BuildError<Refusal = U>>(
        &self,
        key: &dyn Query<K>,
        build: impl FnOnce() -> Result<V, E>,
    ) -> Result<(V, bool), E> {
        self.with(key, build, |value, there| (value.clone(), there))
    }

    /// Finds or builds the value of a key like [`PlanCache::get_or_build`], and calls `call` with the value and the flag. The value stays
    /// alive until `call` returns.
    ///
    /// # Errors
    /// Fails as [`PlanCache::get_or_build`] does.
    pub fn with<R, E: BuildError<Refusal = U>>(
        &self,
        key: &dyn Query<K>,
        build: impl FnOnce() -> Result<V, E>,
        call: impl FnOnce(&V, bool) -> R,
    ) -> Result<R, E> {
        let key = self.keyed(key);
        let front = self.fronts.mine();
        let call = match &front {
            None => call,
            Some(front) => match front.hit(key, self.clock.load(Ordering::Relaxed), call) {
                Ok(result) => return Ok(result),
                Err(call) => call,
            },
        };
        let (entry, there) = self.find_or_build(key, build)?;
        let result = call(&entry.value, there);
        if let Some(front) = front
            && !entry.is_gone()
        {
            front.keep(key.hash, entry);
        }
        Ok(result)
    }

    fn find_or_build<E: BuildError<Refusal = U>>(
        &self,
        key: Keyed<'_, K>,
        build: impl FnOnce() -> Result<V, E>,
    ) -> Result<(Arc<Entry<K, V>>, bool), E> {
        loop {
            match self.find(key) {
                Found::Ready(entry) => return Ok((entry, true)),
                Found::Refused(why) => return Err(E::again(why)),
                Found::Building(ticket) => {
                    let mut done = lock(&ticket.done);
                    while !*done {
                        done = wait(&ticket.wake, done);
                    }
                }
                Found::Claimed(ticket, around) => {
                    let claim = Claim { cache: self, key, ticket, settled: false };
                    let owned = key.key.to_key();
                    self.tell_miss(&owned, &around);
                    drop(around);
                    let span = tracing::debug_span!("build", cache = self.name, key = owned.label());
                    let start = Instant::now();
                    let built = span.in_scope(build);
                    let total = start.elapsed();
                    return match built {
                        Ok(value) => Ok((claim.keep(value, total), false)),
                        Err(error) => {
                            claim.fail(error.refusal(), error.to_string());
                            Err(error)
                        }
                    };
                }
            }
        }
    }

    fn keyed<'k>(&self, key: &'k dyn Query<K>) -> Keyed<'k, K> {
        Keyed { hash: key.hash_in(&self.hasher), key }
    }

    /// Looks a key up under the lock; on a miss, claims the build for this thread.
    fn find(&self, key: Keyed<'_, K>) -> Found<K, V, U> {
        let at = self.clock.fetch_add(TICK, Ordering::Relaxed) + TICK;
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let life = inner.store.limits().refusals;
        match inner.store.peek(key) {
            Some(Slot::Ready(entry)) => {
                entry.hit(1);
                entry.touch(at);
                inner.stats.hits += 1;
                return Found::Ready(entry.clone());
            }
            Some(Slot::Building(ticket)) => return Found::Building(ticket.clone()),
            Some(Slot::Refused { why, since }) if since.elapsed() < life => {
                inner.stats.refusals += 1;
                return Found::Refused(why.clone());
            }
            Some(Slot::Refused { .. }) | None => {}
        }
        let ticket = Arc::new(Ticket { done: Mutex::new(false), wake: Condvar::new() });
        inner.store.put(key, Slot::Building(ticket.clone()));
        inner.stats.misses += 1;
        Found::Claimed(ticket, inner.store.fields().chain(inner.past.fields()).collect())
    }

    /// Records the miss with its reason. Only the last lines take the lock.
    fn tell_miss(&self, key: &K, around: &[Arc<Fields>]) {
        let nearest = past::reasons(&key.fields(), around);
        let label = key.label();
        let mut news = News::default();
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let evicted = inner.past.why_gone(key);
        inner.stats.rebuilt += u64::from(evicted.is_some());
        self.note(inner, &mut news, label, What::Missed { nearest, evicted });
        let entries = inner.store.limits().entries;
        if let Some((rebuilt, of)) = inner.past.note_miss(evicted.is_some(), entries.get()) {
            self.note(inner, &mut news, String::new(), What::Thrashing { rebuilt, of });
        }
        drop(guard);
        news.tell(&self.name, entries);
    }

    fn note(&self, inner: &mut Inner<K, V, U>, news: &mut News, label: String, what: What) {
        let at = self.since.elapsed();
        let hits_so_far = inner.stats.hits + self.fronts.told();
        let event = CacheEvent { at, label, hits_so_far, what };
        news.push(event.clone());
        inner.journal.push(event);
    }

    /// Records dropped entries and removes them from the fronts. The values are freed when the result is dropped.
    fn note_dropped(&self, inner: &mut Inner<K, V, U>, news: &mut News, dropped: &Dropped<K, V>) {
        dropped.iter().for_each(|(entry, _)| entry.mark_gone());
        for (entry, why) in dropped {
            inner.stats.evictions += u64::from(matches!(why, Why::Entries | Why::Bytes));
            inner.past.push(entry, *why);
            self.note(inner, news, entry.label.clone(), What::Evicted { id: entry.id, hits: entry.hits(), why: *why });
        }
    }

    /// Drops entries outside the lock: unloading a kernel takes time.
    fn drop_unlocked(&self, dropped: Dropped<K, V>) {
        if !dropped.is_empty() {
            self.fronts.drop_gone();
        }
        drop(dropped);
    }

    /// Explains the state of a key, and names the nearest entries. It does not change the cache.
    pub fn explain(&self, key: &K) -> Explanation {
        self.fronts.hits();
        let keyed = self.keyed(key);
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let life = inner.store.limits().refusals;
        let state = match inner.store.peek(keyed) {
            Some(Slot::Ready(entry)) => State::Hit(entry.facts()),
            Some(Slot::Building(_)) => State::Building,
            Some(Slot::Refused { why, since }) if since.elapsed() < life => {
                State::Unsupported { error: why.to_string(), remaining: (life - since.elapsed()).as_millis() as u64 }
            }
            Some(Slot::Refused { .. }) | None => State::Absent,
        };
        let nearest = match state {
            State::Hit(_) => Vec::new(),
            State::Building | State::Unsupported { .. } | State::Absent => {
                let (there, gone) = (inner.store.list(), inner.past.latest());
                drop(guard);
                past::nearest(key, &there, &gone, 3)
            }
        };
        let mut advice: Vec<String> = Vec::new();
        for near in &nearest {
            let text = match near.gone {
                Some(Why::Entries) if near.differences.is_empty() => Some("its entry was evicted: raise the bound on entries, or pin it"),
                Some(Why::Bytes) if near.differences.is_empty() => Some("its entry was evicted: raise the bound on bytes, or pin it"),
                _ => K::advice(&near.differences),
            };
            advice.extend(text.map(str::to_owned).filter(|text| !advice.contains(text)));
        }
        Explanation { label: key.label(), state, nearest, advice, notes: Vec::new() }
    }

    /// Returns the counters of the cache.
    pub fn stats(&self) -> CacheStats {
        let near = self.fronts.hits();
        let inner = lock(&self.inner);
        let hits = inner.stats.hits + near;
        let stats = CacheStats { entries: inner.store.entries(), weight: inner.store.weight(), hits, ..inner.stats };
        drop(inner);
        #[cfg(feature = "metrics")]
        meter::hits(&self.name, hits);
        stats
    }

    /// Returns a full record of the cache: bounds, counters, entries and events.
    pub fn snapshot(&self) -> CacheSnapshot {
        let stats = self.stats();
        let mut inner = lock(&self.inner);
        let (events, forgotten) = inner.journal.list();
        CacheSnapshot {
            version: 1,
            name: self.name.clone(),
            at: self.since.elapsed(),
            limits: inner.store.limits(),
            stats,
            entries: inner.store.list().iter().map(|e| e.facts()).collect(),
            events,
            forgotten,
        }
    }

    /// Returns the bounds of the cache.
    pub fn limits(&self) -> Limits {
        lock(&self.inner).store.limits()
    }

    /// Sets new bounds. Entries beyond them are dropped at once, except pinned ones.
    pub fn resize(&self, limits: Limits) {
        let mut news = News::default();
        let mut inner = lock(&self.inner);
        let dropped = inner.store.resize(limits);
        self.note(&mut inner, &mut news, String::new(), What::Resized { limits });
        self.note_dropped(&mut inner, &mut news, &dropped);
        drop(inner);
        self.drop_unlocked(dropped);
        news.tell(&self.name, limits.entries);
    }

    /// Drops every entry that is not pinned, and every remembered refusal. Running builds continue.
    pub fn clear(&self) {
        let mut news = News::default();
        let mut inner = lock(&self.inner);
        let dropped = inner.store.clear();
        self.note_dropped(&mut inner, &mut news, &dropped);
        let entries = inner.store.limits().entries;
        drop(inner);
        self.drop_unlocked(dropped);
        news.tell(&self.name, entries);
    }

    /// Keeps the entry of a key in the cache until the returned pin is dropped. Returns `None` if there is no entry.
    pub fn pin(&self, key: &K) -> Option<Pin<K, V>> {
        let keyed = self.keyed(key);
        let inner = lock(&self.inner);
        match inner.store.peek(keyed) {
            Some(Slot::Ready(entry)) => {
                entry.pin();
                Some(Pin { entry: entry.clone() })
            }
            Some(Slot::Building(_) | Slot::Refused { .. }) | None => None,
        }
    }

    /// Returns every key with its value, most recently used first.
    pub fn values(&self) -> Vec<(K, V)> {
        let entries = lock(&self.inner).store.list();
        entries.iter().map(|e| (e.key.clone(), e.value.clone())).collect()
    }
}

impl<K: CacheKey + Send + Sync + 'static, V: CacheValue + Send + Sync + 'static, U> Drop for PlanCache<K, V, U> {
    fn drop(&mut self) {
        // Mark all entries as gone: other threads may still have them in their fronts.
        lock(&self.inner).store.list().iter().for_each(|entry| entry.mark_gone());
        self.fronts.drop_gone();
    }
}

/// The right to build a key. Dropping it, even by a panic, removes the mark if it is still there, and wakes the waiting threads.
struct Claim<'a, K: CacheKey + Send + Sync + 'static, V: CacheValue + Clone + Send + Sync + 'static, U: Clone + fmt::Display> {
    cache: &'a PlanCache<K, V, U>,
    key: Keyed<'a, K>,
    ticket: Arc<Ticket>,
    /// The mark was replaced: by a value, a refusal, nothing, or another thread's mark.
    settled: bool,
}

impl<K: CacheKey + Send + Sync + 'static, V: CacheValue + Clone + Send + Sync + 'static, U: Clone + fmt::Display> Claim<'_, K, V, U> {
    fn keep(mut self, value: V, total: Duration) -> Arc<Entry<K, V>> {
        let cache = self.cache;
        let time = BuildTime { total, ..value.build_time() };
        let made = cache.since.elapsed();
        // Call methods of key and value before taking the lock: if one panics, the key becomes free again.
        let mut entry = Entry::new(self.key, value, made, time);
        let mut news = News::default();
        let mut guard = lock(&cache.inner);
        let inner = &mut *guard;
        entry.id = inner.next;
        let entry = Arc::new(entry);
        entry.touch(cache.clock.fetch_add(TICK, Ordering::Relaxed) + TICK);
        let kept = inner.store.insert(entry.clone());
        self.settled = true;
        let id = if kept.is_some() { inner.next } else { 0 };
        inner.next += u64::from(kept.is_some());
        if kept.is_none() {
            entry.mark_gone();
            inner.stats.not_kept += 1;
        }
        let built = What::Built { id, engine: entry.engine.clone(), time, weight: entry.weight };
        cache.note(inner, &mut news, entry.label.clone(), built);
        let dropped = kept.unwrap_or_default();
        cache.note_dropped(inner, &mut news, &dropped);
        let entries = inner.store.limits().entries;
        drop(guard);
        // Wake the waiting threads first: a panic below must not leave them waiting.
        drop(self);
        cache.drop_unlocked(dropped);
        news.tell(&cache.name, entries);
        entry
    }

    fn fail(mut self, refusal: Option<U>, error: String) {
        let cache = self.cache;
        let label = self.key.key.to_key().label();
        let mut news = News::default();
        let mut guard = lock(&cache.inner);
        let inner = &mut *guard;
        inner.stats.failures += 1;
        let what = match refusal {
            Some(why) => {
                inner.store.put(self.key, Slot::Refused { why, since: Instant::now() });
                self.settled = true;
                What::Unsupported { error }
            }
            None => What::Failed { error },
        };
        cache.note(inner, &mut news, label, what);
        let entries = inner.store.limits().entries;
        drop(guard);
        drop(self);
        news.tell(&cache.name, entries);
    }
}

impl<K: CacheKey + Send + Sync + 'static, V: CacheValue + Clone + Send + Sync + 'static, U: Clone + fmt::Display> Drop
    for Claim<'_, K, V, U>
{
    fn drop(&mut self) {
        if !self.settled {
            lock(&self.cache.inner).store.remove(self.key);
        }
        *lock(&self.ticket.done) = true;
        self.ticket.wake.notify_all();
    }
}
