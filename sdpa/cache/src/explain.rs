//! Explains a miss: the nearest entries, and the fields that differ.

use super::facts::{EntryFacts, Why};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::Hash;

/// A lookup value: the key itself, or a borrowed form of it with the same hash and fields, so that a lookup need not create a key.
pub trait Query<K> {
    /// Returns the hash of the key to which the query is equal.
    fn hash_in(&self, state: &ahash::RandomState) -> u64;

    /// Returns whether the query equals the key.
    fn is(&self, key: &K) -> bool;

    /// Creates the key to which the query is equal.
    fn to_key(&self) -> K;
}

impl<K: CacheKey> Query<K> for K {
    fn hash_in(&self, state: &ahash::RandomState) -> u64 {
        state.hash_one(self)
    }

    fn is(&self, key: &K) -> bool {
        self == key
    }

    fn to_key(&self) -> K {
        self.clone()
    }
}

/// The fields of a key: the name and the value of each.
pub type Fields = Vec<(&'static str, String)>;

/// A key of a cache, which reports its fields by name.
pub trait CacheKey: Clone + Eq + Hash {
    /// Returns a short description of the key.
    fn label(&self) -> String;

    /// Returns every field that distinguishes the key from others, by name. Keys with equal fields are equal.
    fn fields(&self) -> Fields;

    /// Returns advice about a cache miss whose key differs from that of an entry in these fields; `None` if there is none.
    fn advice(_differences: &[Difference]) -> Option<&'static str> {
        None
    }
}

/// A field in which two keys differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The name of the field.
    pub field: String,
    /// The value of the field in the requested key.
    pub asked: String,
    /// The value of the field in the key of the entry that is compared.
    pub there: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ≠ {}", self.field, self.asked, self.there)
    }
}

/// A key that is or was in the cache, compared with the key of a lookup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Nearest {
    /// Statistics of the key's entry.
    pub entry: EntryFacts,
    /// The reason why the entry was dropped; `None` if it is in the cache.
    pub gone: Option<Why>,
    /// The fields in which the keys differ; empty if the keys are equal.
    pub differences: Vec<Difference>,
}

/// The state of a key in a cache.
///
/// Exhaustive: reports have a text for each state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The value of the key is in the cache.
    Hit(EntryFacts),
    /// A thread is building the value of the key.
    Building,
    /// A build was refused, and the refusal is still remembered.
    Unsupported {
        /// The error of the refused build, with every reason.
        error: String,
        /// The time until the refusal is forgotten, in milliseconds.
        remaining: u64,
    },
    /// The cache has no value for the key, and remembers no refusal.
    Absent,
}

/// An explanation of why a lookup of a key is a hit or a miss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// A short description of the key that was looked up.
    pub label: String,
    /// The state of the key in the cache.
    pub state: State,
    /// The nearest keys that are or were in the cache, nearest first.
    pub nearest: Vec<Nearest>,
    /// Advice to the user on how to avoid the miss, in sentences.
    pub advice: Vec<String>,
    /// Additional notes on the key from the owner of the cache, in sentences. They appear for hits and for misses.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Hit(e) => {
                write!(f, "{}: hit, entry {}, built in {:.1} ms, {} hits", self.label, e.id, e.built.total.as_secs_f64() * 1e3, e.hits)?
            }
            State::Building => write!(f, "{}: another thread is building it", self.label)?,
            State::Unsupported { error, remaining } => {
                write!(f, "{}: unsupported, asked again in {:.1} s: {error}", self.label, *remaining as f64 / 1e3)?;
            }
            State::Absent => write!(f, "{}: not there", self.label)?,
        }
        for near in &self.nearest {
            write!(f, "\n  entry {}", near.entry.id)?;
            if let Some(why) = near.gone {
                write!(f, ", gone: {}", why.text())?;
            }
            for difference in &near.differences {
                write!(f, "\n    {difference}")?;
            }
        }
        self.advice.iter().chain(&self.notes).try_for_each(|text| write!(f, "\n  {text}"))
    }
}

/// Returns the number of fields in which two keys differ.
pub(super) fn distance(asked: &Fields, there: &Fields) -> usize {
    // Compare by position: keys of one kind have the same fields in the same order, and only the last fields may be missing.
    let both = asked.iter().zip(there).filter(|(a, b)| a != b).count();
    both + asked.len().abs_diff(there.len())
}

/// Returns the fields in which two keys differ. A missing field is `none`.
pub(super) fn differences(asked: &Fields, there: &Fields) -> Vec<Difference> {
    let of = |all: &Fields, field: &str| {
        all.iter().find(|(name, _)| *name == field).map_or_else(|| "none".to_owned(), |(_, value)| value.clone())
    };
    let only_there = there.iter().filter(|(name, _)| asked.iter().all(|(a, _)| a != name));
    let names = asked.iter().chain(only_there).map(|(name, _)| *name);
    names
        .filter_map(|field| {
            let (asked, there) = (of(asked, field), of(there, field));
            (asked != there).then(|| Difference { field: field.to_owned(), asked, there })
        })
        .collect()
}
