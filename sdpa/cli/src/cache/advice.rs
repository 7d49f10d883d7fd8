//! Advice on changes that would help the cache.

mod bounds;
mod errors;
mod fields;

use super::attempt::Attempt;
use super::findings::Figures;
use super::keys::Key;
use super::reason::Reason;
use super::timeline::Span;
use super::units::{percent, time};
use sdpa::cache::{CacheSnapshot, Why};
use serde::Serialize;

/// Microseconds of compilation above which a plan file is worthwhile.
const LONG: u64 = 1_000_000;

/// The subject of a piece of advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// Fields of keys that change from call to call.
    Keys,
    /// The cache's bound on entries.
    Entries,
    /// The cache's bound on bytes.
    Bytes,
    /// Entries were built again after the cache was cleared.
    Cleared,
    /// Entries were built again after the bounds were reduced.
    Resized,
    /// Values that the cache did not keep.
    NotKept,
    /// The cache's own warnings.
    Thrashing,
    /// Repeated lookups of problems that no engine supports.
    Unsupported,
    /// Builds that failed.
    Failures,
    /// The time that builds spend on compilation.
    Compile,
    /// Nothing: there is no problem.
    Calm,
}

/// The severity of a piece of advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// The finding costs time.
    Problem,
    /// An improvement is possible.
    Tip,
    /// No improvement is needed.
    Good,
}

impl Kind {
    pub(super) fn level(self) -> Level {
        match self {
            Kind::Keys
            | Kind::Entries
            | Kind::Bytes
            | Kind::Cleared
            | Kind::Resized
            | Kind::NotKept
            | Kind::Thrashing
            | Kind::Unsupported
            | Kind::Failures => Level::Problem,
            Kind::Compile => Level::Tip,
            Kind::Calm => Level::Good,
        }
    }

    fn of(why: Why) -> Kind {
        match why {
            Why::Entries => Kind::Entries,
            Why::Bytes => Kind::Bytes,
            Why::Cleared => Kind::Cleared,
            Why::Resized => Kind::Resized,
        }
    }
}

/// A piece of advice, and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    pub(super) kind: Kind,
    /// The recommended change.
    pub(super) text: String,
    /// The numbers that support the recommendation.
    pub(super) because: String,
}

/// The data that advice is derived from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) snapshot: &'a CacheSnapshot,
    pub(super) attempts: &'a [Attempt<'a>],
    pub(super) reasons: &'a [Reason],
    pub(super) keys: &'a [Key],
    pub(super) figures: &'a Figures,
    pub(super) span: Span,
}

/// All advisers, in the order of their output.
const ROWS: [fn(&Seen<'_>) -> Vec<Advice>; 7] =
    [fields::keys, bounds::bounds, bounds::not_kept, bounds::thrashing, errors::unsupported, errors::failures, compile];

/// Returns all advice, or one entry that reports no problem.
pub(super) fn advice(seen: &Seen<'_>) -> Vec<Advice> {
    let mut all: Vec<Advice> = ROWS.iter().flat_map(|row| row(seen)).collect();
    if all.iter().all(|advice| advice.kind.level() != Level::Problem) {
        all.insert(0, calm(seen));
    }
    all
}

fn compile(seen: &Seen<'_>) -> Vec<Advice> {
    let time_of = seen.figures.building_us;
    if time_of.compile < LONG || time_of.compile < time_of.total / 2 {
        return Vec::new();
    }
    let text =
        "Plans that are known beforehand can be compiled into a file (cargo sdpa compile): a process that loads it compiles nothing.";
    let because = format!("Compilation took {} of {} of building.", time(time_of.compile), time(time_of.total));
    vec![Advice { kind: Kind::Compile, text: text.to_owned(), because }]
}

fn calm(seen: &Seen<'_>) -> Advice {
    let because = match seen.figures.hit_rate {
        None => "This cache had no lookups.".to_owned(),
        Some(rate) => {
            let part = seen.figures.building_us.total as f64 / seen.span.length() as f64;
            format!("{} of lookups found an entry, and building took {} of the time.", percent(rate), percent(part))
        }
    };
    Advice { kind: Kind::Calm, text: "Nothing is wrong.".to_owned(), because }
}
