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
            let because = format!("{builds} that had been there and went for {}; they took {}.", why.text(), time(took));
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
        Why::Resized => format!("Leave the bounds larger: {} and {} are in use.", many(wanted, "key", "keys"), human(bytes.into())),
    }
}

pub(super) fn not_kept(seen: &Seen<'_>) -> Vec<Advice> {
    let lost = seen.figures.not_kept;
    let text = "Raise the bound on bytes, or pin less: what does not fit beside the pinned is built at every lookup.".to_owned();
    let because =
        format!("{} not kept, under a bound of {}.", many(lost, "value was", "values were"), human(seen.snapshot.limits.bytes.into()));
    if lost > 0 { vec![Advice { kind: Kind::NotKept, text, because }] } else { Vec::new() }
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
    let text = "The cache thrashes: what is in use at one time does not fit into its bounds.".to_owned();
    let times = many(warnings.len() as u64, "time", "times");
    let because =
        format!("It warned {times}; at {}, {rebuilt} of the last {of} builds were of what it had dropped a short while before.", time(*at));
    vec![Advice { kind: Kind::Thrashing, text, because }]
}
