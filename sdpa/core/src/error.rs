//! Errors, grouped by who has to act.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A rule that a field of a specification or of a call breaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{field}: got {value}, expected {rule}")]
#[non_exhaustive]
pub struct SpecError {
    /// The field in Rust notation: `k.dims[1] (heads_kv)`.
    pub field: String,
    /// The value of the field.
    pub value: String,
    /// The rule that the value breaks.
    pub rule: String,
}

impl SpecError {
    /// Creates an error: `field` holds `value`, which breaks `rule`.
    pub fn new(field: impl Into<String>, value: impl fmt::Display, rule: impl Into<String>) -> SpecError {
        SpecError { field: field.into(), value: value.to_string(), rule: rule.into() }
    }
}

/// Every mistake in a specification or a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecErrors(pub Vec<SpecError>);

impl fmt::Display for SpecErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, e) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{e}")?;
        }
        Ok(())
    }
}

impl std::error::Error for SpecErrors {}

/// An executor, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ExecutorName(&'static str);

impl ExecutorName {
    /// cuDNN's fused kernels on an NVIDIA GPU.
    pub const CUDNN: ExecutorName = ExecutorName("cudnn");
    /// Native CUDA kernels (`sdpa-cuda`) on an NVIDIA GPU, without cuDNN.
    pub const CUDA: ExecutorName = ExecutorName("cuda");
    /// Native Metal kernels on an Apple GPU.
    pub const METAL: ExecutorName = ExecutorName("metal");
    /// SIMD on all CPU cores of this machine.
    pub const CPU: ExecutorName = ExecutorName("cpu");

    /// Creates the name of another executor. It must be in lower case.
    pub const fn new(name: &'static str) -> ExecutorName {
        ExecutorName(name)
    }

    /// Returns the name used in files and options.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for ExecutorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why an executor does not run a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "kind", content = "detail")]
#[non_exhaustive]
pub enum Reason {
    /// A limit of the executor on a field of the problem.
    #[error("{field}: got {value}, expected {limit}")]
    Limit {
        /// The field of the problem.
        field: String,
        /// The value of the field.
        value: String,
        /// The limit, with the version or architecture to which it applies.
        limit: String,
    },
    /// The library, in this version, is known to compute this problem wrongly.
    #[error("{runtime} is known to be wrong here: {what} ({source_note})")]
    KnownBad {
        /// The library and its version.
        runtime: String,
        /// A description of the error, in a sentence.
        what: String,
        /// The source that documents the error.
        source_note: String,
    },
    /// The executor's library refused the problem.
    #[error("{form} form: {text}")]
    Refused {
        /// The graph pattern that was refused: `composite` (attention in primitive ops) or `unified` (attention as one op).
        form: String,
        /// The library's message for every refusal, in order.
        text: String,
    },
    /// The executor is not available on this machine, for this reason.
    #[error("{0}")]
    Absent(String),
    /// The check could not be completed, because memory ran out, or the driver or a compilation failed. A later attempt may succeed. The
    /// problem is not known to be unsupported; preparing it returns the error itself.
    #[error("could not check whether the problem is supported: {0}")]
    Failed(String),
}

/// An executor's refusal, with every reason. If several executors were tried and none supports the problem, the refusal of the last one, with those
/// of the others.
///
/// ```
/// use sdpa_core::{ExecutorName, Reason, Unsupported};
///
/// let first = Unsupported::new(ExecutorName::CUDNN, vec![Reason::Absent("there is no cuDNN".to_owned())]);
/// let last = Unsupported::new(ExecutorName::CUDA, vec![Reason::Absent("there is no NVRTC".to_owned())]);
/// assert_eq!(last.after(vec![first]).to_string(), "cudnn: there is no cuDNN\ncuda: there is no NVRTC");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unsupported {
    /// The executor that refuses.
    pub executor: ExecutorName,
    /// Every reason why the executor does not run the problem.
    pub reasons: Vec<Reason>,
    /// Refusals of executors that were tried before, in that order. Only executor selection adds any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Unsupported>,
}

impl Unsupported {
    /// Creates the refusal of one executor.
    pub fn new(executor: ExecutorName, reasons: Vec<Reason>) -> Unsupported {
        Unsupported { executor, reasons, before: Vec::new() }
    }

    /// Returns this refusal with the refusals of earlier executors before it.
    #[must_use]
    pub fn after(mut self, before: Vec<Unsupported>) -> Unsupported {
        self.before = before;
        self
    }

    /// Iterates over every refusal, in the order of trying.
    pub fn all(&self) -> impl Iterator<Item = &Unsupported> {
        self.before.iter().chain(std::iter::once(self))
    }

    /// Returns whether all executors that were tried are unavailable on this machine.
    pub fn is_absence(&self) -> bool {
        self.all().all(|refusal| refusal.reasons.iter().all(|reason| matches!(reason, Reason::Absent(_))))
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (executor, reason)) in self.all().flat_map(|one| one.reasons.iter().map(|reason| (one.executor, reason))).enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{executor}: {reason}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Unsupported {}

/// A failure of a library, a driver, a device or memory that an executor uses.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The executor that failed.
    pub executor: ExecutorName,
    /// The executor's own error, of the type that its documentation names.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}

/// Any error, grouped by who has to act.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification or the call breaks a rule; the caller has to change it.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// This executor does not run the problem; another may.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A library, a driver, a device or memory failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A bug of this library: please report it.
    #[error("this is a bug in sdpa, please report it: {0}")]
    Bug(String),
}

impl Error {
    /// Returns [`Error::Failed`] with the executor's own error.
    pub fn failed(executor: ExecutorName, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Failed(Failure { executor, source: Box::new(source) })
    }

    /// Returns whether another executor may still run the problem.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Unsupported(_))
    }

    /// Returns the executor's own error, if it is of this type.
    pub fn failure<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Error::Failed(failure) => failure.source.downcast_ref(),
            Error::Spec(_) | Error::Unsupported(_) | Error::Bug(_) => None,
        }
    }
}
