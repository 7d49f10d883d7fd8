//! The schedule of a backward pass. Accumulators are set to 0 first. One launch computes the log-sum-exp and delta of rows, and one the gradients.
//! For wide heads another one converts the dQ accumulator. Each parameter gradient that is summed in a fixed order has one more, and each that is
//! rounded has one more.

use super::params::BackwardParams;
use crate::attention_params::Tiling;
use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::head_sections::{HeadSections, head_tiles};
use crate::problem::Forward;
use crate::schedule::arguments::Member;
use crate::schedule::{Address, Argument, Blocking, Builder, Gpu, OperandMap, Schedule};
use crate::source::{self, SINKS_SHARED_BYTES};
use crate::tile_config::BackwardTile;
use crate::work::steps;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, Statistic};
use sdpa_nvidia::JobQuery;

/// Threads per block of the auxiliary kernels.
const THREADS: i64 = 256;
/// Threads per block of the kernel that converts a slice of the dQ accumulator.
const SLICE_THREADS: i64 = 128;

/// Workspace that is 0 when the kernels begin.
struct Zeroed {
    /// The dK and dV accumulators that thread blocks share, and how many of these blocks are done with each.
    dkv_sums: Address,
    dkv_done: Address,
    /// The counter of KV blocks; per head section, how many blocks are done and how many slices of the dQ accumulator are converted.
    next: Address,
    done: Address,
    converted: Address,
    /// Whether the log-sum-exp of any row is large.
    large: Address,
    /// The dQ accumulator.
    dq_sums: Address,
    /// The bounds of each KV head, for fixed-point sums of dQ.
    kv_bounds: Address,
    /// The number of parts that each query tile's fixed-point sums of dQ have.
    dq_parts: Address,
}

/// Returns a description of the tile configuration.
fn label(tile: &BackwardTile) -> String {
    let shares = if tile.shares > 1 { format!(", GQA groups over {} blocks", tile.shares) } else { String::new() };
    let clusters = if tile.two_cta { ", 2-CTA clusters" } else { "" };
    format!("backward {} x {} of {}, {}{clusters}{shares}", tile.queries, BackwardTile::KEYS, tile.dim_qk, tile.dim_v)
}

/// Returns the row stride of a copy of `d_o`, in elements.
fn copy_row(backward: &Backward) -> i64 {
    (backward.d_o.dims[3] as u64).next_multiple_of(8) as i64
}

/// Returns `d_o` as TMA reads it: itself, or its copy.
fn readable(backward: &Backward) -> TensorSpec {
    let (row, [_, heads, seq, _]) = (copy_row(backward), backward.d_o.dims);
    if backward.copies_d_o() { TensorSpec { strides: [heads * seq * row, seq * row, row, 1], ..backward.d_o } } else { backward.d_o }
}

