//! A typed builder over the cuDNN backend graph API.
//!
//! Building and linking need no part of CUDA: the driver and cuDNN are loaded at run time. A missing or too old library is an [`Error`] that names
//! the places searched.
//!
//! ```
//! use cudnn_graph::ir::Mode;
//! use cudnn_graph::{DType, Graph, Version, encode};
//!
//! // y = gelu(a · b + bias), one fused kernel.
//! let mut g = Graph::new();
//! let a = g.input("a", DType::BF16, [1, 256, 128]);
//! let b = g.input("b", DType::BF16, [1, 128, 512]);
//! let bias = g.input("bias", DType::BF16, [1, 1, 512]);
//! let product = g.matmul(a, b);
//! let sum = g.pointwise(Mode::Add, &[product, bias]);
//! let y = g.pointwise(Mode::GeluFwd, &[sum]);
//! g.output(y, "y", DType::BF16);
//!
//! let verified = g.verify()?;
//! let program = encode(&verified, Version::new(9, 19, 0))?;
//! assert!(program.to_string().contains("POINTWISE_MODE POINTWISE_MODE GELU_FWD"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The data path
//!
//! ```text
//! Graph ── verify ──▶ Verified ── encode ──▶ Program ── Planner ──▶ Plan ── execute(Bindings)
//!   │                    │                  plain data   engines     │
//!   └ Display            └ ir::interp       golden files  report     └ JSON, in and out
//! ```
//!
//! - [`ir`]: tensors and ops; [`Graph::verify`] collects every error; [`ir::interp`] defines every op.
//! - [`mod@encode`]: descriptors as plain data for a runtime version, without anything newer.
//! - [`Planner`] and [`Plan`]: every engine that cuDNN offers, the chosen one, and each refusal in cuDNN's own words. Plans are made for the device
//!   of a [`Handle`] or, without a GPU, for a [`DeviceProfile`].
//! - [`known_faults`]: engines that compute wrong results without an error; a planner passes them over.
//! - [`Plans`]: a bounded cache in memory and in files, which plans each graph once and explains its misses. Plans of graphs that differ in extents alone
//!   can share kernels (`kernels`, [`Policy::dynamic_shapes`]).
//! - [`Program`]: written by a caller or read from JSON, it can be planned too ([`Planner::for_program`]), for attributes that are newer than this crate.
//! - [`Bindings`]: tensors by id; missing, too short or misaligned memory is an error before anything runs.
//! - Three ways to execute: [`Plan::execute`] over addresses for which the caller vouches, [`launch`] over owned buffers, and `cudarc` (a feature)
//!   over the slices of cudarc.
//! - [`ffi`]: all unsafe code except the signatures of [`Plan::execute`], [`Plan::execute_in_order`] and [`Plan::from_json`], and the
//!   call that loads a plan from a file.

pub mod bind;
pub mod encode;
pub mod engine;
pub mod error;
pub mod ffi;
pub mod ir;
mod kernels;
pub mod known_faults;
pub mod plan;
pub mod plans;
pub mod profile;
pub mod program;
pub mod tune;
pub mod version;

pub use bind::{BindingError, BindingErrors, Bindings};
pub use encode::{TooNew, encode, encode_dynamic};
pub use engine::{Candidate, EngineReport, Outcome, Pin, Policy, Source};
pub use error::Error;
pub use ffi::codes::KnobType;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub use ffi::cudarc;
pub use ffi::launch::{InFlight, OwnedBindings, launch, launch_addressed};
pub use ffi::submission::Submission;
pub use ffi::{Handle, Library, Search};
pub use ir::ty::DType;
pub use ir::{Graph, Verified};
pub use known_faults::KnownFault;
pub use plan::{Plan, Planner};
pub use plans::{AttachError, KernelStats, Plans};
pub use profile::{DeviceProfile, Target};
pub use program::Program;
pub use sdpa_cache::planfile::Folder;
pub use sdpa_cache::{CacheSnapshot, CacheStats, Difference, Explanation, Limits};
pub use sdpa_driver::Error as DriverError;
pub use sdpa_driver::{Buffer, Captured, Device, DeviceSlice, Driver, Entered, Event, Kernel, RawStream, Stream};
pub use tune::Trial;
pub use version::Version;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/graph.md")]
struct Guide;
