//! Answers that were kept, back from their text.

use crate::offline::{Answer, Asked, PROFILES, Wanted};
use sdpa::Reason;
use sdpa::cudnn::lower::Form;
use std::collections::BTreeMap;

/// The answers of a [`detail`](super::detail), engines without knobs and reasons as texts.
///
/// # Errors
/// The line that is none of one.
pub fn read(detail: &str) -> Result<Vec<Asked>, String> {
    let notes: BTreeMap<&str, &str> = detail.lines().filter_map(|line| line.strip_prefix('[')?.split_once("] ")).collect();
    let mut wanted = Wanted::Any;
    let mut asked = Vec::new();
    for line in detail.lines().filter(|line| !line.is_empty() && !line.starts_with('[')) {
        if line.starts_with('#') {
            wanted = if line == UNIFIED { Wanted::Unified } else { wanted };
            continue;
        }
        let (row, cells) = line.rsplit_once(": ").ok_or_else(|| format!("no answers: {line}"))?;
        for (cell, (profile, _)) in cells.split(" | ").zip(PROFILES) {
            let answer = answer(cell, &notes).ok_or_else(|| format!("no answer: {cell} in {line}"))?;
            asked.push(Asked { profile: profile.to_owned(), row: row.to_owned(), wanted, answer });
        }
    }
    Ok(asked)
}

/// The line in front of what the unified form says by itself.
pub(super) const UNIFIED: &str = "# the unified form only";

fn answer(cell: &str, notes: &BTreeMap<&str, &str>) -> Option<Answer> {
    if let Some(numbers) = cell.strip_prefix("unsupported ") {
        let reason = |number: &str| Some(Reason::Absent((*notes.get(number.strip_prefix('[')?.strip_suffix(']')?)?).to_owned()));
        return numbers.split(' ').map(reason).collect::<Option<_>>().map(Answer::Unsupported);
    }
    let (form, engine) = match cell.split_once(' ') {
        Some((form, engine)) => (form, Some(engine.to_owned())),
        None => (cell, None),
    };
    let form = [Form::Composite, Form::Unified].into_iter().find(|known| known.name() == form)?;
    Some(Answer::Supported { form, engine })
}
