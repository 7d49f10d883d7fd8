#![doc = include_str!("../README.md")]
//!
//! | file | contents |
//! |---|---|
//! | `driver`, `device` | the process's driver; a GPU, and how a thread enters its context |
//! | `stream`, `memory` | streams and events; owned device memory |
//! | `nvrtc` | the run-time compiler |
//! | `nccl`, `communicator` | NCCL: its version, unique ids and error texts; one rank of a group |
//! | `kernel`, `module`, `tensor_map` | code that stays loaded, and code that can be unloaded; tensor maps for TMA |
//! | `submission` | the work that one call submits to a stream |
//! | `capture` | stream capture and CUDA graphs |
//! | `lane`, `retire`, `room` | ends of submitted work; resources that outlive their owner; workspace by thread and stream |
//! | `cudarc` | slices of cudarc as memory of one call (a feature) |
//! | `load` | loading shared libraries and their functions |
//!
//! Unsafe code for all of this is only in this crate. Raw addresses of device memory enter through functions that are `unsafe` for the caller and
//! state their contract.
#![allow(unsafe_code)]

mod capture;
mod communicator;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub mod cudarc;
mod device;
mod driver;
mod error;
mod kernel;
mod lane;
pub mod load;
mod memory;
mod module;
mod nccl;
mod nvrtc;
mod retire;
mod room;
mod stream;
mod submission;
mod tensor_map;

pub use capture::Captured;
pub use communicator::{Communicator, Rank};
pub use device::{Device, Entered};
pub use driver::{Driver, Ptr, absolute, relaxed};
pub use error::{Error, Searched};
pub use kernel::Kernel;
pub use lane::Lane;
pub use memory::{Buffer, DeviceSlice, Element};
pub use module::{Entry, Launch, Module};
pub use nccl::{Nccl, UniqueId};
pub use nvrtc::{Compiled, Nvrtc};
pub use stream::{Event, RawStream, Stream};
pub use submission::Submission;
pub use tensor_map::{TensorMap, Tiled};
