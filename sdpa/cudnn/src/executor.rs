//! The executor: one device, its plan caches, and their options.

use crate::cost;
use crate::error::Error;
use crate::files;
use crate::ledger::{self, Ledger};
use crate::lower::{Job, JobQuery};
use crate::plan::{self, PlanOptions, Planned};
use cudnn_graph::{Device, DeviceSlice, Driver, Library, Search, Stream, Target};
use sdpa_cache::{BuildTime, CacheStats, CacheTrace, CacheValue, Explanation, Limits, PlanCache, Query, Weight};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::device::{DeviceExecutor, OnDevice};
use sdpa_core::empty;
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward};
use sdpa_core::problem::Problem;
use sdpa_core::{Unproven, Untested};
use sdpa_nvidia::{Hosted, NvidiaExecutor};
use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};

/// A cache of the compiled plans of passes, keyed by pass.
pub type Plans = PlanCache<Job, Arc<Planned>, Unsupported>;

/// Options of the cuDNN executor.
///
/// ```
/// use sdpa_cache::Limits;
/// use sdpa_cudnn::CudnnOptions;
/// use std::num::NonZeroUsize;
///
/// let options = CudnnOptions::default().with_ordinal(1).with_forward(Limits::entries(NonZeroUsize::new(32).unwrap()));
/// assert_eq!(options.ordinal, 1);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CudnnOptions {
    /// Paths of cuDNN and of the driver.
    pub search: Search,
    /// The ordinal of the device in the driver.
    pub ordinal: u32,
    /// Options of the plans: form of the graphs, engines, and decomposition of masks.
    pub plan: PlanOptions,
    /// Limits of the plan cache of forward passes.
    pub forward: Limits,
    /// Limits of the plan cache of backward passes.
    pub backward: Limits,
    /// If true, building a plan on a device times every engine configuration that cuDNN offers, and keeps the fastest. Build time grows
    /// with the number of configurations. A dispatcher also times the kernels of `sdpa::cuda` against the fastest configuration. Plans
    /// from files are used unchanged; saved plans are the fastest ones. The environment variable `SDPA_AUTOTUNE=off` turns timing off.
    pub tune: bool,
    /// The caller's ledgers of the features that cuDNN computes correctly, which `cargo sdpa prove cudnn` writes. The executor uses the
    /// last one that matches its cuDNN version and compute capability, or else the ledger of this release.
    pub ledgers: Vec<Ledger>,
    /// If true, the executor uses a ledger, which lists the features that cuDNN is proven to compute correctly. If false, every problem
    /// is unproven, and the dispatcher tries executors in the order for versions of cuDNN without a ledger.
    pub use_ledger: bool,
    /// If true, every cache hit rebuilds the graph of the pass, and refuses a plan of another graph. This makes hits slow; it is a test
    /// of cache keys.
    pub recheck: bool,
}

impl CudnnOptions {
    /// Sets the paths of cuDNN and of the driver.
    #[must_use]
    pub fn with_search(mut self, search: Search) -> Self {
        self.search = search;
        self
    }

