//! The unified form: one op, the masks in an inner graph on the scaled score.

use super::{Form, Forward, Operands, mask, operand, operands};
use crate::problem::Problem;
use cudnn_graph::ir::op::{Op, ScoreGraph, SdpaForward};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::{DType, Graph, Version};

pub(super) fn forward(problem: &Problem, runtime: Version) -> Result<Forward, cudnn_graph::Error> {
    let mut g = Graph::new();
    let key = operand("k", problem.dtype(), problem.k());
    let Operands { q, k, v, attn_scale, o, stats } = operands(&mut g, problem, key);
    let score = if problem.region().is_full() {
        None
    } else {
        let dims = [problem.batch(), problem.heads_q(), problem.seq_q(), problem.seq_kv()];
        let input = g.result("score", DType::F32, Dims::from(dims));
        let before = g.ops().len();
        let output = mask::apply(&mut g, input, problem.region(), runtime);
        Some(ScoreGraph { input, output, ops: g.take_ops(before) })
    };
    g.push(Op::SdpaForward(Box::new(SdpaForward { attn_scale: Some(attn_scale), score, stats, ..SdpaForward::plain(q, k, v, o) })));
    Ok(Forward { graph: g.verify()?, form: Form::Unified, q, k, v, attn_scale, o, stats })
}
