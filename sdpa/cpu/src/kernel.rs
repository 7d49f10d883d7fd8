//! The micro-kernels: the steps over one tile.
//!
//! A tile is `VECTORS` registers wide, with one row (a query of a head) per lane. Scores, P and outputs are stored transposed, `[key][row]` and
//! `[column][row]`. Sums and maxima over keys are therefore elementwise over registers, never across lanes. Keys and values are read as they are and broadcast,
//! one element at a time.
//!
//! The steps are separate so that other operations on scores ([`program`](super::program)) fit between them. A score_mod runs between [`Scores`] and
//! [`DropOutside`], and another mask next to [`DropOutside`]. Both masks set scores to -inf. Scores are in natural units throughout. Only their distance to the
//! maximum is converted to base 2, because the largest f32 would overflow in base-2 units.

use super::exp::exp2;
use super::isa::{PANEL, mul_add};
use pulp::{Simd, WithSimd};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// One step of the computation over a tile of rows, such as scores or softmax.
pub(super) trait TileStep {
    /// Returns the number of registers per tile: 1 to 4, or 1 and 2 where the instruction set has few registers.
    fn vectors(&self) -> usize;

    /// Runs the step.
    fn step<S: Simd, const VECTORS: usize>(self, simd: S);
}

/// Runs a [`TileStep`] in code that is compiled for the number of registers of its tile.
#[derive(Debug)]
pub(super) struct Tiled<Step>(pub(super) Step);

impl<Step: TileStep> WithSimd for Tiled<Step> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.0.vectors() {
            1 => self.0.step::<S, 1>(simd),
            _ if S::REGISTER_COUNT < 32 => self.0.step::<S, 2>(simd),
            2 => self.0.step::<S, 2>(simd),
            3 => self.0.step::<S, 3>(simd),
            _ => self.0.step::<S, 4>(simd),
        }
    }
}

/// Computes the products of every row with every key: the sums of `q · k`.
#[derive(Debug)]
pub(super) struct Scores<'a> {
    pub(super) vectors: usize,
    pub(super) dim: usize,
    pub(super) n_keys: usize,
    /// The queries, in the layout `[dim][row]`.
    pub(super) q: &'a [f32],
    /// The keys, in the layout `[key][dim]`, with padding rows for the last panel.
    pub(super) k: &'a [f32],
    /// The scores, in the layout `[key][row]`; the number of keys is a multiple of a panel.
    pub(super) scores: &'a mut [f32],
}

impl TileStep for Scores<'_> {
    fn vectors(&self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let q = &tile::<S, VECTORS>(self.q)[..self.dim];
        let panels = tile_mut::<S, VECTORS>(self.scores).as_chunks_mut::<PANEL>().0;
        for (k, scores) in self.k.chunks_exact(PANEL * self.dim).zip(panels).take(self.n_keys.div_ceil(PANEL)) {
            let mut sums = [[simd.splat_f32s(0.0); VECTORS]; PANEL];
            let rows = std::array::from_fn(|j| &k[j * self.dim..][..self.dim]);
            products(simd, q, rows, &mut sums);
            *scores = sums;
        }
    }
}

/// Sets scores of keys outside of a row's range to -inf.
#[derive(Debug)]
pub(super) struct DropOutside<'a> {
    pub(super) vectors: usize,
    /// The keys of the scores.
    pub(super) keys: Range<usize>,
    /// Keys that every row of the tile attends to, which are skipped.
    pub(super) core: Range<usize>,
    /// First key of each row.
    pub(super) start: &'a [u32],
    /// The key after the last key of each row.
    pub(super) end: &'a [u32],
    /// The scores, in the layout `[key][row]`.
    pub(super) scores: &'a mut [f32],
}

impl TileStep for DropOutside<'_> {
    fn vectors(&self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let start = S::as_simd_u32s(self.start).0;
        let end = S::as_simd_u32s(self.end).0;
        let scores = tile_mut::<S, VECTORS>(self.scores);
        for key in outside(&self.keys, &self.core) {
            let at = simd.splat_u32s(key as u32);
            for (score, (&start, &end)) in scores[key - self.keys.start].iter_mut().zip(start.iter().zip(end)) {
                let keep = simd.and_m32s(simd.greater_than_or_equal_u32s(at, start), simd.less_than_u32s(at, end));
                *score = simd.select_f32s(keep, *score, simd.splat_f32s(f32::NEG_INFINITY));
            }
        }
    }
}

/// Returns the keys outside of the core.
#[inline(always)]
fn outside(keys: &Range<usize>, core: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let core = core.start.clamp(keys.start, keys.end)..core.end.clamp(keys.start, keys.end);
    (keys.start..core.start).chain(core.end.max(core.start)..keys.end)
}

/// Returns `e^x` for `x <= 0`, with [`exp2`].
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    exp2(simd, simd.mul_f32s(x, simd.splat_f32s(LOG2_E)))
}

/// Number of partial sums over the P of a block: with a single one, a row of equal P would round in the same direction at every step.
const PARTS: usize = 4;

/// Replaces scores by `e^(score - maximum)`, and updates running maxima and sums.
#[derive(Debug)]
pub(super) struct Softmax<'a> {
    pub(super) vectors: usize,
    pub(super) n_keys: usize,
    /// The scores, in the layout `[key][row]`.
    pub(super) scores: &'a mut [f32],
    /// Running maximum of each row.
    pub(super) max: &'a mut [f32],
    /// Running sum of each row.
    pub(super) sum: &'a mut [f32],
    /// Receives the factor by which earlier outputs are multiplied.
    pub(super) scale: &'a mut [f32],
}

