//! Answers of the offline runtimes as text: a line for every problem, which is kept, and what is made of those lines: a page for each runtime, and
//! `docs/support.md` beside all of them.

mod beside;
mod cells;
mod library;
mod read;
mod stored;

pub use beside::{recorded, summary};
pub use read::read;
pub use stored::{Stored, files, stored};

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

/// Words for rows of a kind, and which these are.
type OfKind = (&'static str, fn(&Kind) -> bool);

/// The kinds of rows that tables tell apart; the general one has no words.
const KINDS: [OfKind; 7] = [
    ("", |kind| *kind == Kind::General),
    ("packed sequences", |kind| *kind == Kind::Packed),
    ("sinks", |kind| *kind == Kind::Sink),
    ("dropout", |kind| *kind == Kind::Dropout),
    ("FP8", |kind| *kind == Kind::Fp8),
    ("paged KV caches", |kind| *kind == Kind::Paged),
    ("score_mods and masks other than bands", |kind| matches!(kind, Kind::Library { .. } | Kind::LibraryCase)),
];

/// Rows of one kind and pass.
fn of_kind(rows: &[Row], is: fn(&Kind) -> bool, backward: bool) -> Vec<&Row> {
    rows.iter().filter(|row| is(&row.kind) && row.spec.is_backward() == backward).collect()
}

const PASSES: [(bool, &str); 2] = [(false, "forward"), (true, "backward")];

fn head(runtime: &str) -> String {
    format!(
        "# Problems that cuDNN {runtime} supports

This page is generated from the files in `tests/snapshots/support`: the answers of the real library on a machine without a GPU. [support.md](../support.md) compares the
versions. \"Supported\" means that cuDNN offered an engine. The problems were not run: results need a GPU.

A row counts all problems with one feature, in several combinations with the other features. A cell names the form (`composite` or `unified`) and the engines that
cuDNN offers first. Then it counts the unsupported problems; the numbers in brackets refer to [the reasons](#why) at the end of the page. If a row stride is not a
multiple of 16 bytes, operands are copied first, and no engine is named.

Packed sequences, sinks, dropout, FP8 and paged KV caches have their own tables. So have [score_mods and masks other than bands](#score_mods-and-masks).
"
    )
}

/// The page of one runtime.
pub fn page(rows: &[Row], runtime: &str, asked: &[Asked]) -> String {
    let mut text = head(runtime);
    let mut notes = Notes::default();
    let answers = index(asked);
    for (kind, is) in &KINDS[..KINDS.len() - 1] {
        for (backward, pass) in PASSES {
            let rows = of_kind(rows, *is, backward);
            for wanted in Wanted::ALL {
                let which = match wanted {
                    Wanted::Any => "",
                    Wanted::Unified => ", the unified form only",
                };
                let body = features(&rows, wanted, &answers, &mut notes);
                if !body.is_empty() {
                    let title = if kind.is_empty() { pass.to_owned() } else { format!("{kind}, {pass}") };
                    let _ = write!(text, "\n## {}{which}\n\n{body}", capital(&title));
                }
            }
        }
    }
    text.push_str(library::HEAD);
    text.push_str(&library::table(rows, &answers, &mut notes));
    text.push_str("\n## Why\n\n");
    for (n, note) in notes.lines() {
        let _ = writeln!(text, "- [{n}] {note}");
    }
    text
}

/// With a capital letter.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// A line for every value of every feature that differs; a sentence if nothing is supported.
fn features(rows: &[&Row], wanted: Wanted, answers: &Answers<'_>, notes: &mut Notes) -> String {
    let asked = |row: &&Row| PROFILES.iter().any(|(profile, _)| answer(answers, wanted, row, profile).is_some());
    let rows: Vec<&Row> = rows.iter().copied().filter(asked).collect();
    let on =
        |rows: &[&Row], profile: &str| -> Vec<&Answer> { rows.iter().filter_map(|row| answer(answers, wanted, row, profile)).collect() };
    let all: Vec<&Answer> = PROFILES.iter().flat_map(|(profile, _)| on(&rows, profile)).collect();
    if !all.iter().any(|a| a.is_supported()) {
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

/// Lines of a [`detail`] with reasons in place of their numbers, each after its heading.
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
            let _ = write!(text, "\n{}\n", read::UNIFIED);
        }
        text.push_str(&lines);
    }
    text.push('\n');
    for (n, note) in notes.lines() {
        let _ = writeln!(text, "[{n}] {note}");
    }
    text
}
