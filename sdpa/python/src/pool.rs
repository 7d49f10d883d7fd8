//! Threads for the CPU executor: pools by their number of threads, each in the process that made it.

use crate::error::environment;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::OnceCell;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;

/// A pool, its number of threads, and the process that they are of: a fork has none of its parent's threads.
struct Pooled {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static POOLS: Mutex<Vec<Pooled>> = Mutex::new(Vec::new());

/// The pool of so many threads. Who asks holds the interpreter, and so does who forks: a lock that is held here is held in no fork.
fn pool(_py: Python<'_>, threads: usize) -> PyResult<Arc<ThreadPool>> {
    let (process, threads) = (std::process::id(), threads.clamp(1, 1024));
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(there) = pools.iter().find(|there| there.process == process && there.threads == threads) {
        return Ok(there.pool.clone());
    }
    let named = |n| format!("sdpa-{n}");
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(named).build();
    let pool = Arc::new(pool.map_err(|e| environment(format!("cpu: {threads} threads: {e}")))?);
    // Those of a parent stay: dropping them would wait for threads that are not there.
    pools.push(Pooled { process, threads, pool: pool.clone() });
    Ok(pool)
}

/// The thread that loaded this module.
static FIRST: OnceLock<ThreadId> = OnceLock::new();

/// Says that this is the thread that loads the module.
pub(crate) fn loaded() {
    FIRST.get_or_init(|| std::thread::current().id());
}

/// Whether this thread is a pool by itself, for what is done before another thread has woken. The first one becomes that, and stays it: a pool of that
/// kind is never given back, so that threads which come and go are not made one.
fn alone() -> bool {
    thread_local!(static ALONE: OnceCell<bool> = const { OnceCell::new() });
    let become_one = || {
        let first = FIRST.get() == Some(&std::thread::current().id());
        let made = first.then(|| ThreadPoolBuilder::new().num_threads(1).use_current_thread().build());
        made.and_then(Result::ok).map(std::mem::forget).is_some()
    };
    ALONE.with(|alone| *alone.get_or_init(become_one))
}

/// Runs on so many threads; a small call on one, whichever thread asks, so that its results are the same.
pub(crate) fn run<R: Send>(py: Python<'_>, threads: usize, small: bool, run: impl FnOnce() -> R + Send) -> PyResult<R> {
    if small && alone() {
        return Ok(py.detach(run));
    }
    let pool = pool(py, if small { 1 } else { threads })?;
    Ok(py.detach(|| pool.install(run)))
}
