//! The results of commands: answers, failures and exit codes.

use crate::printable::{brief, printable, printable_json};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;

/// The outcome of a command that gave an answer. It determines the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The command succeeded.
    Good,
    /// The results are past a tolerance. In a proof, a process may also have crashed.
    PastTolerance,
    /// The results are within the tolerances, but one of the tolerances would accept any result.
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

/// The output of a command, rendered as text or JSON.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) rendered: String,
    pub(crate) outcome: Outcome,
}

impl Answer {
    /// Renders a value as the output of a command: as JSON, or as `text`.
    pub(crate) fn new(json: bool, value: &impl Serialize, text: impl FnOnce() -> String, outcome: Outcome) -> Result<Answer, Failure> {
        let rendered = if json {
            printable_json(&serde_json::to_string_pretty(value).map_err(|e| Failure::environment("JSON", e))?)
        } else {
            printable(text().trim_end())
        };
        Ok(Answer { rendered, outcome })
    }
}

/// One message about a problem, on one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Line {
    /// The option, file or executor that the message is about.
    pub(crate) about: String,
    /// The message.
    pub(crate) message: String,
}

impl Line {
    pub(crate) fn new(about: impl Display, message: impl Display) -> Line {
        let one_line = |text: String| printable(&brief(&text.trim().replace("\r\n", "\n").replace(['\n', '\r'], "; ")));
        Line { about: one_line(about.to_string()), message: one_line(message.to_string()) }
    }
}

/// The reason why a command gave no answer, named after what the user must change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The arguments or the input file have mistakes.
    Mistakes(Vec<Line>),
    /// The requested executor is not available or does not support the problem.
    Executor(Vec<Line>),
    /// The device, the disk or the memory failed.
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

/// All mistakes in the arguments and the input that were found so far.
#[derive(Debug, Default)]
pub(crate) struct Mistakes {
    lines: Vec<Line>,
    /// Number of mistakes that are only counted.
    more: usize,
}

/// Maximum number of mistakes that are listed.
const LINES: usize = 200;

impl Mistakes {
    pub(crate) fn add(&mut self, about: impl Display, message: impl Display) {
        self.more += usize::from(self.lines.len() >= LINES);
        if self.lines.len() < LINES {
            self.lines.push(Line::new(about, message));
        }
    }

    /// Adds a mistake unless it is listed already.
    pub(crate) fn add_once(&mut self, about: impl Display, message: impl Display) {
        let (about, message) = (about.to_string(), message.to_string());
        if !self.lines.iter().any(|line| (&line.about, &line.message) == (&about, &message)) {
            self.add(about, message);
        }
    }

    /// Returns the value of `result`, or adds its error as a mistake and returns `None`.
    pub(crate) fn take<T>(&mut self, about: impl Display, result: Result<T, impl Display>) -> Option<T> {
        result.map_err(|e| self.add(about, e)).ok()
    }

    /// Returns the value if there are no mistakes, and otherwise all mistakes as a failure.
    pub(crate) fn finish<T>(mut self, value: Option<T>) -> Result<T, Failure> {
        match value {
            Some(value) if self.lines.is_empty() => Ok(value),
            Some(_) | None => {
                if self.more > 0 {
                    self.lines.push(Line::new("further mistakes", format!("{} are not listed", self.more)));
                }
                Err(Failure::Mistakes(self.lines))
            }
        }
    }
}

/// Prints the result of a command and returns the exit code.
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
    // If stderr is closed, the exit code still reports the failure.
    printed.ok();
    code
}

/// Prints clap's output: help, the version, or an unknown argument.
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
    // Escape control characters in the user's input. The text has no colour codes from clap, because `to_string` omits them.
    writeln!(std::io::stderr(), "{}", printable(&brief_lines(&error.to_string()))).ok();
    Failure::Mistakes(Vec::new()).code()
}

/// Shortens long lines of a text.
fn brief_lines(text: &str) -> String {
    text.trim_end().lines().map(brief).collect::<Vec<_>>().join("\n")
}

/// Writes to stdout. A closed pipe (`| head`) is not an error.
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
        assert_eq!((lines.len(), lines[200].message.as_str()), (201, "100 are not listed"));
    }
}
