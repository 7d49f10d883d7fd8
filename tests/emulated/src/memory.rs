//! Device memory: the host's, each allocation known.

use crate::{Ptr, store};
use parking_lot::Mutex;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const ALIGNMENT: usize = 1024;
/// Bytes on either side of an allocation that nobody may write.
const GUARD: usize = 4096;
const GUARD_BYTE: u8 = 0xa5;
const TOTAL: usize = 8 << 30;

/// Allocations, by their addresses: bytes of each.
static ALLOCATED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes + 2 * GUARD, ALIGNMENT).ok().filter(|_| bytes < TOTAL)
}

/// Whether so many bytes from an address on lie in one allocation.
pub(crate) fn holds(address: u64, bytes: u64) -> bool {
    let allocated = ALLOCATED.lock();
    allocated.range(..=address).next_back().is_some_and(|(begin, size)| address + bytes <= begin + *size as u64)
}

/// The first allocation whose surroundings were written.
pub(crate) fn spoiled() -> Option<String> {
    let allocated = ALLOCATED.lock();
    for (&address, &bytes) in allocated.iter() {
        for (side, from) in [("before", address as usize - GUARD), ("behind", address as usize + bytes)] {
            // SAFETY: a guard of a live allocation.
            let guard = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(from), GUARD) };
            if let Some(at) = guard.iter().position(|&byte| byte != GUARD_BYTE) {
                let away = if side == "before" { GUARD - at } else { at };
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
    /// Filled with ones, and surrounded by what nobody may write.
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
        let Some(layout) = layout(bytes) else { return OUT_OF_MEMORY };
        // SAFETY: the size is not 0.
        let begin = unsafe { alloc(layout) };
        if begin.is_null() {
            return OUT_OF_MEMORY;
        }
        // SAFETY: it has as many bytes.
        unsafe {
            begin.write_bytes(GUARD_BYTE, layout.size());
            begin.add(GUARD).write_bytes(0xff, bytes);
        }
        let first = begin.expose_provenance() + GUARD;
        ALLOCATED.lock().insert(first as u64, bytes);
        // SAFETY: the header's contract.
        unsafe { store(address, first as u64) }
    }

    /// Once.
    fn cuMemFree_v2(address: u64) -> c_int {
        let Some(bytes) = ALLOCATED.lock().remove(&address) else { return INVALID_VALUE };
        let Some(layout) = layout(bytes) else { return INVALID_VALUE };
        // SAFETY: it was allocated with this layout, and nobody else frees it.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(address as usize - GUARD), layout) };
        0
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
}
