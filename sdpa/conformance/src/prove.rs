//! Proofs of executors: an [`Answer`] for each problem of a covering, a [`State`] file of answers that a later run continues, and [`Workers`], the processes
//! that compute answers.

mod auto;
mod error;
mod state;
mod workers;

use crate::covering::{Problem, Row};
use crate::runner::{Outcome, covered};
pub use auto::Auto;
pub use error::ProveError;
use sdpa::Executor;
use serde::{Deserialize, Serialize};
pub use state::{State, Summary};
use std::fmt::{Display, Formatter};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
pub use workers::{Count, MOST_BAD, Workers, serve};

/// The verdict on an executor's results for a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every result was within its tolerances.
    Right,
    /// The executor reported the problem as unsupported before it ran anything.
    Unsupported,
    /// A result was past its tolerance, or the call failed.
    Wrong,
    /// The process crashed, or did not answer in time.
    Exit,
}

impl Verdict {
    /// Returns whether the verdict is against the executor: wrong, or no answer.
    pub fn is_bad(self) -> bool {
        matches!(self, Verdict::Wrong | Verdict::Exit)
    }
}

/// The result of one problem, stored as a line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The name of the problem's case.
    pub name: String,
    /// The features of the problem, each as `factor: value`.
    pub features: Vec<String>,
    /// The row from which [`Answer::problem`] builds the problem again. It is empty in files of earlier versions.
    #[serde(default)]
    pub row: Row,
    /// The verdict on the executor's results.
    pub verdict: Verdict,
    /// The distance from the oracle, the reason why the problem is unsupported, or the error.
    pub told: String,
    /// Duration in seconds, including compilation and the oracle.
    pub seconds: f64,
}

impl Answer {
    /// Runs a problem on an executor, and returns the answer.
    pub fn of(problem: &Problem, executor: &dyn Executor) -> Answer {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| covered(problem, executor)));
        let (verdict, told) = match outcome {
            Ok(Outcome::Pass(distance, report)) => (Verdict::Right, format!("{}, {}", distance.told(), report.engine)),
            Ok(Outcome::Skip(why)) => (Verdict::Unsupported, why),
            Ok(Outcome::Fail(how)) => (Verdict::Wrong, how),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
                (Verdict::Exit, format!("it panicked: {}", text.unwrap_or("without a message")))
            }
        };
        Answer { seconds: start.elapsed().as_secs_f64(), ..Answer::without(problem, verdict, told) }
    }

    /// Creates an answer with this verdict and text for a problem, with a duration of 0.
    pub fn without(problem: &Problem, verdict: Verdict, told: String) -> Answer {
        let Problem { case, features, row, .. } = problem;
        Answer { name: case.name.clone(), features: features.clone(), row: row.clone(), verdict, told, seconds: 0.0 }
    }

    /// Rebuilds the problem of the answer from its row.
    ///
    /// # Errors
    /// Fails if the answer has no row, or if its row has other features in this version of [`FACTORS`](crate::covering::FACTORS).
    pub fn problem(&self) -> Result<Problem, String> {
        let problem = Problem::of(&self.name, &self.row)?;
        if problem.features != self.features {
            return Err(format!("{}: its row is of another version of the factors", self.name));
        }
        Ok(problem)
    }
}

/// The subject of answers: an executor on a device. Answers do not hold for another executor, version or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The name of the executor.
    pub executor: String,
    /// A description of the executor's version and of the device.
    pub runs_on: String,
}

impl Display for About {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.executor, self.runs_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::covering::Strength;

    #[test]
    fn a_panic_is_an_answer() {
        #[derive(Debug)]
        struct Panics;
        impl Executor for Panics {
            fn name(&self) -> sdpa::ExecutorName {
                sdpa::ExecutorName::new("panics")
            }
            fn supports(&self, _: &sdpa::Problem) -> Result<(), sdpa::Unsupported> {
                panic!("on purpose")
            }
            fn prepare(&self, _: &sdpa::Problem) -> Result<std::sync::Arc<dyn sdpa::Prepared>, sdpa::Error> {
                panic!("on purpose")
            }
            fn supports_backward(&self, _: &sdpa::BackwardProblem) -> Result<(), sdpa::Unsupported> {
                panic!("on purpose")
            }
            fn prepare_backward(&self, _: &sdpa::BackwardProblem) -> Result<std::sync::Arc<dyn sdpa::PreparedBackward>, sdpa::Error> {
                panic!("on purpose")
            }
        }
        let answer = Answer::of(&Strength::Two.problems().unwrap()[0], &Panics);
        assert_eq!((answer.verdict, answer.told.as_str()), (Verdict::Exit, "it panicked: on purpose"));
    }
}
