//! Apple GPUs.
//!
//! What is here runs on every platform: a problem becomes a pass of `metal_fallback`, a call becomes bytes, and a
//! [`Runner`] runs the one over the other. On Apple machines that is the GPU; the tests of the workspace bring an
//! emulation, so that all of this answers to the cases without a Mac.

mod call;
mod problem;

pub use problem::{backward, forward, unsupported};

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Unsupported};
use crate::exec::{Executor, Prepared, PreparedBackward};
use crate::problem::Problem;
use call::{MetalBackward, MetalForward};
use metal_fallback::{Declined, Facts, Kernels, Ready, Runner, Task};
use std::sync::Arc;

/// Attention on an Apple GPU.
#[derive(Clone, Debug)]
pub struct MetalExecutor {
    runner: Result<Arc<dyn Runner>, Declined>,
    kernels: Option<Kernels>,
}

impl Default for MetalExecutor {
    fn default() -> MetalExecutor {
        MetalExecutor::new()
    }
}

impl MetalExecutor {
    /// Over this machine's GPU; where there is none that the kernels run on, it declines every problem and says why.
    pub fn new() -> MetalExecutor {
        MetalExecutor { runner: metal_fallback::system(), kernels: None }
    }

    /// Over another runner: a device of the caller's, or something that stands in for one.
    pub fn over(runner: Arc<dyn Runner>) -> MetalExecutor {
        MetalExecutor { runner: Ok(runner), kernels: None }
    }

    /// The same with these kernels for every problem, whatever the planner would take.
    #[must_use]
    pub fn with_kernels(self, kernels: Kernels) -> MetalExecutor {
        MetalExecutor { kernels: Some(kernels), ..self }
    }

    /// What the GPU says of itself.
    ///
    /// # Errors
    /// Why there is none.
    pub fn facts(&self) -> Result<&Facts, &Declined> {
        self.runner.as_deref().map(Runner::facts)
    }

    fn ready(&self, task: Task) -> Result<Arc<dyn Ready>, Error> {
        let runner = self.runner.as_ref().map_err(|why| unsupported(vec![why.clone()]))?;
        runner.prepare(task).map_err(Error::from)
    }

    /// What the machine has against a problem, then what the kernels have.
    fn reasons(&self, kernels: Result<(), Unsupported>) -> Result<(), Unsupported> {
        let mut refused = unsupported(self.runner.as_ref().err().cloned().into_iter().collect());
        refused.reasons.extend(kernels.err().map_or_else(Vec::new, |e| e.reasons));
        if refused.reasons.is_empty() { Ok(()) } else { Err(refused) }
    }

    fn name(&self) -> String {
        self.facts().map_or_else(|_| String::new(), |facts| facts.name.clone())
    }
}

impl From<metal_fallback::Error> for Error {
    fn from(error: metal_fallback::Error) -> Error {
        if let metal_fallback::Error::Declined(reasons) = error {
            return Error::Unsupported(unsupported(reasons));
        }
        Error::Metal(error)
    }
}

impl Executor for MetalExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::Metal
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        self.reasons(forward(problem).supports().map_err(unsupported))
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        let ready = self.ready(forward(problem).task(self.kernels).map_err(unsupported)?)?;
        Ok(Arc::new(MetalForward::new(problem.clone(), self.name(), ready)))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        self.reasons(backward(problem).supports().map_err(unsupported))
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.supports_backward(problem)?;
        let ready = self.ready(backward(problem).task(self.kernels).map_err(unsupported)?)?;
        Ok(Arc::new(MetalBackward::new(problem.clone(), self.name(), ready)))
    }
}
