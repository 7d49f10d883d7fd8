//! Splits a problem into pieces and assigns them to threads.

use super::isa::{Isa, PANEL};
use super::program::Lengths;
use parking_lot::Mutex;
use sdpa_core::DType;
use sdpa_core::mask::{Ends, Region};
use sdpa_core::problem::Problem;
use std::ops::Range;

/// Maximum rows of a strip, before rounding to a multiple of a tile. They share one copy of each block of keys.
const STRIP_ROWS: usize = 256;

/// Maximum elements of a strip's queries, if it has more than one tile.
const STRIP_ELEMENTS: usize = 65_536;

/// Approximate number of elements in a block of keys.
const BLOCK_ELEMENTS: usize = 24_576;

/// Number of pieces per thread that keeps every thread busy to the end.
const PIECES_PER_THREAD: usize = 4;

/// Minimum number of keys in a piece of a split strip.
const MIN_SPLIT_KEYS: usize = 256;

/// Number of multiply-adds below which a second thread costs more than it saves.
pub(super) const SERIAL_FLOPS: f64 = 1e6;

/// Extents of a problem. A *row* is a query of a query head. The rows of a KV head are numbered `query * group + head`, so that neighbours share keys and have
/// nearly equal ranges of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub(super) batch: usize,
    pub(super) heads_kv: usize,
    /// Number of query heads per KV head.
    pub(super) group: usize,
    pub(super) seq_q: usize,
    pub(super) seq_kv: usize,
    pub(super) dim_qk: usize,
    pub(super) dim_v: usize,
    region: Region,
    ends: Ends,
    /// Whether these are the extents of one batch entry. Before an entry is selected, a per-sequence aligned window may be anywhere, so any key is possible.
    of_entry: bool,
    /// Number of queries and keys that are not padding: all, until [`Extents::within`] sets them.
    len_q: usize,
    len_kv: usize,
}

impl Extents {
    pub(super) fn of(problem: &Problem) -> Extents {
        Extents {
            batch: problem.batch() as usize,
            heads_kv: problem.heads_kv() as usize,
            group: problem.group() as usize,
            seq_q: problem.seq_q() as usize,
            seq_kv: problem.seq_kv() as usize,
            dim_qk: problem.dim_qk() as usize,
            dim_v: problem.dim_v() as usize,
            region: *problem.region(),
            ends: problem.kept().ends,
            of_entry: false,
            len_q: problem.seq_q() as usize,
            len_kv: problem.seq_kv() as usize,
        }
    }

    /// Returns the extents of one batch entry.
    pub(super) fn within(mut self, lengths: &Lengths, batch: usize) -> Extents {
        if let Some([queries, keys]) = lengths.get(batch) {
            (self.len_q, self.len_kv, self.of_entry) = (queries, keys, true);
            if lengths.packed() {
                (self.seq_q, self.seq_kv) = (queries, keys);
            }
        }
        self
    }

    /// Returns the number of (query, key) pairs of each head, summed over batch entries.
    pub(super) fn pairs(&self, lengths: &Lengths) -> f64 {
        (0..self.batch).map(|batch| self.within(lengths, batch)).map(|entry| entry.seq_q as f64 * entry.seq_kv as f64).sum()
    }

    /// Returns the interval of keys that a row attends to by bands and lengths. Neither end ever decreases from one row to the next, except that padding rows
    /// attend to no key.
    pub(super) fn keys_of_row(&self, row: usize) -> Range<usize> {
        if row >= self.len_q * self.group {
            return 0..0;
        }
        let query = (row / self.group) as i64;
        let band = self.region.key_range(query, self.seq_kv as i64);
        let ends = if self.of_entry { self.ends } else { Ends::default() };
        let ends = ends.key_range(query, [self.len_q as i64, self.len_kv as i64]);
        let start = (band.start.max(ends.start) as usize).min(self.len_kv);
        start..(band.end.min(ends.end) as usize).clamp(start, self.len_kv)
    }

    /// Returns whether a window is at a position that depends on the lengths of batch entries, not only truncated at them.
    pub(super) fn moves(&self) -> bool {
        !self.ends.is_full()
    }

    /// Returns the keys that at least one of the rows attends to.
    pub(super) fn keys_of_any(&self, rows: &Range<usize>) -> Range<usize> {
        let past = rows.end.min(self.len_q * self.group);
        if past <= rows.start {
            return 0..0;
        }
        let (first, last) = (self.keys_of_row(rows.start), self.keys_of_row(past - 1));
        first.start..last.end.max(first.start)
    }

