//! Code that a cache calls: keys, values and subscribers may panic and may call the cache, at any point.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use tracing::span;

/// The point at which the next call panics, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Weight,
    Engine,
    BuildTime,
    Label,
    Fields,
    Error,
}

#[derive(Debug)]
struct Fuse {
    place: Place,
    lit: AtomicBool,
}

impl Fuse {
    fn burn(&self, place: Place) {
        if self.place == place && self.lit.swap(false, StdOrdering::SeqCst) {
            panic!("on purpose, in {place:?}");
        }
    }
}

#[derive(Clone, Debug)]
struct Key(u32, Arc<Fuse>);

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0 == other.0
    }
}

impl Eq for Key {}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl CacheKey for Key {
    fn label(&self) -> String {
        self.1.burn(Place::Label);
        String::new()
    }

    fn fields(&self) -> Fields {
        self.1.burn(Place::Fields);
        Vec::new()
    }
}

#[derive(Clone, Debug)]
struct Fused(Arc<Fuse>);

impl CacheValue for Fused {
    fn weight(&self) -> Weight {
        self.0.burn(Place::Weight);
        Weight::default()
    }

    fn engine(&self) -> String {
        self.0.burn(Place::Engine);
        String::new()
    }

    fn build_time(&self) -> BuildTime {
        self.0.burn(Place::BuildTime);
        BuildTime::default()
    }
}

#[derive(Debug)]
struct FusedError(Arc<Fuse>);

impl fmt::Display for FusedError {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.burn(Place::Error);
        Ok(())
    }
}

impl BuildError for FusedError {
    type Refusal = String;

    fn refusal(&self) -> Option<String> {
        Some("unsupported".to_owned())
    }

    fn again(_: String) -> FusedError {
        FusedError(Arc::new(Fuse { place: Place::Error, lit: AtomicBool::new(false) }))
    }
}

/// Runs `work` on a new thread, with a time limit that only a deadlock exceeds.
fn soon<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, told) = channel();
    std::thread::spawn(move || done.send(work()));
    told.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|e| panic!("{what}: {e}"))
}

#[test]
fn what_panics_after_a_build_leaves_the_key_to_those_who_wait() {
    for place in [Place::Weight, Place::Engine, Place::BuildTime, Place::Label, Place::Fields, Place::Error] {
        let fuse = Arc::new(Fuse { place, lit: AtomicBool::new(false) });
        let cache: Arc<PlanCache<Key, Fused, String>> = Arc::new(PlanCache::new("test", limits(4, u64::MAX)));
        let (builds, waits) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let first = {
            let (cache, fuse, builds, waits) = (cache.clone(), fuse.clone(), builds.clone(), waits.clone());
            std::thread::spawn(move || {
                let build = || {
                    builds.wait();
                    waits.wait();
                    // Give the other thread time to wait for the key.
                    std::thread::sleep(Duration::from_millis(50));
                    fuse.lit.store(true, StdOrdering::SeqCst);
                    match place {
                        Place::Error => Err(FusedError(fuse.clone())),
                        Place::Weight | Place::Engine | Place::BuildTime | Place::Label | Place::Fields => Ok(Fused(fuse.clone())),
                    }
                };
                catch_unwind(AssertUnwindSafe(|| cache.get_or_build(&Key(1, fuse.clone()), build).map(drop))).is_err()
            })
        };
        builds.wait();
        let there = {
            let (cache, fuse) = (cache.clone(), fuse.clone());
            soon(&format!("a waiter behind a panic in {place:?}"), move || {
                waits.wait();
                cache.get_or_build::<FusedError>(&Key(1, fuse.clone()), || Ok(Fused(fuse.clone()))).unwrap().1
            })
        };
        assert!(first.join().unwrap(), "nothing has panicked in {place:?}");
        assert!(!there, "{place:?}");
        assert_eq!((cache.stats().entries, cache.stats().misses), (1, 2), "{place:?}");
    }
}

