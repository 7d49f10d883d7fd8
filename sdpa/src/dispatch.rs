//! The list of executors, and the choice among them.
//!
//! An automatic choice asks one after the other and keeps every reason against those that it passes over: those of the caller
//! ([`Dispatcher::with`]); cuDNN, which no Apple machine has; Metal, which no other machine has; the CPU, which takes everything. It falls
//! through on *unsupported* only, and only before anything runs. An executor that is named runs the problem or says why not.

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::executor::{Executor, Prepared, PreparedBackward};
use crate::problem::Problem;
#[cfg(feature = "metal")]
use metal_fallback::MetalExecutor;
#[cfg(feature = "cpu")]
use sdpa_cpu::CpuExecutor;
#[cfg(feature = "cudnn")]
use sdpa_cudnn::{BackendError, CudnnExecutor, CudnnOptions};
use std::sync::Arc;
#[cfg(any(feature = "cudnn", feature = "metal"))]
use std::sync::OnceLock;

/// Which executor a problem should run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preference {
    /// The first that supports it.
    #[default]
    Auto,
    /// This one, or an error.
    Named(ExecutorName),
}

/// A pass made ready, on whom, and why not on the others.
#[derive(Debug)]
pub struct Choice<P: ?Sized = dyn Prepared> {
    /// Who runs it.
    pub executor: ExecutorName,
    /// What runs it.
    pub prepared: Arc<P>,
    /// Who was asked before and declined.
    pub declined: Vec<Unsupported>,
}

/// Every executor of this process. cuDNN and an Apple GPU are looked for on first use.
#[derive(Debug, Default)]
pub struct Dispatcher {
    given: Vec<Arc<dyn Executor>>,
    #[cfg(feature = "cudnn")]
    options: CudnnOptions,
    #[cfg(feature = "cudnn")]
    cudnn: OnceLock<Result<Arc<CudnnExecutor>, BackendError>>,
    #[cfg(feature = "metal")]
    metal: OnceLock<MetalExecutor>,
    #[cfg(feature = "cpu")]
    cpu: CpuExecutor,
}

impl Dispatcher {
    /// All executors, cuDNN set up as told.
    #[cfg(feature = "cudnn")]
    pub fn new(options: CudnnOptions) -> Dispatcher {
        Dispatcher { options, ..Dispatcher::default() }
    }

