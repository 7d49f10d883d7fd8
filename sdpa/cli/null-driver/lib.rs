//! A stand-in for `libcuda.so.1`: enough for cuDNN to plan on a machine without a GPU. Nothing can run on it.
//!
//! The library `libcudnn_engines_runtime_compiled.so.9` links against the driver and looks more functions up by name. While
//! a plan is made it calls few of them, and takes made-up handles for compiled kernels. `cuInit` says that there is no
//! device, so whoever looks for one finds none.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{c_char, c_int, c_void};

const NO_DEVICE: c_int = 100;
const CUDA_VERSION: c_int = 13000;

macro_rules! accepted {
    ($($name:ident)*) => {
        $(
            /// Says yes and does nothing.
            // SAFETY: the name is the driver's own, which this library stands in for; arguments are not touched.
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

/// Writes through a pointer that the caller vouches for.
///
/// # Safety
/// `to` is null or points to a live value.
unsafe fn store<T>(to: *mut T, value: T) -> c_int {
    if !to.is_null() {
        // SAFETY: the caller's.
        unsafe { to.write(value) };
    }
    0
}

/// There is no device.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> c_int {
    NO_DEVICE
}

/// A version that every wheel accepts.
///
/// # Safety
/// `version` points to an integer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(version, CUDA_VERSION) }
}

/// One, or cuDNN does not go on.
///
/// # Safety
/// `count` points to an integer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(count, 1) }
}

/// No context.
///
/// # Safety
/// `context` points to a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(context, std::ptr::null_mut()) }
}

const NAME: &std::ffi::CStr = c"CUDA_ERROR_NO_DEVICE";
const TEXT: &std::ffi::CStr = c"a stand-in for the driver: there is no device";

/// One name for every error.
///
/// # Safety
/// `name` points to a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_error: c_int, name: *mut *const c_char) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(name, NAME.as_ptr()) }
}

/// One text for every error.
///
/// # Safety
/// `text` points to a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_error: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(text, TEXT.as_ptr()) }
}

/// A made-up library.
///
/// # Safety
/// `library` points to a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLibraryLoadData(library: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(library, std::ptr::without_provenance_mut(0x10)) }
}

/// A made-up kernel.
///
/// # Safety
/// `kernel` points to a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLibraryGetKernel(kernel: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(kernel, std::ptr::without_provenance_mut(0x20)) }
}

/// Zero.
///
/// # Safety
/// `value` points to an integer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuKernelGetAttribute(value: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe { store(value, 0) }
}
