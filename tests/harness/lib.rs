//! The tests' own infrastructure: recordings, golden files, shares of long lists, emulation and mutants. Cases, the covering and the runner are
//! [`sdpa_conformance`], under the same names.

pub mod allocations;
pub mod code;
pub mod edits;
pub mod elf;
pub mod emulated;
pub mod golden;
pub mod kernel_table;
pub mod matrix;
pub mod msl;
pub mod mutants;
pub mod nvrtc;
pub mod offline;
pub mod recorder;
pub mod sass;
pub mod sent;
pub mod share;
pub mod soak;
pub mod support;
pub mod timed;

pub use sdpa_conformance::{Case, Outcome, Skip, Tally};
pub use sdpa_conformance::{case, compare, covering, inputs, invariance, library, oracle, packing, paging, prove, random, runner, say};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
