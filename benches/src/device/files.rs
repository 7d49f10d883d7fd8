//! Plan files on the device: every case of the library runs on an executor that builds, its plans go to a file, and every case runs again
//! on an executor that has that file alone. `device files [PLANS]`: and then on one that has a file made elsewhere. `device loads`: what loading costs,
//! and nothing else.

use crate::setup::Result;
use conformance::{Case, runner};
use cudnn_graph::{Library, Search};
use sdpa::cache::{Limits, What};
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, Planned};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

/// How plans came about.
#[derive(Debug, Default)]
struct Made {
    compiled: usize,
    loaded: usize,
    compile_ms: f64,
    load_ms: f64,
}

fn made(executor: &CudnnExecutor) -> Made {
    let mut made = Made::default();
    for event in executor.cache_trace().caches.iter().flat_map(|cache| &cache.events) {
        let What::Built { time, .. } = &event.what else { continue };
        if !time.load.is_zero() {
            made.loaded += 1;
            made.load_ms += time.load.as_secs_f64() * 1e3;
        } else {
            made.compiled += 1;
            made.compile_ms += time.total.as_secs_f64() * 1e3;
        }
    }
    made
}

fn executor() -> Result<CudnnExecutor> {
    let limits = Limits::entries(NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN));
    Ok(CudnnExecutor::new(CudnnOptions::default().with_forward(limits).with_backward(limits).with_recheck(true))?)
}

fn run_all(label: &str, executor: &CudnnExecutor) -> Result<usize> {
    let start = Instant::now();
    let [forward, backward] = runner::library_suite(label, executor)?;
    println!("{}", forward.summary(&format!("{label}, forward")));
    println!("{}", backward.summary(&format!("{label}, backward")));
    let made = made(executor);
    println!(
        "{label}: {} plans compiled in {:.1} ms each, {} loaded in {:.2} ms each, {:.1} s in all",
        made.compiled,
        made.compile_ms / made.compiled.max(1) as f64,
        made.loaded,
        made.load_ms / made.loaded.max(1) as f64,
        start.elapsed().as_secs_f64()
    );
    Ok(forward.failed + backward.failed)
}

/// Prints the version of cuDNN, as in the name of a file of plans.
pub(crate) fn version() -> Result<()> {
    println!("{}", Library::load(&Search::default())?.version());
    Ok(())
}

pub(crate) fn run(elsewhere: Option<&str>) -> Result<()> {
    let path = std::env::temp_dir().join(format!("sdpa-plans-{}", std::process::id()));
    let first = executor()?;
    let mut failed = run_all("built", &first)?;
    let start = Instant::now();
    let saved = first.save(&path)?;
    println!("{saved} plans saved in {:.1} ms, {} bytes", start.elapsed().as_secs_f64() * 1e3, std::fs::metadata(&path)?.len());
    drop(first);
    for (label, path) in [("from the file", Some(path.as_path())), ("from elsewhere", elsewhere.map(std::path::Path::new))] {
        let Some(path) = path else { continue };
        let executor = executor()?;
        println!("{label}: {} plans attached", executor.attach(path)?);
        failed += run_all(label, &executor)?;
        if label == "from the file" && made(&executor).compiled > 0 {
            return Err(format!("{} plans were compiled that were in the file", made(&executor).compiled).into());
        }
    }
    std::fs::remove_file(&path)?;
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Plans of cuDNN that one of ours is made of.
fn parts(planned: &Planned) -> usize {
    planned.schedule.runs().count()
}

pub(crate) fn loads() -> Result<()> {
    let path = std::env::temp_dir().join(format!("sdpa-loads-{}", std::process::id()));
    let mut jobs = Vec::new();
    for case in Case::all_library()? {
        jobs.extend(case.spec()?.validate().ok().map(Job::from));
        jobs.extend(case.backward_spec()?.validate().ok().map(Job::from));
    }
    let first = executor()?;
    let (next, start) = (std::sync::atomic::AtomicUsize::new(0), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    first.prefetch(std::slice::from_ref(job));
                }
            });
        }
    });
    println!("built on 8 threads in {:.1} s; {} saved", start.elapsed().as_secs_f64(), first.save(&path)?);
    let kept = first.forward_cache().values().into_iter().chain(first.backward_cache().values());
    let kept: Vec<(Job, Arc<Planned>)> = kept.collect();
    for turn in 1..=3 {
        let executor = executor()?;
        executor.attach(&path)?;
        let (mut single, mut all, mut count) = (Vec::new(), 0.0, 0);
        for (job, planned) in &kept {
            let start = Instant::now();
            executor.prefetch(std::slice::from_ref(job)).into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            all += ms;
            count += parts(planned);
            if parts(planned) == 1 {
                single.push(ms);
            }
        }
        if made(&executor).compiled > 0 {
            return Err(format!("{} plans were compiled that are in the file", made(&executor).compiled).into());
        }
        let loading = made(&executor).load_ms / kept.len() as f64;
        single.sort_by(f64::total_cmp);
        println!(
            "turn {turn}: {} plans, {count} of cuDNN's, {:.2} ms each of ours, of which {loading:.2} in cuDNN and checks, {:.2} ms each of cuDNN's; the {} that are one: {:.2} to {:.2} ms, middle {:.2}",
            kept.len(),
            all / kept.len() as f64,
            all / count as f64,
            single.len(),
            single.first().unwrap_or(&f64::NAN),
            single.last().unwrap_or(&f64::NAN),
            single.get(single.len() / 2).unwrap_or(&f64::NAN)
        );
    }
    std::fs::remove_file(&path)?;
    Ok(())
}
