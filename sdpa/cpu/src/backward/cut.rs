//! Splits the backward pass into cells: some rows of a KV head against some of its keys.
//!
//! The split depends on the problem and the instruction set, never on the number of threads, so that results do not depend on it either.

use crate::isa::{Isa, PANEL};
use crate::pack::overlap;
use crate::program::Lengths;
use crate::schedule::{Extents, SERIAL_FLOPS};
use sdpa_core::problem::Problem;
use std::ops::Range;

/// Maximum rows and keys of a cell. Rows are packed once per cell, which few keys do not amortise. Sums over rows are added once per cell, which few rows do
/// not amortise.
const MOST_ROWS: usize = 1024;
const MOST_KEYS: usize = 512;

/// Approximate number of elements in the keys of a cell.
const KEY_ELEMENTS: usize = 65_536;

/// Minimum rows and keys of a cell.
const LEAST_ROWS: usize = 128;
const LEAST_KEYS: usize = 256;

/// Number of cells that keep threads busy; with fewer, cells are made smaller.
const CELLS: usize = 32;

/// Approximate number of rows that are packed together, and so of terms in a sum over rows that stays in registers.
const BAND_ROWS: usize = 64;

/// Keys of a block: its scores and their gradients stay in the L1 cache.
const BLOCK_KEYS: usize = 48;

/// A cell of a backward pass: some rows of a KV head against some of its keys, by the indices of these strips.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    /// Index of the strip of rows, and of this cell among the terms of its sum over keys.
    pub(super) rows: usize,
    pub(super) part_of_rows: usize,
    /// Index of the strip of keys, and of this cell among the terms of its sum over rows.
    pub(super) keys: usize,
    pub(super) part_of_keys: usize,
}

/// The cells of a KV head that are not masked out, in the order in which they start.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) cells: Vec<Cell>,
    /// Number of terms in the sum of each strip of rows, and of each strip of keys.
    pub(super) parts_of_rows: Vec<usize>,
    pub(super) parts_of_keys: Vec<usize>,
}

/// A backward problem whose work is split into cells: some rows of a KV head against some of its keys.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) extents: Extents,
    /// Number of KV heads in all batch entries.
    pub(super) heads: usize,
    /// Number of rows of a tile, of a band (a multiple of a tile) and of a strip (a multiple of a tile).
    pub(super) tile_rows: usize,
    pub(super) band_rows: usize,
    pub(super) strip_rows: usize,
    /// Number of keys of a block and of a strip: multiples of a panel.
    pub(super) block_keys: usize,
    pub(super) strip_keys: usize,
    /// Number of columns of packed rows: multiples of the lanes of a register.
    pub(super) columns_qk: usize,
    pub(super) columns_v: usize,
    /// One grid for all batch entries, or one per packed sequence, or per entry with a per-sequence aligned window.
    grids: Vec<Grid>,
    /// Number of strips of rows and of keys before each batch entry.
    before: Vec<[usize; 2]>,
    lengths: Lengths,
    pub(super) threads: usize,
}

impl Cut {
    pub(super) fn new(problem: &Problem, isa: Isa, threads: usize, lengths: Lengths) -> Cut {
        let extents = Extents::of(problem);
        let heads = extents.batch * extents.heads_kv;
        let (n_rows, n_keys) = (extents.seq_q * extents.group, extents.seq_kv);
        let tile_rows = isa.lanes() * isa.tile_vectors();
        let dim = extents.dim_qk.max(extents.dim_v);
        let (mut rows, mut keys) = (MOST_ROWS, (KEY_ELEMENTS / dim).clamp(LEAST_KEYS, MOST_KEYS));
        let invariant = problem.batch_invariant();
        while !invariant && heads * n_rows.div_ceil(rows) * n_keys.div_ceil(keys) < CELLS {
            if rows > LEAST_ROWS && (rows >= keys || keys <= LEAST_KEYS) {
                rows /= 2;
            } else if keys > LEAST_KEYS {
                keys /= 2;
            } else {
                break;
            }
        }
        // A row's terms, and a key's, are added strip by strip. If sums must round alike in every call, strips have one size whatever the lengths are.
        let strip = |n: usize, most: usize, unit: usize| {
            let len = if invariant { most.next_multiple_of(unit).min(n) } else { n.div_ceil(n.div_ceil(most)) };
            len.next_multiple_of(unit)
        };
        let (strip_rows, strip_keys) = (strip(n_rows, rows, tile_rows), strip(n_keys, keys, PANEL));

        let grids: Vec<Grid> = if lengths.packed() || extents.moves() {
            (0..extents.batch).map(|batch| Grid::new(&extents.within(&lengths, batch), [strip_rows, strip_keys])).collect()
        } else {
            vec![Grid::new(&extents, [strip_rows, strip_keys])]
        };
        let (mut n_cells, mut n_strips) = (0, [0; 2]);
        let before = (0..extents.batch).map(|batch| {
            let Grid { cells, parts_of_rows, parts_of_keys } = grids.get(batch).unwrap_or(&grids[0]);
            n_cells += extents.heads_kv * cells.len();
            let [rows, keys] = n_strips;
            n_strips = [rows + extents.heads_kv * parts_of_rows.len(), keys + extents.heads_kv * parts_of_keys.len()];
            [rows, keys]
        });
        let before = before.collect();
        let heads_q = (extents.heads_kv * extents.group) as f64;
        let flops = 2.0 * heads_q * extents.pairs(&lengths) * (3 * extents.dim_qk + 2 * extents.dim_v) as f64;
        let threads = if flops < SERIAL_FLOPS { 1 } else { threads.min(n_cells).max(1) };
        Cut {
            extents,
            heads,
            tile_rows,
            band_rows: BAND_ROWS.next_multiple_of(tile_rows),
            strip_rows,
            block_keys: BLOCK_KEYS.min(strip_keys),
            strip_keys,
            columns_qk: extents.dim_qk.next_multiple_of(isa.lanes()),
            columns_v: extents.dim_v.next_multiple_of(isa.lanes()),
            grids,
            before,
            lengths,
            threads,
        }
    }

