//! The cache of built kernels: bounded, one build per key, and a reason for every miss.

use crate::error::Error;
use crate::plan::Plan;
use sdpa_cache::{BuildError, CacheKey, CacheValue, Fields, PlanCache, Weight};
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// Floating-point transformations that the compiler may apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Math {
    /// None: IEEE 754 arithmetic with NaN and infinities. The kernels are written for it.
    #[default]
    Safe,
    /// The transformations of Apple's fast math. Results for NaN, infinities and large scores are then undefined. It is only for
    /// measuring the effect of fast math.
    Fast,
}

/// The key of the kernel cache: everything on which a built kernel depends. Keys are compared in full.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// The MSL source.
    pub source: Arc<str>,
    /// The kernel's name in the source.
    pub entry: &'static str,
    /// Floating-point transformations that the compiler may apply.
    pub math: Math,
}

impl KernelKey {
    /// Returns the key of a plan's kernel.
    pub fn new(plan: &Plan, math: Math) -> KernelKey {
        KernelKey { source: plan.source.as_str().into(), entry: plan.entry, math }
    }

    /// Returns a hash of the source, the same in every process of one build of this crate. Reports use it, because they have no room for the source.
    fn digest(&self) -> u64 {
        let mut state = DefaultHasher::new();
        self.source.hash(&mut state);
        state.finish()
    }
}

impl CacheKey for KernelKey {
    fn label(&self) -> String {
        format!("{} {:016x}", self.entry, self.digest())
    }

    fn fields(&self) -> Fields {
        let source = format!("{:016x}, {} bytes", self.digest(), self.source.len());
        vec![("entry", self.entry.to_owned()), ("source", source), ("math", format!("{:?}", self.math).to_lowercase())]
    }
}

/// A built kernel, in the form that its runner uses.
#[derive(Debug)]
pub struct Kernel<T> {
    built: T,
    source_bytes: u64,
}

impl<T> Deref for Kernel<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.built
    }
}

impl<T> CacheValue for Kernel<T> {
    /// The size of a pipeline is unknown; that of the source kept with it is known.
    fn weight(&self) -> Weight {
        Weight { host: self.source_bytes, ..Weight::default() }
    }
}

impl BuildError for Error {
    type Refusal = Infallible;

    /// A failed compilation is tried again.
    fn refusal(&self) -> Option<Infallible> {
        None
    }

    fn again(refusal: Infallible) -> Error {
        match refusal {}
    }
}

/// A cache of built kernels by [`KernelKey`]. An evicted kernel lives as long as it has an owner.
pub type KernelCache<T> = PlanCache<KernelKey, Arc<Kernel<T>>, Infallible>;

impl<T> Kernel<T> {
    /// Returns the kernel of a key. It comes from the cache, or `build` builds it.
    ///
    /// # Errors
    /// Returns the error of `build`.
    pub fn of(cache: &KernelCache<T>, key: &KernelKey, build: impl FnOnce() -> Result<T, Error>) -> Result<Arc<Kernel<T>>, Error>
    where
        T: Send + Sync + 'static,
    {
        let source_bytes = key.source.len() as u64;
        Ok(cache.get_or_build(key, || Ok(Arc::new(Kernel { built: build()?, source_bytes })))?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_cache::{Limits, State};
    use std::num::NonZeroUsize;

    fn key(source: &str) -> KernelKey {
        KernelKey { source: source.into(), entry: "attention_forward", math: Math::Safe }
    }

    fn cache(capacity: usize) -> KernelCache<String> {
        PlanCache::new("kernels", Limits::entries(NonZeroUsize::new(capacity).unwrap()))
    }

    fn get(cache: &KernelCache<String>, key: &KernelKey) -> Arc<Kernel<String>> {
        Kernel::of(cache, key, || Ok(format!("{key:?}"))).unwrap()
    }

    #[test]
    fn every_field_of_a_key_tells_kernels_apart() {
        let cache = cache(8);
        let first = key("a");
        let others = [key("b"), KernelKey { entry: "attention_dq", ..key("a") }, KernelKey { math: Math::Fast, ..key("a") }];
        let held = get(&cache, &first);
        for other in &others {
            assert_ne!(**get(&cache, other), **held);
            assert_ne!(other.fields(), first.fields());
        }
        assert!(Arc::ptr_eq(&get(&cache, &first), &held));
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses, stats.evictions), (1, 4, 0));
        assert!(matches!(cache.explain(&first).state, State::Hit(_)));
    }

    #[test]
    fn what_is_evicted_lives_on_with_its_holder() {
        let cache = cache(1);
        let held = get(&cache, &key("a"));
        get(&cache, &key("b"));
        assert_eq!((cache.stats().entries, cache.stats().evictions), (1, 1));
        assert!(!Arc::ptr_eq(&get(&cache, &key("a")), &held));
        assert!(held.contains("\"a\""));
    }

    #[test]
    fn a_failed_build_is_tried_again() {
        let cache = cache(2);
        let failed = Error::Compile { entry: "attention_forward", text: "no".to_owned() };
        assert_eq!(Kernel::of(&cache, &key("a"), || Err(failed.clone())).unwrap_err(), failed);
        get(&cache, &key("a"));
        assert_eq!((cache.stats().misses, cache.stats().failures, cache.stats().entries), (2, 1, 1));
    }
}
