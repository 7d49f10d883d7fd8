//! Threads for the CPU executor: pools by their number of threads, each in the process that made it.

use crate::error::environment;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Arc, Mutex, PoisonError};

/// A pool, its number of threads, and the process that they are of: a fork has none of its parent's threads.
struct Pooled {
    process: u32,
    threads: usize,
    pool: Arc<ThreadPool>,
}

static POOLS: Mutex<Vec<Pooled>> = Mutex::new(Vec::new());

/// The pool of so many threads. Who asks holds the interpreter, and so does who forks: a lock that is held here is held in no fork.
pub(crate) fn pool(_py: Python<'_>, threads: usize) -> PyResult<Arc<ThreadPool>> {
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
