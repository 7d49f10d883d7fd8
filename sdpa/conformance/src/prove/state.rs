//! A file of answers that a later run continues.

use super::{About, Answer, ProveError, Verdict};
use crate::covering::{Covering, FACTORS, Problem, Strength};
use sdpa::Executor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// A file of answers. Its first line is an [`About`], each other line is an [`Answer`] or a covering. Answers are appended, so a later
/// run continues where an interrupted one ended. Of several answers with one name, the last one counts. One file may hold the problems of
/// every [`Strength`](crate::covering::Strength): their names differ.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    file: File,
    answers: BTreeMap<String, Answer>,
    /// Coverings by the name of the strength.
    coverings: BTreeMap<String, Chosen>,
}

/// The rows of a strength that the executor supports, as a line of JSON. Computing them may take minutes.
#[derive(Debug, Serialize, Deserialize)]
struct Chosen {
    strength: String,
    /// The version of this crate. Another version may support other rows.
    version: String,
    /// Every value of every factor.
    values: Vec<String>,
    covering: Covering,
}

/// Any line of a state file except the first.
#[derive(Deserialize)]
#[serde(untagged)]
enum Kept {
    Answer(Answer),
    Chosen(Chosen),
}

impl Chosen {
    fn new(strength: Strength, covering: Covering) -> Chosen {
        let values = FACTORS.iter().flat_map(|factor| factor.values.iter().map(|value| format!("{}: {value}", factor.name)));
        let (strength, version) = (strength.name().to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        Chosen { strength, version, values: values.collect(), covering }
    }
}

impl State {
    /// Opens a file or creates it. Until it is dropped, no other process can add answers.
    ///
    /// # Errors
    /// Fails if the file cannot be read or written, is not a state file, has answers about another subject, or is open in another
    /// process.
    pub fn open(path: &Path, about: &About) -> Result<State, ProveError> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(ProveError::io(path, "opening"))?;
        // Ignore other errors of the lock: a file system without locks must not prevent a proof.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(ProveError::Busy { path: path.to_owned() });
        }
        let not_a_state = |why: &dyn std::fmt::Display| ProveError::NotAState { path: path.to_owned(), why: why.to_string() };
        let reading = || ProveError::io(path, "reading");
        let (mut answers, mut coverings, mut half) = (BTreeMap::new(), BTreeMap::new(), false);
        let mut lines = BufReader::new(&file).split(b'\n');
        match lines.next().transpose().map_err(reading())? {
            None => write_line(&mut file, path, about)?,
            Some(first) => {
                let there: About = serde_json::from_slice(&first).map_err(|e| not_a_state(&e))?;
                if there != *about {
                    return Err(ProveError::Other { path: path.to_owned(), there, here: about.clone() });
                }
                for line in lines {
                    // An interrupted run may have left an incomplete line, which is ignored.
                    match serde_json::from_slice::<Kept>(&line.map_err(reading())?) {
                        Ok(Kept::Answer(answer)) => drop(answers.insert(answer.name.clone(), answer)),
                        Ok(Kept::Chosen(chosen)) => drop(coverings.insert(chosen.strength.clone(), chosen)),
                        Err(_) => half = true,
                    }
                }
            }
        }
        if half {
            file.write_all(b"\n").map_err(ProveError::io(path, "writing"))?;
        }
        Ok(State { path: path.to_owned(), file, answers, coverings })
    }

    /// Returns supported rows that cover the combinations of features of a strength. They are read from the file, or computed for the
    /// executor and appended to the file.
    ///
    /// # Errors
    /// Returns [`ProveError::Io`] if the file cannot be written.
    pub fn covering(&mut self, strength: Strength, executor: &dyn Executor) -> Result<Covering, ProveError> {
        let mut here = Chosen::new(strength, Covering { rows: Vec::new(), impossible: Vec::new(), covered: 0 });
        let there = self.coverings.get(strength.name());
        if let Some(there) = there.filter(|there| (&there.version, &there.values) == (&here.version, &here.values)) {
            return Ok(there.covering.clone());
        }
        here.covering = strength.rows_for(executor);
        write_line(&mut self.file, &self.path, &here)?;
        let covering = here.covering.clone();
        self.coverings.insert(here.strength.clone(), here);
        Ok(covering)
    }

    /// Returns the path of the state file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the file has an answer to this problem whose verdict is not bad. A case whose features have changed counts as
    /// another problem.
    pub fn has(&self, problem: &Problem) -> bool {
        self.of(problem).is_some_and(|answer| !answer.verdict.is_bad())
    }

    /// Returns the answer to a problem; `None` if the file has none.
    pub fn of(&self, problem: &Problem) -> Option<&Answer> {
        self.answers.get(&problem.case.name).filter(|answer| answer.features == problem.features)
    }

    /// Returns the answer with this name, regardless of the problem's features; `None` if the file has none.
    pub fn named(&self, name: &str) -> Option<&Answer> {
        self.answers.get(name)
    }

    /// Iterates over all answers, for problems of every strength.
    pub fn answers(&self) -> impl Iterator<Item = &Answer> {
        self.answers.values()
    }

    /// Adds an answer to the file.
    ///
    /// # Errors
    /// Returns [`ProveError::Io`] if the file cannot be written.
    pub fn add(&mut self, answer: Answer) -> Result<(), ProveError> {
        write_line(&mut self.file, &self.path, &answer)?;
        self.answers.insert(answer.name.clone(), answer);
        Ok(())
    }

    /// Counts the answers in the file to these problems, by verdict.
    pub fn summary(&self, problems: &[Problem]) -> Summary {
        let mut summary = Summary { answers: BTreeMap::new(), reasons: BTreeMap::new(), bad: Vec::new() };
        for answer in problems.iter().filter_map(|problem| self.of(problem)) {
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

/// Writes a complete line at once, so that an interrupted run rarely leaves an incomplete one.
fn write_line(file: &mut File, path: &Path, value: &impl Serialize) -> Result<(), ProveError> {
    let line = serde_json::to_string(value).map_err(std::io::Error::from).map(|line| line + "\n");
    line.and_then(|line| file.write_all(line.as_bytes())).map_err(ProveError::io(path, "writing"))
}

/// Counts of the answers to some problems.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Number of answers of each verdict.
    pub answers: BTreeMap<Verdict, usize>,
    /// The reasons why problems are unsupported, each with its number of problems.
    pub reasons: BTreeMap<String, usize>,
    /// The bad answers.
    pub bad: Vec<Answer>,
}

impl Summary {
    /// Returns the number of answers with a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.answers.get(&verdict).copied().unwrap_or(0)
    }

    /// Returns the number of problems that have an answer.
    pub fn answered(&self) -> usize {
        self.answers.values().sum()
    }

    /// Returns the counts as one line of text.
    pub fn told(&self) -> String {
        format!(
            "{} right, {} unsupported, {} wrong, {} exits",
            self.count(Verdict::Right),
            self.count(Verdict::Unsupported),
            self.count(Verdict::Wrong),
            self.count(Verdict::Exit)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::covering::Strength;

    fn about(executor: &str) -> About {
        About { executor: executor.to_owned(), runs_on: "nothing".to_owned() }
    }

    /// Supports every type except f32, and counts the calls of `supports`.
    #[derive(Debug, Default)]
    struct Counts(std::sync::atomic::AtomicUsize);

    impl Executor for Counts {
        fn name(&self) -> sdpa::ExecutorName {
            sdpa::ExecutorName::new("counts")
        }
        fn supports(&self, problem: &sdpa::Problem) -> Result<(), sdpa::Unsupported> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if problem.dtype() == sdpa::DType::F32 { Err(sdpa::Unsupported::new(self.name(), Vec::new())) } else { Ok(()) }
        }
        fn prepare(&self, _: &sdpa::Problem) -> Result<std::sync::Arc<dyn sdpa::Prepared>, sdpa::Error> {
            Err(sdpa::Unsupported::new(self.name(), Vec::new()).into())
        }
        fn supports_backward(&self, problem: &sdpa::BackwardProblem) -> Result<(), sdpa::Unsupported> {
            self.supports(problem.forward())
        }
        fn prepare_backward(&self, _: &sdpa::BackwardProblem) -> Result<std::sync::Arc<dyn sdpa::PreparedBackward>, sdpa::Error> {
            Err(sdpa::Unsupported::new(self.name(), Vec::new()).into())
        }
    }

    #[test]
    fn rows_are_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.jsonl");
        let executor = Counts::default();
        let mut state = State::open(&path, &about("counts")).unwrap();
        let made = state.covering(Strength::Two, &executor).unwrap();
        let asked = executor.0.load(std::sync::atomic::Ordering::Relaxed);
        assert!(asked > made.rows.len() && made.rows.len() > 150, "{asked} questions, {} rows", made.rows.len());
        drop(state);
        let mut state = State::open(&path, &about("counts")).unwrap();
        let kept = state.covering(Strength::Two, &executor).unwrap();
        assert_eq!((&kept.rows, &kept.impossible, kept.covered), (&made.rows, &made.impossible, made.covered));
        assert_eq!(executor.0.load(std::sync::atomic::Ordering::Relaxed), asked);
        drop(state);
        // If the factors changed, stored rows have another meaning, so the covering array is made again.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("size: split KV", "size: another")).unwrap();
        let mut state = State::open(&path, &about("counts")).unwrap();
        assert_eq!(state.covering(Strength::Two, &executor).unwrap().rows, made.rows);
        assert!(executor.0.load(std::sync::atomic::Ordering::Relaxed) > asked);
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
        assert!(!state.has(&Problem { features: Vec::new(), ..problems[0].clone() }), "other features are another problem");
        state.add(Answer::without(&problems[2], Verdict::Unsupported, "why".to_owned())).unwrap();
        drop(state);
        let state = State::open(&path, &about("x")).unwrap();
        assert!(state.has(&problems[2]), "{}", std::fs::read_to_string(&path).unwrap());
        assert_eq!(state.summary(problems).told(), "1 right, 1 unsupported, 0 wrong, 0 exits");
        assert_eq!(state.summary(&problems[2..]).told(), "0 right, 1 unsupported, 0 wrong, 0 exits");
        drop(state);
        let error = State::open(&path, &about("y")).unwrap_err();
        assert!(
            matches!(error, ProveError::Other { .. }) && error.to_string().contains("has answers of x on nothing, expected"),
            "{error}"
        );
    }

    #[test]
    fn an_answer_has_the_row_of_its_problem() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.jsonl");
        let problem = Strength::Two.problems().unwrap().swap_remove(7);
        let mut state = State::open(&path, &about("x")).unwrap();
        state.add(Answer::without(&problem, Verdict::Wrong, String::new())).unwrap();
        drop(state);
        let state = State::open(&path, &about("x")).unwrap();
        let again = state.named(&problem.case.name).unwrap().problem().unwrap();
        assert_eq!((again.row, again.case.spec().unwrap()), (problem.row.clone(), problem.case.spec().unwrap()));
        // Rows of another version of the factors describe other problems.
        let mut other = state.named(&problem.case.name).unwrap().clone();
        other.row[0] = (other.row[0] + 1) % 2;
        assert!(other.problem().unwrap_err().contains("another version"), "{:?}", other.problem());
        other.row[0] = 99;
        assert!(other.problem().unwrap_err().contains("no row"), "{:?}", other.problem());
        other.row.clear();
        assert!(other.problem().unwrap_err().contains("no row"), "{:?}", other.problem());
    }

    #[test]
    fn files_that_are_no_state_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.jsonl");
        for wrong in [&b"{}\n"[..], b"letter\n", b"\xff\xfe\n", b"\n"] {
            std::fs::write(&path, wrong).unwrap();
            let error = State::open(&path, &about("x")).unwrap_err();
            assert!(matches!(error, ProveError::NotAState { .. }), "{wrong:?}: {error}");
            assert_eq!(std::fs::read(&path).unwrap(), wrong, "a file that is refused stays as it is");
        }
        let error = State::open(&folder.path().join("none/state.jsonl"), &about("x")).unwrap_err();
        assert!(matches!(error, ProveError::Io { action: "opening", .. }), "{error}");
    }

    #[test]
    fn one_process_at_a_time_adds_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.jsonl");
        let state = State::open(&path, &about("x")).unwrap();
        let error = State::open(&path, &about("x")).unwrap_err();
        assert!(matches!(error, ProveError::Busy { .. }), "{error}");
        drop(state);
        State::open(&path, &about("x")).unwrap();
    }
}
