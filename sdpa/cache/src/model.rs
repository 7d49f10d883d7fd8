//! Checks the cache's guarantees under the interleavings that a model checker tries: package `cache-model`.

use super::*;
use shuttle::sync::Barrier;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering as StdOrdering};

/// Interleavings per test, random with few preemptions. Each run draws others, so three days try 21,000.
const ORDERS: usize = 7_000;

/// A value that counts its live instances.
#[derive(Debug)]
struct Counted {
    key: u32,
    live: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.live.fetch_sub(1, StdOrdering::SeqCst);
    }
}

impl CacheValue for Counted {
    fn weight(&self) -> Weight {
        Weight { host: 1, ..Weight::default() }
    }
}

impl CacheKey for u32 {
    fn label(&self) -> String {
        String::new()
    }

    fn fields(&self) -> Fields {
        Vec::new()
    }
}

#[derive(Debug)]
struct Failure;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failed")
    }
}

impl BuildError for Failure {
    type Refusal = String;

    fn refusal(&self) -> Option<String> {
        None
    }

    fn again(_: String) -> Failure {
        Failure
    }
}

type Cache = PlanCache<u32, Arc<Counted>, String>;

/// A cache with counts of live values and of builds.
#[derive(Clone)]
struct World {
    cache: Arc<Cache>,
    live: Arc<AtomicUsize>,
    builds: Arc<AtomicUsize>,
}

impl World {
    fn new(entries: usize) -> World {
        let limits = Limits::entries(NonZeroUsize::new(entries).unwrap());
        World { cache: Arc::new(Cache::new("model", limits)), live: Arc::default(), builds: Arc::default() }
    }

    fn build(&self, key: u32) -> Result<Arc<Counted>, Failure> {
        self.builds.fetch_add(1, StdOrdering::SeqCst);
        shuttle::thread::yield_now();
        self.live.fetch_add(1, StdOrdering::SeqCst);
        Ok(Arc::new(Counted { key, live: self.live.clone() }))
    }

    fn look(&self, key: u32) {
        let call = |value: &Arc<Counted>, _| {
            assert_eq!(value.key, key);
            shuttle::thread::yield_now();
        };
        self.cache.with(&key, || self.build(key), call).unwrap();
    }
}

fn check(test: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(test.clone(), ORDERS);
    shuttle::check_pct(test, ORDERS, 3);
}

fn threads(world: &World, count: usize, work: impl Fn(&World, usize) + Send + Sync + Clone + 'static) {
    let handles: Vec<_> = (0..count)
        .map(|n| {
            let (world, work) = (world.clone(), work.clone());
            shuttle::thread::spawn(move || work(&world, n))
        })
        .collect();
    handles.into_iter().for_each(|h| h.join().unwrap());
}

#[test]
fn one_build_per_key() {
    check(|| {
        let world = World::new(4);
        threads(&world, 3, |world, n| {
            world.look(1);
            world.look(2 + n as u32 % 2);
            world.look(1);
        });
        assert_eq!(world.builds.load(StdOrdering::SeqCst), 3);
        let stats = world.cache.stats();
        assert_eq!((stats.hits, stats.misses, stats.entries), (6, 3, 3));
    });
}

/// Threads that live on have entries in their fronts; none may be a dropped one. Meanwhile another thread counts, for which it locks every front.
fn what_is_dropped_dies(entries: usize, keys: [[u32; 5]; 3]) {
    check(move || {
        let world = World::new(entries);
        let (quiet, over) = (Arc::new(Barrier::new(5)), Arc::new(Barrier::new(4)));
        let handles = keys.map(|keys| {
            let (world, quiet, over) = (world.clone(), quiet.clone(), over.clone());
            shuttle::thread::spawn(move || {
                keys.into_iter().for_each(|key| world.look(key));
                quiet.wait();
                over.wait();
            })
        });
        let counts = {
            let (world, quiet) = (world.clone(), quiet.clone());
            shuttle::thread::spawn(move || {
                for _ in 0..3 {
                    assert!(world.cache.stats().entries <= entries);
                }
                quiet.wait();
            })
        };
        quiet.wait();
        // Read `live` before `stats`, which locks the fronts and could hide an entry that a front has kept.
        let live = world.live.load(StdOrdering::SeqCst);
        let there = world.cache.stats().entries;
        assert!(there <= entries);
        assert_eq!(live, there, "a front has kept what was dropped");
        world.cache.clear();
        assert_eq!(world.live.load(StdOrdering::SeqCst), 0);
        over.wait();
        handles.into_iter().chain([counts]).for_each(|h| h.join().unwrap());
    });
}

