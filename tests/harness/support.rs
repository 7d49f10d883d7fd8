//! Answers of the offline runtimes as text: the table of `docs/support.md`, and a line for every problem.

use crate::matrix::{AXES, Row};
use crate::offline::{Answer, Asked, PROFILES, Wanted};
use cudnn_graph::DeviceProfile;
use std::collections::BTreeMap;
use std::fmt::Write;

type Answers<'a> = BTreeMap<(Wanted, &'a str, &'a str), &'a Answer>;

fn index(asked: &[Asked]) -> Answers<'_> {
    asked.iter().map(|a| ((a.wanted, a.row.as_str(), a.profile.as_str()), &a.answer)).collect()
}

/// Refusals in the order of their first appearance; a table names them by number.
#[derive(Default)]
struct Notes(Vec<String>);

impl Notes {
    fn number(&mut self, text: String) -> usize {
        let at = self.0.iter().position(|t| *t == text).unwrap_or_else(|| {
            self.0.push(text);
            self.0.len() - 1
        });
        at + 1
    }
}

fn cell(answers: &[&Answer], notes: &mut Notes) -> String {
    let mut takes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let (mut declined, mut why) = (0, Vec::new());
    for answer in answers {
        match answer {
            Answer::Takes { form, engine } => {
                let engines = takes.entry(form.to_string()).or_default();
                // Engines are named, not their knobs, which fill a line and say little.
                let name = engine.as_deref().and_then(|tag| tag.split('_').next());
                engines.extend(name.filter(|n| !engines.iter().any(|e| e == n)).map(str::to_owned));
            }
            Answer::Declines(reasons) => {
                declined += 1;
                why.extend(reasons.iter().map(|reason| notes.number(reason.to_string())));
            }
            Answer::Fails(text) => {
                declined += 1;
                why.push(notes.number(format!("failed: {text}")));
            }
        }
    }
    let mut parts: Vec<String> = Vec::new();
    for (form, mut engines) in takes {
        engines.sort_by_key(|e| (e.len(), e.clone()));
        parts.push(format!("{form} {}", engines.join(", ")).trim().to_owned());
    }
    if declined > 0 {
        why.sort_unstable();
        why.dedup();
        let notes: Vec<String> = why.iter().map(|n| format!("[{n}]")).collect();
        let count = if declined == answers.len() { String::new() } else { format!("{declined} ") };
        parts.push(format!("{count}declined {}", notes.join(" ")));
    }
    parts.join("; ")
}

/// Values of one feature in the order of their first appearance, each with its rows.
fn groups(rows: &[Row], axis: usize) -> Vec<(&str, Vec<&str>)> {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for row in rows {
        let value = row.features[axis].as_str();
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, names)) => names.push(&row.name),
            None => groups.push((value, vec![&row.name])),
        }
    }
    groups
}

const HEAD: &str = "# What cuDNN takes

Made by `tests/offline.rs` from the answers of two runtimes on machines without a GPU, compared on every run; `scripts/support-table.sh`
rewrites it and compiles every problem that is taken. What is taken has been asked for, not run: numbers need a GPU.

A line stands for all problems that share a feature, in as many combinations with the other features as its count says. A cell
has the form that is taken and the engines that cuDNN offers first for those problems, then what is declined, and why. Where rows
are not multiples of 16 bytes apart, operands are copied first, and engines are not named.
";

/// The table of `docs/support.md`.
pub fn table(rows: &[Row], runtimes: &[(&str, Vec<Asked>)]) -> String {
    let mut text = HEAD.to_owned();
    let mut notes = Notes::default();
    let devices: Vec<String> = PROFILES
        .iter()
        .map(|(name, json)| match DeviceProfile::from_json(json) {
            Ok(profile) => format!("{} ({}.{})", name.to_uppercase(), profile.sm() / 10, profile.sm() % 10),
            Err(e) => format!("{name}: {e}"),
        })
        .collect();
    for (runtime, asked) in runtimes {
        let answers = index(asked);
        for wanted in Wanted::ALL {
            if !answers.keys().any(|(w, ..)| *w == wanted) {
                continue;
            }
            let which = match wanted {
                Wanted::Any => "",
                Wanted::Unified => ", the unified form only",
            };
            let _ = write!(text, "\n## cuDNN {runtime}{which}\n\n| | problems | {} |\n|---|---|", devices.join(" | "));
            text.push_str(&"---|".repeat(PROFILES.len()));
            text.push('\n');
            for (axis, title) in AXES.iter().enumerate() {
                for (value, names) in groups(rows, axis) {
                    let _ = write!(text, "| {title}: {value} | {} |", names.len());
                    for (profile, _) in PROFILES {
                        let here: Vec<&Answer> = names.iter().filter_map(|name| answers.get(&(wanted, *name, profile)).copied()).collect();
                        let _ = write!(text, " {} |", cell(&here, &mut notes).replace('|', "\\|"));
                    }
                    text.push('\n');
                }
            }
        }
    }
    text.push_str("\n## Why\n\n");
    for (n, note) in notes.0.iter().enumerate() {
        let _ = writeln!(text, "- [{}] {note}", n + 1);
    }
    text
}

/// A line for every problem that one runtime was asked about.
pub fn detail(rows: &[Row], asked: &[Asked]) -> String {
    let answers = index(asked);
    let mut notes = Notes::default();
    let names: Vec<&str> = PROFILES.iter().map(|p| p.0).collect();
    let mut text = format!("# problem: {}\n", names.join(" | "));
    for wanted in Wanted::ALL {
        let mut lines = String::new();
        for row in rows {
            let here: Vec<String> = PROFILES
                .iter()
                .filter_map(|(profile, _)| answers.get(&(wanted, row.name.as_str(), *profile)))
                .map(|answer| cell(&[answer], &mut notes))
                .collect();
            if !here.is_empty() {
                let _ = writeln!(lines, "{}: {}", row.name, here.join(" | "));
            }
        }
        if wanted == Wanted::Unified && !lines.is_empty() {
            text.push_str("\n# the unified form only\n");
        }
        text.push_str(&lines);
    }
    text.push('\n');
    for (n, note) in notes.0.iter().enumerate() {
        let _ = writeln!(text, "[{}] {note}", n + 1);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa::Reason;
    use sdpa::lower::Form;

    #[test]
    fn cells_say_what_is_taken_and_why_not() {
        let takes = |engine: &str| Answer::Takes { form: Form::Composite, engine: Some(engine.to_owned()) };
        let declines = |why: &str| Answer::Declines(vec![Reason::Absent(why.to_owned())]);
        let mut notes = Notes::default();
        let mut cell = |answers: &[Answer]| super::cell(&answers.iter().collect::<Vec<_>>(), &mut notes);
        assert_eq!(cell(&[takes("eng10"), takes("eng9"), takes("eng10")]), "composite eng9, eng10");
        assert_eq!(cell(&[declines("x"), declines("x")]), "declined [1]");
        assert_eq!(cell(&[takes("eng2"), declines("y"), declines("x")]), "composite eng2; 2 declined [1] [2]");
    }
}
