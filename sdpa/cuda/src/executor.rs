//! The executor: one device, its compiler, and its caches of kernels and plans.

use crate::disk::{Disk, KernelCache};
use crate::error::Error;
use crate::family::Family;
use crate::files::Files;
use crate::kernel::{self, Kernel, KernelKey, Kernels, Origin};
use crate::plan::CudaPlan;
use crate::schedule::Schedule;
use crate::target::Target;
use crate::tile_config::Tile;
use sdpa_cache::{CacheSnapshot, Explanation, Limits, PlanCache, State};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::device::{DeviceExecutor, OnDevice};
use sdpa_core::empty;
use sdpa_core::error::{ExecutorName, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward};
use sdpa_core::problem::Problem;
use sdpa_driver::{Device, DeviceSlice, Driver, Nvrtc, Stream};
use sdpa_nvidia::{Hosted, Job, JobQuery, NvidiaExecutor};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of an executor.
///
/// ```
/// use sdpa_cuda::{CudaOptions, KernelCache};
///
/// let options = CudaOptions::default().with_ordinal(1).with_kernel_cache(KernelCache::new("kernels"));
/// assert!(options.kernel_cache.is_some());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Path of the driver, `libcuda.so.1`. With `None`, the environment variable `CUDNN_GRAPH_DRIVER` is used if it is set, and otherwise
    /// the search path of the system's loader.
    pub driver: Option<PathBuf>,
    /// Path of NVRTC, `libnvrtc.so.13` or `libnvrtc.so.12`, or of a folder that contains it. With `None`, the path is the environment
    /// variable `SDPA_NVRTC` if it is set. Otherwise the wheels of the active Python environment and then the search path of the system's
    /// loader are searched.
    pub nvrtc: Option<PathBuf>,
    /// The ordinal of the device in the driver.
    pub ordinal: u32,
    /// The tile for every forward problem whose head dims fit it; `None` for the tile of [`Tile::of`]. It is for timing.
    pub tile: Option<Tile>,
    /// The only family of kernels to try. With `None`, all families that the device runs are tried, the fastest first. It is for tests
    /// and timing.
    pub family: Option<Family>,
    /// Limits of the plan cache.
    pub plans: Limits,
    /// Limits of the kernel cache in memory. Problems that differ only in lengths share kernels.
    pub kernels: Limits,
    /// The disk cache of kernels. The executor looks there before it compiles a kernel, and stores compiled ones there. `None` by
    /// default; the command line and the Python package use [`KernelCache::of_user`].
    pub kernel_cache: Option<KernelCache>,
}

impl CudaOptions {
    /// Sets the path of the driver, `libcuda.so.1`.
    #[must_use]
    pub fn with_driver(mut self, driver: impl Into<Option<PathBuf>>) -> Self {
        self.driver = driver.into();
        self
    }

    /// Sets the path of NVRTC, or of a folder that contains it.
    #[must_use]
    pub fn with_nvrtc(mut self, nvrtc: impl Into<Option<PathBuf>>) -> Self {
        self.nvrtc = nvrtc.into();
        self
    }

    /// Sets the ordinal of the device in the driver.
    #[must_use]
    pub fn with_ordinal(mut self, ordinal: u32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Sets the tile for every forward problem whose head dims fit it.
    #[must_use]
    pub fn with_tile(mut self, tile: impl Into<Option<Tile>>) -> Self {
        self.tile = tile.into();
        self
    }

    /// Sets the only family of kernels to try.
    #[must_use]
    pub fn with_family(mut self, family: impl Into<Option<Family>>) -> Self {
        self.family = family.into();
        self
    }

    /// Sets the limits of the plan cache.
    #[must_use]
    pub fn with_plans(mut self, plans: Limits) -> Self {
        self.plans = plans;
        self
    }

    /// Sets the limits of the kernel cache in memory.
    #[must_use]
    pub fn with_kernels(mut self, kernels: Limits) -> Self {
        self.kernels = kernels;
        self
    }

    /// Sets the disk cache of kernels, where the executor looks before it compiles.
    #[must_use]
    pub fn with_kernel_cache(mut self, kernel_cache: impl Into<Option<KernelCache>>) -> Self {
        self.kernel_cache = kernel_cache.into();
        self
    }
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        let kernels = Limits::entries(NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN));
        let plans = Limits::default();
        CudaOptions { driver: None, nvrtc: None, ordinal: 0, tile: None, family: None, plans, kernels, kernel_cache: None }
    }
}

