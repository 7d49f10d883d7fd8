//! Errors, by who must act.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One rule that a field of the specification or of a call breaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{field} is {value}: {rule}")]
#[non_exhaustive]
pub struct SpecError {
    /// The field, as it is spelled in Rust: `k.dims[1] (heads_kv)`.
    pub field: String,
    /// Its value.
    pub value: String,
    /// The rule that it breaks.
    pub rule: String,
}

impl SpecError {
    /// An error about `field`, which holds `value` and breaks `rule`.
    pub fn new(field: impl Into<String>, value: impl fmt::Display, rule: impl Into<String>) -> SpecError {
        SpecError { field: field.into(), value: value.to_string(), rule: rule.into() }
    }
}

/// Everything that is wrong with a specification or a call, not only the first thing.
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
    /// This project's own kernels on an NVIDIA GPU, without cuDNN.
    pub const CUDA: ExecutorName = ExecutorName("cuda");
    /// This project's own kernels on an Apple GPU.
    pub const METAL: ExecutorName = ExecutorName("metal");
    /// Every core of this machine, in SIMD.
    pub const CPU: ExecutorName = ExecutorName("cpu");

    /// The name of another executor, in small letters.
    pub const fn new(name: &'static str) -> ExecutorName {
        ExecutorName(name)
    }

    /// The name used in files and options.
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
    #[error("{field} is {value}: {limit}")]
    Limit {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The limit, with the version or architecture that it belongs to.
        limit: String,
    },
    /// A runtime that is known to compute this problem wrongly.
    #[error("{runtime} is known to be wrong here: {what} ({source_note})")]
    KnownBad {
        /// Library and version.
        runtime: String,
        /// The fault, in a sentence.
        what: String,
        /// The source of that statement.
        source_note: String,
    },
    /// The library was asked and refused; its own words.
    #[error("{form} form: {text}")]
    Refused {
        /// How the problem was put to the library: `composite`, attention in primitive ops, or `unified`, attention as one op.
        form: String,
        /// Every refusal, in the order of asking.
        text: String,
    },
    /// The executor is not there at all.
    #[error("{0}")]
    Absent(String),
    /// It could not be asked: memory ran out, the driver or a compilation failed. Asked again, it may say something else; nothing is known
    /// to be unsupported, and making the problem ready gives the error itself.
    #[error("it could not be asked: {0}")]
    Failed(String),
}

/// An executor's refusal, with every reason; where several were asked and nobody takes the problem, the last one's, and those of the others.
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
    /// Every reason, in the order of asking.
    pub reasons: Vec<Reason>,
    /// The refusals of the executors that were asked before it, in that order. Only a choice among several has any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Unsupported>,
}

impl Unsupported {
    /// A refusal of one executor.
    pub fn new(executor: ExecutorName, reasons: Vec<Reason>) -> Unsupported {
        Unsupported { executor, reasons, before: Vec::new() }
    }

    /// Returns this refusal with the refusals of earlier executors before it.
    #[must_use]
    pub fn after(mut self, before: Vec<Unsupported>) -> Unsupported {
        self.before = before;
        self
    }

    /// Every refusal, in the order of asking.
    pub fn all(&self) -> impl Iterator<Item = &Unsupported> {
        self.before.iter().chain(std::iter::once(self))
    }

    /// Whether every executor that was asked is not there at all: what is missing is the environment's.
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

/// A failure of what an executor runs on: a library, a driver, a device, memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The executor that failed.
    pub executor: ExecutorName,
    /// The executor's own error, of the type that its page names.
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

/// Anything that can go wrong, by who must act.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller: the specification or the call breaks a rule.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// Nobody, or another executor: this one does not run the problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The environment of an executor: a library, a driver, a device, memory.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A bug of this library: please report it.
    #[error("a bug of sdpa: {0}")]
    Bug(String),
}

impl Error {
    /// [`Error::Failed`], with the executor's own error.
    pub fn failed(executor: ExecutorName, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Failed(Failure { executor, source: Box::new(source) })
    }

    /// True where another executor may still run the problem.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Unsupported(_))
    }

    /// The executor's own error, where it is one of this type.
    pub fn failure<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Error::Failed(failure) => failure.source.downcast_ref(),
            Error::Spec(_) | Error::Unsupported(_) | Error::Bug(_) => None,
        }
    }
}
