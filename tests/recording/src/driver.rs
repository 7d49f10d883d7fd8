//! The driver: two devices, with memory that is made up. Whatever is submitted is done at once, unless a test holds its stream.

use crate::entry::{COPY, DOWNLOAD, FILL, UPLOAD};
use crate::timeline::{self, Work};
use crate::{memory, record, store};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

type Ptr = *mut c_void;

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_DEVICE: c_int = 101;
const INVALID_CONTEXT: c_int = 201;
const CUDA_VERSION: c_int = 13000;
const DEVICE_UNAVAILABLE: c_int = 46;
const DEVICES: c_int = 2;
/// That of the first device; each has one.
const CONTEXT: usize = 0xc0de_0000;
const NAME: &CStr = c"NVIDIA H200";
/// Attributes of the device: multiprocessors, compute capability.
/// 115: no pools of memory, for cudarc, which asks.
const ATTRIBUTES: [(c_int, c_int); 4] = [(16, 132), (75, 9), (76, 0), (115, 0)];

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The device that another process has for itself; −1: none.
static TAKEN: AtomicI32 = AtomicI32::new(-1);
/// Contexts that were opened, a bit each.
static OPENED: AtomicU32 = AtomicU32::new(0);

fn made_up() -> Ptr {
    std::ptr::without_provenance_mut(timeline::made_up())
}

fn context(device: c_int) -> usize {
    CONTEXT + device.unsigned_abs() as usize
}

/// The context of this thread; 0: it has none.
pub(crate) fn current() -> usize {
    CURRENT.get()
}

/// Whether this thread has a context: no call works without one.
pub(crate) fn entered() -> bool {
    (0..DEVICES).any(|device| current() == context(device))
}

pub(crate) fn in_context(done: impl FnOnce() -> c_int) -> c_int {
    if entered() { done() } else { INVALID_CONTEXT }
}

/// A call that would invalidate captures, were it not made in the relaxed mode.
pub(crate) fn relaxed(done: impl FnOnce() -> c_int) -> c_int {
    in_context(|| match timeline::disturb() {
        0 => done(),
        code => code,
    })
}

/// Records a transfer whose ends on the device, if it has such, lie in allocations.
fn transfer(what: u32, device: &[u64], [to, from]: [u64; 2], bytes: usize, stream: Ptr) -> c_int {
    let bytes = bytes as u64;
    in_context(|| {
        if !device.iter().all(|&address| memory::holds(address, bytes)) {
            return INVALID_VALUE;
        }
        match timeline::submit(stream.addr(), Work { plan: 0, memory: device.to_vec() }) {
            Ok(true) => record::write(|entry| {
                (entry.what, entry.stream, entry.tensors) = (what, stream.addr() as u64, 0);
                (entry.to, entry.from, entry.bytes) = (to, from, bytes);
            }),
            Ok(false) => {}
            Err(code) => return code,
        }
        0
    })
}

