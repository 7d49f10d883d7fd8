//! One cell: the contribution of its rows and keys to the gradients.

use super::Call;
use super::cut::{Cell, Cut};
use super::kernel::{KeySums, Slopes};
use super::modified::{Modified, Rulings};
use super::rows::{Band, Packed, Queries};
use crate::element::Element;
use crate::isa::PANEL;
use crate::kernel::{DropOutside, Scores, Tiled, Values};
use crate::pack::{CopyRows, Head, Scratch, View, all_finite, overlap};
use crate::program::{DropUnkept, Row};
use std::ops::Range;

/// Returns the lengths of the scratch slices: queries by lanes and by rows, d_o by lanes and by rows, keys, values, P, dS, log-sum-exp in two parts, deltas,
/// ones, one row.
pub(super) fn scratch_lens(cut: &Cut) -> [usize; 13] {
    let rows = cut.band_rows;
    let (qk, v) = (rows * cut.columns_qk, rows * cut.columns_v);
    let scores = rows * cut.block_keys;
    // Allocate one panel more: the last panel of scores reads rows past the last key.
    let keys = cut.strip_keys + PANEL;
    let row = cut.columns_qk.max(cut.columns_v);
    [qk, qk, v, v, keys * cut.extents.dim_qk, keys * cut.extents.dim_v, scores, scores, rows, rows, rows, cut.tile_rows, row]
}

/// The keys of a cell.
#[derive(Debug)]
struct Keys<'a> {
    range: Range<usize>,
    /// `[key][dim_qk]` and `[key][dim_v]`, with padding rows for the last panel.
    k: &'a [f32],
    v: &'a [f32],
    /// Keys that contain inf or NaN and are masked out for a row.
    holes: Vec<usize>,
}

/// P and dS, `[tile][key][row]`, of one block of keys.
#[derive(Debug)]
struct Weights<'a, 'w, 'r> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    ones: &'a [f32],
    /// Distance between tiles.
    tile: usize,
    rulings: &'a mut Rulings<'w, 'r>,
}

/// Sums of a cell: `dq` as `[tile][dim_qk][row]` of its rows, `dk` and `dv` as `[key][column]` of its keys.
#[derive(Debug)]
pub(super) struct Gradients<'a> {
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
}

