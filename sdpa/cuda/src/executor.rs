//! The executor: one device, its compiler, its caches of kernels and of plans.

use crate::backward::Backward;
use crate::error::Error;
use crate::kernel::{Kernel, KernelKey, Kernels};
use crate::plan::{CudaPlan, Pass};
use crate::problem::{Forward, Lists, unsupported};
use crate::source;
use crate::tile::Tile;
use sdpa_cache::{CacheSnapshot, Explanation, Limits, PlanCache};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::device::{DeviceExecutor, OnDevice};
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward};
use sdpa_core::problem::Problem;
use sdpa_driver::{Device, DeviceSlice, Driver, Nvrtc, Stream};
use sdpa_nvidia::{Hosted, Job, JobQuery, Told};
use std::ffi::CStr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

/// The compute capability that kernels are written for.
const SM: u32 = 90;

/// How an executor is set up.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// `libcuda.so.1`. Else the variable `CUDNN_GRAPH_DRIVER`, else the system's loader.
    pub driver: Option<PathBuf>,
    /// `libnvrtc.so.13`, or a folder that has it. Else the variable `SDPA_NVRTC`, else the wheels of the active Python environment, else the system's loader.
    pub nvrtc: Option<PathBuf>,
    /// The device's number, as the driver counts.
    pub ordinal: u32,
    /// The tile for every problem whose head dims it holds, in place of [`Tile::of`]: for timing.
    pub tile: Option<Tile>,
    /// Bounds of the plans that are kept.
    pub plans: Limits,
    /// Bounds of the kernels that are kept: problems that differ in lengths alone share them.
    pub kernels: Limits,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        let kernels = Limits::entries(NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN));
        CudaOptions { driver: None, nvrtc: None, ordinal: 0, tile: None, plans: Limits::default(), kernels }
    }
}

/// Attention on one NVIDIA GPU by this crate's kernels, on compute capability 9.0.
#[derive(Debug)]
pub struct CudaExecutor {
    device: &'static Device,
    nvrtc: Nvrtc,
    tile: Option<Tile>,
    plans: PlanCache<Job, Arc<CudaPlan>, Unsupported>,
    kernels: Kernels,
    setup_stream: Stream,
}

impl CudaExecutor {
    /// Finds the driver, the device and the run-time compiler.
    ///
    /// # Errors
    /// What is missing, with the places searched.
    pub fn new(options: CudaOptions) -> Result<CudaExecutor, sdpa_driver::Error> {
        let device = Driver::load(options.driver.as_deref())?.device(options.ordinal)?;
        let nvrtc = Nvrtc::load(options.nvrtc.as_deref())?;
        Ok(CudaExecutor {
            device,
            nvrtc,
            tile: options.tile,
            plans: PlanCache::new("cuda", options.plans),
            kernels: PlanCache::new("cuda kernels", options.kernels),
            setup_stream: device.stream()?,
        })
    }

    /// The device that everything runs on.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// The run-time compiler.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// Whether the plan of a pass is there, and if not, what is nearest to it and what differs. Changes nothing.
    pub fn explain(&self, job: &Job) -> Explanation {
        self.plans.explain(job)
    }

    /// What the two caches know of themselves: that of plans, that of kernels.
    pub fn snapshots(&self) -> [CacheSnapshot; 2] {
        [self.plans.snapshot(), self.kernels.snapshot()]
    }

    /// The plan of a forward pass, from the cache or made now; the flag says whether it was there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every reason; the environment's.
    pub fn attention(&self, problem: &Problem) -> Result<(Arc<CudaPlan>, bool), Error> {
        self.plans.get_or_build(&JobQuery::Forward(problem), || {
            let forward = self.taken(Forward::of(problem))?;
            let tile = self
                .tile
                .filter(|tile| tile.holds(problem.dim_qk(), problem.dim_v()))
                .map_or_else(|| forward.tile(self.device.sm_count()), Ok)?;
            let source = source::forward(&forward, &tile).into();
            let mut entries = vec![(source::FORWARD_ENTRY, tile.shared_bytes())];
            entries.extend(forward.lists_tiles(&tile).then_some((source::TILES_ENTRY, 0)));
            entries.extend(tile.split.then_some((source::MERGE_ENTRY, 0)));
            entries.extend(lists_entry(&forward));
            self.build(problem.clone().into(), (forward, tile).into(), source, entries)
        })
    }

