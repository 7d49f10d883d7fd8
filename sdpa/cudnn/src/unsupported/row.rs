//! A limit on a field, and the case that it is checked against.

use crate::lower::Job;
use cudnn_graph::Version;
use sdpa_core::error::Reason;

/// A limit on a field. `breaks` returns the field's value if a case breaks the limit.
pub(super) struct Row {
    pub(super) field: &'static str,
    pub(super) limit: &'static str,
    pub(super) breaks: fn(&Case<'_>) -> Option<String>,
}

/// A job on a runtime and a device.
pub(super) struct Case<'a> {
    pub(super) job: &'a Job,
    pub(super) runtime: Version,
    pub(super) sm: u32,
}

impl Case<'_> {
    pub(super) fn is_backward(&self) -> bool {
        super::is_backward(self.job)
    }

    /// Returns whether the device's compute capability has this major version.
    pub(super) fn major(&self, major: u32) -> bool {
        self.sm / 10 == major
    }

    pub(super) fn before_blackwell(&self) -> bool {
        self.sm < 100
    }

    pub(super) fn dims(&self) -> [i64; 2] {
        let p = self.job.problem();
        [p.dim_qk(), p.dim_v()]
    }
}

pub(super) fn when<T: ToString>(breaks: bool, value: T) -> Option<String> {
    breaks.then(|| value.to_string())
}

impl Row {
    /// Returns why a case breaks the limit, if it does.
    pub(super) fn reason(&self, case: &Case<'_>) -> Option<Reason> {
        (self.breaks)(case).map(|value| Reason::Limit { field: self.field.to_owned(), value, limit: self.limit.to_owned() })
    }
}
