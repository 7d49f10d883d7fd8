//! Operands, and copies of them in scratch memory.

use super::element::Element;
use pulp::{Simd, WithSimd};
use sdpa_core::paged::Pages;
use sdpa_core::spec::TensorSpec;
use std::ops::Range;

/// The memory layout of batch entries.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entries<'a> {
    /// Batch entries at a constant stride.
    Apart,
    /// Packed sequences: the token range of each.
    Packed(&'a [Range<usize>]),
    /// Pages of a KV cache, to which the strides apply.
    Paged(Pages<'a>),
}

impl<'a> From<Option<&'a [Range<usize>]>> for Entries<'a> {
    fn from(documents: Option<&'a [Range<usize>]>) -> Entries<'a> {
        documents.map_or(Entries::Apart, Entries::Packed)
    }
}

/// A strided operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a, T> {
    pub(super) data: &'a [T],
    strides: [usize; 3],
    entries: Entries<'a>,
    pub(super) dim: usize,
    /// The last axis has stride 0: a row repeats one element `dim` times.
    spread: bool,
}

impl<'a, T: Element> View<'a, T> {
    pub(super) fn new(data: &'a [T], spec: &TensorSpec, entries: impl Into<Entries<'a>>) -> View<'a, T> {
        let [batch, head, seq, _] = spec.strides.map(|stride| stride as usize);
        let dim = spec.dims[3] as usize;
        View { data, strides: [batch, head, seq], entries: entries.into(), dim, spread: spec.strides[3] == 0 && dim > 1 }
    }

    /// Returns the offset of a row.
    #[inline(always)]
    pub(super) fn place(&self, [batch, head, seq]: [usize; 3]) -> usize {
        let [of_entry, of_head, of_row] = self.strides;
        let (entry, row) = match self.entries {
            Entries::Apart => (batch * of_entry, seq),
            Entries::Packed(documents) => (documents[batch].start * of_row, seq),
            Entries::Paged(pages) => {
                let size = pages.page_size();
                (pages.of(batch)[seq / size] as usize * of_entry, seq % size)
            }
        };
        entry + head * of_head + row * of_row
    }

    /// Returns how many of some rows, from the first on, are one row stride apart: those of a page, and of following pages that are adjacent in memory.
    fn run(&self, batch: usize, rows: &Range<usize>) -> usize {
        let Entries::Paged(pages) = self.entries else { return rows.len() };
        let (size, table) = (pages.page_size(), pages.of(batch));
        let adjoin = self.strides[0] == size * self.strides[2];
        let mut end = (rows.start / size + 1) * size;
        while adjoin && end < rows.end && table[end / size] == table[end / size - 1] + 1 {
            end += size;
        }
        end.min(rows.end) - rows.start
    }

    /// Reads one row as f32; `to` has its length.
    #[inline(always)]
    pub(super) fn widen_row(&self, [batch, head, seq]: [usize; 3], to: &mut [f32]) {
        if self.spread {
            let mut one = [0.0];
            T::widen(&self.data[self.place([batch, head, seq])..][..1], &mut one);
            to.fill(one[0]);
        } else {
            T::widen(self.row(batch, head, seq), to);
        }
    }

    /// Returns one row of an operand whose last axis is dense.
    #[inline(always)]
    pub(super) fn row(&self, batch: usize, head: usize, seq: usize) -> &'a [T] {
        &self.data[self.place([batch, head, seq])..][..self.dim]
    }

    /// Returns rows in place with the distance between them, if they are f32 and in bounds. So are `beyond` more rows, whose contents are undefined.
    pub(super) fn in_place(&self, batch: usize, head: usize, rows: &Range<usize>, beyond: usize) -> Option<(&'a [f32], usize)> {
        if self.run(batch, rows) < rows.len() {
            return None;
        }
        let start = self.place([batch, head, rows.start]);
        let len = ((rows.len() + beyond).max(1) - 1) * self.strides[2] + self.dim;
        Some((T::as_f32(self.data.get(start..start + len)?)?, self.strides[2]))
    }

    /// Returns rows that are contiguous in memory, if they are f32 and in bounds, with `beyond` more rows.
    pub(super) fn dense_in_place(&self, batch: usize, head: usize, rows: &Range<usize>, beyond: usize) -> Option<&'a [f32]> {
        self.in_place(batch, head, rows, beyond).filter(|(_, stride)| *stride == self.dim).map(|(rows, _)| rows)
    }
}

/// A KV head, and the heads of an operand in its GQA group. Rows are numbered as in [`Extents`](super::schedule::Extents).
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) batch: usize,
    pub(super) head_kv: usize,
    /// Number of heads in the group: 1 for keys and values.
    pub(super) group: usize,
}

impl Head {
    /// Returns (batch entry, head, position in the sequence) of a row.
    #[inline(always)]
    pub(super) fn index(&self, row: usize) -> [usize; 3] {
        [self.batch, self.head_kv * self.group + row % self.group, row / self.group]
    }
}

/// Copies rows of an operand as f32, `width` apart. Elements past the end of a row are 0.
#[derive(Debug)]
pub(super) struct CopyRows<'a, T> {
    pub(super) from: &'a View<'a, T>,
    pub(super) head: Head,
    pub(super) rows: Range<usize>,
    pub(super) width: usize,
    pub(super) to: &'a mut [f32],
}

