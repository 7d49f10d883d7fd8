//! Plan files on the device: every case of the library runs on an executor that builds, its plans go to a file, and every case runs again
//! on an executor that has that file alone. `device files [PLANS]`: and then on one that has a file made elsewhere.

use crate::setup::Result;
use conformance::runner;
use cudnn_graph::{Library, Search};
use sdpa::cache::{Limits, What};
use sdpa::exec::cudnn::{CudnnExecutor, CudnnOptions};
use std::num::NonZeroUsize;
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
        if time.load > 0 {
            made.loaded += 1;
            made.load_ms += time.load as f64 / 1e3;
        } else {
            made.compiled += 1;
            made.compile_ms += time.total as f64 / 1e3;
        }
    }
    made
}

fn executor() -> Result<CudnnExecutor> {
    let limits = Limits::entries(NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN));
    Ok(CudnnExecutor::new(CudnnOptions { forward: limits, backward: limits, recheck: true, ..CudnnOptions::default() })?)
}

fn run_all(label: &str, executor: &CudnnExecutor) -> Result<usize> {
    let start = Instant::now();
    let [forward, backward] = runner::library_suite(label, executor)?;
    println!("{}", forward.summary(&format!("{label}, forward")));
    println!("{}", backward.summary(&format!("{label}, backward")));
    let made = made(executor);
    let kept = executor.forward_cache().values().into_iter().chain(executor.backward_cache().values());
    let helpers = kept.map(|(_, p)| p.copies.len() + p.conversions.len() + p.sums.iter().map(|s| s.steps.len() + 1).sum::<usize>());
    println!(
        "{label}: {} plans compiled in {:.1} ms each, {} loaded in {:.2} ms each, with {} helper plans of cuDNN's among them, {:.1} s in all",
        made.compiled,
        made.compile_ms / made.compiled.max(1) as f64,
        made.loaded,
        made.load_ms / made.loaded.max(1) as f64,
        helpers.sum::<usize>(),
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
