//! The tables of score_mods and masks, every pass in one cell.

use super::cells::{Notes, word};
use super::{Answers, answer, devices};
use crate::matrix::{Kind, Row};
use crate::offline::{PROFILES, Wanted};
use std::fmt::Write;

pub(super) const HEAD: &str = "
## Score_mods and masks

At batch 2, 8 query and 2 key heads, 512 queries and keys, dims of 64, bf16. A cell has the first engine for each pass, or why there is
none: forward / backward, and for a bias its backward pass with the gradient of the bias. Masks that are used together have an `&`
between them. Problems with other extents are the cases of `sdpa/conformance/cases/score_mod.toml`, whose answers are in `tests/snapshots/support`.
";

/// Rows of the library by what was asked for, in the order of the rows.
fn pairs(rows: &[Row]) -> Vec<([&str; 2], Vec<&Row>)> {
    let mut pairs: Vec<([&str; 2], Vec<&Row>)> = Vec::new();
    for row in rows {
        let Kind::Library { score_mods, masks } = &row.kind else { continue };
        let pair = [score_mods.as_str(), masks.as_str()];
        match pairs.iter_mut().find(|(p, _)| *p == pair) {
            Some((_, passes)) => passes.push(row),
            None => pairs.push((pair, vec![row])),
        }
    }
    pairs
}

/// Names in backquotes; a phrase that says that there are none as it is.
fn quoted(names: &str, between: &str) -> String {
    // Commas inside of an expression are followed by a space as well, and are no commas between names.
    let names: Vec<&str> = if names.contains('(') { vec![names] } else { names.split(", ").collect() };
    let quoted = |name: &str| if name.starts_with("no ") { name.to_owned() } else { format!("`{name}`") };
    names.into_iter().map(quoted).collect::<Vec<_>>().join(between)
}

/// The table of one runtime: masks that have the same answers with a score_mod share a line.
pub(super) fn table(rows: &[Row], answers: &Answers<'_>, notes: &mut Notes) -> String {
    let mut lines: Vec<(&str, String, Vec<String>)> = Vec::new();
    for ([score_mods, masks], passes) in pairs(rows) {
        let mut cells = String::new();
        for (profile, _) in PROFILES {
            let words: Vec<String> =
                passes.iter().filter_map(|row| answer(answers, Wanted::Any, row, profile)).map(|a| word(a, notes)).collect();
            let _ = write!(cells, " {} |", words.join(" / "));
        }
        match lines.iter_mut().find(|(s, c, _)| *s == score_mods && *c == cells) {
            Some((_, _, all)) => all.push(quoted(masks, " & ")),
            None => lines.push((score_mods, cells, vec![quoted(masks, " & ")])),
        }
    }
    let mut text = format!("\n| score_mod | masks | {} |\n|---|---|", devices().join(" | "));
    text.push_str(&"---|".repeat(PROFILES.len()));
    text.push('\n');
    for (score_mods, cells, masks) in lines {
        let _ = writeln!(text, "| {} | {} |{cells}", quoted(score_mods, ", then "), masks.join(", "));
    }
    text + &unified(rows, answers)
}

/// What the unified form takes by itself, in a line.
fn unified(rows: &[Row], answers: &Answers<'_>) -> String {
    let library = rows.iter().filter(|row| matches!(row.kind, Kind::Library { .. }));
    let counts: Vec<String> = PROFILES
        .iter()
        .zip(devices())
        .filter_map(|((profile, _), device)| {
            let here: Vec<bool> =
                library.clone().filter_map(|row| answer(answers, Wanted::Unified, row, profile)).map(|a| a.is_supported()).collect();
            (!here.is_empty()).then(|| format!("{device} {} of {}", here.iter().filter(|t| **t).count(), here.len()))
        })
        .collect();
    if counts.is_empty() {
        String::new()
    } else {
        format!("\nForward passes that the unified form takes by itself: {}.\n", counts.join(", "))
    }
}
