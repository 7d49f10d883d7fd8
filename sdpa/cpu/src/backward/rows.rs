//! The rows of a cell, one band at a time: packed in both orders, with per-row values.

use super::Call;
use super::cut::Cut;
use super::kernel::Delta;
use crate::element::Element;
use crate::isa::Isa;
use crate::pack::{CopyRows, Head, Transpose, View, all_finite};
use crate::schedule::Extents;
use std::ops::Range;

/// Rows of a KV head, and the keys that they attend to.
#[derive(Debug)]
pub(super) struct Queries<'a, T> {
    pub(super) call: &'a Call<'a, T>,
    pub(super) head: Head,
    /// Extents of the batch entry.
    pub(super) extents: Extents,
}

impl<T: Element> Queries<'_, T> {
    /// Returns the offset of a row in stats.
    fn place(&self, row: usize) -> usize {
        self.call.stats.place(self.head.index(row))
    }

    fn stat(&self, row: usize) -> f32 {
        self.call.stats.data[self.place(row)]
    }

    fn norm(&self, row: usize) -> [f32; 2] {
        self.call.norms.get(&self.call.stats, self.place(row))
    }

    /// Returns the keys that a row attends to; a row whose scores are all -inf attends to none.
    fn keys_of_row(&self, row: usize) -> Range<usize> {
        if self.stat(row) == f32::NEG_INFINITY { 0..0 } else { self.extents.keys_of_row(row) }
    }

    /// Returns the keys that all of the rows attend to.
    pub(super) fn keys_of_all(&self, rows: &Range<usize>) -> Range<usize> {
        let none = rows.clone().any(|row| self.stat(row) == f32::NEG_INFINITY);
        if none { 0..0 } else { self.extents.keys_of_all(rows) }
    }
}

/// A tile of a band of rows.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    /// The index of the tile among the tiles of the band.
    pub(super) index: usize,
    /// The rows of the tile, relative to the first row of the band.
    pub(super) rows: Range<usize>,
    /// The lanes of the tile, relative to the first row of the band. Lanes past the last row repeat that row, so that they need no mask.
    pub(super) lanes: Range<usize>,
    /// Number of registers per tile.
    pub(super) vectors: usize,
    /// The keys that all rows of the tile attend to.
    pub(super) core: Range<usize>,
}

/// Rows of an operand, packed in both orders.
#[derive(Debug)]
pub(super) struct Packed<'a> {
    /// The rows in the layout `[column][row]` of each tile.
    pub(super) lanes: &'a mut [f32],
    /// The rows in the layout `[row][column]`.
    pub(super) rows: &'a mut [f32],
    /// Number of columns: a multiple of the lanes of a register.
    pub(super) columns: usize,
    /// Rows that contain inf or NaN and do not attend to all keys. They are zeros in `rows`, because 0 times inf would be NaN in a key that such a row does not
    /// attend to. Their contribution to keys that they attend to is added separately.
    pub(super) holes: Vec<usize>,
}

impl<'a> Packed<'a> {
    pub(super) fn new(lanes: &'a mut [f32], rows: &'a mut [f32], columns: usize) -> Packed<'a> {
        Packed { lanes, rows, columns, holes: Vec::new() }
    }

    fn copy<T: Element>(&mut self, isa: Isa, from: &View<'_, T>, head: Head, rows: Range<usize>) {
        isa.run(CopyRows { from, head, rows, width: self.columns, to: self.rows });
    }

    fn transpose(&mut self, isa: Isa, tile: &Tile, factor: f32) {
        let columns = self.columns;
        for lane in tile.rows.end..tile.lanes.end {
            self.rows.copy_within((tile.rows.end - 1) * columns..tile.rows.end * columns, lane * columns);
        }
        let all = tile.lanes.start * columns..tile.lanes.end * columns;
        isa.run(Transpose { n_columns: columns, factor, from: &self.rows[all.clone()], to: &mut self.lanes[all] });
    }

    fn take_out(&mut self, row: usize) {
        let elements = &mut self.rows[row * self.columns..][..self.columns];
        if !all_finite(elements) {
            elements.fill(0.0);
            self.holes.push(row);
        }
    }
}

/// The packed operands of one band of rows, with per-row values.
#[derive(Debug)]
pub(super) struct Band<'a> {
    pub(super) rows: Range<usize>,
    pub(super) tiles: Vec<Tile>,
    /// `lanes` is multiplied by the scale of the forward pass, `rows` is not.
    pub(super) q: Packed<'a>,
    pub(super) d_o: Packed<'a>,
    /// Log-sum-exp of each row, in two parts: an f32, and a correction that is added to it.
    pub(super) lse: &'a mut [f32],
    pub(super) lse_rest: &'a mut [f32],
    /// `Σ d_o · o` of each row.
    pub(super) delta: &'a mut [f32],
    /// First key of each row, and the key after its last one.
    pub(super) start: &'a mut [u32],
    pub(super) end: &'a mut [u32],
    /// Scratch memory for one row.
    pub(super) buffer: &'a mut [f32],
}

impl Band<'_> {
    /// Packs other rows, whose cell has these keys.
    pub(super) fn pack<T: Element>(&mut self, of: &Queries<'_, T>, rows: Range<usize>, keys: &Range<usize>) {
        let Call { cut, isa, scale, .. } = of.call;
        self.q.copy(*isa, &of.call.q, of.head, rows.clone());
        self.d_o.copy(*isa, &of.call.d_o, of.head, rows.clone());
        let (columns, d_o, buffer, delta) = (self.d_o.columns, &*self.d_o.rows, &mut *self.buffer, &mut *self.delta);
        isa.run(Delta { o: &of.call.o, head: of.head, rows: rows.clone(), columns, d_o, buffer, delta });
        self.tiles.clear();
        self.tiles.extend(tiles(of, &rows, cut, isa.lanes()));
        for tile in &self.tiles {
            self.q.transpose(*isa, tile, *scale);
            self.d_o.transpose(*isa, tile, 1.0);
            for lane in tile.lanes.clone() {
                let like = lane.min(tile.rows.end - 1);
                let keys = of.keys_of_row(rows.start + like);
                (self.start[lane], self.end[lane]) = (keys.start as u32, keys.end as u32);
                [self.lse[lane], self.lse_rest[lane]] = of.norm(rows.start + like);
                self.delta[lane] = self.delta[like];
            }
        }
        self.q.holes.clear();
        self.d_o.holes.clear();
        for row in 0..rows.len() {
            if of.call.rules.drop() || self.start[row] as usize > keys.start || (self.end[row] as usize) < keys.end {
                self.q.take_out(row);
                self.d_o.take_out(row);
            }
        }
        self.rows = rows;
    }

    /// Returns true if a lane attends to a key.
    pub(super) fn attends(&self, lane: usize, key: usize) -> bool {
        (self.start[lane]..self.end[lane]).contains(&(key as u32))
    }
}

/// Splits rows into tiles; the last may have fewer registers.
fn tiles<T: Element>(of: &Queries<'_, T>, rows: &Range<usize>, cut: &Cut, lanes: usize) -> impl Iterator<Item = Tile> {
    (0..rows.len()).step_by(cut.tile_rows).enumerate().map(move |(index, first)| {
        let past = (first + cut.tile_rows).min(rows.len());
        let vectors = (past - first).div_ceil(lanes);
        let core = of.keys_of_all(&(rows.start + first..rows.start + past));
        Tile { index, rows: first..past, lanes: first..first + vectors * lanes, vectors, core }
    })
}