/// Computes the contribution of one cell (some rows against some keys) to the gradients.
pub(super) fn run<T: Element>(
    call: &Call<'_, T>,
    scratch: &mut Scratch,
    rulings: &mut Rulings<'_, '_>,
    (head, cell): (usize, &Cell),
    to: Gradients<'_>,
) {
    let Call { cut, isa, k: keys_view, v: values_view, .. } = call;
    let (batch, head_kv) = (head / cut.extents.heads_kv, head % cut.extents.heads_kv);
    let extents = &cut.extents_of(batch);
    let (dim_qk, dim_v) = (extents.dim_qk, extents.dim_v);
    let (strip, range) = (cut.rows(extents, cell), cut.keys(extents, cell));
    // Round up to whole tiles and panels. Elements past the end belong to no strip and are ignored.
    let (n_rows, n_keys) = (strip.len().next_multiple_of(cut.tile_rows), range.len().next_multiple_of(PANEL));
    let dq = &mut to.dq[..n_rows * dim_qk];
    let (dk, dv) = (&mut to.dk[..n_keys * cut.columns_qk], &mut to.dv[..n_keys * cut.columns_v]);
    dq.fill(0.0);
    dk.fill(0.0);
    dv.fill(0.0);
    if overlap(&extents.keys_of_any(&strip), &range).is_empty() {
        return;
    }
    let ([q_lanes, q_rows, d_o_lanes, d_o_rows, k, v, p, ds, lse, lse_rest, delta, ones, buffer], bounds, _) =
        scratch.split(scratch_lens(cut));
    let (start, end) = bounds.split_at_mut(cut.band_rows);
    ones.fill(1.0);

    let head = Head { batch, head_kv, group: 1 };
    let k = keys_view.dense_in_place(batch, head_kv, &range, PANEL).unwrap_or_else(|| {
        isa.run(CopyRows { from: keys_view, head, rows: range.clone(), width: dim_qk, to: &mut *k });
        k
    });
    let v = values_view.dense_in_place(batch, head_kv, &range, PANEL).unwrap_or_else(|| {
        isa.run(CopyRows { from: values_view, head, rows: range.clone(), width: dim_v, to: &mut *v });
        v
    });
    let queries = Queries { call, head: Head { group: extents.group, ..head }, extents: *extents };
    let kept_by_all = if call.rules.drop() { 0..0 } else { queries.keys_of_all(&strip) };
    rulings.worker.entry(batch);
    let is_hole = |key: &usize| !kept_by_all.contains(key) && !all_finite(&k[(key - range.start) * dim_qk..][..dim_qk]);
    let keys = Keys { holes: range.clone().filter(is_hole).collect(), range, k, v };

    let (q, d_o) = (Packed::new(q_lanes, q_rows, cut.columns_qk), Packed::new(d_o_lanes, d_o_rows, cut.columns_v));
    let mut band = Band { rows: 0..0, tiles: Vec::new(), q, d_o, lse, lse_rest, delta, start, end, buffer };
    let mut weights = Weights { p, ds, ones, tile: cut.tile_rows * cut.block_keys, rulings };
    for (first, dq) in strip.clone().step_by(cut.band_rows).zip(dq.chunks_mut(cut.band_rows * dim_qk)) {
        let rows_of_band = first..(first + cut.band_rows).min(strip.end);
        let reached = overlap(&extents.keys_of_any(&rows_of_band), &keys.range);
        if reached.is_empty() {
            continue;
        }
        // Round to whole panels, because the last panel of a block adds to all keys of that panel.
        let (first_key, n_keys) = (reached.start - (reached.start - keys.range.start) % PANEL, reached.end - keys.range.start);
        let reached = first_key..(keys.range.start + n_keys.next_multiple_of(PANEL)).min(keys.range.end);
        band.pack(&queries, rows_of_band, &reached);
        for tile in &band.tiles {
            let row = |lane: usize| queries.head.index(band.rows.start + lane.min(tile.rows.end - 1));
            let rows = tile.lanes.clone().map(|lane| Row { head: row(lane)[1], query: row(lane)[2] });
            weights.rulings.worker.rows(tile.index, rows);
        }
        for first_key in reached.clone().step_by(cut.block_keys) {
            let block = first_key..(first_key + cut.block_keys).min(reached.end);
            step(&queries, &keys, &band, &block, &mut weights, Gradients { dq: &mut *dq, dk: &mut *dk, dv: &mut *dv });
        }
    }
}

