//! Kernels that were built: bounded, the least recently used go first, one build for each key.

use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// What the compiler may do with floating point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Math {
    /// IEEE 754, with NaN and infinities: what the kernels are written for.
    #[default]
    Safe,
    /// Apple's fast math. Results for NaN and infinities are anyone's guess; for measuring what it would bring.
    Fast,
}

/// All that a built kernel depends on, compared as a whole: the same as plans, it has no digest that could collide.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The MSL text.
    pub source: String,
    /// The kernel in it.
    pub entry: &'static str,
    /// The compiler's freedom.
    pub math: Math,
}

/// What happened in a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found a kernel, one that was being built too.
    pub hits: u64,
    /// Lookups that built one.
    pub builds: u64,
    /// Builds that failed; the next lookup builds again.
    pub failures: u64,
    /// Kernels that made place for others.
    pub evictions: u64,
}

/// A build locks its own slot, so that others do not wait for it.
type Slot<T> = Arc<Mutex<Option<Arc<T>>>>;

#[derive(Debug)]
struct State<T> {
    slots: LruCache<Key, Slot<T>>,
    stats: CacheStats,
}

/// Kernels by their [`Key`]s. What is evicted lives on for as long as someone holds it.
#[derive(Debug)]
pub struct Cache<T> {
    state: Mutex<State<T>>,
}

impl<T> Cache<T> {
    /// With so many kernels at most.
    pub fn new(capacity: NonZeroUsize) -> Cache<T> {
        Cache { state: Mutex::new(State { slots: LruCache::new(capacity), stats: CacheStats::default() }) }
    }

    /// The counters.
    pub fn stats(&self) -> CacheStats {
        self.state.lock().stats
    }

    /// How many kernels there are, with those that are being built.
    pub fn len(&self) -> usize {
        self.state.lock().slots.len()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slot(&self, key: &Key) -> Slot<T> {
        let mut state = self.state.lock();
        if let Some(slot) = state.slots.get(key) {
            return Arc::clone(slot);
        }
        let slot = Slot::default();
        // `push` gives back what it displaces; the key is not there.
        state.stats.evictions += u64::from(state.slots.push(key.clone(), Arc::clone(&slot)).is_some());
        slot
    }

    /// The kernel of a key; where there is none, `build` makes it, while others of the same key wait.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn get_or_build<E>(&self, key: &Key, build: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let slot = self.slot(key);
        let mut built = slot.lock();
        if let Some(kernel) = &*built {
            self.state.lock().stats.hits += 1;
            return Ok(Arc::clone(kernel));
        }
        match build() {
            Ok(kernel) => {
                self.state.lock().stats.builds += 1;
                Ok(Arc::clone(built.insert(Arc::new(kernel))))
            }
            Err(e) => {
                self.state.lock().stats.failures += 1;
                Err(e)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn key(source: &str) -> Key {
        Key { source: source.to_owned(), entry: "attention_forward", math: Math::Safe }
    }

    fn cache(capacity: usize) -> Cache<String> {
        Cache::new(NonZeroUsize::new(capacity).unwrap())
    }

    fn get(cache: &Cache<String>, key: &Key) -> Arc<String> {
        cache.get_or_build(key, || Ok::<_, ()>(format!("{key:?}"))).unwrap()
    }

    #[test]
    fn every_field_of_a_key_tells_kernels_apart() {
        let cache = cache(8);
        let first = key("a");
        let others = [key("b"), Key { entry: "attention_dq", ..key("a") }, Key { math: Math::Fast, ..key("a") }];
        let held = get(&cache, &first);
        for other in &others {
            assert_ne!(get(&cache, other), held);
        }
        assert!(Arc::ptr_eq(&get(&cache, &first), &held));
        assert_eq!(cache.stats(), CacheStats { hits: 1, builds: 4, failures: 0, evictions: 0 });
    }

    #[test]
    fn the_least_recently_used_goes_and_lives_on_with_its_holder() {
        let cache = cache(2);
        let [a, b, c] = ["a", "b", "c"].map(key);
        let held = get(&cache, &b);
        get(&cache, &a);
        get(&cache, &b);
        get(&cache, &a);
        get(&cache, &c);
        assert_eq!((cache.len(), cache.stats().evictions), (2, 1));
        get(&cache, &a);
        assert_eq!(cache.stats().builds, 3, "a was used after b, and stayed");
        assert!(!Arc::ptr_eq(&get(&cache, &b), &held));
        assert_eq!((cache.stats().builds, held.is_empty()), (4, false));
    }

    #[test]
    fn a_failed_build_is_tried_again() {
        let cache = cache(2);
        assert_eq!(cache.get_or_build(&key("a"), || Err("no")), Err("no"));
        get(&cache, &key("a"));
        get(&cache, &key("a"));
        assert_eq!(cache.stats(), CacheStats { hits: 1, builds: 1, failures: 1, evictions: 0 });
    }

    #[test]
    fn threads_that_want_the_same_build_it_once_and_others_do_not_wait() {
        let cache = cache(4);
        let built = AtomicUsize::new(0);
        let (started, go) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cache.get_or_build(&key("slow"), || {
                    started.wait();
                    go.wait();
                    built.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, ()>("slow".to_owned())
                })
            });
            started.wait();
            // With the slow build under way: this would hang if it waited for it.
            get(&cache, &key("quick"));
            for _ in 0..3 {
                scope.spawn(|| {
                    cache.get_or_build(&key("slow"), || {
                        built.fetch_add(1, Ordering::SeqCst);
                        Ok::<_, ()>("again".to_owned())
                    })
                });
            }
            go.wait();
        });
        assert_eq!(built.load(Ordering::SeqCst), 1);
        assert_eq!(cache.stats(), CacheStats { hits: 3, builds: 2, failures: 0, evictions: 0 });
    }
}
