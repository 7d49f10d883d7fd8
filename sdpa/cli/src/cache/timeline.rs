//! A trace over time: hit rates, build times and other events.

use super::attempt::{Attempt, Phase, Took, add, micros};
use sdpa::cache::{CacheSnapshot, What};
use serde::Serialize;

/// Number of bins of the time of a trace.
const BINS: usize = 120;

/// The time range of a trace, in microseconds since the cache was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Span {
    pub(super) from_us: u64,
    pub(super) to_us: u64,
}

impl Span {
    /// Returns the range from the first event that the trace still has to its end. It is never empty.
    pub(super) fn of(snapshot: &CacheSnapshot) -> Span {
        let times = || snapshot.events.iter().map(|event| micros(event.at));
        let from_us = if snapshot.forgotten == 0 { 0 } else { times().min().unwrap_or(0) };
        let to_us = times().chain([micros(snapshot.at)]).max().unwrap_or(0).max(from_us.saturating_add(1));
        Span { from_us: from_us.min(to_us - 1), to_us }
    }

    pub(super) fn length(self) -> u64 {
        self.to_us - self.from_us
    }
}

/// The events in a bin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Bin {
    /// Number of hits. Hits between two events are distributed evenly.
    pub(super) hits: f64,
    pub(super) misses: u64,
    /// The fraction of lookups that found an entry; `None` if there were no lookups.
    pub(super) hit_rate: Option<f64>,
    /// Time that threads spent on builds.
    pub(super) building_us: Took,
}

/// An event that is marked in addition to builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Evicted,
    Failed,
    Unsupported,
    Thrashing,
    Resized,
}

impl Mark {
    pub(super) const ALL: [Mark; 5] = [Mark::Evicted, Mark::Failed, Mark::Unsupported, Mark::Thrashing, Mark::Resized];

    pub(super) fn name(self) -> &'static str {
        match self {
            Mark::Evicted => "evicted",
            Mark::Failed => "failed",
            Mark::Unsupported => "unsupported",
            Mark::Thrashing => "thrashing",
            Mark::Resized => "resized",
        }
    }

    fn of(what: &What) -> Option<Mark> {
        match what {
            What::Missed { .. } | What::Built { .. } => None,
            What::Evicted { .. } => Some(Mark::Evicted),
            What::Failed { .. } => Some(Mark::Failed),
            What::Unsupported { .. } => Some(Mark::Unsupported),
            What::Thrashing { .. } => Some(Mark::Thrashing),
            What::Resized { .. } => Some(Mark::Resized),
        }
    }
}

/// A build as a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bar {
    pub(super) begin: u64,
    pub(super) time: Took,
    /// Whether the build returned a value.
    pub(super) good: bool,
    /// The lane in which the bar is drawn. Bars of one lane do not overlap.
    pub(super) lane: usize,
    /// The index of the build among all builds of the trace.
    pub(super) attempt: usize,
}

/// The timeline of a cache. JSON omits bars and marks, which are in the trace already.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Timeline {
    pub(super) span: Span,
    pub(super) bins: Vec<Bin>,
    /// The largest number of concurrent builds.
    pub(super) at_once: usize,
    #[serde(skip)]
    pub(super) bars: Vec<Bar>,
    #[serde(skip)]
    pub(super) marks: Vec<(Mark, u64)>,
}

