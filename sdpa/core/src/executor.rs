//! Executors: what computes attention over host memory. Each is a crate of its own and knows none of the others.

use crate::backward::BackwardProblem;
use crate::error::{Error, ExecutorName, Unsupported};
use crate::host::{HostBackward, HostForward};
use crate::problem::Problem;
use crate::unproven::Unproven;
use serde::Serialize;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Something that computes attention: on one kind of hardware, through one library.
///
/// Problems without a batch entry, a query or a key need no kernel: [`empty::forward`](crate::empty::forward) and
/// [`empty::backward`](crate::empty::backward) are their passes. A dispatcher hands these out before it asks an executor.
pub trait Executor: Debug + Send + Sync {
    /// The name that callers ask for it by.
    fn name(&self) -> ExecutorName;

    /// Whether it would run the problem; pure, no work is submitted.
    ///
    /// # Errors
    /// Every reason against it.
    fn supports(&self, problem: &Problem) -> Result<(), Unsupported>;

    /// Makes, or takes from its cache, what runs the problem.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where another executor may serve; anything else is the environment's.
    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error>;

    /// Whether it would run the backward problem; pure, no work is submitted.
    ///
    /// # Errors
    /// Every reason against it.
    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported>;

    /// Makes, or takes from its cache, what runs the backward problem.
    ///
    /// # Errors
    /// As [`Executor::prepare`].
    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error>;

    /// Features of the problem that the executor's ledger of tested problems does not cover; `None` where it covers all of them, and for an executor that
    /// keeps no ledger. A dispatcher prefers another executor on the same device to an unproven one.
    fn unproven(&self, _problem: &Problem) -> Option<Arc<Unproven>> {
        None
    }

    /// As [`Executor::unproven`], for a backward problem.
    fn unproven_backward(&self, _problem: &BackwardProblem) -> Option<Arc<Unproven>> {
        None
    }
}

/// A problem made ready on one executor.
pub trait Prepared: Debug + Send + Sync {
    /// Computes one forward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// What [`HostForward::check`] says, before anything runs; otherwise the environment's errors.
    fn forward(&self, call: HostForward<'_>) -> Result<Report, Error>;
}

/// A backward problem made ready on one executor.
pub trait PreparedBackward: Debug + Send + Sync {
    /// Computes one backward pass over host memory, and waits for it.
    ///
    /// # Errors
    /// What [`HostBackward::check`] says, before anything runs; otherwise the environment's errors.
    fn backward(&self, call: HostBackward<'_>) -> Result<Report, Error>;
}

/// The report of one call.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Time in the kernels alone, without copies between host and device.
    pub compute: Duration,
    /// Operands that were copied first because the engines cannot read them in place.
    pub copied: Vec<&'static str>,
    /// The engine with its knobs, or the instruction set.
    pub engine: String,
    /// Bytes of scratch memory that the call used.
    pub workspace_bytes: u64,
}

impl Report {
    /// A report of `engine`, which ran for `compute`, with nothing copied and no scratch memory.
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

    /// Sets the bytes of scratch memory that the call used.
    #[must_use]
    pub fn with_workspace_bytes(mut self, bytes: u64) -> Report {
        self.workspace_bytes = bytes;
        self
    }
}
