//! The step of a paged cache: the page table is checked on the device before engines read keys by it.

use super::outline::Outline;
use super::sink::slot_of;
use super::{Argument, Launch, Role, SlotId, Step};
use crate::error::Error;
use crate::kernels::Own;
use crate::lower::{self, Lowered, Pages, Side};
use cudnn_graph::ir::TensorId;
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::problem::Problem;

const THREADS: u32 = 128;

/// Checks the table of a call into a slot that engines read.
pub(super) fn check(
    made: &mut Outline<'_>,
    problem: &Problem,
    lowered: &Lowered,
    (pages, to): (Pages, SlotId),
    bound: &[(TensorId, SlotId)],
) -> Result<(), Error> {
    let Some(paged) = problem.paged() else { return Ok(()) };
    let lengths = lower::guarded_lengths(&lowered.supplies, Side::Keys);
    let lengths = lengths.map_or(Ok(Argument::Fixed(0)), |id| slot_of(bound, id).map(Argument::Slot))?;
    let (table, given, each) = (made.param(PAGE_TABLE)?, paged.pages_of(problem.seq_kv()), pages.per_entry(problem.seq_kv()));
    made.holds(table, 4 * (problem.batch() * given).unsigned_abs(), 4);
    let mut arguments = [problem.batch(), each, pages.parts, pages.tokens, paged.pages, problem.seq_kv()].map(Argument::Fixed).to_vec();
    arguments.extend([lengths, Argument::Slot(table), Argument::Fixed(given), Argument::Slot(to)]);
    let blocks = (problem.batch() * each).unsigned_abs().div_ceil(THREADS.into());
    let grid = [u32::try_from(blocks).unwrap_or(u32::MAX), THREADS];
    made.step(Step::Launch(Launch { role: Role::Pages, kernel: Own::Pages, grid, arguments }));
    Ok(())
}
