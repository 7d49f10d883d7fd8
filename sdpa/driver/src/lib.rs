#![doc = include_str!("../README.md")]
//!
//! | file | what it has |
//! |---|---|
//! | `driver`, `device` | the driver of the process; a GPU, and how a thread enters its context |
//! | `stream`, `memory` | streams and points on them; owned device memory |
//! | `nvrtc` | the run-time compiler |
//! | `kernel`, `module`, `tensor_map` | code on a device: for as long as the process lives, or until it is dropped; tensor maps for TMA |
//! | `submission` | what one call submits to a stream |
//! | `capture` | streams that are captured, and the graphs that come of it |
//! | `lane`, `retire`, `room` | where submitted work ends; what outlives its owner; workspace by thread and stream |
//! | `load` | opening shared libraries, and looking functions up |
//!
//! The whole crate is a fence: unsafe code for these things is here and nowhere else. Raw addresses of device memory enter through functions that are
//! `unsafe` for the caller, with the contract written on them.
#![allow(unsafe_code)]

mod capture;
mod device;
mod driver;
mod error;
mod kernel;
mod lane;
pub mod load;
mod memory;
mod module;
mod nvrtc;
mod retire;
mod room;
mod stream;
mod submission;
mod tensor_map;

pub use capture::Captured;
pub use device::{Device, Entered};
pub use driver::{Driver, Ptr, absolute, relaxed};
pub use error::{Error, Searched};
pub use kernel::Kernel;
pub use lane::Lane;
pub use memory::{Buffer, DeviceSlice, Element};
pub use module::{Entry, Launch, Module};
pub use nvrtc::{Compiled, Nvrtc};
pub use stream::{Event, RawStream, Stream};
pub use submission::Submission;
pub use tensor_map::{TensorMap, Tiled};
