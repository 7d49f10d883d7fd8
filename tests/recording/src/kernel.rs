//! Kernels from PTX: their names and how many parameters each has. A launch is recorded with its arguments. Of machine code nothing is read: whatever kernel is asked for
//! is there, and takes four maps of tensors first, which are as `cuTensorMapEncodeTiled` here writes them.

use crate::driver::in_context;
use crate::entry::{LAUNCH, TENSORS};
use crate::timeline::{self, Work};
use crate::{memory, record, store};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type Ptr = *mut c_void;

const INVALID_PTX: c_int = 218;
const NOT_FOUND: c_int = 500;
const INVALID_HANDLE: c_int = 400;

/// A kernel of a module.
struct Function {
    module: usize,
    name: String,
    parameters: usize,
    handle: usize,
    /// Dynamic shared memory that it may be launched with.
    shared_bytes: u32,
}

/// Modules of machine code.
static CODE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A map of a tensor: 128 bytes, as kernels take them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Map {
    address: u64,
    /// From the first byte to past the last.
    bytes: u64,
    rest: [u64; 14],
}

/// The kernel of machine code that takes maps, and how many.
const WITH_MAPS: &str = "attention_forward";
const MAPS: usize = 4;
const RANK: usize = 4;
const INVALID_VALUE: c_int = 1;
const MAX_DYNAMIC_SHARED: c_int = 8;
/// Shared memory of a block without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

static FUNCTIONS: Mutex<Vec<Function>> = Mutex::new(Vec::new());

/// Names of kernels, each with its number of parameters.
fn entries(ptx: &str) -> impl Iterator<Item = (&str, usize)> {
    ptx.split(".entry ").skip(1).filter_map(|text| {
        let (name, rest) = text.split_once('(')?;
        let (parameters, _) = rest.split_once(')')?;
        Some((name.trim(), parameters.matches(".param").count()))
    })
}

