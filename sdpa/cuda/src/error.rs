//! Errors, by who must act.

use sdpa_core::{ExecutorName, SpecErrors, Unsupported};

/// Anything that can go wrong with attention by this crate's kernels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller: the specification or the call breaks a rule.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// Nobody, or another executor: there is no kernel for the problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The environment: the driver, NVRTC, a device, memory.
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// A bug of this library, with what is impossible.
    #[error("a bug of sdpa, please report it: {0}")]
    Bug(String),
}

impl sdpa_cache::BuildError for Error {
    type Refusal = Unsupported;

    fn refusal(&self) -> Option<Unsupported> {
        match self {
            Error::Unsupported(why) => Some(why.clone()),
            Error::Spec(_) | Error::Driver(_) | Error::Bug(_) => None,
        }
    }

    fn again(refusal: Unsupported) -> Error {
        Error::Unsupported(refusal)
    }
}

impl From<Error> for sdpa_core::Error {
    fn from(error: Error) -> sdpa_core::Error {
        match error {
            Error::Spec(errors) => sdpa_core::Error::Spec(errors),
            Error::Unsupported(refusal) => sdpa_core::Error::Unsupported(refusal),
            Error::Driver(error) => sdpa_core::Error::failed(ExecutorName::CUDA, error),
            Error::Bug(text) => sdpa_core::Error::Bug(text),
        }
    }
}
