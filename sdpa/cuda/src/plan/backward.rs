//! Calls of backward passes: what is added to becomes 0, then a launch for the rows, one for the gradients, where heads are wide one for those of queries, and one for
//! each parameter's that is rounded.
#![allow(unsafe_code)]

use super::told::{Drops, Scale, bound, clipped, map_of, packed_map, steps, tensor};
use super::{CudaPlan, Pass};
use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::params::{BackwardParams, FAR};
use crate::problem::Forward;
use crate::sections::{Sections, head_tiles};
use crate::tile::BackwardTile;
use sdpa_core::device::DeviceCall;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Operand, SINK, Side, Statistic};
use sdpa_driver::{DeviceSlice, Launch, Submission, TensorMap};
use smallvec::SmallVec;
use std::ffi::c_void;

/// Threads of the kernels around the one that computes.
const THREADS: u32 = 256;
const SLICE_THREADS: u32 = 128;

/// Where what the kernels leave to one another lies in the workspace, in bytes from its begin.
#[derive(Debug, Default)]
struct Workspace {
    /// Sums of gradients of keys and values that blocks of threads share, and how many are done with each.
    key_sums: u64,
    shares_done: u64,
    /// How many blocks of keys were taken; of each section, how many are done, and how many slices of sums have left.
    taken: u64,
    counts: [u64; 2],
    /// Sums of gradients of parameters that are rounded, that of the sinks last.
    along: SmallVec<[Option<u64>; 4]>,
    /// Sums of gradients of queries: all that lies before `lse` is 0 when the kernels begin.
    sums: u64,
    /// True if any row's log-sum-exp is large.
    large: u64,
    lse: u64,
    delta: u64,
    exact: u64,
    d_o: u64,
    lists: u64,
    bytes: u64,
}

impl Workspace {
    /// With so many bytes for lists of blocks.
    fn of(backward: &Backward, tile: &BackwardTile, sections: &Sections, lists: u64) -> Workspace {
        let Forward { extents: [batch, heads_q, seq_q, _], .. } = &backward.forward;
        let tiles = if backward.forward.packed.is_some() { 1 } else { *batch } * heads_q * head_tiles(backward, tile);
        let mut end = 0;
        let mut take = |bytes: i64| {
            let begin = end;
            end += bytes.unsigned_abs().next_multiple_of(256);
            begin
        };
        let shared = if tile.shares > 1 { sections.blocks } else { 0 };
        let (key_sums, shares_done) = (take(4 * shared * i64::from(tile.key_sums())), take(4 * shared));
        let (taken, counts) = (take(4), [sections.count; 2].map(|count| take(4 * count)));
        let along = gradients(backward).map(|(dtype, elements)| (dtype != DType::F32).then(|| take(4 * elements))).collect();
        let large = take(4);
        let sums = take(sections.places * i64::from(tile.sums_of_queries()));
        let rows = 4 * tiles * i64::from(tile.queries);
        let [lse, delta, exact] = [rows, rows, 2 * rows].map(&mut take);
        let d_o = take(if backward.copies_d_o() { 2 * batch * heads_q * seq_q * copy_row(backward) } else { 0 });
        let lists = take(lists as i64);
        Workspace { key_sums, shares_done, taken, counts, along, sums, large, lse, delta, exact, d_o, lists, bytes: end }
    }
}

/// Elements from one row of a copy of `d_o` to the next.
fn copy_row(backward: &Backward) -> i64 {
    (backward.d_o.dims[3] as u64).next_multiple_of(8) as i64
}

/// `d_o` as the copy engine takes it: as it lies, or its copy.
fn readable(backward: &Backward) -> TensorSpec {
    let (row, [_, heads, seq, _]) = (copy_row(backward), backward.d_o.dims);
    if backward.copies_d_o() { TensorSpec { strides: [heads * seq * row, seq * row, row, 1], ..backward.d_o } } else { backward.d_o }
}

/// Types and elements of the gradients of parameters, that of the sinks last.
fn gradients(backward: &Backward) -> impl Iterator<Item = (DType, i64)> {
    let extents = backward.forward.extents;
    let along = backward.along.iter().map(move |along| (along.dtype, along.axes.dims(extents).iter().product()));
    along.chain(backward.sink_gradient.map(|dtype| (dtype, extents[1])))
}

