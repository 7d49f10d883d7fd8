//! A step after the attention for `sum_exp` of rows without keys.

use super::outline::Outline;
use super::sink::{THREADS, blocks, slot_of};
use super::{Argument, Launch, Role, Step};
use crate::error::Error;
use crate::kernels::Own;
use crate::lower::{Job, Lowered, Statistic};
use crate::schedule::SlotId;
use cudnn_graph::ir::TensorId;
use sdpa_core::Side;

/// Adds a launch that sets `sum_exp` to 0 in rows past the sequence lengths ([`Quirk::SumsOfNoKeys`](crate::Quirk::SumsOfNoKeys)).
pub(super) fn mend(made: &mut Outline<'_>, job: &Job, lowered: &Lowered, bound: &[(TensorId, SlotId)]) -> Result<(), Error> {
    let Job::Forward(problem) = job else { return Ok(()) };
    let Some(sums) = lowered.statistic(Statistic::SumExp) else { return Ok(()) };
    // Packed sequences have no rows past their lengths, so there is nothing to correct.
    if problem.packed().is_some() || !Side::ALL.into_iter().any(|side| problem.has_lengths(side)) {
        return Ok(());
    }
    let count = problem.stats_elements();
    let arguments = vec![Argument::Fixed(count), Argument::Slot(slot_of(bound, sums)?)];
    made.step(Step::Launch(Launch {
        role: Role::RowSums,
        kernel: Own::RowSums,
        grid: [blocks(count), THREADS],
        arguments,
        spared_by: Vec::new(),
    }));
    Ok(())
}
