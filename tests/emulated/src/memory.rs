//! Device memory: the host's, each allocation known.

use crate::{Ptr, store};
use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE, mmap, mprotect, munmap};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::thread::ThreadId;

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const ALIGNMENT: usize = 1024;
const PAGE: usize = 4096;
/// Bytes on either side of an allocation's pages that nobody can touch.
const FENCE: usize = 1 << 20;
/// What an allocation leaves of its pages, which nobody may write.
const GUARD_BYTE: u8 = 0xa5;
const TOTAL: usize = 16 << 30;
/// Allocations from here on hold zeros: there is no such memory behind what is not touched.
const SPARSE: usize = 1 << 30;

struct Allocated {
    bytes: usize,
    /// Where its pages are, and how many bytes they have.
    pages: [usize; 2],
    /// Who asked for it.
    thread: ThreadId,
}

/// By their addresses.
static ALLOCATED: Mutex<BTreeMap<u64, Allocated>> = Mutex::new(BTreeMap::new());

/// Whether so many bytes from an address on lie in one allocation.
pub(crate) extern "C" fn holds(address: u64, bytes: u64) -> bool {
    let allocated = ALLOCATED.lock();
    allocated.range(..=address).next_back().is_some_and(|(begin, found)| address + bytes <= begin + found.bytes as u64)
}

fn pointer(address: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address)
}

/// The first allocation of this thread whose surroundings were written. They are as before then.
pub(crate) fn spoiled() -> Option<String> {
    let own = std::thread::current().id();
    let mut allocated = ALLOCATED.lock();
    for (&address, &mut Allocated { bytes, pages: [begin, all], .. }) in allocated.iter_mut().filter(|(_, found)| found.thread == own) {
        let behind = address as usize + bytes;
        for (side, from, count) in [("before", begin, address as usize - begin), ("behind", behind, begin + all - behind)] {
            // SAFETY: what a live allocation leaves of its pages.
            let guard = unsafe { std::slice::from_raw_parts_mut(pointer(from), count) };
            if let Some(at) = guard.iter().position(|&byte| byte != GUARD_BYTE) {
                guard.fill(GUARD_BYTE);
                let away = if side == "before" { count - at } else { at };
                return Some(format!("{away} bytes {side} an allocation of {bytes} bytes were written"));
            }
        }
    }
    None
}

fn moved(to: u64, from: u64, bytes: usize) -> c_int {
    let (to, from) = (std::ptr::with_exposed_provenance_mut::<u8>(to as usize), std::ptr::with_exposed_provenance::<u8>(from as usize));
    // SAFETY: the header's contract for the side of the host; that of the device lies in an allocation, as the caller has seen.
    unsafe { std::ptr::copy(from, to, bytes) };
    0
}

exported! {
    /// Filled with ones, but where it is large. It ends where its last page does, as far as its alignment lets it; pages on either side cannot be touched.
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
        if bytes == 0 || bytes >= TOTAL {
            return OUT_OF_MEMORY;
        }
        let all = bytes.next_multiple_of(ALIGNMENT).next_multiple_of(PAGE);
        // SAFETY: asks for new pages.
        let fence = unsafe { mmap(std::ptr::null_mut(), all + 2 * FENCE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) };
        if fence == MAP_FAILED {
            return OUT_OF_MEMORY;
        }
        let begin = fence.expose_provenance() + FENCE;
        // SAFETY: pages of the line above.
        if unsafe { mprotect(pointer(begin).cast(), all, PROT_READ | PROT_WRITE) } != 0 {
            return OUT_OF_MEMORY;
        }
        let first = begin + all - bytes.next_multiple_of(ALIGNMENT);
        // SAFETY: they can be written now.
        unsafe {
            pointer(begin).write_bytes(GUARD_BYTE, first - begin);
            pointer(first + bytes).write_bytes(GUARD_BYTE, begin + all - first - bytes);
            if bytes < SPARSE {
                pointer(first).write_bytes(0xff, bytes);
            }
        }
        ALLOCATED.lock().insert(first as u64, Allocated { bytes, pages: [begin, all], thread: std::thread::current().id() });
        // SAFETY: the header's contract.
        unsafe { store(address, first as u64) }
    }

    /// Once.
    fn cuMemFree_v2(address: u64) -> c_int {
        let Some(Allocated { pages: [begin, all], .. }) = ALLOCATED.lock().remove(&address) else { return INVALID_VALUE };
        // SAFETY: what was mapped for it.
        unsafe { munmap(pointer(begin - FENCE).cast(), all + 2 * FENCE) }
    }

    /// Some.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(free, TOTAL) + store(total, TOTAL) }
    }

    /// At once.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: Ptr) -> c_int {
        if holds(to, bytes as u64) { moved(to, from.expose_provenance() as u64, bytes) } else { INVALID_VALUE }
    }

    /// At once.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: Ptr) -> c_int {
        if holds(from, bytes as u64) { moved(to.expose_provenance() as u64, from, bytes) } else { INVALID_VALUE }
    }

    /// At once.
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: Ptr) -> c_int {
        if holds(to, bytes as u64) && holds(from, bytes as u64) { moved(to, from, bytes) } else { INVALID_VALUE }
    }

    /// At once.
    fn cuMemsetD8Async(to: u64, byte: c_uint, bytes: usize, _stream: Ptr) -> c_int {
        if !holds(to, bytes as u64) {
            return INVALID_VALUE;
        }
        // SAFETY: it lies in an allocation.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(to as usize).write_bytes(byte as u8, bytes) };
        0
    }

    /// At once.
    fn cuMemsetD32Async(to: u64, number: c_uint, count: usize, _stream: Ptr) -> c_int {
        if !holds(to, count as u64 * 4) || !to.is_multiple_of(4) {
            return INVALID_VALUE;
        }
        // SAFETY: it lies in an allocation, at a multiple of its size.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<c_uint>(to as usize), count) }.fill(number);
        0
    }
}
