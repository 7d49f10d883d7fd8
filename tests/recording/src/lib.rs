//! A stand-in for `libcudnn.so.9` and for `libcuda.so.1` at once, on a machine without a GPU: it says that it is cuDNN 9.19.0 on an
//! H200, plans whatever it is asked for, and where a plan is executed writes down what was submitted. Nothing is computed.
//!
//! It is stricter than the libraries that it stands in for. Device memory is made up, but known: what is submitted has to lie in
//! allocations, be aligned as the tensors of the graph say, and name exactly the tensors of the plan; the plan's workspace may overlap
//! none of them. Descriptors are followed after their end, and calls of the driver need a current context.
//!
//! Captures are invalidated as by the real driver, failures can be asked for, and there are two devices.
//!
//! The functions whose names begin with `recording_` are for tests.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names are NVIDIA's")]
#![allow(clippy::missing_safety_doc, reason = "arguments are those of NVIDIA's headers")]

/// Declares functions of a C interface.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {
        $(
            $(#[$doc])*
            // SAFETY: the names are those of the libraries that this one stands in for, or begin with its own.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret $body
        )*
    };
}

pub mod cudnn;
mod descriptor;
pub mod driver;
pub mod entry;
mod graph;
pub mod kernel;
mod memory;
pub mod record;
pub mod timeline;

/// Writes through a pointer.
///
/// # Safety
/// `to` is null or points to a live value.
unsafe fn store<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's.
        unsafe { to.write(value) };
    }
}
