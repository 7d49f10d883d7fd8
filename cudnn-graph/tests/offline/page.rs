//! The table of the page `docs/graph-support.md`.

use crate::DEVICES;
use cudnn_graph::{DType, Version};
use serde::{Deserialize, Serialize};

/// The runtimes that are asked.
pub(crate) const RUNTIMES: [&str; 2] = ["9.19", "9.27"];

/// The answer of a runtime about a graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// There is a plan.
    Planned,
    /// There is an engine; no plan was built, or building it needs the device.
    Offered,
    /// The graph needs a newer version.
    Needs(Version),
    /// cuDNN's reason.
    Refused(String),
}

/// The answer of a runtime about one graph on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) pattern: String,
    pub(crate) dtype: DType,
    pub(crate) device: String,
    pub(crate) outcome: Outcome,
}

const BEGIN: &str = "<!-- The rest of this page is written by cudnn-graph/tests/offline. -->\n";

/// Returns the page with the tables of these answers, one list per runtime.
pub(crate) fn with_table(page: &str, all: &[Vec<Answer>]) -> String {
    let end = page.find(BEGIN).map_or(page.len(), |at| at + BEGIN.len());
    format!("{}\n{}", &page[..end], tables(all))
}

fn cell(answers: &[Answer], pattern: &str, dtype: DType) -> String {
    let of = |device: &str| answers.iter().find(|a| a.pattern == pattern && a.dtype == dtype && a.device == device).map(|a| &a.outcome);
    let needs = DEVICES.iter().find_map(|(_, device)| match of(device) {
        Some(Outcome::Needs(version)) => Some(version),
        Some(Outcome::Planned | Outcome::Offered | Outcome::Refused(_)) | None => None,
    });
    if let Some(version) = needs {
        return format!("no: since {}.{}", version.major, version.minor);
    }
    let works: Vec<&str> = DEVICES
        .iter()
        .map(|(_, device)| *device)
        .filter(|device| match of(device) {
            Some(Outcome::Planned | Outcome::Offered) => true,
            Some(Outcome::Needs(_) | Outcome::Refused(_)) | None => false,
        })
        .collect();
    match works.len() {
        0 => "no".to_owned(),
        n if n == DEVICES.len() => "yes".to_owned(),
        _ => works.join(", "),
    }
}

fn tables(all: &[Vec<Answer>]) -> String {
    let mut keys: Vec<(&str, DType)> = Vec::new();
    for answer in &all[0] {
        let key = (answer.pattern.as_str(), answer.dtype);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let mut rows: Vec<(&str, Vec<&str>, Vec<String>)> = Vec::new();
    for (pattern, dtype) in keys {
        let cells: Vec<String> = all.iter().map(|answers| cell(answers, pattern, dtype)).collect();
        match rows.last_mut() {
            Some((name, types, before)) if *name == pattern && *before == cells => types.push(dtype.name()),
            Some(_) | None => rows.push((pattern, vec![dtype.name()], cells)),
        }
    }
    let mut text = format!("| operation | types | {} |\n|---|---|{}\n", RUNTIMES.join(" | "), "---|".repeat(RUNTIMES.len()));
    for (pattern, types, cells) in &rows {
        text.push_str(&format!("| {pattern} | {} | {} |\n", types.join(", "), cells.join(" | ")));
    }
    let mut first = rows;
    first.dedup_by_key(|(pattern, _, _)| *pattern);
    text.push_str("\n## Reasons\n\ncuDNN gives these reasons for the first type of an operation, on the first device that it refuses.\n\n");
    text.push_str("| operation | version | device | reason |\n|---|---|---|---|\n");
    for (version, answers) in RUNTIMES.iter().zip(all) {
        let mut told: Vec<&str> = Vec::new();
        for answer in answers {
            let Outcome::Refused(reason) = &answer.outcome else { continue };
            if !told.contains(&answer.pattern.as_str()) {
                told.push(&answer.pattern);
                text.push_str(&format!("| {} | {version} | {} | {} |\n", answer.pattern, answer.device, short(reason)));
            }
        }
    }
    text.push_str("\n## Plans that need the device\n\nPlans of these operations, for their first type, load a kernel when they are finalized, so they were not finished:\n\n");
    for (version, answers) in RUNTIMES.iter().zip(all) {
        for (pattern, types, _) in &first {
            let on = |a: &&Answer| a.pattern == *pattern && a.dtype.name() == types[0] && a.outcome == Outcome::Offered;
            let devices: Vec<&str> = answers.iter().filter(on).map(|a| a.device.as_str()).collect();
            if !devices.is_empty() {
                text.push_str(&format!("- {pattern}, {version}: {}\n", devices.join(", ")));
            }
        }
    }
    text
}

/// Returns the lines of a reason in one, without those that every refusal has, and without the lines of engines for other devices.
fn short(reason: &str) -> String {
    let said = reason.replace("no engine supports the graph:\n", "").replace("cuDNN offers none: ", "");
    let said = said.replace("cuDNN offers none, and gives no reason", "no engine, and no reason");
    let parts: Vec<&str> = said.split([';', '\n']).map(str::trim).filter(|part| !part.is_empty()).collect();
    let own: Vec<&str> = parts.iter().copied().filter(|part| !part.contains("engine is only supported since")).collect();
    let kept = if own.is_empty() { &parts } else { &own };
    kept.iter().take(2).copied().collect::<Vec<_>>().join("; ").replace('|', "/")
}
