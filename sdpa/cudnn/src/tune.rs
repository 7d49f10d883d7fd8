//! Autotuning: runs every configuration that cuDNN offers for a pass on the device, and keeps the fastest.
//!
//! Some offered engines silently compute something else (H200, 9.19 and 9.27: the deterministic engine with the graph pattern of the other). The
//! first contender is the configuration that is used without timing, which the tests cover. A contender whose results on random inputs differ from it
//! is excluded.

use super::plan::{Made, PlanOptions, Planned, offered};
use crate::error::Error;
use crate::lower::Job;
use cudnn_graph::{Device, Library, Target};
use sdpa_nvidia::race::{Contender, RaceError, race};
use std::sync::Arc;

/// Why nothing was timed.
#[derive(Debug, thiserror::Error)]
pub(super) enum TuneError {
    #[error(transparent)]
    Plan(#[from] Error),
    #[error(transparent)]
    Race(#[from] RaceError),
}

/// Returns the form and the engine of a pass.
fn name(planned: &Planned) -> String {
    format!("{} {}", planned.lowered.form, planned.engine)
}

/// Returns the plans with the fastest configuration; `None` if `built` has it already.
///
/// # Errors
/// Returns a failure of the environment, typically because there is not enough memory for the operands.
pub(super) fn fastest(
    library: &'static Library,
    device: &'static Device,
    options: &PlanOptions,
    job: &Job,
    built: &Planned,
) -> Result<Option<Planned>, TuneError> {
    let stream = device.stream().map_err(Error::from)?;
    let handle = library.handle(&stream).map_err(Error::from)?;
    let target = Target::Handle(&handle);
    let around = |made| -> Result<Planned, Error> {
        let mut planned = Planned::beside(library, &target, job, made, Some(built))?;
        planned.upload_tables(&stream)?;
        Ok(planned)
    };
    let mut all = vec![around(built.made())?];
    for (lowered, plan) in offered(library, &target, &built.job, options)? {
        let contender = match around(Made::whole((lowered, Arc::new(plan)))) {
            Ok(contender) => contender,
            // A copy or merge graph that this contender needs has no plan. Other contenders may not need that graph.
            Err(Error::Unsupported(_)) => continue,
            Err(other) => return Err(other.into()),
        };
        if name(&contender) != name(&all[0]) || contender.lowered.graph != all[0].lowered.graph {
            all.push(contender);
        }
    }
    if all.len() == 1 {
        return Ok(None);
    }
    let names: Vec<String> = all.iter().map(name).collect();
    let contenders: Vec<Contender<'_>> = all.iter().zip(&names).map(|(ready, name)| Contender { name, ready }).collect();
    let times = race(&stream, job, &contenders)?;
    let fastest = times.iter().enumerate().filter_map(|(n, time)| Some((n, (*time)?))).min_by_key(|(_, time)| *time);
    Ok(fastest.filter(|(n, _)| *n > 0).map(|(n, _)| all.swap_remove(n)))
}
