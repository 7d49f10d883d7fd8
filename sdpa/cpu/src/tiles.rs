//! Many rows: tiles with one row per lane.

use super::backward::Slopes;
use super::element::Element;
use super::isa::{Isa, PANEL};
use super::kernel::{DropOutside, Scores, Softmax, Tiled, Values};
use super::long_sums::{Long, Outputs};
use super::output::{Sink, Sums};
use super::pack::{CopyRows, Head, Scratch, Transpose, all_finite, overlap, take_out_holes};
use super::program::{DropUnkept, Row, Worker};
use super::schedule::{Piece, Schedule};
use crate::forward::{Call, Known};
use std::ops::Range;

/// Returns the lengths of the scratch slices: queries, output, maxima, sums, factors of the output, keys, values, scores, one row. The slices of queries and
/// output also hold each other's rows before and after the transposition.
pub(super) fn scratch_lens(schedule: &Schedule, isa: Isa) -> [usize; 9] {
    let (blocks, extents) = (schedule.blocks, schedule.extents);
    let rows = schedule.strip_rows_used().next_multiple_of(isa.lanes());
    let keys = blocks.block_keys;
    let row = extents.dim_qk.max(extents.dim_v);
    // Allocate one panel more: the last panel of scores reads rows past the last key of a block.
    let padded = keys + PANEL;
    let tile = blocks.tile_rows.min(rows);
    [rows * row, rows * row, rows, rows, tile, padded * extents.dim_qk, keys * extents.dim_v, keys * tile, row]
}

/// Known statistics of the rows of a strip, lane by lane.
struct Weights {
    max: Vec<f32>,
    log: Vec<f32>,
    /// Inputs that the step requires but that do not affect P.
    delta: Vec<f32>,
    slopes: Vec<f32>,
}

impl Weights {
    fn new(known: &Known<'_>, lanes: usize, scores: usize, index: impl Fn(usize) -> [usize; 3]) -> Weights {
        let place = |lane: usize| known.max.place(index(lane));
        Weights {
            max: (0..lanes).map(|lane| known.max.data[place(lane)]).collect(),
            log: (0..lanes).map(|lane| known.log[place(lane)]).collect(),
            delta: vec![0.0; lanes],
            slopes: vec![0.0; scores],
        }
    }

    /// Returns the step that replaces scores by P.
    fn of<'s>(&'s mut self, vectors: usize, n_keys: usize, lanes: Range<usize>, scores: &'s mut [f32]) -> Slopes<'s> {
        let Weights { max, log, delta, slopes } = self;
        Slopes { vectors, n_keys, lse: &max[lanes.clone()], lse_rest: &log[lanes.clone()], delta: &delta[lanes], p: scores, ds: slopes }
    }
}

/// Splits the outputs of tiles by column.
fn columns(tiles: impl Iterator<Item = (Range<usize>, usize, usize)>, o: &mut [f32], dim_v: usize) -> impl Iterator<Item = Outputs<'_>> {
    let mut rest = o;
    tiles.flat_map(move |(rows, _, width)| {
        let (tile, tail) = std::mem::take(&mut rest).split_at_mut(width * dim_v);
        rest = tail;
        tile.chunks_exact_mut(width).map(move |o| Outputs { first: rows.start, step: 1, o })
    })
}

