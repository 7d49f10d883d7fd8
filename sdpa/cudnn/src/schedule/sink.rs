//! Steps for sinks that engines do not compute: one kernel adds sinks to the forward rows, others sum the sink's gradient from backward results.

use super::outline::{Outline, bug};
use super::{Argument, Launch, Role, SlotId, Source, Step};
use crate::error::Error;
use crate::kernels::Own;
use crate::lower::{self, Job, Lowered, Operand, Side, Statistic, Supply, Told};
use cudnn_graph::ir::TensorId;
use sdpa_core::problem::Problem;
use sdpa_core::{BackwardProblem, DType, Dropout, SINK};

pub(super) const THREADS: u32 = 256;
const WARP: i64 = 32;

/// Returns the kernels' code for an element type.
pub(super) fn number(dtype: DType) -> i64 {
    match dtype {
        // 0 stands for f32. The other types of this arm never reach the kernels that read this number.
        DType::F32 | DType::I32 | DType::I64 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
    }
}

pub(super) fn blocks(threads: i64) -> u32 {
    u32::try_from(threads.unsigned_abs().div_ceil(u64::from(THREADS))).unwrap_or(u32::MAX)
}

pub(super) fn slot_of(bound: &[(TensorId, SlotId)], tensor: TensorId) -> Result<SlotId, Error> {
    bound.iter().find(|(id, _)| *id == tensor).map(|(_, slot)| *slot).ok_or_else(|| bug(format!("{tensor} has no memory")))
}

fn sinks(made: &mut Outline<'_>, problem: &Problem) -> Result<Argument, Error> {
    let sink = made.param(SINK)?;
    made.holds(sink, 4 * problem.heads_q().unsigned_abs(), 4);
    Ok(Argument::Slot(sink))
}

/// Adds a launch that adds sinks to rows, unless the graph computes them. `dense` is the problem of the graph.
pub(super) fn add(made: &mut Outline<'_>, dense: &Job, lowered: &Lowered, bound: &[(TensorId, SlotId)]) -> Result<(), Error> {
    let Job::Forward(problem) = dense else { return Ok(()) };
    let known = lowered.supplies.iter().any(|(_, supply)| *supply == Supply::Param(SINK.to_owned()));
    if !problem.sink() || known {
        return Ok(());
    }
    let [Some(o), Some(stats)] = [lowered.operand(Operand::O), lowered.stats] else {
        return Err(bug("rows without a statistic".to_owned()));
    };
    let [o, stats] = [slot_of(bound, o)?, slot_of(bound, stats)?];
    let [batch, heads, rows, width] = problem.o().dims;
    let count = batch * heads * rows;
    let mut arguments = [count, heads, rows].map(Argument::Fixed).to_vec();
    arguments.extend([sinks(made, problem)?, Argument::Slot(stats), Argument::Fixed(problem.stats().into()), Argument::Slot(o)]);
    let [entry, head, row] = problem.o().outer();
    arguments.extend([number(problem.dtype()), width, entry, head, row].map(Argument::Fixed));
    let grid = [blocks(count * WARP), THREADS];
    made.step(Step::Launch(Launch { role: Role::Sink, kernel: Own::SinkRows, grid, arguments, spared_by: Vec::new() }));
    Ok(())
}

/// Adds launches that sum the gradient of sinks, from stats and the row sums in the workspace.
pub(super) fn differentiate(
    made: &mut Outline<'_>,
    problem: &BackwardProblem,
    lowered: &Lowered,
    bound: &[(TensorId, SlotId)],
) -> Result<(), Error> {
    let Some(dtype) = problem.sink_gradient() else { return Ok(()) };
    let forward = problem.forward();
    let [Some(stats), Some(sums)] = [lowered.stats, lowered.row_sum] else { return Err(bug("no sums of rows are left".to_owned())) };
    let graph = lowered.graph.graph();
    let alike = match (graph.get(stats), graph.get(sums)) {
        (Some(stats), Some(sums)) => stats.ragged.is_some() && sums.ragged.is_some(),
        (_, _) => false,
    };
    let told = |wanted: Told| lowered.supplies.iter().find(|(_, supply)| *supply == Supply::Documents(wanted)).map(|(id, _)| *id);
    let heads = forward.heads_q();
    let lengths = lower::lengths_within(&lowered.supplies, Side::Queries);
    let begins = told(Told::Offsets(Side::Queries, heads));
    if forward.packed().is_some() != (begins.is_some() && lengths.is_some()) {
        return Err(bug("it is not told where rows are".to_owned()));
    }
    let place = |tensor: Option<TensorId>| tensor.map_or(Ok(Argument::Fixed(0)), |tensor| slot_of(bound, tensor).map(Argument::Slot));
    let parts = made.scratch("parts of the gradient of sink".to_owned(), 4 * heads.unsigned_abs() * u64::from(THREADS));
    let [entry, head, row] = forward.stats_tensor().outer();
    let mut arguments = [forward.batch(), heads, forward.seq_q()].map(Argument::Fixed).to_vec();
    arguments.extend([place(lengths)?, place(begins)?, sinks(made, forward)?, Argument::Slot(slot_of(bound, stats)?)]);
    arguments.extend([entry, head, row].map(Argument::Fixed));
    arguments.extend([Argument::Slot(slot_of(bound, sums)?), Argument::Fixed(alike.into()), Argument::Slot(parts)]);
    let grid = [u32::try_from(heads).unwrap_or(u32::MAX), THREADS];
    made.step(Step::Launch(Launch { role: Role::SinkGradient, kernel: Own::SinkParts, grid, arguments, spared_by: Vec::new() }));

    let gradient = made.gradient(SINK);
    made.holds(gradient, u64::from(dtype.bits() / 8) * heads.unsigned_abs(), dtype.bits() / 8);
    // Row sums are not scaled for dropout; this factor scales them.
    let factor = forward.dropout().map_or(1.0, Dropout::scale).to_bits();
    let arguments = vec![
        Argument::Fixed(heads),
        Argument::Slot(parts),
        Argument::Fixed(THREADS.into()),
        Argument::Slot(gradient),
        Argument::Fixed(number(dtype)),
        Argument::Fixed(factor.into()),
    ];
    made.step(Step::Launch(Launch {
        role: Role::SinkGradient,
        kernel: Own::SinkGradient,
        grid: [blocks(heads), THREADS],
        arguments,
        spared_by: Vec::new(),
    }));
    Ok(())
}

/// Returns the slot of a row statistic: the caller's, or workspace if the caller did not ask for it.
pub(super) fn statistic(made: &mut Outline<'_>, job: &Job, lowered: &Lowered, (statistic, tensor): (Statistic, TensorId)) -> SlotId {
    match job {
        Job::Forward(problem) if !problem.computes(statistic) => made.scratch(statistic.name().to_owned(), lowered.bytes(tensor)),
        Job::Forward(_) | Job::Backward(_) => made.slot(statistic.name().to_owned(), Source::Statistic(statistic)),
    }
}