/// A subscriber's reaction to each event.
#[derive(Clone, Copy, Debug)]
enum Habit {
    Asks,
    Panics,
}

/// A subscriber with a fixed reaction.
struct Subscriber {
    habit: Habit,
    cache: Arc<OnceLock<Arc<Cache>>>,
    heard: Arc<AtomicUsize>,
}

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        let Some(cache) = self.cache.get() else { return };
        self.heard.fetch_add(1, StdOrdering::SeqCst);
        match self.habit {
            Habit::Asks => {
                cache.snapshot();
                cache.explain(&3);
                cache.get_or_build(&100, ok(100)).unwrap();
            }
            Habit::Panics => panic!("a subscriber, on purpose"),
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Performs every operation that sends an event.
fn busy(c: &Cache) {
    let caught = |work: &dyn Fn()| drop(catch_unwind(AssertUnwindSafe(work)));
    for key in 0..40 {
        caught(&|| drop(c.get_or_build(&(key % 5), ok(key % 5))));
        caught(&|| drop(c.get_or_build(&(key % 5), ok(key % 5))));
    }
    caught(&|| drop(c.get_or_build(&7, heavy(7, 1000))));
    caught(&|| drop(c.get_or_build(&8, || Err(Failure::Now))));
    caught(&|| drop(c.get_or_build(&9, || Err(Failure::Never("no engine".to_owned())))));
    caught(&|| c.resize(limits(1, 100)));
    caught(&|| drop(c.get_or_build(&1, ok(1))));
    caught(&|| c.clear());
}

#[test]
fn a_subscriber_may_ask_the_cache() {
    let heard = Arc::new(AtomicUsize::new(0));
    let subscriber = Subscriber { habit: Habit::Asks, cache: Arc::default(), heard: heard.clone() };
    let c = Arc::new(Cache::new("test", limits(3, 100)));
    subscriber.cache.set(c.clone()).unwrap();
    let stats = soon("a subscriber that asks", move || {
        tracing::subscriber::with_default(subscriber, || busy(&c));
        // One entry is left: the subscriber made it while it received the event of the clear.
        assert_eq!(keys(&c), [100]);
        c.stats()
    });
    assert_eq!((stats.failures, stats.not_kept), (2, 1), "{stats:?}");
    assert!(heard.load(StdOrdering::SeqCst) > 40, "it heard of {heard:?} events");
}

#[test]
fn a_subscriber_may_panic() {
    let heard = Arc::new(AtomicUsize::new(0));
    let subscriber = Subscriber { habit: Habit::Panics, cache: Arc::default(), heard: heard.clone() };
    let c = Arc::new(Cache::new("test", limits(3, 100)));
    subscriber.cache.set(c.clone()).unwrap();
    let stats = soon("a subscriber that panics", move || {
        tracing::subscriber::with_default(subscriber, || busy(&c));
        for key in [1, 2, 7, 8, 9] {
            assert!(!c.get_or_build(&key, ok(key)).unwrap().1, "{key}");
        }
        c.stats()
    });
    assert_eq!(stats.entries, 1, "{stats:?}");
    assert!(heard.load(StdOrdering::SeqCst) > 40, "it heard of {heard:?} events");
}

/// The subscriber panics on the event of a dropped value, which another thread has in its front.
#[test]
fn what_is_dropped_dies_also_where_a_subscriber_panics() {
    let subscriber = Subscriber { habit: Habit::Panics, cache: Arc::default(), heard: Arc::default() };
    let asked = subscriber.cache.clone();
    let c = Arc::new(cache(2));
    let (kept, over) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|s| {
        s.spawn(|| {
            for key in [1, 2, 1, 2] {
                c.get_or_build(&key, ok(key)).unwrap();
            }
            kept.wait();
            over.wait();
        });
        kept.wait();
        let values: Vec<_> = c.values().iter().map(|(_, value)| Arc::downgrade(&value._alive)).collect();
        asked.set(c.clone()).unwrap();
        let cleared = tracing::subscriber::with_default(subscriber, || catch_unwind(AssertUnwindSafe(|| c.clear())));
        let alive: Vec<_> = values.iter().map(std::sync::Weak::strong_count).collect();
        over.wait();
        assert!(cleared.is_err(), "the subscriber was told nothing");
        assert_eq!(alive, [0, 0], "an idle thread kept what was dropped");
    });
}

