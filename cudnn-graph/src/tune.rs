//! Autotuning: the fastest of the engine configurations that cuDNN offers.
//!
//! Some engines that cuDNN offers for attention silently compute something else. So the first configuration that works, which is used without timing,
//! is the reference: a configuration with other results is never chosen.

use crate::engine::{EngineReport, Outcome};
use crate::error::Error;
use crate::plan::{Plan, Planner};
use crate::profile::Target;
use std::time::Duration;

/// The measurement of one plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The time of one execution.
    pub time: Duration,
    /// Results of an execution on the same inputs for every plan, in the same order.
    pub results: Vec<f64>,
}

/// Returns the first difference of two lists of results: elements must agree within `tolerance · max(1, |a|, |b|)`, or both be NaN, or be the same
/// infinity.
fn difference(reference: &[f64], results: &[f64], tolerance: f64) -> Option<String> {
    if reference.len() != results.len() {
        return Some(format!("it has {} results, expected {}", results.len(), reference.len()));
    }
    let near = |a: f64, b: f64| a.is_finite() && b.is_finite() && (a - b).abs() <= tolerance * 1f64.max(a.abs()).max(b.abs());
    let agree = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || near(a, b);
    let (n, (a, b)) = reference.iter().zip(results).enumerate().find(|(_, (a, b))| !agree(**a, **b))?;
    Some(format!("result {n} is {b}, expected {a}"))
}

/// Times the configurations that are not tried yet, and returns the plan of the fastest.
///
/// `build` returns the plan of a configuration, or the reason against it.
pub(crate) fn race<P>(
    report: &mut EngineReport,
    tolerance: f64,
    mut build: impl FnMut(usize) -> Result<Result<P, Outcome>, Error>,
    mut run: impl FnMut(&P) -> Result<Trial, Error>,
) -> Result<Option<P>, Error> {
    let mut reference: Option<(String, Vec<f64>)> = None;
    let mut best: Option<(usize, Duration, P)> = None;
    for n in 0..report.candidates.len() {
        if report.candidates[n].outcome != Outcome::NotTried {
            continue;
        }
        let plan = match build(n)? {
            Ok(plan) => plan,
            Err(outcome) => {
                report.candidates[n].outcome = outcome;
                continue;
            }
        };
        let trial = match run(&plan) {
            Ok(trial) => trial,
            // A failure of the reference says nothing about other configurations, but without it they cannot be compared.
            Err(error) if error.is_fatal() || reference.is_none() => return Err(error),
            Err(error) => {
                report.candidates[n].outcome = Outcome::PassedOver(format!("it was not timed: {error}"));
                continue;
            }
        };
        match &reference {
            None => reference = Some((report.candidates[n].tag(), trial.results)),
            Some((tag, expected)) => {
                if let Some(difference) = difference(expected, &trial.results, tolerance) {
                    report.candidates[n].outcome = Outcome::PassedOver(format!("its results differ from those of {tag}: {difference}"));
                    continue;
                }
            }
        }
        let slower = |loser: Duration, winner: Duration| Outcome::PassedOver(format!("it took {loser:?}, the chosen one {winner:?}"));
        match &best {
            Some((_, time, _)) if *time <= trial.time => report.candidates[n].outcome = slower(trial.time, *time),
            Some((previous, time, _)) => {
                report.candidates[*previous].outcome = slower(*time, trial.time);
                best = Some((n, trial.time, plan));
            }
            None => best = Some((n, trial.time, plan)),
        }
    }
    Ok(best.map(|(n, _, plan)| {
        report.candidates[n].outcome = Outcome::Chosen;
        plan
    }))
}

