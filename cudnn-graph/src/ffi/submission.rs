//! The work that one call submits through a handle.

use super::backend::Handle;
use crate::error::Error;
use std::ops::Deref;

/// The work that one call submits through a handle. It begins on the handle's stream. The handle's lane, which marks the end of submitted
/// work, delays the freeing of retired resources until that end.
#[derive(Debug)]
pub struct Submission<'h> {
    handle: &'h Handle<'h>,
    stay: sdpa_driver::Submission<'h>,
}

impl Handle<'_> {
    /// Begins a call on the handle's stream. The handle's lane marks the end of its work, before which retired resources are not freed.
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
