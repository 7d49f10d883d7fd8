//! Bounds that are too small for the entries in use.

use super::super::attempt::micros;
use super::super::units::{count, many, time};
use super::{Advice, Kind, Seen};
use crate::memory::human;
use sdpa::cache::{What, Why};

/// Advises on keys that were built again, by the reason for which their entry was removed.
pub(super) fn bounds(seen: &Seen<'_>) -> Vec<Advice> {
    let told = |why: Why| {
        let again = || seen.attempts.iter().filter(|a| a.miss.is_some_and(|miss| miss.evicted == Some(why)));
        let (builds, took) = (again().count() as u64, again().fold(0, |sum: u64, a| sum.saturating_add(a.time.total)));
        (builds > 0).then(|| {
            let builds = many(builds, "build was of a key", "builds were of keys");
            let evicted = match why {
                Why::Entries => "that the bound on entries had evicted",
                Why::Bytes => "that the bound on bytes had evicted",
                Why::Cleared => "that a clearing of the cache had removed",
                Why::Resized => "that smaller bounds had evicted",
            };
            let because = format!("{builds} {evicted}; they took {}.", time(took));
            Advice { kind: Kind::of(why), text: remedy(seen, why), because }
        })
    };
    [Why::Entries, Why::Bytes, Why::Cleared, Why::Resized].into_iter().filter_map(told).collect()
}

fn remedy(seen: &Seen<'_>, why: Why) -> String {
    let limits = seen.snapshot.limits;
    let wanted = seen.keys.len() as u64;
    let bytes = seen.keys.iter().map(|key| key.bytes).fold(0, u64::saturating_add);
    let from = |there: String, to: Option<String>| match to {
        Some(to) => format!(" from {there} to {to} or more, to hold every key of this trace"),
        None => format!(" above {there}"),
    };
    match why {
        Why::Entries => {
            let there = limits.entries.get() as u64;
            format!("Raise the bound on entries{}.", from(count(there), (wanted > there).then(|| count(wanted))))
        }
        Why::Bytes => {
            let to = (bytes > limits.bytes).then(|| human(bytes.into()));
            format!("Raise the bound on bytes{}.", from(human(limits.bytes.into()), to))
        }
        Why::Cleared => "Do not clear the cache while its keys are in use.".to_owned(),
        Why::Resized => format!("Keep the bounds above what is in use: {} and {}.", many(wanted, "key", "keys"), human(bytes.into())),
    }
}

pub(super) fn not_kept(seen: &Seen<'_>) -> Vec<Advice> {
    let lost = seen.figures.not_kept;
    let text = "Raise the bound on bytes, or pin fewer entries: a value that does not fit next to them is built at every lookup.";
    let bound = human(seen.snapshot.limits.bytes.into());
    let because = format!("{} not kept, because the bound on bytes is {bound}.", many(lost, "value was", "values were"));
    if lost > 0 { vec![Advice { kind: Kind::NotKept, text: text.to_owned(), because }] } else { Vec::new() }
}

pub(super) fn thrashing(seen: &Seen<'_>) -> Vec<Advice> {
    let warnings: Vec<_> = seen
        .snapshot
        .events
        .iter()
        .filter_map(|event| match &event.what {
            What::Thrashing { rebuilt, of } => Some((micros(event.at), *rebuilt, *of)),
            What::Missed { .. }
            | What::Built { .. }
            | What::Failed { .. }
            | What::Unsupported { .. }
            | What::Evicted { .. }
            | What::Resized { .. } => None,
        })
        .collect();
    let Some((at, rebuilt, of)) = warnings.last() else { return Vec::new() };
    let text = "The cache thrashes: the entries in use at the same time do not fit into its bounds.".to_owned();
    let times = many(warnings.len() as u64, "time", "times");
    let at = time(*at);
    let because = format!("The cache warned {times}; at {at}, {rebuilt} of the last {of} builds were of entries evicted shortly before.");
    vec![Advice { kind: Kind::Thrashing, text, because }]
}
