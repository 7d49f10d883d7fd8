//! Keys that differ in few fields.

use super::super::lengths;
use super::super::reason::{Reason, difference};
use super::super::units::{many, time};
use super::{Advice, Kind, Seen};
use sdpa::cache::{CacheKey, Difference};
use sdpa::cudnn::lower::Job;

/// Number of misses of one kind below which there is no advice: so few length buckets are good already.
const FEW: u64 = 16;
/// Builds that take less than 1 / `SMALL` of the time are ignored.
const SMALL: u64 = 50;

/// Turns an advice of the library into a sentence: `Only lengths differ: …`.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", chars.as_str())
}

/// Returns the library's advice on the fields that differ, if they cause many builds.
pub(super) fn keys(seen: &Seen<'_>) -> Vec<Advice> {
    let mut texts: Vec<&'static str> = Vec::new();
    for text in seen.reasons.iter().filter_map(|reason| reason.advice) {
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    let told = |text: &'static str| {
        let of = || seen.reasons.iter().filter(|reason| reason.advice == Some(text));
        let sum = |number: fn(&Reason) -> u64| of().map(number).fold(0, u64::saturating_add);
        let (misses, total) = (sum(|r| r.misses), sum(|r| r.total_us));
        let hurts = misses > FEW && total >= seen.span.length() / SMALL;
        let because = || format!("{} of this kind took {}.{}", many(misses, "build", "builds"), time(total), buckets(seen, text));
        hurts.then(|| Advice { kind: Kind::Keys, text: sentence(text), because: because() })
    };
    texts.into_iter().filter_map(told).collect()
}

/// Returns a sentence about the number of length buckets that these misses would need.
fn buckets(seen: &Seen<'_>, text: &str) -> String {
    let misses = seen.attempts.iter().filter_map(|attempt| attempt.miss);
    let alike = |nearest: &[String]| {
        let differences: Vec<Difference> = nearest.iter().map(|text| difference(text)).collect();
        Job::advice(&differences) == Some(text)
    };
    let lengths = lengths::asked(misses.filter(|miss| alike(miss.nearest)).flat_map(|miss| miss.nearest));
    let range = lengths.first().zip(lengths.last());
    let told = lengths::bucket(&lengths).zip(range).map(|((multiple, left), (first, last))| {
        format!(" Their {} lengths from {first} to {last}, rounded up to multiples of {multiple}, become {left} lengths.", lengths.len())
    });
    told.unwrap_or_default()
}
