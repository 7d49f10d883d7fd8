//! Owned device memory.

use crate::device::Device;
use crate::error::Error;
use crate::stream::Stream;
use std::ffi::c_void;

/// Plain numbers that may be copied to and from a device byte by byte.
///
/// # Safety
/// Implementors have no padding and no invalid bit patterns.
pub unsafe trait Element: Copy + 'static {}

macro_rules! elements {
    ($($t:ty),*) => {
        $(
            // SAFETY: a plain number.
            unsafe impl Element for $t {}
        )*
    };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);

/// A slice of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Device address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Device memory that is freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    device: &'static Device,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// Allocates device memory of `bytes` bytes, but at least one byte, with 256-byte alignment.
    ///
    /// # Errors
    /// Returns [`Error::Driver`], with `CUDA_ERROR_OUT_OF_MEMORY` if there is not enough memory.
    pub fn new(device: &'static Device, bytes: usize) -> Result<Buffer, Error> {
        let _entered = device.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer.
        device.check("cuMemAlloc", device.relaxed(|| unsafe { (device.table().alloc)(&mut address, bytes.max(1)) }))?;
        Ok(Buffer { device, address, bytes })
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> &'static Device {
        self.device
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn check_range(&self, what: &str, offset: usize, bytes: usize) -> Result<(), Error> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let limit = format!("the buffer holds {} bytes", self.bytes);
        Err(Error::Memory { what: format!("{what} at byte {offset}"), bytes: bytes as u64, limit })
    }

    /// Copies host memory to the buffer, from byte `offset` on, and waits for the copy.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the copy would pass the end of the buffer, or a driver error.
    pub fn upload<T: Element>(&mut self, stream: &Stream, offset: usize, data: &[T]) -> Result<(), Error> {
        self.check_range("an upload", offset, size_of_val(data))?;
        let _entered = self.device.enter()?;
        // SAFETY: the range is inside the buffer, the source is live until the copy is done, and T is plain.
        let code = self.device.relaxed(|| unsafe {
            (self.device.table().to_device)(self.address + offset as u64, data.as_ptr().cast::<c_void>(), size_of_val(data), stream.raw().0)
        });
        self.device.check("cuMemcpyHtoDAsync", code)?;
        stream.synchronize()
    }

    /// Copies from the buffer, from byte `offset` on, to host memory, and waits for the copy.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the copy would pass the end of the buffer, or a driver error.
    pub fn download<T: Element>(&self, stream: &Stream, offset: usize, data: &mut [T]) -> Result<(), Error> {
        self.check_range("a download", offset, size_of_val(data))?;
        let _entered = self.device.enter()?;
        // SAFETY: the range is inside the buffer, the target is live until the copy is done, and T is plain.
        let code = self.device.relaxed(|| unsafe {
            (self.device.table().to_host)(
                data.as_mut_ptr().cast::<c_void>(),
                self.address + offset as u64,
                size_of_val(data),
                stream.raw().0,
            )
        });
        self.device.check("cuMemcpyDtoHAsync", code)?;
        stream.synchronize()
    }

    /// Sets every byte of the buffer to `byte`, on the stream. It returns without waiting.
    ///
    /// # Errors
    /// Returns a driver error.
    pub fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), Error> {
        let _entered = self.device.enter()?;
        // SAFETY: the range is the whole buffer.
        let code = unsafe { (self.device.table().fill_bytes)(self.address, byte, self.bytes, stream.raw().0) };
        self.device.check("cuMemsetD8Async", code)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: the memory is owned here; the driver waits for work that uses it.
            let code = self.device.relaxed(|| unsafe { (self.device.table().free)(self.address) });
            if code != 0 {
                tracing::warn!(code, "cuMemFree");
            }
        }
    }
}
