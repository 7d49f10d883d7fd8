//! Errors of a call, as candle's errors.

use candle_core::Result;
use sdpa::{SpecError, SpecErrors};

/// Wraps an error of this library in candle's. Its text has field, value and rule of every invalid argument.
pub(crate) fn wrap(error: impl Into<sdpa::Error>) -> candle_core::Error {
    candle_core::Error::wrap(error.into())
}

/// Returns all of these errors at once, if there are any.
pub(crate) fn none(errors: Vec<SpecError>) -> Result<()> {
    if errors.is_empty() { Ok(()) } else { Err(wrap(SpecErrors(errors))) }
}

/// Returns one error.
pub(crate) fn one(field: impl Into<String>, value: impl std::fmt::Display, rule: impl Into<String>) -> candle_core::Error {
    wrap(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// Returns an internal error.
pub(crate) fn bug(what: &str) -> candle_core::Error {
    wrap(sdpa::Error::Bug(what.to_owned()))
}
