//! Thread pools of the CPU executor, by number of threads and process.

use crate::error::environment;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::OnceCell;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;

/// A pool, its number of threads, and its process: a forked process has none of its parent's threads.
struct Pooled {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static POOLS: Mutex<Vec<Pooled>> = Mutex::new(Vec::new());

/// Returns the pool of `threads` threads. The caller holds the GIL, as a fork does, so no child process inherits this lock while it is held.
fn pool(_py: Python<'_>, threads: usize) -> PyResult<Arc<ThreadPool>> {
    let (process, threads) = (std::process::id(), threads.clamp(1, 1024));
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(there) = pools.iter().find(|there| there.process == process && there.threads == threads) {
        return Ok(there.pool.clone());
    }
    let named = |n| format!("sdpa-{n}");
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(named).build();
    let pool = Arc::new(pool.map_err(|e| environment(format!("cpu: cannot start {threads} threads: {e}")))?);
    // Pools of a parent process are never dropped: that would wait for threads that do not exist here.
    pools.push(Pooled { process, threads, pool: pool.clone() });
    Ok(pool)
}

/// The thread that loaded this module.
static FIRST: OnceLock<ThreadId> = OnceLock::new();

/// Records that the current thread loads this module.
pub(crate) fn loaded() {
    FIRST.get_or_init(|| std::thread::current().id());
}

/// Returns true if this thread is a rayon pool of its own, for work that ends before another thread would have started. Only the first thread becomes one. Such
/// a pool is never freed, so other threads, which may be short-lived, do not become one.
fn alone() -> bool {
    thread_local!(static ALONE: OnceCell<bool> = const { OnceCell::new() });
    let become_one = || {
        let first = FIRST.get() == Some(&std::thread::current().id());
        let made = first.then(|| ThreadPoolBuilder::new().num_threads(1).use_current_thread().build());
        made.and_then(Result::ok).map(std::mem::forget).is_some()
    };
    ALONE.with(|alone| *alone.get_or_init(become_one))
}

/// Runs a function on `threads` threads. A small call runs on one thread for every caller, so that its results are identical.
pub(crate) fn run<R: Send>(py: Python<'_>, threads: usize, small: bool, run: impl FnOnce() -> R + Send) -> PyResult<R> {
    if small && alone() {
        return Ok(py.detach(run));
    }
    let pool = pool(py, if small { 1 } else { threads })?;
    Ok(py.detach(|| pool.install(run)))
}
