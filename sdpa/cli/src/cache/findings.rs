//! The analysis of a trace: everything that the report states, as plain data.

use super::advice::{self, Advice, Level, Seen};
use super::attempt::{self, Attempt, Ended, Took};
use super::keys::{self, Count, Key, tally};
use super::reason::{self, Reason};
use super::timeline::{Span, Timeline};
use super::verdict;
use sdpa::cache::{CacheSnapshot, CacheTrace, EntryFacts, Limits, Weight, What};
use serde::Serialize;

/// Maximum number of keys in the report.
const KEYS: usize = 25;

/// The findings of a complete trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Findings {
    pub(super) cudnn: String,
    pub(super) device: String,
    pub(super) caches: Vec<CacheFindings>,
}

/// Counters and sums over one cache. Values from events cover only the events that the trace still has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) limits: Limits,
    pub(super) entries: usize,
    pub(super) weight: Weight,
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// The fraction of lookups that found an entry; `None` if there were no lookups.
    pub(super) hit_rate: Option<f64>,
    pub(super) refusals: u64,
    pub(super) failures: u64,
    pub(super) rebuilt: u64,
    pub(super) not_kept: u64,
    /// Number of entries that were evicted to stay within the bounds.
    pub(super) evicted: u64,
    /// Number of builds in the events, including incomplete ones.
    pub(super) builds: u64,
    /// Time of the builds in the events.
    pub(super) building_us: Took,
    /// Number of evictions in the events, for each reason.
    pub(super) evictions: Vec<Count>,
    /// Number of different labels in the events.
    pub(super) keys: usize,
}

/// The findings of one cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct CacheFindings {
    pub(super) name: String,
    pub(super) span: Span,
    /// Number of events that the trace no longer has.
    pub(super) forgotten: u64,
    pub(super) verdict: String,
    /// True if no change is recommended.
    pub(super) healthy: bool,
    pub(super) figures: Figures,
    pub(super) advice: Vec<Advice>,
    pub(super) timeline: Timeline,
    /// The keys with the longest build times.
    pub(super) keys: Vec<Key>,
    pub(super) reasons: Vec<Reason>,
    pub(super) entries: Vec<EntryFacts>,
    /// The labels of [`Timeline::bars`].
    #[serde(skip)]
    pub(super) labels: Vec<String>,
}

/// Analyses a trace.
pub(super) fn analyse(trace: &CacheTrace) -> Findings {
    let caches = trace.caches.iter().map(analyse_cache).collect();
    Findings { cudnn: trace.cudnn.clone(), device: trace.device.clone(), caches }
}

fn analyse_cache(snapshot: &CacheSnapshot) -> CacheFindings {
    let attempts = attempt::attempts(&snapshot.events);
    let reasons = reason::reasons(&attempts, &attempt::hits_of_entries(snapshot));
    let mut keys = keys::keys(snapshot, &attempts);
    let figures = figures(snapshot, &attempts, keys.len());
    let timeline = Timeline::new(snapshot, &attempts);
    let seen = Seen { snapshot, attempts: &attempts, reasons: &reasons, keys: &keys, figures: &figures, span: timeline.span };
    let advice = advice::advice(&seen);
    let verdict = verdict::verdict(&figures, &reasons, timeline.span);
    keys.truncate(KEYS);
    CacheFindings {
        name: snapshot.name.clone(),
        span: timeline.span,
        forgotten: snapshot.forgotten,
        verdict,
        healthy: advice.iter().all(|advice| advice.kind.level() != Level::Problem),
        figures,
        advice,
        timeline,
        keys,
        reasons,
        entries: snapshot.entries.clone(),
        labels: attempts.iter().map(|attempt| attempt.label.to_owned()).collect(),
    }
}

fn figures(snapshot: &CacheSnapshot, attempts: &[Attempt<'_>], keys: usize) -> Figures {
    let stats = &snapshot.stats;
    let mut building_us = Took::default();
    attempts.iter().for_each(|a| attempt::add(&mut building_us, &a.time));
    let mut evictions = Vec::new();
    for event in &snapshot.events {
        match &event.what {
            What::Evicted { why, .. } => tally(&mut evictions, *why),
            What::Missed { .. }
            | What::Built { .. }
            | What::Failed { .. }
            | What::Unsupported { .. }
            | What::Thrashing { .. }
            | What::Resized { .. } => {}
        }
    }
    let lookups = stats.hits as f64 + stats.misses as f64;
    Figures {
        limits: snapshot.limits,
        entries: stats.entries,
        weight: stats.weight,
        hits: stats.hits,
        misses: stats.misses,
        hit_rate: (lookups > 0.0).then(|| stats.hits as f64 / lookups),
        refusals: stats.refusals,
        failures: stats.failures,
        rebuilt: stats.rebuilt,
        not_kept: stats.not_kept,
        evicted: stats.evictions,
        builds: attempts.iter().filter(|a| !matches!(a.ended, Ended::Open)).count() as u64,
        building_us,
        evictions,
        keys,
    }
}
