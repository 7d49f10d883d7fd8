//! The only unsafe code of this crate. `sdpa-driver` has that for the driver, devices and their memory.
//!
//! Inputs are programs as plain data, checked bindings, and paths. Outputs are owned handles and statuses with the library's own text. Raw addresses
//! of device memory enter through functions that are `unsafe` for the caller and state their contract.
#![allow(unsafe_code)]

pub mod backend;
pub mod codes;
#[cfg(all(feature = "cudarc", not(target_vendor = "apple")))]
pub mod cudarc;
pub mod descriptor;
pub mod launch;
pub(crate) mod log;
pub mod pack;
pub mod submission;

pub use backend::{Handle, Library, Search};
