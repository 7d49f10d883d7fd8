//! Problems of a covering on one executor.

use super::{Tally, run_backward_case, run_case};
use crate::covering::Problem;
use sdpa::Executor;
use std::sync::{Mutex, PoisonError};

/// Runs a problem and counts what became of it. A problem that the executor supports and does not run is a failure.
///
/// # Panics
/// Where the case is no problem: a bug of the harness.
pub fn run_covered(problem: &Problem, label: &str, executor: &dyn Executor, tally: &Mutex<Tally>) {
    let Problem { case, source, features } = problem;
    let name = format!("{} ({})", case.name, features.join("; "));
    match source {
        None => {
            let unsupported = || case.spec().unwrap().validate().is_ok_and(|problem| executor.supports(&problem).is_err());
            let outcome = run_case(case, executor).skip_only_if(unsupported, || case.repro(executor.name()));
            tally.lock().unwrap_or_else(PoisonError::into_inner).add(label, &name, &outcome);
        }
        Some(source) => {
            let unsupported = || {
                let problem = case.backward_spec().unwrap().validate().unwrap();
                executor.supports_backward(&problem).is_err() || executor.supports(problem.forward()).is_err()
            };
            let outcome = run_backward_case(case, *source, executor);
            let outcome = outcome.skip_only_if(unsupported, || case.backward_repro(executor.name()));
            tally.lock().unwrap_or_else(PoisonError::into_inner).add(label, &name, &outcome);
        }
    }
}
