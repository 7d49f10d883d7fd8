//! The driver: devices of several compute capabilities with few multiprocessors, on which everything is done at once.

use crate::{Ptr, kernel, nccl, store};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};

const INVALID_VALUE: c_int = 1;
const CUDA_VERSION: c_int = 13000;
const CONTEXT: usize = 0xc0de_0000;
/// Multiprocessors, so few that blocks of threads take several tiles each.
const MULTIPROCESSORS: c_int = 5;

/// A device: its name, its compute capability, the shared memory of a block.
pub(crate) struct Model {
    name: &'static CStr,
    pub(crate) capability: [c_int; 2],
    pub(crate) shared_bytes: u32,
}

/// By their numbers.
const MODELS: [Model; 3] = [
    Model { name: c"a CPU that runs kernels of an H200", capability: [9, 0], shared_bytes: 227 << 10 },
    Model { name: c"a CPU that runs kernels of an A100", capability: [8, 0], shared_bytes: 163 << 10 },
    Model { name: c"a CPU that runs kernels of an L40", capability: [8, 9], shared_bytes: 99 << 10 },
];

/// The device whose context is current on this thread.
pub(crate) fn current() -> Option<&'static Model> {
    MODELS.get(CURRENT.get().checked_sub(CONTEXT)?)
}

fn model(device: c_int) -> Option<&'static Model> {
    MODELS.get(usize::try_from(device).ok()?)
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

static NEXT: AtomicU64 = AtomicU64::new(0x1000);

fn made_up(to: *mut Ptr) -> c_int {
    let made = NEXT.fetch_add(0x10, Ordering::Relaxed) as usize;
    // SAFETY: the header's contract of whoever calls.
    unsafe { store(to, std::ptr::without_provenance_mut(made)) }
}

exported! {
    /// Nothing to do.
    fn cuInit(_flags: c_uint) -> c_int { 0 }

    /// 13.0.
    fn cuDriverGetVersion(version: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(version, CUDA_VERSION) }
    }

    /// One name for every error.
    fn cuGetErrorName(_error: c_int, name: *mut *const c_char) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(name, c"CUDA_ERROR_OF_THE_EMULATION".as_ptr()) }
    }

    /// What the last launch of the process that failed did.
    fn cuGetErrorString(_error: c_int, text: *mut *const c_char) -> c_int {
        let why = CString::new(kernel::failure()).unwrap_or_default();
        // SAFETY: the header's contract. Errors are few, and their texts are kept for ever, as the driver's are.
        unsafe { store(text, why.into_raw().cast_const()) }
    }

    /// As many as there are models.
    fn cuDeviceGetCount(count: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(count, MODELS.len() as c_int) }
    }

    /// Its number.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
        if model(ordinal).is_none() {
            return INVALID_VALUE;
        }
        // SAFETY: the header's contract.
        unsafe { store(device, ordinal) }
    }

    /// What is asked: multiprocessors, compute capability.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
        let Some(model) = model(device) else { return INVALID_VALUE };
        let known = match attribute {
            16 => MULTIPROCESSORS,
            75 => model.capability[0],
            76 => model.capability[1],
            _ => return INVALID_VALUE,
        };
        // SAFETY: the header's contract.
        unsafe { store(value, known) }
    }

    /// Its own.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
        let Some(model) = model(device) else { return INVALID_VALUE };
        let bytes = model.name.to_bytes_with_nul();
        if usize::try_from(length).is_ok_and(|length| length < bytes.len()) {
            return INVALID_VALUE;
        }
        // SAFETY: there is room for as many, by the line above and the header's contract.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, bytes.len()) };
        0
    }

    /// Some.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(bytes, 8 << 30) }
    }

    /// One for each device.
    fn cuDevicePrimaryCtxRetain(context: *mut Ptr, device: c_int) -> c_int {
        let Ok(number) = usize::try_from(device) else { return INVALID_VALUE };
        // SAFETY: the header's contract.
        unsafe { store(context, std::ptr::without_provenance_mut(CONTEXT + number)) }
    }

    /// That of this thread.
    fn cuCtxGetCurrent(context: *mut Ptr) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(context, std::ptr::without_provenance_mut(CURRENT.get())) }
    }

    /// For this thread.
    fn cuCtxSetCurrent(context: Ptr) -> c_int {
        CURRENT.set(context.addr());
        0
    }

    /// Everything is done.
    fn cuCtxSynchronize() -> c_int { 0 }

    /// Never.
    fn cuStreamIsCapturing(_stream: Ptr, status: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(status, 0) }
    }

    /// A handle.
    fn cuStreamCreate(stream: *mut Ptr, _flags: c_uint) -> c_int { made_up(stream) }

    /// Nothing to do.
    fn cuStreamDestroy_v2(_stream: Ptr) -> c_int { 0 }

    /// Its address.
    fn cuStreamGetId(stream: Ptr, id: *mut u64) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(id, stream.addr() as u64) }
    }

    /// Everything is done.
    fn cuStreamSynchronize(stream: Ptr) -> c_int { nccl::passed_until(stream.addr(), usize::MAX) }

    /// Everything is done, but for late transfers.
    fn cuStreamWaitEvent(_stream: Ptr, event: Ptr, _flags: c_uint) -> c_int { nccl::passed(event.addr()) }

    /// A handle.
    fn cuEventCreate(event: *mut Ptr, _flags: c_uint) -> c_int { made_up(event) }

    /// Nothing to do.
    fn cuEventDestroy_v2(_event: Ptr) -> c_int { 0 }

    /// Notes the late transfers before it.
    fn cuEventRecord(event: Ptr, stream: Ptr) -> c_int {
        nccl::recorded(event.addr(), stream.addr());
        0
    }

    /// Passed.
    fn cuEventQuery(event: Ptr) -> c_int { nccl::passed(event.addr()) }

    /// Passed.
    fn cuEventSynchronize(event: Ptr) -> c_int { nccl::passed(event.addr()) }

    /// Nothing takes time.
    fn cuEventElapsedTime(ms: *mut f32, _start: Ptr, _end: Ptr) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(ms, 0.0) }
    }
}
