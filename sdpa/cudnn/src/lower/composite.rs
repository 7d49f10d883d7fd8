//! The composite form of the forward pass: the primitive ops of NVIDIA's frontend, in its order, which engines match.

use super::blocks::Blocks;
use super::dropout::Dropout;
use super::expr::{Draft, Pass};
use super::fp8::Scales;
use super::lowered::{Lowered, Supply};
use super::mask::{self, Lengths};
use super::{Form, LowerError, Operands, dtype, modify, paged, transposed};
use cudnn_graph::ir::op::{Matmul, Op, Reduction, ReductionMode, Softmax};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::ir::{Mode, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::problem::Problem;
use sdpa_core::{BlockScale, Direction, Fp8Scale, Operand, SINK, Side, StatsBase};

pub(super) fn lower(problem: &Problem, runtime: Version) -> Result<Lowered, LowerError> {
    let (mut g, mut supplies) = (Graph::new(), Vec::new());
    let to = &mut Draft { graph: &mut g, supplies: &mut supplies };
    let in_graph = super::sink_in_graph(problem, runtime);
    let operands = Operands::new(to, problem, in_graph, |key| if problem.paged().is_some() { key } else { transposed(key) });
    let Operands { q, mut k, mut v, attn_scale, o, stats, row_max, sum_exp } = operands;
    let lengths = Lengths::of(problem);
    let [mut rows, mut keys] = lengths.overrides(to, problem, runtime);
    if let Some(table) = paged::table(to, problem, keys)? {
        // Engines support pages only if the GEMMs have lengths, so pass the full extent if there are none.
        rows = rows.or_else(|| Some(paged::all(to, "seq_len_q_all", problem.batch(), problem.seq_q())));
        keys = Some(table.lengths);
        (k, v) = (paged::load(to, problem, table, k, Operand::K), paged::load(to, problem, table, v, Operand::V));
    }
    let blocks = Blocks::of(to, problem);
    let widen = |g: &mut Graph, x, which| blocks.as_ref().map_or(x, |blocks| blocks.widen(g, x, which));
    // Widen K before Q, as NVIDIA's frontend does.
    let k = widen(to.graph, k, BlockScale::K);
    let q = widen(to.graph, q, BlockScale::Q);
    let scores = product(to.graph, [q, k], scores_like(problem), [rows, keys, None], Some(0.0));
    let scaled = to.graph.pointwise(Mode::Mul, &[scores, attn_scale]);
    let scales = if blocks.is_some() { None } else { Scales::of(to, problem.dtype(), Direction::Forward) };
    let scaled = scales.as_ref().map_or(scaled, |scales| scales.multiply(to.graph, scaled, [Fp8Scale::DescaleQ, Fp8Scale::DescaleK]));
    let modified = modify(to, scaled, problem);
    let masked = mask::apply(to, modified, problem, lengths, runtime, Pass::Forward);
    let sink = in_graph.then(|| sink(to, problem));
    let dropout = Dropout::of(to, problem);
    let row = Rows { stats, max: row_max, sum_exp, sink, log2: problem.stats_base() == StatsBase::Two };
    let weights = if runtime >= super::UNIFIED_SINCE { row.softmax(&mut g, masked) } else { row.spelled(&mut g, masked) };
    let weights = dropout.map_or(weights, |dropout| {
        let left = dropout.drop(&mut g, weights);
        dropout.scale(&mut g, left)
    });
    // The second GEMM reads P in the element type of the operands.
    match scales {
        None => {
            g.set_dtype(weights, dtype(problem.dtype()));
            let v = widen(&mut g, v, BlockScale::V);
            product_into(&mut g, [weights, v], o, [rows, None, keys], None);
            if let Some(blocks) = &blocks {
                blocks.tell(&mut g, o);
            }
        }
        Some(scales) => {
            let weights = scales.weights(&mut g, weights, dtype(problem.dtype()));
            let product = product(&mut g, [weights, v], Dims::from(problem.o().dims), [rows, None, keys], None);
            scales.output(&mut g, product, o);
        }
    }

    let graph = g.verify()?;
    Ok(Lowered {
        graph,
        form: Form::Composite,
        spelling: None,
        operands: operands.list(),
        attn_scale,
        stats,
        row_max,
        sum_exp,
        row_sum: None,
        totals: Side::ALL.map(|side| problem.total(side)),
        supplies,
    })
}

/// Returns the extents of the scores.
pub(super) fn scores_like(problem: &Problem) -> Dims {
    Dims::from(problem.extents())
}

/// Emits a GEMM into a new f32 tensor. `overrides` are the valid rows, columns and inner elements per batch entry; elements past them are `padding`.
pub(super) fn product(
    g: &mut Graph,
    [a, b]: [TensorId; 2],
    dims: Dims,
    overrides: [Option<TensorId>; 3],
    padding: Option<f64>,
) -> TensorId {
    let c = g.result("matmul", DType::F32, dims);
    product_into(g, [a, b], c, overrides, padding);
    c
}

/// Emits a GEMM into an existing tensor.
pub(super) fn product_into(g: &mut Graph, [a, b]: [TensorId; 2], c: TensorId, overrides: [Option<TensorId>; 3], padding: Option<f64>) {
    let [m_override, n_override, k_override] = overrides;
    let padding = padding.filter(|_| overrides.iter().any(Option::is_some));
    g.push(Op::Matmul(Matmul { a, b, c, m_override, n_override, k_override, padding, compute: DType::F32 }));
}

/// Declares the sink tensor: one number per query head.
fn sink(to: &mut Draft<'_>, problem: &Problem) -> TensorId {
    let tensor = to.graph.tensor(Tensor::device(SINK, DType::F32, [1, problem.heads_q(), 1, 1]));
    to.supplies.push((tensor, Supply::Param(SINK.to_owned())));
    tensor
}

/// Tensors of a softmax besides the scores: requested row results, and sinks.
struct Rows {
    stats: Option<TensorId>,
    max: Option<TensorId>,
    sum_exp: Option<TensorId>,
    sink: Option<TensorId>,
    /// Stats are base-2 logarithms, which only the softmax op supports.
    log2: bool,
}

impl Rows {
    /// Emits the softmax op, for runtimes that have it.
    fn softmax(self, g: &mut Graph, x: TensorId) -> TensorId {
        let dims = g.get(x).map(|t| t.dims.clone()).unwrap_or(Dims(Vec::new()));
        let y = g.result("softmax", DType::F32, dims);
        let Rows { stats, max, sum_exp, sink, log2: stats_log2 } = self;
        g.push(Op::Softmax(Softmax { x, y, stats, max, sum_exp, sink, stats_log2 }));
        y
    }

    /// Emits the softmax as primitive ops. Engines match the logarithm of the sum even if nothing reads it. NVIDIA's frontend omits it next to the
    /// maximum or the sum, and then 9.19 supports neither sinks nor the sum alone.
    fn spelled(self, g: &mut Graph, scores: TensorId) -> TensorId {
        let Rows { stats, max, sum_exp, sink, log2: _ } = self;
        let mut row = g.get(scores).map(|t| t.dims.0.clone()).unwrap_or_default();
        if let Some(last) = row.last_mut() {
            *last = 1;
        }
        // The last op of a result writes it. With a sink, that is the op that adds the sink, not the reduction over the keys.
        let keys_alone = |result: Option<TensorId>| result.filter(|_| sink.is_none());
        let of_keys = reduce(g, ReductionMode::Max, scores, &row, keys_alone(max));
        let max = sink.map_or(of_keys, |sink| pointwise(g, Mode::Max, [of_keys, sink], max));
        let own = sink.map(|sink| {
            let shifted = g.pointwise(Mode::Sub, &[sink, max]);
            g.pointwise(Mode::Exp, &[shifted])
        });
        let shifted = g.pointwise(Mode::Sub, &[scores, max]);
        let exp = g.pointwise(Mode::Exp, &[shifted]);
        let of_keys = reduce(g, ReductionMode::Add, exp, &row, keys_alone(sum_exp));
        let sum = own.map_or(of_keys, |own| pointwise(g, Mode::Add, [of_keys, own], sum_exp));
        let log = g.pointwise(Mode::Log, &[sum]);
        pointwise(g, Mode::Add, [max, log], stats);
        g.pointwise(Mode::Div, &[exp, sum])
    }
}

/// Reduces to the extents `row`, into an existing tensor or a new one.
fn reduce(g: &mut Graph, mode: ReductionMode, x: TensorId, row: &[i64], into: Option<TensorId>) -> TensorId {
    let Some(y) = into else { return g.reduce(mode, x, row.to_vec()) };
    g.push(Op::Reduction(Reduction { mode, x, y, compute: DType::F32, deterministic: false }));
    y
}

fn pointwise(g: &mut Graph, mode: Mode, inputs: [TensorId; 2], into: Option<TensorId>) -> TensorId {
    let Some(y) = into else { return g.pointwise(mode, &inputs) };
    g.pointwise_into(mode, &inputs, y);
    y
}
