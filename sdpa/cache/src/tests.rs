//! Compares one thread with a model, and checks the guarantees with many threads.

mod foreign;

use super::*;
use proptest::prelude::*;
use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering as StdOrdering};

/// A value with a size that records when it is dropped.
#[derive(Clone, Debug, Default)]
struct Value {
    number: u32,
    bytes: u64,
    _alive: Arc<()>,
}

impl CacheValue for Value {
    fn weight(&self) -> Weight {
        Weight { device: self.bytes, ..Weight::default() }
    }

    fn engine(&self) -> String {
        format!("eng{}", self.number)
    }
}

impl CacheKey for u32 {
    fn label(&self) -> String {
        format!("key {self}")
    }

    fn fields(&self) -> Fields {
        vec![("tens", (self / 10).to_string()), ("ones", (self % 10).to_string())]
    }

    fn advice(differences: &[Difference]) -> Option<&'static str> {
        (differences.len() == 1 && differences[0].field == "ones").then_some("round to tens")
    }
}

#[derive(Debug, PartialEq)]
enum Failure {
    Never(String),
    Now,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl BuildError for Failure {
    type Refusal = String;

    fn refusal(&self) -> Option<String> {
        match self {
            Failure::Never(why) => Some(why.clone()),
            Failure::Now => None,
        }
    }

    fn again(refusal: String) -> Failure {
        Failure::Never(refusal)
    }
}

type Cache = PlanCache<u32, Value, String>;

fn limits(entries: usize, bytes: u64) -> Limits {
    Limits::entries(NonZeroUsize::new(entries).unwrap()).with_bytes(bytes)
}

fn cache(entries: usize) -> Cache {
    Cache::new("test", limits(entries, u64::MAX))
}

fn ok(number: u32) -> impl FnOnce() -> Result<Value, Failure> {
    heavy(number, 1)
}

fn heavy(number: u32, bytes: u64) -> impl FnOnce() -> Result<Value, Failure> {
    move || Ok(Value { number, bytes, _alive: Arc::default() })
}

fn keys(c: &Cache) -> Vec<u32> {
    c.values().into_iter().map(|(key, _)| key).collect()
}

#[test]
fn the_least_recently_used_goes_first() {
    let c = cache(2);
    for key in [1, 2, 1, 3] {
        c.get_or_build(&key, ok(key * 10)).unwrap();
    }
    let there = |key| c.get_or_build(&key, ok(0)).map(|(value, there)| (value.number, there)).unwrap();
    assert_eq!((there(1), there(3)), ((10, true), (30, true)));
    assert_eq!(there(2), (0, false));
    let stats = c.stats();
    assert_eq!((stats.entries, stats.hits, stats.misses, stats.evictions, stats.rebuilt), (2, 3, 4, 2, 1));
}

#[test]
fn a_failed_build_is_tried_again_and_a_refusal_is_not() {
    let c = cache(2);
    assert_eq!(c.get_or_build(&1, || Err(Failure::Now)).unwrap_err(), Failure::Now);
    assert_eq!(c.get_or_build(&1, ok(5)).unwrap().0.number, 5);
    let never = || Err(Failure::Never("no engine".to_owned()));
    assert!(c.get_or_build(&2, never).is_err());
    let again = c.get_or_build::<Failure>(&2, || panic!("built again")).unwrap_err();
    assert_eq!(again, Failure::Never("no engine".to_owned()));
    assert!(matches!(c.explain(&2).state, State::Unsupported { error, .. } if error == "no engine"));
    assert_eq!((c.stats().failures, c.stats().refusals, c.stats().entries), (2, 1, 1));
    c.clear();
    assert!(c.get_or_build(&2, ok(1)).is_ok());
    c.resize(c.limits().with_refusals(Duration::ZERO));
    assert!(c.get_or_build(&3, never).is_err());
    assert!(c.get_or_build(&3, ok(1)).is_ok(), "it was to be forgotten at once");
}

#[test]
fn refusals_are_as_many_as_entries() {
    let c = cache(4);
    let asked = AtomicUsize::new(0);
    let never = || {
        asked.fetch_add(1, StdOrdering::Relaxed);
        Err(Failure::Never("no engine".to_owned()))
    };
    for key in 0..1000 {
        assert!(c.get_or_build(&key, never).is_err());
    }
    for key in 996..1000 {
        assert!(c.get_or_build(&key, never).is_err());
    }
    assert_eq!(asked.load(StdOrdering::Relaxed), 1000);
    for key in [5, 995] {
        assert!(c.get_or_build(&key, never).is_err());
    }
    assert_eq!((asked.load(StdOrdering::Relaxed), c.stats().refusals), (1002, 4));
    c.clear();
    assert!(c.get_or_build(&999, ok(1)).is_ok());
}

#[test]
fn a_build_that_panics_does_not_lock_its_key() {
    let c = cache(2);
    let build = || c.get_or_build::<Failure>(&1, || panic!("on purpose"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(build)).is_err());
    assert!(!c.get_or_build(&1, ok(5)).unwrap().1);
}

#[test]
fn what_is_too_heavy_is_given_and_not_kept() {
    let c = Cache::new("test", limits(8, 100));
    for key in 0..3 {
        c.get_or_build(&key, heavy(key, 40)).unwrap();
    }
    assert_eq!(keys(&c), [2, 1]);
    assert_eq!(c.get_or_build(&9, heavy(9, 101)).unwrap().0.number, 9);
    assert_eq!((keys(&c), c.stats().not_kept), (vec![2, 1], 1));
    let pin = c.pin(&1).unwrap();
    assert!(c.pin(&0).is_none());
    c.get_or_build(&5, heavy(5, 60)).unwrap();
    assert_eq!(keys(&c), [5, 1]);
    c.get_or_build(&6, heavy(6, 61)).unwrap();
    assert_eq!((keys(&c), c.stats().not_kept), (vec![5, 1], 2));
    c.clear();
    assert_eq!((keys(&c), pin.value().number), (vec![1], 1));
    c.resize(limits(1, 10));
    assert_eq!(keys(&c), [1]);
    drop(pin);
    c.resize(limits(1, 10));
    assert_eq!((keys(&c), c.stats().weight), (vec![], Weight::default()));
}

#[test]
fn every_miss_has_a_reason() {
    let c = cache(2);
    c.get_or_build(&12, ok(0)).unwrap();
    let miss = c.explain(&17);
    assert_eq!(miss.state, State::Absent);
    assert_eq!(miss.nearest[0].differences[0].to_string(), "ones 7 ≠ 2");
    assert_eq!(miss.advice, ["round to tens"]);
    assert_eq!(miss.to_string(), "key 17: not there\n  entry 1\n    ones 7 ≠ 2\n  round to tens");
    c.get_or_build(&12, ok(0)).unwrap();
    assert!(matches!(c.explain(&12).state, State::Hit(entry) if entry.hits == 1 && entry.engine == "eng0"));
    for key in [30, 41] {
        c.get_or_build(&key, ok(0)).unwrap();
    }
    let gone = c.explain(&12);
    assert_eq!((gone.state, gone.nearest[0].gone, gone.nearest[0].differences.len()), (State::Absent, Some(Why::Entries), 0));
    assert!(gone.advice[0].contains("raise the bound on entries"));
    c.get_or_build(&12, ok(0)).unwrap();
    let snapshot = c.snapshot();
    let missed: Vec<_> = snapshot.events.iter().filter(|e| matches!(e.what, What::Missed { .. })).collect();
    assert_eq!(missed[0].what, What::Missed { nearest: vec![], evicted: None });
    assert_eq!(missed[3].what, What::Missed { nearest: vec![], evicted: Some(Why::Entries) });
    // Compare the serialised forms: files store whole microseconds only.
    let text = serde_json::to_string(&snapshot).unwrap();
    let read = serde_json::from_str::<CacheSnapshot>(&text).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
    assert_eq!((read.at.as_micros(), read.entries.len(), read.limits), (snapshot.at.as_micros(), snapshot.entries.len(), snapshot.limits));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["at"].as_u64().map(u128::from), Some(snapshot.at.as_micros()));
    assert!(json["entries"][0]["built"]["total"].is_u64());
}