    /// Sets the ordinal of the device in the driver.
    #[must_use]
    pub fn with_ordinal(mut self, ordinal: u32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Sets the options of the plans.
    #[must_use]
    pub fn with_plan(mut self, plan: PlanOptions) -> Self {
        self.plan = plan;
        self
    }

    /// Sets the limits of the plan cache of forward passes.
    #[must_use]
    pub fn with_forward(mut self, forward: Limits) -> Self {
        self.forward = forward;
        self
    }

    /// Sets the limits of the plan cache of backward passes.
    #[must_use]
    pub fn with_backward(mut self, backward: Limits) -> Self {
        self.backward = backward;
        self
    }

    /// Sets whether every engine configuration is timed when a plan is built: see [`CudnnOptions::tune`].
    #[must_use]
    pub fn with_tune(mut self, tune: bool) -> Self {
        self.tune = tune;
        self
    }

    /// Sets the ledgers of proven features that take precedence over the ledger of this release.
    #[must_use]
    pub fn with_ledgers(mut self, ledgers: Vec<Ledger>) -> Self {
        self.ledgers = ledgers;
        self
    }

    /// Sets whether to use a ledger, which lists the features that cuDNN is proven to compute correctly.
    #[must_use]
    pub fn with_use_ledger(mut self, use_ledger: bool) -> Self {
        self.use_ledger = use_ledger;
        self
    }

    /// Sets whether every cache hit rebuilds the graph of its pass: see [`CudnnOptions::recheck`].
    #[must_use]
    pub fn with_recheck(mut self, recheck: bool) -> Self {
        self.recheck = recheck;
        self
    }
}

impl Default for CudnnOptions {
    fn default() -> CudnnOptions {
        let backward = Limits::entries(NonZeroUsize::new(64).unwrap_or(NonZeroUsize::MIN));
        CudnnOptions {
            search: Search::default(),
            ordinal: 0,
            plan: PlanOptions::default(),
            forward: Limits::default(),
            backward,
            tune: false,
            ledgers: Vec::new(),
            use_ledger: true,
            recheck: false,
        }
    }
}

/// Attention through cuDNN on one NVIDIA GPU: a device and its cached plans.
#[derive(Debug)]
pub struct CudnnExecutor {
    pub(crate) library: &'static Library,
    pub(crate) device: &'static Device,
    pub(crate) options: PlanOptions,
    pub(crate) forward: Plans,
    pub(crate) backward: Plans,
    pub(crate) files: files::Files,
    /// The stream on which tables are copied to the device; created on first use.
    pub(crate) setup_stream: OnceLock<Stream>,
    pub(crate) tune: bool,
    pub(crate) recheck: bool,
    ledger: Option<Ledger>,
    /// Results of the ledger by pass, cached because executor selection asks at every call.
    judged: PlanCache<Job, Arc<Judged>, Unsupported>,
    /// The result for every pass when there is no ledger.
    untested: Arc<Unproven>,
}

/// The features of a pass that the ledger does not cover; `None` if it covers all.
#[derive(Debug)]
struct Judged(Option<Arc<Unproven>>);

impl CacheValue for Judged {
    fn weight(&self) -> Weight {
        Weight { host: 0, device: 0, workspace: 0 }
    }

    fn build_time(&self) -> BuildTime {
        BuildTime::default()
    }
}

impl CudnnExecutor {
    /// Creates the executor: loads cuDNN and the driver, and finds the device.
    ///
    /// # Errors
    /// Returns an error that names the missing library, driver or device, with the paths that were searched.
    pub fn new(options: CudnnOptions) -> Result<CudnnExecutor, cudnn_graph::Error> {
        let device = Driver::load(options.search.driver.as_deref())?.device(options.ordinal)?;
        let library = Library::load(&options.search)?;
        let (forward, backward) = (PlanCache::new("forward", options.forward), PlanCache::new("backward", options.backward));
        let (version, sm) = (library.version(), device.sm());
        let own = options.ledgers.into_iter().rev().find(|ledger| (ledger.about().cudnn, ledger.about().sm) == (version, sm));
        Ok(CudnnExecutor {
            library,
            device,
            options: options.plan,
            forward,
            backward,
            files: files::Files::default(),
            setup_stream: OnceLock::new(),
            tune: options.tune && std::env::var_os("SDPA_AUTOTUNE").is_none_or(|off| off != "off"),
            recheck: options.recheck,
            judged: PlanCache::new("judged", Limits::default()),
            untested: Arc::new(ledger::unproven(version, sm, Untested::Everything)),
            ledger: own.or_else(|| Ledger::released(version, sm)).filter(|_| options.use_ledger),
        })
    }

    /// Returns the ledger of proven features for the executor's cuDNN version and architecture; `None` if there is none.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    fn unproven_of(&self, query: &JobQuery<'_>) -> Option<Arc<Unproven>> {
        let Some(ledger) = &self.ledger else { return Some(self.untested.clone()) };
        let judge = || Judged(ledger.unproven(&query.to_key()).map(Arc::new));
        match self.judged.get_or_build(query, || Ok::<_, Error>(Arc::new(judge()))) {
            Ok((judged, _)) => judged.0.clone(),
            Err(_) => judge().0,
        }
    }

    /// Returns an error for a pass that the ledger refuses.
    fn refused(&self, job: &Job) -> Result<(), Unsupported> {
        match self.ledger.as_ref().and_then(|ledger| ledger.refuses(job)) {
            Some(reason) => Err(Unsupported::new(ExecutorName::CUDNN, vec![reason])),
            None => Ok(()),
        }
    }

