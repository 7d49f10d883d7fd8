//! What one call submits to a stream.

use crate::device::{Device, Entered};
use crate::driver::Ptr;
use crate::error::Error;
use crate::lane::{self, Lane};
use crate::memory::DeviceSlice;
use crate::stream::Stream;

/// One call's stay with a stream, in the context of its device. Whether the stream is captured is asked once, when the stay begins: whoever
/// submits neither begins nor ends a capture of the stream until it is over.
#[derive(Debug)]
pub struct Submission<'s> {
    stream: &'s Stream,
    lane: Option<&'static Lane>,
    capturing: bool,
    entered: Entered<'s>,
}

impl Stream {
    /// Begins a call: what is submitted through the result is on this stream, and its end is marked on a lane of this thread's.
    ///
    /// # Errors
    /// A driver error.
    pub fn begin(&self) -> Result<Submission<'_>, Error> {
        self.begin_on(lane::of_thread(self.device()))
    }

    /// Begins a call whose end is marked on `lane`, which nobody else uses meanwhile. Without a lane nothing is marked.
    ///
    /// # Errors
    /// A driver error.
    pub fn begin_on(&self, lane: Option<&'static Lane>) -> Result<Submission<'_>, Error> {
        let entered = self.device().enter()?;
        Ok(Submission { stream: self, lane, capturing: self.device().is_capturing(self.raw().0), entered })
    }
}

impl<'s> Submission<'s> {
    /// The device that it submits to.
    pub fn device(&self) -> &'static Device {
        self.stream.device()
    }

    /// The stream that it submits to.
    pub fn stream(&self) -> &'s Stream {
        self.stream
    }

    pub(crate) fn raw(&self) -> Ptr {
        self.stream.raw().0
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
        self.device().keep(self.raw(), thing)
    }

    /// Marks the present end of the stream as the end of what was submitted: what is retired from here on waits for it.
    /// Not while the stream is captured: see [`Submission::keep_in_graph`].
    ///
    /// # Errors
    /// A driver error.
    pub fn mark(&self) -> Result<(), Error> {
        self.lane.map_or(Ok(()), |lane| lane.mark(&self.entered, self.device(), self.raw(), self.stream.id()))
    }

    /// Sets a piece of device memory to zero, on the stream. Returns without waiting.
    ///
    /// # Safety
    /// The slice is device memory of the stream's device, really as large as said, and nothing else uses it until the stream
    /// has passed this call.
    ///
    /// # Errors
    /// A driver error.
    pub unsafe fn zero(&self, slice: DeviceSlice) -> Result<(), Error> {
        let bytes = usize::try_from(slice.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.fill_bytes)(slice.address, 0, bytes, self.raw()) };
        self.device().check("cuMemsetD8Async", code)
    }

    /// Sets a piece of device memory to one number, on the stream. Nothing waits. The address is a multiple of 4; bytes past the last whole number stay
    /// as they are.
    ///
    /// # Safety
    /// As [`Submission::zero`].
    ///
    /// # Errors
    /// A driver error.
    pub unsafe fn fill(&self, slice: DeviceSlice, number: f32) -> Result<(), Error> {
        let numbers = usize::try_from(slice.bytes / 4).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.fill_words)(slice.address, number.to_bits(), numbers, self.raw()) };
        self.device().check("cuMemsetD32Async", code)
    }

    /// Copies one piece of device memory into another of the same size, on the stream. Returns without waiting.
    ///
    /// # Safety
    /// Both slices are device memory of the stream's device, really as large as said; until the stream has passed this call nothing
    /// else uses `to` and nothing writes `from`.
    ///
    /// # Errors
    /// [`Error::Memory`] for slices of different sizes, or a driver error.
    pub unsafe fn copy(&self, from: DeviceSlice, to: DeviceSlice) -> Result<(), Error> {
        if from.bytes != to.bytes {
            return Err(Error::Memory { what: "a copy".to_owned(), bytes: from.bytes, limit: format!("{} bytes to copy to", to.bytes) });
        }
        let bytes = usize::try_from(from.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.on_device)(to.address, from.address, bytes, self.raw()) };
        self.device().check("cuMemcpyDtoDAsync_v2", code)
    }
}
