//! Kernels for NVIDIA GPUs without one: an executor over the library `tests/emulated`, which compiles them for the CPU and runs them.
#![allow(unsafe_code)]

use crate::edits::Edit;
use crate::msl::Toolchain;
use sdpa::DevicePrepared;
use sdpa::cuda::{CudaExecutor, CudaOptions, CudaPlan, Family};
use sdpa::cudnn::{DeviceCall, DeviceSlice};
use sdpa_driver::{Communicator, Stream};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::Arc;

const FILE: &str = "libemulated.so";

/// Where the library is: beside this program or one folder above, as cargo lays them out.
///
/// # Errors
/// That it is not built.
pub fn find() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let file = program.ancestors().skip(1).take(2).map(|folder| folder.join(FILE)).find(|file| file.exists());
    file.ok_or_else(|| "the emulation of CUDA is not built; cargo build --package emulated builds it".to_owned())
}

/// An executor whose driver and compiler are the library's, on its device of compute capability 9.0.
///
/// # Errors
/// That it is not built, that there is no clang.
pub fn executor() -> Result<CudaExecutor, String> {
    executor_on(Emulated::H200, None)
}

/// The devices of the library, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulated {
    /// Compute capability 9.0.
    H200 = 0,
    /// 8.0.
    A100 = 1,
    /// 8.9.
    L40 = 2,
}

/// An executor on one of the devices, that asks one family of kernels or all.
///
/// # Errors
/// As [`executor`].
pub fn executor_on(device: Emulated, family: Option<Family>) -> Result<CudaExecutor, String> {
    executor_with(device, CudaOptions::default().with_family(family))
}

/// An executor on one of the devices, with further options.
///
/// # Errors
/// Fails if clang or the emulation library is missing, or if the executor cannot be created.
pub fn executor_with(device: Emulated, options: CudaOptions) -> Result<CudaExecutor, String> {
    Toolchain::find()?;
    let file = find()?;
    let options = options.with_driver(file.clone()).with_nvrtc(file).with_ordinal(device as u32);
    CudaExecutor::new(options).map_err(|e| e.to_string())
}

/// A call of a pass over memory of the emulated driver. Safe here: a launch fails where it touches what no allocation has.
///
/// # Errors
/// As [`DevicePrepared::submit`], and what the machine finds wrong.
pub fn submit(
    ready: &dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>,
    stream: &Stream,
    call: &DeviceCall<'_>,
) -> Result<(), sdpa::Error> {
    // SAFETY: the stream is one of the emulated driver, which looks at every address.
    unsafe { ready.submit(stream, call) }
}

/// The same, and the pass around the blocks that the call's masks leave.
///
/// # Errors
/// As [`submit`].
pub fn with_block_map(plan: &Arc<CudaPlan>, stream: &Stream, call: &DeviceCall<'_>) -> Result<Arc<CudaPlan>, sdpa::cuda::Error> {
    // SAFETY: as above.
    unsafe { plan.with_block_map(stream, call) }
}

/// An exchange of memory of the emulated driver. Safe here: the emulation of NCCL fails where no allocation has the memory, and has read and written it when this returns.
///
/// # Errors
/// As [`Communicator::exchange`].
pub fn exchange(
    communicator: &mut Communicator,
    stream: &Stream,
    sends: &[(usize, DeviceSlice)],
    receives: &[(usize, DeviceSlice)],
) -> Result<(), sdpa_driver::Error> {
    // SAFETY: as above; buffers live longer than this call.
    unsafe { communicator.exchange(stream, sends, receives) }
}

/// Makes transfers of this thread as late as streams allow, or immediate again: late ones read and write memory when something waits for them.
///
/// # Panics
/// Panics if the library is not built.
pub fn late_transfers(on: bool) {
    type Late = unsafe extern "C" fn(bool) -> c_int;
    let library = library();
    // SAFETY: the function is its own, of this type.
    let late: libloading::Symbol<'_, Late> = unsafe { library.get(b"emulated_late") }.expect("it has the function");
    // SAFETY: it takes any value.
    unsafe { late(on) };
}

