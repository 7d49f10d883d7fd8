//! The steps of the backward pass that the forward pass does not have.
//!
//! A score_mod is applied where [`kernel`](crate::kernel) describes. Its gradient is computed from `ds` after [`Slopes`], which overwrites the scores; see
//! [`modified`](super::modified).

use crate::element::Element;
use crate::isa::{PANEL, mul_add};
use crate::kernel::{TileStep, exp, tile, tile_mut};
use crate::pack::{Head, View};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Replaces scores by P, and dP by dS: `p = e^(s - lse)`, `ds = p · (dp - delta)`.
///
/// Both are 0 if the score is -inf, whatever the other operands contain. P is clamped to 1, because a log-sum-exp that was rounded to f32 may be less than a
/// score by any number.
#[derive(Debug)]
pub(crate) struct Slopes<'a> {
    pub(crate) vectors: usize,
    pub(crate) n_keys: usize,
    /// Log-sum-exp of each row as two f32: a rounded value, and the correction to add to it.
    pub(crate) lse: &'a [f32],
    pub(crate) lse_rest: &'a [f32],
    /// Delta of each row: `Σ d_o · o`.
    pub(crate) delta: &'a [f32],
    /// The scores, which become P, in the layout `[key][row]`.
    pub(crate) p: &'a mut [f32],
    /// The dP, which becomes dS, in the layout `[key][row]`.
    pub(crate) ds: &'a mut [f32],
}

impl TileStep for Slopes<'_> {
    fn vectors(&self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let p = tile_mut::<S, VECTORS>(self.p);
        let ds = tile_mut::<S, VECTORS>(self.ds);
        let [lse] = tile::<S, VECTORS>(self.lse) else { return };
        let [lse_rest] = tile::<S, VECTORS>(self.lse_rest) else { return };
        let zero = simd.splat_f32s(0.0);
        let [delta] = tile::<S, VECTORS>(self.delta) else { return };
        for (p, ds) in p.iter_mut().zip(ds).take(self.n_keys) {
            for i in 0..VECTORS {
                let dropped = simd.equal_f32s(p[i], simd.splat_f32s(f32::NEG_INFINITY));
                let distance = simd.sub_f32s(simd.sub_f32s(p[i], lse[i]), lse_rest[i]);
                // Compare and select instead of `min`, whose result for NaN differs between instruction sets.
                let distance = simd.select_f32s(simd.less_than_f32s(zero, distance), zero, distance);
                let weight = exp(simd, distance);
                let slope = simd.mul_f32s(weight, simd.sub_f32s(ds[i], delta[i]));
                p[i] = simd.select_f32s(dropped, zero, weight);
                ds[i] = simd.select_f32s(dropped, zero, slope);
            }
        }
    }
}

/// Adds rows, weighted by P or dS, to the sums of keys: `sums[key][column] += Σ_row weights[key][row] · rows[row][column]`. The lanes are
/// columns.
#[derive(Debug)]
pub(super) struct KeySums<'a> {
    pub(super) n_keys: usize,
    pub(super) n_rows: usize,
    /// Number of rows of a tile; the last tile may have fewer registers.
    pub(super) tile_rows: usize,
    /// The weights, in the layout `[tile][key][row]`.
    pub(super) weights: &'a [f32],
    /// Distance between tiles in `weights`, in elements.
    pub(super) weights_of_tile: usize,
    /// Number of columns: a multiple of the lanes of a register.
    pub(super) columns: usize,
    /// The rows that are multiplied, in the layout `[row][column]`.
    pub(super) rows: &'a [f32],
    /// The sums, in the layout `[key][column]`; the number of keys is a multiple of a panel.
    pub(super) sums: &'a mut [f32],
}

impl WithSimd for KeySums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let vectors = self.columns / S::F32_LANES;
        let passes = vectors.div_ceil(if S::REGISTER_COUNT < 32 { 2 } else { 4 });
        for pass in 0..passes {
            let first = vectors * pass / passes;
            match vectors * (pass + 1) / passes - first {
                1 => self.pass::<S, 1>(simd, first),
                _ if S::REGISTER_COUNT < 32 => self.pass::<S, 2>(simd, first),
                2 => self.pass::<S, 2>(simd, first),
                3 => self.pass::<S, 3>(simd, first),
                _ => self.pass::<S, 4>(simd, first),
            }
        }
    }
}

impl KeySums<'_> {
    /// Adds to `VECTORS` registers of every key.
    #[inline(always)]
    fn pass<S: Simd, const VECTORS: usize>(&mut self, simd: S, first: usize) {
        let stride = self.columns / S::F32_LANES;
        let rows = S::as_simd_f32s(self.rows).0;
        for (panel, sums) in self.sums.chunks_exact_mut(PANEL * self.columns).take(self.n_keys.div_ceil(PANEL)).enumerate() {
            let to = S::as_mut_simd_f32s(sums).0;
            let mut sums = [[simd.splat_f32s(0.0); VECTORS]; PANEL];
            for (sums, to) in sums.iter_mut().zip(to.chunks_exact(stride)) {
                sums.copy_from_slice(&to[first..][..VECTORS]);
            }
            for (tile, rows) in rows.chunks(self.tile_rows * stride).enumerate() {
                let n_rows = self.tile_rows.min(self.n_rows - tile * self.tile_rows);
                let width = n_rows.next_multiple_of(S::F32_LANES);
                let weights = &self.weights[tile * self.weights_of_tile + panel * PANEL * width..][..PANEL * width];
                let weights: [&[f32]; PANEL] = std::array::from_fn(|j| &weights[j * width..][..n_rows]);
                for (row, x) in rows.chunks_exact(stride).take(n_rows).enumerate() {
                    let Some(x) = x[first..].first_chunk::<VECTORS>() else { return };
                    for (sums, weights) in sums.iter_mut().zip(weights) {
                        let weight = simd.splat_f32s(weights[row]);
                        for (sum, &x) in sums.iter_mut().zip(x) {
                            *sum = mul_add(simd, x, weight, *sum);
                        }
                    }
                }
            }
            for (sums, to) in sums.iter().zip(to.chunks_exact_mut(stride)) {
                to[first..][..VECTORS].copy_from_slice(sums);
            }
        }
    }
}

/// Computes delta of each row: `delta[row] = Σ d_o · o`.
#[derive(Debug)]
pub(super) struct Delta<'a, T> {
    pub(super) o: &'a View<'a, T>,
    pub(super) head: Head,
    pub(super) rows: Range<usize>,
    /// Number of columns: a multiple of the lanes of a register.
    pub(super) columns: usize,
    /// The gradient of the output, in the layout `[row][column]`.
    pub(super) d_o: &'a [f32],
    /// Scratch memory for one row.
    pub(super) buffer: &'a mut [f32],
    pub(super) delta: &'a mut [f32],
}

impl<T: Element> WithSimd for Delta<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let buffer = &mut self.buffer[..self.columns];
        buffer[self.o.dim..].fill(0.0);
        for ((row, d_o), delta) in self.rows.zip(self.d_o.chunks_exact(self.columns)).zip(self.delta) {
            self.o.widen_row(self.head.index(row), &mut buffer[..self.o.dim]);
            let mut sum = simd.splat_f32s(0.0);
            for (&x, &y) in S::as_simd_f32s(buffer).0.iter().zip(S::as_simd_f32s(d_o).0) {
                sum = mul_add(simd, x, y, sum);
            }
            *delta = simd.reduce_sum_f32s(sum);
        }
    }
}
