//! The result of a proof, as text and as JSON.

use super::args::ProveArgs;
use crate::exit::{Answer as Told, Failure, Outcome};
use crate::ledger::LedgerFacts;
use crate::table::Table;
use sdpa::cudnn::ledger::Ledger;
use sdpa_conformance::covering::Strength;
use sdpa_conformance::prove::{About, Answer, Summary, Verdict};
use serde::Serialize;
use std::path::PathBuf;

/// Maximum number of reasons in the text; JSON has all of them.
const REASONS: usize = 8;

/// A completed run.
pub(super) struct Proven {
    pub(super) about: About,
    pub(super) strength: Strength,
    pub(super) problems: usize,
    pub(super) open: usize,
    pub(super) unproven: Vec<Vec<String>>,
    pub(super) state: PathBuf,
    /// The ledger from all answers in the state, and its file.
    pub(super) ledger: Option<(Ledger, PathBuf)>,
    pub(super) seconds: f64,
    /// The answer of the one requested problem.
    pub(super) only: Option<Answer>,
    pub(super) summary: Summary,
}

/// A wrong answer.
#[derive(Debug, Serialize)]
struct Wrong {
    #[serde(flatten)]
    answer: Answer,
    /// The command that runs the problem again.
    repeat: String,
}

/// The JSON of the command.
#[derive(Debug, Serialize)]
pub(super) struct Proof {
    #[serde(flatten)]
    about: About,
    strength: &'static str,
    problems: usize,
    open: usize,
    right: usize,
    unsupported: usize,
    wrong: usize,
    exits: usize,
    /// Reasons for unsupported problems, most frequent first.
    reasons: Vec<(String, usize)>,
    bad: Vec<Wrong>,
    #[serde(skip_serializing_if = "Option::is_none")]
    only: Option<Answer>,
    /// Combinations of features without a problem that the executor supports.
    unproven: Vec<Vec<String>>,
    state: String,
    /// The ledger from all answers in the state, for cuDNN.
    #[serde(skip_serializing_if = "Option::is_none")]
    ledger: Option<Written>,
    seconds: f64,
}

/// A ledger that was written.
#[derive(Debug, Serialize)]
struct Written {
    file: String,
    #[serde(flatten)]
    facts: LedgerFacts,
}

/// Returns the command that runs a problem again.
pub(super) fn repeat(args: &ProveArgs, problem: &str) -> String {
    let paths = [("--state", &args.state), ("--cudnn", &args.places.cudnn), ("--driver", &args.places.driver)];
    let paths = paths.into_iter().filter_map(|(option, path)| Some(format!(" {option} {}", quoted(&path.as_ref()?.to_string_lossy()))));
    format!("cargo sdpa prove {}{} --only {}", args.executor, paths.collect::<String>(), quoted(problem))
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@%,".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

impl Proof {
    pub(super) fn of(proven: Proven, repeat: &dyn Fn(&str) -> String) -> Proof {
        let Proven { about, strength, problems, open, unproven, state, ledger, seconds, only, summary } = proven;
        let [right, unsupported, wrong, exits] =
            [Verdict::Right, Verdict::Unsupported, Verdict::Wrong, Verdict::Exit].map(|verdict| summary.count(verdict));
        let mut reasons: Vec<(String, usize)> = summary.reasons.into_iter().collect();
        reasons.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        let bad = summary.bad.into_iter().map(|answer| Wrong { repeat: repeat(&answer.name), answer }).collect();
        let (strength, state) = (strength.name(), state.display().to_string());
        let ledger = ledger.map(|(ledger, file)| Written { file: file.display().to_string(), facts: LedgerFacts::new(&ledger) });
        Proof { about, strength, problems, open, right, unsupported, wrong, exits, reasons, bad, only, unproven, state, ledger, seconds }
    }

    pub(super) fn outcome(&self) -> Outcome {
        if self.bad.is_empty() { Outcome::Good } else { Outcome::PastTolerance }
    }

    pub(super) fn text(&self) -> String {
        let mut table = Table::default();
        table.row("executor", self.about.to_string());
        match &self.only {
            Some(answer) => {
                let verdict = match answer.verdict {
                    Verdict::Right => "right",
                    Verdict::Unsupported => "unsupported",
                    Verdict::Wrong => "wrong",
                    Verdict::Exit => "exit",
                };
                table.row("problem", &answer.name);
                table.rows("features", answer.features.iter().cloned());
                table.row("answer", format!("{verdict}: {}", answer.told));
            }
            None => {
                table.row("problems", format!("{} of strength {}", self.problems, self.strength));
                let Proof { right, unsupported, wrong, exits, open, .. } = self;
                table.row("answers", format!("{right} right, {unsupported} unsupported, {wrong} wrong, {exits} exits, {open} open"));
                table.rows("unsupported", self.reasons.iter().take(REASONS).map(|(why, n)| format!("{n}: {why}")));
                table.row("unproven", format!("{} combinations of features without a problem", self.unproven.len()));
            }
        }
        table.row("state", &self.state);
        table.rows("ledger", self.ledger.iter().map(|ledger| format!("{}\n{}", ledger.file, ledger.facts.text())));
        table.row("time", format!("{:.0} s", self.seconds));
        for Wrong { answer, repeat } in &self.bad {
            let features = if self.only.is_some() { String::new() } else { format!(" ({})", answer.features.join("; ")) };
            table.row("wrong", format!("{}{features}: {}\n{repeat}", answer.name, answer.told));
        }
        table.render()
    }
}

/// The result of `--remove`.
#[derive(Debug, Serialize)]
pub(super) struct Removed {
    pub(super) state: PathBuf,
    /// Whether the file existed.
    pub(super) removed: bool,
    /// Number of ledgers that were removed too.
    pub(super) ledgers: usize,
}

impl Removed {
    pub(super) fn answer(&self, json: bool) -> Result<Told, Failure> {
        let what = if self.removed { "removed" } else { "nothing to remove" };
        let text = || {
            let mut table = Table::default();
            table.row(what, self.state.display().to_string());
            if self.ledgers > 0 {
                table.row("ledgers", format!("{} removed", self.ledgers));
            }
            table.render()
        };
        Told::new(json, self, text, Outcome::Good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_shells() {
        assert_eq!(["/tmp/a.b", "two-way 5", "it's", "", "a$b"].map(quoted), ["/tmp/a.b", "'two-way 5'", r"'it'\''s'", "''", "'a$b'"]);
    }
}
