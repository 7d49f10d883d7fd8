//! A typed builder over the cuDNN backend graph API, loaded at run time.

pub mod bind;
pub mod encode;
pub mod engine;
pub mod error;
pub mod ffi;
pub mod ir;
pub mod plan;
pub mod profile;
pub mod program;
pub mod version;

pub use bind::{BindingError, BindingErrors, Bindings, DeviceSlice};
pub use engine::{Candidate, EngineReport, Outcome, Policy, Source};
pub use error::Error;
pub use ffi::driver::{Device, Driver, Event, RawStream, Stream};
pub use ffi::launch::{InFlight, OwnedBindings, launch};
pub use ffi::memory::Buffer;
pub use ffi::{Handle, Library, Search};
pub use ir::ty::DType;
pub use ir::{Graph, Verified};
pub use plan::{Plan, Planner};
pub use profile::{DeviceProfile, Target};
pub use program::Program;
pub use version::Version;
