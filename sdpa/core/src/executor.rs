//! Executors compute attention over host memory. Each executor is a separate crate, and does not depend on other executors.

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
/// [`empty::backward`](crate::empty::backward) return their passes. A dispatcher calls these before it asks an executor.
pub trait Executor: Debug + Send + Sync {
    /// Returns the name by which callers select the executor.
    fn name(&self) -> ExecutorName;

    /// Checks whether the executor supports the problem, without submitting work.
    ///
    /// # Errors
    /// Returns every reason why the executor does not support the problem.
    fn supports(&self, problem: &Problem) -> Result<(), Unsupported>;

    /// Returns the prepared problem, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if another executor may run the problem. Any other error is a failure of the environment.
    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error>;

    /// Checks whether the executor supports the backward problem, without submitting work.
    ///
    /// # Errors
    /// Returns every reason why the executor does not support the problem.
    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported>;

    /// Returns the prepared backward problem, from the executor's cache if it is there.
    ///
    /// # Errors
    /// Fails as [`Executor::prepare`] does.
    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error>;

    /// Returns the features of the problem that the executor's ledger, a record of tested features, does not cover. `None` if it covers
    /// all of them, or if the executor has no ledger. A dispatcher prefers another executor on the same device to an unproven one.
    fn unproven(&self, _problem: &Problem) -> Option<Arc<Unproven>> {
        None
    }

    /// Returns the features of a backward problem that the executor's ledger, a record of tested features, does not cover: see
    /// [`Executor::unproven`].
    fn unproven_backward(&self, _problem: &BackwardProblem) -> Option<Arc<Unproven>> {
        None
    }
}

/// A problem prepared on one executor.
pub trait Prepared: Debug + Send + Sync {
    /// Computes one forward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// Returns the errors of [`HostForward::check`] before anything runs. Any other error is a failure of the environment.
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error>;
}

/// A backward problem prepared on one executor.
pub trait PreparedBackward: Debug + Send + Sync {
    /// Computes one backward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// Returns the errors of [`HostBackward::check`] before anything runs. Any other error is a failure of the environment.
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error>;
}

/// The report of one call: time, engine, copied operands and workspace.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Time of the kernels, without copies between host and device.
    pub compute: Duration,
    /// Names of the operands that were copied first, because the engine cannot read them in place.
    pub copied: Vec<&'static str>,
    /// The engine with its knobs, the kernel with its tile, or the CPU's instruction set.
    pub engine: String,
    /// Size of the workspace that the call used, in bytes.
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

    /// Sets the names of the operands that were copied first.
    #[must_use]
    pub fn with_copied(mut self, copied: Vec<&'static str>) -> Report {
        self.copied = copied;
        self
    }

    /// Sets the size of the workspace that the call used, in bytes.
    #[must_use]
    pub fn with_workspace_bytes(mut self, bytes: u64) -> Report {
        self.workspace_bytes = bytes;
        self
    }
}