#[test]
fn what_is_dropped_in_a_call_that_panics_dies() {
    let c = cache(2);
    c.get_or_build(&1, ok(1)).unwrap();
    let alive = Arc::downgrade(&c.values()[0].1._alive);
    let call = || {
        c.with(&1, ok(1), |_, there| {
            assert!(there);
            c.clear();
            panic!("on purpose");
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
    assert_eq!(alive.strong_count(), 0, "the call is over");
}

std::thread_local! {
    /// The action that comparing two keys performs.
    static COMPARING: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

/// A key whose hash is always the same and whose comparison is slow, so that others can drop entries meanwhile.
#[derive(Clone, Debug)]
struct Slow(u32);

impl PartialEq for Slow {
    fn eq(&self, other: &Slow) -> bool {
        let meanwhile = COMPARING.with_borrow_mut(Option::take);
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        self.0 == other.0
    }
}

impl Eq for Slow {}

impl std::hash::Hash for Slow {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        0u32.hash(state);
    }
}

impl CacheKey for Slow {
    fn label(&self) -> String {
        String::new()
    }

    fn fields(&self) -> Fields {
        Vec::new()
    }
}

/// A thread looks up a key that is not in its front while another drops one that is; the build then fails.
#[test]
fn what_is_dropped_during_a_look_in_vain_dies() {
    let c: Arc<PlanCache<Slow, Value, String>> = Arc::new(PlanCache::new("test", limits(4, u64::MAX)));
    c.get_or_build(&Slow(1), ok(1)).unwrap();
    let alive = Arc::downgrade(&c.values()[0].1._alive);
    let other = c.clone();
    COMPARING.set(Some(Box::new(move || std::thread::scope(|s| drop(s.spawn(|| other.clear()).join())))));
    assert!(c.get_or_build(&Slow(2), || Err(Failure::Now)).is_err());
    assert!(COMPARING.with_borrow(Option::is_none), "nothing was compared");
    assert_eq!((c.stats().entries, alive.strong_count()), (0, 0));
}

#[cfg(feature = "metrics")]
mod counters {
    use super::*;
    use metrics::{Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};

    /// A recorder that calls the cache at each count.
    #[derive(Clone)]
    struct Asks(Arc<Cache>, Arc<AtomicUsize>);

    impl Asks {
        fn ask(&self) {
            self.1.fetch_add(1, StdOrdering::SeqCst);
            self.0.stats();
            self.0.snapshot();
        }
    }

    impl CounterFn for Asks {
        fn increment(&self, _: u64) {
            self.ask();
        }

        fn absolute(&self, _: u64) {
            self.ask();
        }
    }

    impl HistogramFn for Asks {
        fn record(&self, _: f64) {
            self.ask();
        }
    }

    impl Recorder for Asks {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::new(self.clone()))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::new(self.clone()))
        }
    }

    #[test]
    fn a_recorder_may_ask_the_cache() {
        let c = Arc::new(Cache::new("test", limits(3, 100)));
        let (recorder, counted) = (Asks(c.clone(), Arc::default()), c.clone());
        let asked = recorder.1.clone();
        soon("a recorder that asks", move || metrics::with_local_recorder(&recorder, || busy(&c)));
        assert_eq!(counted.stats().entries, 0);
        assert!(asked.load(StdOrdering::SeqCst) > 40, "it was told {asked:?} times");
    }
}