impl Planner {
    /// Builds the plans of all offered engine configurations that the policy accepts, and returns the fastest one. `run` executes a plan, on the same
    /// inputs for each, and returns the time and the results. A configuration whose results differ by more than `tolerance`, relative to
    /// numbers above 1, from those of [`Planner::first`]'s configuration is not chosen. The report has the reason for each.
    ///
    /// # Errors
    /// Fails as [`Planner::first`] does, if `run` fails for the first configuration that works, or if it runs out of memory.
    pub fn fastest(&self, target: &Target<'_>, tolerance: f64, mut run: impl FnMut(&Plan) -> Result<Trial, Error>) -> Result<Plan, Error> {
        let mut report = self.report().clone();
        let mut failed = None;
        let build = |n: usize| self.attempt(n, target, &mut failed);
        match race(&mut report, tolerance, build, |plan| run(plan))? {
            Some(plan) => Ok(plan.with_report(report)),
            None => Err(failed.unwrap_or_else(|| Error::NoEngine(Box::new(report)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Candidate, Source};

    fn report(engines: i64) -> EngineReport {
        let candidate = |engine| Candidate {
            source: Source::A,
            engine,
            knobs: Vec::new(),
            workspace: None,
            shared_memory: None,
            numerical_notes: Vec::new(),
            behavior_notes: Vec::new(),
            outcome: Outcome::NotTried,
        };
        EngineReport { candidates: (0..engines).map(candidate).collect(), ..EngineReport::default() }
    }

    fn trial(micros: u64, results: &[f64]) -> Result<Trial, Error> {
        Ok(Trial { time: Duration::from_micros(micros), results: results.to_vec() })
    }

    /// Races plans that are their own numbers, with these measurements.
    fn raced(report: &mut EngineReport, trials: &[Result<Trial, Error>]) -> Result<Option<usize>, Error> {
        race(report, 1e-3, |n| Ok(Ok(n)), |n| trials[*n].clone())
    }

    #[test]
    fn the_fastest_with_equal_results_is_chosen() {
        let mut all = report(5);
        all.candidates[4].outcome = Outcome::PassedOver("the policy avoids eng4".to_owned());
        let same: &[f64] = &[1.0, f64::NAN, f64::INFINITY, 1000.0];
        let trials = [
            trial(30, same),
            trial(1, &[1.0, f64::NAN, f64::INFINITY, 1002.0]),
            trial(20, &[1.0005, f64::NAN, f64::INFINITY, 999.5]),
            trial(20, same),
        ];
        assert_eq!(raced(&mut all, &trials).unwrap(), Some(2));
        let told: Vec<String> = all.candidates.iter().map(|c| format!("{:?}", c.outcome)).collect();
        assert!(told[0].contains("it took 30µs, the chosen one 20µs"), "{told:?}");
        assert!(told[1].contains("differ from those of eng0: result 3 is 1002, expected 1000"), "{told:?}");
        assert_eq!(told[2], "Chosen");
        assert!(told[3].contains("it took 20µs"), "{told:?}");
        assert!(told[4].contains("avoids"), "{told:?}");
    }

    #[test]
    fn zeros_and_other_shapes_and_doubled_results_lose() {
        for wrong in [&[0.0, 0.0][..], &[1.0], &[2.0, -4.0], &[f64::NAN, -2.0], &[1.0, f64::INFINITY]] {
            let mut all = report(2);
            assert_eq!(raced(&mut all, &[trial(9, &[1.0, -2.0]), trial(1, wrong)]).unwrap(), Some(0), "{wrong:?}");
        }
        assert_eq!(raced(&mut report(2), &[trial(9, &[1.0, -2.0]), trial(1, &[1.0, -2.0])]).unwrap(), Some(1));
    }

    #[test]
    fn failures_of_the_reference_end_the_race_and_others_lose() {
        let broken = || Err(Error::PlanJson("broken".to_owned()));
        assert!(raced(&mut report(2), &[broken(), trial(1, &[1.0])]).is_err());
        let mut all = report(2);
        assert_eq!(raced(&mut all, &[trial(5, &[1.0]), broken()]).unwrap(), Some(0));
        assert!(format!("{:?}", all.candidates[1].outcome).contains("not timed: plan JSON: broken"));
        let fatal = Error::Driver(sdpa_driver::Error::Memory { what: "x".to_owned(), bytes: 1, limit: "0".to_owned() });
        assert_eq!(fatal.is_fatal(), raced(&mut report(2), &[trial(5, &[1.0]), Err(fatal)]).is_err());
        assert_eq!(raced(&mut report(0), &[]).unwrap(), None);
        let refused = |_| Ok(Err(Outcome::PassedOver("too large".to_owned())));
        assert_eq!(race(&mut report(1), 0.0, refused, |_: &usize| trial(1, &[])).unwrap(), None);
    }
}