    /// The plan of a backward pass, from the cache or made now; the flag says whether it was there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every reason; the environment's.
    pub fn gradient(&self, problem: &BackwardProblem) -> Result<(Arc<CudaPlan>, bool), Error> {
        self.plans.get_or_build(&JobQuery::Backward(problem), || {
            let backward = self.taken(Backward::of(problem))?;
            let tile = backward.tile()?;
            let source = source::backward(&backward, &tile).into();
            let [compute, rows, queries, rounded] = source::BACKWARD_ENTRIES;
            let mut entries = vec![(compute, tile.shared_bytes()), (rows, 0), (queries, 0), (rounded, 0)];
            entries.extend(lists_entry(&backward.forward));
            self.build(problem.clone().into(), (backward, tile).into(), source, entries)
        })
    }

    fn build(&self, job: Job, pass: Pass, source: Arc<str>, entries: Vec<(&'static CStr, u32)>) -> Result<Arc<CudaPlan>, Error> {
        let key = KernelKey { source, entries, cut: pass.cut() };
        // A build in the middle of a capture, of this or another thread's stream, does not disturb it.
        self.device.relaxed(|| {
            let (kernel, _) =
                self.kernels.get_or_build(&key, || Ok::<_, Error>(Arc::new(Kernel::build(&self.nvrtc, self.device, &key)?)))?;
            Ok(Arc::new(CudaPlan::new(job, pass, kernel, &self.setup_stream)?))
        })
    }

    /// What the kernels take of a problem, on this device.
    fn taken<T>(&self, problem: Result<T, Unsupported>) -> Result<T, Unsupported> {
        let mut reasons = Vec::new();
        if self.device.sm() != SM {
            let [major, minor] = [self.device.sm() / 10, self.device.sm() % 10];
            let limit = "the kernels are for compute capability 9.0".to_owned();
            reasons.push(Reason::Limit { field: "compute capability".to_owned(), value: format!("{major}.{minor}"), limit });
        }
        match problem {
            Ok(problem) if reasons.is_empty() => Ok(problem),
            Ok(_) => Err(unsupported(reasons)),
            Err(why) => Err(unsupported(reasons.into_iter().chain(why.reasons).collect())),
        }
    }

    /// A plan over host memory.
    fn hosted(&self, job: Job, plan: Arc<CudaPlan>) -> Result<Arc<Hosted>, sdpa_core::Error> {
        let told = Told { engine: plan.engine(), copied: Vec::new() };
        let failed = |error| Error::from(error).into();
        let stream = self.device.stream().map_err(failed)?;
        Ok(Arc::new(Hosted::new(job, plan, stream, told, failed)))
    }
}

/// The kernel that makes lists of blocks, where each call has its own.
fn lists_entry(forward: &Forward) -> Option<(&'static CStr, u32)> {
    (forward.lists() == Lists::AtCall).then_some((source::MAP_ENTRY, source::MAP_SHARED_BYTES))
}

impl Executor for CudaExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CUDA
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        self.taken(Forward::of(problem)).map(|_| ())
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, sdpa_core::Error> {
        Ok(self.hosted(problem.clone().into(), self.attention(problem)?.0)?)
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        self.taken(Backward::of(problem)).map(|_| ())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, sdpa_core::Error> {
        Ok(self.hosted(problem.clone().into(), self.gradient(problem)?.0)?)
    }
}

impl DeviceExecutor for CudaExecutor {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn prepare_device(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        Ok(self.attention(problem)?.0)
    }

    fn prepare_device_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        Ok(self.gradient(problem)?.0)
    }
}