/// A thread whose builds fail adds nothing to its front, and so does not sweep it.
#[test]
fn what_is_dropped_while_a_build_fails_dies() {
    check(|| {
        let world = World::new(1);
        let (quiet, over) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
        let handles = [0, 1].map(|n| {
            let (world, quiet, over) = (world.clone(), quiet.clone(), over.clone());
            shuttle::thread::spawn(move || {
                world.look(n);
                assert!(world.cache.get_or_build(&(n + 2), || Err(Failure)).is_err());
                quiet.wait();
                over.wait();
            })
        });
        quiet.wait();
        assert_eq!(world.live.load(StdOrdering::SeqCst), 1, "a front has kept what was dropped");
        over.wait();
        handles.into_iter().for_each(|h| h.join().unwrap());
    });
}

/// Counting locks the front of an idle thread while another drops its entries.
#[test]
fn what_is_dropped_while_it_is_counted_dies() {
    check(|| {
        let world = World::new(1);
        let (there, quiet, over) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(4)), Arc::new(Barrier::new(2)));
        let rests = {
            let (world, there, quiet, over) = (world.clone(), there.clone(), quiet.clone(), over.clone());
            shuttle::thread::spawn(move || {
                world.look(0);
                world.look(0);
                there.wait();
                quiet.wait();
                over.wait();
            })
        };
        let works: [fn(&World); 2] = [|world| world.look(1), |world| assert_eq!(world.cache.stats().entries, 1)];
        let others = works.map(|work| {
            let (world, there, quiet) = (world.clone(), there.clone(), quiet.clone());
            shuttle::thread::spawn(move || {
                there.wait();
                work(&world);
                quiet.wait();
            })
        });
        quiet.wait();
        assert_eq!(world.live.load(StdOrdering::SeqCst), 1, "a front has kept what was dropped");
        over.wait();
        others.into_iter().chain([rests]).for_each(|h| h.join().unwrap());
    });
}

#[test]
fn what_is_dropped_dies_with_one_entry() {
    what_is_dropped_dies(1, [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2], [2, 0, 1, 2, 0]]);
}

#[test]
fn what_is_dropped_dies_with_two_entries() {
    what_is_dropped_dies(2, [[0, 1, 0, 2, 0], [3, 0, 1, 3, 2], [1, 2, 1, 4, 0]]);
}

#[test]
fn what_is_dropped_dies_with_three_entries() {
    what_is_dropped_dies(3, [[0, 1, 2, 0, 1], [3, 0, 4, 3, 2], [5, 6, 5, 4, 0]]);
}

#[test]
fn what_is_pinned_stays() {
    check(|| {
        let world = World::new(2);
        world.look(9);
        let pin = world.cache.pin(&9).unwrap();
        threads(&world, 2, |world, n| {
            world.look(n as u32);
            world.look(9);
            world.cache.clear();
            world.look(n as u32 + 2);
        });
        assert_eq!(pin.value().key, 9);
        world.cache.get_or_build::<Failure>(&9, || panic!("it was pinned")).unwrap();
    });
}

#[test]
fn a_build_that_fails_leaves_others_to_try() {
    check(|| {
        let world = World::new(2);
        let failed = Arc::new(AtomicUsize::new(0));
        let work = {
            let failed = failed.clone();
            move |world: &World, n: usize| {
                let build = || if n == 0 { Err(Failure) } else { world.build(1) };
                if world.cache.get_or_build(&1, build).is_err() {
                    failed.fetch_add(1, StdOrdering::SeqCst);
                }
            }
        };
        threads(&world, 3, work);
        assert!(failed.load(StdOrdering::SeqCst) <= 1);
        assert_eq!(world.builds.load(StdOrdering::SeqCst), 1);
    });
}

#[test]
fn bounds_hold_while_they_change() {
    check(|| {
        let world = World::new(2);
        threads(&world, 3, |world, n| {
            if n == 0 {
                world.cache.resize(Limits::entries(NonZeroUsize::MIN));
            }
            world.look(n as u32);
            let stats = world.cache.stats();
            assert!(stats.entries <= 2 && stats.weight.bytes() == stats.entries as u64);
            world.look(n as u32 + 1);
        });
        assert!(world.cache.stats().entries <= 1);
    });
}
