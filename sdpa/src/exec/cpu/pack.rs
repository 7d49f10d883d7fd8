//! Operands, and their way into scratch memory.

use super::element::Element;
use crate::spec::TensorSpec;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// A strided operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
    pub(super) dim: usize,
}

impl<'a, T: Element> View<'a, T> {
    pub(super) fn new(data: &'a [T], spec: &TensorSpec) -> View<'a, T> {
        let [batch, head, seq, _] = spec.strides.map(|stride| stride as usize);
        View { data, strides: [batch, head, seq], dim: spec.dims[3] as usize }
    }

    /// One row.
    #[inline(always)]
    pub(super) fn row(&self, batch: usize, head: usize, seq: usize) -> &'a [T] {
        &self.data[batch * self.strides[0] + head * self.strides[1] + seq * self.strides[2]..][..self.dim]
    }

    /// Rows as they lie in memory, with the distance between them, if they are f32, and there to be read.
    pub(super) fn in_place(&self, batch: usize, head: usize, rows: &Range<usize>) -> Option<(&'a [f32], usize)> {
        let start = batch * self.strides[0] + head * self.strides[1] + rows.start * self.strides[2];
        let len = (rows.len().max(1) - 1) * self.strides[2] + self.dim;
        Some((T::as_f32(self.data.get(start..start + len)?)?, self.strides[2]))
    }

    /// Rows that follow one another in memory without gaps, if they are f32, and there to be read.
    pub(super) fn dense_in_place(&self, batch: usize, head: usize, rows: &Range<usize>) -> Option<&'a [f32]> {
        self.in_place(batch, head, rows).filter(|(_, stride)| *stride == self.dim).map(|(rows, _)| rows)
    }
}

/// Copies rows of an operand, as f32, `width` apart; what is past the end of a row becomes 0.
#[derive(Debug)]
pub(super) struct CopyRows<'a, T> {
    pub(super) from: &'a View<'a, T>,
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) rows: Range<usize>,
    pub(super) width: usize,
    pub(super) to: &'a mut [f32],
}

impl<T: Element> WithSimd for CopyRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (to, row) in self.to.chunks_exact_mut(self.width).zip(self.rows) {
            let (to, rest) = to.split_at_mut(self.from.dim);
            T::widen(self.from.row(self.batch, self.head, row), to);
            rest.fill(0.0);
        }
    }
}

/// `to[column][row] = from[row][column]`. Both are dense.
#[derive(Debug)]
pub(super) struct Transpose<'a> {
    pub(super) n_columns: usize,
    pub(super) from: &'a [f32],
    pub(super) to: &'a mut [f32],
}

impl WithSimd for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        const SIDE: usize = 8;
        let n_columns = self.n_columns;
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
                            *to = row[j];
                        }
                    }
                } else {
                    for i in row..(row + SIDE).min(n_rows) {
                        for j in column..(column + SIDE).min(n_columns) {
                            self.to[j * n_rows + i] = self.from[i * n_columns + j];
                        }
                    }
                }
            }
        }
    }
}

/// Scratch memory of one worker: it starts at a cache line, as loads that cross one take twice as long.
#[derive(Debug)]
pub(super) struct Scratch {
    memory: Vec<f32>,
    /// First and past-the-last keys of rows.
    pub(super) bounds: Vec<u32>,
    /// Keys whose values are taken apart from the rest.
    pub(super) holes: Vec<usize>,
}

/// f32 elements of a cache line.
const LINE: usize = 16;

impl Scratch {
    /// Memory for slices of these lengths.
    pub(super) fn new(lens: &[usize], n_bounds: usize) -> Scratch {
        Scratch { memory: vec![0.0; Scratch::floats(lens)], bounds: vec![0; n_bounds], holes: Vec::new() }
    }

    fn floats(lens: &[usize]) -> usize {
        lens.iter().map(|len| len.next_multiple_of(LINE)).sum::<usize>() + LINE
    }

    /// Bytes that [`Scratch::new`] takes.
    pub(super) fn bytes(lens: &[usize], n_bounds: usize) -> usize {
        4 * (Scratch::floats(lens) + n_bounds)
    }

    /// The slices, and the two lists.
    pub(super) fn split<const N: usize>(&mut self, lens: [usize; N]) -> ([&mut [f32]; N], &mut [u32], &mut Vec<usize>) {
        let offset = self.memory.as_ptr().align_offset(4 * LINE).min(LINE);
        let mut rest = &mut self.memory[offset..];
        let slices = lens.map(|len| {
            let (slice, tail) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LINE));
            rest = tail;
            &mut slice[..len]
        });
        (slices, &mut self.bounds, &mut self.holes)
    }
}

/// Sets rows of values that hold inf or NaN to 0, and lists them.
///
/// Only keys that some row of the strip drops are looked at: a probability of 0 times inf would be NaN in a row that
/// does not attend to the key at all. The rows that do attend to it get it added apart.
pub(super) fn take_out_holes(values: &mut [f32], width: usize, keys: &Range<usize>, kept_by_all: &Range<usize>, holes: &mut Vec<usize>) {
    holes.clear();
    for (key, row) in keys.clone().zip(values.chunks_exact_mut(width)) {
        if !kept_by_all.contains(&key) && row.iter().fold(false, |bad, x| bad | !x.is_finite()) {
            row.fill(0.0);
            holes.push(key);
        }
    }
}

/// The keys in both.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
