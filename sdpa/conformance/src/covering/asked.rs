//! Asks which rows are supported, several at a time.

use super::{Builder, Row};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns whether an executor supports a row. The answer must depend on the row alone.
pub type Supports<'a> = dyn Fn(&Row) -> bool + Sync + 'a;

/// Asks which rows are supported, each row at most once. Threads ask rows ahead that the construction may need. It reads the answers in its own order,
/// so the rows that it takes do not depend on the number of threads.
pub(super) struct Asked<'a> {
    supports: &'a Supports<'a>,
    threads: usize,
    answers: HashMap<Row, bool>,
}

impl<'a> Asked<'a> {
    pub(super) fn new(supports: &'a Supports<'a>, threads: usize) -> Asked<'a> {
        Asked { supports, threads: threads.max(1), answers: HashMap::new() }
    }

    /// How many rows are asked at the same time.
    pub(super) fn width(&self) -> usize {
        self.threads
    }

    /// Whether the answer of a row is known.
    pub(super) fn knows(&self, row: &Row) -> bool {
        self.answers.contains_key(row)
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

    /// Asks rows on all threads. One thread asks nothing ahead: it would only waste questions.
    pub(super) fn ahead(&mut self, rows: &[&Row]) {
        let mut open: Vec<&Row> = Vec::new();
        for &row in rows {
            if !self.knows(row) && !open.contains(&row) {
                open.push(row);
            }
        }
        if self.threads == 1 || open.len() < 2 {
            return;
        }
        let (supports, next) = (self.supports, AtomicUsize::new(0));
        let ask = || {
            let mine = std::iter::from_fn(|| open.get(next.fetch_add(1, Ordering::Relaxed)));
            mine.map(|row| ((*row).clone(), supports(row))).collect::<Vec<_>>()
        };
        let answers = std::thread::scope(|scope| {
            let others: Vec<_> = (1..self.threads.min(open.len())).map(|_| scope.spawn(ask)).collect();
            let mut answers = ask();
            others.into_iter().for_each(|other| answers.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
            answers
        });
        self.answers.extend(answers);
    }

    /// Returns the first supported row that `draw` yields for `0..most`. It leaves the builder's random numbers as they were after that row was drawn, or
    /// after the last one: rows that were drawn ahead leave no trace.
    pub(super) fn first<'b>(
        &mut self,
        builder: &mut Builder<'b>,
        most: usize,
        mut draw: impl FnMut(&mut Builder<'b>, usize) -> Option<Row>,
    ) -> Option<Row> {
        let mut n = 0;
        while n < most {
            let mut drawn = Vec::new();
            // Rows with known answers cost nothing: the batch is filled with others.
            let mut open = 0;
            while n < most && open < self.threads {
                if let Some(row) = draw(builder, n) {
                    open += usize::from(!self.knows(&row));
                    let ends = self.answers.get(&row) == Some(&true);
                    drawn.push((row, builder.random.clone()));
                    if ends {
                        n = most;
                        break;
                    }
                }
                n += 1;
            }
            self.ahead(&drawn.iter().map(|(row, _)| row).collect::<Vec<_>>());
            if let Some((row, after)) = drawn.into_iter().find(|(row, _)| self.is_supported(row)) {
                builder.random = after;
                return Some(row);
            }
        }
        None
    }
}
