//! The unified form of the forward pass: one op, with score_mods and masks in an inner graph on the scaled score.

use super::expr::{Draft, Pass};
use super::lowered::Lowered;
use super::mask::{self, Lengths};
use super::{Form, LowerError, Operands, modify, paged};
use crate::quirks::Quirk;
use cudnn_graph::ir::op::{Op, ScoreGraph, SdpaForward};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::problem::Problem;
use sdpa_core::{Side, StatsBase};

/// Why dropout is refused.
pub(super) const DROPS_NOTHING: &str = "the unified form has no dropout: its op supports dropout only without stats";

pub(super) fn lower(problem: &Problem, runtime: Version) -> Result<Lowered, LowerError> {
    let (mut g, mut supplies) = (Graph::new(), Vec::new());
    let to = &mut Draft { graph: &mut g, supplies: &mut supplies };
    let operands = Operands::new(to, problem, false, |key| key);
    let Operands { q, k, v, attn_scale, o, stats, row_max, sum_exp } = operands;
    if problem.dropout().is_some() {
        return Err(LowerError::Unsupported(DROPS_NOTHING.to_owned()));
    }
    if problem.stats_base() == StatsBase::Two {
        return Err(LowerError::Unsupported("stats in base two are not supported; use the composite form".to_owned()));
    }
    let padded = problem.kept().seq_len_kv && problem.has_lengths(Side::Queries);
    if padded && (problem.score_mod().is_some() || mask::has_rules(problem)) {
        let rule = "lengths with a score_mod or a traced mask are not supported: engines of the unified form return wrong \
                    results for some of them";
        return Err(LowerError::Unsupported(rule.to_owned()));
    }
    if problem.seq_q() == 1 && Quirk::HeadsOfOneQuery.holds(runtime) && (problem.score_mod().is_some() || mask::has_rules(problem)) {
        let rule = "a score_mod or a traced mask with one query is not supported before cuDNN 9.25.1: the engine reads the per-head \
             values of another head"
            .to_owned();
        return Err(LowerError::Unsupported(rule));
    }
    if padded && Quirk::EntriesWithoutKeys.holds(runtime) {
        let rule = "lengths are not supported before cuDNN 9.26.0: batch entries without keys get NaN".to_owned();
        return Err(LowerError::Unsupported(rule));
    }
    // The op masks out padding only if it receives the lengths of both sides.
    let [mut seq_len_q, mut seq_len_kv] = if padded { mask::guarded(to, problem, runtime) } else { [None, None] };
    let table = paged::table(to, problem, seq_len_kv)?;
    if let Some(table) = table {
        seq_len_kv = Some(table.lengths);
        seq_len_q = seq_len_q.or_else(|| Some(paged::all(to, "seq_len_q_all", problem.batch(), problem.seq_q())));
    }
    let entries = table.map(|table| table.entries);
    let inner = if padded { Lengths::default() } else { Lengths::of(problem) };
    let score = if !mask::drops(problem, inner) && problem.score_mod().is_none() {
        None
    } else {
        let input = to.graph.result("score", DType::F32, Dims::from(problem.extents()));
        let before = to.graph.ops().len();
        let modified = modify(to, input, problem);
        let output = mask::apply(to, modified, problem, inner, runtime, Pass::Forward);
        let ops = to.graph.take_ops(before);
        let ops = read_first(to.graph, input, ops);
        (output != input).then_some(ScoreGraph { input, output, ops })
    };
    let plain = SdpaForward::plain(q, k, v, o);
    g.push(Op::SdpaForward(Box::new(SdpaForward {
        attn_scale: Some(attn_scale),
        score,
        stats,
        max: row_max,
        sum_exp,
        seq_len_q,
        seq_len_kv,
        page_table_k: entries,
        page_table_v: entries,
        ..plain
    })));
    Ok(Lowered {
        graph: g.verify()?,
        form: Form::Unified,
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

/// Adds a copy of the score for each op that reads it as another operand than the first. For such ops the engine of 9.27 reads memory outside the
/// kernel's (`score + score * score` on an H200, under memcheck).
fn read_first(g: &mut Graph, input: TensorId, mut ops: Vec<Op>) -> Vec<Op> {
    let later = |op: &Op| matches!(op, Op::Pointwise(p) if p.b == Some(input) || p.t == Some(input));
    if !ops.iter().any(later) {
        return ops;
    }
    let before = g.ops().len();
    let copy = g.pointwise(Mode::Identity, &[input]);
    for op in &mut ops {
        let Op::Pointwise(pointwise) = op else { continue };
        for operand in [&mut pointwise.b, &mut pointwise.t] {
            *operand = operand.map(|id| if id == input { copy } else { id });
        }
    }
    let mut all = g.take_ops(before);
    all.append(&mut ops);
    all
}
