#![doc = include_str!("../README.md")]
//!
//! # Two entry points
//!
//! [`Executor::prepare`](sdpa_core::Executor::prepare) takes host memory; the command line and the tests use it. [`CudnnExecutor::attention`] returns
//! plans to callers with device memory of their own, and `sdpa_nvidia::cudarc` takes cudarc's streams and slices.
//!
//! Modules that the documentation hides (`lower`, `schedule`, …) turn a problem into cuDNN graphs and plans. The command line and the tests of the
//! workspace use them; they may change in any release.

mod bind;
mod call;
#[doc(hidden)]
pub mod cost;
mod engine_order;
mod error;
mod executor;
mod fact;
mod files;
mod keep_alive;
#[doc(hidden)]
#[doc(hidden)]
pub mod kernels;
pub mod ledger;
#[doc(hidden)]
pub mod lower;
mod options;
#[doc(hidden)]
pub mod pieces;
#[doc(hidden)]
pub mod plan;
pub mod planfile;
#[doc(hidden)]
pub mod portable;
#[doc(hidden)]
pub mod quirks;
mod raw;
mod replay;
mod requested_engines;
#[doc(hidden)]
pub mod schedule;
mod time_model;
mod tune;
pub mod unsupported;

// Types in the API of the device tier, re-exported so that a caller needs no other crate.
pub use cudnn_graph::{Buffer, Device, DeviceSlice, Error as BackendError, Handle, Library, Search, Stream};
pub use error::Error;
pub use executor::{CudnnExecutor, CudnnOptions, Plans};
pub use files::AttachError;
pub use lower::{Form, Job};
pub use options::{Pieces, PlanOptions};
pub use plan::Planned;
pub use raw::{DeviceBackward, DeviceCall, DeviceForward, DeviceGradient, DeviceParam, DeviceValue};
pub use replay::Replay;
pub use sdpa_core::device::with_defaults;
