//! Asks an executor which rows it supports, once per row.

use super::Row;
use std::collections::HashMap;

/// A function that returns whether an executor supports the problem of a row. The answer must depend on the row alone.
pub type Supports<'a> = dyn Fn(&Row) -> bool + 'a;

/// Remembers which rows are supported, because a query to cuDNN takes tens of milliseconds. One thread asks: most rows that several threads would query ahead
/// are not needed. cuDNN 9.27 took longer with two threads (62 s and 68 s) than with one (41 s).
pub(super) struct Asked<'a> {
    supports: &'a Supports<'a>,
    answers: HashMap<Row, bool>,
}

impl<'a> Asked<'a> {
    pub(super) fn new(supports: &'a Supports<'a>) -> Asked<'a> {
        Asked { supports, answers: HashMap::new() }
    }

    /// Returns whether a row is supported.
    pub(super) fn is_supported(&mut self, row: &Row) -> bool {
        if let Some(answer) = self.answers.get(row) {
            return *answer;
        }
        let answer = (self.supports)(row);
        self.answers.insert(row.clone(), answer);
        answer
    }
}
