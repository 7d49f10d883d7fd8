//! The fence: the only unsafe code of this crate. That of the driver, of devices and their memory is `sdpa-driver`'s.
//!
//! What crosses inwards: programs as plain data, checked bindings, paths. What crosses outwards: owned handles that clean
//! up after themselves, statuses with the library's own text. Raw addresses of device memory enter through functions that
//! are `unsafe` for the caller, with the contract written on them.
#![allow(unsafe_code)]

pub mod backend;
pub mod codes;
pub mod descriptor;
pub mod launch;
pub(crate) mod log;
pub mod pack;
pub mod submission;

pub use backend::{Handle, Library, Search};
