//! Times the executors on one NVIDIA GPU against each other, if cuDNN's options request it.

use crate::dispatch::Dispatcher;
use crate::{BackwardProblem, Error, ExecutorName, Problem, Unsupported};
use sdpa_cache::{BuildError, BuildTime, CacheSnapshot, CacheValue, Limits, PlanCache, Query, Weight};
use sdpa_nvidia::race::{Contender, race};
use sdpa_nvidia::{DevicePass, Job, JobQuery, NvidiaExecutor};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Execution times of one pass on several executors. The time of an executor is the shortest of several runs, which alternate with those
/// of the others.
#[derive(Clone, Debug)]
pub struct Timed {
    /// The time of every executor that supports the pass, in the default order of trying. `None` for an executor whose results differed
    /// from those of the first.
    pub times: Vec<(ExecutorName, Option<Duration>)>,
    time: BuildTime,
}

impl Timed {
    /// Returns the fastest executor; of equally fast ones, the first in the default order; `None` if no executor was timed.
    pub fn fastest(&self) -> Option<ExecutorName> {
        let times = self.times.iter().filter_map(|(name, time)| Some((*name, (*time)?)));
        times.min_by_key(|(_, time)| *time).map(|(name, _)| name)
    }

    /// Returns whether the native CUDA kernels were the fastest executor; `None` if no executor was timed.
    pub(crate) fn are_kernels_faster(&self) -> Option<bool> {
        self.fastest().map(|name| name == ExecutorName::CUDA)
    }
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (name, time)) in self.times.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            match time {
                Some(time) => write!(f, "{comma}{name} {:.4} ms", time.as_secs_f64() * 1e3)?,
                None => write!(f, "{comma}{name} not timed, because its results differ")?,
            }
        }
        Ok(())
    }
}

impl CacheValue for Timed {
    fn weight(&self) -> Weight {
        Weight { host: 0, device: 0, workspace: 0 }
    }

    fn build_time(&self) -> BuildTime {
        self.time
    }
}

/// Cache of the measured execution times of passes.
#[derive(Debug)]
pub(crate) struct Tuned(PlanCache<Job, Arc<Timed>, Unsupported>);

impl Default for Tuned {
    fn default() -> Tuned {
        Tuned(PlanCache::new("timed", Limits::default()))
    }
}

/// Why a pass was not timed.
enum Untimed {
    /// One of the executors does not support it.
    Alone(Unsupported),
    /// Timing failed, typically out of memory for the operands.
    Failed(String),
}

impl fmt::Display for Untimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Untimed::Alone(why) => why.fmt(f),
            Untimed::Failed(why) => f.write_str(why),
        }
    }
}

impl From<Error> for Untimed {
    fn from(error: Error) -> Untimed {
        let said = error.to_string();
        if let Error::Unsupported(why) = error { Untimed::Alone(why) } else { Untimed::Failed(said) }
    }
}

impl BuildError for Untimed {
    type Refusal = Unsupported;

    fn refusal(&self) -> Option<Unsupported> {
        match self {
            Untimed::Alone(why) => Some(why.clone()),
            Untimed::Failed(_) => None,
        }
    }

    fn again(refusal: Unsupported) -> Untimed {
        Untimed::Alone(refusal)
    }
}

impl Dispatcher {
    /// Returns the times of a forward pass on cuDNN and on native CUDA kernels, if cuDNN's options set
    /// [`tune`](sdpa_cudnn::CudnnOptions::tune) and both support the problem. The first call for a problem prepares both passes and runs
    /// each of them eight times on temporary memory; later calls return the same times. The dispatcher then tries the faster executor
    /// first and ignores the [exceptions](sdpa_cuda::EXCEPTIONS). Also returns `None`, with a warning, if there is not enough memory.
    /// Problems without batch entries, queries or keys are not timed.
    pub fn timed(&self, problem: &Problem) -> Option<Arc<Timed>> {
        if problem.is_empty() {
            return None;
        }
        let ready = |executor: &dyn NvidiaExecutor| executor.prepare_device(problem);
        self.timed_as(&JobQuery::Forward(problem), ready)
    }

    /// Returns the times of a backward pass: see [`Dispatcher::timed`].
    pub fn timed_backward(&self, problem: &BackwardProblem) -> Option<Arc<Timed>> {
        if problem.forward().is_empty() {
            return None;
        }
        let ready = |executor: &dyn NvidiaExecutor| executor.prepare_device_backward(problem);
        self.timed_as(&JobQuery::Backward(problem), ready)
    }

    /// Returns a snapshot of the cache that holds the measured execution times: see [`Dispatcher::timed`].
    pub fn timed_snapshot(&self) -> CacheSnapshot {
        self.tuned.0.snapshot()
    }

    fn timed_as(&self, query: &JobQuery<'_>, ready: impl Fn(&dyn NvidiaExecutor) -> Result<Arc<DevicePass>, Error>) -> Option<Arc<Timed>> {
        // The selection of executors calls this at every call, so return early if timing is off.
        if !self.options.tune {
            return None;
        }
        let cudnn = self.cudnn().ok().filter(|cudnn| cudnn.tunes())?;
        let cuda = self.cuda().ok()?;
        let build = || {
            let start = Instant::now();
            let passes = [(ExecutorName::CUDNN, ready(&**cudnn)?), (ExecutorName::CUDA, ready(&**cuda)?)];
            let contenders = passes.each_ref().map(|(name, ready)| Contender { name: name.name(), ready: &**ready });
            let job = query.to_key();
            // Relax the capture mode of this thread, so that timing does not disturb a capture of this or another thread.
            let timed = cudnn.device().relaxed(|| race(&cudnn.device().stream()?, &job, &contenders));
            let times = timed.map_err(|error| Untimed::Failed(error.to_string()))?;
            let names = passes.iter().map(|(name, _)| *name);
            let elapsed = start.elapsed();
            let time = BuildTime { total: elapsed, tune: elapsed, ..BuildTime::default() };
            Ok(Arc::new(Timed { times: names.zip(times).collect(), time }))
        };
        match self.tuned.0.get_or_build(query, build) {
            Ok((timed, _)) => Some(timed),
            Err(Untimed::Alone(_)) => None,
            Err(Untimed::Failed(error)) => {
                tracing::warn!(error, pass = sdpa_cache::CacheKey::label(&query.to_key()), "not timed");
                None
            }
        }
    }
}
