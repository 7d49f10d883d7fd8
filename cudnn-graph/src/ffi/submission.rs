//! What one call submits through a handle.

use super::backend::Handle;
use super::device::{Device, Entered};
use super::driver::Ptr;
use crate::bind::DeviceSlice;
use crate::error::Error;

/// One call's stay with a handle, in the context of its device. Whether the stream is captured is asked once, when the stay begins: whoever
/// submits neither begins nor ends a capture of the stream until it is over.
#[derive(Debug)]
pub struct Submission<'h> {
    handle: &'h Handle<'h>,
    capturing: bool,
    entered: Entered<'h>,
}

impl Handle<'_> {
    /// Begins a call.
    ///
    /// # Errors
    /// The driver's own.
    pub fn begin(&self) -> Result<Submission<'_>, Error> {
        let entered = self.device().enter()?;
        Ok(Submission { handle: self, capturing: self.device().is_capturing(self.stream().raw().0), entered })
    }
}

impl<'h> Submission<'h> {
    /// The handle.
    pub fn handle(&self) -> &'h Handle<'h> {
        self.handle
    }

    /// The device that it submits to.
    pub fn device(&self) -> &'static Device {
        self.handle.device()
    }

    pub(super) fn stream(&self) -> Ptr {
        self.handle.stream().raw().0
    }

    /// Whether what is submitted goes into a graph instead of to the device.
    pub fn is_capturing(&self) -> bool {
        self.capturing
    }

    /// Makes the graph that the stream is captured into keep something, for as long as it or an executable graph made of it lives.
    ///
    /// # Errors
    /// The driver's own, also where nothing is being captured.
    pub fn keep_in_graph(&self, thing: Box<dyn Send>) -> Result<(), Error> {
        self.device().keep(self.stream(), thing)
    }

    /// Marks the present end of the stream as the end of what was submitted through the handle: what is retired from here on waits for it.
    /// Not while the stream is captured: see [`Submission::keep_in_graph`].
    ///
    /// # Errors
    /// The driver's own.
    pub fn mark(&self) -> Result<(), Error> {
        self.handle.lane().map_or(Ok(()), |lane| lane.mark(&self.entered, self.device(), self.stream(), self.handle.stream().id()))
    }

    /// Sets a piece of device memory to zero, on the stream of the handle. Nothing waits.
    ///
    /// # Safety
    /// The slice is device memory of the handle's device, really as large as said, and nothing else uses it until the stream
    /// has passed this call.
    ///
    /// # Errors
    /// The driver's own.
    pub unsafe fn zero(&self, slice: DeviceSlice) -> Result<(), Error> {
        let bytes = usize::try_from(slice.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller's.
        let code = unsafe { (self.device().table.fill_bytes)(slice.address, 0, bytes, self.stream()) };
        self.device().check("cuMemsetD8Async", code)
    }

    /// Copies one piece of device memory into another of the same size, on the stream of the handle. Nothing waits.
    ///
    /// # Safety
    /// Both slices are device memory of the handle's device, really as large as said; until the stream has passed this call nothing
    /// else uses `to` and nothing writes `from`.
    ///
    /// # Errors
    /// [`Error::Memory`] for slices of different sizes; the driver's own.
    pub unsafe fn copy(&self, from: DeviceSlice, to: DeviceSlice) -> Result<(), Error> {
        if from.bytes != to.bytes {
            return Err(Error::Memory { what: "a copy".to_owned(), bytes: from.bytes, limit: format!("{} bytes to copy to", to.bytes) });
        }
        let bytes = usize::try_from(from.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller's.
        let code = unsafe { (self.device().table.on_device)(to.address, from.address, bytes, self.stream()) };
        self.device().check("cuMemcpyDtoDAsync_v2", code)
    }
}
