//! Host memory as Metal buffers.

use super::Buffer;
use crate::error::Error;
use crate::run::Contents;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResourceOptions};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Page size of every Apple machine with one of these GPUs. Metal uses host memory in place only as whole pages.
const PAGE: usize = 16 * 1024;

/// An operand of a call, in memory that CPU and GPU share.
#[derive(Debug)]
pub(super) struct Host<'a> {
    pub(super) buffer: Buffer,
    /// Whether the GPU has a copy; otherwise it uses the caller's memory.
    pub(super) copied: bool,
    contents: Contents<'a>,
}

/// Allocates memory that only the GPU uses.
pub(super) fn private(device: &ProtocolObject<dyn MTLDevice>, bytes: u64) -> Result<Buffer, Error> {
    let exhausted = || Error::Exhausted { what: format!("a buffer of {bytes} bytes") };
    let length = usize::try_from(bytes).map_err(|_| exhausted())?;
    device.newBufferWithLength_options(length.max(1), MTLResourceOptions::StorageModePrivate).ok_or_else(exhausted)
}

/// Copies bytes to a buffer.
pub(super) fn copy(device: &ProtocolObject<dyn MTLDevice>, bytes: &[u8]) -> Result<Buffer, Error> {
    let shared = MTLResourceOptions::StorageModeShared;
    let made = if bytes.is_empty() {
        device.newBufferWithLength_options(1, shared)
    } else {
        // SAFETY: pointer and length are those of a slice, which Metal reads only during the call.
        unsafe { device.newBufferWithBytes_length_options(NonNull::from(bytes).cast::<c_void>(), bytes.len(), shared) }
    };
    made.ok_or_else(|| Error::Exhausted { what: format!("a buffer of {} bytes", bytes.len()) })
}

impl<'a> Host<'a> {
    /// Uses the memory of an operand in place if it is whole pages, else copies it.
    pub(super) fn new(device: &ProtocolObject<dyn MTLDevice>, mut contents: Contents<'a>) -> Result<Host<'a>, Error> {
        // A written slice needs a mutable pointer: the GPU writes it.
        let slice: NonNull<[u8]> = match &mut contents {
            Contents::Read(bytes) => NonNull::from(&**bytes),
            Contents::Written(bytes) => NonNull::from(&mut **bytes),
        };
        let whole = !slice.is_empty() && slice.len().is_multiple_of(PAGE) && slice.cast::<u8>().addr().get().is_multiple_of(PAGE);
        let itself = whole.then(|| {
            let shared = MTLResourceOptions::StorageModeShared;
            // SAFETY: `contents` borrows whole pages for longer than the buffer is used: the run waits for the GPU before this value is
            // dropped. Without a deallocator, Metal does not free them. A kernel writes only operands that `Call::check` found to be
            // writable.
            unsafe { device.newBufferWithBytesNoCopy_length_options_deallocator(slice.cast::<c_void>(), slice.len(), shared, None) }
        });
        match itself.flatten() {
            Some(buffer) => Ok(Host { buffer, copied: false, contents }),
            None => Ok(Host { buffer: copy(device, contents.bytes())?, copied: true, contents }),
        }
    }

    /// Copies results to the caller's memory. Call it only after the kernels ended.
    pub(super) fn finish(self) {
        let Host { buffer, copied, contents } = self;
        if let (Contents::Written(bytes), true) = (contents, copied) {
            // SAFETY: a shared buffer of this length, which no kernel writes any more.
            let written = unsafe { std::slice::from_raw_parts(buffer.contents().cast::<u8>().as_ptr(), bytes.len()) };
            bytes.copy_from_slice(written);
        }
    }
}