/// Computes one piece of the work (many rows against some keys) and stores the result in `sink`.
pub(super) fn run<T: Element>(
    call: &Call<'_, T>,
    scratch: &mut Scratch,
    (rules, kept): (&mut Worker<'_>, &mut [u32]),
    piece: &Piece,
    sink: Sink<'_, T>,
) {
    let Call { schedule, isa, q: queries, k: keys_view, v: values_view, scale, .. } = call;
    let strip = &schedule.strips[piece.strip];
    let extents = &schedule.extents_of(strip.batch);
    let (dim_qk, dim_v) = (extents.dim_qk, extents.dim_v);
    let lanes = isa.lanes();
    let tile_rows = schedule.blocks.tile_rows;
    let ([q, o, max, sum, factors, k, v, scores, buffer], bounds, holes) = scratch.split(scratch_lens(schedule, *isa));
    let (start, end) = bounds.split_at_mut(max.len());

    // Tiles are consecutive; the last one may use fewer vector registers.
    let n_rows = strip.rows.len();
    let used = n_rows.next_multiple_of(lanes);
    let (o, max, sum) = (&mut o[..used * dim_qk.max(dim_v)], &mut max[..used], &mut sum[..used]);
    let tiles = || {
        (0..n_rows).step_by(tile_rows).map(|first| {
            let rows = first..(first + tile_rows).min(n_rows);
            let vectors = rows.len().div_ceil(lanes);
            (rows, vectors, vectors * lanes)
        })
    };

    let masked = call.rules.drop();
    rules.entry(strip.batch);
    for (tile, (rows, _, width)) in tiles().enumerate() {
        let row_of = |lane: usize| strip.rows.start + rows.start + lane.min(rows.len() - 1);
        let place = |row: usize| Row { head: strip.head_kv * extents.group + row % extents.group, query: row / extents.group };
        rules.rows(tile, (0..width).map(|lane| place(row_of(lane))));
        let staged = &mut o[..width * dim_qk];
        for (lane, staged) in staged.chunks_exact_mut(dim_qk).enumerate() {
            // Lanes without a row repeat the last row, so that they need no mask.
            let row = row_of(lane);
            let keys = extents.keys_of_row(row);
            start[rows.start + lane] = keys.start as u32;
            end[rows.start + lane] = keys.end as u32;
            let Row { head, query } = place(row);
            T::widen(queries.row(strip.batch, head, query), staged);
        }
        isa.run(Transpose { n_columns: dim_qk, factor: *scale, from: staged, to: &mut q[rows.start * dim_qk..][..width * dim_qk] });
    }
    o.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    let mut known = call.known.map(|known| {
        let of_group = Head { batch: strip.batch, head_kv: strip.head_kv, group: extents.group };
        max.fill(0.0);
        Weights::new(known, used, scores.len(), |lane| of_group.index(strip.rows.start + lane.min(n_rows - 1)))
    });

    let mut long = Long::of(piece, &schedule.blocks, max.len(), o.len());
    let (batch, head) = (strip.batch, strip.head_kv);
    let keys_of_head = Head { batch, head_kv: head, group: 1 };
    let kept_by_all = if masked { 0..0 } else { extents.keys_of_all(&strip.rows) };
    for first_key in piece.keys.clone().step_by(schedule.blocks.block_keys) {
        let keys = first_key..(first_key + schedule.blocks.block_keys).min(piece.keys.end);
        let k = keys_view.dense_in_place(batch, head, &keys, PANEL).unwrap_or_else(|| {
            isa.run(CopyRows { from: keys_view, head: keys_of_head, rows: keys.clone(), width: dim_qk, to: &mut *k });
            &*k
        });
        rules.keys(&keys);
        holes.clear();
        let all = overlap(&kept_by_all, &keys) == keys;
        let v = values_view.dense_in_place(batch, head, &keys, 0).filter(|v| all || masked && all_finite(v)).unwrap_or_else(|| {
            isa.run(CopyRows { from: values_view, head: keys_of_head, rows: keys.clone(), width: dim_v, to: &mut *v });
            take_out_holes(v, dim_v, &keys, &kept_by_all, holes);
            &*v
        });
        for (tile, (rows, vectors, width)) in tiles().enumerate() {
            let rows_of_head = strip.rows.start + rows.start..strip.rows.start + rows.end;
            let mut taken = overlap(&extents.keys_of_any(&rows_of_head), &keys);
            if schedule.blocks.aligned && !taken.is_empty() {
                // Partial sums of a block take turns from its first key on.
                taken.start = keys.start;
            }
            if taken.is_empty() || !rules.keep(tile, width, &taken, kept) {
                continue;
            }
            let skipped = taken.start - keys.start;
            let lanes = rows.start..rows.start + width;
            let o = &mut o[rows.start * dim_v..][..width * dim_v];
            let (n_keys, scale) = (taken.len(), &mut factors[..width]);
            let (start, end) = (&start[lanes.clone()], &end[lanes.clone()]);
            let (q, k) = (&q[rows.start * dim_qk..][..width * dim_qk], &k[skipped * dim_qk..]);
            isa.run(Tiled(Scores { vectors, dim: dim_qk, n_keys, q, k, scores }));
            rules.modify(tile, width, &taken, scores);
            let core = extents.keys_of_all(&rows_of_head);
            isa.run(Tiled(DropOutside { vectors, keys: taken.clone(), core, start, end, scores }));
            if masked {
                isa.run(DropUnkept { kept: &kept[..n_keys * width], scores: &mut scores[..n_keys * width] });
            }
            let (max, sum) = (&mut max[lanes.clone()], &mut sum[lanes]);
            match &mut known {
                None => isa.run(Tiled(Softmax { vectors, n_keys, scores, max, sum, scale })),
                Some(known) => {
                    isa.run(Tiled(known.of(vectors, n_keys, rows.start..rows.start + width, scores)));
                    scale.fill(1.0);
                }
            }
            rules.drop_out(tile, &taken, scores);
            if let Some(known) = call.known {
                known.weights.round(&mut scores[..n_keys * width]);
            }
            isa.run(Tiled(Values { vectors, dim: dim_v, n_keys, p: scores, v: &v[skipped * dim_v..], scale, o }));
            for &key in holes.iter().filter(|key| taken.contains(key)) {
                T::widen(values_view.row(batch, head, key), &mut buffer[..dim_v]);
                for lane in 0..rows.len() {
                    let at = (key - taken.start) * width + lane;
                    if (start[lane]..end[lane]).contains(&(key as u32)) && !(masked && kept[at] == 0) {
                        let weight = scores[at];
                        for (c, x) in buffer[..dim_v].iter().enumerate() {
                            o[c * width + lane] += weight * x;
                        }
                    }
                }
            }
        }
        if let Some(long) = long.as_mut().filter(|long| long.is_due(keys.end)) {
            long.take(keys.end, max, sum, columns(tiles(), o, dim_v));
        }
    }

    if let Some(mut long) = long {
        long.take(piece.keys.end, max, sum, columns(tiles(), o, dim_v));
        long.finish(sum, columns(tiles(), o, dim_v));
    }
    if call.known.is_some() {
        // With known statistics, P is already normalised, so divide by 1.
        sum.fill(1.0);
    }
    for (rows, _, width) in tiles() {
        let tile = rows.start * dim_v..(rows.start + width) * dim_v;
        isa.run(Transpose { n_columns: width, factor: 1.0, from: &o[tile.clone()], to: &mut q[tile] });
    }
    sink.take(Sums { max, sum, o: q, stride: dim_v });
}
