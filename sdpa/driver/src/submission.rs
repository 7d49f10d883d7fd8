//! The work that one call submits to a stream.

use crate::device::{Device, Entered};
use crate::driver::Ptr;
use crate::error::Error;
use crate::lane::{self, Lane};
use crate::memory::DeviceSlice;
use crate::stream::Stream;

/// The work that one call submits to a stream, within the context of the stream's device. The capture status of the stream is queried
/// once, at the beginning. Until the submission is dropped, the submitter must neither begin nor end a capture of the stream.
#[derive(Debug)]
pub struct Submission<'s> {
    stream: &'s Stream,
    lane: Option<&'static Lane>,
    capturing: bool,
    entered: Entered<'s>,
}

impl Stream {
    /// Begins a call on this stream. The [`Lane`] of this thread marks the end of the submitted work.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn begin(&self) -> Result<Submission<'_>, Error> {
        self.begin_on(lane::of_thread(self.device()))
    }

    /// Begins a call on this stream. `lane` marks the end of the submitted work; until then nothing else may use the lane. With `None`,
    /// the end is not marked.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn begin_on(&self, lane: Option<&'static Lane>) -> Result<Submission<'_>, Error> {
        let entered = self.device().enter()?;
        Ok(Submission { stream: self, lane, capturing: self.device().is_capturing(self.raw().0), entered })
    }
}

impl<'s> Submission<'s> {
    /// Returns the device of the submission's stream.
    pub fn device(&self) -> &'static Device {
        self.stream.device()
    }

    /// Returns the stream to which the call submits work.
    pub fn stream(&self) -> &'s Stream {
        self.stream
    }

    pub(crate) fn raw(&self) -> Ptr {
        self.stream.raw().0
    }

    /// Returns whether the stream is under capture, so that the work goes into a graph instead of to the device.
    pub fn is_capturing(&self) -> bool {
        self.capturing
    }

    /// Makes the graph of the stream's capture keep a resource alive, as long as the graph or an executable graph made from it lives.
    ///
    /// # Errors
    /// Returns a driver error, also if the stream is not under capture.
    pub fn keep_in_graph(&self, thing: Box<dyn Send>) -> Result<(), Error> {
        self.device().keep(self.raw(), thing)
    }

    /// Marks the current end of the stream as the end of the submitted work. Resources that are retired later wait for this end. The
    /// stream must not be under capture: see [`Submission::keep_in_graph`].
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn mark(&self) -> Result<(), Error> {
        self.lane.map_or(Ok(()), |lane| lane.mark(&self.entered, self.device(), self.raw(), self.stream.id()))
    }

    /// Sets a slice of device memory to zero, on the stream. It returns without waiting.
    ///
    /// # Safety
    /// The slice is device memory of the stream's device and as large as stated, and nothing else uses it until the stream has passed this call.
    ///
    /// # Errors
    /// Returns a driver error.
    pub unsafe fn zero(&self, slice: DeviceSlice) -> Result<(), Error> {
        let bytes = usize::try_from(slice.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.fill_bytes)(slice.address, 0, bytes, self.raw()) };
        self.device().check("cuMemsetD8Async", code)
    }

    /// Fills a slice of device memory with one f32, on the stream. It returns without waiting. The address must be a multiple of 4; bytes
    /// after the last whole number are unchanged.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Submission::zero`].
    ///
    /// # Errors
    /// Returns a driver error.
    pub unsafe fn fill(&self, slice: DeviceSlice, number: f32) -> Result<(), Error> {
        let numbers = usize::try_from(slice.bytes / 4).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.fill_words)(slice.address, number.to_bits(), numbers, self.raw()) };
        self.device().check("cuMemsetD32Async", code)
    }

    /// Copies one slice of device memory to another of the same size, on the stream. It returns without waiting.
    ///
    /// # Safety
    /// Both slices are device memory of the stream's device and as large as stated. Until the stream has passed this call, nothing else uses `to` and
    /// nothing writes `from`.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] for slices of different sizes, or a driver error.
    pub unsafe fn copy(&self, from: DeviceSlice, to: DeviceSlice) -> Result<(), Error> {
        if from.bytes != to.bytes {
            let limit = format!("the destination has {} bytes", to.bytes);
            return Err(Error::Memory { what: "a copy".to_owned(), bytes: from.bytes, limit });
        }
        let bytes = usize::try_from(from.bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller upholds the contract.
        let code = unsafe { (self.device().table.on_device)(to.address, from.address, bytes, self.raw()) };
        self.device().check("cuMemcpyDtoDAsync_v2", code)
    }
}
