#![doc = include_str!("../README.md")]

pub mod case;
pub mod compare;
pub mod covering;
pub mod inputs;
pub mod invariance;
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
