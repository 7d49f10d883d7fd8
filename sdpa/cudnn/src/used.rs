//! Plans outlive their last owner for as long as a device or a captured graph needs them.

use super::plan::Planned;
use crate::error::Error;
use cudnn_graph::{Buffer, Device, Plan, Submission};
use std::sync::{Arc, OnceLock};

/// The device that was given work of some plans.
#[derive(Debug, Default)]
pub(super) struct Used(OnceLock<&'static Device>);

/// What a device may still read of plans.
struct KeptAlive {
    _plans: Vec<Arc<Plan>>,
    _tables: Vec<Arc<Buffer>>,
}

impl Planned {
    fn kept_alive(&self) -> Box<KeptAlive> {
        Box::new(KeptAlive { _plans: self.plans().cloned().collect(), _tables: self.tables.clone() })
    }

    /// Submits work of these plans: from here on they are dropped behind it. A graph that it is captured into keeps them.
    pub(super) fn noting_use<R>(&self, submission: &Submission<'_>, submit: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
        self.used.0.get_or_init(|| submission.device());
        if submission.is_capturing() {
            submission.keep_in_graph(self.kept_alive())?;
            return submit();
        }
        let submitted = submit();
        // Also where a part of it was refused.
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
