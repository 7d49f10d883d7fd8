//! Plans from bytes and texts, which contain machine code. Tests make the bytes themselves, and nothing that is damaged is ever executed.
#![allow(unsafe_code)]

use cudnn_graph::{Library, Plan, Target, Verified};
use sdpa::cudnn::Planned;
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::portable::PayloadError;

/// [`Planned::from_bytes`] of bytes that a test made.
///
/// # Errors
/// As there.
pub fn planned(library: &'static Library, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
    // SAFETY: nothing that a test loads is executed unless it is as it was written.
    unsafe { Planned::from_bytes(library, target, job, bytes) }
}

/// [`Plan::from_json`] of a text that a test made.
///
/// # Errors
/// As there.
pub fn plan(library: &'static Library, json: &str, graph: &Verified, target: &Target<'_>) -> Result<Plan, cudnn_graph::Error> {
    // SAFETY: as above.
    unsafe { Plan::from_json(library, json, graph, target) }
}
