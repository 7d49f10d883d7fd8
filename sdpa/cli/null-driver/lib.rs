//! A stand-in for `libcuda.so.1`: enough for cuDNN to plan on a machine without a GPU. It cannot run anything.
//!
//! The library `libcudnn_engines_runtime_compiled.so.9` links against the driver and looks up more functions by name. While it makes a plan it calls few of
//! them, and accepts made-up handles for compiled kernels. `cuInit` reports that there is no device, so a search for one finds none.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{c_char, c_int, c_void};

const NO_DEVICE: c_int = 100;
const CUDA_VERSION: c_int = 13000;

macro_rules! accepted {
    ($($name:ident)*) => {
        $(
            /// Does nothing and returns success.
            // SAFETY: the symbol is that of a driver function, which this library replaces on purpose; the arguments are not accessed.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                0
            }
        )*
    };
}

accepted! {
    cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuStreamGetCtx
    cuLinkCreate cuLinkAddData cuLinkComplete cuLinkDestroy cuLaunchKernel cuLaunchCooperativeKernel cuLaunchKernelEx
    cuDeviceGet cuDeviceGetAttribute cuLibraryLoadFromFile cuLibraryUnload cuKernelSetAttribute cuKernelGetFunction
    cuOccupancyMaxPotentialClusterSize cuModuleLoadData cuModuleLoadDataEx cuModuleGetFunction cuModuleUnload
    cuFuncSetAttribute cuFuncGetAttribute cuTensorMapEncodeTiled cuTensorMapEncodeIm2col
}

/// Writes through a pointer unless it is null.
///
/// # Safety
/// `to` is null or points to a live value.
unsafe fn store<T>(to: *mut T, value: T) -> c_int {
    if !to.is_null() {
        // SAFETY: the caller guarantees that the pointer is null or valid.
        unsafe { to.write(value) };
    }
    0
}

/// Reports that there is no device.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> c_int {
    NO_DEVICE
}

/// Returns a version that every wheel accepts.
///
/// # Safety
/// `version` points to an integer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(version, CUDA_VERSION) }
}

/// Returns one device, because cuDNN stops without one.
///
/// # Safety
/// `count` points to an integer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(count, 1) }
}

/// Returns no context.
///
/// # Safety
/// `context` points to a pointer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(context, std::ptr::null_mut()) }
}

const NAME: &std::ffi::CStr = c"CUDA_ERROR_NO_DEVICE";
const TEXT: &std::ffi::CStr = c"a stand-in for the driver: there is no device";

/// Returns one name for every error.
///
/// # Safety
/// `name` points to a pointer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_error: c_int, name: *mut *const c_char) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(name, NAME.as_ptr()) }
}

/// Returns one text for every error.
///
/// # Safety
/// `text` points to a pointer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_error: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(text, TEXT.as_ptr()) }
}

/// Returns a made-up library handle.
///
/// # Safety
/// `library` points to a pointer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLibraryLoadData(library: *mut *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(library, std::ptr::without_provenance_mut(0x10)) }
}

/// Returns a made-up kernel handle.
///
/// # Safety
/// `kernel` points to a pointer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLibraryGetKernel(kernel: *mut *mut c_void) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(kernel, std::ptr::without_provenance_mut(0x20)) }
}

/// Returns zero for every attribute.
///
/// # Safety
/// `value` points to an integer.
// SAFETY: the symbol is that of a driver function, which this library replaces on purpose.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuKernelGetAttribute(value: *mut c_int) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { store(value, 0) }
}
