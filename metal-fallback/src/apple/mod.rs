//! The only unsafe code of this crate, and all calls of Apple's interface.
//!
//! [`Gpu`] is a device, a queue and its built kernels; [`Built`] is a pass with built kernels. There are two ways to run one.
//! [`Ready::run`](crate::Ready::run) takes host memory, encodes on the GPU's own queue, waits, and returns the GPU's times. [`Built::encode`] adds
//! the dispatches to the caller's command buffer over the caller's buffers, and neither commits nor waits.
//!
//! Other modules pass in plans, and bytes whose lengths were compared with the bytes that the kernels access. Raw buffers enter through
//! [`Built::encode`], which is unsafe for the caller.
#![allow(unsafe_code)]

mod buffer;
mod built;
mod encode;
mod gpu;
mod pipeline;
#[cfg(test)]
mod tests;

pub use built::Built;
pub use encode::{Argument, Kept};
pub use gpu::{Gpu, PIPELINES};

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::MTLBuffer;

/// A retained buffer.
pub(crate) type Buffer = Retained<ProtocolObject<dyn MTLBuffer>>;
