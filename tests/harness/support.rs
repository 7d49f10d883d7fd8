//! Answers of the offline runtimes as text: the tables of `docs/support.md`, and a line for every problem.

mod cells;
mod library;

use crate::matrix::{AXES, Kind, Row};
use crate::offline::{Answer, Asked, PROFILES, Wanted};
use cells::{Notes, cell};
use cudnn_graph::DeviceProfile;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

type Answers<'a> = BTreeMap<(Wanted, &'a str, &'a str), &'a Answer>;

fn index(asked: &[Asked]) -> Answers<'_> {
    asked.iter().map(|a| ((a.wanted, a.row.as_str(), a.profile.as_str()), &a.answer)).collect()
}

fn answer<'a>(answers: &Answers<'a>, wanted: Wanted, row: &Row, profile: &str) -> Option<&'a Answer> {
    answers.get(&(wanted, row.name.as_str(), profile)).copied()
}

/// Names of the devices, with their compute capabilities.
fn devices() -> Vec<String> {
    let device = |(name, json): &(&str, &str)| match DeviceProfile::from_json(json) {
        Ok(profile) => format!("{} ({}.{})", name.to_uppercase(), profile.sm() / 10, profile.sm() % 10),
        Err(e) => format!("{name}: {e}"),
    };
    PROFILES.iter().map(device).collect()
}

/// Values of one feature in the order of their first appearance, each with its rows.
fn groups<'r>(rows: &[&'r Row], axis: usize) -> Vec<(&'r str, Vec<&'r Row>)> {
    let mut groups: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in rows {
        let value = row.features[axis].as_str();
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((value, vec![row])),
        }
    }
    groups
}

const HEAD: &str = "# What cuDNN takes

Made by `tests/offline/asked.rs` from the answers of two runtimes on machines without a GPU, compared on every run; `scripts/support-table.sh`
rewrites it and compiles every problem that is taken. What is taken has been asked for, not run: numbers need a GPU.

A line stands for all problems that share a feature, in as many combinations with the other features as its count says. A cell
has the form that is taken and the engines that cuDNN offers first for those problems, then what is declined, and why. Where rows
are not multiples of 16 bytes apart, operands are copied first, and engines are not named. Packed documents,
sinks, dropout, 8-bit floats and paged caches have tables of their own, and so have [score_mods and masks that are no bands](#score_mods-and-masks); [what is declined](#why) stands at the
end, in cuDNN's own words where it was asked.
";

/// The tables of `docs/support.md`.
pub fn table(rows: &[Row], runtimes: &[(&str, Vec<Asked>)]) -> String {
    let mut text = HEAD.to_owned();
    let mut notes = Notes::default();
    for (kind, what) in [
        (Kind::General, ""),
        (Kind::Packed, ", packed documents"),
        (Kind::Sink, ", sinks"),
        (Kind::Dropout, ", dropout"),
        (Kind::Fp8, ", 8-bit floats"),
        (Kind::Paged, ", paged caches"),
    ] {
        for (runtime, asked) in runtimes {
            let answers = index(asked);
            for (backward, pass) in [(false, "forward"), (true, "backward")] {
                let rows: Vec<&Row> = rows.iter().filter(|row| row.kind == kind && row.spec.is_backward() == backward).collect();
                for wanted in Wanted::ALL {
                    let which = match wanted {
                        Wanted::Any => "",
                        Wanted::Unified => ", the unified form only",
                    };
                    let body = features(&rows, wanted, &answers, &mut notes);
                    if !body.is_empty() {
                        let _ = write!(text, "\n## cuDNN {runtime}{what}, {pass}{which}\n\n{body}");
                    }
                }
            }
        }
    }
    text.push_str(library::HEAD);
    for (runtime, asked) in runtimes {
        text.push_str(&library::table(rows, runtime, &index(asked), &mut notes));
    }
    text.push_str("\n## Why\n\n");
    for (n, note) in notes.lines() {
        let _ = writeln!(text, "- [{n}] {note}");
    }
    text
}

/// A line for every value of every feature that differs; a sentence where nothing is taken.
fn features(rows: &[&Row], wanted: Wanted, answers: &Answers<'_>, notes: &mut Notes) -> String {
    let asked = |row: &&Row| PROFILES.iter().any(|(profile, _)| answer(answers, wanted, row, profile).is_some());
    let rows: Vec<&Row> = rows.iter().copied().filter(asked).collect();
    let on =
        |rows: &[&Row], profile: &str| -> Vec<&Answer> { rows.iter().filter_map(|row| answer(answers, wanted, row, profile)).collect() };
    let all: Vec<&Answer> = PROFILES.iter().flat_map(|(profile, _)| on(&rows, profile)).collect();
    if !all.iter().any(|a| a.is_taken()) {
        return if all.is_empty() { String::new() } else { format!("Every one of {} problems is {}.\n", rows.len(), cell(&all, notes)) };
    }
    let mut text = format!("| | problems | {} |\n|---|---|{}\n", devices().join(" | "), "---|".repeat(PROFILES.len()));
    for (axis, title) in AXES.iter().enumerate() {
        let groups = groups(&rows, axis);
        for (value, rows) in groups.iter().filter(|_| groups.len() > 1) {
            let _ = write!(text, "| {title}: {value} | {} |", rows.len());
            for (profile, _) in PROFILES {
                let _ = write!(text, " {} |", cell(&on(rows, profile), notes).replace('|', "\\|"));
            }
            text.push('\n');
        }
    }
    text
}

/// The lines of a [`detail`] with reasons in place of their numbers, each behind the heading that it stands under.
pub fn told_out(detail: &str) -> BTreeSet<String> {
    let notes: BTreeMap<&str, &str> = detail.lines().filter_map(|line| line.strip_prefix('[')?.split_once("] ")).collect();
    let cell = |cell: &str| {
        let mut parts = cell.split(" [");
        let base = parts.next().unwrap_or_default().to_owned();
        let reasons: BTreeSet<&str> = parts.filter_map(|number| notes.get(number.trim_end_matches(']')).copied()).collect();
        format!("{base} {reasons:?}")
    };
    let mut under = "";
    let mut lines = BTreeSet::new();
    for line in detail.lines().filter(|line| !line.starts_with('[')) {
        if line.starts_with('#') {
            under = line;
        } else if let Some((name, cells)) = line.rsplit_once(": ") {
            lines.insert(format!("{under}; {name}: {}", cells.split(" | ").map(cell).collect::<Vec<_>>().join(" | ")));
        }
    }
    lines
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
                .filter_map(|(profile, _)| answer(&answers, wanted, row, profile))
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
    for (n, note) in notes.lines() {
        let _ = writeln!(text, "[{n}] {note}");
    }
    text
}
