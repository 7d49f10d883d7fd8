//! Runs problems of covering arrays on one executor.

use super::{Outcome, Tally, run_backward_case, run_case};
use crate::compare::Measured;
use crate::covering::Problem;
use sdpa::Executor;
use std::sync::{Mutex, PoisonError};

/// Runs a problem of a covering array on an executor. If the executor claims to support it but does not run it, the outcome is a failure.
///
/// # Panics
/// Panics if the case is not a valid problem, which is a bug of this crate.
pub fn covered(problem: &Problem, executor: &dyn Executor) -> Outcome<Box<dyn Measured>> {
    let Problem { case, source, .. } = problem;
    let unsupported = || !problem.is_supported(executor);
    match source {
        None => run_case(case, executor).skip_only_if(unsupported, || case.repro(executor.name())).boxed(),
        Some(source) => {
            let outcome = run_backward_case(case, *source, executor);
            outcome.skip_only_if(unsupported, || case.backward_repro(executor.name())).boxed()
        }
    }
}

/// Runs a problem with [`covered`], and adds the outcome to `tally`.
///
/// # Panics
/// Panics as [`covered`] does.
pub fn run_covered(problem: &Problem, label: &str, executor: &dyn Executor, tally: &Mutex<Tally>) {
    let outcome = covered(problem, executor);
    let name = format!("{} ({})", problem.case.name, problem.features.join("; "));
    tally.lock().unwrap_or_else(PoisonError::into_inner).add(label, &name, &outcome);
}
