//! The executor: which problems the CPU supports, and the preparation of passes.

use crate::backward::CpuBackward;
use crate::fact::supports_fact;
use crate::forward::CpuPrepared;
use crate::fp8;
use crate::isa::Isa;
use crate::program::{Lengths, Rules};
use crate::schedule::Schedule;
use crate::workspace::{most_workspace, workspace};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::empty;
use sdpa_core::error::{Error, ExecutorName, Unsupported};
use sdpa_core::executor::{Executor, Prepared, PreparedBackward};
use sdpa_core::fact::{Fact, reasons};
use sdpa_core::operand::Direction;
use sdpa_core::problem::Problem;
use std::sync::Arc;

/// The executor that computes attention on the CPU, on the threads of the rayon pool from which it is called.
#[derive(Clone, Copy, Debug)]
pub struct CpuExecutor {
    isa: Isa,
}

impl CpuExecutor {
    /// Creates an executor for the best instruction set of this CPU.
    pub fn new() -> CpuExecutor {
        CpuExecutor { isa: Isa::detect() }
    }

    /// Returns the largest size in bytes of the scratch memory of a forward pass, in addition to the operands. It depends on the number
    /// of threads in the calling rayon pool.
    pub fn workspace_bytes(&self, problem: &Problem) -> u64 {
        if problem.is_empty() {
            return 0;
        }
        let rules = Rules::new(problem);
        let threads = rayon::current_num_threads();
        let schedule = Schedule::new(problem, self.isa, threads, Lengths::default(), !rules.is_empty());
        let of = if problem.packed().is_some() { most_workspace } else { workspace };
        of(&schedule, self.isa, &rules) as u64 + fp8::bytes(problem, Direction::Forward, |operand| problem.in_memory(operand))
    }

    /// Returns the largest size in bytes of the scratch memory of a backward pass, in addition to the operands.
    pub fn backward_workspace_bytes(&self, problem: &BackwardProblem) -> u64 {
        if problem.forward().is_empty() {
            return 0;
        }
        let backward = CpuBackward::unchecked(self.isa, problem);
        backward.most_workspace() as u64 + backward.narrow_bytes()
    }

    #[cfg(test)]
    pub(crate) fn with_isa(isa: Isa) -> CpuExecutor {
        CpuExecutor { isa }
    }
}

impl Default for CpuExecutor {
    fn default() -> CpuExecutor {
        CpuExecutor::new()
    }
}

/// Returns the reasons if a fact is unsupported.
fn supported<'a>(facts: impl Iterator<Item = Fact<'a>>) -> Result<(), Unsupported> {
    let reasons = reasons(facts, supports_fact);
    if reasons.is_empty() { Ok(()) } else { Err(Unsupported::new(ExecutorName::CPU, reasons)) }
}

impl Executor for CpuExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::CPU
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        supported(problem.facts())
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        let made = || Arc::new(CpuPrepared { isa: self.isa, rules: Rules::new(problem), problem: problem.clone() });
        Ok(empty::forward(problem).unwrap_or_else(|| made()))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        supported(problem.facts())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.supports_backward(problem)?;
        Ok(empty::backward(problem).unwrap_or_else(|| Arc::new(CpuBackward::new(self.isa, problem))))
    }
}