    /// With an executor of the caller's, which is asked before those that are there, and before those given earlier. Of two with one name the
    /// one given last is there.
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, Dispatcher, Layout, Preference, Shape};
    /// use sdpa::{BackwardProblem, Error, Executor, ExecutorName, Prepared, PreparedBackward, Problem, Reason, Unsupported};
    /// use std::sync::Arc;
    ///
    /// /// Declines everything.
    /// #[derive(Debug)]
    /// struct Nobody;
    ///
    /// fn no() -> Unsupported {
    ///     Unsupported { executor: ExecutorName::new("nobody"), reasons: vec![Reason::Absent("nobody is here".to_owned())] }
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
    /// assert_eq!(choice.declined[0].to_string(), "nobody: nobody is here");
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    #[must_use]
    pub fn with(mut self, executor: Arc<dyn Executor>) -> Dispatcher {
        self.given.retain(|given| given.name() != executor.name());
        self.given.insert(0, executor);
        self
    }

    /// Every executor that is asked, in this order.
    pub fn executors(&self) -> Vec<ExecutorName> {
        let mut names: Vec<ExecutorName> = self.given.iter().map(|given| given.name()).collect();
        let own = COMPILED_IN.iter().copied().filter(|own| !names.contains(own));
        let own: Vec<ExecutorName> = own.collect();
        names.extend(own);
        names
    }

    /// The cuDNN executor, or what is missing for it.
    ///
    /// # Errors
    /// The environment's, with the places searched. That there is no cuDNN, no driver or no device is remembered; any other failure is not.
    #[cfg(feature = "cudnn")]
    pub fn cudnn(&self) -> Result<&Arc<CudnnExecutor>, BackendError> {
        if let Some(known) = self.cudnn.get() {
            return known.as_ref().map_err(Clone::clone);
        }
        match CudnnExecutor::new(self.options.clone()) {
            Err(error) if !error.is_absence() => Err(error),
            // Of two threads that are here at once, one looked for nothing.
            answer => self.cudnn.get_or_init(|| answer.map(Arc::new)).as_ref().map_err(Clone::clone),
        }
    }

    /// The CPU executor.
    #[cfg(feature = "cpu")]
    pub fn cpu(&self) -> &CpuExecutor {
        &self.cpu
    }

    /// The Metal executor; without an Apple GPU it declines everything, with the reason.
    #[cfg(feature = "metal")]
    pub fn metal(&self) -> &MetalExecutor {
        self.metal.get_or_init(MetalExecutor::new)
    }

    /// An executor by name.
    fn executor(&self, name: ExecutorName) -> Result<&dyn Executor, Error> {
        if let Some(given) = self.given.iter().find(|given| given.name() == name) {
            return Ok(&**given);
        }
        #[cfg(feature = "cudnn")]
        if name == ExecutorName::CUDNN {
            return self.cudnn().map(|executor| &**executor as &dyn Executor).map_err(|error| Error::failed(name, error));
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
        Err(absent(name, format!("no such executor: there are {}", known.join(", "))))
    }

    /// Chooses an executor and makes the problem ready on it.
    ///
    /// # Errors
    /// For a named executor, whatever speaks against it. For an automatic choice only the environment's errors, as the CPU
    /// takes every problem.
    pub fn prepare(&self, problem: &Problem, preference: Preference) -> Result<Choice, Error> {
        self.choose(preference, |executor| executor.prepare(problem))
    }

    /// Chooses an executor and makes the backward problem ready on it. It need not be the one of the forward pass.
    ///
    /// # Errors
    /// As [`Dispatcher::prepare`].
    pub fn prepare_backward(&self, problem: &BackwardProblem, preference: Preference) -> Result<Choice<dyn PreparedBackward>, Error> {
        self.choose(preference, |executor| executor.prepare_backward(problem))
    }

    fn choose<P: ?Sized>(
        &self,
        preference: Preference,
        prepare: impl Fn(&dyn Executor) -> Result<Arc<P>, Error>,
    ) -> Result<Choice<P>, Error> {
        match preference {
            Preference::Named(name) => {
                let prepared = prepare(self.executor(name)?)?;
                Ok(Choice { executor: name, prepared, declined: Vec::new() })
            }
            Preference::Auto => self.first(prepare),
        }
    }

    fn first<P: ?Sized>(&self, prepare: impl Fn(&dyn Executor) -> Result<Arc<P>, Error>) -> Result<Choice<P>, Error> {
        let mut declined = Vec::new();
        for name in self.executors() {
            let asked = match self.executor(name) {
                Ok(executor) => prepare(executor),
                #[cfg(feature = "cudnn")]
                Err(error) if is_absence(&error) => Err(absent(name, error.to_string())),
                Err(error) => Err(error),
            };
            match asked {
                Ok(prepared) => {
                    tracing::debug!(executor = %name, "chosen");
                    return Ok(Choice { executor: name, prepared, declined });
                }
                Err(Error::Unsupported(reasons)) => {
                    tracing::debug!(executor = %name, %reasons, "declined");
                    declined.push(reasons);
                }
                Err(other) => return Err(other),
            }
        }
        let executor = declined.last().map_or(ExecutorName::new("none"), |last| last.executor);
        let mut reasons: Vec<Reason> = declined.into_iter().flat_map(|d| d.reasons).collect();
        if reasons.is_empty() {
            reasons.push(Reason::Absent("no executor is compiled in".to_owned()));
        }
        Err(Error::Unsupported(Unsupported { executor, reasons }))
    }
}

/// The executors of this build, in the order in which they are asked.
const COMPILED_IN: &[ExecutorName] = &[
    #[cfg(feature = "cudnn")]
    ExecutorName::CUDNN,
    #[cfg(feature = "metal")]
    ExecutorName::METAL,
    #[cfg(feature = "cpu")]
    ExecutorName::CPU,
];

/// Whether there is no library, driver or device: nothing that a caller has to see who leaves the choice to us.
#[cfg(feature = "cudnn")]
fn is_absence(error: &Error) -> bool {
    error.failure::<BackendError>().is_some_and(BackendError::is_absence)
}

fn absent(executor: ExecutorName, why: String) -> Error {
    Error::Unsupported(Unsupported { executor, reasons: vec![Reason::Absent(why)] })
}
