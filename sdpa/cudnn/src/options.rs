//! Options of plans: form, engines, pieces.

use crate::lower::{Form, Job};
use crate::pieces::{self, Part};
use cudnn_graph::Policy;
use serde::{Deserialize, Serialize};

/// Options of attention plans: graph form, engines, and decomposition of masks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The only graph form to try. With `None`, the better form is tried first, and then the other.
    pub form: Option<Form>,
    /// The rules for accepting engines.
    pub policy: Policy,
    /// Whether masks that are unions of bands are computed band by band.
    pub pieces: Pieces,
}

impl PlanOptions {
    /// Sets the only graph form to try; `None` tries both forms.
    #[must_use]
    pub fn with_form(mut self, form: impl Into<Option<Form>>) -> Self {
        self.form = form.into();
        self
    }

    /// Sets the rules for accepting engines.
    #[must_use]
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets whether masks that are unions of bands are computed band by band.
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
    /// In pieces if the model of measured times predicts a speedup.
    #[default]
    Auto,
    /// In pieces whenever the mask is a union of several bands.
    Always,
    /// Never in pieces.
    Never,
}

impl Pieces {
    /// Returns the pieces of a pass, if it is to be computed in pieces. Operands of `job` are dense where engines need that.
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
