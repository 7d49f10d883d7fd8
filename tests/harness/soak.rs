//! Many calls over many shapes through a small cache, with builds that fail and calls that panic at random: bounds hold, nothing is kept,
//! and every value is the one of its key.
//!
//! Every so many calls all threads rest, each with values at hand: then what lives is exactly what the cache has.

use crate::random::Random;
use sdpa::cache::{BuildError, CacheValue, Limits, PlanCache, Weight};
use sdpa::cudnn::lower::Job;
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

/// How much.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// Calls of all threads together.
    pub calls: u64,
    /// Different problems.
    pub shapes: usize,
    /// The bound on entries.
    pub entries: usize,
    /// The bound on bytes.
    pub bytes: u64,
    /// Threads.
    pub threads: usize,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct ScheduleReport {
    /// Seconds that it took.
    pub seconds: f64,
    /// Lookups that found something.
    pub hits: u64,
    /// Builds.
    pub builds: u64,
    /// Builds that failed, were unsupported, or panicked.
    pub failures: u64,
    /// The most values that lived at one time.
    pub most_alive: usize,
    /// Calls that panicked.
    pub panics: u64,
    /// How often all threads rested.
    pub rests: u64,
    /// Resident memory after an eighth of the calls, and at the end, in bytes; 0 where the system does not tell.
    pub resident: [u64; 2],
    /// What was wrong.
    pub wrong: Vec<String>,
}

/// A value that is counted while it lives.
#[derive(Debug)]
struct Counted {
    shape: usize,
    bytes: u64,
    /// So that a leak shows in the process too.
    _ballast: Vec<u8>,
    alive: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CacheValue for Counted {
    fn weight(&self) -> Weight {
        Weight { host: self.bytes, ..Weight::default() }
    }
}

/// As builds fail.
#[derive(Debug)]
enum Failure {
    Unsupported,
    Memory,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Unsupported => "unsupported",
            Failure::Memory => "out of memory",
        })
    }
}

impl BuildError for Failure {
    type Refusal = String;

    fn refusal(&self) -> Option<String> {
        match self {
            Failure::Unsupported => Some("unsupported".to_owned()),
            Failure::Memory => None,
        }
    }

    fn again(_: String) -> Failure {
        Failure::Unsupported
    }
}

fn job(n: usize) -> Result<Job, String> {
    let seq = 8 + n as i64;
    let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: seq, seq_kv: seq, dim_qk: 64, dim_v: 64 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
    spec.validate().map(Job::from).map_err(|e| e.to_string())
}

/// Resident memory of the process in bytes; 0 where the system does not tell.
pub fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

/// How often all threads rest.
const RESTS: u64 = 256;

/// What memory the process may come to hold after the first eighth of the calls, besides as much again as the cache may: what the
/// allocator keeps of what threads have freed.
const SLACK: u64 = 16 << 20;

/// What every thread works with.
struct World {
    size: Soak,
    jobs: Vec<Job>,
    cache: PlanCache<Job, Arc<Counted>, String>,
    alive: Arc<AtomicUsize>,
    most: AtomicUsize,
    calls: AtomicU64,
    told: Mutex<ScheduleReport>,
    rest: Barrier,
}

impl World {
    fn wrong(&self, what: String) {
        let mut told = self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // One is enough to fail, and a few to see what it is.
        if told.wrong.len() < 8 {
            told.wrong.push(what);
        }
    }

