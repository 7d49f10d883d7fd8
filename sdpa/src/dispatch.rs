//! The list of executors, and the choice among them.
//!
//! An automatic choice asks in the order of [`ExecutorName::ALL`] and keeps every reason against those that it passes over: cuDNN,
//! which no Apple machine has; Metal, which no other machine has; the CPU, which takes everything. It falls through on *unsupported*
//! only, and only before anything runs. An executor that is named runs the problem or says why not.

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::exec::cpu::CpuExecutor;
use crate::exec::cudnn::{CudnnExecutor, CudnnOptions};
use crate::exec::metal::MetalExecutor;
use crate::exec::{Executor, Prepared, PreparedBackward};
use crate::problem::Problem;
use std::sync::{Arc, OnceLock};

/// Which executor a problem should run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preference {
    /// The fastest that supports it.
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
    options: CudnnOptions,
    cudnn: OnceLock<Result<Arc<CudnnExecutor>, cudnn_graph::Error>>,
    cpu: CpuExecutor,
    metal: OnceLock<MetalExecutor>,
}

impl Dispatcher {
    /// All executors, cuDNN set up as told.
    pub fn new(options: CudnnOptions) -> Dispatcher {
        Dispatcher { options, ..Dispatcher::default() }
    }

    /// The cuDNN executor, or what is missing for it.
    ///
    /// # Errors
    /// The environment's, with the places searched. That there is no cuDNN, no driver or no device is remembered; any other failure is not.
    pub fn cudnn(&self) -> Result<&Arc<CudnnExecutor>, cudnn_graph::Error> {
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
    pub fn cpu(&self) -> &CpuExecutor {
        &self.cpu
    }

    /// The Metal executor; without an Apple GPU it declines everything, with the reason.
    pub fn metal(&self) -> &MetalExecutor {
        self.metal.get_or_init(MetalExecutor::new)
    }

    fn executor(&self, name: ExecutorName) -> Result<&dyn Executor, cudnn_graph::Error> {
        match name {
            ExecutorName::Cudnn => self.cudnn().map(|e| e.as_ref() as &dyn Executor),
            ExecutorName::Metal => Ok(self.metal()),
            ExecutorName::Cpu => Ok(&self.cpu),
        }
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
            Preference::Auto => self.fastest(prepare),
        }
    }

    fn fastest<P: ?Sized>(&self, prepare: impl Fn(&dyn Executor) -> Result<Arc<P>, Error>) -> Result<Choice<P>, Error> {
        let mut declined = Vec::new();
        for name in ExecutorName::ALL {
            let asked = match self.executor(name) {
                Ok(executor) => prepare(executor),
                Err(absent) if absent.is_absence() => {
                    Err(Unsupported { executor: name, reasons: vec![Reason::Absent(absent.to_string())] }.into())
                }
                Err(failed) => Err(failed.into()),
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
        let reasons = declined.into_iter().flat_map(|d| d.reasons).collect();
        Err(Error::Unsupported(Unsupported { executor: ExecutorName::Cpu, reasons }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, DType, Layout, Shape};
    use cudnn_graph::Search;

    fn nowhere() -> Dispatcher {
        let search = Search { library: Some("/nowhere/libcudnn.so.9".into()), driver: Some("/nowhere/libcuda.so.1".into()) };
        Dispatcher::new(CudnnOptions { search, ..CudnnOptions::default() })
    }

    fn problem() -> Problem {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 3, seq_kv: 5, dim_qk: 8, dim_v: 8 };
        AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate().unwrap()
    }

    #[test]
    fn an_automatic_choice_keeps_every_reason() {
        let choice = nowhere().prepare(&problem(), Preference::Auto).unwrap();
        assert_eq!(choice.executor, ExecutorName::Cpu);
        let who: Vec<ExecutorName> = choice.declined.iter().map(|d| d.executor).collect();
        assert_eq!(who, [ExecutorName::Cudnn, ExecutorName::Metal]);
        assert!(choice.declined[0].to_string().contains("/nowhere/libcuda.so.1"), "{}", choice.declined[0]);
    }

    #[test]
    fn a_named_executor_never_falls_back() {
        let dispatcher = nowhere();
        assert!(matches!(dispatcher.prepare(&problem(), Preference::Named(ExecutorName::Cudnn)), Err(Error::Backend(_))));
        assert!(matches!(dispatcher.prepare(&problem(), Preference::Named(ExecutorName::Metal)), Err(Error::Unsupported(_))));
        assert!(dispatcher.prepare(&problem(), Preference::Named(ExecutorName::Cpu)).is_ok());
    }
}
