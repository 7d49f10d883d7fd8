//! What is computed at a time: cells, each some rows of a key head against some of its keys.
//!
//! The cut depends on the problem and the instruction set, never on the threads, so results do not either.

use crate::isa::{Isa, PANEL};
use crate::pack::overlap;
use crate::schedule::{Extents, SERIAL_FLOPS};
use sdpa_core::problem::Problem;
use std::ops::Range;

/// Rows and keys of a cell at most. Rows are packed once per cell, so few keys make that dear; sums over rows are
/// added up once per cell, so few rows do.
const MOST_ROWS: usize = 1024;
const MOST_KEYS: usize = 512;

/// Elements of the keys of a cell, about.
const KEY_ELEMENTS: usize = 65_536;

/// Fewest rows and keys that are worth a cell of their own.
const LEAST_ROWS: usize = 128;
const LEAST_KEYS: usize = 256;

/// Cells that are enough to keep threads busy: where there are fewer they are made smaller.
const CELLS: usize = 32;

/// Rows that are packed together, about: the length of the sums over rows that stay in registers.
const BAND_ROWS: usize = 64;

/// Keys of a block: its scores, and their gradients, stay in the first level of cache.
const BLOCK_KEYS: usize = 48;

/// Rows of a key head against keys of it, by their numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    /// Which strip of rows, and which part of its sum over keys this cell is.
    pub(super) rows: usize,
    pub(super) part_of_rows: usize,
    /// Which strip of keys, and which part of its sum over rows this cell is.
    pub(super) keys: usize,
    pub(super) part_of_keys: usize,
}

/// A problem cut to cells.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) extents: Extents,
    /// Key heads of all batch entries.
    pub(super) heads: usize,
    /// Rows of a tile, of a band (whole tiles) and of a strip (whole tiles).
    pub(super) tile_rows: usize,
    pub(super) band_rows: usize,
    pub(super) strip_rows: usize,
    /// Keys of a block and of a strip: whole panels.
    pub(super) block_keys: usize,
    pub(super) strip_keys: usize,
    /// Columns of packed rows: whole registers.
    pub(super) columns_qk: usize,
    pub(super) columns_v: usize,
    /// The cells of one head that are not masked out, in the order to start them.
    pub(super) cells: Vec<Cell>,
    /// How many parts the sum of each strip of rows has, and of each strip of keys.
    pub(super) parts_of_rows: Vec<usize>,
    pub(super) parts_of_keys: Vec<usize>,
    pub(super) threads: usize,
}

impl Cut {
    pub(super) fn new(problem: &Problem, isa: Isa, threads: usize) -> Cut {
        let extents = Extents::of(problem);
        let heads = extents.batch * extents.heads_kv;
        let (n_rows, n_keys) = (extents.seq_q * extents.group, extents.seq_kv);
        let tile_rows = isa.lanes() * isa.tile_vectors();
        let dim = extents.dim_qk.max(extents.dim_v);
        let (mut rows, mut keys) = (MOST_ROWS, (KEY_ELEMENTS / dim).clamp(LEAST_KEYS, MOST_KEYS));
        while heads * n_rows.div_ceil(rows) * n_keys.div_ceil(keys) < CELLS {
            if rows > LEAST_ROWS && (rows >= keys || keys <= LEAST_KEYS) {
                rows /= 2;
            } else if keys > LEAST_KEYS {
                keys /= 2;
            } else {
                break;
            }
        }
        let even = |n: usize, most: usize, unit: usize| n.div_ceil(n.div_ceil(most)).next_multiple_of(unit);
        let (strip_rows, strip_keys) = (even(n_rows, rows, tile_rows), even(n_keys, keys, PANEL));

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
        // One strip of rows after the other, sums of all keys are under way; the other way round, those of all rows.
        if n_rows * extents.dim_qk < n_keys * (extents.dim_qk + extents.dim_v) {
            cells.sort_by_key(|cell| (cell.keys, cell.rows));
        }
        let flops = 2.0 * heads as f64 * n_rows as f64 * n_keys as f64 * (3 * extents.dim_qk + 2 * extents.dim_v) as f64;
        let threads = if flops < SERIAL_FLOPS { 1 } else { threads.min(heads * cells.len()).max(1) };
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
            cells,
            parts_of_rows,
            parts_of_keys,
            threads,
        }
    }

    /// The rows of a strip.
    pub(super) fn rows(&self, strip: usize) -> Range<usize> {
        span(strip, self.strip_rows, self.extents.seq_q * self.extents.group)
    }

    /// The keys of a strip.
    pub(super) fn keys(&self, strip: usize) -> Range<usize> {
        span(strip, self.strip_keys, self.extents.seq_kv)
    }

    /// Elements of the sums of a strip of rows, `[tile][dim_qk][row]`.
    pub(super) fn row_sums(&self) -> usize {
        self.strip_rows * self.extents.dim_qk
    }

    /// Elements of the sums of a strip of keys by `k`, `[key][columns_qk]`; those by `v` follow, `[key][columns_v]`.
    pub(super) fn key_sums(&self) -> [usize; 2] {
        [self.strip_keys * self.columns_qk, self.strip_keys * self.columns_v]
    }
}

fn span(strip: usize, len: usize, n: usize) -> Range<usize> {
    strip * len..((strip + 1) * len).min(n)
}
