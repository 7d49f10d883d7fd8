//! Rows of many keys: their sums are kept in f64, to which those over a few thousand keys are added.
//!
//! A sum in f32 loses digits with its terms: adding one small number a million times moves the result by 1e-3. Where a piece has
//! few keys, nothing of this costs anything.

use super::schedule::{Piece, Schedule};

/// Keys whose sums are kept in f32: twenty blocks or so.
const KEYS: usize = 2048;

/// Sums over the keys that are done, relative to the maximum that they had then.
#[derive(Debug)]
pub(super) struct Long {
    /// The first key that is not in them.
    from: usize,
    max: Vec<f32>,
    sum: Vec<f64>,
    /// As the outputs in f32 lie.
    o: Vec<f64>,
}

/// What a weight relative to one maximum is relative to another that is not smaller.
fn factor(from: f32, to: f32) -> f64 {
    // No key yet: there is nothing to be scaled.
    if from == f32::NEG_INFINITY && to == f32::NEG_INFINITY { 1.0 } else { (f64::from(from) - f64::from(to)).exp() }
}

/// Neighbours in the output of a piece: element `n` is of row `first + n · step`.
#[derive(Debug)]
pub(super) struct Outputs<'o> {
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) o: &'o mut [f32],
}

impl Long {
    /// For a piece with this many rows and elements of the output; none where its keys are few.
    pub(super) fn of(piece: &Piece, n_rows: usize, n_elements: usize) -> Option<Long> {
        (piece.keys.len() > KEYS).then(|| Long {
            from: piece.keys.start,
            max: vec![f32::NEG_INFINITY; n_rows],
            sum: vec![0.0; n_rows],
            o: vec![0.0; n_elements],
        })
    }

    /// Bytes that one worker has of this at most.
    pub(super) fn bytes(schedule: &Schedule, n_elements: usize, n_rows: usize) -> usize {
        let any = schedule.pieces.iter().any(|piece| piece.keys.len() > KEYS);
        if any { 8 * n_elements + 12 * n_rows } else { 0 }
    }

    /// The same where pieces may have any number of the keys.
    pub(super) fn most_bytes(schedule: &Schedule, n_elements: usize, n_rows: usize) -> usize {
        if schedule.extents.seq_kv > KEYS { 8 * n_elements + 12 * n_rows } else { 0 }
    }

    /// Whether the keys before this one are worth being added.
    pub(super) fn is_due(&self, key: usize) -> bool {
        key - self.from >= KEYS
    }

    /// Adds the sums in f32 up to a key, which begin anew at 0.
    pub(super) fn take<'o>(&mut self, key: usize, max: &[f32], sum: &mut [f32], o: impl Iterator<Item = Outputs<'o>>) {
        let factors: Vec<f64> = self.max.iter().zip(max).map(|(from, to)| factor(*from, *to)).collect();
        for ((total, sum), factor) in self.sum.iter_mut().zip(&mut *sum).zip(&factors) {
            *total = *total * factor + f64::from(std::mem::take(sum));
        }
        let mut totals = self.o.as_mut_slice();
        for Outputs { first, step, o } in o {
            let (total, rest) = std::mem::take(&mut totals).split_at_mut(o.len());
            for (n, (total, o)) in total.iter_mut().zip(o).enumerate() {
                *total = *total * factors[first + n * step] + f64::from(std::mem::take(o));
            }
            totals = rest;
        }
        self.max.copy_from_slice(max);
        self.from = key;
    }

    /// The sums over all keys that were added, in the place of those in f32.
    pub(super) fn finish<'o>(self, sum: &mut [f32], o: impl Iterator<Item = Outputs<'o>>) {
        sum.iter_mut().zip(self.sum).for_each(|(sum, total)| *sum = total as f32);
        o.flat_map(|outputs| outputs.o).zip(self.o).for_each(|(o, total)| *o = total as f32);
    }
}
