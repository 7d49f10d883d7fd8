//! The last events of a cache.

use super::facts::CacheEvent;
use std::collections::VecDeque;

/// The most events that are kept.
const KEPT: usize = 4096;

/// A bounded list of events.
#[derive(Debug, Default)]
pub(super) struct Journal {
    events: VecDeque<CacheEvent>,
    forgotten: u64,
}

impl Journal {
    pub(super) fn push(&mut self, event: CacheEvent) {
        if self.events.len() == KEPT {
            self.events.pop_front();
            self.forgotten += 1;
        }
        self.events.push_back(event);
    }

    pub(super) fn list(&self) -> (Vec<CacheEvent>, u64) {
        (self.events.iter().cloned().collect(), self.forgotten)
    }
}
