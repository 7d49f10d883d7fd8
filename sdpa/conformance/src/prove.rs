//! What became of each problem of a covering on one executor: an answer for each, a file of them that a later run goes on from, and the summary.

use crate::covering::Problem;
use crate::runner::{Outcome, covered};
use sdpa::Executor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

/// What became of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every result is within its tolerances.
    Right,
    /// The executor declined it, and said so before anything ran.
    Unsupported,
    /// A result is past a tolerance, or the call failed.
    Wrong,
    /// The process ended, or gave no answer in time.
    Exit,
}

impl Verdict {
    /// Whether it speaks against the executor.
    pub fn is_bad(self) -> bool {
        matches!(self, Verdict::Wrong | Verdict::Exit)
    }
}

/// What became of a problem, as a line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The name of its case.
    pub name: String,
    /// Its features, `factor: value`.
    pub features: Vec<String>,
    /// What became of it.
    pub verdict: Verdict,
    /// How near it is, why it was declined, or what was wrong.
    pub told: String,
    /// How long it took, compiling and the oracle with it.
    pub seconds: f64,
}

impl Answer {
    /// Runs a problem.
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

    /// One that nothing was measured of.
    pub fn without(problem: &Problem, verdict: Verdict, told: String) -> Answer {
        Answer { name: problem.case.name.clone(), features: problem.features.clone(), verdict, told, seconds: 0.0 }
    }
}

/// What answers are of: they are no answers of another executor, version or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The executor.
    pub executor: String,
    /// Its version and the device that it runs on, in words.
    pub runs_on: String,
    /// How often how many features meet.
    pub strength: String,
}

/// Answers in a file: its first line says what they are of, each other line is an answer. Lines are added, so that a run that was ended goes on where it was.
#[derive(Debug)]
pub struct State {
    file: File,
    answers: BTreeMap<String, Answer>,
}

impl State {
    /// Opens or begins a file.
    ///
    /// # Errors
    /// A file that cannot be read or written, is none of these, or has answers about something else.
    pub fn open(path: &Path, about: &About) -> Result<State, String> {
        let told = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(|e| told(&e))?;
        let mut lines = BufReader::new(&file).lines();
        let (mut answers, mut half) = (BTreeMap::new(), false);
        match lines.next().transpose().map_err(|e| told(&e))? {
            None => {
                let first = serde_json::to_string(about).map_err(|e| told(&e))?;
                writeln!(file, "{first}").map_err(|e| told(&e))?;
            }
            Some(first) => {
                let there: About = serde_json::from_str(&first).map_err(|e| told(&e))?;
                if there != *about {
                    return Err(format!(
                        "{}: its answers are about {there:?}, and these are about {about:?}: name another file",
                        path.display()
                    ));
                }
                for line in lines {
                    // A run that was ended may have left half a line.
                    match serde_json::from_str::<Answer>(&line.map_err(|e| told(&e))?) {
                        Ok(answer) => drop(answers.insert(answer.name.clone(), answer)),
                        Err(_) => half = true,
                    }
                }
            }
        }
        if half {
            writeln!(file).map_err(|e| told(&e))?;
        }
        Ok(State { file, answers })
    }

    /// Whether a run need not ask this problem: its answer is there, and nothing in it speaks against the executor. A case whose features changed is another
    /// problem.
    pub fn has(&self, problem: &Problem) -> bool {
        let answer = self.answers.get(&problem.case.name);
        answer.is_some_and(|answer| answer.features == problem.features && !answer.verdict.is_bad())
    }

    /// Adds an answer.
    ///
    /// # Errors
    /// The file's.
    pub fn add(&mut self, answer: Answer) -> Result<(), String> {
        let line = serde_json::to_string(&answer).map_err(|e| e.to_string())?;
        writeln!(self.file, "{line}").map_err(|e| e.to_string())?;
        self.answers.insert(answer.name.clone(), answer);
        Ok(())
    }

    /// How many answers there are of each kind, and what was declined for which reason how often.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary { answers: BTreeMap::new(), reasons: BTreeMap::new(), bad: Vec::new() };
        for answer in self.answers.values() {
            *summary.answers.entry(answer.verdict).or_default() += 1;
            if answer.verdict == Verdict::Unsupported {
                *summary.reasons.entry(answer.told.replace('\n', "; ")).or_default() += 1;
            }
            if answer.verdict.is_bad() {
                summary.bad.push(answer.clone());
            }
        }
        summary
    }
}

/// Counts of answers.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// How many there are of each kind.
    pub answers: BTreeMap<Verdict, usize>,
    /// Why problems were declined, and how many.
    pub reasons: BTreeMap<String, usize>,
    /// What speaks against the executor.
    pub bad: Vec<Answer>,
}

impl Summary {
    /// One line.
    pub fn told(&self) -> String {
        let of = |verdict| self.answers.get(&verdict).copied().unwrap_or(0);
        format!(
            "{} right, {} unsupported, {} wrong, {} exits",
            of(Verdict::Right),
            of(Verdict::Unsupported),
            of(Verdict::Wrong),
            of(Verdict::Exit)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::covering::Strength;

    fn about(executor: &str) -> About {
        About { executor: executor.to_owned(), runs_on: "nothing".to_owned(), strength: "two".to_owned() }
    }

    #[test]
    fn a_state_goes_on_after_half_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.jsonl");
        let problems = &Strength::Two.problems().unwrap()[..3];
        let mut state = State::open(&path, &about("x")).unwrap();
        state.add(Answer::without(&problems[0], Verdict::Right, String::new())).unwrap();
        state.add(Answer::without(&problems[1], Verdict::Wrong, "twice".to_owned())).unwrap();
        drop(state);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let mut state = State::open(&path, &about("x")).unwrap();
        assert!(state.has(&problems[0]) && !state.has(&problems[1]));
        state.add(Answer::without(&problems[2], Verdict::Unsupported, "why".to_owned())).unwrap();
        let state = State::open(&path, &about("x")).unwrap();
        assert!(state.has(&problems[2]), "{}", std::fs::read_to_string(&path).unwrap());
        assert_eq!(state.summary().told(), "1 right, 1 unsupported, 0 wrong, 0 exits");
        let error = State::open(&path, &about("y")).unwrap_err();
        assert!(error.contains("name another file"), "{error}");
    }

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
