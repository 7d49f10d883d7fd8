#![doc = include_str!("../README.md")]
//!
//! # Two doors
//!
//! [`Executor::prepare`](sdpa_core::Executor::prepare) takes host memory and is what the command line and
//! the tests use; [`CudnnExecutor::attention`] gives the plans to callers with device memory of their own, and `sdpa_nvidia::cudarc` takes
//! cudarc's streams and slices.

mod bind;
mod call;
pub mod cost;
mod error;
mod executor;
mod fact;
mod files;
pub mod guard;
pub mod kernels;
pub mod ledger;
pub mod lower;
mod model;
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
pub use lower::dtype;
pub use plan::{Pieces, PlanOptions, Planned};
pub use raw::{DeviceBackward, DeviceCall, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
pub use replay::Replay;
pub use sdpa_core::device::with_defaults;
