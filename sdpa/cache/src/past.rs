//! Dropped entries, and the search for the nearest key.

use super::entry::{CacheValue, Entry};
use super::explain::{CacheKey, Fields, Nearest, differences, distance};
use super::facts::{EntryFacts, Why};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most dropped entries that are remembered.
const KEPT: usize = 256;
/// The most entries, and the most dropped ones, that the search for the nearest considers.
pub(super) const LOOKED_AT: usize = 64;

/// A dropped entry.
#[derive(Debug)]
pub(super) struct Gone<K> {
    key: K,
    fields: Arc<Fields>,
    facts: EntryFacts,
    why: Why,
}

/// The last dropped entries, and whether too many of them are built again.
#[derive(Debug)]
pub(super) struct Past<K> {
    gone: VecDeque<Arc<Gone<K>>>,
    /// For each of the last builds, whether its key had been dropped.
    builds: VecDeque<bool>,
    /// Builds until thrashing may be reported again.
    quiet: usize,
}

impl<K> Default for Past<K> {
    fn default() -> Past<K> {
        Past { gone: VecDeque::new(), builds: VecDeque::new(), quiet: 0 }
    }
}

impl<K: CacheKey> Past<K> {
    pub(super) fn push<V: CacheValue>(&mut self, entry: &Entry<K, V>, why: Why) {
        self.gone.retain(|gone| gone.key != entry.key);
        if self.gone.len() == KEPT {
            self.gone.pop_front();
        }
        self.gone.push_back(Arc::new(Gone { key: entry.key.clone(), fields: entry.fields.clone(), facts: entry.facts(), why }));
    }

    /// Returns why a key was dropped, if it is remembered.
    pub(super) fn why_gone(&self, key: &K) -> Option<Why> {
        self.gone.iter().find(|gone| gone.key == *key).map(|gone| gone.why)
    }

    /// Returns the fields of the last dropped entries.
    pub(super) fn fields(&self) -> impl Iterator<Item = Arc<Fields>> {
        self.gone.iter().rev().take(LOOKED_AT).map(|gone| gone.fields.clone())
    }

    /// Returns the last dropped entries, latest first.
    pub(super) fn latest(&self) -> Vec<Arc<Gone<K>>> {
        self.gone.iter().rev().take(LOOKED_AT).cloned().collect()
    }

    /// Records a build. If thrashing is worth a warning, returns how many of the last builds were of dropped keys, and of how many; at most once per
    /// window.
    pub(super) fn note_miss(&mut self, again: bool, entries: usize) -> Option<(u64, u64)> {
        let window = (2 * entries).clamp(16, 1024);
        self.builds.push_back(again);
        while self.builds.len() > window {
            self.builds.pop_front();
        }
        self.quiet = self.quiet.saturating_sub(1);
        let rebuilt = self.builds.iter().filter(|again| **again).count();
        if self.quiet > 0 || self.builds.len() < window || rebuilt * 2 < window {
            return None;
        }
        self.quiet = window;
        Some((rebuilt as u64, window as u64))
    }
}

/// Returns the differences from the nearest of some keys.
pub(super) fn reasons(fields: &Fields, others: &[Arc<Fields>]) -> Vec<String> {
    let nearest = others.iter().min_by_key(|other| distance(fields, other));
    nearest.map_or_else(Vec::new, |nearest| differences(fields, nearest).iter().map(ToString::to_string).collect())
}

/// Returns the keys that differ in the fewest fields, among present and dropped ones.
pub(super) fn nearest<K: CacheKey, V: CacheValue>(key: &K, there: &[Arc<Entry<K, V>>], gone: &[Arc<Gone<K>>], most: usize) -> Vec<Nearest> {
    let fields = key.fields();
    let here = there.iter().take(LOOKED_AT).map(|e| (distance(&fields, &e.fields), Found::Here(&**e)));
    let gone = gone.iter().map(|gone| (distance(&fields, &gone.fields), Found::Gone(gone)));
    let mut all: Vec<_> = here.chain(gone).collect();
    // The sort is stable: among equally near keys the present ones come first, then the latest.
    all.sort_by_key(|(distance, _)| *distance);
    all.truncate(most);
    let told = |(_, found)| match found {
        Found::Here(entry) => Nearest { entry: Entry::facts(entry), gone: None, differences: differences(&fields, &entry.fields) },
        Found::Gone(gone) => Nearest { entry: Gone::facts(gone), gone: Some(gone.why), differences: differences(&fields, &gone.fields) },
    };
    all.into_iter().map(told).collect()
}

enum Found<'a, K, V> {
    Here(&'a Entry<K, V>),
    Gone(&'a Gone<K>),
}

impl<K> Gone<K> {
    fn facts(&self) -> EntryFacts {
        self.facts.clone()
    }
}
