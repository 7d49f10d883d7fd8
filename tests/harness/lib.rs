//! Cases, an oracle, tolerances and a runner: what every executor answers to.
//!
//! The oracle, `sdpa-oracle`, shares no code with the libraries: it reads masks word for word and computes textbook attention in f64.

pub mod allocations;
pub mod case;
pub mod code;
pub mod compare;
pub mod covering;
pub mod edits;
pub mod elf;
pub mod emulated;
pub mod golden;
pub mod inputs;
pub mod kernel_table;
pub mod library;
pub mod matrix;
pub mod msl;
pub mod mutants;
pub mod nvrtc;
pub mod offline;
pub mod oracle;
pub mod packing;
pub mod paging;
pub mod prove;
pub mod random;
pub mod recorder;
pub mod runner;
pub mod sass;
pub mod say;
pub mod sent;
pub mod share;
pub mod soak;
pub mod support;
pub mod timed;

pub use case::{Case, Skip};
pub use runner::{Outcome, Tally};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
