//! The fence: the only unsafe code of this crate, and everything that calls Apple's interface.
//!
//! [`Gpu`] is a device, a queue and the kernels that were built on it; [`Built`] a pass whose kernels are. Two ways to run one:
//! [`Ready::run`](crate::Ready::run) takes host memory, encodes on a queue of the GPU's own, waits, and tells the GPU's times;
//! [`Built::encode`] adds the dispatches to a command buffer of the caller's, over the caller's buffers, and neither commits nor waits.
//!
//! What crosses inwards: plans, and bytes whose lengths have been held against what the kernels reach. Raw buffers enter through
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

/// A buffer that is held.
pub(crate) type Buffer = Retained<ProtocolObject<dyn MTLBuffer>>;
