//! The micro-kernels: one step of the online softmax over one tile.
//!
//! A tile is `VECTORS` registers of rows, one row (a query of a head) to a lane. Scores, probabilities and outputs
//! lie transposed, `[key][row]` and `[column][row]`, so every sum and maximum over keys runs down the lanes and none
//! runs across them; keys and values are read as they are, an element at a time, broadcast.

use super::exp::exp2;
use super::isa::{PANEL, mul_add};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// One tile against one block of keys: scores, masks, softmax, and what the values add to the output.
#[derive(Debug)]
pub(super) struct TileStep<'a> {
    /// Registers across the tile: 1 to 4, or to 2 where there are few.
    pub(super) vectors: usize,
    pub(super) dim_qk: usize,
    pub(super) dim_v: usize,
    /// Keys to take; they have the indices `first_key..first_key + n_keys`.
    pub(super) n_keys: usize,
    pub(super) first_key: usize,
    /// Keys that every row of the tile keeps: no mask work is done on them.
    pub(super) core: Range<usize>,
    /// Scaled queries, `[dim_qk][row]`.
    pub(super) q: &'a [f32],
    /// `[key][dim_qk]`, with rows to fill the last panel.
    pub(super) k: &'a [f32],
    /// `[key][dim_v]`.
    pub(super) v: &'a [f32],
    /// First key of each row.
    pub(super) start: &'a [u32],
    /// Key past the last one of each row.
    pub(super) end: &'a [u32],
    /// Probabilities come out here, `[key][row]`; whole panels.
    pub(super) scores: &'a mut [f32],
    /// Running maximum of each row.
    pub(super) max: &'a mut [f32],
    /// Running sum of each row.
    pub(super) sum: &'a mut [f32],
    /// Running output, `[dim_v][row]`.
    pub(super) o: &'a mut [f32],
}

impl WithSimd for TileStep<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.vectors {
            1 => self.step::<S, 1>(simd),
            _ if S::REGISTER_COUNT < 32 => self.step::<S, 2>(simd),
            2 => self.step::<S, 2>(simd),
            3 => self.step::<S, 3>(simd),
            _ => self.step::<S, 4>(simd),
        }
    }
}

impl TileStep<'_> {
    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let q = tile::<S, VECTORS>(self.q);
        let start = S::as_simd_u32s(self.start).0;
        let end = S::as_simd_u32s(self.end).0;
        let scores = tile_mut::<S, VECTORS>(self.scores);
        let [max] = tile_mut::<S, VECTORS>(self.max) else { return };
        let [sum] = tile_mut::<S, VECTORS>(self.sum) else { return };
        let o = tile_mut::<S, VECTORS>(self.o);

        let n_panels = self.n_keys.div_ceil(PANEL);
        for (k, scores) in self.k.chunks_exact(PANEL * self.dim_qk).zip(scores.as_chunks_mut::<PANEL>().0).take(n_panels) {
            score_panel::<S, VECTORS>(simd, &q[..self.dim_qk], k, scores);
        }
        let scores = &mut scores[..self.n_keys];
        let key_range = self.first_key..self.first_key + self.n_keys;
        let core = self.core.start.clamp(key_range.start, key_range.end)..self.core.end.clamp(key_range.start, key_range.end);
        let outside = (key_range.start..core.start).chain(core.end.max(core.start)..key_range.end);
        for key in outside {
            let at = simd.splat_u32s(key as u32);
            for (score, (&start, &end)) in scores[key - key_range.start].iter_mut().zip(start.iter().zip(end)) {
                let keep = simd.and_m32s(simd.greater_than_or_equal_u32s(at, start), simd.less_than_u32s(at, end));
                *score = simd.select_f32s(keep, *score, simd.splat_f32s(f32::NEG_INFINITY));
            }
        }
        let scale = softmax::<S, VECTORS>(simd, scores, max, sum);
        values::<S, VECTORS>(simd, scores, self.v, self.dim_v, &scale, o);
    }
}

/// Groups of `VECTORS` registers.
#[inline(always)]
fn tile<S: Simd, const VECTORS: usize>(x: &[f32]) -> &[[S::f32s; VECTORS]] {
    S::as_simd_f32s(x).0.as_chunks().0
}

#[inline(always)]
fn tile_mut<S: Simd, const VECTORS: usize>(x: &mut [f32]) -> &mut [[S::f32s; VECTORS]] {
    S::as_mut_simd_f32s(x).0.as_chunks_mut().0
}

