//! What a lookup costs: `lookup [SECONDS]`, nanoseconds per call of `PlanCache::with` over passes of different lengths, hits only.
//!
//! *at hand*: a thread's last few passes in turn; *elsewhere*: every entry in turn, so that the thread has none of them at hand.

use sdpa::cache::{CacheValue, Limits, PlanCache, Weight};
use sdpa::cudnn::Error;
use sdpa::cudnn::lower::Job;
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A plan in name.
#[derive(Clone, Debug)]
struct Value(u64);

impl CacheValue for Value {
    fn weight(&self) -> Weight {
        Weight::default()
    }
}

type Cache = PlanCache<Job, Value, sdpa::Unsupported>;

fn job(seq: usize, score_mod: bool) -> Job {
    let seq = 64 + seq as i64;
    let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
    if score_mod {
        spec = spec.score_mod(sdpa::library::softcap(30.0)).score_mod(sdpa::library::alibi());
    }
    spec.validate().map(Job::from).unwrap_or_else(|e| panic!("{e}"))
}

fn full(jobs: &[Job]) -> Cache {
    let cache = Cache::new("lookup", Limits::entries(NonZeroUsize::new(jobs.len()).unwrap_or(NonZeroUsize::MIN)));
    for (n, job) in jobs.iter().enumerate() {
        look(&cache, job, || Ok(Value(n as u64)));
    }
    cache
}

fn look(cache: &Cache, job: &Job, build: impl FnOnce() -> Result<Value, Error>) -> u64 {
    cache.with(job, build, |value, _| value.0).unwrap_or_else(|e| panic!("{e}"))
}

/// The least nanoseconds per call over batches, and how many calls there were.
fn time(cache: &Cache, jobs: &[Job], budget: Duration) -> (f64, u64) {
    let (start, mut best, mut calls) = (Instant::now(), f64::INFINITY, 0);
    while start.elapsed() < budget {
        let rounds = 20_000 / jobs.len() + 1;
        let batch = Instant::now();
        for _ in 0..rounds {
            for job in jobs {
                std::hint::black_box(look(cache, std::hint::black_box(job), || panic!("a miss")));
            }
        }
        let count = (rounds * jobs.len()) as u64;
        best = best.min(batch.elapsed().as_nanos() as f64 / count as f64);
        calls += count;
    }
    (best, calls)
}

fn main() {
    let seconds: f64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1.0);
    let budget = Duration::from_secs_f64(seconds);
    println!("nanoseconds per hit, least over batches of about 20 000");
    for score_mod in [false, true] {
        for entries in [64, 4096] {
            let jobs: Vec<Job> = (0..entries).map(|n| job(n, score_mod)).collect();
            let cache = full(&jobs);
            let what = if score_mod { "causal, softcap, alibi" } else { "causal" };
            for (at, some) in [("one pass, at hand", &jobs[..1]), ("four passes, at hand", &jobs[..4]), ("elsewhere", &jobs[..])] {
                let (ns, _) = time(&cache, some, budget);
                println!("{ns:8.1}  {entries:4} entries, {what}, {at}");
            }
        }
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let jobs: Vec<Job> = (0..64).map(|n| job(n, false)).collect();
    let cache = full(&jobs);
    for (what, shared) in [("the same pass", true), ("a pass each", false)] {
        let barrier = Barrier::new(threads);
        let all: Vec<f64> = std::thread::scope(|s| {
            let run = |n: usize| {
                let (cache, barrier, jobs) = (&cache, &barrier, &jobs);
                s.spawn(move || {
                    let own = if shared { 0 } else { n };
                    barrier.wait();
                    let start = Instant::now();
                    let (_, calls) = time(cache, &jobs[own..=own], budget);
                    start.elapsed().as_nanos() as f64 / calls as f64
                })
            };
            let handles: Vec<_> = (0..threads).map(run).collect();
            handles.into_iter().map(|h| h.join().unwrap_or(f64::NAN)).collect()
        });
        let mean = all.iter().sum::<f64>() / threads as f64;
        println!("{mean:8.1}  {threads} threads, {what}, mean");
    }
}