impl<T: Element> WithSimd for CopyRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let CopyRows { from, head, mut rows, width, to } = self;
        let mut to = to.chunks_exact_mut(width);
        if let Entries::Paged(_) = from.entries {
            // Copy one page at a time. Only keys and values have pages, so all rows are those of one head.
            while !rows.is_empty() {
                let run = from.run(head.batch, &rows);
                let start = from.place(head.index(rows.start));
                for (n, to) in (0..run).zip(&mut to) {
                    let (to, rest) = to.split_at_mut(from.dim);
                    T::widen(&from.data[start + n * from.strides[2]..][..from.dim], to);
                    rest.fill(0.0);
                }
                rows.start += run;
            }
            return;
        }
        for (to, row) in to.zip(rows) {
            let (to, rest) = to.split_at_mut(from.dim);
            from.widen_row(head.index(row), to);
            rest.fill(0.0);
        }
    }
}

/// `to[column][row] = from[row][column] · factor`. Both are dense.
#[derive(Debug)]
pub(super) struct Transpose<'a> {
    pub(super) n_columns: usize,
    pub(super) factor: f32,
    pub(super) from: &'a [f32],
    pub(super) to: &'a mut [f32],
}

impl WithSimd for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        const SIDE: usize = 8;
        let Transpose { n_columns, factor, .. } = self;
        let n_rows = self.from.len() / n_columns;
        for row in (0..n_rows).step_by(SIDE) {
            for column in (0..n_columns).step_by(SIDE) {
                if row + SIDE <= n_rows && column + SIDE <= n_columns {
                    let mut block = [[0.0; SIDE]; SIDE];
                    for (i, block) in block.iter_mut().enumerate() {
                        block.copy_from_slice(&self.from[(row + i) * n_columns + column..][..SIDE]);
                    }
                    for j in 0..SIDE {
                        let to = &mut self.to[(column + j) * n_rows + row..][..SIDE];
                        for (to, row) in to.iter_mut().zip(&block) {
                            *to = row[j] * factor;
                        }
                    }
                } else {
                    for i in row..(row + SIDE).min(n_rows) {
                        for j in column..(column + SIDE).min(n_columns) {
                            self.to[j * n_rows + i] = self.from[i * n_columns + j] * factor;
                        }
                    }
                }
            }
        }
    }
}

/// Number of f32 elements in a cache line.
const LINE: usize = 16;

/// Memory aligned to a cache line: a load that crosses two lines takes twice as long.
#[derive(Debug)]
pub(super) struct Aligned(Vec<f32>);

impl Aligned {
    /// Allocates zeros.
    pub(super) fn new(len: usize) -> Aligned {
        Aligned(vec![0.0; len + LINE])
    }

    /// Returns the bytes that [`Aligned::new`] allocates.
    pub(super) fn bytes(len: usize) -> usize {
        4 * (len + LINE)
    }

    fn offset(&self) -> usize {
        self.0.as_ptr().align_offset(4 * LINE).min(LINE)
    }

    pub(super) fn get(&self) -> &[f32] {
        &self.0[self.offset()..][..self.0.len() - LINE]
    }

    pub(super) fn get_mut(&mut self) -> &mut [f32] {
        let (offset, len) = (self.offset(), self.0.len() - LINE);
        &mut self.0[offset..][..len]
    }
}

/// Scratch memory of one worker.
#[derive(Debug)]
pub(super) struct Scratch {
    memory: Aligned,
    /// For each row, the first key and the key after the last one.
    pub(super) bounds: Vec<u32>,
    /// Keys whose values are added separately.
    pub(super) holes: Vec<usize>,
}

impl Scratch {
    /// Allocates memory for slices of these lengths.
    pub(super) fn new(lens: &[usize], n_bounds: usize) -> Scratch {
        Scratch { memory: Aligned::new(Scratch::floats(lens)), bounds: vec![0; n_bounds], holes: Vec::new() }
    }

    fn floats(lens: &[usize]) -> usize {
        lens.iter().map(|len| len.next_multiple_of(LINE)).sum::<usize>()
    }

    /// Returns the bytes that [`Scratch::new`] allocates.
    pub(super) fn bytes(lens: &[usize], n_bounds: usize) -> usize {
        Aligned::bytes(Scratch::floats(lens)) + 4 * n_bounds
    }

    /// Returns the slices, and the two lists.
    pub(super) fn split<const N: usize>(&mut self, lens: [usize; N]) -> ([&mut [f32]; N], &mut [u32], &mut Vec<usize>) {
        let mut rest = self.memory.get_mut();
        let slices = lens.map(|len| {
            let (slice, tail) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LINE));
            rest = tail;
            &mut slice[..len]
        });
        (slices, &mut self.bounds, &mut self.holes)
    }
}

/// Returns true if a row contains neither inf nor NaN.
pub(super) fn all_finite(row: &[f32]) -> bool {
    row.iter().fold(true, |good, x| good & x.is_finite())
}

/// Sets rows of values that contain inf or NaN to 0, and lists them in `holes`.
///
/// Only keys that some row of the strip does not attend to are examined: P = 0 times inf would be NaN in such a row. For the rows that do attend to the key,
/// its value is added separately.
pub(super) fn take_out_holes(values: &mut [f32], width: usize, keys: &Range<usize>, kept_by_all: &Range<usize>, holes: &mut Vec<usize>) {
    holes.clear();
    for (key, row) in keys.clone().zip(values.chunks_exact_mut(width)) {
        if !kept_by_all.contains(&key) && !all_finite(row) {
            row.fill(0.0);
            holes.push(key);
        }
    }
}

/// Returns the keys in both ranges.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
