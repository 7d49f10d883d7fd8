//! Errors of a call, as candle's errors.

use candle_core::Result;
use sdpa::{SpecError, SpecErrors};

/// Wraps an error of this library in candle's. Its text has field, value and rule of every invalid argument.
pub(crate) fn wrap(error: impl Into<sdpa::Error>) -> candle_core::Error {
    candle_core::Error::wrap(error.into())
}

/// Returns an error that contains all of `errors`, or `Ok` if there are none.
pub(crate) fn none(errors: Vec<SpecError>) -> Result<()> {
    if errors.is_empty() { Ok(()) } else { Err(wrap(SpecErrors(errors))) }
}

/// Creates an error for one invalid argument: `field` has this `value`, which breaks `rule`.
pub(crate) fn one(field: impl Into<String>, value: impl std::fmt::Display, rule: impl Into<String>) -> candle_core::Error {
    wrap(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// Creates the error that reports a bug of this library; `what` describes the bug.
pub(crate) fn bug(what: &str) -> candle_core::Error {
    wrap(sdpa::Error::Bug(what.to_owned()))
}