/// Attention through the native CUDA kernels on one NVIDIA GPU. On compute capability 9.0 it uses the WGMMA kernels if they support the problem.
/// Otherwise, and on other devices from 8.0 on, it uses the `mma.sync` kernels.
#[derive(Debug)]
pub struct CudaExecutor {
    device: &'static Device,
    nvrtc: Nvrtc,
    target: Target,
    plans: PlanCache<Job, Arc<CudaPlan>, Unsupported>,
    pub(crate) kernels: Kernels,
    pub(crate) files: Files,
    disk: Disk,
    setup_stream: Stream,
}

impl CudaExecutor {
    /// Creates the executor: loads the driver and NVRTC, and finds the device.
    ///
    /// # Errors
    /// Returns an error that names the missing driver, device or NVRTC, with the paths that were searched.
    pub fn new(options: CudaOptions) -> Result<CudaExecutor, sdpa_driver::Error> {
        let device = Driver::load(options.driver.as_deref())?.device(options.ordinal)?;
        let nvrtc = Nvrtc::load(options.nvrtc.as_deref())?;
        Ok(CudaExecutor {
            device,
            nvrtc,
            target: Target { tile: options.tile, family: options.family, ..Target::of(device) },
            plans: PlanCache::new("cuda", options.plans),
            kernels: PlanCache::new("cuda kernels", options.kernels),
            files: Files::default(),
            disk: Disk::new(options.kernel_cache),
            setup_stream: device.stream()?,
        })
    }

    /// Returns the device of the executor.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns the NVRTC library that compiles kernels.
    pub fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// Explains whether the plan of a pass is cached. On a miss, it names the nearest key and the fields that differ, and how many kernels
    /// a call would compile. It does not change the cache.
    pub fn explain(&self, job: &Job) -> Explanation {
        let mut explanation = self.plans.explain(job);
        match explanation.state {
            State::Hit(_) | State::Building => {}
            State::Unsupported { .. } | State::Absent => explanation.notes.extend(self.compiled_by(job)),
        }
        explanation
    }

    /// Returns a sentence on the kernels that the first call of a pass compiles or loads. `None` for a pass that is empty or unsupported.
    fn compiled_by(&self, job: &Job) -> Option<String> {
        let schedule = match job {
            Job::Forward(problem) => self.target.forward(problem),
            Job::Backward(problem) => self.target.backward(problem),
        };
        let kernels = schedule.ok()?.kernels;
        let missing: Vec<&KernelKey> = kernels.iter().filter(|key| !matches!(self.kernels.explain(*key).state, State::Hit(_))).collect();
        let is_stored =
            |key: &KernelKey| self.files.code(key, self.nvrtc.version()).is_some() || self.disk.code(key, &self.nvrtc).is_some();
        let stored = missing.iter().filter(|key| is_stored(key)).count();
        Some(match (missing.len() - stored, stored, kernels.len()) {
            (_, _, 0) => return None,
            (0, 0, _) => "the first call compiles nothing: it binds new numbers to kernels in memory".to_owned(),
            (0, stored, all) => {
                format!("the first call compiles nothing: it loads {stored} of {all} kernels from a file or the kernel cache on disk")
            }
            (compiled, _, all) => format!("the first call compiles {compiled} of {all} kernels with NVRTC"),
        })
    }

    /// Returns snapshots of two caches: first the plan cache, then the kernel cache in memory.
    pub fn snapshots(&self) -> [CacheSnapshot; 2] {
        [self.plans.snapshot(), self.kernels.snapshot()]
    }

    /// Returns the disk cache of kernels; `None` if there is none.
    pub fn kernel_cache(&self) -> Option<KernelCache> {
        self.disk.cache()
    }

    /// Replaces the disk cache of kernels. It applies to kernels that are built from now on; `None` turns the disk cache off.
    pub fn set_kernel_cache(&self, cache: Option<KernelCache>) {
        self.disk.set(cache);
    }

    /// Returns the origin of each kernel in memory: an attached file, the disk cache, or NVRTC.
    pub fn origins(&self) -> Vec<Origin> {
        self.kernels.values().into_iter().map(|(_, kernel)| kernel.origin).collect()
    }

