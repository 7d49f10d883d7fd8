//! Calls of forward passes: one launch, and one before it for each kind of list that is made on the device.
#![allow(unsafe_code)]

use super::room::Room;
use super::told::{Drops, Scale, bound, clipped, heads_in_cache, packed_map, statistics, steps, tensor, tiled};
use super::{CudaPlan, Pass};
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::params::{FAR, Params};
use crate::problem::Forward;
use crate::tile::Tile;
use sdpa_core::device::DeviceCall;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::{Operand, SINK, Side};
use sdpa_driver::{DeviceSlice, Launch, Submission, TensorMap};
use std::ffi::c_void;

/// Warps of a block that lists tiles, each of which has a document.
const LISTING_WARPS: u32 = 8;
/// Warps of a block that merges parts, each of which has a row.
const MERGING_WARPS: u32 = 4;

impl CudaPlan {
    /// # Safety
    /// As `DevicePrepared::submit`; the workspace is as large as the pass asks.
    pub(super) unsafe fn submit_forward(
        &self,
        forward: &Forward,
        tile: &Tile,
        submission: &Submission<'_>,
        call: &DeviceCall<'_, DeviceSlice>,
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        let mut maps = [TensorMap::default(); 4];
        // Queries come as a whole tile, keys and values as a step of it, results leave by the rows of a warp.
        let piece = [forward.piece(tile), 1];
        let boxes = [[tile.queries(), tile.heads()], piece, piece, [16, 1]];
        let operands = [Operand::Q, Operand::K, Operand::V, Operand::O];
        let tokens = self.tokens(forward, operands.into_iter().zip(&forward.tensors), call);
        for (n, operand) in operands.into_iter().enumerate() {
            let (address, side) = (call.operand(operand).map_or(0, |slice| slice.address), operand.side());
            maps[n] = if forward.packs(side) {
                packed_map(submission, address, &clipped(&forward.tensors[n], tokens[side as usize], boxes[n]))?
            } else {
                let tensor = self.job.in_memory(operand).unwrap_or(forward.tensors[n]);
                submission.tensor_map(address, &tiled(&tensor, boxes[n]))?
            };
        }
        let (room, lists_tiles) = (self.room(forward, tile), forward.lists_tiles(tile));
        let taken = DeviceSlice { address: workspace.address, bytes: if room.counter > 0 && !lists_tiles { 4 } else { 0 } };
        let items = workspace.address + room.counter;
        let firsts = items + room.items;
        let part_logs = firsts + room.firsts;
        let part_largest = part_logs + room.logs;
        let params = Params {
            taken: workspace.address,
            items,
            firsts,
            part_logs,
            part_largest,
            part_sums: part_largest + room.largest,
            most_items: room.most_items as i32,
            tokens_q: tokens[Side::Queries as usize] as i32,
            tokens_kv: tokens[Side::Keys as usize] as i32,
            ..self.params(forward, tile, call, workspace.address + room.bytes())
        };
        let captured = self.captured(call);
        let [q, k, v, o] = maps.each_ref().map(|map| std::ptr::from_ref(map).cast::<c_void>());
        let parameters = [q, k, v, o, (&raw const params).cast(), captured.as_ptr().cast()];
        let launch =
            Launch { blocks: [self.forward_blocks(forward, tile), 1, 1], threads: tile.threads(), shared_bytes: tile.shared_bytes() };
        self.noting_use(submission, || {
            // SAFETY: parameters are those of the kernel; the rest is the caller's, the counter a part of the workspace, and the map is kept with the plan.
            unsafe {
                if taken.bytes > 0 {
                    submission.zero(taken)?;
                }
                if lists_tiles {
                    let entry = self.kept.kernel.entry(EntryPoint::TileList)?;
                    let blocks = steps(forward.extents[0], LISTING_WARPS) as u32;
                    let launch = Launch { blocks: [blocks, 1, 1], threads: 32 * LISTING_WARPS, shared_bytes: 0 };
                    submission.launch_entry(entry, launch, &parameters[4..5])?;
                }
                self.make_lists(submission, [parameters[4], parameters[5]])?;
                submission.launch_entry(self.kept.kernel.entry(EntryPoint::Forward)?, launch, &parameters)?;
                if tile.split {
                    let entry = self.kept.kernel.entry(EntryPoint::Combine)?;
                    let [batch, _, seq_q, _] = forward.extents;
                    let tiles = batch * forward.units(tile) * steps(seq_q, tile.queries());
                    let blocks = u32::try_from(tiles * steps((tile.queries() * tile.heads()).into(), MERGING_WARPS)).unwrap_or(u32::MAX);
                    let launch = Launch { blocks: [blocks, 1, 1], threads: 32 * MERGING_WARPS, shared_bytes: 0 };
                    submission.launch_entry(entry, launch, &parameters[4..5])?;
                }
                Ok(())
            }
        })
    }