/// Returns the schedule (memory and launches) of a backward pass with this tile configuration.
pub(crate) fn schedule(
    problem: &BackwardProblem,
    backward: &Backward,
    (tile, sections): (&BackwardTile, &HeadSections),
    gpu: Gpu,
) -> Schedule {
    let forward = &backward.forward;
    let mut builder = Builder::new(JobQuery::Backward(problem), forward, (Family::Wgmma, gpu), label(tile));
    let mut entries = vec![(EntryPoint::Backward, tile.shared_bytes()), (EntryPoint::BackwardPreprocess, 0)];
    if backward.has_other_gradients() {
        entries.extend([(EntryPoint::ReduceGradient, 0), (EntryPoint::ConvertGradient, 0)]);
    }
    entries.extend(tile.fixed_point.then_some((EntryPoint::BackwardBounds, 0)));
    let orders_sinks = tile.fixed_point && backward.sink_gradient.is_some();
    entries.extend(orders_sinks.then_some((EntryPoint::SinkGradient, SINKS_SHARED_BYTES)));
    let converts_dq = tile.sums_bytes() == 0;
    entries.extend(converts_dq.then_some((EntryPoint::ConvertDq, 0)));
    let kernel = builder.kernel(source::backward(backward, tile), entries);

    let Forward { tensors: [q, k, v, o], extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
    let kv_blocks = if tile.fixed_point { batch * (heads_q / group) * steps(*seq_kv, BackwardTile::KEYS) } else { 0 };
    let kv_units = if tile.fixed_point { batch * (heads_q / group) } else { 0 };
    let [dq, ..] = &backward.gradients;
    let rows_of_all = if forward.packed.is_some() { 1 } else { *batch } * heads_q * head_tiles(backward, tile) * i64::from(tile.queries);
    let shared_blocks = if tile.shares > 1 { sections.blocks } else { 0 };
    // In a deterministic pass each thread block stores its own dK and dV, and the last one adds all of them in order.
    let (added, stored) = if tile.fixed_point { (0, shared_blocks * i64::from(tile.shares)) } else { (shared_blocks, 0) };
    let first = builder.slots();
    let dkv_sums = builder.slot("dK and dV accumulators", 4 * added * i64::from(tile.key_sums()));
    let dkv_done = builder.slot("dK and dV done", 4 * shared_blocks);
    let next = builder.slot("KV block counter", 4);
    let (done, converted) = (builder.slot("KV blocks done", 4 * sections.count), builder.slot("dQ slices converted", 4 * sections.count));
    let gradients = backward.parameter_gradients(&mut builder, BackwardTile::KEYS);
    let zeroed = Zeroed {
        dkv_sums,
        dkv_done,
        next,
        done,
        converted,
        large: builder.slot("whether a log-sum-exp is large", 4),
        dq_sums: builder.slot("dQ accumulator", sections.places * i64::from(tile.sums_of_queries())),
        kv_bounds: builder.slot("bounds of keys and values", 8 * kv_units),
        dq_parts: builder
            .slot("parts of fixed-point sums of dQ", if tile.fixed_point { 4 * rows_of_all / i64::from(tile.queries) } else { 0 }),
    };
    builder.zero_slots(first);
    gradients.iter().filter(|gradient| gradient.is_added_in_place()).for_each(|gradient| builder.zero(gradient.added()));
    let dkv_parts = builder.slot("dK and dV of each thread block", 4 * stored * i64::from(tile.key_sums()));
    let lse = builder.slot("log-sum-exp in base 2", 4 * rows_of_all);
    let delta = builder.slot("delta", 4 * rows_of_all);
    let exact = builder.slot("log-sum-exp as two f32", 8 * rows_of_all);
    let dq_scale = builder.slot("fixed-point scale of dQ", if tile.fixed_point { 4 * rows_of_all } else { 0 });
    let copy = if backward.copies_d_o() { 2 * batch * heads_q * seq_q * copy_row(backward) } else { 0 };
    let d_o_copy = builder.slot("dO as TMA reads it", copy);
    let lists = builder.block_lists("block lists", Blocking { queries: tile.queries, keys: BackwardTile::KEYS, by_keys: true });

    let maps = operand_maps(&mut builder, backward, tile, d_o_copy);
    let numbers = (sections.blocks * i64::from(tile.shares)) as i32;
    let last = numbers + (sections.behind * sections.tail) as i32;
    let params = BackwardParams {
        attention: builder.attention_params(Tiling { queries: tile.queries, heads_in_l2: sections.heads }, &lists),
        stats: Address::Statistic(Statistic::Stats),
        o: Address::Operand(Operand::O),
        d_o: Address::Operand(Operand::DO),
        d_o_copy,
        dq: Address::Operand(Operand::DQ),
        lse,
        exact_lse: exact,
        any_large_lse: zeroed.large,
        q: Address::Operand(Operand::Q),
        k: Address::Operand(Operand::K),
        delta,
        dq_accum: zeroed.dq_sums,
        dq_scale,
        kv_bounds: zeroed.kv_bounds,
        dq_parts: zeroed.dq_parts,
        v: Address::Operand(Operand::V),
        dkv_accum: if tile.fixed_point { dkv_parts } else { zeroed.dkv_sums },
        splits_done: zeroed.dkv_done,
        tile_counter: zeroed.next,
        blocks_done: zeroed.done,
        slices_converted: zeroed.converted,
        sink_gradient: backward.sink_gradient_of(&gradients),
        q_batch: q.strides[0],
        q_head: q.strides[1],
        q_row: q.strides[2],
        k_batch: k.strides[0],
        k_head: k.strides[1],
        k_row: k.strides[2],
        v_batch: v.strides[0],
        v_head: v.strides[1],
        v_row: v.strides[2],
        o_batch: o.strides[0],
        o_head: o.strides[1],
        o_row: o.strides[2],
        d_o_batch: backward.d_o.strides[0],
        d_o_head: backward.d_o.strides[1],
        d_o_row: backward.d_o.strides[2],
        d_o_dim: backward.d_o.strides[3],
        dq_batch: dq.strides[0],
        dq_head: dq.strides[1],
        dq_row: dq.strides[2],
        copy_row: copy_row(backward),
        head_splits: tile.shares as i32,
        dim_qk: q.dims[3] as i32,
        head_tiles: head_tiles(backward, tile) as i32,
        blocks: steps(*seq_kv, BackwardTile::KEYS) as i32,
        sections: sections.count as i32,
        ring_sections: sections.ring as i32,
        conversion_lag: sections.behind as i32,
        block_items: numbers,
        conversion_items: sections.tail as i32,
        all_items: last,
    };
    let params = builder.structure(|to| params.push(to));
    let captured = builder.captured();
    // The main kernel adds to the caller's parameter gradients, to the accumulators that are rounded into them, or to partial sums of warps.
    let sums = builder.structure(|to| gradients.iter().for_each(|gradient| gradient.added().push(to)));

    builder.make_block_lists(&lists, kernel, [params, captured]);
    let tiles = batch * heads_q * steps(*seq_q, tile.queries);
    if tile.fixed_point {
        builder.launch(kernel, EntryPoint::BackwardBounds, [kv_blocks, THREADS], [params, captured]);
    }
    builder.launch(kernel, EntryPoint::BackwardPreprocess, [tiles, THREADS], [params, captured]);
    if orders_sinks {
        builder.launch_with(kernel, EntryPoint::SinkGradient, ([*heads_q, THREADS], SINKS_SHARED_BYTES), [params]);
    }
    // The grid has whole clusters, since the CTAs of a cluster start together.
    let at_once = (gpu.multiprocessors / tile.cluster_size()).max(1) * tile.cluster_size();
    let main = ([i64::from(last).min(at_once.into()), BackwardTile::THREADS.into()], tile.shared_bytes());
    builder.launch_with(kernel, EntryPoint::Backward, main, maps.into_iter().chain([params, captured, sums]));
    if converts_dq {
        builder.launch(kernel, EntryPoint::ConvertDq, [tiles * i64::from(tile.slices()), SLICE_THREADS], [params]);
    }
    backward.reduce_gradients(&mut builder, kernel, &gradients);
    backward.round_gradients(&mut builder, kernel, &gradients);
    builder.finish()
}

/// Returns the tensor maps of the operands that TMA accesses.
fn operand_maps(builder: &mut Builder<'_>, backward: &Backward, tile: &BackwardTile, d_o_copy: Address) -> [Argument; 7] {
    let Forward { tensors: [q, k, v, o], .. } = &backward.forward;
    let [dq, dk, dv] = backward.gradients;
    let (queries, keys) = (tile.queries, tile.own_keys());
    let d_o = (if backward.copies_d_o() { d_o_copy } else { Address::Operand(Operand::DO) }, readable(backward));
    let own = |operand, tensor: TensorSpec| (operand, (Address::Operand(operand), tensor));
    let all = [
        (own(Operand::Q, *q), queries),
        (own(Operand::K, *k), keys),
        (own(Operand::V, *v), keys),
        ((Operand::DO, d_o), queries),
        (own(Operand::DQ, dq), 16),
        (own(Operand::DK, dk), 16),
        (own(Operand::DV, dv), 16),
    ];
    builder.tokens_of(all.iter().map(|((operand, (_, tensor)), _)| (*operand, *tensor)).chain([(Operand::O, *o)]));
    all.map(|((operand, (address, tensor)), rows)| {
        let side = operand.side();
        builder.map(if backward.forward.packs(side) {
            OperandMap::packed(address, side, &tensor, [rows, 1])
        } else {
            OperandMap::new(address, &tensor, [rows, 1])
        })
    })
}
