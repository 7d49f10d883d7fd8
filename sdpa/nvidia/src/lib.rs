#![doc = include_str!("../README.md")]

pub mod call;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub mod cudarc;
pub mod empty;
mod executor;
mod host;
mod job;
mod key;
pub use sdpa_cache::planfile;
pub mod race;
pub mod user;

pub use executor::{DevicePass, NvidiaExecutor};
pub use host::Hosted;
pub use job::Job;
pub use key::JobQuery;
// Types in calls over device memory, re-exported so that a caller needs no other crate.
pub use sdpa_driver::{Buffer, Device, DeviceSlice, RawStream, Stream};
