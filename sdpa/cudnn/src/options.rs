//! Options of plans: form, engines, pieces.

use crate::lower::{Form, Job};
use crate::pieces::{self, Part};
use cudnn_graph::Policy;
use serde::{Deserialize, Serialize};

/// Options of plans of attention.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct PlanOptions {
    /// How attention is put to cuDNN: this form alone; `None`: the better one first, then the other.
    pub form: Option<Form>,
    /// Which engines are asked for.
    pub policy: Policy,
    /// Whether masks that are unions of bands are computed band by band.
    pub pieces: Pieces,
}

impl PlanOptions {
    /// Sets the form in which attention is given to cuDNN; `None` tries both.
    #[must_use]
    pub fn with_form(mut self, form: impl Into<Option<Form>>) -> Self {
        self.form = form.into();
        self
    }

    /// Sets which engines are tried.
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

/// Whether a pass is computed in [pieces](crate::pieces::Part).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Pieces {
    /// In pieces only where measurements found that faster.
    #[default]
    Auto,
    /// Wherever a mask has pieces.
    Always,
    /// Never: the mask is computed as a whole.
    Never,
}

impl Pieces {
    /// The pieces of a pass, where it is to be computed in some. The job is dense as engines read it.
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