    /// Returns the keys that all of the rows attend to.
    pub(super) fn keys_of_all(&self, rows: &Range<usize>) -> Range<usize> {
        if rows.end > self.len_q * self.group {
            return 0..0;
        }
        let (first, last) = (self.keys_of_row(rows.start), self.keys_of_row(rows.end - 1));
        last.start..first.end.max(last.start)
    }
}

/// The kernel that runs, and its block sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// Whether the few-row kernel runs (decode), with lanes along a row.
    pub(super) few_rows: bool,
    /// Number of rows of a tile.
    pub(super) tile_rows: usize,
    /// Number of rows of a strip: a multiple of a tile, or all rows.
    pub(super) strip_rows: usize,
    /// Number of keys of a block.
    pub(super) block_keys: usize,
    /// Whether blocks begin at multiples of their size, and all of a row's keys belong to one piece, so that a row's sums round alike in every call.
    pub(super) aligned: bool,
}

/// A strip: rows of one KV head that are computed together.
#[derive(Clone, Debug)]
pub(super) struct Strip {
    pub(super) batch: usize,
    pub(super) head_kv: usize,
    pub(super) rows: Range<usize>,
    /// Number of pieces into which the keys of the strip are divided.
    pub(super) n_pieces: usize,
}

/// A piece of the work of a call: a strip of rows with some or all of its keys.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Index of the strip.
    pub(super) strip: usize,
    pub(super) keys: Range<usize>,
    /// Number of (row, key) pairs, by which larger pieces come first.
    pub(super) pairs: usize,
}

/// The work of a call, divided into pieces.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) extents: Extents,
    lengths: Lengths,
    pub(super) blocks: Blocks,
    pub(super) strips: Vec<Strip>,
    /// The pieces, in the order of strips, and of keys within a strip.
    pub(super) pieces: Vec<Piece>,
    pub(super) threads: usize,
}

impl Schedule {
    /// Splits a problem into pieces for this number of threads. `rules` tells that a score_mod, a mask or dropout applies.
    pub(super) fn new(problem: &Problem, isa: Isa, threads: usize, lengths: Lengths, rules: bool) -> Schedule {
        let extents = Extents::of(problem);
        let heads_q = (extents.heads_kv * extents.group) as f64;
        let flops = 2.0 * heads_q * extents.pairs(&lengths) * (extents.dim_qk + extents.dim_v) as f64;
        let threads = if flops < SERIAL_FLOPS { 1 } else { threads };
        let enough = if threads == 1 { 1 } else { threads * PIECES_PER_THREAD };
        let page = problem.paged().map_or(usize::MAX, |paged| paged.page_size as usize);
        let aligned = problem.batch_invariant();
        let blocks = Blocks::new(&extents, (problem.dtype(), page), isa, enough, (rules, aligned));

        // Returns ranges of rows, each with its number of (row, key) pairs.
        let spans_of = |extents: Extents| -> Vec<(Range<usize>, usize)> {
            let n_rows = extents.seq_q * extents.group;
            let spans = (0..n_rows).step_by(blocks.strip_rows).map(|row| row..(row + blocks.strip_rows).min(n_rows));
            let pairs = |rows: &Range<usize>| rows.clone().step_by(extents.group).map(|row| extents.keys_of_row(row).len()).sum::<usize>();
            spans.map(|rows| (rows.clone(), pairs(&rows) * extents.group)).collect()
        };
        // Without per-sequence lengths, every batch entry has the same strips as the first entry.
        let first = spans_of(extents.within(&lengths, 0));
        let entries: Vec<Vec<(Range<usize>, usize)>> =
            (1..extents.batch).map_while(|batch| lengths.get(batch).map(|_| spans_of(extents.within(&lengths, batch)))).collect();
        let spans = |batch: usize| if batch == 0 { &first } else { entries.get(batch - 1).unwrap_or(&first) };
        let all: usize = (0..extents.batch).flat_map(spans).map(|(_, pairs)| pairs).sum();
        let n_strips = (0..extents.batch).map(|batch| spans(batch).len()).sum::<usize>() * extents.heads_kv;
        let fair = (all * extents.heads_kv).div_ceil(enough).max(1);
        let mut strips = Vec::with_capacity(n_strips);
        let mut pieces = Vec::with_capacity(n_strips);
        for batch in 0..extents.batch {
            let of_entry = extents.within(&lengths, batch);
            for head_kv in 0..extents.heads_kv {
                for (rows, pairs) in spans(batch) {
                    let mut keys = of_entry.keys_of_any(rows);
                    if blocks.aligned {
                        keys.start -= keys.start % blocks.block_keys;
                    }
                    let wanted = if enough <= n_strips || blocks.aligned { 1 } else { pairs.div_ceil(fair) };
                    let n_pieces = wanted.min(keys.len() / MIN_SPLIT_KEYS).max(1);
                    for i in 0..n_pieces {
                        let cut = |i: usize| keys.start + keys.len() * i / n_pieces;
                        pieces.push(Piece { strip: strips.len(), keys: cut(i)..cut(i + 1), pairs: pairs / n_pieces });
                    }
                    strips.push(Strip { batch, head_kv, rows: rows.clone(), n_pieces });
                }
            }
        }
        Schedule { extents, lengths, blocks, strips, pieces, threads }
    }

