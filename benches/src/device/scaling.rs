//! Threads that hit: each has a stream and tensors of its own. How many calls they make together, beside a bare loop over
//! `cudnnBackendExecute`; and what seven of them notice of an eighth that builds plans all the time.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, bare_pack, executor, problems};
use cudnn_graph::Stream;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, PlanOptions};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EACH: Duration = Duration::from_millis(1500);
/// Calls between two waits, so that the queue never fills.
const BATCH: usize = 50;

/// What a thread calls.
#[derive(Clone, Copy)]
enum How {
    Bare,
    Functional,
    /// The plans found, and nothing submitted.
    Found,
}

/// Everything that a thread has for itself.
struct Own {
    stream: Stream,
    tensors: Tensors,
}

fn owns(executor: &CudnnExecutor, spec: &AttentionSpec, count: usize) -> Result<Vec<Own>> {
    let workspace = executor.attention(&spec.validate()?)?.0.workspace_bytes();
    let own = |n: usize| {
        let stream = executor.device().stream()?;
        let tensors = Tensors::new(&stream, spec, workspace, n as u64)?;
        Ok(Own { stream, tensors })
    };
    (0..count).map(own).collect()
}

/// Microseconds of each call of each thread, over batches.
fn hits(executor: &CudnnExecutor, spec: &AttentionSpec, owns: &[Own], how: How) -> Result<Vec<f64>> {
    let start = Barrier::new(owns.len());
    let run = |own: &Own| -> Result<Vec<f64>> {
        let call = own.tensors.call(None).workspace(None);
        let problem = spec.validate()?;
        let job = Job::from(problem.clone());
        let planned = executor.attention(&problem)?.0;
        let handle = executor.library().handle(&own.stream)?;
        let mut pack = bare_pack(&planned, &own.tensors)?;
        let mut times = Vec::new();
        start.wait();
        let end = Instant::now() + EACH;
        while Instant::now() < end {
            let begin = Instant::now();
            for _ in 0..BATCH {
                match how {
                    // SAFETY: everything bound is a buffer of this device that outlives the synchronisation below.
                    How::Bare => unsafe { pack.execute(&handle, planned.plan.descriptor()) }?,
                    // SAFETY: as above.
                    How::Functional => unsafe { executor.sdpa(&own.stream, spec, &call) }?,
                    How::Found => found(executor, &job)?,
                }
            }
            times.push(begin.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
            own.stream.synchronize()?;
        }
        Ok(times)
    };
    let all: std::result::Result<Vec<Vec<f64>>, String> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = owns.iter().map(|own| scope.spawn(move || run(own).map_err(|e| e.to_string()))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| "a thread panicked".to_owned())?).collect()
    });
    Ok(all?.concat())
}

/// A hit that does nothing.
fn found(executor: &CudnnExecutor, job: &Job) -> Result<()> {
    let missed = || Err(sdpa::cudnn::Error::Bug("the plans are not there".to_owned()));
    Ok(executor.forward_cache().with(job, missed, |planned, _| {
        std::hint::black_box(planned.lowered.form);
    })?)
}

/// Plans of the two runs are not the same.
fn mask(how: How) -> Mask {
    match how {
        How::Bare | How::Functional => Mask::causal(),
        How::Found => Mask::causal_bottom_right(),
    }
}

/// The middle of all, and what one in a hundred is slower than.
fn spread(mut all: Vec<f64>) -> [f64; 2] {
    all.sort_by(f64::total_cmp);
    [50, 99].map(|part| all.get(all.len() * part / 100).copied().unwrap_or(f64::NAN))
}

pub(crate) fn run() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let (name, spec) = problems().swap_remove(2);
    println!("{name}: microseconds per call, middle and 99th of batches of {BATCH}; {} processors", std::thread::available_parallelism()?);
    for count in [1, 2, 4, 8] {
        let owns = owns(&executor, &spec, count)?;
        let [bare, bare_99] = spread(hits(&executor, &spec, &owns, How::Bare)?);
        let [ours, ours_99] = spread(hits(&executor, &spec, &owns, How::Functional)?);
        let [found, found_99] = spread(hits(&executor, &spec, &owns, How::Found)?);
        println!(
            "{count} threads: bare {bare:.3} {bare_99:.3}, functional {ours:.3} {ours_99:.3}, {:+.3}; found only {found:.3} {found_99:.3}",
            ours - bare
        );
    }
    let owns = owns(&executor, &spec, 7)?;
    for (label, how) in [("functional", How::Functional), ("found only", How::Found)] {
        let [alone, alone_99] = spread(hits(&executor, &spec, &owns, how)?);
        let (stop, built) = (AtomicBool::new(false), AtomicU64::new(0));
        let beside = std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in (16..).step_by(8) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
                    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(mask(how));
                    if spec.validate().is_ok_and(|problem| executor.attention(&problem).is_ok()) {
                        built.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            let beside = hits(&executor, &spec, &owns, how);
            stop.store(true, Ordering::Relaxed);
            beside
        });
        let ([beside, beside_99], built) = (spread(beside?), built.into_inner());
        println!("7 threads, {label}: alone {alone:.3} {alone_99:.3}, beside one that built {built} plans {beside:.3} {beside_99:.3}");
    }
    Ok(())
}
