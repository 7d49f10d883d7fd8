//! The composite form of the forward pass: the primitive ops that NVIDIA's frontend emits, in its order, which is what engines
//! match.

use super::expr::{Draft, Pass};
use super::lowered::Lowered;
use super::mask::{self, Lengths};
use super::{Form, LowerError, Operands, dtype, modify, transposed};
use cudnn_graph::ir::op::{Matmul, Op, ReductionMode};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::Side;
use sdpa_core::problem::Problem;

pub(super) fn lower(problem: &Problem, runtime: Version) -> Result<Lowered, LowerError> {
    let (mut g, mut supplies) = (Graph::new(), Vec::new());
    let to = &mut Draft { graph: &mut g, supplies: &mut supplies };
    let operands = Operands::new(to, problem, transposed);
    let Operands { q, k, v, attn_scale, o, stats } = operands;
    let lengths = Lengths::of(to, problem);
    let [rows, keys] = lengths.overrides(to, problem, runtime)?;
    let scores = product(to.graph, [q, k], scores_like(problem), [rows, keys, None], Some(0.0));
    let scaled = to.graph.pointwise(Mode::Mul, &[scores, attn_scale]);
    let modified = modify(to, scaled, problem);
    let masked = mask::apply(to, modified, problem, lengths, runtime, Pass::Forward);
    let weights = if runtime >= super::UNIFIED_SINCE { g.softmax(masked, stats) } else { softmax(&mut g, masked, stats) };
    // The second matrix product reads the weights in the type of the operands.
    g.set_dtype(weights, dtype(problem.dtype()));
    product_into(&mut g, [weights, v], o, [rows, None, keys], None);

    let graph = g.verify()?;
    Ok(Lowered {
        graph,
        form: Form::Composite,
        spelling: None,
        operands: operands.list(),
        attn_scale,
        stats,
        totals: Side::ALL.map(|side| problem.total(side)),
        supplies,
    })
}

/// Extents of the scores.
pub(super) fn scores_like(problem: &Problem) -> Dims {
    Dims::from(problem.extents())
}

/// A matrix product into a new f32 tensor. `overrides` are the rows, columns and inner elements that count, per batch entry;
/// `padding` stands where they do not.
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

/// The same into a tensor that is there already.
pub(super) fn product_into(g: &mut Graph, [a, b]: [TensorId; 2], c: TensorId, overrides: [Option<TensorId>; 3], padding: Option<f64>) {
    let [m_override, n_override, k_override] = overrides;
    let padding = padding.filter(|_| overrides.iter().any(Option::is_some));
    g.push(Op::Matmul(Matmul { a, b, c, m_override, n_override, k_override, padding, compute: DType::F32 }));
}

/// The softmax of runtimes that have no op for it. Engines match the logarithm of the sum even where nobody reads it.
fn softmax(g: &mut Graph, scores: TensorId, stats: Option<TensorId>) -> TensorId {
    let mut row = g.get(scores).map(|t| t.dims.0.clone()).unwrap_or_default();
    if let Some(last) = row.last_mut() {
        *last = 1;
    }
    let max = g.reduce(ReductionMode::Max, scores, row.clone());
    let shifted = g.pointwise(Mode::Sub, &[scores, max]);
    let exp = g.pointwise(Mode::Exp, &[shifted]);
    let sum = g.reduce(ReductionMode::Add, exp, row);
    let log = g.pointwise(Mode::Log, &[sum]);
    match stats {
        Some(stats) => g.pointwise_into(Mode::Add, &[max, log], stats),
        None => {
            g.pointwise(Mode::Add, &[max, log]);
        }
    }
    g.pointwise(Mode::Div, &[exp, sum])
}
