//! Timing: every configuration that cuDNN offers for a pass runs on the device, and the fastest is kept.
//!
//! Among the offers are engines that compute something else without a word (seen on an H200, 9.19 and 9.27: the engine for equal bits
//! given the spelling of the other). The first contender is the configuration that is used without timing, which the tests know; one
//! whose results on random numbers are not close to its results is out.
#![allow(unsafe_code)]

mod memory;
mod results;

use super::plan::{Attention, PlanOptions, Planned, offered};
use crate::error::Error;
use crate::lower::Lowered;
use cudnn_graph::{Buffer, Device, Library, Plan, Target, launch_addressed};
use memory::Memory;
use std::sync::Arc;

/// Rounds in which every contender runs once; the first of all is not counted.
const ROUNDS: usize = 7;
/// Who takes this many times as long as the fastest in a round is out of the next.
const HOPELESS: f32 = 1.5;

/// A configuration that was compiled and timed.
#[derive(Debug)]
pub(super) struct Contender {
    pub(super) lowered: Arc<Lowered>,
    pub(super) plan: Arc<Plan>,
    ms: Vec<f32>,
}

impl Contender {
    /// The form and the engine.
    fn name(&self) -> String {
        format!("{} {}", self.lowered.form, self.plan.engine().map(|c| c.tag()).unwrap_or_default())
    }

    fn least(&self) -> f32 {
        self.ms.iter().copied().fold(f32::INFINITY, f32::min)
    }
}

/// The fastest configuration of a pass whose operands are all used in place; `None` where that is the one that is there already.
///
/// # Errors
/// The environment's: out of memory for the operands above all.
pub(super) fn fastest(
    library: &'static Library,
    device: &'static Device,
    options: &PlanOptions,
    built: &Planned,
) -> Result<Option<Attention>, Error> {
    let job = &built.job;
    let stream = Arc::new(device.stream()?);
    let target = Target::Handle(&library.handle(&stream)?);
    let mut all = vec![Contender { lowered: built.lowered.clone(), plan: built.plan.clone(), ms: Vec::new() }];
    for (lowered, plan) in offered(library, &target, job, options)? {
        let contender = Contender { lowered, plan: Arc::new(plan), ms: Vec::new() };
        if contender.name() != all[0].name() || contender.lowered.graph != all[0].lowered.graph {
            all.push(contender);
        }
    }
    if all.len() == 1 {
        return Ok(None);
    }
    let workspace = all.iter().map(|c| c.plan.workspace_bytes()).max().unwrap_or(0);
    let mut workspace = Buffer::new(device, usize::try_from(workspace).unwrap_or(usize::MAX))?;
    let mut memory = Memory::new(&stream, job);
    let mut want = None;
    let mut right = Vec::new();
    for contender in all {
        memory.poison()?;
        let bindings = memory.bind(&contender.lowered, &contender.plan)?;
        // SAFETY: the memory's lengths lie within the extents.
        workspace = unsafe { launch_addressed(&contender.plan, &stream, bindings, workspace) }?.wait()?;
        let results = memory.results()?;
        let close = want.as_ref().is_none_or(|want| results::close(want, &results));
        want.get_or_insert(results);
        if close {
            right.push(contender);
        } else {
            tracing::warn!(configuration = contender.name(), "computes something else than the configuration that is used without timing");
        }
    }
    let mut all = right;
    for round in 0..=ROUNDS {
        let best = all.iter().map(Contender::least).fold(f32::INFINITY, f32::min);
        for contender in &mut all {
            if round > 1 && contender.least() > best * HOPELESS {
                continue;
            }
            let bindings = memory.bind(&contender.lowered, &contender.plan)?;
            let start = stream.record(true)?;
            // SAFETY: as above.
            let running = unsafe { launch_addressed(&contender.plan, &stream, bindings, workspace) }?;
            let end = stream.record(true)?;
            end.synchronize()?;
            workspace = running.wait()?;
            if round > 0 {
                contender.ms.push(end.since(&start)?);
            }
        }
    }
    for contender in &all {
        tracing::debug!(configuration = contender.name(), ms = contender.least(), "timed");
    }
    let best = (0..all.len()).min_by(|&a, &b| all[a].least().total_cmp(&all[b].least()));
    let others = best.filter(|&best| best > 0).map(|best| all.swap_remove(best));
    Ok(others.map(|c| (c.lowered, c.plan)))
}
