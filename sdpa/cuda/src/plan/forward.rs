//! Calls of forward passes: one launch, and one before it where lists of blocks are made.
#![allow(unsafe_code)]

use super::told::{Scale, bound, heads_in_cache, map_of, steps, tensor};
use super::{CudaPlan, Pass};
use crate::error::Error;
use crate::params::{FAR, Params};
use crate::problem::Forward;
use crate::tile::Tile;
use sdpa_core::device::DeviceCall;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{Operand, SINK, Statistic};
use sdpa_driver::{DeviceSlice, Launch, Submission, TensorMap};
use std::ffi::c_void;

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
        for (n, operand) in [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().enumerate() {
            let address = call.operand(operand).map_or(0, |slice| slice.address);
            maps[n] = map_of(submission, address, &forward.tensors[n], rows[n])?;
        }
        // The counter, and the lists behind it.
        let counter = self.counter_bytes(forward, tile);
        let taken = DeviceSlice { address: workspace.address, bytes: if counter > 0 { 4 } else { 0 } };
        let params = Params { taken: taken.address, ..self.params(forward, tile, call, workspace.address + counter) };
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
                self.make_lists(submission, [parameters[4], parameters[5]])?;
                self.kept.kernel.entries.first().map_or(Ok(()), |entry| submission.launch_entry(entry, launch, &parameters))
            }
        })
    }

    /// Blocks of threads: as many as multiprocessors, which take tile after tile, or as many as there are tiles.
    fn forward_blocks(&self, forward: &Forward, tile: &Tile) -> u32 {
        let most = self.kept.kernel.module.device().sm_count();
        u32::try_from(all_tiles(forward, tile)).unwrap_or(u32::MAX).min(most)
    }

    /// Bytes of workspace: a counter, and lists of blocks.
    pub(super) fn forward_workspace(&self, forward: &Forward, tile: &Tile) -> u64 {
        self.counter_bytes(forward, tile) + self.lists_bytes()
    }

    /// Where there are more tiles than blocks of threads, they are counted.
    fn counter_bytes(&self, forward: &Forward, tile: &Tile) -> u64 {
        if all_tiles(forward, tile) > i64::from(self.forward_blocks(forward, tile)) { 256 } else { 0 }
    }

    fn params(&self, forward: &Forward, tile: &Tile, call: &DeviceCall<'_, DeviceSlice>, lists: u64) -> Params {
        let Forward { tensors: [_, k, v, _], region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
        let Scale { natural, scale, unit } = self.scale(call);
        let lists = self.lists(lists);
        let [map_batch, map_head] = lists.strides();
        // Whole groups that share a key head.
        let section = (heads_in_cache(2 * seq_kv * (k.dims[3] + v.dims[3])) * group).min(batch * heads_q);
        Params {
            stats: call.statistic(Statistic::Stats).map_or(0, |slice| slice.address),
            seq_len_q: tensor(call, SEQ_LEN_Q),
            seq_len_kv: tensor(call, SEQ_LEN_KV),
            sink: tensor(call, SINK),
            map_begin: lists.begin,
            map_end: lists.end,
            map_blocks: lists.blocks,
            taken: 0,
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
        }
    }
}

/// Tiles of queries of all heads.
fn all_tiles(forward: &Forward, tile: &Tile) -> i64 {
    let [batch, heads_q, seq_q, _] = forward.extents;
    batch * heads_q * steps(seq_q, tile.queries())
}

impl From<(Forward, Tile)> for Pass {
    fn from((forward, tile): (Forward, Tile)) -> Pass {
        Pass::Forward(Box::new(forward), tile)
    }
}
