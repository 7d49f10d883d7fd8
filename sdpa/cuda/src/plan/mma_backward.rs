//! Calls of backward passes with `mma.sync`: a launch for the rows, one for gradients of queries, one for those of keys and values, one for those of sinks, one for each
//! parameter's that is added up in one order, and one for each that is rounded. What is added to becomes 0 before.
#![allow(unsafe_code)]

use super::lists::Made;
use super::told::steps;
use super::{CudaPlan, Pass, Walk};
use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::mma::{Cut, Left, MmaParams, SINKS_SHARED_BYTES, Strided};
use crate::problem::Forward;
use sdpa_core::device::DeviceCall;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Operand, SINK, Side};
use sdpa_driver::{DeviceSlice, Launch, Submission};
use smallvec::SmallVec;
use std::ffi::c_void;

/// Threads of the kernels around those that compute, and rows of a block of the first.
const THREADS: u32 = 256;
const ROWS: u32 = 32;

/// Where what the kernels leave to one another lies in the workspace, in bytes from its begin.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Sums of gradients of parameters that are rounded, that of the sinks last.
    along: SmallVec<[Option<u64>; 4]>,
    /// What warps leave of gradients of parameters that are added up in one order.
    left: SmallVec<[Option<u64>; 4]>,
    lse: u64,
    delta: u64,
    exact: u64,
    lists_of_queries: u64,
    lists_of_keys: u64,
    pub(super) bytes: u64,
}

impl Workspace {
    /// With lists of blocks, where calls make them there.
    pub(super) fn of(backward: &Backward, cut: &Cut, with_lists: bool) -> Workspace {
        let Forward { extents: [batch, heads_q, seq_q, _], .. } = &backward.forward;
        let mut end = 0;
        let mut take = |bytes: u64| {
            let begin = end;
            end += bytes.next_multiple_of(256);
            begin
        };
        let along = gradients(backward).map(|(dtype, elements)| (dtype != DType::F32).then(|| take(4 * elements.unsigned_abs()))).collect();
        let left = backward.left(cut).map(|left| left.map(|left| take(left.bytes().unsigned_abs()))).collect();
        let rows = backward.forward.packed.map_or(batch * seq_q, |packs| packs.totals[Side::Queries as usize]);
        let rows = 4 * (rows * heads_q).unsigned_abs();
        let [lse, delta, exact] = [rows, rows, 2 * rows].map(&mut take);
        let lists = |walk| Made::of(&backward.forward, walk).filter(|_| with_lists).map_or(0, Made::bytes);
        let [lists_of_queries, lists_of_keys] = [lists(walk_of_queries(cut)), lists(walk_of_keys(cut))].map(&mut take);
        Workspace { along, left, lse, delta, exact, lists_of_queries, lists_of_keys, bytes: end }
    }
}

/// Types and elements of the gradients of parameters, that of the sinks last.
fn gradients(backward: &Backward) -> impl Iterator<Item = (DType, i64)> {
    let extents = backward.forward.extents;
    let along = backward.along.iter().map(move |along| (along.dtype, along.axes.dims(extents).iter().product()));
    along.chain(backward.sink_gradient.map(|dtype| (dtype, extents[1])))
}

/// What gradients of queries walk over.
fn walk_of_queries(cut: &Cut) -> Walk {
    Walk { queries: cut.own, keys: cut.step, of_keys: false }
}

/// What gradients of keys walk over.
pub(super) fn walk_of_keys(cut: &Cut) -> Walk {
    Walk { queries: cut.step, keys: cut.own, of_keys: true }
}