exported! {
    /// Nothing to do.
    fn cuInit(_flags: c_uint) -> c_int { 0 }

    /// 13.0.
    fn cuDriverGetVersion(version: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(version, CUDA_VERSION) };
        0
    }

    /// Of what no header names there is nothing: a table that holds its own size. NVRTC asks, where the loader finds this library as the driver's.
    fn cuGetExportTable(table: *mut *const c_void, _of: *const c_void) -> c_int {
        static EMPTY: usize = size_of::<usize>();
        // SAFETY: the pointer is to a live pointer.
        unsafe { store(table, (&raw const EMPTY).cast()) };
        0
    }

    /// One name for every error.
    fn cuGetErrorName(_error: c_int, name: *mut *const c_char) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(name, c"CUDA_ERROR_OF_THE_RECORDER".as_ptr()) };
        0
    }

    /// One text for every error.
    fn cuGetErrorString(_error: c_int, text: *mut *const c_char) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(text, c"the recording library refuses the call".as_ptr()) };
        0
    }

    /// Another process takes a device for itself; −1: gives it back.
    fn recording_take_device(device: c_int) -> c_int {
        TAKEN.store(device, Ordering::Relaxed);
        0
    }

    /// Contexts that were opened, a bit each.
    fn recording_opened() -> u64 {
        u64::from(OPENED.load(Ordering::Relaxed))
    }

    /// The context of this thread, as a number.
    fn recording_current() -> u64 {
        current() as u64
    }

    /// Two.
    fn cuDeviceGetCount(count: *mut c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(count, DEVICES) };
        0
    }

    /// By its number.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
        if !(0..DEVICES).contains(&ordinal) {
            return INVALID_DEVICE;
        }
        // SAFETY: the header's contract.
        unsafe { store(device, ordinal) };
        0
    }

    /// What is asked of an H200.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
        let Some((_, known)) = ATTRIBUTES.iter().find(|(which, _)| *which == attribute) else { return INVALID_VALUE };
        // SAFETY: the header's contract.
        unsafe { store(value, *known) };
        0
    }

    /// An H200's.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> c_int {
        let bytes = NAME.to_bytes_with_nul();
        if usize::try_from(length).is_ok_and(|length| length < bytes.len()) {
            return INVALID_VALUE;
        }
        // SAFETY: there is room for as many, by the line above and the header's contract.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, bytes.len()) };
        0
    }

    /// An H200's.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(bytes, memory::TOTAL as usize) };
        0
    }

    /// The only one of the device.
    fn cuDevicePrimaryCtxRetain(opened: *mut Ptr, device: c_int) -> c_int {
        if TAKEN.load(Ordering::Relaxed) == device {
            return DEVICE_UNAVAILABLE;
        }
        OPENED.fetch_or(1 << device, Ordering::Relaxed);
        // SAFETY: the header's contract.
        unsafe { store(opened, std::ptr::without_provenance_mut(context(device))) };
        0
    }

    /// The context stays.
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int { 0 }

    /// That of this thread.
    fn cuCtxGetCurrent(context: *mut Ptr) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(context, std::ptr::without_provenance_mut(CURRENT.get())) };
        0
    }

    /// For this thread.
    fn cuCtxSetCurrent(context: Ptr) -> c_int {
        CURRENT.set(context.addr());
        0
    }

    /// Nothing waits here; every capture is invalidated.
    fn cuCtxSynchronize() -> c_int {
        in_context(timeline::disturb_all)
    }

    /// Every capture is invalidated.
    fn cuCtxRecordEvent(_context: Ptr, event: Ptr) -> c_int {
        match timeline::disturb_all() {
            0 => timeline::record(event.addr(), 0),
            code => code,
        }
    }

    /// What is left of an H200's.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
        in_context(|| {
            // SAFETY: the header's contract.
            unsafe {
                store(free, (memory::TOTAL - memory::allocated()) as usize);
                store(total, memory::TOTAL as usize);
            }
            0
        })
    }

    /// An address.
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
        relaxed(|| {
            let Some(allocated) = memory::allocate(bytes as u64) else { return OUT_OF_MEMORY };
            // SAFETY: the header's contract.
            unsafe { store(address, allocated) };
            0
        })
    }

    /// Once.
    fn cuMemFree_v2(address: u64) -> c_int {
        relaxed(|| {
            timeline::freed(address);
            if memory::free(address) { 0 } else { INVALID_VALUE }
        })
    }

    /// Recorded.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Ptr) -> c_int {
        transfer(UPLOAD, &[to], [to, from.addr() as u64], bytes, stream)
    }

    /// Recorded; host memory stays as it is.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Ptr) -> c_int {
        transfer(DOWNLOAD, &[from], [to.addr() as u64, from], bytes, stream)
    }

    /// Recorded.
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Ptr) -> c_int {
        transfer(COPY, &[to, from], [to, from], bytes, stream)
    }

    /// Recorded.
    fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: Ptr) -> c_int {
        transfer(FILL, &[to], [to, u64::from(byte)], bytes, stream)
    }

    /// Recorded.
    fn cuMemsetD32Async(to: u64, number: c_uint, count: usize, stream: Ptr) -> c_int {
        transfer(FILL, &[to], [to, u64::from(number)], count * 4, stream)
    }

    /// At an address that an earlier one may have had.
    fn cuStreamCreate(stream: *mut Ptr, _flags: c_uint) -> c_int {
        in_context(|| {
            // SAFETY: the header's contract.
            unsafe { store(stream, std::ptr::without_provenance_mut(timeline::create_stream(current()))) };
            0
        })
    }

    /// Its address is free.
    fn cuStreamDestroy_v2(stream: Ptr) -> c_int { in_context(|| timeline::destroy_stream(stream.addr())) }

    /// A number that no other stream has. A capture is invalidated by the question.
    fn cuStreamGetId(stream: Ptr, id: *mut u64) -> c_int {
        if timeline::invalidate(stream.addr()) {
            return timeline::CAPTURE_UNSUPPORTED;
        }
        let Some(known) = timeline::stream_id(stream.addr()) else { return INVALID_VALUE };
        // SAFETY: the header's contract.
        unsafe { store(id, known) };
        0
    }

    /// Everything is done at once, but for what is held, which nobody waits for.
    fn cuStreamSynchronize(_stream: Ptr) -> c_int { relaxed(|| 0) }

    /// Everything is done at once.
    fn cuStreamWaitEvent(_stream: Ptr, _event: Ptr, _flags: c_uint) -> c_int { in_context(|| 0) }

    /// A number.
    fn cuEventCreate(event: *mut Ptr, _flags: c_uint) -> c_int {
        in_context(|| {
            // SAFETY: the header's contract.
            unsafe { store(event, made_up()) };
            0
        })
    }

    /// Nothing to do.
    fn cuEventDestroy_v2(_event: Ptr) -> c_int { in_context(|| 0) }

    /// Behind what was submitted.
    fn cuEventRecord(event: Ptr, stream: Ptr) -> c_int { in_context(|| timeline::record(event.addr(), stream.addr())) }

    /// Passed, unless work before it is held.
    fn cuEventQuery(event: Ptr) -> c_int { in_context(|| timeline::query(event.addr())) }

    /// Passed.
    fn cuEventSynchronize(_event: Ptr) -> c_int { relaxed(|| 0) }

    /// A millisecond for each entry that was written between them.
    fn cuEventElapsedTime(ms: *mut f32, start: Ptr, end: Ptr) -> c_int {
        in_context(|| {
            // SAFETY: the header's contract.
            unsafe { store(ms, timeline::between(start.addr(), end.addr()) as f32) };
            0
        })
    }
}
