//! Errors.

/// The environment's errors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {}
