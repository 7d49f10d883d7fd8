//! One launch before the attention that clamps per-sequence lengths to the extents and page-table entries to existing pages.

use super::outline::Outline;
use super::{Argument, Launch, Role, SlotId, Source, Step};
use crate::error::Error;
use crate::kernels::Own;
use crate::lower::{Guarded, Pages, Side};
use sdpa_core::paged::PAGE_TABLE;
use sdpa_core::problem::Problem;

const THREADS: u32 = 128;

/// Unchecked lengths and page table of the caller, with the slots for the clamped copies.
#[derive(Default)]
pub(super) struct Told {
    /// The lengths of queries and of keys, each with the slot for the clamped copy.
    pub(super) lengths: [Option<(Guarded, SlotId)>; 2],
    pub(super) pages: Option<(Pages, SlotId)>,
}

/// Adds the launch that clamps the lengths and the page table.
pub(super) fn check(made: &mut Outline<'_>, problem: &Problem, told: &Told) -> Result<(), Error> {
    let Told { lengths, pages } = told;
    if lengths.iter().all(Option::is_none) && pages.is_none() {
        return Ok(());
    }
    let (batch, none) = (problem.batch(), Argument::Fixed(0));
    let (mut arguments, mut spared_by, mut names) = (vec![Argument::Fixed(batch)], Vec::new(), Vec::new());
    for side in Side::ALL {
        let Some((which, to)) = lengths[side as usize] else {
            // Without lengths of this side, every batch entry has the full extent.
            arguments.extend([none, Argument::Fixed(problem.seq(side)), none]);
            continue;
        };
        let name = which.param();
        let from = made.param(name)?;
        for slot in [from, to] {
            made.holds(slot, 4 * batch.unsigned_abs(), 4);
        }
        if let Source::Lengths { offset: _, param: Some(at) } = made.source(to) {
            spared_by.push(at);
        }
        names.push(name);
        arguments.extend([Argument::Slot(from), Argument::Fixed(which.most), Argument::Slot(to)]);
    }
    let keyless = lengths.iter().flatten().any(|(which, _)| which.keyless);
    arguments.push(Argument::Fixed(keyless.into()));
    let mut threads = batch;
    match (pages, problem.paged()) {
        (Some((pages, to)), Some(paged)) => {
            let (table, given, each) = (made.param(PAGE_TABLE)?, paged.pages_of(problem.seq_kv()), pages.per_entry(problem.seq_kv()));
            made.holds(table, 4 * (batch * given).unsigned_abs(), 4);
            arguments.extend([each, pages.parts, pages.tokens, paged.pages].map(Argument::Fixed));
            arguments.extend([Argument::Slot(table), Argument::Fixed(given), Argument::Slot(*to)]);
            threads = batch * each;
            names.push(PAGE_TABLE);
        }
        (_, _) => arguments.extend([none; 7]),
    }
    // A page table is always checked, so a promise of valid lengths does not skip this launch.
    if pages.is_some() {
        spared_by.clear();
    }
    let blocks = threads.unsigned_abs().div_ceil(THREADS.into());
    let grid = [u32::try_from(blocks).unwrap_or(u32::MAX), THREADS];
    let role = Role::Entries(names.into_iter().map(str::to_owned).collect());
    made.step(Step::Launch(Launch { role, kernel: Own::Entries, grid, arguments, spared_by }));
    Ok(())
}