/// `scores[j] = Σ_d q[d] · k[j][d]` for one panel of keys.
#[inline(always)]
fn score_panel<S: Simd, const VECTORS: usize>(simd: S, q: &[[S::f32s; VECTORS]], k: &[f32], scores: &mut [[S::f32s; VECTORS]; PANEL]) {
    let dim = q.len();
    let rows: [&[f32]; PANEL] = std::array::from_fn(|j| &k[j * dim..][..dim]);
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; PANEL];
    for d in 0..dim {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let key = simd.splat_f32s(row[d]);
            for (sum, &q) in sums.iter_mut().zip(&q[d]) {
                *sum = mul_add(simd, q, key, *sum);
            }
        }
    }
    *scores = sums;
}

/// Scores become `2^(score - maximum)`; running maxima and sums move on. Returns what earlier sums and outputs are
/// multiplied by.
#[inline(always)]
fn softmax<S: Simd, const VECTORS: usize>(
    simd: S,
    scores: &mut [[S::f32s; VECTORS]],
    max: &mut [S::f32s; VECTORS],
    sum: &mut [S::f32s; VECTORS],
) -> [S::f32s; VECTORS] {
    let lowest = simd.splat_f32s(f32::NEG_INFINITY);
    let mut new = *max;
    for scores in scores.iter() {
        for (new, &score) in new.iter_mut().zip(scores) {
            *new = simd.max_f32s(score, *new);
        }
    }
    let mut scale = *max;
    let mut shift = new;
    for i in 0..VECTORS {
        // A row with no key yet: -inf - 0, where -inf - -inf would be NaN.
        shift[i] = simd.select_f32s(simd.equal_f32s(new[i], lowest), simd.splat_f32s(0.0), new[i]);
        scale[i] = exp2(simd, simd.sub_f32s(max[i], shift[i]));
        sum[i] = simd.mul_f32s(sum[i], scale[i]);
    }
    *max = new;
    let mut total = *sum;
    for scores in scores {
        for i in 0..VECTORS {
            scores[i] = exp2(simd, simd.sub_f32s(scores[i], shift[i]));
            total[i] = simd.add_f32s(total[i], scores[i]);
        }
    }
    *sum = total;
    scale
}

/// `o[c] = o[c] · scale + Σ_key p[key] · v[key][c]`.
#[inline(always)]
fn values<S: Simd, const VECTORS: usize>(
    simd: S,
    p: &[[S::f32s; VECTORS]],
    v: &[f32],
    dim_v: usize,
    scale: &[S::f32s; VECTORS],
    o: &mut [[S::f32s; VECTORS]],
) {
    let (panels, rest) = o[..dim_v].as_chunks_mut::<PANEL>();
    let mut column = 0;
    for o in panels {
        value_panel::<S, VECTORS, PANEL>(simd, p, v, dim_v, column, scale, o);
        column += PANEL;
    }
    macro_rules! rest {
        ($($n:literal)*) => {
            match rest.len() {
                $($n => {
                    for o in rest.as_chunks_mut::<$n>().0 {
                        value_panel::<S, VECTORS, $n>(simd, p, v, dim_v, column, scale, o);
                    }
                })*
                _ => {}
            }
        };
    }
    const { assert!(PANEL == 6) };
    rest!(1 2 3 4 5);
}

#[inline(always)]
fn value_panel<S: Simd, const VECTORS: usize, const N: usize>(
    simd: S,
    p: &[[S::f32s; VECTORS]],
    v: &[f32],
    dim_v: usize,
    column: usize,
    scale: &[S::f32s; VECTORS],
    o: &mut [[S::f32s; VECTORS]; N],
) {
    let mut sums = *o;
    for sums in &mut sums {
        for (sum, &scale) in sums.iter_mut().zip(scale) {
            *sum = simd.mul_f32s(*sum, scale);
        }
    }
    for (p, v) in p.iter().zip(v.chunks_exact(dim_v)) {
        let Some(v) = v[column..].first_chunk::<N>() else { return };
        for (sums, &v) in sums.iter_mut().zip(v) {
            let v = simd.splat_f32s(v);
            for (sum, &p) in sums.iter_mut().zip(p) {
                *sum = mul_add(simd, p, v, *sum);
            }
        }
    }
    *o = sums;
}
