//! Host memory as buffers.

use super::Buffer;
use crate::error::Error;
use crate::run::Contents;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResourceOptions};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Pages of every Apple machine that has one of these GPUs. Metal takes memory as it is only in whole ones.
const PAGE: usize = 16 * 1024;

/// An operand of a call: memory that the CPU and the GPU share.
#[derive(Debug)]
pub(super) struct Host<'a> {
    pub(super) buffer: Buffer,
    /// Whether the GPU has a copy; else it is the caller's memory itself.
    pub(super) copied: bool,
    contents: Contents<'a>,
}

/// Memory for the GPU alone.
pub(super) fn private(device: &ProtocolObject<dyn MTLDevice>, bytes: u64) -> Result<Buffer, Error> {
    let exhausted = || Error::Exhausted { what: format!("a buffer of {bytes} bytes") };
    let length = usize::try_from(bytes).map_err(|_| exhausted())?;
    device.newBufferWithLength_options(length.max(1), MTLResourceOptions::StorageModePrivate).ok_or_else(exhausted)
}

/// A copy of bytes.
pub(super) fn copy(device: &ProtocolObject<dyn MTLDevice>, bytes: &[u8]) -> Result<Buffer, Error> {
    let shared = MTLResourceOptions::StorageModeShared;
    let made = if bytes.is_empty() {
        device.newBufferWithLength_options(1, shared)
    } else {
        // SAFETY: the pointer is a slice's, of this length, which is read during the call only.
        unsafe { device.newBufferWithBytes_length_options(NonNull::from(bytes).cast::<c_void>(), bytes.len(), shared) }
    };
    made.ok_or_else(|| Error::Exhausted { what: format!("a buffer of {} bytes", bytes.len()) })
}

impl<'a> Host<'a> {
    /// The memory of an operand itself where it is whole pages, else a copy of it.
    pub(super) fn new(device: &ProtocolObject<dyn MTLDevice>, mut contents: Contents<'a>) -> Result<Host<'a>, Error> {
        // A written slice is taken as what may be written: the GPU does.
        let slice: NonNull<[u8]> = match &mut contents {
            Contents::Read(bytes) => NonNull::from(&**bytes),
            Contents::Written(bytes) => NonNull::from(&mut **bytes),
        };
        let whole = !slice.is_empty() && slice.len().is_multiple_of(PAGE) && slice.cast::<u8>().addr().get().is_multiple_of(PAGE);
        let itself = whole.then(|| {
            let shared = MTLResourceOptions::StorageModeShared;
            // SAFETY: whole pages of a slice that `contents` borrows for longer than the buffer is used: the run waits for the GPU
            // before this value goes. Nothing is to be freed. A kernel writes only what `Call::check` found to be written.
            unsafe { device.newBufferWithBytesNoCopy_length_options_deallocator(slice.cast::<c_void>(), slice.len(), shared, None) }
        });
        match itself.flatten() {
            Some(buffer) => Ok(Host { buffer, copied: false, contents }),
            None => Ok(Host { buffer: copy(device, contents.bytes())?, copied: true, contents }),
        }
    }

    /// Brings what kernels wrote to where the caller looks for it. Only after they ended.
    pub(super) fn finish(self) {
        let Host { buffer, copied, contents } = self;
        if let (Contents::Written(bytes), true) = (contents, copied) {
            // SAFETY: a shared buffer that was made with this length, and that nothing writes any more.
            let written = unsafe { std::slice::from_raw_parts(buffer.contents().cast::<u8>().as_ptr(), bytes.len()) };
            bytes.copy_from_slice(written);
        }
    }
}
