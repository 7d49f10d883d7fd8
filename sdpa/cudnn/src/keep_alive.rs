//! Plans outlive their last owner for as long as a device or a captured graph needs them.

use super::plan::Planned;
use crate::error::Error;
use cudnn_graph::{Buffer, Device, Plan, Submission};
use std::sync::{Arc, OnceLock};

/// The device to which work of some plans was submitted.
#[derive(Debug, Default)]
pub(super) struct Used(OnceLock<&'static Device>);

/// Plan resources that in-flight GPU work may still read.
struct KeptAlive {
    _plans: Vec<Arc<Plan>>,
    _tables: Vec<Arc<Buffer>>,
}

impl Planned {
    fn kept_alive(&self) -> Box<KeptAlive> {
        Box::new(KeptAlive { _plans: self.plans().cloned().collect(), _tables: self.tables.clone() })
    }

    /// Submits work of these plans. From then on the plans are freed only after that work; a graph that captures the work keeps them alive.
    pub(super) fn noting_use<R>(&self, submission: &Submission<'_>, submit: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
        self.used.0.get_or_init(|| submission.device());
        if submission.is_capturing() {
            submission.keep_in_graph(self.kept_alive())?;
            return submit();
        }
        let submitted = submit();
        // Mark the stream even if the submission failed: part of the work may already be queued.
        submission.mark()?;
        submitted
    }
}

impl Drop for Planned {
    fn drop(&mut self) {
        if let Some(device) = self.used.0.get() {
            device.retire(self.kept_alive());
        }
    }
}