#[test]
fn thrashing_is_told_once_in_a_window() {
    let c = cache(8);
    for n in 0..160 {
        c.get_or_build(&(n % 9), ok(n)).unwrap();
    }
    let told: Vec<_> = c.snapshot().events.into_iter().filter(|e| matches!(e.what, What::Thrashing { .. })).collect();
    assert!((5..=10).contains(&told.len()), "{told:?}");
    let calm = cache(8);
    for n in 0..1600 {
        calm.get_or_build(&(n % 8), ok(n)).unwrap();
    }
    assert!(calm.snapshot().events.iter().all(|e| !matches!(e.what, What::Thrashing { .. })));
    assert_eq!((calm.stats().misses, calm.stats().hits), (8, 1592));
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
                let build = || {
                    builds.fetch_add(1, StdOrdering::Relaxed);
                    building.wait();
                    // Finish only after another thread has looked up another key.
                    other_done.wait();
                    std::thread::sleep(Duration::from_millis(20));
                    heavy(7, 1)()
                };
                assert_eq!(c.get_or_build::<Failure>(&1, build).unwrap().0.number, 7);
            });
        }
        building.wait();
        assert!(!c.get_or_build(&2, ok(3)).unwrap().1);
        other_done.wait();
    });
    assert_eq!(builds.load(StdOrdering::Relaxed), 1);
    assert_eq!((c.stats().hits, c.stats().misses), (7, 2));
}

