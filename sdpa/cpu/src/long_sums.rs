//! Sums in f64 for rows of many keys. The f32 sums over a few thousand keys are added to them.
//!
//! An f32 sum loses precision as terms are added: adding one small number a million times is off by 1e-3. A piece with few keys does not pay for this.

use super::schedule::{Blocks, Piece, Schedule};

/// Number of keys whose sums stay in f32: about twenty blocks.
const KEYS: usize = 2048;

/// Sums over the keys so far, relative to the maximum at the time of the last addition.
#[derive(Debug)]
pub(super) struct Long {
    /// The first key that is not included.
    from: usize,
    max: Vec<f32>,
    sum: Vec<f64>,
    /// In the layout of the f32 outputs.
    o: Vec<f64>,
}

/// Returns the factor that rescales P from one maximum to another that is not smaller.
fn factor(from: f32, to: f32) -> f64 {
    // Both maxima are −∞ if no key was seen yet. Then there is nothing to rescale, and −∞ − −∞ would be NaN.
    if from == f32::NEG_INFINITY && to == f32::NEG_INFINITY { 1.0 } else { (f64::from(from) - f64::from(to)).exp() }
}

/// Contiguous elements in the output of a piece: element `n` belongs to row `first + n · step`.
#[derive(Debug)]
pub(super) struct Outputs<'o> {
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) o: &'o mut [f32],
}

impl Long {
    /// Returns the sums for a piece with this many rows and output elements, or `None` if it has few keys.
    pub(super) fn of(piece: &Piece, blocks: &Blocks, n_rows: usize, n_elements: usize) -> Option<Long> {
        // With aligned blocks, sums begin at multiples of this number of keys.
        let aligned = KEYS.next_multiple_of(blocks.block_keys);
        let from = if blocks.aligned { piece.keys.start - piece.keys.start % aligned } else { piece.keys.start };
        (piece.keys.end - from > KEYS).then(|| Long {
            from,
            max: vec![f32::NEG_INFINITY; n_rows],
            sum: vec![0.0; n_rows],
            o: vec![0.0; n_elements],
        })
    }

    /// Returns the maximum bytes of one worker's sums.
    pub(super) fn bytes(schedule: &Schedule, n_elements: usize, n_rows: usize) -> usize {
        let any = schedule.pieces.iter().any(|piece| piece.keys.len() > KEYS || schedule.blocks.aligned && piece.keys.end > KEYS);
        if any { 8 * n_elements + 12 * n_rows } else { 0 }
    }

    /// Returns the maximum bytes if pieces may have any number of the keys.
    pub(super) fn most_bytes(schedule: &Schedule, n_elements: usize, n_rows: usize) -> usize {
        if schedule.extents.seq_kv > KEYS { 8 * n_elements + 12 * n_rows } else { 0 }
    }

    /// Returns true if the keys before this one should be added.
    pub(super) fn is_due(&self, key: usize) -> bool {
        key - self.from >= KEYS
    }

    /// Adds the f32 sums of the keys before `key`, and resets them to 0.
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

    /// Writes the sums over all keys to the f32 sums.
    pub(super) fn finish<'o>(self, sum: &mut [f32], o: impl Iterator<Item = Outputs<'o>>) {
        sum.iter_mut().zip(self.sum).for_each(|(sum, total)| *sum = total as f32);
        o.flat_map(|outputs| outputs.o).zip(self.o).for_each(|(o, total)| *o = total as f32);
    }
}
