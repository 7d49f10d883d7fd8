//! The automatic executor selection as an executor.

use crate::runner::AUTO;
use sdpa::{
    BackwardProblem, Dispatcher, Error, Executor, ExecutorName, Preference, Prepared, PreparedBackward, Problem as Attention, Unsupported,
};
use std::sync::Arc;

/// Proves the executors that the automatic selection picks, each pass separately. It supports every problem, so a problem that no executor computes is wrong.
#[derive(Debug)]
pub struct Auto(Dispatcher);

impl Auto {
    /// Uses the executor selection of a dispatcher.
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
