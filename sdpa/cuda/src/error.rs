//! Errors, grouped by who has to act.

use sdpa_core::{ExecutorName, SpecErrors, Unsupported};

/// Any error of attention on the native CUDA kernels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification or the call breaks a rule; the caller has to change it.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// There is no kernel for the problem; another executor may run it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The driver, NVRTC, the device or memory failed.
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// A bug of this library, with the violated assumption.
    #[error("this is a bug in sdpa, please report it: {0}")]
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