    /// Removes strips from the work; the others keep their numbers.
    pub(super) fn leave_out(&mut self, which: impl Fn(&Strip) -> bool) {
        for strip in &mut self.strips {
            strip.n_pieces = if which(strip) { 0 } else { strip.n_pieces };
        }
        let strips = &self.strips;
        self.pieces.retain(|piece| strips[piece.strip].n_pieces > 0);
    }

    /// Returns the extents of a batch entry.
    pub(super) fn extents_of(&self, batch: usize) -> Extents {
        self.extents.within(&self.lengths, batch)
    }

    /// Returns the maximum number of pieces in strips with more than one, for any lengths of packed sequences: two per share of the work.
    pub(super) fn most_parts(&self) -> usize {
        if self.threads == 1 || self.extents.seq_kv < 2 * MIN_SPLIT_KEYS { 0 } else { 2 * self.threads * PIECES_PER_THREAD }
    }

    /// Returns the rows of the longest strip.
    pub(super) fn strip_rows_used(&self) -> usize {
        self.blocks.strip_rows.min(self.extents.seq_q * self.extents.group)
    }
}

impl Blocks {
    /// `page` is the number of consecutive keys in memory, for a paged KV cache.
    fn new(extents: &Extents, (dtype, page): (DType, usize), isa: Isa, enough: usize, (rules, aligned): (bool, bool)) -> Blocks {
        let n_rows = extents.seq_q * extents.group;
        let heads = extents.batch * extents.heads_kv;
        let dim = extents.dim_qk.max(extents.dim_v);
        // The few-row kernel adds in another order.
        if n_rows <= isa.lanes() / 2 && !rules && !aligned {
            let whole = extents.dim_qk.is_multiple_of(isa.lanes()) && extents.dim_v.is_multiple_of(isa.lanes());
            let many = (16384 / dim).clamp(1, 128);
            let in_place = dtype == DType::F32 && whole && page >= many;
            // If keys are copied, blocks of one OS page are fastest: the next pages are loaded while a block is processed.
            let few = (4096 / (dim * dtype.bits() as usize / 8)).clamp(1, 128);
            let block_keys = if in_place { many } else { few }.min(extents.seq_kv);
            return Blocks { few_rows: true, tile_rows: n_rows, strip_rows: n_rows, block_keys, aligned };
        }
        let tile_rows = isa.lanes() * isa.tile_vectors();
        let n_tiles = n_rows.div_ceil(tile_rows);
        let most = (STRIP_ELEMENTS / dim).clamp(1, STRIP_ROWS).div_ceil(tile_rows);
        let per_strip = (n_tiles * heads / enough).clamp(1, most);
        let n_strips = n_tiles.div_ceil(per_strip);
        let strip_rows = n_tiles.div_ceil(n_strips) * tile_rows;
        // With fewer keys than a block has, one smaller block has all of them.
        let block_keys = (BLOCK_ELEMENTS / dim).clamp(24, 192).min(extents.seq_kv).next_multiple_of(PANEL);
        Blocks { few_rows: false, tile_rows, strip_rows, block_keys, aligned }
    }
}

/// Distributes the items of `work` over `workers` in order. Each worker creates its own state first.
pub(super) fn share<W: Send, S>(
    workers: usize,
    work: impl Iterator<Item = W> + Send,
    state: impl Fn() -> S + Sync,
    job: impl Fn(&mut S, W) + Sync,
) {
    let queue = Mutex::new(work);
    let worker = || {
        let mut state = state();
        let next = || queue.lock().next();
        while let Some(item) = next() {
            job(&mut state, item);
        }
    };
    if workers <= 1 {
        return worker();
    }
    rayon::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|_| worker());
        }
    });
}
