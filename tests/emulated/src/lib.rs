//! A stand-in for `libcuda.so.1`, for NVRTC and for NCCL at once, on a machine without a GPU: CUDA kernels of this project are compiled for the CPU by clang, and
//! launches run them, thread by thread, over memory that is the host's.
//!
//! What kernels ask of the hardware (the copy engine, the matrix units, barriers, shuffles) stands in their pieces `ptx`, `tma`, `wgmma`, which are
//! replaced by those of `machine/`; everything else is compiled as it is. A launch that does what no GPU would allow, or that never ends, fails with the
//! reason, as a call of the driver does.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names are NVIDIA's")]
#![allow(clippy::missing_safety_doc, reason = "arguments are those of NVIDIA's headers")]

/// Declares functions of a C interface.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {
        $(
            $(#[$doc])*
            // SAFETY: the names are those of the libraries that this one stands in for.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret $body
        )*
    };
}

pub mod driver;
pub mod kernel;
pub mod memory;
pub mod nccl;
pub mod nvrtc;

type Ptr = *mut std::ffi::c_void;

/// Writes through a pointer.
///
/// # Safety
/// `to` is null or points to a live value.
unsafe fn store<T>(to: *mut T, value: T) -> i32 {
    if !to.is_null() {
        // SAFETY: the caller's.
        unsafe { to.write(value) };
    }
    0
}
