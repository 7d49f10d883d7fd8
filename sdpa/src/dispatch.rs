//! The list of executors, and executor selection.
//!
//! Automatic selection tries executors in order and keeps every reason against those that it passes over. The order is: the caller's own
//! ([`Dispatcher::with`]); cuDNN, never on Apple machines; native CUDA kernels on the same GPUs; Metal, only on Apple machines; the CPU, which
//! supports every problem. It continues only on *unsupported*, and only before anything runs. An executor selected by name runs the problem or
//! returns why not.

use crate::Unproven;
#[cfg(feature = "cudnn")]
use crate::any_scale::{AnyScale, Find};
use crate::backward::BackwardProblem;
use crate::empty;
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::executor::{Executor, Prepared, PreparedBackward};
use crate::problem::Problem;
#[cfg(feature = "metal")]
use metal_fallback::MetalExecutor;
#[cfg(feature = "cpu")]
use sdpa_cpu::CpuExecutor;
#[cfg(feature = "cuda")]
use sdpa_cuda::{CudaExecutor, CudaOptions, Family, KernelCache};
#[cfg(feature = "cudnn")]
use sdpa_cudnn::{BackendError, CudnnExecutor, CudnnOptions};
use std::sync::Arc;
#[cfg(any(feature = "cudnn", feature = "cuda", feature = "metal"))]
use std::sync::OnceLock;

/// The choice of executor for a problem: the first one that supports it, or a named one. Exhaustive: programs translate it to their own
/// options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preference {
    /// The first executor of [`Dispatcher::executors_for`] that supports the problem.
    #[default]
    Auto,
    /// The named executor; if it does not support the problem, an error with the reasons.
    Named(ExecutorName),
}

impl From<ExecutorName> for Preference {
    fn from(executor: ExecutorName) -> Preference {
        Preference::Named(executor)
    }
}

/// A prepared pass, with the executor that runs it and the refusals of the executors that were tried before. `prepared` may be kept and
/// called any number of times.
#[derive(Debug)]
#[non_exhaustive]
pub struct Choice<P: ?Sized = dyn Prepared> {
    /// The executor that runs the pass.
    pub executor: ExecutorName,
    /// The prepared pass.
    pub prepared: Arc<P>,
    /// The refusals of the executors that were tried before this one.
    pub unsupported: Vec<Unsupported>,
    /// The features of the problem that the executor's ledger, a record of tested features, does not cover: see
    /// [`sdpa::cudnn::ledger`](crate::cudnn::ledger). `None` if it covers all of them, or if the executor has no ledger.
    pub unproven: Option<Arc<Unproven>>,
}

/// The executors of a program and their selection. Create one and keep it. The driver, cuDNN and an Apple GPU are searched on first use.
#[derive(Debug, Default)]
pub struct Dispatcher {
    given: Vec<Arc<dyn Executor>>,
    #[cfg(feature = "cudnn")]
    pub(crate) options: CudnnOptions,
    #[cfg(feature = "cudnn")]
    pub(crate) cudnn: OnceLock<Result<Arc<CudnnExecutor>, BackendError>>,
    #[cfg(feature = "cuda")]
    kernels: Option<CudaOptions>,
    #[cfg(feature = "cuda")]
    kernel_cache: Option<KernelCache>,
    #[cfg(feature = "cuda")]
    pub(crate) cuda: OnceLock<Result<Arc<CudaExecutor>, sdpa_cuda::DriverError>>,
    #[cfg(all(feature = "cudnn", feature = "cuda"))]
    pub(crate) tuned: crate::tune::Tuned,
    #[cfg(feature = "metal")]
    metal: OnceLock<MetalExecutor>,
    #[cfg(feature = "cpu")]
    cpu: CpuExecutor,
}

impl Dispatcher {
    /// Creates a dispatcher of all compiled-in executors, with these options for cuDNN. [`Dispatcher::default`] uses default options.
    #[cfg(feature = "cudnn")]
    pub fn new(options: CudnnOptions) -> Dispatcher {
        Dispatcher { options, ..Dispatcher::default() }
    }