    /// Returns the plan of a forward pass. The flag is true if the plan was in the cache, and false if it is built now.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] with every reason if there is no kernel for the problem. Any other error is a failure of the
    /// environment.
    pub fn attention(&self, problem: &Problem) -> Result<(Arc<CudaPlan>, bool), Error> {
        let build = || self.build(problem.clone().into(), self.target.forward(problem)?);
        self.plans.get_or_build(&JobQuery::Forward(problem), build)
    }

    /// Returns the plan of a backward pass. The flag is true if the plan was in the cache, and false if it is built now.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] with every reason if there is no kernel for the problem. Any other error is a failure of the
    /// environment.
    pub fn gradient(&self, problem: &BackwardProblem) -> Result<(Arc<CudaPlan>, bool), Error> {
        let build = || self.build(problem.clone().into(), self.target.backward(problem)?);
        self.plans.get_or_build(&JobQuery::Backward(problem), build)
    }

    /// Returns whether the executor's NVRTC compiles kernels as fast as those for which the [exceptions](crate::EXCEPTIONS) were
    /// measured. NVRTC before 12.9 compiles slower kernels.
    pub fn is_as_measured(&self) -> bool {
        kernel::is_fast(self.nvrtc.version())
    }

    /// Returns the family of kernels that supports a forward problem on this device.
    ///
    /// # Errors
    /// Returns the reasons why no family supports the problem.
    pub fn family(&self, problem: &Problem) -> Result<Family, Unsupported> {
        self.target.supported_forward(problem).map(|(family, _)| family)
    }

    /// Returns the family of kernels that supports a backward problem on this device.
    ///
    /// # Errors
    /// Returns the reasons why no family supports the problem.
    pub fn backward_family(&self, problem: &BackwardProblem) -> Result<Family, Unsupported> {
        self.target.supported_backward(problem).map(|(family, _)| family)
    }

    fn build(&self, job: Job, schedule: Schedule) -> Result<Arc<CudaPlan>, Error> {
        let kernel = |key: &KernelKey| {
            let build = || Ok::<_, Error>(Arc::new(Kernel::build(&self.nvrtc, &self.files, &self.disk, self.device, key)?));
            self.kernels.get_or_build(key, build).map(|(kernel, _)| kernel)
        };
        // Build in relaxed capture mode, so that a stream capture of this or another thread stays valid.
        self.device.relaxed(|| {
            let kernels = schedule.kernels.iter().map(kernel).collect::<Result<_, _>>()?;
            Ok(Arc::new(CudaPlan::new(job, schedule, kernels, &self.setup_stream)?))
        })
    }

    /// Wraps a plan for host memory.
    fn hosted(&self, job: Job, plan: Arc<CudaPlan>) -> Result<Arc<Hosted>, sdpa_core::Error> {
        let stream = self.device.stream().map_err(failed)?;
        Ok(Arc::new(Hosted::new(job, plan, stream, failed)))
    }
}

/// Converts a driver error to one of this executor.
fn failed(error: sdpa_driver::Error) -> sdpa_core::Error {
    Error::from(error).into()
}

impl Executor for CudaExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CUDA
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        if problem.is_empty() { Ok(()) } else { self.family(problem).map(|_| ()) }
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, sdpa_core::Error> {
        if let Some(filled) = empty::forward(problem) {
            return Ok(filled);
        }
        Ok(self.hosted(problem.clone().into(), self.attention(problem)?.0)?)
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        if problem.forward().is_empty() { Ok(()) } else { self.backward_family(problem).map(|_| ()) }
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, sdpa_core::Error> {
        if let Some(filled) = empty::backward(problem) {
            return Ok(filled);
        }
        Ok(self.hosted(problem.clone().into(), self.gradient(problem)?.0)?)
    }
}

impl DeviceExecutor for CudaExecutor {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn prepare_device(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        let filled = sdpa_nvidia::empty::prepare(&JobQuery::Forward(problem), ExecutorName::CUDA, failed)?;
        filled.map_or_else(|| Ok(self.attention(problem)?.0 as _), Ok)
    }

    fn prepare_device_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        let filled = sdpa_nvidia::empty::prepare(&JobQuery::Backward(problem), ExecutorName::CUDA, failed)?;
        filled.map_or_else(|| Ok(self.gradient(problem)?.0 as _), Ok)
    }
}

impl NvidiaExecutor for CudaExecutor {
    fn device(&self) -> &'static Device {
        self.device
    }
}
