//! The work that one call submits through a handle.

use super::backend::Handle;
use crate::error::Error;
use std::ops::Deref;

/// One call through a handle. It begins on the handle's stream, and its end is recorded on the handle's lane.
#[derive(Debug)]
pub struct Submission<'h> {
    handle: &'h Handle<'h>,
    stay: sdpa_driver::Submission<'h>,
}

impl Handle<'_> {
    /// Begins a call on the handle's stream. The handle's lane marks its end.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn begin(&self) -> Result<Submission<'_>, Error> {
        Ok(Submission { handle: self, stay: self.stream().begin_on(self.lane())? })
    }
}

impl<'h> Submission<'h> {
    /// Returns the handle.
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
