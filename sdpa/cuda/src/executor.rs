//! The executor: one device, its compiler, its caches of kernels and of plans.

use crate::backward::Backward;
use crate::error::Error;
use crate::family::Family;
use crate::files::Files;
use crate::kernel::{Kernel, KernelKey, Kernels};
use crate::mma::{self, Cut};
use crate::plan::{CudaPlan, Pass};
use crate::problem::{Forward, unsupported};
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
    /// The only family of kernels that is asked, in place of every one that the device runs, the fastest first: for tests and timing.
    pub family: Option<Family>,
    /// Bounds of the plans that are kept.
    pub plans: Limits,
    /// Bounds of the kernels that are kept: problems that differ in lengths alone share them.
    pub kernels: Limits,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        let kernels = Limits::entries(NonZeroUsize::new(256).unwrap_or(NonZeroUsize::MIN));
        CudaOptions { driver: None, nvrtc: None, ordinal: 0, tile: None, family: None, plans: Limits::default(), kernels }
    }
}

/// Attention on one NVIDIA GPU by this crate's kernels: on compute capability 9.0 by those written for it, where they take a problem, else, and on other
/// devices from 8.0 on, by those with `mma.sync`.
#[derive(Debug)]
pub struct CudaExecutor {
    device: &'static Device,
    nvrtc: Nvrtc,
    tile: Option<Tile>,
    family: Option<Family>,
    plans: PlanCache<Job, Arc<CudaPlan>, Unsupported>,
    pub(crate) kernels: Kernels,
    pub(crate) files: Files,
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
            family: options.family,
            plans: PlanCache::new("cuda", options.plans),
            kernels: PlanCache::new("cuda kernels", options.kernels),
            files: Files::default(),
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
            let (family, forward) = self.forward(problem)?;
            let (pass, source, entries): (Pass, _, _) = match family {
                Family::Wgmma => {
                    let own = self.tile.filter(|tile| tile.holds(problem.dim_qk(), problem.dim_v()));
                    let tile = own.map_or_else(|| forward.tile(self.device.sm_count()), Ok)?;
                    let source = source::forward(&forward, &tile);
                    let mut entries = vec![(source::FORWARD_ENTRY, tile.shared_bytes())];
                    entries.extend(forward.lists_tiles(&tile).then_some((source::TILES_ENTRY, 0)));
                    entries.extend(tile.split.then_some((source::MERGE_ENTRY, 0)));
                    ((forward, tile).into(), source, entries)
                }
                Family::Mma => {
                    let cut = Cut::of_forward(&forward)?;
                    let source = mma::forward_text(&forward, &cut);
                    ((forward, cut).into(), source, vec![(source::FORWARD_ENTRY, cut.shared_bytes())])
                }
            };
            self.build(family, problem.clone().into(), pass, (source, entries), None)
        })
    }

    /// The plan of a backward pass, from the cache or made now; the flag says whether it was there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every reason; the environment's.
    pub fn gradient(&self, problem: &BackwardProblem) -> Result<(Arc<CudaPlan>, bool), Error> {
        self.plans.get_or_build(&JobQuery::Backward(problem), || {
            let (family, backward) = self.backward(problem)?;
            match family {
                Family::Wgmma => {
                    let tile = backward.tile()?;
                    let source = source::backward(&backward, &tile);
                    let [compute, rows, queries, rounded] = source::BACKWARD_ENTRIES;
                    let entries = vec![(compute, tile.shared_bytes()), (rows, 0), (queries, 0), (rounded, 0)];
                    self.build(family, problem.clone().into(), (backward, tile).into(), (source, entries), None)
                }
                Family::Mma => {
                    let cut = Cut::of_backward(&backward)?;
                    let [compute, rows, sinks, rounded, summed] = mma::QUERIES_ENTRIES;
                    let queries =
                        vec![(compute, cut.shared_bytes()), (rows, 0), (sinks, mma::SINKS_SHARED_BYTES), (rounded, 0), (summed, 0)];
                    let keys = vec![(mma::KEYS_ENTRY, cut.shared_bytes())];
                    let [queries, keys] = [(mma::queries_text(&backward, &cut), queries), (mma::keys_text(&backward, &cut), keys)];
                    self.build(family, problem.clone().into(), (backward, cut).into(), queries, Some(keys))
                }
            }
        })
    }

    /// The family of kernels that takes a forward problem, on this device.
    ///
    /// # Errors
    /// Why none does.
    pub fn family(&self, problem: &Problem) -> Result<Family, Unsupported> {
        self.forward(problem).map(|(family, _)| family)
    }

    /// The family of kernels that takes a backward problem, on this device.
    ///
    /// # Errors
    /// Why none does.
    pub fn backward_family(&self, problem: &BackwardProblem) -> Result<Family, Unsupported> {
        self.backward(problem).map(|(family, _)| family)
    }

    fn forward(&self, problem: &Problem) -> Result<(Family, Forward), Unsupported> {
        self.taken(|family| match family {
            Family::Wgmma => Forward::of(problem),
            Family::Mma => mma::forward(problem),
        })
    }

    fn backward(&self, problem: &BackwardProblem) -> Result<(Family, Backward), Unsupported> {
        self.taken(|family| match family {
            Family::Wgmma => Backward::of(problem),
            Family::Mma => mma::backward(problem),
        })
    }

    /// A plan of one text or two, each with its kernels; what makes lists is a kernel of each.
    fn build(&self, family: Family, job: Job, pass: Pass, first: Text, second: Option<Text>) -> Result<Arc<CudaPlan>, Error> {
        let (lists, cut) = (pass.lists_entry(), pass.cut());
        let made = |(source, mut entries): Text| {
            entries.extend(lists);
            let key = KernelKey { source: source.into(), entries, cut: cut.clone(), architecture: family.architecture(self.device.sm()) };
            let build = || Ok::<_, Error>(Arc::new(Kernel::build(&self.nvrtc, &self.files, self.device, &key)?));
            self.kernels.get_or_build(&key, build).map(|(kernel, _)| kernel)
        };
        // A build in the middle of a capture, of this or another thread's stream, does not disturb it.
        self.device.relaxed(|| {
            let (first, second) = (made(first)?, second.map(made).transpose()?);
            Ok(Arc::new(CudaPlan::new(job, pass, first, second, &self.setup_stream)?))
        })
    }

    /// What the first family takes of a problem that takes it, on this device; else the reasons of the one that has the fewest.
    fn taken<T>(&self, ask: impl Fn(Family) -> Result<T, Unsupported>) -> Result<(Family, T), Unsupported> {
        let asked = Family::ALL.into_iter().filter(|family| self.family.is_none_or(|only| only == *family));
        let (able, unable): (Vec<_>, Vec<_>) = asked.partition(|family| family.runs_on(self.device.sm()));
        let mut refused: Option<Unsupported> = None;
        for family in able {
            match ask(family) {
                Ok(taken) => return Ok((family, taken)),
                Err(why) if refused.as_ref().is_none_or(|before| why.reasons.len() < before.reasons.len()) => refused = Some(why),
                Err(_) => {}
            }
        }
        if let Some(refused) = refused {
            return Err(refused);
        }
        // No family runs here: that, and what would be declined elsewhere.
        let [major, minor] = [self.device.sm() / 10, self.device.sm() % 10];
        let last = unable.last().copied().unwrap_or(Family::Mma);
        let device =
            Reason::Limit { field: "compute capability".to_owned(), value: format!("{major}.{minor}"), limit: last.devices().to_owned() };
        let more = ask(last).err().map_or_else(Vec::new, |why| why.reasons);
        Err(unsupported([device].into_iter().chain(more).collect()))
    }

    /// A plan over host memory.
    fn hosted(&self, job: Job, plan: Arc<CudaPlan>) -> Result<Arc<Hosted>, sdpa_core::Error> {
        let told = Told { engine: plan.engine(), copied: Vec::new() };
        let failed = |error| Error::from(error).into();
        let stream = self.device.stream().map_err(failed)?;
        Ok(Arc::new(Hosted::new(job, plan, stream, told, failed)))
    }
}

/// A text, and its kernels with the shared memory of each.
type Text = (String, Vec<(&'static CStr, u32)>);

impl Executor for CudaExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CUDA
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        self.forward(problem).map(|_| ())
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, sdpa_core::Error> {
        Ok(self.hosted(problem.clone().into(), self.attention(problem)?.0)?)
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        self.backward(problem).map(|_| ())
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
