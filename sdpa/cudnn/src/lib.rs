//! Attention on NVIDIA GPUs through cuDNN: one fused kernel per problem, plans kept in a bounded cache and in files.
//!
//! [`CudnnExecutor`] has two doors. [`Executor::prepare`](sdpa_core::Executor::prepare) takes host memory and is what the command line and
//! the tests use; [`CudnnExecutor::attention`] gives the plans to callers with device memory of their own, and `cudarc` (a feature) takes
//! cudarc's streams and slices.

mod bind;
mod call;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub mod cudarc;
mod error;
mod executor;
mod files;
pub mod guard;
mod host;
pub mod kernels;
pub mod lower;
mod named;
mod order;
pub mod pieces;
pub mod plan;
pub mod planfile;
pub mod portable;
pub mod quirks;
pub mod raw;
mod replay;
pub mod schedule;
mod tune;
mod used;

// What the device tier takes and gives, so that a caller needs no other crate.
pub use cudnn_graph::{Buffer, Device, DeviceSlice, Error as BackendError, Handle, Library, Search, Stream};
pub use error::Error;
pub use executor::{CudnnExecutor, CudnnOptions, Plans};
pub use files::AttachError;
pub use host::CudnnPrepared;
pub use lower::dtype;
pub use plan::{Pieces, PlanOptions, Planned};
pub use raw::{DeviceBackward, DeviceCall, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
pub use replay::Replay;
pub use sdpa_core::device::with_defaults;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