exported! {
    /// Keeps the names of the kernels.
    fn cuModuleLoadData(module: *mut Ptr, image: *const c_void) -> c_int {
        crate::driver::relaxed(|| {
            // SAFETY: the header's contract: code has more than four bytes, and a text ends with a zero.
            if unsafe { image.cast::<[u8; 4]>().read() } == *b"\x7fELF" {
                let made = timeline::made_up();
                CODE.lock().push(made);
                // SAFETY: the header's contract.
                unsafe { store(module, std::ptr::without_provenance_mut(made)) };
                return 0;
            }
            // SAFETY: the header's contract: a text that ends with a zero.
            let Ok(ptx) = unsafe { CStr::from_ptr(image.cast()) }.to_str() else { return INVALID_PTX };
            let made = timeline::made_up();
            let mut functions = FUNCTIONS.lock();
            let before = functions.len();
            for (name, parameters) in entries(ptx) {
                functions.push(Function { module: made, name: name.to_owned(), parameters, handle: timeline::made_up(), shared_bytes: SHARED_BYTES });
            }
            if functions.len() == before {
                return INVALID_PTX;
            }
            // SAFETY: the header's contract.
            unsafe { store(module, std::ptr::without_provenance_mut(made)) };
            0
        })
    }

    /// A kernel by its name.
    fn cuModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int {
        in_context(|| {
            // SAFETY: the header's contract: a text that ends with a zero.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            let mut functions = FUNCTIONS.lock();
            if CODE.lock().contains(&module.addr()) {
                let handle = timeline::made_up();
                functions.push(Function { module: module.addr(), name: name.into_owned(), parameters: 0, handle, shared_bytes: SHARED_BYTES });
                // SAFETY: the header's contract.
                unsafe { store(function, std::ptr::without_provenance_mut(handle)) };
                return 0;
            }
            let Some(found) = functions.iter().find(|f| f.module == module.addr() && f.name == name) else { return NOT_FOUND };
            // SAFETY: the header's contract.
            unsafe { store(function, std::ptr::without_provenance_mut(found.handle)) };
            0
        })
    }

    /// Its kernels are gone.
    fn cuModuleUnload(module: Ptr) -> c_int {
        crate::driver::relaxed(|| {
            FUNCTIONS.lock().retain(|f| f.module != module.addr());
            CODE.lock().retain(|code| *code != module.addr());
            0
        })
    }

    /// Of a kernel that is loaded, whatever is asked.
    fn cuFuncGetAttribute(value: *mut c_int, _attribute: c_int, function: Ptr) -> c_int {
        if !FUNCTIONS.lock().iter().any(|f| f.handle == function.addr()) {
            return INVALID_HANDLE;
        }
        // SAFETY: the header's contract.
        unsafe { store(value, 0) };
        0
    }

    /// How much dynamic shared memory a kernel may be launched with.
    fn cuFuncSetAttribute(function: Ptr, attribute: c_int, value: c_int) -> c_int {
        let mut functions = FUNCTIONS.lock();
        let Some(found) = functions.iter_mut().find(|f| f.handle == function.addr()) else { return INVALID_HANDLE };
        if attribute != MAX_DYNAMIC_SHARED {
            return INVALID_VALUE;
        }
        found.shared_bytes = value.unsigned_abs();
        0
    }

    /// What the copy engine asks for: multiples of 16 bytes, boxes whose rows are as long as the swizzle at most.
    fn cuTensorMapEncodeTiled(map: *mut c_void, _dtype: c_int, rank: c_uint, address: u64, extents: *const u64, strides: *const u64, tile: *const u32,
                              _steps: *const u32, _interleave: c_int, _swizzle: c_int, _promote: c_int, _fill: c_int) -> c_int {
        in_context(|| {
            if rank as usize != RANK || !address.is_multiple_of(16) || address == 0 || !map.addr().is_multiple_of(64) {
                return INVALID_VALUE;
            }
            // SAFETY: the header's contract: as many numbers as the rank says, one stride less.
            let (extents, strides, tile) =
                unsafe { (*extents.cast::<[u64; RANK]>(), *strides.cast::<[u64; RANK - 1]>(), *tile.cast::<[u32; RANK]>()) };
            let fits = strides.iter().all(|stride| stride.is_multiple_of(16) && *stride < 1 << 40 && *stride > 0);
            if !fits || extents.contains(&0) || tile[0] > 64 || tile.iter().any(|&n| n == 0 || n > 256) {
                return INVALID_VALUE;
            }
            let last: u64 = extents[1..].iter().zip(strides).map(|(extent, stride)| (extent - 1) * stride).sum();
            // Two axes of one stride add up to one, which begins before the tensor by as many rows as a box has.
            let before = if strides[0] == strides[2] && extents[3] > 1 { extents[1] * strides[0] } else { 0 };
            let (address, last) = (address + before, last - before);
            let rest = [extents[0], extents[1], extents[2], extents[3], strides[0], strides[1], strides[2], u64::from(tile[1]), 0, 0, 0, 0, 0, 0];
            // SAFETY: the header's contract: 128 bytes.
            unsafe { store(map.cast(), Map { address, bytes: last + 2 * extents[0], rest }) };
            0
        })
    }

    /// Recorded, with its arguments, which are all of 64 bits; of machine code, with the addresses of its maps, each of which lies in an allocation.
    fn cuLaunchKernel(function: Ptr, blocks: c_uint, _y: c_uint, _z: c_uint, threads: c_uint, _v: c_uint, _w: c_uint, shared: c_uint,
                      stream: Ptr, arguments: *mut Ptr, _extra: *mut Ptr) -> c_int {
        in_context(|| {
            let functions = FUNCTIONS.lock();
            let Some(found) = functions.iter().find(|f| f.handle == function.addr()) else { return INVALID_HANDLE };
            if shared > found.shared_bytes {
                return INVALID_VALUE;
            }
            let mut given = [0; TENSORS];
            if CODE.lock().contains(&found.module) && found.name == WITH_MAPS {
                for (n, to) in given.iter_mut().take(MAPS).enumerate() {
                    // SAFETY: the header's contract: a pointer to each argument, the first of which are maps.
                    let map = unsafe { arguments.add(n).read().cast::<Map>().read() };
                    if !memory::holds(map.address, map.bytes) {
                        return INVALID_VALUE;
                    }
                    *to = map.address;
                }
            }
            for (n, to) in given.iter_mut().take(found.parameters).enumerate() {
                // SAFETY: the header's contract: a pointer to each argument.
                *to = unsafe { arguments.add(n).read().cast::<u64>().read() };
            }
            let reached = given.into_iter().filter(|&address| memory::holds(address, 1)).collect();
            match timeline::submit(stream.addr(), Work { plan: 0, memory: reached }) {
                Ok(true) => record::write(|entry| {
                    (entry.what, entry.stream, entry.tensors) = (LAUNCH, stream.addr() as u64, found.parameters as u32);
                    (entry.to, entry.from, entry.bytes) = (0, u64::from(blocks), u64::from(threads));
                    entry.pointers = given;
                }),
                Ok(false) => {}
                Err(code) => return code,
            }
            0
        })
    }
}
