//! Calls of forward passes: one launch, and one before it for each kind of list that is made on the device.
#![allow(unsafe_code)]

use super::told::{Scale, bound, clipped, heads_in_cache, map_of, steps, tensor};
use super::{CudaPlan, Pass};
use crate::error::Error;
use crate::params::{FAR, Params};
use crate::problem::Forward;
use crate::tile::Tile;
use sdpa_core::TensorSpec;
use sdpa_core::device::DeviceCall;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::packed::tokens;
use sdpa_core::{Operand, SINK, Side, Statistic};
use sdpa_driver::{DeviceSlice, Launch, Submission, TensorMap};
use std::ffi::c_void;

/// Warps of a block that lists tiles, each of which has a document.
const LISTING_WARPS: u32 = 8;
/// Bytes of an item of the list.
const ITEM_BYTES: u64 = 8;
/// Bytes of the counter, and of how many tiles a list has.
const COUNTER_BYTES: u64 = 256;

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
        let rows = [tile.queries(), tile.keys, tile.keys, 16];
        let tokens = self.tokens(forward, call);
        for (n, operand) in [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().enumerate() {
            let (address, side) = (call.operand(operand).map_or(0, |slice| slice.address), operand.side());
            maps[n] = if forward.packs(side) {
                let map = clipped(&forward.tensors[n], tokens[side as usize], rows[n]);
                submission.tensor_map(address.wrapping_sub(map.strides[0] * map.extents[1]), &map)?
            } else {
                map_of(submission, address, &forward.tensors[n], rows[n])?
            };
        }
        let room = Workspace::of(forward, tile, self.kept.kernel.module.device().sm_count());
        let (counter, items) = (room.counter, workspace.address + room.counter);
        let taken = DeviceSlice { address: workspace.address, bytes: if counter > 0 && !forward.lists_tiles() { 4 } else { 0 } };
        let params = Params {
            taken: workspace.address,
            items,
            most_items: room.most_items as i32,
            tokens_q: tokens[Side::Queries as usize] as i32,
            tokens_kv: tokens[Side::Keys as usize] as i32,
            ..self.params(forward, tile, call, items + room.items)
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
                if let Some(entry) = self.kept.kernel.entries.get(1).filter(|_| forward.lists_tiles()) {
                    let blocks = steps(forward.extents[0], LISTING_WARPS) as u32;
                    let launch = Launch { blocks: [blocks, 1, 1], threads: 32 * LISTING_WARPS, shared_bytes: 0 };
                    submission.launch_entry(entry, launch, &parameters[4..5])?;
                }
                self.make_lists(submission, [parameters[4], parameters[5]])?;
                self.kept.kernel.entries.first().map_or(Ok(()), |entry| submission.launch_entry(entry, launch, &parameters))
            }
        })
    }

    /// Blocks of threads: as many as multiprocessors, which take tile after tile, or as many as there are tiles.
    fn forward_blocks(&self, forward: &Forward, tile: &Tile) -> u32 {
        let most = self.kept.kernel.module.device().sm_count();
        u32::try_from(most_tiles(forward, tile)).unwrap_or(u32::MAX).min(most)
    }

    /// Bytes of workspace: a counter, a list of tiles, and lists of blocks.
    pub(super) fn forward_workspace(&self, forward: &Forward, tile: &Tile) -> u64 {
        let own = Workspace::of(forward, tile, self.kept.kernel.module.device().sm_count());
        own.counter + own.items + self.lists_bytes()
    }

    /// Tokens of packed queries and keys that every operand of the call has room for, as far as the problem goes. Where documents are the same, the fewer.
    fn tokens(&self, forward: &Forward, call: &DeviceCall<'_, DeviceSlice>) -> [i64; 2] {
        let (Some(packs), problem) = (forward.packed, self.job.problem()) else { return [0; 2] };
        let mut least = packs.totals;
        let mut room = |side: Side, tensor: &TensorSpec, elements: u64| {
            least[side as usize] = tokens(tensor, elements).min(least[side as usize]);
        };
        for (tensor, operand) in forward.tensors.iter().zip([Operand::Q, Operand::K, Operand::V, Operand::O]) {
            if let Some(slice) = call.operand(operand).filter(|_| forward.packs(operand.side())) {
                room(operand.side(), tensor, slice.bytes / 2);
            }
        }
        if let Some(slice) = call.statistic(Statistic::Stats) {
            room(Side::Queries, &problem.stats_tensor(), slice.bytes / 4);
        }
        let cross = problem.packed().is_some_and(|packed| packed.cross);
        if cross { least } else { [least[0].min(least[1]); 2] }
    }

    fn params(&self, forward: &Forward, tile: &Tile, call: &DeviceCall<'_, DeviceSlice>, lists: u64) -> Params {
        let Forward { tensors: [_, k, v, _], region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
        let Scale { natural, scale, unit } = self.scale(call);
        let lists = self.lists(lists);
        let [map_batch, map_head] = lists.strides();
        // Whole groups that share a key head.
        let (keys, heads) = match forward.packed {
            Some(packs) => (packs.totals[Side::Keys as usize].min(batch * seq_kv), *heads_q),
            None => (*seq_kv, batch * heads_q),
        };
        let section = (heads_in_cache(2 * keys * (k.dims[3] + v.dims[3])) * group).min(heads);
        let boundaries = |side: Side| self.job.problem().packed().map_or(0, |packed| tensor(call, packed.boundaries(side)));
        Params {
            stats: call.statistic(Statistic::Stats).map_or(0, |slice| slice.address),
            seq_len_q: tensor(call, SEQ_LEN_Q),
            seq_len_kv: tensor(call, SEQ_LEN_KV),
            sink: tensor(call, SINK),
            map_begin: lists.begin,
            map_end: lists.end,
            map_blocks: lists.blocks,
            boundaries_q: boundaries(Side::Queries),
            boundaries_kv: boundaries(Side::Keys),
            batch: *batch as i32,
            heads_q: *heads_q as i32,
            group: *group as i32,
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
            natural,
            scale,
            unit,
            ..Params::default()
        }
    }
}