#[test]
fn what_is_dropped_dies_also_where_another_thread_has_it_at_hand() {
    let c = cache(1);
    let weak = |value: &Value| Arc::downgrade(&value._alive);
    let (hit, dropped, done) = (Barrier::new(2), Barrier::new(2), Barrier::new(2));
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..3 {
                c.get_or_build(&1, ok(1)).unwrap();
            }
            hit.wait();
            dropped.wait();
            // The value is in use: it is freed when the call returns, not before.
            c.with(&2, ok(2), |value, _| {
                hit.wait();
                dropped.wait();
                assert_eq!(value.number, 2);
            })
            .unwrap();
            done.wait();
            // Keep this thread alive, and with it its front of the cache.
            done.wait();
        });
        hit.wait();
        let one = weak(&c.values()[0].1);
        c.get_or_build(&2, ok(2)).unwrap();
        assert_eq!(one.strong_count(), 0, "the idle thread kept it");
        dropped.wait();
        hit.wait();
        let two = weak(&c.values()[0].1);
        c.get_or_build(&3, ok(3)).unwrap();
        assert!(two.strong_count() > 0, "it was in use");
        dropped.wait();
        done.wait();
        assert_eq!(two.strong_count(), 0, "the call is over");
        done.wait();
    });
}

#[test]
fn a_dropped_cache_takes_everything_along() {
    let c = Arc::new(cache(4));
    let (ready, gone) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|s| {
        let own = c.clone();
        let (ready, gone) = (&ready, &gone);
        s.spawn(move || {
            own.get_or_build(&1, ok(1)).unwrap();
            own.get_or_build(&1, ok(1)).unwrap();
            drop(own);
            ready.wait();
            gone.wait();
        });
        ready.wait();
        let value = Arc::downgrade(&c.values()[0].1._alive);
        drop(c);
        assert_eq!(value.strong_count(), 0);
        gone.wait();
    });
}

#[test]
fn a_call_may_look_things_up() {
    let c = cache(1);
    let sum = |key: u32| {
        c.with(&key, ok(key), |outer, _| {
            let inner = c.with(&(key + 1), ok(key + 1), |inner, _| c.get_or_build(&key, ok(0)).unwrap().0.number + inner.number).unwrap();
            outer.number + inner
        })
    };
    // The entry of the outer call is evicted while it is in use, and the inner call builds it again.
    assert_eq!(sum(10).unwrap(), 10 + 11);
    assert_eq!(sum(10).unwrap(), 11);
    assert_eq!(c.stats().entries, 1);
}

/// A reference model: a list of keys in order of use.
struct Model {
    limits: Limits,
    entries: Vec<(u32, u64, bool)>,
}

impl Model {
    fn bytes(&self) -> u64 {
        self.entries.iter().map(|(_, bytes, _)| bytes).sum()
    }

    fn trim(&mut self, entries: usize, bytes: u64) {
        while self.entries.len() > entries || self.bytes() > bytes {
            let Some(oldest) = self.entries.iter().rposition(|(.., pinned)| !pinned) else { break };
            self.entries.remove(oldest);
        }
    }

