//! Options of plans: form, engines, pieces.

use crate::lower::{Form, Job};
use crate::pieces::{self, Part};
use cudnn_graph::Policy;
use serde::{Deserialize, Serialize};

/// Options of attention plans: the form of their graphs, the rules for accepting engines, and the decomposition of masks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The only form of graphs to try, composite or unified. With `None`, the better form is tried first, and then the other.
    pub form: Option<Form>,
    /// The rules for accepting the engines that cuDNN offers.
    pub policy: Policy,
    /// When to compute a pass band by band, if its mask is a union of bands.
    pub pieces: Pieces,
}

impl PlanOptions {
    /// Sets the only form of graphs to try, composite or unified; `None` tries both.
    #[must_use]
    pub fn with_form(mut self, form: impl Into<Option<Form>>) -> Self {
        self.form = form.into();
        self
    }

    /// Sets the rules for accepting the engines that cuDNN offers.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets when to compute a pass band by band, if its mask is a union of bands.
    #[must_use]
    pub fn with_pieces(mut self, pieces: Pieces) -> Self {
        self.pieces = pieces;
        self
    }
}

/// When to compute a pass in [pieces](crate::pieces::Part), one for each band of its mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Pieces {
    /// Compute the pass in pieces, one per band of its mask, if the model of measured times predicts a speedup.
    #[default]
    Auto,
    /// Compute the pass in pieces, one per band of its mask, whenever the mask is a union of several bands.
    Always,
    /// Never compute a pass in pieces: always compute its whole mask at once.
    Never,
}

impl Pieces {
    /// Returns the pieces of a pass; `None` if this option does not compute it in pieces. In `job`, operands that engines cannot read in
    /// place must already be dense.
    pub(crate) fn of(self, job: &Job) -> Option<Vec<Part>> {
        if job.problem().is_empty() {
            return None;
        }
        match self {
            Pieces::Auto => pieces::worthwhile(job),
            Pieces::Always => pieces::parts(job),
            Pieces::Never => None,
        }
    }
}