impl CudaPlan {
    /// # Safety
    /// As `DevicePrepared::submit`; the workspace is as large as the pass asks.
    pub(super) unsafe fn submit_backward(
        &self,
        (backward, tile, sections): (&Backward, &BackwardTile, &Sections),
        submission: &Submission<'_>,
        call: &DeviceCall<'_, DeviceSlice>,
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        let at = Workspace::of(backward, tile, sections, self.lists_bytes());
        let address = |operand| call.operand(operand).map_or(0, |slice| slice.address);
        let Forward { tensors: [q, k, v, o], extents: [batch, heads_q, seq_q, _], .. } = &backward.forward;
        let [dq, dk, dv] = &backward.gradients;
        let (queries, keys) = (tile.queries, tile.own_keys());
        let d_o = if backward.copies_d_o() { workspace.address + at.d_o } else { address(Operand::DO) };
        let boxes: [(Operand, u64, &TensorSpec, u32); 7] = [
            (Operand::Q, address(Operand::Q), q, queries),
            (Operand::K, address(Operand::K), k, keys),
            (Operand::V, address(Operand::V), v, keys),
            (Operand::DO, d_o, &readable(backward), queries),
            (Operand::DQ, address(Operand::DQ), dq, 16),
            (Operand::DK, address(Operand::DK), dk, 16),
            (Operand::DV, address(Operand::DV), dv, 16),
        ];
        let all = boxes.iter().map(|(operand, _, tensor, _)| (*operand, *tensor)).chain([(Operand::O, o)]);
        let tokens = self.tokens(&backward.forward, all, call);
        let mut maps = [TensorMap::default(); 7];
        for (map, (operand, address, tensor, rows)) in maps.iter_mut().zip(boxes) {
            let side = operand.side();
            *map = if backward.forward.packs(side) {
                packed_map(submission, address, &clipped(tensor, tokens[side as usize], [rows, 1]))?
            } else {
                map_of(submission, address, tensor, rows)?
            };
        }
        // Where sums of gradients of parameters go: to the caller's, or to where they are rounded from.
        let names = backward.along.iter().map(|along| along.name.as_str()).chain(backward.sink_gradient.map(|_| SINK));
        let given: SmallVec<[DeviceSlice; 4]> = names
            .map(|name| call.gradients.iter().find(|g| g.name == name).map_or(DeviceSlice { address: 0, bytes: 0 }, |g| g.slice))
            .collect();
        let sums: SmallVec<[u64; 4]> =
            given.iter().zip(&at.along).map(|(given, own)| own.map_or(given.address, |own| workspace.address + own)).collect();
        let sink_gradient = backward.sink_gradient.and(sums.last().copied()).unwrap_or(0);
        let params = BackwardParams {
            tokens_q: tokens[Side::Queries as usize] as i32,
            tokens_kv: tokens[Side::Keys as usize] as i32,
            ..self.backward_params((backward, tile, sections), call, (workspace.address, &at), sink_gradient)
        };
        let captured = self.captured(call);
        // An empty structure has a byte.
        let to: SmallVec<[u64; 4]> = if sums.is_empty() { SmallVec::from_elem(0, 1) } else { sums.clone() };
        let [q, k, v, d_o, dq, dk, dv] = maps.each_ref().map(|map| std::ptr::from_ref(map).cast::<c_void>());
        let params_at: *const c_void = (&raw const params).cast();
        let captured_at: *const c_void = captured.as_ptr().cast();
        let parameters = [q, k, v, d_o, dq, dk, dv, params_at, captured_at, to.as_ptr().cast()];

        let tiles = batch * heads_q * steps(*seq_q, queries);
        let launch = |blocks: i64, threads| Launch { blocks: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1], threads, shared_bytes: 0 };
        // Who runs together begins together.
        let at_once = (self.multiprocessors() / tile.together()).max(1) * tile.together();
        let blocks = i64::from(params.last).min(at_once.into());
        let main = Launch { shared_bytes: tile.shared_bytes(), ..launch(blocks, BackwardTile::THREADS) };
        let zeroed = DeviceSlice { bytes: at.lse, ..workspace };
        self.noting_use(submission, || {
            let kernel = &self.kept.kernel;
            // SAFETY: parameters are those of the kernels; the rest is the caller's, what lies in the workspace is within it, and the map is kept
            // with the plan.
            unsafe {
                submission.zero(zeroed)?;
                for (given, own) in given.iter().zip(&at.along) {
                    if own.is_none() {
                        submission.zero(*given)?;
                    }
                }
                self.make_lists(submission, [params_at, captured_at])?;
                submission.launch_entry(
                    kernel.entry(EntryPoint::BackwardPreprocess)?,
                    launch(tiles, THREADS),
                    &[params_at, captured_at],
                )?;
                submission.launch_entry(kernel.entry(EntryPoint::Backward)?, main, &parameters)?;
                if tile.sums_bytes() == 0 {
                    let of_queries = kernel.entry(EntryPoint::ConvertDq)?;
                    submission.launch_entry(of_queries, launch(tiles * i64::from(tile.slices()), SLICE_THREADS), &[params_at])?;
                }
                for (n, (dtype, elements)) in gradients(backward).enumerate().filter(|(_, (dtype, _))| *dtype != DType::F32) {
                    let numbers = [sums[n], given[n].address, elements.unsigned_abs(), u64::from(dtype == DType::F16)];
                    let parameters = numbers.each_ref().map(|number| std::ptr::from_ref(number).cast());
                    submission.launch_entry(
                        kernel.entry(EntryPoint::ConvertGradient)?,
                        launch(steps(elements, THREADS), THREADS),
                        &parameters,
                    )?;
                }
            }
            Ok(())
        })
    }

    /// Multiprocessors of the device, each of which has one block of threads at a time.
    fn multiprocessors(&self) -> u32 {
        self.kept.kernel.module.device().sm_count()
    }

    /// Bytes of workspace.
    pub(super) fn backward_workspace(&self, backward: &Backward, tile: &BackwardTile, sections: &Sections) -> u64 {
        Workspace::of(backward, tile, sections, self.lists_bytes()).bytes
    }

    fn backward_params(
        &self,
        (backward, tile, sections): (&Backward, &BackwardTile, &Sections),
        call: &DeviceCall<'_, DeviceSlice>,
        (workspace, at): (u64, &Workspace),
        sink_gradient: u64,
    ) -> BackwardParams {
        let Forward { tensors: [q, k, v, o], region, ends, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = &backward.forward;
        let Backward { d_o, gradients: [dq, ..], .. } = backward;
        let Scale { natural, scale, unit } = self.scale(call);
        let drops = Drops::of(&backward.forward, call);
        let lists = self.lists(workspace + at.lists);
        let [map_batch, map_head] = lists.strides();
        let address = |operand| call.operand(operand).map_or(0, |slice| slice.address);
        let numbers = (sections.blocks * i64::from(tile.shares)) as i32;
        BackwardParams {
            stats: call.statistic(Statistic::Stats).map_or(0, |slice| slice.address),
            o: address(Operand::O),
            d_o: address(Operand::DO),
            d_o_copy: if backward.copies_d_o() { workspace + at.d_o } else { 0 },
            dq: address(Operand::DQ),
            q: address(Operand::Q),
            k: address(Operand::K),
            lse: workspace + at.lse,
            exact: workspace + at.exact,
            large: workspace + at.large,
            delta: workspace + at.delta,
            sums: workspace + at.sums,
            key_sums: workspace + at.key_sums,
            shares_done: workspace + at.shares_done,
            taken: workspace + at.taken,
            done: workspace + at.counts[0],
            settled: workspace + at.counts[1],
            seq_len_q: tensor(call, SEQ_LEN_Q),
            seq_len_kv: tensor(call, SEQ_LEN_KV),
            boundaries_q: self.boundaries(call, Side::Queries),
            boundaries_kv: self.boundaries(call, Side::Keys),
            sink: tensor(call, SINK),
            sink_gradient,
            map_begin: lists.begin,
            map_end: lists.end,
            map_blocks: lists.blocks,
            q_batch: q.strides[0],
            q_head: q.strides[1],
            q_row: q.strides[2],
            k_batch: k.strides[0],
            k_head: k.strides[1],
            k_row: k.strides[2],
            o_batch: o.strides[0],
            o_head: o.strides[1],
            o_row: o.strides[2],
            d_o_batch: d_o.strides[0],
            d_o_head: d_o.strides[1],
            d_o_row: d_o.strides[2],
            d_o_dim: d_o.strides[3],
            dq_batch: dq.strides[0],
            dq_head: dq.strides[1],
            dq_row: dq.strides[2],
            copy_row: copy_row(backward),
            batch: *batch as i32,
            heads_q: *heads_q as i32,
            group: *group as i32,
            shares: tile.shares as i32,
            seq_q: *seq_q as i32,
            seq_kv: *seq_kv as i32,
            dim_qk: q.dims[3] as i32,
            dim_v: v.dims[3] as i32,
            tiles: steps(*seq_q, tile.queries) as i32,
            head_tiles: head_tiles(backward, tile) as i32,
            blocks: steps(*seq_kv, BackwardTile::KEYS) as i32,
            section: sections.heads as i32,
            sections: sections.count as i32,
            ring: sections.ring as i32,
            behind: sections.behind as i32,
            numbers,
            tail: sections.tail as i32,
            last: numbers + (sections.behind * sections.tail) as i32,
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
            ..BackwardParams::default()
        }
    }
}

impl From<(Backward, BackwardTile, Sections)> for Pass {
    fn from((backward, tile, sections): (Backward, BackwardTile, Sections)) -> Pass {
        Pass::Backward(Box::new(backward), tile, sections)
    }
}
