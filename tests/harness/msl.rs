//! Metal kernels without a Mac: their MSL compiled for this machine by clang, against an emulation of what it asks of a GPU.
//!
//! The emulation is in `tests/metal/emulator`. A kernel becomes a program of its own, so that one that crashes is a failure of its
//! case and of nothing else, and sanitizers need no preparation.

mod build;
mod cover;
mod executor;
pub mod generated;
pub mod mutations;
pub mod nvidia;
pub mod registers;
pub mod table;

pub use build::{Check, Job, Program, Toolchain};
pub use executor::Emulated;
pub use table::Row;
