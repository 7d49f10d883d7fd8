//! How the tool ends: answers, failures and exit codes.

use crate::printable::{brief, printable, printable_json};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;

/// How an answer turned out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As asked.
    Good,
    /// Computed, and past the tolerance; of a proof also a process that ended.
    PastTolerance,
    /// Computed, and the tolerance forgives anything.
    Undecided,
    /// No executor works.
    NoExecutor,
}

impl Outcome {
    pub(crate) fn code(self) -> u8 {
        match self {
            Outcome::Good => 0,
            Outcome::PastTolerance => 1,
            Outcome::Undecided => 5,
            Outcome::NoExecutor => 3,
        }
    }
}

/// What a command has to say, rendered in the way that was asked for.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) rendered: String,
    pub(crate) outcome: Outcome,
}

impl Answer {
    /// An answer as text or as JSON.
    pub(crate) fn new(json: bool, value: &impl Serialize, text: impl FnOnce() -> String, outcome: Outcome) -> Result<Answer, Failure> {
        let rendered = if json {
            printable_json(&serde_json::to_string_pretty(value).map_err(|e| Failure::environment("JSON", e))?)
        } else {
            printable(text().trim_end())
        };
        Ok(Answer { rendered, outcome })
    }
}

/// One thing that is wrong, on one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Line {
    /// An option, a file, an executor.
    pub(crate) about: String,
    /// What is wrong with it.
    pub(crate) message: String,
}

impl Line {
    pub(crate) fn new(about: impl Display, message: impl Display) -> Line {
        let one_line = |text: String| printable(&brief(&text.trim().replace("\r\n", "\n").replace(['\n', '\r'], "; ")));
        Line { about: one_line(about.to_string()), message: one_line(message.to_string()) }
    }
}

/// Why there is no answer, by who must act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The user: arguments or the input file.
    Mistakes(Vec<Line>),
    /// The executor asked for is not there or does not run the problem.
    Executor(Vec<Line>),
    /// The device, the disk, memory.
    Environment(Vec<Line>),
}

impl Failure {
    pub(crate) fn environment(about: impl Display, message: impl Display) -> Failure {
        Failure::Environment(vec![Line::new(about, message)])
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::Mistakes(_) => 2,
            Failure::Executor(_) => 3,
            Failure::Environment(_) => 4,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Failure::Mistakes(_) => "mistakes",
            Failure::Executor(_) => "executor",
            Failure::Environment(_) => "environment",
        }
    }

    pub(crate) fn lines(&self) -> &[Line] {
        match self {
            Failure::Mistakes(lines) | Failure::Executor(lines) | Failure::Environment(lines) => lines,
        }
    }
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    exit_code: u8,
    kind: &'a str,
    lines: &'a [Line],
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    error: ErrorBody<'a>,
}

/// Everything collected that is wrong with what the user gave.
#[derive(Debug, Default)]
pub(crate) struct Mistakes {
    lines: Vec<Line>,
    /// Those that are counted only.
    more: usize,
}

/// Mistakes that are told one by one.
const LINES: usize = 200;

impl Mistakes {
    pub(crate) fn add(&mut self, about: impl Display, message: impl Display) {
        self.more += usize::from(self.lines.len() >= LINES);
        if self.lines.len() < LINES {
            self.lines.push(Line::new(about, message));
        }
    }

    /// Adds a mistake unless it is there.
    pub(crate) fn add_once(&mut self, about: impl Display, message: impl Display) {
        let (about, message) = (about.to_string(), message.to_string());
        if !self.lines.iter().any(|line| (&line.about, &line.message) == (&about, &message)) {
            self.add(about, message);
        }
    }

    /// The value, or `None` and one mistake more.
    pub(crate) fn take<T>(&mut self, about: impl Display, result: Result<T, impl Display>) -> Option<T> {
        result.map_err(|e| self.add(about, e)).ok()
    }

    /// The value if nothing at all is wrong.
    pub(crate) fn finish<T>(mut self, value: Option<T>) -> Result<T, Failure> {
        match value {
            Some(value) if self.lines.is_empty() => Ok(value),
            Some(_) | None => {
                if self.more > 0 {
                    self.lines.push(Line::new("and more", format!("{} mistakes besides these", self.more)));
                }
                Err(Failure::Mistakes(self.lines))
            }
        }
    }
}

/// Prints the result of a command; the exit code.
pub(crate) fn print(result: Result<Answer, Failure>, json: bool) -> u8 {
    match result {
        Ok(answer) => match stdout(&answer.rendered) {
            Ok(()) => answer.outcome.code(),
            Err(e) => print_failure(&Failure::environment("stdout", e), false),
        },
        Err(failure) => print_failure(&failure, json),
    }
}

fn print_failure(failure: &Failure, json: bool) -> u8 {
    let code = failure.code();
    let body = ErrorBody { exit_code: code, kind: failure.kind(), lines: failure.lines() };
    let printed = if json {
        let text = serde_json::to_string_pretty(&ErrorObject { error: body }).unwrap_or_default();
        stdout(&printable_json(&text))
    } else {
        failure.lines().iter().try_for_each(|line| writeln!(std::io::stderr(), "error: {}: {}", line.about, line.message))
    };
    // Nobody is left to tell; the exit code still does.
    printed.ok();
    code
}

/// Prints what clap has to say: help, the version, or an argument that it does not know.
pub(crate) fn print_usage(error: &clap::Error, json: bool) -> u8 {
    if !error.use_stderr() {
        return if stdout(error.to_string().trim_end()).is_ok() { 0 } else { 4 };
    }
    if json {
        let text = error.to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let line = Line::new("arguments", first.strip_prefix("error: ").unwrap_or(first));
        return print_failure(&Failure::Mistakes(vec![line]), true);
    }
    // What was typed is in it, colours of its own are not.
    writeln!(std::io::stderr(), "{}", printable(&brief_lines(&error.to_string()))).ok();
    Failure::Mistakes(Vec::new()).code()
}

/// The same text with no line that is too long.
fn brief_lines(text: &str) -> String {
    text.trim_end().lines().map(brief).collect::<Vec<_>>().join("\n")
}

/// A reader that has heard enough (`| head`) is not an error.
fn stdout(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_the_help() {
        let all = [Outcome::Good, Outcome::PastTolerance, Outcome::NoExecutor, Outcome::Undecided];
        assert_eq!(all.map(Outcome::code), [0, 1, 3, 5]);
        let codes = [Failure::Mistakes(Vec::new()), Failure::Executor(Vec::new()), Failure::environment("a", "b")].map(|f| f.code());
        assert_eq!(codes, [2, 3, 4]);
    }

    #[test]
    fn a_value_with_mistakes_is_no_value_and_lines_are_lines() {
        let mut mistakes = Mistakes::default();
        assert_eq!(mistakes.take("--a", Err::<u8, _>("two\nlines")), None);
        mistakes.add("--b", "bad");
        let lines = vec![Line::new("--a", "two; lines"), Line::new("--b", "bad")];
        assert_eq!(mistakes.finish(Some(1)), Err(Failure::Mistakes(lines)));
        assert_eq!(Mistakes::default().finish(Some(1)), Ok(1));
        let mut many = Mistakes::default();
        (0..300).for_each(|n| many.add(n, "bad"));
        let Err(Failure::Mistakes(lines)) = many.finish(Some(1)) else { panic!("300 mistakes") };
        assert_eq!((lines.len(), lines[200].message.as_str()), (201, "100 mistakes besides these"));
    }
}
