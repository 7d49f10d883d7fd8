//! Ranks over host memory, on the CPU executor.

use crate::harness::{DEADLINE, Random};
use sdpa_cpu::CpuExecutor;
use sdpa_parallel::{ContextParallel, Exchange, ExchangeError, InProcess, Incoming, Outgoing, ParallelError, ParallelProblem};
use std::sync::Arc;
use std::time::Duration;

/// The end of a rank that joins a group.
pub(crate) type Link = InProcess;

/// A rank that waits at random before each exchange.
#[derive(Debug)]
pub(crate) struct Delayed {
    pub(crate) inner: InProcess,
    /// The seed of the delays; `None` for none.
    pub(crate) seed: Option<u64>,
}

impl Exchange for Delayed {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn exchange(&mut self, sends: &[Outgoing<'_>], receives: &mut [Incoming<'_>]) -> Result<(), ExchangeError> {
        if let Some(seed) = &mut self.seed {
            *seed = Random(*seed).next();
            std::thread::sleep(Duration::from_micros(*seed % 3000));
        }
        self.inner.exchange(sends, receives)
    }

    fn abort(&mut self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// Connects the ranks of a group.
pub(crate) fn group(ranks: usize) -> Vec<InProcess> {
    InProcess::group(ranks, DEADLINE)
}

/// Makes a rank. With `delays`, it waits at random before each exchange.
pub(crate) fn join(
    problem: &Arc<ParallelProblem>,
    link: InProcess,
    delays: Option<u64>,
) -> Result<ContextParallel<Delayed>, ParallelError> {
    ContextParallel::new(&CpuExecutor::default(), problem.clone(), Delayed { inner: link, seed: delays })
}

/// The number of shares of which a run takes one: all cases take seconds.
pub(crate) const SHARES: usize = 1;

/// Returns whether this run takes a case.
pub(crate) fn runs(_case: usize) -> bool {
    true
}
