//! The gradient of a score_mod.

use super::kernel::Slopes;
use super::params::Part;
use super::rows::{Band, Tile};
use crate::isa::Isa;
use crate::kernel::{DropOutside, Tiled};
use crate::program::{CHUNK, DropUnkept, Machine, Worker};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// The programs of a worker, and their results for one band and block.
#[derive(Debug)]
pub(super) struct Rulings<'w, 'a> {
    pub(super) worker: &'w mut Worker<'a>,
    /// The mask, in the layout `[tile][key][row]`: nonzero where a row attends to a key; empty without a mask.
    pub(super) kept: &'w mut [u32],
    /// This cell's part of the gradients of parameters.
    pub(super) parts: &'w mut [Part],
}

/// A tile, and its scores against a block of keys.
#[derive(Debug)]
pub(super) struct Modified<'s> {
    pub(super) isa: Isa,
    pub(super) tile: &'s Tile,
    pub(super) band: &'s Band<'s>,
    pub(super) block: &'s Range<usize>,
    /// The scores, which become P, in the layout `[key][row]`.
    pub(super) p: &'s mut [f32],
    /// The dP, which becomes the gradients of the scaled scores, in the layout `[key][row]`.
    pub(super) ds: &'s mut [f32],
    /// The mask, in the layout `[key][row]`: nonzero where a row attends to a key; empty without a mask.
    pub(super) kept: &'s [u32],
}

impl Modified<'_> {
    /// Replaces scores by P, and dP by dS, and adds the gradients of parameters.
    ///
    /// A pair that is masked out, or whose modified score is -inf, has P = 0 and dS = 0, whatever the derivative is there.
    pub(super) fn slopes(self, mods: &mut Machine<'_>, parts: &mut [Part]) {
        let Modified { isa, tile, band, block, p, ds, kept } = self;
        let (lanes, width) = (tile.lanes.clone(), tile.lanes.len());
        let step = Machine::keys_at_a_time(width);
        let (start, end) = (&band.start[lanes.clone()], &band.end[lanes.clone()]);
        let (lse, lse_rest, delta) = (&band.lse[lanes.clone()], &band.lse_rest[lanes.clone()], &band.delta[lanes]);
        let mut dropped = [0; CHUNK];
        mods.tile(tile.index);
        for first in block.clone().step_by(step) {
            let keys = first..(first + step).min(block.end);
            let (n_keys, at) = (keys.len(), (first - block.start) * width..(first - block.start + keys.len()) * width);
            let (p, ds, dropped) = (&mut p[at.clone()], &mut ds[at.clone()], &mut dropped[..n_keys * width]);
            let from = mods.first(tile.index, &keys, p);
            from.iter().zip(&mut *p).for_each(|(from, to)| *to = f32::from_bits(*from));
            isa.run(Tiled(DropOutside { vectors: tile.vectors, keys: keys.clone(), core: tile.core.clone(), start, end, scores: p }));
            if !kept.is_empty() {
                isa.run(DropUnkept { kept: &kept[at], scores: p });
            }
            isa.run(Dropped { scores: p, to: dropped });
            isa.run(Tiled(Slopes { vectors: tile.vectors, n_keys, lse, lse_rest, delta, p, ds }));
            mods.others(tile.index, &keys, &[], ds);
            isa.run(Taken { from: mods.root(1, ds.len()), dropped, to: ds });
            for (n, part) in parts.iter_mut().enumerate() {
                let reads = part.reads();
                if !reads.is_empty() {
                    for &[value, place] in &*reads {
                        let [values, places] = [value, place].map(|root| mods.root(root, dropped.len()));
                        part.add_read([tile.rows.len(), width], places, values, dropped);
                    }
                    continue;
                }
                part.add(isa, (band.rows.start + tile.rows.start, tile.rows.len(), width), &keys, mods.root(2 + n, dropped.len()), dropped);
            }
        }
    }
}

/// Marks scores of -inf.
#[derive(Debug)]
struct Dropped<'a> {
    scores: &'a [f32],
    to: &'a mut [u32],
}

impl WithSimd for Dropped<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (to, score) in self.to.iter_mut().zip(self.scores) {
            *to = u32::from(*score == f32::NEG_INFINITY);
        }
    }
}

/// Copies gradients, with 0 where a score is masked out.
#[derive(Debug)]
struct Taken<'a> {
    from: &'a [u32],
    dropped: &'a [u32],
    to: &'a mut [f32],
}

impl WithSimd for Taken<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for ((to, from), dropped) in self.to.iter_mut().zip(self.from).zip(self.dropped) {
            *to = if *dropped != 0 { 0.0 } else { f32::from_bits(*from) };
        }
    }
}
