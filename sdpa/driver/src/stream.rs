//! Streams and events.

use crate::device::{Device, Entered};
use crate::driver::Ptr;
use crate::error::Error;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

const EVENT_DISABLE_TIMING: c_uint = 2;
const NOT_READY: c_int = 600;

/// A raw CUDA stream handle (`CUstream`), for interoperation with CUDA libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub *mut c_void);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for RawStream {}

/// A stream of one device.
#[derive(Debug)]
pub struct Stream {
    device: &'static Device,
    raw: RawStream,
    /// Unset if the stream was under capture whenever it was needed: the query would invalidate the capture.
    id: OnceLock<u64>,
    owned: bool,
}

impl Stream {
    /// Wraps a stream that other code owns.
    ///
    /// # Safety
    /// `raw` is a live stream of `device`'s primary context and outlives the result.
    pub unsafe fn borrow(device: &'static Device, raw: RawStream) -> Stream {
        Stream { device, raw, id: OnceLock::new(), owned: false }
    }

    pub(crate) fn owned(device: &'static Device, raw: RawStream) -> Stream {
        Stream { device, raw, id: OnceLock::new(), owned: true }
    }

    /// Returns a number that no other stream of the process shares, not even a later one at the same address. Returns `None` during
    /// capture, unless the number was queried before.
    pub fn id(&self) -> Option<u64> {
        if let Some(id) = self.id.get() {
            return Some(*id);
        }
        let id = self.device.stream_id(self.raw.0)?;
        Some(*self.id.get_or_init(|| id))
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns the raw handle, `CUstream`.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Waits for all work submitted to the stream so far.
    ///
    /// # Errors
    /// Returns a driver error, also if a kernel failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is live.
        self.device.check("cuStreamSynchronize", self.device.relaxed(|| unsafe { (self.device.table.stream_synchronize)(self.raw.0) }))
    }

    /// Records an event at the current end of the stream. [`Event::since`] requires `timing`.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn record(&self, timing: bool) -> Result<Event, Error> {
        let event = Event::new(self.device, timing)?;
        self.record_again(&event)?;
        Ok(event)
    }

    /// Moves an event to the current end of the stream.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn record_again(&self, event: &Event) -> Result<(), Error> {
        let entered = self.device.enter()?;
        event.record(&entered, self.raw.0)
    }

    /// Makes later work on this stream wait for an event of this or another stream.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream and the event are live.
        self.device.check("cuStreamWaitEvent", unsafe { (self.device.table.stream_wait)(self.raw.0, event.raw, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: the stream is owned here, and the driver lets running work finish.
            let code = unsafe { (self.device.table.stream_destroy)(self.raw.0) };
            if code != 0 {
                tracing::warn!(code, "cuStreamDestroy");
            }
        }
    }
}

/// A CUDA event: a point on a stream that can be waited for and timed.
#[derive(Debug)]
pub struct Event {
    device: &'static Device,
    raw: Ptr,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver is thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event that is not recorded yet. [`Event::since`] requires `timing`.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn new(device: &'static Device, timing: bool) -> Result<Event, Error> {
        let _entered = device.enter()?;
        let (mut raw, flags) = (std::ptr::null_mut(), if timing { 0 } else { EVENT_DISABLE_TIMING });
        // SAFETY: the pointer is to a live pointer.
        device.check("cuEventCreate", unsafe { (device.table.event_create)(&mut raw, flags) })?;
        Ok(Event { device, raw })
    }

    /// Moves the event to the current end of a live stream of its device, whose context is current.
    pub(crate) fn record(&self, _: &Entered<'_>, stream: Ptr) -> Result<(), Error> {
        // SAFETY: the event and the stream are live and belong to one context.
        self.device.check("cuEventRecord", unsafe { (self.device.table.event_record)(self.raw, stream) })
    }

    /// Returns whether the stream has passed the event.
    ///
    /// # Errors
    /// Returns a driver error, also if a kernel failed.
    pub fn passed(&self) -> Result<bool, Error> {
        let _entered = self.device.enter()?;
        // SAFETY: the event is live.
        match self.device.relaxed(|| unsafe { (self.device.table.event_query)(self.raw) }) {
            NOT_READY => Ok(false),
            code => self.device.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until the stream has passed the event.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.device.enter()?;
        // SAFETY: the event is live.
        self.device.check("cuEventSynchronize", self.device.relaxed(|| unsafe { (self.device.table.event_synchronize)(self.raw) }))
    }

    /// Returns the time on the device from `start` to this event, in milliseconds. Both events must have been created with timing, and
    /// the stream must have passed both.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn since(&self, start: &Event) -> Result<f32, Error> {
        let _entered = self.device.enter()?;
        let mut ms = 0.0;
        // SAFETY: both events are live.
        self.device.check("cuEventElapsedTime", unsafe { (self.device.table.event_elapsed)(&mut ms, start.raw, self.raw) })?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: the event is owned here.
            let code = unsafe { (self.device.table.event_destroy)(self.raw) };
            if code != 0 {
                tracing::warn!(code, "cuEventDestroy");
            }
        }
    }
}