    /// Returns the extents of a batch entry.
    pub(super) fn extents_of(&self, batch: usize) -> Extents {
        self.extents.within(&self.lengths, batch)
    }

    /// Returns the cells of a head.
    pub(super) fn grid(&self, head: usize) -> &Grid {
        self.grids.get(head / self.extents.heads_kv).unwrap_or(&self.grids[0])
    }

    /// Returns the indices of a cell's strips of rows and of keys among those of all heads.
    pub(super) fn strips(&self, head: usize, cell: &Cell) -> [usize; 2] {
        let ([rows, keys], of_entry) = (self.before[head / self.extents.heads_kv], head % self.extents.heads_kv);
        let Grid { parts_of_rows, parts_of_keys, .. } = self.grid(head);
        [rows + of_entry * parts_of_rows.len() + cell.rows, keys + of_entry * parts_of_keys.len() + cell.keys]
    }

    /// Returns the rows of a cell.
    pub(super) fn rows(&self, extents: &Extents, cell: &Cell) -> Range<usize> {
        span(cell.rows, self.strip_rows, extents.seq_q * extents.group)
    }

    /// Returns the keys of a cell.
    pub(super) fn keys(&self, extents: &Extents, cell: &Cell) -> Range<usize> {
        span(cell.keys, self.strip_keys, extents.seq_kv)
    }

    /// Returns the number of elements in the sums of a strip of rows, `[tile][dim_qk][row]`.
    pub(super) fn row_sums(&self) -> usize {
        self.strip_rows * self.extents.dim_qk
    }

    /// Returns the number of elements in the dk sums of a strip of keys, `[key][columns_qk]`, and in the dv sums after them, `[key][columns_v]`.
    pub(super) fn key_sums(&self) -> [usize; 2] {
        [self.strip_keys * self.columns_qk, self.strip_keys * self.columns_v]
    }
}

impl Grid {
    fn new(extents: &Extents, [strip_rows, strip_keys]: [usize; 2]) -> Grid {
        let (n_rows, n_keys) = (extents.seq_q * extents.group, extents.seq_kv);
        let mut parts_of_rows = vec![0; n_rows.div_ceil(strip_rows)];
        let mut parts_of_keys = vec![0; n_keys.div_ceil(strip_keys)];
        let mut cells = Vec::new();
        for (rows, part_of_rows) in parts_of_rows.iter_mut().enumerate() {
            let reached = extents.keys_of_any(&span(rows, strip_rows, n_rows));
            for (keys, part_of_keys) in parts_of_keys.iter_mut().enumerate() {
                if !overlap(&reached, &span(keys, strip_keys, n_keys)).is_empty() {
                    cells.push(Cell { rows, part_of_rows: *part_of_rows, keys, part_of_keys: *part_of_keys });
                    *part_of_rows += 1;
                    *part_of_keys += 1;
                }
            }
        }
        // Row by row, the partial sums dK and dV of all keys are in memory at the same time; key by key, the partial sums dQ of all rows.
        // Choose the order that needs less memory.
        if n_rows * extents.dim_qk < n_keys * (extents.dim_qk + extents.dim_v) {
            cells.sort_by_key(|cell| (cell.keys, cell.rows));
        }
        Grid { cells, parts_of_rows, parts_of_keys }
    }
}

fn span(strip: usize, len: usize, n: usize) -> Range<usize> {
    strip * len..((strip + 1) * len).min(n)
}
