//! The schedule of a backward pass with `mma.sync`. Accumulators are set to 0 first. One launch each computes the log-sum-exp and delta of rows, dQ,
//! dK and dV, and gradients of sinks. Each parameter gradient has a launch that sums it, if the order is fixed, and one that rounds it, if needed.

use super::forward::params;
use super::params::{Gradients, Strided};
use super::source;
use super::tile_config::TileConfig;
use crate::backward::Backward;
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::problem::Forward;
use crate::schedule::arguments::Member;
use crate::schedule::{Blocking, Builder, Gpu, Schedule};
use crate::source::SINKS_SHARED_BYTES;
use crate::work::steps;
use sdpa_core::backward::BackwardProblem;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, Side};
use sdpa_nvidia::JobQuery;

/// Threads per block of the auxiliary kernels, and rows per block of the first.
const THREADS: u32 = 256;
const ROWS: u32 = 32;

/// Returns the schedule (memory and launches) of a backward pass with this tile configuration.
pub(crate) fn schedule(problem: &BackwardProblem, backward: &Backward, config: &TileConfig, gpu: Gpu) -> Schedule {
    let forward = &backward.forward;
    let label = format!("backward mma.sync {} x {} of {}, {}", config.own, config.step, config.dim_qk, config.dim_v);
    let mut builder = Builder::new(JobQuery::Backward(problem), forward, (Family::Mma, gpu), label);
    let queries_kernel = builder.kernel(
        source::queries_text(backward, config),
        vec![
            (EntryPoint::BackwardDq, config.shared_bytes()),
            (EntryPoint::BackwardPreprocess, 0),
            (EntryPoint::SinkGradient, SINKS_SHARED_BYTES),
            (EntryPoint::ConvertGradient, 0),
            (EntryPoint::ReduceGradient, 0),
        ],
    );
    let keys_kernel = builder.kernel(source::keys_text(backward, config), vec![(EntryPoint::BackwardDkv, config.shared_bytes())]);

    let Forward { tensors, extents: [batch, heads_q, seq_q, seq_kv], group, .. } = forward;
    let [dq, dk, dv] = backward.gradients;
    let own = [Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().zip(*tensors);
    builder.tokens_of(own.chain([(Operand::DQ, dq), (Operand::DK, dk), (Operand::DV, dv), (Operand::DO, backward.d_o)]));

    let sums = backward.parameter_gradients(&mut builder, config.own);
    let rows = forward.packed.map_or(batch * seq_q, |packs| packs.totals[Side::Queries as usize]) * heads_q;
    let strided = |operand: Operand, tensor: TensorSpec| Strided::of(operand, &tensor, forward.packs(operand.side()));
    let gradients = Gradients {
        d_o: strided(Operand::DO, backward.d_o),
        dq: strided(Operand::DQ, dq),
        dk: strided(Operand::DK, dk),
        dv: strided(Operand::DV, dv),
        lse: builder.slot("log-sum-exp in base 2", 4 * rows),
        delta: builder.slot("delta", 4 * rows),
        exact: builder.slot("log-sum-exp as two f32", 8 * rows),
        sink_gradient: backward.sink_gradient_of(&sums),
    };
    let [by_queries, by_keys] = [
        Blocking { queries: config.own, keys: config.step, by_keys: false },
        Blocking { queries: config.step, keys: config.own, by_keys: true },
    ];
    let queries_lists = builder.block_lists("block lists of query tiles", by_queries);
    let keys_lists = builder.block_lists("block lists of KV blocks", by_keys);
    let queries_params = params(&mut builder, by_queries, &queries_lists, &gradients);
    let keys_params = params(&mut builder, by_keys, &keys_lists, &gradients);
    let captured = builder.captured();
    // The dK and dV kernel adds to each gradient, or to a partial sum per warp.
    let to = builder.structure(|to| sums.iter().for_each(|sum| sum.added().push(to)));

    sums.iter().for_each(|sum| builder.zero(sum.added()));
    builder.make_block_lists(&queries_lists, queries_kernel, [queries_params, captured]);
    builder.make_block_lists(&keys_lists, keys_kernel, [keys_params, captured]);
    let rows_grid = [batch * heads_q * steps(*seq_q, ROWS), THREADS.into()];
    builder.launch(queries_kernel, EntryPoint::BackwardPreprocess, rows_grid, [queries_params, captured]);
    let main = |blocks: i64| ([blocks, config.threads().into()], config.shared_bytes());
    let tiles = batch * heads_q * steps(*seq_q, config.own);
    builder.launch_with(queries_kernel, EntryPoint::BackwardDq, main(tiles), [queries_params, captured]);
    let kv_blocks = batch * (heads_q / group) * steps(*seq_kv, config.own) * i64::from(config.parts);
    builder.launch_with(keys_kernel, EntryPoint::BackwardDkv, main(kv_blocks), [keys_params, captured, to]);
    if backward.sink_gradient.is_some() {
        let grid = ([*heads_q, THREADS.into()], SINKS_SHARED_BYTES);
        builder.launch_with(queries_kernel, EntryPoint::SinkGradient, grid, [queries_params]);
    }
    backward.reduce_gradients(&mut builder, queries_kernel, &sums);
    backward.round_gradients(&mut builder, queries_kernel, &sums);
    builder.finish()
}