/// What comes first in the workspace.
struct Workspace {
    /// Bytes of the counter: where there are more tiles than blocks of threads, they are counted, and those of a list always are.
    counter: u64,
    /// Bytes of the list of tiles.
    items: u64,
    /// Items that it has room for.
    most_items: i64,
}

impl Workspace {
    fn of(forward: &Forward, tile: &Tile, multiprocessors: u32) -> Workspace {
        if !forward.lists_tiles() {
            let counted = most_tiles(forward, tile) > i64::from(multiprocessors);
            return Workspace { counter: if counted { COUNTER_BYTES } else { 0 }, items: 0, most_items: 0 };
        }
        let most_items = most_items(forward, tile);
        Workspace { counter: COUNTER_BYTES, items: (ITEM_BYTES * most_items.unsigned_abs()).next_multiple_of(256), most_items }
    }
}

/// Tiles of queries of a head, at most. Documents that do not overlap have no more than tokens fill, and one each that is not full.
fn most_items(forward: &Forward, tile: &Tile) -> i64 {
    let [batch, _, seq_q, _] = forward.extents;
    let each = batch * steps(seq_q, tile.queries());
    forward.packed.map_or(each, |packs| each.min(packs.totals[0] / i64::from(tile.queries()) + batch))
}

/// Tiles of queries of all heads, at most.
fn most_tiles(forward: &Forward, tile: &Tile) -> i64 {
    forward.extents[1] * most_items(forward, tile)
}

impl From<(Forward, Tile)> for Pass {
    fn from((forward, tile): (Forward, Tile)) -> Pass {
        Pass::Forward(Box::new(forward), tile)
    }
}