    /// Returns the cuDNN library.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Returns the device of the executor.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns whether building a plan times every engine configuration that cuDNN offers: [`CudnnOptions::tune`], unless
    /// `SDPA_AUTOTUNE=off` is set.
    pub fn tunes(&self) -> bool {
        self.tune
    }

    /// Returns the plan cache of forward passes.
    pub fn forward_cache(&self) -> &Plans {
        &self.forward
    }

    /// Returns the plan cache of backward passes.
    pub fn backward_cache(&self) -> &Plans {
        &self.backward
    }

    fn cache(&self, job: &Job) -> &Plans {
        match job {
            Job::Forward(_) => &self.forward,
            Job::Backward(_) => &self.backward,
        }
    }

    /// Explains whether the plans of a pass are cached, and what the pass's masks cost. If they are not cached, it names the nearest
    /// cached key and the fields that differ. It does not change the caches.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// use sdpa_cudnn::{CudnnExecutor, CudnnOptions, Job};
    /// fn explain() -> Result<(), Box<dyn std::error::Error>> {
    ///     let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 512, seq_kv: 512, dim_qk: 64, dim_v: 64 };
    ///     let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).validate()?;
    ///     let executor = CudnnExecutor::new(CudnnOptions::default())?;
    ///     println!("{}", executor.explain(&Job::from(problem)));
    ///     Ok(())
    /// }
    /// ```
    pub fn explain(&self, job: &Job) -> Explanation {
        let mut explanation = self.cache(job).explain(job);
        explanation.notes = cost::notes(job, self.options.pieces);
        explanation
    }

    /// Returns the counters of the two plan caches: forward, backward.
    pub fn cache_stats(&self) -> [CacheStats; 2] {
        [self.forward.stats(), self.backward.stats()]
    }

    /// Returns a snapshot of the two plan caches. As JSON it is the input of `cargo sdpa cache report`.
    pub fn cache_trace(&self) -> CacheTrace {
        let caches = vec![self.forward.snapshot(), self.backward.snapshot()];
        CacheTrace::new(self.library.version().to_string(), self.device.name(), caches)
    }

    /// Returns the plans of a problem. The flag is true if they were in the cache, and false if they are built now.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] with every reason if cuDNN does not support the problem. Any other error is a failure of the
    /// environment.
    pub fn attention(&self, problem: &Problem) -> Result<(Arc<Planned>, bool), Error> {
        self.find(&self.forward, &JobQuery::Forward(problem))
    }

    /// Returns the plans of a backward problem. The flag is true if they were in the cache, and false if they are built now.
    ///
    /// # Errors
    /// Fails as [`CudnnExecutor::attention`] does.
    pub fn attention_backward(&self, problem: &BackwardProblem) -> Result<(Arc<Planned>, bool), Error> {
        self.find(&self.backward, &JobQuery::Backward(problem))
    }

    /// Builds the plans of passes, or loads them from attached files, without running anything. Calls from several threads build in
    /// parallel. Returns for each pass whether its plans were already cached.
    ///
    /// # Errors
    /// Returns for each pass the error of [`CudnnExecutor::attention`]. A failed pass does not stop the others.
    pub fn prefetch(&self, jobs: &[Job]) -> Vec<Result<bool, Error>> {
        jobs.iter().map(|job| self.plans(job).map(|(_, there)| there)).collect()
    }

    pub(crate) fn plans(&self, job: &Job) -> Result<(Arc<Planned>, bool), Error> {
        match job {
            Job::Forward(problem) => self.attention(problem),
            Job::Backward(problem) => self.attention_backward(problem),
        }
    }

    fn find(&self, cache: &Plans, query: &JobQuery<'_>) -> Result<(Arc<Planned>, bool), Error> {
        let (planned, there) = cache.get_or_build(query, || self.build(query))?;
        self.recheck_if_asked(&planned, there, query)?;
        Ok((planned, there))
    }

    /// Calls `call` with the plans of a pass, without changing their reference count.
    pub(crate) fn with<R>(&self, cache: &Plans, query: &JobQuery<'_>, call: impl FnOnce(&Planned) -> R) -> Result<R, Error> {
        cache.with(
            query,
            || self.build(query),
            |planned, there| {
                self.recheck_if_asked(planned, there, query)?;
                Ok(call(planned))
            },
        )?
    }