/// Computes one band against one block of keys.
fn step<T: Element>(
    queries: &Queries<'_, T>,
    keys: &Keys<'_>,
    band: &Band<'_>,
    block: &Range<usize>,
    weights: &mut Weights<'_, '_, '_>,
    to: Gradients<'_>,
) {
    let Call { cut, isa, .. } = queries.call;
    let (dim_qk, dim_v) = (cut.extents.dim_qk, cut.extents.dim_v);
    let (n_keys, at) = (block.len(), block.start - keys.range.start);
    let (k, v) = (&keys.k[at * dim_qk..], &keys.v[at * dim_v..]);
    let Rulings { worker, kept, parts } = &mut *weights.rulings;
    worker.keys(block);
    let (mut any, of_tile) = (false, weights.tile);
    for tile in &band.tiles {
        let (vectors, lanes, width) = (tile.vectors, tile.lanes.clone(), tile.lanes.len());
        let p = &mut weights.p[tile.index * weights.tile..][..width * cut.block_keys];
        let ds = &mut weights.ds[tile.index * weights.tile..][..width * cut.block_keys];
        let kept = if queries.call.rules.drop() { &mut kept[tile.index * weights.tile..][..width * n_keys] } else { &mut [] };
        if !worker.keep(tile.index, width, block, kept) {
            p[..width * n_keys].fill(0.0);
            ds[..width * n_keys].fill(0.0);
            continue;
        }
        any = true;
        let q = &band.q.lanes[lanes.start * band.q.columns..][..width * dim_qk];
        isa.run(Tiled(Scores { vectors, dim: dim_qk, n_keys, q, k, scores: p }));
        let q = &band.d_o.lanes[lanes.start * band.d_o.columns..][..width * dim_v];
        isa.run(Tiled(Scores { vectors, dim: dim_v, n_keys, q, k: v, scores: ds }));
        worker.drop_out(tile.index, block, ds);
        if let Some(mods) = &mut worker.mods {
            Modified { isa: *isa, tile, band, block, p, ds, kept }.slopes(mods, parts);
        } else {
            let (start, end, core) = (&band.start[lanes.clone()], &band.end[lanes.clone()], tile.core.clone());
            isa.run(Tiled(DropOutside { vectors, keys: block.clone(), core, start, end, scores: p }));
            if !kept.is_empty() {
                isa.run(DropUnkept { kept, scores: &mut p[..width * n_keys] });
            }
            let (lse, lse_rest, delta) = (&band.lse[lanes.clone()], &band.lse_rest[lanes.clone()], &band.delta[lanes.clone()]);
            isa.run(Tiled(Slopes { vectors, n_keys, lse, lse_rest, delta, p, ds }));
        }
        worker.drop_out(tile.index, block, p);
        if let Some(inside) = queries.call.inside {
            inside.weights.round(&mut p[..width * n_keys]);
            inside.slopes.round(&mut ds[..width * n_keys]);
        }

        let o = &mut to.dq[lanes.start * dim_qk..][..width * dim_qk];
        let mut first = block.start;
        let holes = || keys.holes.iter().copied().filter(|key| block.contains(key));
        for hole in holes().chain([block.end]) {
            let skipped = first - block.start;
            let (p, v, scale) = (&ds[skipped * width..], &k[skipped * dim_qk..], &weights.ones[..width]);
            isa.run(Tiled(Values { vectors, dim: dim_qk, n_keys: hole - first, p, v, scale, o }));
            first = hole + 1;
        }
        // Add the key to dq only in rows that attend to it: in other rows, 0 times inf would give NaN.
        for hole in holes() {
            let slopes = &ds[(hole - block.start) * width..][..width];
            let keeps = |lane: usize| kept.is_empty() || kept[(hole - block.start) * width + lane] != 0;
            let attends = |lane: usize| band.attends(lanes.start + lane, hole) && keeps(lane);
            for (lane, slope) in slopes.iter().enumerate().filter(|(lane, _)| attends(*lane)) {
                for (c, x) in k[(hole - block.start) * dim_qk..][..dim_qk].iter().enumerate() {
                    o[c * width + lane] += slope * x;
                }
            }
        }
    }
    if any {
        let kept: &[u32] = kept;
        let of = |weights| Weighted { weights, kept, tile: of_tile };
        add_to_keys(queries, band, (&band.d_o, &queries.call.d_o), block, of(weights.p), &mut to.dv[at * band.d_o.columns..]);
        add_to_keys(queries, band, (&band.q, &queries.call.q), block, of(weights.ds), &mut to.dk[at * band.q.columns..]);
    }
}

/// Weights of a block, `[tile][key][row]`, and the elements that a mask keeps; empty without a mask.
#[derive(Debug)]
struct Weighted<'a> {
    weights: &'a [f32],
    kept: &'a [u32],
    /// Distance between tiles.
    tile: usize,
}

/// Adds rows of an operand, multiplied by weights, to the sums of a block of keys.
fn add_to_keys<T: Element>(
    queries: &Queries<'_, T>,
    band: &Band<'_>,
    (packed, view): (&Packed<'_>, &View<'_, T>),
    block: &Range<usize>,
    Weighted { weights, kept, tile: weights_of_tile }: Weighted<'_>,
    sums: &mut [f32],
) {
    let (n_keys, n_rows, columns, tile_rows) = (block.len(), band.rows.len(), packed.columns, queries.call.cut.tile_rows);
    let packed_rows = &packed.rows[..n_rows * columns];
    queries.call.isa.run(KeySums { n_keys, n_rows, tile_rows, weights, weights_of_tile, columns, rows: packed_rows, sums });
    for &hole in &packed.holes {
        let mut row = vec![0.0; view.dim];
        view.widen_row(queries.head.index(band.rows.start + hole), &mut row);
        let tile = &band.tiles[hole / tile_rows];
        for i in (0..n_keys).filter(|i| band.attends(hole, block.start + i)) {
            let at = tile.index * weights_of_tile + i * tile.lanes.len() + hole - tile.lanes.start;
            if !kept.is_empty() && kept[at] == 0 {
                continue;
            }
            let weight = weights[at];
            sums[i * columns..].iter_mut().zip(&row).for_each(|(sum, x)| *sum += weight * x);
        }
    }
}
