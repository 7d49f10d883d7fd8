//! Modules, their kernels, and launches.

use crate::nvrtc::{self, MAGIC};
use crate::{Ptr, driver, memory, store};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

const INVALID_VALUE: c_int = 1;
const INVALID_IMAGE: c_int = 200;
const NO_BINARY_FOR_GPU: c_int = 209;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const LAUNCH_FAILED: c_int = 719;
const MAX_DYNAMIC_SHARED: c_int = 8;
const REGISTERS: c_int = 4;
/// Shared memory of a block without asking for more.
const SHARED_BYTES: u32 = 48 << 10;
const MOST_THREADS: u32 = 1024;

type OfThread = unsafe extern "C" fn(*mut Ptr);
type Run = unsafe extern "C" fn(
    OfThread,
    *const c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut Ptr,
    u64,
    *mut c_char,
    usize,
    Holds,
    TakeStack,
    KeepStack,
    *mut u64,
) -> c_int;
/// Whether bytes lie in an allocation.
type Holds = extern "C" fn(u64, u64) -> bool;
/// A stack that no launch uses, or null.
type TakeStack = extern "C" fn() -> Ptr;
/// Keeps a stack for later launches.
type KeepStack = extern "C" fn(Ptr);
/// A thread of the launch that runs has touched what is no memory. Comes back where none runs.
type Touched = unsafe extern "C" fn(*const c_void);

/// A library has one machine, which runs one launch at a time.
type Turn = Arc<Mutex<()>>;

struct Loaded {
    library: Library,
    turn: Turn,
}

#[derive(Clone)]
struct Function {
    module: usize,
    of_thread: OfThread,
    run: Run,
    touched: Touched,
    turn: Turn,
    shared_bytes: u32,
    /// Blocks that run together.
    together: u32,
}

static MODULES: Mutex<Vec<Option<Loaded>>> = Mutex::new(Vec::new());
static FUNCTIONS: Mutex<Vec<Function>> = Mutex::new(Vec::new());
/// Of libraries by their paths: what is loaded twice is there once.
static TURNS: Mutex<BTreeMap<String, Turn>> = Mutex::new(BTreeMap::new());
static LAUNCHES: AtomicU64 = AtomicU64::new(1);

/// Addresses of stacks that no launch uses.
static STACKS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

extern "C" fn take_stack() -> Ptr {
    STACKS.lock().pop().map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut)
}

extern "C" fn keep_stack(stack: Ptr) {
    STACKS.lock().push(stack.expose_provenance());
}

thread_local! {
    static FAILURE: RefCell<String> = const { RefCell::new(String::new()) };
    /// Boxes of tensors that the copy engine brought in, and copies of 16 bytes, in launches of this thread.
    static BOXES: Cell<u64> = const { Cell::new(0) };
    /// Of the launch that this thread runs.
    static RUNNING: Cell<Option<Touched>> = const { Cell::new(None) };
}

/// Once for the process: what touches no memory is told to the machine that runs, if one does; otherwise the process ends as it would have.
fn watch() {
    extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
        if let Some(touched) = RUNNING.get() {
            // SAFETY: the kernel's; a machine that runs goes on with its next thread, and does not come back.
            unsafe { touched((*info).si_addr()) };
        }
        // SAFETY: once the handler has returned, what it was called for happens again.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is called on the stack of the thread that it is for, and any number of times there.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
        }
    });
}

/// What the last launch of this thread that failed did.
pub(crate) fn failure() -> String {
    FAILURE.with_borrow(Clone::clone)
}

fn failed(why: String) -> c_int {
    FAILURE.set(why);
    LAUNCH_FAILED
}

/// Whether a device runs machine code of an architecture: its own, or an earlier one of the same generation; what has an `a` on the very device alone.
fn runs([major, minor]: [c_int; 2], architecture: &str) -> bool {
    let Some(number) = architecture.strip_prefix("sm_") else { return false };
    let own = number.strip_suffix('a');
    let Ok(number) = own.unwrap_or(number).parse::<c_int>() else { return false };
    number / 10 == major && if own.is_some() { number % 10 == minor } else { number % 10 <= minor }
}

