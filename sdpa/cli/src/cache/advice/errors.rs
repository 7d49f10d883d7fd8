//! Builds that return no value.

use super::super::attempt::Ended;
use super::super::units::{clip, many};
use super::{Advice, Kind, Seen};

/// Returns errors of one kind, with their labels.
fn errors<'a>(seen: &Seen<'a>, of: fn(Ended<'a>) -> Option<&'a str>) -> Vec<(&'a str, &'a str)> {
    seen.attempts.iter().filter_map(|attempt| Some((attempt.label, of(attempt.ended)?))).collect()
}

fn last(errors: &[(&str, &str)]) -> String {
    errors.last().map_or_else(String::new, |(label, error)| format!(" The last, {}: {}", clip(label, 200), clip(error, 400)))
}

pub(super) fn unsupported(seen: &Seen<'_>) -> Vec<Advice> {
    let errors = errors(seen, |ended| match ended {
        Ended::Unsupported(error) => Some(error),
        Ended::Built { .. } | Ended::Failed(_) | Ended::Open => None,
    });
    let mut labels: Vec<&str> = errors.iter().map(|(label, _)| *label).collect();
    labels.sort_unstable();
    labels.dedup();
    // The first lookup of a key finds out that no engine supports it, so one error per key is normal.
    if seen.figures.refusals == 0 && errors.len() <= labels.len() {
        return Vec::new();
    }
    let text = "The program requests unsupported problems again and again: use another executor, or change what the reason names.";
    let because = format!(
        "{}, {} that found no engine and {} answered from memory.{}",
        many(labels.len() as u64, "key", "keys"),
        many(errors.len() as u64, "build", "builds"),
        many(seen.figures.refusals, "lookup", "lookups"),
        last(&errors)
    );
    vec![Advice { kind: Kind::Unsupported, text: text.to_owned(), because }]
}

pub(super) fn failures(seen: &Seen<'_>) -> Vec<Advice> {
    let errors = errors(seen, |ended| match ended {
        Ended::Failed(error) => Some(error),
        Ended::Built { .. } | Ended::Unsupported(_) | Ended::Open => None,
    });
    let text = "Builds fail, and each is tried again at the next lookup.".to_owned();
    let because = format!("{}.{}", many(errors.len() as u64, "build failed", "builds failed"), last(&errors));
    if errors.is_empty() { Vec::new() } else { vec![Advice { kind: Kind::Failures, text, because }] }
}
