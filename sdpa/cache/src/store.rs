//! Entries in order of use, within bounds. Only the thread that holds the lock accesses it.

use super::entry::{CacheValue, Entry};
use super::explain::{CacheKey, Fields, Query};
use super::facts::Why;
use super::limits::{Limits, Weight};
use super::past::LOOKED_AT;
use lru::LruCache;
use std::hash::Hasher;
use std::sync::Arc;
use std::time::Instant;

/// The state of a key.
#[derive(Debug)]
pub(super) enum Slot<K, V, T, U> {
    /// Some thread is building it.
    Building(Arc<T>),
    /// It has a value.
    Ready(Arc<Entry<K, V>>),
    /// It was refused, and the refusal is remembered.
    Refused { why: U, since: Instant },
}

/// A key, or a borrowed form of it, with its hash. The hash is computed once, because keys are long.
pub(super) struct Keyed<'k, K> {
    pub(super) hash: u64,
    pub(super) key: &'k dyn Query<K>,
}

impl<K> Clone for Keyed<'_, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Keyed<'_, K> {}

/// A slot with its key and hash.
type Homed<K, V, T, U> = (u64, K, Slot<K, V, T, U>);

/// Slots by hash. If two keys have one hash, the second is at the next free number.
type Slots<K, V, T, U> = LruCache<u64, Homed<K, V, T, U>, Numbers>;
type Numbers = std::hash::BuildHasherDefault<Number>;

/// The identity hash of a number that is a hash.
#[derive(Debug, Default)]
pub(super) struct Number(u64);

impl Hasher for Number {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = self.0.rotate_left(8) ^ u64::from(*b));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

/// Entries that were dropped, with the reason.
pub(super) type Dropped<K, V> = Vec<(Arc<Entry<K, V>>, Why)>;

/// Slots by key.
#[derive(Debug)]
pub(super) struct Store<K, V, T, U> {
    slots: Slots<K, V, T, U>,
    limits: Limits,
    entries: usize,
    refused: usize,
    weight: Weight,
    /// The slots are in order of use up to this time.
    ordered: u64,
}