    /// Builds plans. Stream capture, of this or another thread, is not disturbed.
    fn build(&self, query: &JobQuery<'_>) -> Result<Arc<Planned>, Error> {
        self.refused(&query.to_key())?;
        self.device.relaxed(|| {
            let stream = self.setup_stream()?;
            let handle = self.library.handle(stream)?;
            self.make(&Target::Handle(&handle), &query.to_key(), |planned| planned.upload_tables(stream))
        })
    }

    pub(super) fn setup_stream(&self) -> Result<&Stream, Error> {
        if let Some(stream) = self.setup_stream.get() {
            return Ok(stream);
        }
        // If two threads race here, one drops the stream that it created.
        let made = self.device.stream()?;
        Ok(self.setup_stream.get_or_init(|| made))
    }

    fn recheck_if_asked(&self, planned: &Planned, there: bool, query: &JobQuery<'_>) -> Result<(), Error> {
        if there && self.recheck { planned.recheck(&query.to_key(), self.library.version()) } else { Ok(()) }
    }
}

/// Converts a driver error to one of this executor.
fn failed(error: cudnn_graph::DriverError) -> sdpa_core::Error {
    Error::from(error).into()
}

impl Executor for CudnnExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CUDNN
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        if problem.is_empty() { Ok(()) } else { self.asked(&Job::from(problem.clone())) }
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, sdpa_core::Error> {
        if let Some(filled) = empty::forward(problem) {
            return Ok(filled);
        }
        Ok(Arc::new(self.ready(problem.clone().into())?))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        if problem.forward().is_empty() { Ok(()) } else { self.asked(&Job::from(problem.clone())) }
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, sdpa_core::Error> {
        if let Some(filled) = empty::backward(problem) {
            return Ok(filled);
        }
        Ok(Arc::new(self.ready(problem.clone().into())?))
    }

    fn unproven(&self, problem: &Problem) -> Option<Arc<Unproven>> {
        if problem.is_empty() { None } else { self.unproven_of(&JobQuery::Forward(problem)) }
    }

    fn unproven_backward(&self, problem: &BackwardProblem) -> Option<Arc<Unproven>> {
        if problem.forward().is_empty() { None } else { self.unproven_of(&JobQuery::Backward(problem)) }
    }
}

impl DeviceExecutor for CudnnExecutor {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn prepare_device(&self, problem: &Problem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        let filled = sdpa_nvidia::empty::prepare(&JobQuery::Forward(problem), ExecutorName::CUDNN, failed)?;
        filled.map_or_else(|| Ok(self.attention(problem)?.0 as _), Ok)
    }

    fn prepare_device_backward(&self, problem: &BackwardProblem) -> Result<OnDevice<DeviceSlice, Stream>, sdpa_core::Error> {
        let filled = sdpa_nvidia::empty::prepare(&JobQuery::Backward(problem), ExecutorName::CUDNN, failed)?;
        filled.map_or_else(|| Ok(self.attention_backward(problem)?.0 as _), Ok)
    }
}

impl NvidiaExecutor for CudnnExecutor {
    fn device(&self) -> &'static Device {
        self.device
    }
}

impl CudnnExecutor {
    fn ready(&self, job: Job) -> Result<Hosted, Error> {
        let (planned, _) = self.plans(&job)?;
        Ok(Hosted::new(job, planned, self.device.stream()?, failed))
    }

    /// Returns why no engine runs a pass, if none does.
    fn asked(&self, job: &Job) -> Result<(), Unsupported> {
        self.refused(job)?;
        let failed = |e: String| Unsupported::new(ExecutorName::CUDNN, vec![Reason::Failed(e)]);
        let asked = || -> Result<(), Error> {
            let handle = self.library.handle(self.setup_stream()?)?;
            plan::supports(self.library, &Target::Handle(&handle), job, &self.options).map(|_| ())
        };
        match asked() {
            Ok(()) => Ok(()),
            Err(Error::Unsupported(reasons)) => Err(reasons),
            Err(other) => Err(failed(other.to_string())),
        }
    }
}
