//! Slices of cudarc as device memory of one call, for adapters (feature `cudarc`).

/// The `cudarc` crate, in the version whose streams and slices adapters use.
pub use ::cudarc;

use crate::memory::DeviceSlice;
use ::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use smallvec::SmallVec;
use std::sync::Arc;

/// Slices of one call on a stream of cudarc. Each slice makes the stream wait for earlier work on the slice, by cudarc's events. When this value is
/// dropped, cudarc records that the stream uses the slices until then; so submit the work first.
pub struct Slices<'a> {
    stream: &'a Arc<CudaStream>,
    // Inline storage, so that a call whose plan is cached allocates nothing.
    guards: SmallVec<[SyncOnDrop<'a>; 16]>,
}

/// A slice of another device than the stream of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    /// The ordinal of the slice's device.
    pub got: usize,
    /// The ordinal of the stream's device.
    pub expected: usize,
}

impl<'a> Slices<'a> {
    /// Creates a call on this stream, without slices.
    pub fn new(stream: &'a Arc<CudaStream>) -> Slices<'a> {
        Slices { stream, guards: SmallVec::new() }
    }

    /// Adds a slice that the call reads, after earlier writes.
    ///
    /// # Errors
    /// Fails if the slice is on another device than the stream. Nothing waits for such a slice.
    pub fn read<T>(&mut self, slice: &'a dyn DevicePtr<T>) -> Result<DeviceSlice, Elsewhere> {
        self.place(slice.stream())?;
        let bytes = slice.num_bytes() as u64;
        let (address, guard) = slice.device_ptr(self.stream);
        self.guards.push(guard);
        Ok(DeviceSlice { address, bytes })
    }

    /// Adds a slice that the call writes, after earlier reads and writes.
    ///
    /// # Errors
    /// Fails as [`Slices::read`] does.
    pub fn write<T>(&mut self, slice: &'a mut dyn DevicePtrMut<T>) -> Result<DeviceSlice, Elsewhere> {
        self.place(slice.stream())?;
        let bytes = slice.num_bytes() as u64;
        let (address, guard) = slice.device_ptr_mut(self.stream);
        self.guards.push(guard);
        Ok(DeviceSlice { address, bytes })
    }

    /// cudarc would fail to record its event for a slice of another device, and report that at the next, unrelated call.
    fn place(&self, stream: &CudaStream) -> Result<(), Elsewhere> {
        let (got, expected) = (stream.context().ordinal(), self.stream.context().ordinal());
        if got == expected { Ok(()) } else { Err(Elsewhere { got, expected }) }
    }
}