    /// Sets the options of the executor `sdpa::cuda`. Without them, it uses the driver and device of cuDNN's options.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn with_kernels(self, options: CudaOptions) -> Dispatcher {
        Dispatcher { kernels: Some(options), cuda: OnceLock::new(), ..self }
    }

    /// Sets the disk cache for kernels that `sdpa::cuda` compiles. It replaces the one in the options of that executor; `None` changes
    /// nothing. There is no disk cache by default; the command line and the Python package use `KernelCache::of_user`.
    ///
    /// ```
    /// use sdpa::Dispatcher;
    /// use sdpa::cuda::KernelCache;
    ///
    /// let dispatcher = Dispatcher::default().with_kernel_cache(KernelCache::of_user()?);
    /// # drop(dispatcher);
    /// # Ok::<(), sdpa::cuda::SettingError>(())
    /// ```
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn with_kernel_cache(self, cache: Option<KernelCache>) -> Dispatcher {
        Dispatcher { kernel_cache: cache.or(self.kernel_cache), cuda: OnceLock::new(), ..self }
    }

    /// Adds a custom executor, which is tried before all executors that the dispatcher has so far. It replaces an executor of the same
    /// name.
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, Dispatcher, Layout, Preference, Shape};
    /// use sdpa::{BackwardProblem, Error, Executor, ExecutorName, Prepared, PreparedBackward, Problem, Reason, Unsupported};
    /// use std::sync::Arc;
    ///
    /// /// Refuses everything.
    /// #[derive(Debug)]
    /// struct Nobody;
    ///
    /// fn no() -> Unsupported {
    ///     Unsupported::new(ExecutorName::new("nobody"), vec![Reason::Absent("nobody is here".to_owned())])
    /// }
    ///
    /// impl Executor for Nobody {
    ///     fn name(&self) -> ExecutorName {
    ///         ExecutorName::new("nobody")
    ///     }
    ///     fn supports(&self, _: &Problem) -> Result<(), Unsupported> {
    ///         Err(no())
    ///     }
    ///     fn prepare(&self, _: &Problem) -> Result<Arc<dyn Prepared>, Error> {
    ///         Err(no().into())
    ///     }
    ///     fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
    ///         Err(no())
    ///     }
    ///     fn prepare_backward(&self, _: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
    ///         Err(no().into())
    ///     }
    /// }
    ///
    /// let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 2, seq_kv: 2, dim_qk: 8, dim_v: 8 };
    /// let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate()?;
    /// let choice = Dispatcher::default().with(Arc::new(Nobody)).prepare(&problem, Preference::Auto)?;
    /// assert_eq!(choice.unsupported[0].to_string(), "nobody: nobody is here");
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn with(mut self, executor: Arc<dyn Executor>) -> Dispatcher {
        self.given.retain(|given| given.name() != executor.name());
        self.given.insert(0, executor);
        self
    }

    /// Returns the name of every executor, in the order in which they are tried.
    ///
    /// ```
    /// use sdpa::{Dispatcher, ExecutorName};
    /// assert_eq!(Dispatcher::default().executors().last(), Some(&ExecutorName::CPU));
    /// ```
    pub fn executors(&self) -> Vec<ExecutorName> {
        let mut names: Vec<ExecutorName> = self.given.iter().map(|given| given.name()).collect();
        let own = COMPILED_IN.iter().copied().filter(|own| !names.contains(own));
        let own: Vec<ExecutorName> = own.collect();
        names.extend(own);
        names
    }

    /// Returns the name of every executor, in the order in which they are tried for a forward problem. The order is that of
    /// [`Dispatcher::executors`], except that `sdpa::cuda` may precede cuDNN. It does if its kernels are tuned for the device and the
    /// problem is not one of `sdpa::cuda::EXCEPTIONS`, or if cuDNN's ledger does not cover the problem. If the problem was timed
    /// (`Dispatcher::timed`), the fastest proven executor is first.
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, Dispatcher, Layout, Shape};
    ///
    /// let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 4, seq_kv: 4, dim_qk: 8, dim_v: 8 };
    /// let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd);
    /// println!("{:?}", Dispatcher::default().executors_for(&spec.validate()?));
    /// # Ok::<(), sdpa::SpecErrors>(())
    /// ```
    pub fn executors_for(&self, problem: &Problem) -> Vec<ExecutorName> {
        kernels_first(self.executors(), || self.are_kernels_first(problem))
    }

    /// Returns the name of every executor, in the order in which they are tried for a backward problem. The order is determined as in
    /// [`Dispatcher::executors_for`], but the exceptions, for which cuDNN comes first, are those of `sdpa::cuda::cudnn_first_backward`.
    pub fn executors_for_backward(&self, problem: &BackwardProblem) -> Vec<ExecutorName> {
        kernels_first(self.executors(), || self.are_kernels_first_backward(problem))
    }

    /// Returns whether the kernels of `sdpa::cuda` precede cuDNN for a forward problem.
    pub(crate) fn are_kernels_first(&self, problem: &Problem) -> bool {
        self.are_kernels_preferred(problem) || self.is_unproven(|cudnn| cudnn.unproven(problem))
    }

    /// Returns whether the kernels of `sdpa::cuda` precede cuDNN for a backward problem.
    pub(crate) fn are_kernels_first_backward(&self, problem: &BackwardProblem) -> bool {
        self.are_kernels_preferred_backward(problem) || self.is_unproven(|cudnn| cudnn.unproven_backward(problem))
    }

    /// Returns whether a ledger of cuDNN leaves a problem unproven. Without a ledger nothing speaks against cuDNN.
    #[cfg_attr(not(feature = "cudnn"), allow(unused_variables, reason = "there is no cuDNN"))]
    fn is_unproven(&self, unproven: impl Fn(&dyn Executor) -> Option<Arc<Unproven>>) -> bool {
        #[cfg(feature = "cudnn")]
        return self.cudnn().is_ok_and(|cudnn| unproven(&**cudnn).is_some_and(|unproven| unproven.has_ledger()));
        #[cfg(not(feature = "cudnn"))]
        false
    }

    /// Returns whether the kernels are faster for a forward problem, as far as known.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "there is no other order"))]
    fn are_kernels_preferred(&self, problem: &Problem) -> bool {
        #[cfg(all(feature = "cudnn", feature = "cuda"))]
        if let Some(faster) = self.timed(problem).and_then(|timed| timed.are_kernels_faster()) {
            return faster;
        }
        #[cfg(feature = "cuda")]
        return !problem.is_empty()
            && self.is_preferred(|family| sdpa_cuda::cudnn_first(family, problem).is_some(), |cuda| cuda.family(problem));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Returns whether the kernels are faster for a backward problem, as far as known.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "there is no other order"))]
    fn are_kernels_preferred_backward(&self, problem: &BackwardProblem) -> bool {
        #[cfg(all(feature = "cudnn", feature = "cuda"))]
        if let Some(faster) = self.timed_backward(problem).and_then(|timed| timed.are_kernels_faster()) {
            return faster;
        }
        #[cfg(feature = "cuda")]
        return !problem.forward().is_empty()
            && self
                .is_preferred(|family| sdpa_cuda::cudnn_first_backward(family, problem).is_some(), |cuda| cuda.backward_family(problem));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Returns whether the kernel family for a problem precedes cuDNN: it is tuned for the device, and the problem is no exception. Kernels compiled
    /// by an old NVRTC come after cuDNN. So do all kernels if plan files are attached to cuDNN but no kernel files, because the caller wants those
    /// plans used. Without a device, the order is that of the fastest family.
    #[cfg(feature = "cuda")]
    fn is_preferred(&self, is_exception: impl Fn(Family) -> bool, family: impl Fn(&CudaExecutor) -> Result<Family, Unsupported>) -> bool {
        let is_first = Family::ALL.map(|family| is_tuned(family) && !is_exception(family));
        if !is_first.contains(&true) {
            return false;
        }
        #[cfg(feature = "cudnn")]
        let has_plans = self.cudnn.get().is_some_and(|cudnn| cudnn.as_ref().is_ok_and(|cudnn| cudnn.attached() > 0))
            && self.cuda.get().is_none_or(|cuda| cuda.as_ref().map_or(true, |cuda| cuda.attached() == 0));
        #[cfg(not(feature = "cudnn"))]
        let has_plans = false;
        let is_own_first = |own: Family| Family::ALL.into_iter().zip(is_first).any(|(family, is_first)| is_first && family == own);
        !has_plans
            && match self.cuda() {
                Ok(cuda) => cuda.is_as_measured() && family(cuda).is_ok_and(is_own_first),
                Err(_) => is_first[0],
            }
    }

    /// Returns the cuDNN executor, or an error that names the missing part.
    ///
    /// # Errors
    /// Returns the failure of the environment, with the paths that were searched. If cuDNN, the driver or the device is missing, later
    /// calls return the same error without searching again; after any other failure they try again.
    #[cfg(feature = "cudnn")]
    pub fn cudnn(&self) -> Result<&Arc<CudnnExecutor>, BackendError> {
        if let Some(known) = self.cudnn.get() {
            return known.as_ref().map_err(Clone::clone);
        }
        match CudnnExecutor::new(self.options.clone()) {
            Err(error) if !error.is_absence() => Err(error),
            // If two threads race here, one of them drops the executor that it has made.
            answer => self.cudnn.get_or_init(|| answer.map(Arc::new)).as_ref().map_err(Clone::clone),
        }
    }

    /// Returns the executor `sdpa::cuda`, with native kernels on an NVIDIA GPU, or an error that names the missing part. Without
    /// [`Dispatcher::with_kernels`] it uses the driver and device of cuDNN's options, if cuDNN is compiled in.
    ///
    /// # Errors
    /// Returns the failure of the environment, with the paths that were searched. If the driver, the device or NVRTC is missing, later
    /// calls return the same error without searching again; after any other failure they try again.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Result<&Arc<CudaExecutor>, sdpa_cuda::DriverError> {
        if let Some(known) = self.cuda.get() {
            return known.as_ref().map_err(Clone::clone);
        }
        match CudaExecutor::new(self.cuda_options()) {
            Err(error) if !error.is_absence() => Err(error),
            // If two threads race here, one of them drops the executor that it has made.
            answer => self.cuda.get_or_init(|| answer.map(Arc::new)).as_ref().map_err(Clone::clone),
        }
    }

    /// Returns the options of the executor `sdpa::cuda`.
    #[cfg(feature = "cuda")]
    fn cuda_options(&self) -> CudaOptions {
        #[cfg(feature = "cudnn")]
        let usual = || CudaOptions::default().with_driver(self.options.search.driver.clone()).with_ordinal(self.options.ordinal);
        #[cfg(not(feature = "cudnn"))]
        let usual = CudaOptions::default;
        let mut options = self.kernels.clone().unwrap_or_else(usual);
        options.kernel_cache = self.kernel_cache.clone().or(options.kernel_cache);
        options
    }

    /// Returns the executors that run calls which cuDNN refuses because of the scale: native CUDA kernels, then the CPU.
    #[cfg(feature = "cudnn")]
    fn after_cudnn(&self) -> Vec<Find> {
        vec![
            #[cfg(feature = "cuda")]
            {
                let (there, options) = (self.cuda.get().and_then(|cuda| cuda.clone().ok()), self.cuda_options());
                Box::new(move || {
                    let cuda = there.clone().map_or_else(|| CudaExecutor::new(options.clone()).map(Arc::new), Ok);
                    cuda.map(|cuda| cuda as Arc<dyn Executor>).map_err(|error| absent(ExecutorName::CUDA, error.to_string()))
                })
            },
            #[cfg(feature = "cpu")]
            {
                let cpu = self.cpu;
                Box::new(move || Ok(Arc::new(cpu) as Arc<dyn Executor>))
            },
        ]
    }

    /// Returns the CPU executor.
    #[cfg(feature = "cpu")]
    pub fn cpu(&self) -> &CpuExecutor {
        &self.cpu
    }

    /// Returns the Metal executor. Without an Apple GPU it refuses every problem, with the reason.
    #[cfg(feature = "metal")]
    pub fn metal(&self) -> &MetalExecutor {
        self.metal.get_or_init(MetalExecutor::new)
    }

    /// Returns an executor by name.
    fn executor(&self, name: ExecutorName) -> Result<&dyn Executor, Error> {
        if let Some(given) = self.given.iter().find(|given| given.name() == name) {
            return Ok(&**given);
        }
        #[cfg(feature = "cudnn")]
        if name == ExecutorName::CUDNN {
            return self.cudnn().map(|executor| &**executor as &dyn Executor).map_err(|error| Error::failed(name, error));
        }
        #[cfg(feature = "cuda")]
        if name == ExecutorName::CUDA {
            return self.cuda().map(|executor| &**executor as &dyn Executor).map_err(|error| Error::failed(name, error));
        }
        #[cfg(feature = "metal")]
        if name == ExecutorName::METAL {
            return Ok(self.metal());
        }
        #[cfg(feature = "cpu")]
        if name == ExecutorName::CPU {
            return Ok(&self.cpu);
        }
        let known: Vec<&str> = self.executors().into_iter().map(ExecutorName::name).collect();
        Err(absent(name, format!("no such executor, expected one of {}", known.join(", "))))
    }

    /// Returns the executor name for a pass that only fills results, without asking any executor. Automatic selection reports the CPU. A named
    /// executor of the caller's need not support such passes. `None` for a named executor of this build, whose library or device may be missing.
    fn fills_for(&self, preference: Preference) -> Option<ExecutorName> {
        match preference {
            Preference::Auto => Some(ExecutorName::CPU),
            Preference::Named(name) => Some(name).filter(|name| self.given.iter().any(|given| given.name() == *name)),
        }
    }

    /// Selects an executor and prepares the problem on it. Without a batch entry, query or key the pass only fills results, and no executor is asked:
    /// automatic selection reports the CPU.
    ///
    /// cuDNN computes only positive scales. If automatic selection chooses cuDNN, a call with a scale of 0 or below runs on the native CUDA kernels,
    /// or on the CPU if they do not support the problem. [`Report::engine`](crate::executor::Report::engine) names the one that ran.
    ///
    /// # Errors
    /// A named executor fails with every reason why it does not support the problem. Automatic selection fails only if the environment
    /// does, because the CPU supports every problem.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, Dispatcher, HostForward, Layout, Preference, Shape};
    ///
    /// let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 4, seq_kv: 4, dim_qk: 8, dim_v: 8 };
    /// let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd);
    /// let choice = Dispatcher::default().prepare(&spec.validate()?, Preference::Auto)?;
    /// let (q, k, v, mut o) = ([0.5f32; 64], [0.25f32; 32], [2f32; 32], [0f32; 64]);
    /// // What is prepared serves any number of calls.
    /// choice.prepared.forward(HostForward::new(&q, &k, &v, &mut o))?;
    /// println!("{} ran it, {} unsupported", choice.executor, choice.unsupported.len());
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn prepare(&self, problem: &Problem, preference: Preference) -> Result<Choice, Error> {
        if let (Some(executor), Some(prepared)) = (self.fills_for(preference), empty::forward(problem)) {
            return Ok(Choice { executor, prepared, unsupported: Vec::new(), unproven: None });
        }
        let choice = choose(
            preference,
            || self.executors_for(problem),
            |name| self.executor(name),
            |executor| executor.prepare(problem),
            |executor| executor.unproven(problem),
        )?;
        #[cfg(feature = "cudnn")]
        if self.may_refuse_scales(preference, choice.executor) {
            let problem = problem.clone();
            let prepared = AnyScale::new(choice.prepared, self.after_cudnn(), move |executor| executor.prepare(&problem));
            return Ok(Choice { prepared: Arc::new(prepared), ..choice });
        }
        Ok(choice)
    }

    /// Returns whether automatic selection chose this build's cuDNN, which computes only positive scales.
    #[cfg(feature = "cudnn")]
    fn may_refuse_scales(&self, preference: Preference, executor: ExecutorName) -> bool {
        let is_own = || self.given.iter().all(|given| given.name() != executor);
        preference == Preference::Auto && executor == ExecutorName::CUDNN && is_own()
    }

    /// Selects an executor and prepares the backward problem on it. The executor may differ from that of the forward pass.
    ///
    /// # Errors
    /// Fails as [`Dispatcher::prepare`] does.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, Dispatcher, ExecutorName, HostBackward, Layout, Preference, Shape};
    ///
    /// let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 4, seq_kv: 4, dim_qk: 8, dim_v: 8 };
    /// let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd);
    /// let choice = Dispatcher::default().prepare_backward(&spec.backward().validate()?, Preference::Named(ExecutorName::CPU))?;
    /// let (q, k, v) = ([0.5f32; 64], [0.25f32; 32], [2f32; 32]);
    /// let (o, stats, d_o) = ([2f32; 64], [1f32; 8], [1f32; 64]);
    /// let (mut dq, mut dk, mut dv) = ([0f32; 64], [0f32; 32], [0f32; 32]);
    /// choice.prepared.backward(HostBackward::new((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv)))?;
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn prepare_backward(&self, problem: &BackwardProblem, preference: Preference) -> Result<Choice<dyn PreparedBackward>, Error> {
        if let (Some(executor), Some(prepared)) = (self.fills_for(preference), empty::backward(problem)) {
            return Ok(Choice { executor, prepared, unsupported: Vec::new(), unproven: None });
        }
        let choice = choose(
            preference,
            || self.executors_for_backward(problem),
            |name| self.executor(name),
            |executor| executor.prepare_backward(problem),
            |executor| executor.unproven_backward(problem),
        )?;
        #[cfg(feature = "cudnn")]
        if self.may_refuse_scales(preference, choice.executor) {
            let problem = problem.clone();
            let prepared = AnyScale::new(choice.prepared, self.after_cudnn(), move |executor| executor.prepare_backward(&problem));
            return Ok(Choice { prepared: Arc::new(prepared), ..choice });
        }
        Ok(choice)
    }
}

