//! Builds, reconstructed from their events.

use sdpa::cache::{BuildTime, CacheEvent, CacheSnapshot, Weight, What, Why};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// The time of a build by phase, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Took {
    pub(super) total: u64,
    pub(super) lower: u64,
    pub(super) heuristics: u64,
    pub(super) compile: u64,
    pub(super) tune: u64,
    pub(super) load: u64,
}

impl From<&BuildTime> for Took {
    fn from(time: &BuildTime) -> Took {
        let [total, lower, heuristics, compile, tune, load] =
            [time.total, time.lower, time.heuristics, time.compile, time.tune, time.load].map(micros);
        Took { total, lower, heuristics, compile, tune, load }
    }
}

/// Returns a duration in microseconds, rounded down.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A phase of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Lower,
    Heuristics,
    Compile,
    Tune,
    Load,
    Other,
}

impl Phase {
    /// All phases, in chronological order.
    pub(super) const ALL: [Phase; 6] = [Phase::Lower, Phase::Heuristics, Phase::Compile, Phase::Tune, Phase::Load, Phase::Other];

    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Lower => "lower",
            Phase::Heuristics => "heuristics",
            Phase::Compile => "compile",
            Phase::Tune => "tune",
            Phase::Load => "load",
            Phase::Other => "other",
        }
    }

    /// Returns the microseconds of this phase.
    pub(super) fn of(self, time: &Took) -> u64 {
        let told = || [time.lower, time.heuristics, time.compile, time.tune, time.load].into_iter().fold(0, u64::saturating_add);
        match self {
            Phase::Lower => time.lower,
            Phase::Heuristics => time.heuristics,
            Phase::Compile => time.compile,
            Phase::Tune => time.tune,
            Phase::Load => time.load,
            Phase::Other => time.total.saturating_sub(told()),
        }
    }
}

/// Adds the times of all phases.
pub(super) fn add(sum: &mut Took, time: &Took) {
    sum.total = sum.total.saturating_add(time.total);
    sum.lower = sum.lower.saturating_add(time.lower);
    sum.heuristics = sum.heuristics.saturating_add(time.heuristics);
    sum.compile = sum.compile.saturating_add(time.compile);
    sum.tune = sum.tune.saturating_add(time.tune);
    sum.load = sum.load.saturating_add(time.load);
}

/// The reason why a lookup found no entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Miss<'a> {
    pub(super) nearest: &'a [String],
    pub(super) evicted: Option<Why>,
}

/// The end of a build.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ended<'a> {
    Built {
        id: u64,
        engine: &'a str,
        weight: Weight,
    },
    Failed(&'a str),
    Unsupported(&'a str),
    /// The trace ended before the build did.
    Open,
}

/// A build, complete or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt<'a> {
    pub(super) label: &'a str,
    /// The begin of the build, in microseconds since the cache was created.
    pub(super) begin: u64,
    /// The time of each phase; for a failed build, only the total.
    pub(super) time: Took,
    pub(super) ended: Ended<'a>,
    /// The reason for the build; `None` if the trace no longer has the event.
    pub(super) miss: Option<Miss<'a>>,
}

/// A miss whose build has not ended yet.
type Begun<'a> = (u64, Miss<'a>);

/// Returns every build of the events, in the order in which they ended. Only one thread builds a key, so the first miss of a label belongs to its first end.
pub(super) fn attempts(events: &[CacheEvent]) -> Vec<Attempt<'_>> {
    let mut begun: HashMap<&str, VecDeque<Begun<'_>>> = HashMap::new();
    let mut all = Vec::new();
    for CacheEvent { at, label, what, .. } in events {
        let (label, end) = (label.as_str(), micros(*at));
        let mut close = |time: Option<Took>, ended| {
            let miss = begun.get_mut(label).and_then(VecDeque::pop_front);
            let waited = Took { total: miss.map_or(0, |(begin, _)| end.saturating_sub(begin)), ..Took::default() };
            let time = time.unwrap_or(waited);
            all.push(Attempt { label, begin: end.saturating_sub(time.total), time, ended, miss: miss.map(|(_, miss)| miss) });
        };
        match what {
            What::Missed { nearest, evicted } => {
                begun.entry(label).or_default().push_back((end, Miss { nearest, evicted: *evicted }));
            }
            What::Built { id, engine, time, weight } => close(Some(time.into()), Ended::Built { id: *id, engine, weight: *weight }),
            What::Failed { error } => close(None, Ended::Failed(error)),
            What::Unsupported { error } => close(None, Ended::Unsupported(error)),
            What::Evicted { .. } | What::Thrashing { .. } | What::Resized { .. } => {}
        }
    }
    let mut open: Vec<Attempt<'_>> = begun
        .into_iter()
        .flat_map(|(label, begun)| begun.into_iter().map(move |(at, miss)| (label, at, miss)))
        .map(|(label, at, miss)| Attempt { label, begin: at, time: Took::default(), ended: Ended::Open, miss: Some(miss) })
        .collect();
    open.sort_by_key(|attempt| (attempt.begin, attempt.label));
    all.extend(open);
    all
}

/// Returns the number of lookups that found each entry, by the entry's number.
pub(super) fn hits_of_entries(snapshot: &CacheSnapshot) -> HashMap<u64, u64> {
    let there = snapshot.entries.iter().map(|entry| (entry.id, entry.hits));
    let gone = snapshot.events.iter().filter_map(|event| match &event.what {
        What::Evicted { id, hits, .. } => Some((*id, *hits)),
        What::Missed { .. }
        | What::Built { .. }
        | What::Failed { .. }
        | What::Unsupported { .. }
        | What::Thrashing { .. }
        | What::Resized { .. } => None,
    });
    there.chain(gone).collect()
}
