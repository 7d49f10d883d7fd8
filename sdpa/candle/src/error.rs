//! Mistakes of a call, as candle's errors.

use candle_core::Result;
use sdpa::{SpecError, SpecErrors};

/// An error of this library behind candle's. Its text has field, value and rule of every mistake.
pub(crate) fn wrap(error: impl Into<sdpa::Error>) -> candle_core::Error {
    candle_core::Error::wrap(error.into())
}

/// All of these mistakes at once, if there are any.
pub(crate) fn none(errors: Vec<SpecError>) -> Result<()> {
    if errors.is_empty() { Ok(()) } else { Err(wrap(SpecErrors(errors))) }
}

/// One mistake.
pub(crate) fn one(field: impl Into<String>, value: impl std::fmt::Display, rule: impl Into<String>) -> candle_core::Error {
    wrap(SpecErrors(vec![SpecError::new(field, value, rule)]))
}

/// Something that cannot be.
pub(crate) fn bug(what: &str) -> candle_core::Error {
    wrap(sdpa::Error::Bug(what.to_owned()))
}