/// Returns whether a kernel family is tuned for its devices. There is deliberately no wildcard arm: a new family must be measured before it precedes
/// cuDNN.
#[cfg(feature = "cuda")]
fn is_tuned(family: Family) -> bool {
    match family {
        Family::Wgmma => true,
        Family::Mma => false,
    }
}

/// Returns these names with the kernels of `sdpa::cuda` before cuDNN if `are_first` returns true.
fn kernels_first(mut names: Vec<ExecutorName>, are_first: impl FnOnce() -> bool) -> Vec<ExecutorName> {
    let at = |name| names.iter().position(|other| *other == name);
    if let (Some(cudnn), Some(cuda)) = (at(ExecutorName::CUDNN), at(ExecutorName::CUDA))
        && cudnn < cuda
        && are_first()
    {
        names[cudnn..=cuda].rotate_right(1);
    }
    names
}

/// Selects the named executor, or the first of `names` that supports the problem. It finds the executors one by one and tries to prepare
/// the problem on each, until one does not refuse it.
pub(crate) fn choose<P: ?Sized, E: Copy, N: IntoIterator<Item = ExecutorName>>(
    preference: Preference,
    names: impl FnOnce() -> N,
    find: impl Fn(ExecutorName) -> Result<E, Error>,
    prepare: impl Fn(E) -> Result<Arc<P>, Error>,
    unproven: impl Fn(E) -> Option<Arc<Unproven>>,
) -> Result<Choice<P>, Error> {
    let names = match preference {
        Preference::Named(executor) => {
            let found = find(executor)?;
            return Ok(Choice { executor, prepared: prepare(found)?, unsupported: Vec::new(), unproven: unproven(found) });
        }
        Preference::Auto => names(),
    };
    let mut unsupported = Vec::new();
    for executor in names {
        let asked = match find(executor) {
            Ok(found) => prepare(found).map(|prepared| (prepared, unproven(found))),
            Err(error) if is_absence(&error) => Err(absent(executor, error.to_string())),
            Err(error) => Err(error),
        };
        match asked {
            Ok((prepared, unproven)) => {
                let told = unproven.as_ref().map(tracing::field::display);
                tracing::debug!(%executor, unproven = told, "chosen");
                return Ok(Choice { executor, prepared, unsupported, unproven });
            }
            Err(Error::Unsupported(reasons)) => {
                tracing::debug!(%executor, %reasons, "unsupported");
                unsupported.push(reasons);
            }
            Err(other) => return Err(other),
        }
    }
    Err(match unsupported.pop() {
        Some(last) => last.after(unsupported).into(),
        None => {
            absent(ExecutorName::new("none"), "no executor is compiled in; enable a feature of the crate sdpa, such as `cuda`".to_owned())
        }
    })
}

/// The executors of this build, in the order of trying.
const COMPILED_IN: &[ExecutorName] = &[
    #[cfg(feature = "cudnn")]
    ExecutorName::CUDNN,
    #[cfg(feature = "cuda")]
    ExecutorName::CUDA,
    #[cfg(feature = "metal")]
    ExecutorName::METAL,
    #[cfg(feature = "cpu")]
    ExecutorName::CPU,
];

/// Returns whether a library, driver or device is missing. Automatic selection then skips the executor without an error.
fn is_absence(error: &Error) -> bool {
    #[cfg(feature = "cudnn")]
    if error.failure::<BackendError>().is_some_and(BackendError::is_absence) {
        return true;
    }
    #[cfg(feature = "cuda")]
    if error.failure::<sdpa_cuda::DriverError>().is_some_and(sdpa_cuda::DriverError::is_absence) {
        return true;
    }
    let _ = error;
    false
}

pub(crate) fn absent(executor: ExecutorName, why: String) -> Error {
    Unsupported::new(executor, vec![Reason::Absent(why)]).into()
}