impl TileStep for Softmax<'_> {
    fn vectors(&self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let scores = &mut tile_mut::<S, VECTORS>(self.scores)[..self.n_keys];
        let [max] = tile_mut::<S, VECTORS>(self.max) else { return };
        let [sum] = tile_mut::<S, VECTORS>(self.sum) else { return };
        let [scale] = tile_mut::<S, VECTORS>(self.scale) else { return };
        let lowest = simd.splat_f32s(f32::NEG_INFINITY);
        let mut new = *max;
        for scores in scores.iter() {
            for (new, &score) in new.iter_mut().zip(scores) {
                *new = simd.max_f32s(score, *new);
            }
        }
        let mut shift = new;
        for i in 0..VECTORS {
            // For a row that has no key yet, subtract 0: -inf - -inf would be NaN.
            shift[i] = simd.select_f32s(simd.equal_f32s(new[i], lowest), simd.splat_f32s(0.0), new[i]);
            scale[i] = exp(simd, simd.sub_f32s(max[i], shift[i]));
        }
        *max = new;
        let mut parts = [[simd.splat_f32s(0.0); VECTORS]; PARTS];
        for scores in scores.chunks_mut(PARTS) {
            for (scores, part) in scores.iter_mut().zip(&mut parts) {
                for i in 0..VECTORS {
                    scores[i] = exp(simd, simd.sub_f32s(scores[i], shift[i]));
                    part[i] = simd.add_f32s(part[i], scores[i]);
                }
            }
        }
        const { assert!(PARTS == 4) };
        let [a, b, c, d] = parts;
        for i in 0..VECTORS {
            let of_block = simd.add_f32s(simd.add_f32s(a[i], b[i]), simd.add_f32s(c[i], d[i]));
            sum[i] = mul_add(simd, sum[i], scale[i], of_block);
        }
    }
}

/// Multiplies P by the values and adds the result to the rescaled output: `o[c] = o[c] · scale + Σ_key p[key] · v[key][c]`.
#[derive(Debug)]
pub(super) struct Values<'a> {
    pub(super) vectors: usize,
    pub(super) dim: usize,
    pub(super) n_keys: usize,
    /// The probabilities P, in the layout `[key][row]`.
    pub(super) p: &'a [f32],
    /// The values, in the layout `[key][dim]`.
    pub(super) v: &'a [f32],
    /// The factor of the earlier output of each row.
    pub(super) scale: &'a [f32],
    /// The output, in the layout `[dim][row]`.
    pub(super) o: &'a mut [f32],
}

impl TileStep for Values<'_> {
    fn vectors(&self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn step<S: Simd, const VECTORS: usize>(self, simd: S) {
        let (v, dim) = (self.v, self.dim);
        let p = &tile::<S, VECTORS>(self.p)[..self.n_keys];
        let [scale] = tile::<S, VECTORS>(self.scale) else { return };
        let (panels, rest) = tile_mut::<S, VECTORS>(self.o)[..dim].as_chunks_mut::<PANEL>();
        let mut column = 0;
        for o in panels {
            value_panel::<S, VECTORS, PANEL>(simd, p, v, dim, column, scale, o);
            column += PANEL;
        }
        macro_rules! rest {
            ($($n:literal)*) => {
                match rest.len() {
                    $($n => {
                        for o in rest.as_chunks_mut::<$n>().0 {
                            value_panel::<S, VECTORS, $n>(simd, p, v, dim, column, scale, o);
                        }
                    })*
                    _ => {}
                }
            };
        }
        const { assert!(PANEL == 6) };
        rest!(1 2 3 4 5);
    }
}

/// Casts a slice to groups of `VECTORS` registers. Each group holds one element for every row of a tile.
#[inline(always)]
pub(super) fn tile<S: Simd, const VECTORS: usize>(x: &[f32]) -> &[[S::f32s; VECTORS]] {
    S::as_simd_f32s(x).0.as_chunks().0
}

/// Casts a writable slice to groups of `VECTORS` registers. Each group holds one element for every row of a tile.
#[inline(always)]
pub(super) fn tile_mut<S: Simd, const VECTORS: usize>(x: &mut [f32]) -> &mut [[S::f32s; VECTORS]] {
    S::as_mut_simd_f32s(x).0.as_chunks_mut().0
}

/// `sums[j] += Σ_d x[d] · rows[j][d]`.
#[inline(always)]
fn products<S: Simd, const VECTORS: usize>(
    simd: S,
    x: &[[S::f32s; VECTORS]],
    rows: [&[f32]; PANEL],
    sums: &mut [[S::f32s; VECTORS]; PANEL],
) {
    for d in 0..x.len() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let y = simd.splat_f32s(row[d]);
            for (sum, &x) in sums.iter_mut().zip(&x[d]) {
                *sum = mul_add(simd, x, y, *sum);
            }
        }
    }
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
    // Sum this block from zero and add the previous value of `o` last, so that each block adds only one rounding to the long sum.
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; N];
    for (p, v) in p.iter().zip(v.chunks_exact(dim_v)) {
        let Some(v) = v[column..].first_chunk::<N>() else { return };
        for (sums, &v) in sums.iter_mut().zip(v) {
            let v = simd.splat_f32s(v);
            for (sum, &p) in sums.iter_mut().zip(p) {
                *sum = mul_add(simd, p, v, *sum);
            }
        }
    }
    for (o, sums) in o.iter_mut().zip(sums) {
        for ((o, sum), &scale) in o.iter_mut().zip(sums).zip(scale) {
            *o = mul_add(simd, *o, scale, sum);
        }
    }
}
