//! Recorded answers of all runtimes. The file of a runtime has the answers that differ from those of the runtime before it.

use super::cells::recorded_parts;
use super::{detail, read};
use crate::golden;
use crate::matrix::Row;
use crate::offline::{Asked, RECORDED, Wanted};
use std::collections::BTreeMap;

/// Answers of each runtime of [`RECORDED`], in that order.
pub type Stored = Vec<(&'static str, Vec<Asked>)>;

/// One question about all devices.
type Question<'a> = (Wanted, &'a str);

fn by_question(asked: &[Asked]) -> BTreeMap<Question<'_>, Vec<&Asked>> {
    let mut questions: BTreeMap<Question<'_>, Vec<&Asked>> = BTreeMap::new();
    for a in asked {
        questions.entry((a.wanted, a.row.as_str())).or_default().push(a);
    }
    questions
}

fn file(runtime: &str) -> String {
    format!("tests/snapshots/support/{runtime}.txt")
}

/// Reads the answers of every runtime.
///
/// # Errors
/// A file that cannot be read, or a line that is no answer.
pub fn stored() -> Result<Stored, String> {
    let mut all = Stored::new();
    for runtime in RECORDED {
        let text = std::fs::read_to_string(golden::repository(&file(runtime))).map_err(|e| format!("{}: {e}", file(runtime)))?;
        let mut asked = read(&text)?;
        let kept: Vec<Asked> = match all.last() {
            Some((_, before)) => {
                let changed = by_question(&asked);
                before.iter().filter(|a| !changed.contains_key(&(a.wanted, a.row.as_str()))).cloned().collect()
            }
            None => Vec::new(),
        };
        asked.extend(kept);
        all.push((runtime, asked));
    }
    Ok(all)
}

/// Returns the path and text of each runtime's file.
///
/// # Errors
/// A question that an earlier runtime answers and a later one does not, which no file can express.
pub fn files(rows: &[Row], all: &Stored) -> Result<Vec<(String, String)>, String> {
    let mut before: &[Asked] = &[];
    let mut files = Vec::new();
    for (runtime, asked) in all {
        let (old, new) = (by_question(before), by_question(asked));
        if let Some((wanted, row)) = old.keys().find(|question| !new.contains_key(*question)) {
            return Err(format!("{runtime} has no answer to {row:?} ({wanted:?}), the runtime before it has one"));
        }
        let answers = |asked: &[&Asked]| asked.iter().map(|a| (a.profile.clone(), recorded_parts(&a.answer))).collect::<BTreeMap<_, _>>();
        let differs = |question: &Question<'_>| old.get(question).is_none_or(|before| answers(before) != answers(&new[question]));
        let changed: Vec<Asked> = asked.iter().filter(|a| differs(&(a.wanted, a.row.as_str()))).cloned().collect();
        files.push((file(runtime), detail(rows, &changed)));
        before = asked;
    }
    Ok(files)
}
