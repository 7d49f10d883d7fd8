//! The ledger that is made from answers of cuDNN.

use sdpa::cudnn::CudnnExecutor;
use sdpa::cudnn::ledger::{About, Evidence, Ledger, LedgerError, RELEASE};
use sdpa::nvidia::Job;
use sdpa_conformance::covering::Problem;
use sdpa_conformance::prove::{State, Verdict};
use std::path::{Path, PathBuf};

/// Returns the passes of a problem that an answer is evidence about.
fn passes(problem: &Problem, verdict: Verdict) -> Result<Vec<Job>, String> {
    if problem.source.is_none() {
        let forward = problem.case.spec()?.validate().map_err(|e| e.to_string())?;
        return Ok(vec![forward.into()]);
    }
    let backward = problem.case.backward_spec()?.validate().map_err(|e| e.to_string())?;
    // A wrong gradient may come from a wrong forward pass, so the forward pass counts as wrong too.
    let forward = verdict.is_bad().then(|| backward.forward().clone().into());
    Ok(forward.into_iter().chain([backward.into()]).collect())
}

/// Makes a ledger from every answer in a state. Answers to problems of another version of the factors are skipped.
fn ledger(about: About, state: &State) -> Ledger {
    let mut evidence = Evidence::default();
    for answer in state.answers().filter(|answer| answer.verdict != Verdict::Unsupported) {
        let passes = answer.problem().and_then(|problem| passes(&problem, answer.verdict)).unwrap_or_default();
        passes.iter().filter(|job| !job.problem().is_empty()).for_each(|job| evidence.add(job, answer.verdict == Verdict::Right));
    }
    evidence.ledger(about)
}

/// Returns the version and architecture that a ledger is about, without results.
pub(super) fn about(cudnn: &CudnnExecutor) -> About {
    let (device, release) = (cudnn.device().name().to_owned(), RELEASE.to_owned());
    About { cudnn: cudnn.library().version(), sm: cudnn.device().sm(), device, release, right: 0, wrong: 0 }
}

/// Writes the ledger of a state. Its folder is the caller's, or the one where the command line and the Python package look for it.
pub(super) fn write(about: About, state: &State, folder: Option<&Path>) -> Result<Option<(Ledger, PathBuf)>, LedgerError> {
    let name = Ledger::file_name(about.cudnn, about.sm);
    let path = match folder {
        Some(folder) => Some(folder.join(name)),
        None => Ledger::user_folder()?.map(|folder| folder.join(name)),
    };
    let Some(path) = path else { return Ok(None) };
    let ledger = ledger(about, state);
    ledger.save(&path)?;
    Ok(Some((ledger, path)))
}

/// Deletes the user's ledgers, or those in a folder, and returns their number.
pub(super) fn remove(folder: Option<&Path>) -> Result<usize, LedgerError> {
    let folder = match folder {
        Some(folder) => Some(folder.to_owned()),
        None => Ledger::user_folder()?,
    };
    let Some(folder) = folder else { return Ok(0) };
    let paths = Ledger::files_in(&folder)?;
    for path in &paths {
        std::fs::remove_file(path).map_err(|source| LedgerError::Io { path: path.clone(), source })?;
    }
    Ok(paths.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_conformance::covering::Strength;
    use sdpa_conformance::prove::{About as Subject, Answer};

    #[test]
    fn a_wrong_gradient_speaks_against_both_of_its_passes() {
        let problems = Strength::Two.problems().unwrap();
        let backward = problems.iter().find(|problem| problem.source.is_some()).unwrap();
        assert_eq!(passes(backward, Verdict::Right).unwrap().len(), 1);
        assert_eq!(passes(backward, Verdict::Exit).unwrap().len(), 2);
    }

    #[test]
    fn a_ledger_counts_right_and_wrong_answers() {
        let folder = tempfile::tempdir().unwrap();
        let subject = Subject { executor: "cudnn".to_owned(), runs_on: "a test".to_owned() };
        let mut state = State::open(&folder.path().join("cudnn.jsonl"), &subject).unwrap();
        let computes = |problem: &&Problem| passes(problem, Verdict::Right).unwrap().iter().all(|job| !job.problem().is_empty());
        let problems = Strength::Two.problems().unwrap();
        let some: Vec<&Problem> = problems.iter().filter(computes).take(60).collect();
        for (n, problem) in some.iter().enumerate() {
            let verdict = if n == 0 {
                Verdict::Wrong
            } else if n == 1 {
                Verdict::Unsupported
            } else {
                Verdict::Right
            };
            state.add(Answer::without(problem, verdict, String::new())).unwrap();
        }
        let (device, release) = ("a device".to_owned(), RELEASE.to_owned());
        let about = About { cudnn: cudnn_graph::Version::new(9, 19, 0), sm: 90, device, release, right: 0, wrong: 0 };
        let (ledger, path) = write(about, &state, Some(folder.path())).unwrap().unwrap();
        assert_eq!(path, folder.path().join("cudnn-9.19.0-sm90.json"));
        assert_eq!(Ledger::load(&path).unwrap(), ledger);
        let wrong = passes(some[0], Verdict::Wrong).unwrap();
        assert_eq!((ledger.about().right, ledger.about().wrong), (58, wrong.len()));
        assert!(wrong.iter().all(|job| ledger.refuses(job).is_some()));
        assert!(some[2..].iter().all(|problem| passes(problem, Verdict::Right).unwrap().iter().all(|job| ledger.refuses(job).is_none())));
        assert_eq!((remove(Some(folder.path())).unwrap(), path.exists()), (1, false));
    }
}