impl<K: CacheKey, V: CacheValue, T, U> Store<K, V, T, U> {
    pub(super) fn new(limits: Limits) -> Store<K, V, T, U> {
        Store {
            slots: LruCache::unbounded_with_hasher(Numbers::default()),
            limits,
            entries: 0,
            refused: 0,
            weight: Weight::default(),
            ordered: 0,
        }
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    pub(super) fn weight(&self) -> Weight {
        self.weight
    }

    /// Returns the fields of the latest entries.
    pub(super) fn fields(&self) -> impl Iterator<Item = Arc<Fields>> {
        self.slots.iter().filter_map(|(_, (.., slot))| entry(slot)).take(LOOKED_AT).map(|e| e.fields.clone())
    }

    pub(super) fn peek(&self, key: Keyed<'_, K>) -> Option<&Slot<K, V, T, U>> {
        self.slots.peek(&self.place(key)).map(|(.., slot)| slot)
    }

    /// Returns the number at which a key is or can be inserted.
    fn place(&self, Keyed { hash, key }: Keyed<'_, K>) -> u64 {
        let mut place = hash;
        while self.slots.peek(&place).is_some_and(|(_, there, _)| !key.is(there)) {
            place = place.wrapping_add(1);
        }
        place
    }

    /// Returns the entries, most recently used first.
    pub(super) fn list(&mut self) -> Vec<Arc<Entry<K, V>>> {
        self.order();
        self.slots.iter().filter_map(|(_, (.., slot))| entry(slot)).cloned().collect()
    }

    /// Sets the state of a key to a mark or a refusal.
    pub(super) fn put(&mut self, key: Keyed<'_, K>, slot: Slot<K, V, T, U>) {
        debug_assert!(entry(&slot).is_none(), "entries come in by `insert`");
        let owned = key.key.to_key();
        self.remove(key);
        if matches!(slot, Slot::Refused { .. }) {
            self.refused += 1;
            self.forget_refusals(self.limits.entries.get());
        }
        self.slots.put(self.place(key), (key.hash, owned, slot));
    }

    /// Removes a key in any state.
    pub(super) fn remove(&mut self, key: Keyed<'_, K>) -> Option<Arc<Entry<K, V>>> {
        let slot = self.pop(self.place(key))?;
        let entry = entry(&slot).cloned()?;
        self.forget(&entry);
        Some(entry)
    }

    /// Empties a number, and moves up keys that are later only because it was taken.
    fn pop(&mut self, place: u64) -> Option<Slot<K, V, T, U>> {
        let (.., slot) = self.slots.pop(&place)?;
        self.refused -= usize::from(matches!(slot, Slot::Refused { .. }));
        let (mut hole, mut next) = (place, place.wrapping_add(1));
        while let Some((home, ..)) = self.slots.peek(&next) {
            if next.wrapping_sub(*home) >= next.wrapping_sub(hole)
                && let Some(moved) = self.slots.pop(&next)
            {
                self.slots.put(hole, moved);
                hole = next;
            }
            next = next.wrapping_add(1);
        }
        Some(slot)
    }

    /// Inserts an entry, and drops others until the bounds hold; `None` if they cannot, in which case the key is removed.
    pub(super) fn insert(&mut self, entry: Arc<Entry<K, V>>) -> Option<Dropped<K, V>> {
        let key = entry.key.clone();
        self.remove(entry.keyed());
        let bytes = entry.weight.bytes();
        let pinned: Vec<_> = self.slots.iter().filter_map(|(_, (.., s))| self::entry(s)).filter(|e| e.is_pinned()).collect();
        let held: u64 = pinned.iter().map(|e| e.weight.bytes()).fold(bytes, u64::saturating_add);
        if held > self.limits.bytes || pinned.len() >= self.limits.entries.get() {
            return None;
        }
        let dropped = self.trim(self.limits.entries.get() - 1, self.limits.bytes - bytes, None);
        self.entries += 1;
        self.weight += entry.weight;
        self.slots.put(self.place(entry.keyed()), (entry.hash, key, Slot::Ready(entry)));
        Some(dropped)
    }

    /// Sets new bounds, and drops entries beyond them, except pinned ones.
    pub(super) fn resize(&mut self, limits: Limits) -> Dropped<K, V> {
        self.limits = limits;
        self.forget_refusals(limits.entries.get());
        self.trim(limits.entries.get(), limits.bytes, Some(Why::Resized))
    }

    /// Drops every entry that is not pinned, and every refusal.
    pub(super) fn clear(&mut self) -> Dropped<K, V> {
        self.forget_refusals(0);
        self.trim(0, 0, Some(Why::Cleared))
    }

    /// Drops the oldest refusals until `most` are left.
    fn forget_refusals(&mut self, most: usize) {
        while self.refused > most {
            let oldest = self.slots.iter().rev().find(|(_, (.., slot))| matches!(slot, Slot::Refused { .. })).map(|(place, _)| *place);
            // If no slot is a refusal, `refused` counts only the refusal that is about to be inserted.
            let Some(place) = oldest else { return };
            self.pop(place);
        }
    }

    /// Drops the least recently used entries that are not pinned, until these numbers of entries and bytes are left.
    fn trim(&mut self, entries: usize, bytes: u64, why: Option<Why>) -> Dropped<K, V> {
        if self.entries <= entries && self.weight.bytes() <= bytes {
            return Vec::new();
        }
        self.order();
        let mut oldest: Vec<_> = self.slots.iter().rev().filter_map(|(_, (.., s))| entry(s)).filter(|e| !e.is_pinned()).cloned().collect();
        oldest.reverse();
        let mut dropped = Vec::new();
        while let Some(entry) = oldest.pop() {
            let over = if self.entries > entries {
                Why::Entries
            } else if self.weight.bytes() > bytes {
                Why::Bytes
            } else {
                break;
            };
            self.remove(entry.keyed());
            dropped.push((entry, why.unwrap_or(over)));
        }
        dropped
    }

    fn forget(&mut self, entry: &Entry<K, V>) {
        self.entries -= 1;
        self.weight.host = self.weight.host.saturating_sub(entry.weight.host);
        self.weight.device = self.weight.device.saturating_sub(entry.weight.device);
        self.weight.workspace = self.weight.workspace.saturating_sub(entry.weight.workspace);
    }

    /// Moves the entries used since the last call to the front, in order of use.
    fn order(&mut self) {
        let mut used: Vec<(u64, u64)> = self
            .slots
            .iter()
            .filter_map(|(place, (.., slot))| entry(slot).map(|e| (e.used(), *place)))
            .filter(|(at, _)| *at > self.ordered)
            .collect();
        used.sort_by_key(|(at, _)| *at);
        for (at, place) in used {
            self.slots.promote(&place);
            self.ordered = at;
        }
    }
}

fn entry<K, V, T, U>(slot: &Slot<K, V, T, U>) -> Option<&Arc<Entry<K, V>>> {
    match slot {
        Slot::Ready(entry) => Some(entry),
        Slot::Building(_) | Slot::Refused { .. } => None,
    }
}
