//! Calls of forward passes with `mma.sync`: one launch, and one before it where lists of blocks are made.
#![allow(unsafe_code)]

use super::told::{Drops, ListsAt, Scale, bound, heads_in_cache, statistics, steps, tensor};
use super::{CudaPlan, Pass};
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::mma::{Cut, MmaParams, Strided};
use crate::params::FAR;
use crate::problem::Forward;
use sdpa_core::device::DeviceCall;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, SINK, Side};
use sdpa_driver::{DeviceSlice, Launch, Submission};
use std::ffi::c_void;

impl CudaPlan {
    /// # Safety
    /// As `DevicePrepared::submit`; the workspace is as large as the pass asks.
    pub(super) unsafe fn submit_mma_forward(
        &self,
        forward: &Forward,
        cut: &Cut,
        submission: &Submission<'_>,
        call: &DeviceCall<'_, DeviceSlice>,
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        let [batch, heads_q, seq_q, _] = forward.extents;
        let operands = [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().zip(&forward.tensors);
        let tokens = self.tokens(forward, operands, call);
        let params = self.mma_params(forward, [cut.own, cut.step], call, (self.lists(workspace.address), tokens));
        let captured = self.captured(call);
        let parameters: [*const c_void; 2] = [(&raw const params).cast(), captured.as_ptr().cast()];
        let blocks = u32::try_from(batch * heads_q * steps(seq_q, cut.own)).unwrap_or(u32::MAX);
        let launch = Launch { blocks: [blocks, 1, 1], threads: cut.threads(), shared_bytes: cut.shared_bytes() };
        self.noting_use(submission, || {
            // SAFETY: parameters are those of the kernel; the rest is the caller's, lists are within the workspace, and the map is kept with the plan.
            unsafe {
                self.make_lists(submission, parameters)?;
                Ok(submission.launch_entry(self.kept.kernel.entry(EntryPoint::Forward)?, launch, &parameters)?)
            }
        })
    }

    /// What either pass is told of its attention, cut into tiles of so many queries and blocks of so many keys.
    pub(super) fn mma_params(
        &self,
        forward: &Forward,
        [queries, keys]: [u32; 2],
        call: &DeviceCall<'_, DeviceSlice>,
        (lists, tokens): (ListsAt, [i64; 2]),
    ) -> MmaParams {
        let Forward { tensors: [q, k, v, o], region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
        let Scale { natural, scale, unit } = self.scale(call);
        let drops = Drops::of(forward, call);
        let [map_batch, map_head] = lists.strides();
        let [stats, row_max, sum_exp] = statistics(call);
        let bytes = i64::from(forward.dtype.bits() / 8);
        // Whole groups that share a key head.
        let section = (heads_in_cache(bytes * seq_kv * (k.dims[3] + v.dims[3])) * group).min(batch * heads_q);
        let strided = |operand: Operand, tensor: &TensorSpec| {
            Strided::of(call.operand(operand).map_or(0, |slice| slice.address), tensor, forward.packs(operand.side()))
        };
        MmaParams {
            q: strided(Operand::Q, q),
            k: strided(Operand::K, k),
            v: strided(Operand::V, v),
            o: strided(Operand::O, o),
            stats,
            row_max,
            sum_exp,
            seq_len_q: tensor(call, SEQ_LEN_Q),
            seq_len_kv: tensor(call, SEQ_LEN_KV),
            boundaries_q: self.boundaries(call, Side::Queries),
            boundaries_kv: self.boundaries(call, Side::Keys),
            sink: tensor(call, SINK),
            map_begin: lists.begin,
            map_end: lists.end,
            map_blocks: lists.blocks,
            batch: *batch as i32,
            heads_q: *heads_q as i32,
            group: *group as i32,
            seq_q: *seq_q as i32,
            seq_kv: *seq_kv as i32,
            tokens_q: tokens[Side::Queries as usize] as i32,
            tokens_kv: tokens[Side::Keys as usize] as i32,
            dim_qk: q.dims[3] as i32,
            dim_v: v.dims[3] as i32,
            tiles: steps(*seq_q, queries) as i32,
            blocks: steps(*seq_kv, keys) as i32,
            section: section as i32,
            map_batch,
            map_head,
            lower: bound(region.lower, -FAR),
            upper: bound(region.upper, FAR),
            prefix: bound(region.prefix, 0),
            ends_lower: bound(ends.lower, -FAR),
            ends_upper: bound(ends.upper, FAR),
            page_table: tensor(call, PAGE_TABLE),
            page_size: forward.paged.map_or(1, |paged| paged.page_size.min(FAR.into())) as i32,
            pages: forward.paged.map_or(1, |paged| paged.pages) as i32,
            table_row: forward.paged.map_or(0, |paged| paged.pages_of(*seq_kv)) as i32,
            dropout_seed: drops.seed,
            dropout_offset: drops.offset,
            dropout_most: drops.most,
            dropout_scale: drops.scale,
            natural,
            scale,
            unit,
            ..MmaParams::default()
        }
    }
}

impl From<(Forward, Cut)> for Pass {
    fn from((forward, cut): (Forward, Cut)) -> Pass {
        Pass::MmaForward(Box::new(forward), cut)
    }
}
