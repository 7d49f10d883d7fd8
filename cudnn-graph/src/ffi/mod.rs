//! The fence: the only unsafe code of this crate.
//!
//! What crosses inwards: programs as plain data, checked bindings, paths. What crosses outwards: owned handles that clean
//! up after themselves, statuses with the library's own text. Raw addresses of device memory enter through functions that
//! are `unsafe` for the caller, with the contract written on them.
#![allow(unsafe_code)]

pub mod backend;
pub mod capture;
pub mod codes;
pub mod descriptor;
pub mod device;
pub mod driver;
pub mod kernel;
mod lane;
pub mod launch;
mod load;
pub(crate) mod log;
pub mod memory;
pub mod pack;
mod retire;
mod room;
pub mod stream;
pub mod submission;

pub use backend::{Handle, Library, Search};
pub use driver::Driver;