impl CudaPlan {
    /// # Safety
    /// As `DevicePrepared::submit`; the workspace is as large as the pass asks.
    pub(super) unsafe fn submit_mma_backward(
        &self,
        backward: &Backward,
        cut: &Cut,
        submission: &Submission<'_>,
        call: &DeviceCall<'_, DeviceSlice>,
        workspace: DeviceSlice,
    ) -> Result<(), Error> {
        let at = Workspace::of(backward, cut, self.kept.map.is_none());
        let forward = &backward.forward;
        let Forward { extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
        // Where sums of gradients of parameters go: to the caller's, or to where they are rounded from.
        let names = backward.along.iter().map(|along| along.name.as_str()).chain(backward.sink_gradient.map(|_| SINK));
        let given: SmallVec<[DeviceSlice; 4]> = names
            .map(|name| call.gradients.iter().find(|g| g.name == name).map_or(DeviceSlice { address: 0, bytes: 0 }, |g| g.slice))
            .collect();
        let sums: SmallVec<[DeviceSlice; 4]> = given
            .iter()
            .zip(&at.along)
            .zip(gradients(backward))
            .map(|((given, own), (_, elements))| {
                own.map_or(*given, |own| DeviceSlice { address: workspace.address + own, bytes: 4 * elements.unsigned_abs() })
            })
            .collect();
        let sink_gradient = backward.sink_gradient.and(sums.last()).map_or(0, |sum| sum.address);
        let (keys_kernel, keys_map) = self.keys()?;
        let of_queries = self.lists(workspace.address + at.lists_of_queries);
        let of_keys = self.lists_of(walk_of_keys(cut), keys_map, workspace.address + at.lists_of_keys);
        let own = [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().zip(&forward.tensors);
        let gradients_of = [Operand::DQ, Operand::DK, Operand::DV].into_iter().zip(&backward.gradients);
        let tokens = self.tokens(forward, own.chain(gradients_of).chain([(Operand::DO, &backward.d_o)]), call);
        let told = |lists, tile: [u32; 2]| {
            let params = self.mma_params(forward, tile, call, (lists, tokens));
            with_gradients(params, backward, call, (workspace.address, &at), sink_gradient)
        };
        let [queries, keys] = [told(of_queries, [cut.own, cut.step]), told(of_keys, [cut.step, cut.own])];
        let captured = self.captured(call);
        let captured_at: *const c_void = captured.as_ptr().cast();
        let [queries_at, keys_at] = [&queries, &keys].map(|params| std::ptr::from_ref(params).cast::<c_void>());
        // What the kernel of keys adds to: sums, or what is left to be added up.
        let left: SmallVec<[Option<Left>; 4]> = backward.left(cut).collect();
        let added: SmallVec<[DeviceSlice; 4]> = sums
            .iter()
            .zip(left.iter().zip(&at.left))
            .map(|(sum, (left, begin))| {
                let room = left.zip(*begin).map(|(left, begin)| (workspace.address + begin, left.bytes().unsigned_abs()));
                room.map_or(*sum, |(address, bytes)| DeviceSlice { address, bytes })
            })
            .collect();
        // An empty structure has a byte.
        let mut to: SmallVec<[u64; 4]> = added.iter().map(|sum| sum.address).collect();
        if to.is_empty() {
            to.push(0);
        }

        let launch = |blocks: i64, threads| Launch { blocks: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1], threads, shared_bytes: 0 };
        let computes = |blocks: i64| Launch { shared_bytes: cut.shared_bytes(), ..launch(blocks, cut.threads()) };
        let of_tiles = computes(batch * heads_q * steps(*seq_q, cut.own));
        let of_blocks = computes(batch * (heads_q / group) * steps(*seq_kv, cut.own) * i64::from(cut.parts));
        self.noting_use(submission, || {
            let kernel = &self.kept.kernel;
            // SAFETY: parameters are those of the kernels; the rest is the caller's, what lies in the workspace is within it, and maps are kept with the
            // plan.
            unsafe {
                for sum in &added {
                    submission.zero(*sum)?;
                }
                self.make_lists(submission, [queries_at, captured_at])?;
                self.make_lists_of(keys_kernel, walk_of_keys(cut), submission, [keys_at, captured_at])?;
                submission.launch_entry(
                    kernel.entry(EntryPoint::BackwardPreprocess)?,
                    launch(batch * heads_q * steps(*seq_q, ROWS), THREADS),
                    &[queries_at, captured_at],
                )?;
                submission.launch_entry(kernel.entry(EntryPoint::BackwardDq)?, of_tiles, &[queries_at, captured_at])?;
                let compute = keys_kernel.entry(EntryPoint::BackwardDkv)?;
                submission.launch_entry(compute, of_blocks, &[keys_at, captured_at, to.as_ptr().cast()])?;
                if backward.sink_gradient.is_some() {
                    let launch = Launch { shared_bytes: SINKS_SHARED_BYTES, ..launch(*heads_q, THREADS) };
                    submission.launch_entry(kernel.entry(EntryPoint::SinkGradient)?, launch, &[queries_at])?;
                }
                for (n, left) in left.iter().enumerate().filter_map(|(n, left)| Some((n, (*left)?))) {
                    let [batch, heads] = left.rows.map(i64::unsigned_abs);
                    let [of_batch, of_heads] = left.spans.map(u64::from);
                    let lanes = if left.shared { 32 } else { 1 };
                    let sizes = [batch, heads, left.slots.unsigned_abs(), left.inner.unsigned_abs()];
                    let [from, to] = [added[n].address, sums[n].address];
                    let numbers = [from, to, sizes[0], sizes[1], sizes[2], sizes[3], of_batch | of_heads << 1, lanes];
                    let parameters = numbers.each_ref().map(|number| std::ptr::from_ref(number).cast());
                    let threads = left.elements() * lanes.cast_signed();
                    submission.launch_entry(
                        kernel.entry(EntryPoint::ReduceGradient)?,
                        launch(steps(threads, THREADS), THREADS),
                        &parameters,
                    )?;
                }
                for (n, (dtype, elements)) in gradients(backward).enumerate().filter(|(_, (dtype, _))| *dtype != DType::F32) {
                    let numbers = [sums[n].address, given[n].address, elements.unsigned_abs(), u64::from(dtype == DType::F16)];
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

    /// The kernel of gradients of keys, and its map.
    fn keys(&self) -> Result<(&crate::kernel::Kernel, Option<&super::Mapped>), Error> {
        let absent = || Error::Bug("a backward pass with mma.sync has no kernel of keys".to_owned());
        self.kept.keys.as_ref().map(|(kernel, map)| (&**kernel, map.as_deref())).ok_or_else(absent)
    }
}

/// The same with what is of gradients.
fn with_gradients(
    params: MmaParams,
    backward: &Backward,
    call: &DeviceCall<'_, DeviceSlice>,
    (workspace, at): (u64, &Workspace),
    sink_gradient: u64,
) -> MmaParams {
    let Backward { d_o, gradients: [dq, dk, dv], .. } = backward;
    let strided = |operand: Operand, tensor: &TensorSpec| {
        Strided::of(call.operand(operand).map_or(0, |slice| slice.address), tensor, backward.forward.packs(operand.side()))
    };
    MmaParams {
        d_o: strided(Operand::DO, d_o),
        dq: strided(Operand::DQ, dq),
        dk: strided(Operand::DK, dk),
        dv: strided(Operand::DV, dv),
        lse: workspace + at.lse,
        exact: workspace + at.exact,
        delta: workspace + at.delta,
        sink_gradient,
        ..params
    }
}

impl From<(Backward, Cut)> for Pass {
    fn from((backward, cut): (Backward, Cut)) -> Pass {
        Pass::MmaBackward(Box::new(backward), cut)
    }
}