impl Timeline {
    pub(super) fn new(snapshot: &CacheSnapshot, attempts: &[Attempt<'_>]) -> Timeline {
        let span = Span::of(snapshot);
        let bars = bars(attempts);
        let marks = snapshot.events.iter().filter_map(|event| Some((Mark::of(&event.what)?, micros(event.at)))).collect();
        let at_once = bars.iter().map(|bar| bar.lane + 1).max().unwrap_or(0);
        Timeline { span, bins: bins(snapshot, attempts, span), at_once, bars, marks }
    }
}

/// Returns builds that took time, each in the first free lane.
fn bars(attempts: &[Attempt<'_>]) -> Vec<Bar> {
    let bar = |(attempt, a): (usize, &Attempt<'_>)| Bar {
        begin: a.begin,
        time: a.time,
        good: matches!(a.ended, super::attempt::Ended::Built { .. }),
        lane: 0,
        attempt,
    };
    let mut bars: Vec<Bar> = attempts.iter().enumerate().map(bar).filter(|bar| bar.time.total > 0).collect();
    bars.sort_by_key(|bar| (bar.begin, bar.attempt));
    let mut free: Vec<u64> = Vec::new();
    for bar in &mut bars {
        bar.lane = free.iter().position(|&at| at <= bar.begin).unwrap_or(free.len());
        let end = bar.begin.saturating_add(bar.time.total);
        match free.get_mut(bar.lane) {
            Some(at) => *at = end,
            None => free.push(end),
        }
    }
    bars
}

/// Returns the number of hits up to a time, interpolated between two events.
fn hits_until(points: &[(u64, u64)], at: f64) -> f64 {
    let after = points.partition_point(|(t, _)| *t as f64 <= at);
    let before = after.checked_sub(1).and_then(|n| points.get(n));
    match (before, points.get(after)) {
        (Some(&(t0, h0)), Some(&(t1, h1))) => h0 as f64 + (h1 - h0) as f64 * (at - t0 as f64) / (t1 - t0) as f64,
        (Some(&(_, hits)), None) | (None, Some(&(_, hits))) => hits as f64,
        (None, None) => 0.0,
    }
}

fn bins(snapshot: &CacheSnapshot, attempts: &[Attempt<'_>], span: Span) -> Vec<Bin> {
    let begin = if snapshot.forgotten == 0 { Some((span.from_us, 0)) } else { None };
    let told = snapshot.events.iter().map(|event| (micros(event.at), event.hits_so_far));
    let mut points: Vec<(u64, u64)> = begin.into_iter().chain(told).chain([(micros(snapshot.at), snapshot.stats.hits)]).collect();
    points.sort_by_key(|(at, _)| *at);
    // Make the hits non-decreasing: a damaged file may contain anything.
    let mut most = 0;
    for (_, hits) in &mut points {
        most = most.max(*hits);
        *hits = most;
    }
    let width = span.length() as f64 / BINS as f64;
    let edge = |n: usize| span.from_us as f64 + width * n as f64;
    let place = |at: f64| (((at - span.from_us as f64) / width).max(0.0) as usize).min(BINS - 1);
    let mut bins = vec![Bin::default(); BINS];
    for (n, bin) in bins.iter_mut().enumerate() {
        bin.hits = hits_until(&points, edge(n + 1)) - hits_until(&points, edge(n));
    }
    for event in snapshot.events.iter().filter(|event| matches!(event.what, What::Missed { .. })) {
        bins[place(micros(event.at) as f64)].misses += 1;
    }
    for attempt in attempts {
        let mut from = attempt.begin as f64;
        for phase in Phase::ALL {
            let to = from + phase.of(&attempt.time) as f64;
            for (n, bin) in bins.iter_mut().enumerate().take(place(to) + 1).skip(place(from)) {
                let part = (to.min(edge(n + 1)) - from.max(edge(n))).max(0.0) as u64;
                add(&mut bin.building_us, &only(phase, part));
            }
            from = to;
        }
    }
    for bin in &mut bins {
        let lookups = bin.hits + bin.misses as f64;
        bin.hit_rate = (lookups > 0.0).then(|| bin.hits / lookups);
    }
    bins
}

/// Returns the time of one phase.
fn only(phase: Phase, us: u64) -> Took {
    let time = Took { total: us, ..Took::default() };
    match phase {
        Phase::Lower => Took { lower: us, ..time },
        Phase::Heuristics => Took { heuristics: us, ..time },
        Phase::Compile => Took { compile: us, ..time },
        Phase::Tune => Took { tune: us, ..time },
        Phase::Load => Took { load: us, ..time },
        Phase::Other => time,
    }
}