/// How many boxes of tensors the copy engine brought in, and copies of 16 bytes that threads asked for, in launches of this thread so far.
///
/// # Panics
/// Where the library is not built.
pub fn boxes() -> u64 {
    type Boxes = unsafe extern "C" fn() -> u64;
    let library = library();
    // SAFETY: the function is its own, of this type.
    let boxes: libloading::Symbol<'_, Boxes> = unsafe { library.get(b"emulated_boxes") }.expect("it has the function");
    // SAFETY: it takes nothing.
    unsafe { boxes() }
}

/// The library, which runs nothing when it is loaded.
fn library() -> libloading::Library {
    // SAFETY: it has no initialisers.
    unsafe { libloading::Library::new(find().expect("the library is built")) }.expect("it loads")
}

/// Runs something while the kernels that this thread compiles have the second text in place of the first, which one at least must hold, and none twice.
///
/// # Panics
/// Where the library is not built; where no kernel that was compiled holds the text.
pub fn faulty<T>(fault: [&str; 2], run: impl FnOnce() -> T) -> T {
    let (result, places) = with_fault(fault, run);
    assert!(places > 0, "no kernel has {}", fault[0]);
    result
}

/// As [`faulty`], and how many texts had the fault, which may be none.
fn with_fault<T>(fault: [&str; 2], run: impl FnOnce() -> T) -> (T, i32) {
    type Fault = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
    let texts = fault.map(|text| CString::new(text).expect("texts without zeros"));
    let library = library();
    // SAFETY: the function is its own, of this type.
    let set: libloading::Symbol<'_, Fault> = unsafe { library.get(b"emulated_fault") }.expect("it has the function");
    // SAFETY: the texts end with zeros; no pointer is kept.
    unsafe { set(texts[0].as_ptr(), texts[1].as_ptr()) };
    let result = run();
    // SAFETY: as above.
    let places = unsafe { set(std::ptr::null(), std::ptr::null()) };
    (result, places)
}

/// Runs something while the kernels that this thread compiles have an edit. The closure it receives returns for how many texts the edit made other machine code since it
/// was called last.
///
/// # Panics
/// Where the library is not built.
pub fn edited<T>(edit: &Edit, run: impl FnOnce(&dyn Fn() -> i32) -> T) -> T {
    type Different = unsafe extern "C" fn(bool) -> c_int;
    // As the library has files: what says how often loops are unrolled is left out.
    let as_compiled = |text: &String| {
        let lines = text.lines().map(|line| if line.trim_start().starts_with("#pragma unroll") { "" } else { line });
        lines.map(|line| format!("{line}\n")).collect::<String>()
    };
    let texts = edit.texts().each_ref().map(as_compiled);
    let library = library();
    // SAFETY: the function is its own, of this type.
    let different: libloading::Symbol<'_, Different> = unsafe { library.get(b"emulated_different") }.expect("it has the function");
    // SAFETY: it reads and sets numbers of this thread.
    let count = |on| unsafe { different(on) };
    count(true);
    let (result, _) = with_fault([&texts[0], &texts[1]], || run(&|| count(true)));
    count(false);
    result
}

/// Runs something, and returns the lines of kernels' files that the preprocessor left of the texts that this thread compiled, each as `file:line`.
///
/// # Panics
/// Where the library is not built.
pub fn lines<T>(run: impl FnOnce() -> T) -> (T, BTreeSet<String>) {
    type Lines = unsafe extern "C" fn(bool) -> *const c_char;
    let library = library();
    // SAFETY: the function is its own, of this type.
    let lines: libloading::Symbol<'_, Lines> = unsafe { library.get(b"emulated_lines") }.expect("it has the function");
    // SAFETY: what it returns is not read.
    unsafe { lines(true) };
    let result = run();
    // SAFETY: a text that ends with a zero, until the next call of this thread.
    let told = unsafe { CStr::from_ptr(lines(false)) }.to_string_lossy().into_owned();
    (result, told.lines().map(str::to_owned).collect())
}
