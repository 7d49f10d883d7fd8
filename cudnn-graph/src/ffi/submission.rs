//! The work that one call submits through a handle.

use super::backend::Handle;
use crate::error::Error;
use std::ops::Deref;

/// The work that one call submits through a handle. It begins on the handle's stream. The handle's lane marks the end of the work, so
/// that resources which it may still use are freed only later.
#[derive(Debug)]
pub struct Submission<'h> {
    handle: &'h Handle<'h>,
    stay: sdpa_driver::Submission<'h>,
}

impl Handle<'_> {
    /// Begins a call on the handle's stream. The handle's lane marks the end of its work, so that resources which it may still use are
    /// freed only later.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn begin(&self) -> Result<Submission<'_>, Error> {
        Ok(Submission { handle: self, stay: self.stream().begin_on(self.lane())? })
    }
}

impl<'h> Submission<'h> {
    /// Returns the handle through which the call submits its work.
    pub fn handle(&self) -> &'h Handle<'h> {
        self.handle
    }
}

impl<'h> Deref for Submission<'h> {
    type Target = sdpa_driver::Submission<'h>;

    fn deref(&self) -> &Self::Target {
        &self.stay
    }
}
