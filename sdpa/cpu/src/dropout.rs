//! Dropout of P, tile by tile.

use super::program::Row;
use sdpa_core::{DropoutMask, SQUARE};
use std::ops::Range;

/// The dropout mask of a call, and the factor of the elements that it keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) mask: DropoutMask,
    pub(super) scale: f32,
}

/// A square of the random generator with its location: head, and the indices of its queries and keys.
type Square = ([usize; 3], [u16; SQUARE]);

/// The dropout state of one worker.
#[derive(Debug)]
pub(super) struct Dropper {
    left: Left,
    batch: usize,
    /// The rows of each tile.
    rows: Vec<Vec<Row>>,
    /// The last square of each head of a group: neighbours in a tile are in one square.
    squares: Vec<Option<Square>>,
    /// The mask bits of each lane, for the keys of a square.
    bits: Vec<u16>,
}

impl Dropper {
    pub(super) fn new(left: Left, group: usize) -> Dropper {
        Dropper { left, batch: 0, rows: Vec::new(), squares: vec![None; group], bits: Vec::new() }
    }

    /// Selects a batch entry for the next calls.
    pub(super) fn entry(&mut self, batch: usize) {
        self.batch = batch;
        self.squares.fill(None);
    }

    /// Stores the rows of the tile with index `tile`, one row per lane.
    pub(super) fn rows(&mut self, tile: usize, rows: impl Iterator<Item = Row>) {
        if self.rows.len() <= tile {
            self.rows.resize_with(tile + 1, Vec::new);
        }
        self.rows[tile].clear();
        self.rows[tile].extend(rows);
    }

    /// Multiplies numbers, `[key][row]`, by the dropout factor of their positions.
    pub(super) fn multiply(&mut self, tile: usize, keys: &Range<usize>, numbers: &mut [f32]) {
        let Dropper { left: Left { mask, scale }, batch, rows, squares, bits } = self;
        let (rows, group) = (&rows[tile], squares.len());
        let mut first = keys.start;
        while first < keys.end {
            let end = (first / SQUARE * SQUARE + SQUARE).min(keys.end);
            bits.clear();
            bits.extend(rows.iter().map(|row| {
                let at = [row.head, row.query / SQUARE, first / SQUARE];
                let slot = &mut squares[row.head % group];
                let square = match slot {
                    Some((known, square)) if *known == at => square,
                    _ => &mut slot.insert((at, mask.square([*batch, at[0], at[1], at[2]]))).1,
                };
                square[row.query % SQUARE]
            }));
            let of_keys = numbers[(first - keys.start) * rows.len()..(end - keys.start) * rows.len()].chunks_exact_mut(rows.len());
            for (key, of_key) in (first % SQUARE..).zip(of_keys) {
                for (number, bits) in of_key.iter_mut().zip(&*bits) {
                    *number *= if bits >> key & 1 == 1 { *scale } else { 0.0 };
                }
            }
            first = end;
        }
    }
}
