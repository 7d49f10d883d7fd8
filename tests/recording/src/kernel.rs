//! Kernels from PTX: their names and how many parameters each has. A launch is recorded with its arguments.

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
}

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
            // SAFETY: the header's contract: a text that ends with a zero.
            let Ok(ptx) = unsafe { CStr::from_ptr(image.cast()) }.to_str() else { return INVALID_PTX };
            let made = timeline::made_up();
            let mut functions = FUNCTIONS.lock();
            let before = functions.len();
            for (name, parameters) in entries(ptx) {
                functions.push(Function { module: made, name: name.to_owned(), parameters, handle: timeline::made_up() });
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
            let functions = FUNCTIONS.lock();
            let Some(found) = functions.iter().find(|f| f.module == module.addr() && f.name == name) else { return NOT_FOUND };
            // SAFETY: the header's contract.
            unsafe { store(function, std::ptr::without_provenance_mut(found.handle)) };
            0
        })
    }

    /// Recorded, with its arguments, which are all of 64 bits.
    fn cuLaunchKernel(function: Ptr, blocks: c_uint, _y: c_uint, _z: c_uint, threads: c_uint, _v: c_uint, _w: c_uint, _shared: c_uint,
                      stream: Ptr, arguments: *mut Ptr, _extra: *mut Ptr) -> c_int {
        in_context(|| {
            let functions = FUNCTIONS.lock();
            let Some(found) = functions.iter().find(|f| f.handle == function.addr()) else { return INVALID_HANDLE };
            let mut given = [0; TENSORS];
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
