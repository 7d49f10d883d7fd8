//! Proves an attention executor: computes problems in which any two features meet, and compares every result with textbook attention in f64.
//!
//! The oracle, `sdpa-oracle`, shares no code with the libraries: it reads masks word for word and computes textbook attention in f64. [`covering`] makes the
//! problems, [`runner`] runs them, [`compare`] judges results, and [`prove`] keeps the answers.

pub mod case;
pub mod compare;
pub mod covering;
pub mod inputs;
pub mod library;
pub mod oracle;
pub mod packing;
pub mod paging;
pub mod prove;
pub mod random;
pub mod runner;
pub mod say;

pub use case::{Case, Skip};
pub use runner::{Outcome, Tally};
