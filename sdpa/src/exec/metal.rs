//! Apple GPUs: a place in the list of executors that declines everything for now.

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::exec::{Executor, Prepared, PreparedBackward};
use crate::problem::Problem;
use std::sync::Arc;

/// Attention on an Apple GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetalExecutor;

impl Executor for MetalExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::Metal
    }

    fn supports(&self, _problem: &Problem) -> Result<(), Unsupported> {
        metal_fallback::supports()
            .map_err(|why| Unsupported { executor: ExecutorName::Metal, reasons: vec![Reason::Absent(why.to_string())] })
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        let reason = Reason::Absent("no Metal kernel is written yet".to_owned());
        Err(Error::Unsupported(Unsupported { executor: ExecutorName::Metal, reasons: vec![reason] }))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        self.supports(problem.forward())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.prepare(problem.forward()).map(|_| ())?;
        let reason = Reason::Absent("no Metal kernel is written yet".to_owned());
        Err(Error::Unsupported(Unsupported { executor: ExecutorName::Metal, reasons: vec![reason] }))
    }
}
