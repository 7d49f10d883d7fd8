//! Kernels that were built, in a cache of plans: bounded, one build for each key, every miss with its reason.

use crate::error::Error;
use crate::plan::Plan;
use sdpa_cache::{BuildError, CacheKey, CacheValue, Fields, PlanCache, Weight};
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// What the compiler may do with floating point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Math {
    /// IEEE 754, with NaN and infinities: what the kernels are written for.
    #[default]
    Safe,
    /// Apple's fast math. Results for NaN, infinities and large scores are undefined; for measuring what it would bring.
    Fast,
}

/// All that a built kernel depends on, compared as a whole: the key of its cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// The MSL text.
    pub source: Arc<str>,
    /// The kernel in it.
    pub entry: &'static str,
    /// What the compiler may do with floating point.
    pub math: Math,
}

impl KernelKey {
    /// The key of a plan's kernel.
    pub fn new(plan: &Plan, math: Math) -> KernelKey {
        KernelKey { source: plan.source.as_str().into(), entry: plan.entry, math }
    }

    /// A number for the source, the same in every process of a build of this crate: for reports, which have no room for the text.
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

/// A built kernel: whatever its runner makes of the source.
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
    /// What a pipeline holds is nowhere said; the text that is kept beside it is known.
    fn weight(&self) -> Weight {
        Weight { host: self.source_bytes, ..Weight::default() }
    }
}

impl BuildError for Error {
    type Refusal = Infallible;

    /// A compiler that failed is asked again.
    fn refusal(&self) -> Option<Infallible> {
        None
    }

    fn again(refusal: Infallible) -> Error {
        match refusal {}
    }
}

/// Kernels by their [`KernelKey`]s. What is evicted lives on for as long as someone holds it.
pub type KernelCache<T> = PlanCache<KernelKey, Arc<Kernel<T>>, Infallible>;

impl<T> Kernel<T> {
    /// The kernel of a key, from the cache; where there is none, `build` makes it.
    ///
    /// # Errors
    /// Those of `build`.
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
