//! Reasons for misses, by the fields that differ from the nearest entry.

use super::attempt::{Attempt, Ended};
use sdpa::cache::{CacheKey, Difference, Why};
use sdpa::cudnn::lower::Job;
use serde::Serialize;
use std::collections::HashMap;

/// An example of several cache misses that have the same reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Example {
    pub(super) label: String,
    pub(super) differences: Vec<Difference>,
}

/// Cache misses that have the same reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Reason {
    /// The fields that differ from the nearest entry.
    pub(super) fields: Vec<String>,
    /// The reason for which an earlier entry of the key was removed.
    pub(super) evicted: Option<Why>,
    pub(super) misses: u64,
    /// Total time of their builds.
    pub(super) total_us: u64,
    /// Number of lookups that found the entries of these builds.
    pub(super) hits: u64,
    /// The miss with the longest build.
    pub(super) example: Example,
    /// The library's advice on such misses.
    pub(super) advice: Option<&'static str>,
}

impl Reason {
    /// Returns a description of the reason.
    pub(super) fn text(&self) -> String {
        let differs = || format!("differs in {}", self.fields.join(", "));
        match (self.evicted, self.fields.is_empty()) {
            (None, true) => "the first of its kind".to_owned(),
            (None, false) => differs(),
            (Some(why), true) => format!("evicted earlier: {}", why.text()),
            (Some(why), false) => format!("evicted earlier: {}; the nearest {}", why.text(), differs()),
        }
    }
}

/// Parses `field asked ≠ there`, the text of a [`Difference`]. A field is a word, or `layout of q`. Any other text becomes a field as it is.
pub(super) fn difference(text: &str) -> Difference {
    let parsed = || {
        let (named, there) = text.split_once(" ≠ ")?;
        let mut spaces = named.match_indices(' ').map(|(at, _)| at);
        let first = spaces.next()?;
        let end = if named[first..].starts_with(" of ") { spaces.nth(1)? } else { first };
        let (field, asked) = named.split_at(end);
        Some(Difference { field: field.to_owned(), asked: asked.trim_start().to_owned(), there: there.to_owned() })
    };
    parsed().unwrap_or_else(|| Difference { field: text.to_owned(), asked: String::new(), there: String::new() })
}

/// Returns the reasons for the misses of builds, the one with the longest build time first. Misses that the trace no longer has are not
/// included.
pub(super) fn reasons(attempts: &[Attempt<'_>], hits: &HashMap<u64, u64>) -> Vec<Reason> {
    let mut places: HashMap<(Vec<String>, Option<Why>), (usize, u64)> = HashMap::new();
    let mut all: Vec<Reason> = Vec::new();
    for attempt in attempts {
        let Some(miss) = attempt.miss else { continue };
        let differences: Vec<Difference> = miss.nearest.iter().map(|text| difference(text)).collect();
        let fields: Vec<String> = differences.iter().map(|d| d.field.clone()).collect();
        let mut set = fields.clone();
        set.sort();
        let earned = match attempt.ended {
            Ended::Built { id, .. } => hits.get(&id).copied().unwrap_or(0),
            Ended::Failed(_) | Ended::Unsupported(_) | Ended::Open => 0,
        };
        let advice = Job::advice(&differences);
        let example = Example { label: attempt.label.to_owned(), differences };
        let (at, longest) = places.entry((set, miss.evicted)).or_insert((all.len(), attempt.time.total));
        match all.get_mut(*at) {
            Some(reason) => {
                reason.misses += 1;
                reason.total_us = reason.total_us.saturating_add(attempt.time.total);
                reason.hits = reason.hits.saturating_add(earned);
                if attempt.time.total > *longest {
                    *longest = attempt.time.total;
                    reason.example = example;
                }
            }
            None => {
                all.push(Reason { fields, evicted: miss.evicted, misses: 1, total_us: attempt.time.total, hits: earned, example, advice });
            }
        }
    }
    all.sort_by_key(|reason| std::cmp::Reverse((reason.total_us, reason.misses)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_read_back_as_they_are_printed() {
        for (field, asked, there) in
            [("seq_q", "77", "64"), ("layout of q", "[1, 2, 3, 4]", "bhsd"), ("mask", "k <= q and x", "none"), ("batch", "", "2")]
        {
            let known = Difference { field: field.to_owned(), asked: asked.to_owned(), there: there.to_owned() };
            assert_eq!(difference(&known.to_string()), known);
        }
        for text in ["", "word", " ≠ ", "a of ≠ ", "≠", "layout of ≠ x"] {
            assert!(text.contains(&difference(text).field));
        }
    }
}
