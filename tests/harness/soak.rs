//! Many calls over many shapes through a small cache, with builds that fail at random: bounds hold, nothing is kept, and every value is
//! the one of its key.

use crate::random::Random;
use sdpa::cache::{BuildError, CacheValue, Limits, PlanCache, Weight};
use sdpa::lower::Job;
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
pub struct Told {
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

/// Runs it.
///
/// # Errors
/// A problem that cannot be made.
pub fn soak(size: Soak) -> Result<Told, String> {
    let jobs: Vec<Job> = (0..size.shapes).map(job).collect::<Result<_, _>>()?;
    let limits = Limits {
        bytes: size.bytes,
        refusals: std::time::Duration::from_millis(5),
        ..Limits::entries(NonZeroUsize::new(size.entries).unwrap_or(NonZeroUsize::MIN))
    };
    let cache: PlanCache<Job, Arc<Counted>, String> = PlanCache::new("soak", limits);
    let (alive, most, calls) = (Arc::new(AtomicUsize::new(0)), AtomicUsize::new(0), AtomicU64::new(0));
    let (early, start) = (AtomicU64::new(0), Instant::now());
    let work = |seed: u64| {
        let (mut random, mut wrong, mut failures) = (Random::new(seed), Vec::new(), 0u64);
        loop {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            if call >= size.calls || wrong.len() > 8 {
                return (wrong, failures);
            }
            // Half of the calls are about a few shapes, as in a real run.
            let shape = if random.between(0, 1) == 0 { random.between(0, 15) } else { random.between(0, size.shapes as i64 - 1) } as usize;
            let (fate, bytes) = (random.between(0, 99), random.between(1 << 10, 64 << 10) as u64);
            let build = || match fate {
                0..=2 => Err(Failure::Unsupported),
                3..=5 => Err(Failure::Memory),
                _ => {
                    let now = alive.fetch_add(1, Ordering::Relaxed) + 1;
                    most.fetch_max(now, Ordering::Relaxed);
                    Ok(Arc::new(Counted { shape, bytes, _ballast: vec![1; bytes as usize], alive: alive.clone() }))
                }
            };
            match cache.with(&jobs[shape], build, |value, _| value.shape) {
                Ok(got) if got == shape => {}
                Ok(got) => wrong.push(format!("the value of shape {got} for {shape}")),
                Err(_) => failures += 1,
            }
            if call % 1024 == 0 {
                let stats = cache.stats();
                if stats.entries > size.entries || stats.weight.bytes() > size.bytes {
                    wrong.push(format!("a bound is broken: {stats:?}"));
                }
            }
            if call == size.calls / 8 {
                early.store(resident(), Ordering::Relaxed);
            }
        }
    };
    let results: Vec<(Vec<String>, u64)> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..size.threads).map(|n| s.spawn(move || work(n as u64 + 1))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| (vec!["a thread panicked".to_owned()], 0))).collect()
    });
    let stats = cache.stats();
    let mut told = Told {
        seconds: start.elapsed().as_secs_f64(),
        hits: stats.hits,
        builds: stats.misses,
        most_alive: most.load(Ordering::Relaxed),
        resident: [early.load(Ordering::Relaxed), resident()],
        ..Told::default()
    };
    for (wrong, failures) in results {
        told.wrong.extend(wrong);
        told.failures += failures;
    }
    // Besides, each thread builds one, and drops the few that had to go for the last one, outside of the lock.
    if told.most_alive > size.entries + 6 * size.threads {
        told.wrong.push(format!("{} values lived, of at most {}", told.most_alive, size.entries));
    }
    if alive.load(Ordering::Relaxed) != stats.entries {
        told.wrong.push(format!("{} values live, {} are entries", alive.load(Ordering::Relaxed), stats.entries));
    }
    cache.clear();
    drop(cache);
    if alive.load(Ordering::Relaxed) != 0 {
        told.wrong.push(format!("{} values outlived the cache", alive.load(Ordering::Relaxed)));
    }
    Ok(told)
}
