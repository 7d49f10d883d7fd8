//! The executor on Apple GPUs.
//!
//! This code runs on every platform: a problem becomes a pass, a call becomes bytes, and a [`Runner`] runs the pass over the bytes. On Apple machines
//! the runner is the GPU. The tests of the workspace use an emulation, so they cover this code without a Mac.

mod call;
mod fact;
mod problem;

use crate::{Backward, Facts, Forward, Kernels, Ready, Runner, Task, Unavailable};
use call::{MetalBackward, MetalForward};
use fact::supported;
use problem::unsupported;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::empty;
use sdpa_core::error::{Error, ExecutorName, Reason, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward};
use sdpa_core::problem::Problem;
use std::sync::Arc;

/// The executor that computes attention on an Apple GPU.
#[derive(Clone, Debug)]
pub struct MetalExecutor {
    runner: Result<Arc<dyn Runner>, Unavailable>,
    kernels: Option<Kernels>,
}

impl Default for MetalExecutor {
    fn default() -> MetalExecutor {
        MetalExecutor::new()
    }
}

impl MetalExecutor {
    /// Creates an executor on this machine's GPU. Without a suitable GPU, it refuses every problem and gives the reason.
    pub fn new() -> MetalExecutor {
        MetalExecutor { runner: crate::system(), kernels: None }
    }

    /// Creates an executor on another runner, such as the caller's device or an emulation.
    pub fn over(runner: Arc<dyn Runner>) -> MetalExecutor {
        MetalExecutor { runner: Ok(runner), kernels: None }
    }

    /// Sets the kernels for every problem, instead of those that the planner chooses.
    #[must_use]
    pub fn with_kernels(self, kernels: Kernels) -> MetalExecutor {
        MetalExecutor { kernels: Some(kernels), ..self }
    }

    /// Returns the properties of the GPU.
    ///
    /// # Errors
    /// Returns the reason why there is no GPU.
    pub fn facts(&self) -> Result<&Facts, &Unavailable> {
        self.runner.as_deref().map(Runner::facts)
    }

    fn ready(&self, task: Task) -> Result<Arc<dyn Ready>, Error> {
        let runner = self.runner.as_ref().map_err(|why| unsupported(vec![why.clone().into()]))?;
        runner.prepare(task).map_err(Error::from)
    }

    /// Returns the machine's reasons against a problem, else those of the kernels.
    fn reasons(&self, kernels: Result<(), Unsupported>) -> Result<(), Unsupported> {
        let mut refused = unsupported(self.runner.as_ref().err().cloned().into_iter().map(Reason::from).collect());
        refused.reasons.extend(kernels.err().map_or_else(Vec::new, |e| e.reasons));
        if refused.reasons.is_empty() { Ok(()) } else { Err(refused) }
    }

    fn name(&self) -> String {
        self.facts().map_or_else(|_| String::new(), |facts| facts.name.clone())
    }
}

impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Error {
        match error {
            crate::Error::Unsupported(reasons) => Error::Unsupported(unsupported(reasons)),
            failed @ (crate::Error::Compile { .. }
            | crate::Error::Operand { .. }
            | crate::Error::Exhausted { .. }
            | crate::Error::Execution { .. }) => Error::failed(ExecutorName::METAL, failed),
        }
    }
}

impl Executor for MetalExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::METAL
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        if problem.is_empty() {
            return self.reasons(Ok(()));
        }
        supported(problem.facts()).map_err(unsupported)?;
        self.reasons(Forward::from(problem).supports().map_err(unsupported))
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        if let Some(filled) = empty::forward(problem) {
            return Ok(filled);
        }
        let ready = self.ready(Forward::from(problem).task(self.kernels).map_err(unsupported)?)?;
        Ok(Arc::new(MetalForward::new(problem.clone(), self.name(), ready)))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        if problem.forward().is_empty() {
            return self.reasons(Ok(()));
        }
        supported(problem.facts()).map_err(unsupported)?;
        self.reasons(Backward::from(problem).supports().map_err(unsupported))
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.supports_backward(problem)?;
        if let Some(filled) = empty::backward(problem) {
            return Ok(filled);
        }
        let ready = self.ready(Backward::from(problem).task(self.kernels).map_err(unsupported)?)?;
        Ok(Arc::new(MetalBackward::new(problem.clone(), self.name(), ready)))
    }
}
