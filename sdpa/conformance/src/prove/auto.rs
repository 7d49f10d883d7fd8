//! The automatic executor selection as an executor.

use crate::runner::AUTO;
use sdpa::{
    BackwardProblem, Dispatcher, Error, Executor, ExecutorName, Preference, Prepared, PreparedBackward, Problem as Attention, Unsupported,
};
use std::sync::Arc;

/// The automatic executor selection as an executor, for a proof of the executors that it picks for each pass. It claims to support every
/// problem, so a problem that no executor computes counts as wrong.
#[derive(Debug)]
pub struct Auto(Dispatcher);

impl Auto {
    /// Wraps the executor selection of a dispatcher.
    pub fn new(dispatcher: Dispatcher) -> Auto {
        Auto(dispatcher)
    }
}

impl Executor for Auto {
    fn name(&self) -> ExecutorName {
        AUTO
    }

    fn supports(&self, _: &Attention) -> Result<(), Unsupported> {
        Ok(())
    }

    fn prepare(&self, problem: &Attention) -> Result<Arc<dyn Prepared>, Error> {
        Ok(self.0.prepare(problem, Preference::Auto)?.prepared)
    }

    fn supports_backward(&self, _: &BackwardProblem) -> Result<(), Unsupported> {
        Ok(())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        Ok(self.0.prepare_backward(problem, Preference::Auto)?.prepared)
    }
}
