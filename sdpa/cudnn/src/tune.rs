//! Timing: every configuration that cuDNN offers for a pass runs on the device, and the fastest is kept.
//!
//! Among the offers are engines that compute something else without a word (seen on an H200, 9.19 and 9.27: the engine for equal bits
//! given the spelling of the other). The first contender is the configuration that is used without timing, which the tests know; one
//! whose results on random numbers are not close to its results is out.
#![allow(unsafe_code)]

mod memory;
mod results;

use super::plan::{Made, PlanOptions, Planned, offered};
use crate::error::Error;
use crate::lower::Job;
use cudnn_graph::{Device, Library, Stream, Target};
use memory::Memory;
use std::sync::Arc;

/// Rounds in which every contender runs once; the first of all is not counted.
const ROUNDS: usize = 7;
/// Who takes this many times as long as the fastest in a round is out of the next.
const HOPELESS: f32 = 1.5;

/// A pass around a configuration that was compiled and timed.
struct Contender {
    planned: Planned,
    ms: Vec<f32>,
}

impl Contender {
    /// The form and the engine.
    fn name(&self) -> String {
        format!("{} {}", self.planned.lowered.form, self.planned.engine)
    }

    fn least(&self) -> f32 {
        self.ms.iter().copied().fold(f32::INFINITY, f32::min)
    }

    /// Runs the whole pass once; the time that it took, in milliseconds.
    fn run(&self, library: &'static Library, stream: &Stream, memory: &Memory<'_>) -> Result<f32, Error> {
        let handle = library.handle(stream)?;
        let start = stream.record(true)?;
        // SAFETY: the memory is this device's, as large as it says, outlives the wait below, and nobody else has it.
        let submitted = memory.call(|call| unsafe { self.planned.submit(&handle, call) });
        let end = stream.record(true)?;
        end.synchronize()?;
        submitted?;
        Ok(end.since(&start)?)
    }
}

/// The pass around the fastest configuration; `None` where that is the one that is there already.
///
/// # Errors
/// The environment's: out of memory for the operands above all.
pub(super) fn fastest(
    library: &'static Library,
    device: &'static Device,
    options: &PlanOptions,
    job: &Job,
    built: &Planned,
) -> Result<Option<Planned>, Error> {
    let stream = device.stream()?;
    let target = Target::Handle(&library.handle(&stream)?);
    let around = |made| -> Result<Contender, Error> {
        let mut planned = Planned::beside(library, &target, job, made, Some(built))?;
        planned.upload_tables(&stream)?;
        Ok(Contender { planned, ms: Vec::new() })
    };
    let mut all = vec![around(built.made())?];
    for (lowered, plan) in offered(library, &target, &built.job, options)? {
        let contender = match around(Made::whole((lowered, Arc::new(plan)))) {
            Ok(contender) => contender,
            // What this one needs around it is not to be had; the others may do without.
            Err(Error::Unsupported(_)) => continue,
            Err(other) => return Err(other),
        };
        if contender.name() != all[0].name() || contender.planned.lowered.graph != all[0].planned.lowered.graph {
            all.push(contender);
        }
    }
    if all.len() == 1 {
        return Ok(None);
    }
    let workspace = all.iter().map(|c| c.planned.workspace_bytes()).max().unwrap_or(0);
    let mut memory = Memory::new(&stream, job, workspace)?;
    let mut want = None;
    let mut right = Vec::new();
    for contender in all {
        memory.poison()?;
        contender.run(library, &stream, &memory)?;
        let results = memory.read()?;
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
            let ms = contender.run(library, &stream, &memory)?;
            if round > 0 {
                contender.ms.push(ms);
            }
        }
    }
    for contender in &all {
        tracing::debug!(configuration = contender.name(), ms = contender.least(), "timed");
    }
    let best = (0..all.len()).min_by(|&a, &b| all[a].least().total_cmp(&all[b].least()));
    Ok(best.filter(|&best| best > 0).map(|best| all.swap_remove(best).planned))
}