    fn note(&self, what: impl FnOnce(&mut ScheduleReport)) {
        what(&mut self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    /// A call of a random shape, which may fail and may panic.
    fn call(&self, random: &mut Random) {
        // Half of the calls are about a few shapes, as in a real run.
        let last = self.size.shapes as i64 - 1;
        let shape = if random.between(0, 1) == 0 { random.between(0, 15.min(last)) } else { random.between(0, last) } as usize;
        let (fate, bytes, panics) = (random.between(0, 99), random.between(1 << 10, 64 << 10) as u64, random.between(0, 99) == 0);
        let build = || match fate {
            0..=2 => Err(Failure::Unsupported),
            3..=5 => Err(Failure::Memory),
            _ => {
                let now = self.alive.fetch_add(1, Ordering::Relaxed) + 1;
                self.most.fetch_max(now, Ordering::Relaxed);
                Ok(Arc::new(Counted { shape, bytes, _ballast: vec![1; bytes as usize], alive: self.alive.clone() }))
            }
        };
        // Without the hook of panics: nothing is printed.
        let call = |value: &Arc<Counted>, _| if panics { resume_unwind(Box::new(())) } else { value.shape };
        match catch_unwind(AssertUnwindSafe(|| self.cache.with(&self.jobs[shape], build, call))) {
            Ok(Ok(got)) if got == shape => {}
            Ok(Ok(got)) => self.wrong(format!("the value of shape {got} for {shape}")),
            Ok(Err(_)) => self.note(|told| told.failures += 1),
            Err(_) if panics => self.note(|told| told.panics += 1),
            Err(_) => self.wrong("a call panicked by itself".to_owned()),
        }
    }

    fn look(&self) {
        let stats = self.cache.stats();
        if stats.entries > self.size.entries || stats.weight.bytes() > self.size.bytes {
            self.wrong(format!("a bound is broken: {stats:?}"));
        }
    }

    /// No thread is in a call. What lives is counted before the cache is asked, which lets go of what it should not have.
    fn rest(&self) {
        let alive = self.alive.load(Ordering::Relaxed);
        let entries = self.cache.stats().entries;
        if alive != entries {
            self.wrong(format!("{alive} values live while every thread rests, and {entries} are entries"));
        }
        self.note(|told| told.rests += 1);
    }

    fn work(&self, seed: u64) {
        let mut random = Random::new(seed);
        for round in 1..=RESTS {
            // Half of the threads rest earlier, with values at hand that the others drop, and count, at the same time.
            let early = if seed % 2 == round % 2 { self.size.calls / RESTS / 2 } else { 0 };
            while self.calls.load(Ordering::Relaxed) + early < self.size.calls * round / RESTS {
                let call = self.calls.fetch_add(1, Ordering::Relaxed);
                self.call(&mut random);
                self.look();
                if call == self.size.calls / 8 {
                    self.note(|told| told.resident[0] = resident());
                }
            }
            if self.rest.wait().is_leader() {
                self.rest();
            }
            self.rest.wait();
        }
    }
}

/// Runs it.
///
/// # Errors
/// A problem that cannot be made.
pub fn soak(size: Soak) -> Result<ScheduleReport, String> {
    let limits = Limits::entries(NonZeroUsize::new(size.entries).unwrap_or(NonZeroUsize::MIN))
        .with_bytes(size.bytes)
        .with_refusals(std::time::Duration::from_millis(5));
    let world = World {
        size,
        jobs: (0..size.shapes).map(job).collect::<Result<_, _>>()?,
        cache: PlanCache::new("soak", limits),
        alive: Arc::default(),
        most: AtomicUsize::default(),
        calls: AtomicU64::default(),
        told: Mutex::default(),
        rest: Barrier::new(size.threads),
    };
    let start = Instant::now();
    std::thread::scope(|s| {
        (0..size.threads).for_each(|n| {
            drop(s.spawn({
                let world = &world;
                move || world.work(n as u64 + 1)
            }))
        })
    });
    let stats = world.cache.stats();
    let World { cache, alive, most, told, .. } = world;
    let mut told = told.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    told.seconds = start.elapsed().as_secs_f64();
    told.hits = stats.hits;
    told.builds = stats.misses;
    told.most_alive = most.load(Ordering::Relaxed);
    told.resident[1] = resident();
    let [early, end] = told.resident;
    if end > early + size.bytes + SLACK {
        told.wrong.push(format!("the process held {early} bytes after an eighth of the calls, and {end} after all of them"));
    }
    cache.clear();
    drop(cache);
    if alive.load(Ordering::Relaxed) != 0 {
        told.wrong.push(format!("{} values outlived the cache", alive.load(Ordering::Relaxed)));
    }
    Ok(told)
}
