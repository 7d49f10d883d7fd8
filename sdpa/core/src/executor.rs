//! Executors compute attention over host memory. Each is a crate of its own and depends on none of the others.

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Unsupported};
use crate::host::{HostBackward, HostForward};
use crate::problem::Problem;
use crate::unproven::Unproven;
use serde::Serialize;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A backend that computes attention on one kind of hardware through one library.
///
/// Problems without a batch entry, a query or a key need no kernel: [`empty::forward`](crate::empty::forward) and
/// [`empty::backward`](crate::empty::backward) are their passes. A dispatcher returns these before it asks an executor.
pub trait Executor: Debug + Send + Sync {
    /// Returns the name by which callers select it.
    fn name(&self) -> ExecutorName;

    /// Checks whether it supports the problem. Submits no work.
    ///
    /// # Errors
    /// Every reason against the problem.
    fn supports(&self, problem: &Problem) -> Result<(), Unsupported>;

    /// Prepares the problem, or takes it from the executor's cache.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if another executor may run the problem; any other error is a failure of the environment.
    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error>;

    /// Checks whether it supports the backward problem. Submits no work.
    ///
    /// # Errors
    /// Every reason against the problem.
    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported>;

    /// Prepares the backward problem, or takes it from the executor's cache.
    ///
    /// # Errors
    /// As for [`Executor::prepare`].
    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error>;

    /// Returns the features of the problem that the executor's ledger does not cover; `None` if it covers all, or if the executor has no ledger. A
    /// dispatcher prefers another executor on the same device to an unproven one.
    fn unproven(&self, _problem: &Problem) -> Option<Arc<Unproven>> {
        None
    }

    /// As [`Executor::unproven`], for a backward problem.
    fn unproven_backward(&self, _problem: &BackwardProblem) -> Option<Arc<Unproven>> {
        None
    }
}

/// A problem prepared on one executor.
pub trait Prepared: Debug + Send + Sync {
    /// Computes one forward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// The errors of [`HostForward::check`], before anything runs; otherwise a failure of the environment.
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error>;
}

/// A backward problem prepared on one executor.
pub trait PreparedBackward: Debug + Send + Sync {
    /// Computes one backward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// The errors of [`HostBackward::check`], before anything runs; otherwise a failure of the environment.
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error>;
}

/// The report of one call.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Kernel time, without copies between host and device.
    pub compute: Duration,
    /// Operands that were copied first, because the engine cannot read them in place.
    pub copied: Vec<&'static str>,
    /// The engine with its knobs, or the instruction set.
    pub engine: String,
    /// Workspace bytes that the call used.
    pub workspace_bytes: u64,
}

impl Report {
    /// Creates a report of `engine`, which ran for `compute`, with no copies and no workspace.
    ///
    /// ```
    /// use sdpa_core::executor::Report;
    /// use std::time::Duration;
    /// let report = Report::new("my kernel", Duration::from_micros(12)).with_workspace_bytes(4096);
    /// assert_eq!(report.engine, "my kernel");
    /// ```
    pub fn new(engine: impl Into<String>, compute: Duration) -> Report {
        Report { compute, copied: Vec::new(), engine: engine.into(), workspace_bytes: 0 }
    }

    /// Sets the operands that were copied first.
    #[must_use]
    pub fn with_copied(mut self, copied: Vec<&'static str>) -> Report {
        self.copied = copied;
        self
    }

    /// Sets the workspace bytes that the call used.
    #[must_use]
    pub fn with_workspace_bytes(mut self, bytes: u64) -> Report {
        self.workspace_bytes = bytes;
        self
    }
}