    /// Blocks of threads: as many as multiprocessors, which take tile after tile, or as many as there are tiles.
    fn forward_blocks(&self, forward: &Forward, tile: &Tile) -> u32 {
        let most = self.kept.kernel.module.device().sm_count();
        let parts = if tile.split { forward.most_parts(tile, most) + forward.units(tile) } else { 0 };
        u32::try_from(forward.most_tiles(tile) + parts).unwrap_or(u32::MAX).min(most)
    }

    fn room(&self, forward: &Forward, tile: &Tile) -> Room {
        Room::of(forward, tile, self.kept.kernel.module.device().sm_count())
    }

    /// Bytes of workspace: a counter, a list of tiles, parts of keys, and lists of blocks.
    pub(super) fn forward_workspace(&self, forward: &Forward, tile: &Tile) -> u64 {
        self.room(forward, tile).bytes() + self.lists_bytes()
    }

    fn params(&self, forward: &Forward, tile: &Tile, call: &DeviceCall<'_, DeviceSlice>, lists: u64) -> Params {
        let Forward { tensors: [_, k, v, o], region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
        let Scale { natural, scale, unit } = self.scale(call);
        let drops = Drops::of(forward, call);
        let lists = self.lists(lists);
        let [map_batch, map_head] = lists.strides();
        let [stats, row_max, sum_exp] = statistics(call);
        let (head_tiles, units) = (forward.head_tiles(tile), forward.units(tile));
        // Whole groups that share a key head. A list has the tiles of all batch entries.
        let together = |keys: i64| heads_in_cache(2 * keys * (k.dims[3] + v.dims[3])) * head_tiles;
        let section = match forward.packed {
            // Keys are read once: those of all heads, which lie side by side.
            _ if tile.split || (tile.few.is_some() && forward.lists_tiles(tile)) => units,
            Some(packs) => together(packs.totals[Side::Keys as usize].min(batch * seq_kv)).min(units),
            None => together(*seq_kv).min(batch * units),
        };
        Params {
            stats,
            row_max,
            sum_exp,
            seq_len_q: tensor(call, SEQ_LEN_Q),
            seq_len_kv: tensor(call, SEQ_LEN_KV),
            sink: tensor(call, SINK),
            map_begin: lists.begin,
            map_end: lists.end,
            map_blocks: lists.blocks,
            boundaries_q: self.boundaries(call, Side::Queries),
            boundaries_kv: self.boundaries(call, Side::Keys),
            batch: *batch as i32,
            heads_q: *heads_q as i32,
            group: *group as i32,
            o: call.operand(Operand::O).map_or(0, |slice| slice.address),
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            dim_v: o.dims[3] as i32,
            page_table: tensor(call, PAGE_TABLE),
            page_size: forward.paged.map_or(1, |paged| paged.page_size.min(FAR.into())) as i32,
            pages: forward.paged.map_or(1, |paged| paged.pages) as i32,
            table_row: forward.paged.map_or(0, |paged| paged.pages_of(*seq_kv)) as i32,
            units: units as i32,
            head_tiles: head_tiles as i32,
            most_parts: forward.most_parts(tile, self.kept.kernel.module.device().sm_count()) as i32,
            seq_q: *seq_q as i32,
            seq_kv: *seq_kv as i32,
            tiles: steps(*seq_q, tile.queries()) as i32,
            section: section as i32,
            map_batch,
            map_head,
            lower: bound(region.lower, -FAR),
            upper: bound(region.upper, FAR),
            prefix: bound(region.prefix, 0),
            ends_lower: bound(ends.lower, -FAR),
            ends_upper: bound(ends.upper, FAR),
            dropout_seed: drops.seed,
            dropout_offset: drops.offset,
            dropout_most: drops.most,
            dropout_scale: drops.scale,
            natural,
            scale,
            unit,
            ..Params::default()
        }
    }
}

impl From<(Forward, Tile)> for Pass {
    fn from((forward, tile): (Forward, Tile)) -> Pass {
        Pass::Forward(Box::new(forward), tile)
    }
}
