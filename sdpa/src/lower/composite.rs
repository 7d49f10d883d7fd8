//! The composite form: the primitive ops that NVIDIA's frontend emits, in its order, which is what engines match.

use super::{Form, Forward, Operands, mask, operand, operands};
use crate::problem::Problem;
use cudnn_graph::ir::op::{Matmul, Op, ReductionMode};
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Graph, Version};

pub(super) fn forward(problem: &Problem, runtime: Version) -> Result<Forward, cudnn_graph::Error> {
    let mut g = Graph::new();
    let g = &mut g;
    // The key is declared transposed: a view of the descriptor, not an op.
    let mut key = operand("k", problem.dtype(), problem.k());
    key.dims.0.swap(2, 3);
    key.strides.0.swap(2, 3);
    let Operands { q, k, v, attn_scale, o, stats } = operands(g, problem, key);

    let scores = g.matmul(q, k);
    let scaled = g.pointwise(Mode::Mul, &[scores, attn_scale]);
    let masked = mask::apply(g, scaled, problem.region(), runtime);
    let weights = if runtime >= super::UNIFIED_SINCE { g.softmax(masked, stats) } else { softmax(g, masked, stats) };
    // The second matrix product reads the weights in the type of the operands.
    g.set_dtype(weights, problem.dtype());
    let none = (None, None, None);
    let (m_override, n_override, k_override) = none;
    g.push(Op::Matmul(Matmul { a: weights, b: v, c: o, m_override, n_override, k_override, padding: None, compute: DType::F32 }));

    Ok(Forward { graph: std::mem::take(g).verify()?, form: Form::Composite, q, k, v, attn_scale, o, stats })
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
