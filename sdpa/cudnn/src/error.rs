//! Errors, grouped by who has to act.

use sdpa_core::{ExecutorName, SpecErrors, Unsupported};

/// Any error of attention on cuDNN.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification or the call breaks a rule; the caller has to change it.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// cuDNN does not run the problem; another executor may.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A library, the driver, the device or memory failed.
    #[error(transparent)]
    Backend(#[from] cudnn_graph::Error),
    /// A bug of this library: please report it.
    #[error("this is a bug in sdpa, please report it: {0}")]
    Bug(String),
}

impl Error {
    /// Returns whether another executor may still run the problem.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::Unsupported(_))
    }
}

impl sdpa_cache::BuildError for Error {
    type Refusal = Unsupported;

    fn refusal(&self) -> Option<Unsupported> {
        match self {
            Error::Unsupported(why) => Some(why.clone()),
            Error::Spec(_) | Error::Backend(_) | Error::Bug(_) => None,
        }
    }

    fn again(refusal: Unsupported) -> Error {
        Error::Unsupported(refusal)
    }
}

impl From<cudnn_graph::DriverError> for Error {
    fn from(error: cudnn_graph::DriverError) -> Error {
        Error::Backend(error.into())
    }
}

impl From<Error> for sdpa_core::Error {
    fn from(error: Error) -> sdpa_core::Error {
        match error {
            Error::Spec(errors) => sdpa_core::Error::Spec(errors),
            Error::Unsupported(refusal) => sdpa_core::Error::Unsupported(refusal),
            Error::Backend(error) => sdpa_core::Error::failed(ExecutorName::CUDNN, error),
            Error::Bug(text) => sdpa_core::Error::Bug(text),
        }
    }
}