    fn get(&mut self, key: u32, bytes: u64) {
        if let Some(at) = self.entries.iter().position(|(k, ..)| *k == key) {
            let entry = self.entries.remove(at);
            self.entries.insert(0, entry);
            return;
        }
        let pinned = self.entries.iter().filter(|(.., pinned)| *pinned);
        let (count, held) = pinned.fold((0, bytes), |(n, sum), (_, bytes, _)| (n + 1, sum + bytes));
        if held <= self.limits.bytes && count < self.limits.entries.get() {
            self.trim(self.limits.entries.get() - 1, self.limits.bytes - bytes);
            self.entries.insert(0, (key, bytes, false));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn one_thread_sees_a_list_in_the_order_of_use(
        ops in prop::collection::vec((0u32..8, 0u32..14, 1u64..40), 1..200),
        entries in 1usize..6,
        bytes in 30u64..120,
    ) {
        let c = Cache::new("test", limits(entries, bytes));
        let mut model = Model { limits: limits(entries, bytes), entries: Vec::new() };
        let mut pins: Vec<(u32, Pin<u32, Value>)> = Vec::new();
        for (op, key, weight) in ops {
            match op {
                0 => {
                    model.limits = limits(1 + key as usize % 6, 30 + weight * 2);
                    model.trim(model.limits.entries.get(), model.limits.bytes);
                    c.resize(model.limits);
                }
                1 if key == 0 => {
                    model.trim(0, 0);
                    c.clear();
                }
                1 | 2 => {
                    if let Some(at) = pins.iter().position(|(k, _)| *k == key) {
                        pins.remove(at);
                        model.entries.iter_mut().filter(|(k, ..)| *k == key).for_each(|entry| entry.2 = false);
                    } else if let Some(pin) = c.pin(&key) {
                        pins.push((key, pin));
                        model.entries.iter_mut().filter(|(k, ..)| *k == key).for_each(|entry| entry.2 = true);
                    }
                }
                _ => {
                    let there = model.entries.iter().find(|(k, ..)| *k == key).map(|(_, bytes, _)| *bytes);
                    let (value, hit) = c.get_or_build(&key, heavy(key, weight)).unwrap();
                    prop_assert_eq!((value.number, hit), (key, there.is_some()));
                    model.get(key, weight);
                }
            }
            prop_assert_eq!(keys(&c), model.entries.iter().map(|(key, ..)| *key).collect::<Vec<_>>());
            prop_assert_eq!(c.stats().weight.bytes(), model.bytes());
        }
    }
}

/// A key whose hash is always the same.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Alike(u32);

impl std::hash::Hash for Alike {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        0u32.hash(state);
    }
}

impl CacheKey for Alike {
    fn label(&self) -> String {
        String::new()
    }

    fn fields(&self) -> Fields {
        vec![("number", self.0.to_string())]
    }
}

#[test]
fn keys_of_one_hash_are_told_apart() {
    let c: PlanCache<Alike, Value, String> = PlanCache::new("test", limits(20, u64::MAX));
    for round in 0..3 {
        for key in 0..20 {
            let (value, there) = c.get_or_build(&Alike(key), ok(key)).unwrap();
            assert_eq!((value.number, there), (key, round > 0));
        }
    }
    c.resize(limits(5, u64::MAX));
    for key in (0..20).rev() {
        assert_eq!(c.get_or_build(&Alike(key), ok(key)).unwrap().0.number, key);
        assert!(c.stats().entries <= 5 && c.stats().weight.bytes() == c.stats().entries as u64);
    }
}

#[cfg(feature = "metrics")]
#[test]
fn counters_are_told_through_the_facade() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let c = cache(1);
        for key in [1, 1, 2, 1] {
            c.get_or_build(&key, ok(key)).unwrap();
        }
        assert!(c.get_or_build(&3, || Err(Failure::Now)).is_err());
        c.stats();
    });
    let all = snapshotter.snapshot().into_vec();
    let count = |name: &str| {
        let found = all.iter().filter(|(key, ..)| key.key().name() == name);
        let value = |value: &DebugValue| match value {
            DebugValue::Counter(n) => *n,
            DebugValue::Histogram(all) => all.len() as u64,
            DebugValue::Gauge(_) => 0,
        };
        found.map(|(.., v)| value(v)).sum::<u64>()
    };
    let names = ["hits_total", "misses_total", "failures_total", "evictions_total", "build_seconds"];
    assert_eq!(names.map(|name| count(&format!("sdpa_cache_{name}"))), [1, 4, 1, 2, 3]);
}
