//! Selects the executor of a run: one for all of its passes.

use super::lines;
use crate::exit::{Failure, Line};
use crate::request::Request;
use sdpa::cudnn::unsupported;
use sdpa::{Dispatcher, Preference, Timed};
use sdpa::{Error, ExecutorName, Prepared, PreparedBackward, Reason, Unproven, Unsupported};
use std::sync::Arc;

/// The selected executor with its prepared passes, and the reasons why others were not selected.
pub(super) struct Chosen {
    pub(super) executor: ExecutorName,
    pub(super) forward: Option<Arc<dyn Prepared>>,
    pub(super) backward: Option<Arc<dyn PreparedBackward>>,
    pub(super) unsupported: Vec<Unsupported>,
    /// Features of each pass that the ledger of the executor does not cover.
    pub(super) unproven: Vec<Arc<Unproven>>,
    /// Times of the executors on the GPU, if they were requested.
    pub(super) timed: Option<Arc<Timed>>,
}

/// Returns the reasons against the attention scale, which is not part of a problem.
fn against_scale(request: &Request) -> Vec<Reason> {
    let limit = |e: sdpa::SpecError| Reason::Limit { field: e.field, value: e.value, limit: e.rule };
    unsupported::check_scale(request.attn_scale()).err().map_or_else(Vec::new, |errors| errors.0.into_iter().map(limit).collect())
}

/// Prepares every pass on one executor.
fn ready(dispatcher: &Dispatcher, request: &Request, executor: ExecutorName) -> Result<Chosen, Error> {
    let preference = Preference::Named(executor);
    let forward = match &request.backward {
        Some(backward) if backward.given => None,
        Some(_) | None => Some(dispatcher.prepare(&request.problem, preference)?),
    };
    let backward = match &request.backward {
        Some(backward) => Some(dispatcher.prepare_backward(&backward.problem, preference)?),
        None => None,
    };
    let mut unproven: Vec<Arc<Unproven>> = Vec::new();
    unproven.extend(forward.as_ref().and_then(|choice| choice.unproven.clone()));
    unproven.extend(backward.as_ref().and_then(|choice| choice.unproven.clone()).filter(|pass| !unproven.contains(pass)));
    let (forward, backward) = (forward.map(|choice| choice.prepared), backward.map(|choice| choice.prepared));
    Ok(Chosen { executor, forward, backward, unsupported: Vec::new(), unproven, timed: None })
}

/// Returns true if the executor's library or device is not available.
fn is_absent(dispatcher: &Dispatcher, executor: ExecutorName) -> bool {
    (executor == ExecutorName::CUDNN && dispatcher.cudnn().is_err_and(|e| e.is_absence()))
        || (executor == ExecutorName::CUDA && dispatcher.cuda().is_err_and(|e| e.is_absence()))
}

/// Selects an executor for a request.
pub(super) fn choose(dispatcher: &Dispatcher, request: &Request, preference: Preference) -> Result<Chosen, Failure> {
    let bad_scale = |name| if name == ExecutorName::CUDNN { against_scale(request) } else { Vec::new() };
    if let Preference::Named(name) = preference {
        let mut against: Vec<Line> = bad_scale(name).iter().map(|reason| Line::new(name, reason)).collect();
        match ready(dispatcher, request, name) {
            Ok(chosen) if against.is_empty() => return Ok(chosen),
            Ok(_) => {}
            Err(e) => {
                against.extend(lines(name, &e));
                let absent = (name == ExecutorName::CUDNN && dispatcher.cudnn().is_err())
                    || (name == ExecutorName::CUDA && dispatcher.cuda().is_err())
                    || (name == ExecutorName::METAL && dispatcher.metal().facts().is_err());
                if let Some(last) = against.last_mut().filter(|_| absent) {
                    last.message.push_str("; `cargo sdpa doctor` says what to do about it");
                }
            }
        }
        return Err(Failure::Executor(against));
    }
    let mut unsupported = Vec::new();
    // One executor runs all passes, so the order of the longer pass, backward, decides.
    let (order, timed) = match &request.backward {
        // With an empty extent, all results are constants in host memory, so no executor is faster than the CPU.
        Some(_) | None if request.problem.is_empty() => (vec![ExecutorName::CPU], None),
        Some(backward) => (dispatcher.executors_for_backward(&backward.problem), dispatcher.timed_backward(&backward.problem)),
        None => (dispatcher.executors_for(&request.problem), dispatcher.timed(&request.problem)),
    };
    for executor in order {
        let mut reasons = bad_scale(executor);
        if reasons.is_empty() {
            match ready(dispatcher, request, executor) {
                Ok(chosen) => return Ok(Chosen { unsupported, timed, ..chosen }),
                Err(Error::Unsupported(unsupported)) => reasons = unsupported.reasons,
                Err(absent) if is_absent(dispatcher, executor) => reasons.push(Reason::Absent(absent.to_string())),
                Err(e) => return Err(Failure::Environment(lines(executor, &e))),
            }
        }
        unsupported.push(Unsupported::new(executor, reasons));
    }
    Err(Failure::Executor(unsupported.into_iter().flat_map(|d| lines(d.executor, &Error::Unsupported(d))).collect()))
}
