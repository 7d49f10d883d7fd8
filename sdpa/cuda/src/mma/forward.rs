//! The schedule of a forward pass with `mma.sync`: the kernel, and before it the launch that makes block lists.

use super::params::{Gradients, MmaParams, Strided};
use super::source;
use super::tile_config::TileConfig;
use crate::attention_params::Tiling;
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::params::FAR;
use crate::problem::Forward;
use crate::schedule::arguments::Member;
use crate::schedule::{Address, Argument, BlockLists, Blocking, Builder, Gpu, Schedule};
use crate::work::{heads_in_cache, steps};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, Problem, Statistic};
use sdpa_nvidia::JobQuery;

/// Returns the parameters of a kernel of either pass.
pub(super) fn params(builder: &mut Builder<'_>, blocking: Blocking, lists: &BlockLists, gradients: &Gradients) -> Argument {
    let forward = builder.attention;
    let Forward { tensors: [q, k, v, o], extents: [batch, heads_q, _, seq_kv], group, paged, .. } = forward;
    let bytes = i64::from(forward.dtype.bits() / 8);
    // Count whole GQA groups, because the heads of a group share K and V.
    let heads_in_l2 = (heads_in_cache(bytes * seq_kv * (k.dims[3] + v.dims[3])) * group).min(batch * heads_q);
    let strided = |operand: Operand, tensor: &TensorSpec| Strided::of(operand, tensor, forward.packs(operand.side()));
    let Gradients { d_o, dq, dk, dv, lse, exact, delta, sink_gradient } = *gradients;
    let params = MmaParams {
        attention: builder.attention_params(Tiling { queries: blocking.queries, heads_in_l2 }, lists),
        q: strided(Operand::Q, q),
        k: strided(Operand::K, k),
        v: strided(Operand::V, v),
        o: strided(Operand::O, o),
        d_o,
        dq,
        dk,
        dv,
        stats: Address::Statistic(Statistic::Stats),
        row_max: Address::Statistic(Statistic::RowMax),
        sum_exp: Address::Statistic(Statistic::SumExp),
        lse,
        exact_lse: exact,
        delta,
        sink_gradient,
        page_table: builder.param(PAGE_TABLE),
        dim_qk: q.dims[3] as i32,
        blocks: steps(*seq_kv, blocking.keys) as i32,
        page_size: paged.map_or(1, |paged| paged.page_size.min(FAR.into())) as i32,
        pages: paged.map_or(1, |paged| paged.pages) as i32,
        table_row: paged.map_or(0, |paged| paged.pages_of(*seq_kv)) as i32,
    };
    builder.structure(|to| params.push(to))
}

/// Returns the schedule (memory and launches) of a forward pass with this tile configuration.
pub(crate) fn schedule(problem: &Problem, forward: &Forward, config: &TileConfig, gpu: Gpu) -> Schedule {
    let label = format!("forward mma.sync {} x {} of {}, {}", config.own, config.step, config.dim_qk, config.dim_v);
    let mut builder = Builder::new(JobQuery::Forward(problem), forward, (Family::Mma, gpu), label);
    let kernel = builder.kernel(source::forward_text(forward, config), vec![(EntryPoint::Forward, config.shared_bytes())]);
    builder.tokens_of([Operand::Q, Operand::K, Operand::V, Operand::O].into_iter().zip(forward.tensors));
    let blocking = Blocking { queries: config.own, keys: config.step, by_keys: false };
    let lists = builder.block_lists("block lists", blocking);
    let params = params(&mut builder, blocking, &lists, &Gradients::NONE);
    let captured = builder.captured();
    let [batch, heads_q, seq_q, _] = forward.extents;
    builder.make_block_lists(&lists, kernel, [params, captured]);
    let main = ([batch * heads_q * steps(seq_q, config.own), config.threads().into()], config.shared_bytes());
    builder.launch_with(kernel, EntryPoint::Forward, main, [params, captured]);
    builder.finish()
}