fn handle(n: usize) -> Ptr {
    std::ptr::without_provenance_mut(n + 1)
}

exported! {
    /// Not a function of the driver: how many boxes of tensors the copy engine brought in, and copies of 16 bytes, in launches of this thread so far.
    fn emulated_boxes() -> u64 { BOXES.get() }

    /// Opens the library that was compiled.
    fn cuModuleLoadData(module: *mut Ptr, image: *const c_void) -> c_int {
        // SAFETY: the header's contract: code has more than four bytes; that of the compiler here ends with a zero.
        let begin = unsafe { image.cast::<[u8; 4]>().read() };
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) }.to_string_lossy().into_owned();
        let path = if begin == *MAGIC {
            let Some((architecture, path)) = text[MAGIC.len()..].split_once('\n') else { return INVALID_IMAGE };
            if !driver::current().is_some_and(|model| runs(model.capability, architecture)) {
                return NO_BINARY_FOR_GPU;
            }
            path.to_owned()
        } else {
            match nvrtc::program_of_ptx(&text) {
                Some(Ok(path)) => path.to_string_lossy().into_owned(),
                Some(Err(why)) => return failed(why),
                None => return INVALID_IMAGE,
            }
        };
        // SAFETY: the library was made here, and has no initialisers of note.
        let Ok(library) = (unsafe { Library::open(Some(Path::new(&path)), RTLD_NOW | RTLD_LOCAL) }) else { return INVALID_IMAGE };
        let turn = TURNS.lock().entry(path).or_default().clone();
        let mut modules = MODULES.lock();
        modules.push(Some(Loaded { library, turn }));
        // SAFETY: the header's contract.
        unsafe { store(module, handle(modules.len() - 1)) }
    }

    /// A kernel by its name.
    fn cuModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int {
        // SAFETY: the header's contract: a text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let [name, together] = ["", "together_"].map(|of| format!("emulated_{of}{name}"));
        let modules = MODULES.lock();
        let Some(Some(Loaded { library, turn })) = modules.get(module.addr().wrapping_sub(1)) else { return INVALID_HANDLE };
        // SAFETY: the types are those of `machine.cpp` and of what the compiler here writes behind kernels.
        let found = unsafe { (library.get::<OfThread>(name.as_bytes()), library.get::<Run>(b"emulated_run"), library.get::<Touched>(b"emulated_touched")) };
        // SAFETY: as above: a constant of that type.
        let together = unsafe { library.get::<*const c_uint>(together.as_bytes()).map(|at| at.read()) };
        let ((Ok(of_thread), Ok(run), Ok(touched)), Ok(together)) = (found, together) else { return NOT_FOUND };
        let mut functions = FUNCTIONS.lock();
        let (of_thread, run, touched, turn) = (*of_thread, *run, *touched, turn.clone());
        functions.push(Function { module: module.addr(), of_thread, run, touched, turn, shared_bytes: SHARED_BYTES, together });
        // SAFETY: the header's contract.
        unsafe { store(function, handle(functions.len() - 1)) }
    }

    /// Its kernels are gone.
    fn cuModuleUnload(module: Ptr) -> c_int {
        let Some(loaded) = MODULES.lock().get_mut(module.addr().wrapping_sub(1)).and_then(Option::take) else { return INVALID_HANDLE };
        FUNCTIONS.lock().iter_mut().filter(|f| f.module == module.addr()).for_each(|f| f.module = 0);
        drop(loaded);
        0
    }

    /// Registers are as many as a thread may have.
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _function: Ptr) -> c_int {
        // SAFETY: the header's contract.
        unsafe { store(value, if attribute == REGISTERS { 168 } else { 0 }) }
    }

    /// How much dynamic shared memory a kernel may be launched with.
    fn cuFuncSetAttribute(function: Ptr, attribute: c_int, value: c_int) -> c_int {
        let mut functions = FUNCTIONS.lock();
        let Some(found) = functions.get_mut(function.addr().wrapping_sub(1)) else { return INVALID_HANDLE };
        let most = driver::current().map_or(0, |model| model.shared_bytes);
        if attribute != MAX_DYNAMIC_SHARED || value.unsigned_abs() > most {
            return INVALID_VALUE;
        }
        found.shared_bytes = value.unsigned_abs();
        0
    }

    /// What the copy engine asks for: multiples of 16 bytes, boxes of 64 elements of two bytes, swizzled.
    fn cuTensorMapEncodeTiled(map: *mut c_void, dtype: c_int, rank: c_uint, address: u64, extents: *const u64, strides: *const u64, tile: *const u32,
                              steps: *const u32, interleave: c_int, swizzle: c_int, _promote: c_int, fill: c_int) -> c_int {
        if rank != 4 || dtype != 1 || interleave != 0 || swizzle != 3 || fill != 0 || !address.is_multiple_of(16) || !map.addr().is_multiple_of(64) {
            return INVALID_VALUE;
        }
        // SAFETY: the header's contract: as many numbers as the rank says, one stride less.
        let (extents, strides, tile, steps) =
            unsafe { (*extents.cast::<[u64; 4]>(), *strides.cast::<[u64; 3]>(), *tile.cast::<[u32; 4]>(), *steps.cast::<[u32; 4]>()) };
        let fits = strides.iter().all(|stride| stride.is_multiple_of(16) && *stride < 1 << 40 && *stride > 0);
        if !fits || steps != [1; 4] || extents.contains(&0) || tile[0] > 64 || tile.iter().any(|&n| n == 0 || n > 256) {
            return INVALID_VALUE;
        }
        // Two axes of one stride add up to one, of which no box takes what lies before an allocation: each row is looked at when it is copied.
        let last: u64 = extents[1..].iter().zip(strides).map(|(extent, stride)| (extent - 1) * stride).sum();
        if strides[0] != strides[2] && !memory::holds(address, last + 2 * extents[0]) {
            return INVALID_VALUE;
        }
        let [a, b, c, d] = extents;
        let [e, f, g] = strides;
        let [h, i, j, k] = tile.map(u64::from);
        // SAFETY: the header's contract: 128 bytes.
        unsafe { store(map.cast::<[u64; 16]>(), [address, a, b, c, d, e, f, g, h, i, j, k, 0, 0, 0, 0]) }
    }

    /// Runs it to its end.
    fn cuLaunchKernel(function: Ptr, x: c_uint, y: c_uint, z: c_uint, threads: c_uint, _v: c_uint, _w: c_uint, shared: c_uint, _stream: Ptr,
                      arguments: *mut Ptr, _extra: *mut Ptr) -> c_int {
        let found = FUNCTIONS.lock().get(function.addr().wrapping_sub(1)).filter(|f| f.module != 0).cloned();
        let Some(found) = found else { return INVALID_HANDLE };
        if shared > found.shared_bytes || threads == 0 || threads > MOST_THREADS || !threads.is_multiple_of(32) || !x.is_multiple_of(found.together) || x == 0 || y == 0 || z == 0 {
            return INVALID_VALUE;
        }
        let seed = LAUNCHES.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (blocks, mut text, mut boxes) = ([x, y, z], [0; 1024], 0);
        let _turn = found.turn.lock();
        watch();
        RUNNING.set(Some(found.touched));
        // SAFETY: the header's contract for the arguments; the rest is live. A library that runs is not unloaded, as a driver's caller knows.
        let status = unsafe { (found.run)(found.of_thread, blocks.as_ptr(), found.together, threads, shared, arguments, seed, text.as_mut_ptr(), text.len(), memory::holds, take_stack, keep_stack, &raw mut boxes) };
        RUNNING.set(None);
        BOXES.set(BOXES.get() + boxes);
        if status != 0 {
            // SAFETY: the machine writes a text that ends with a zero.
            return failed(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned());
        }
        memory::spoiled().map_or(0, failed)
    }
}
