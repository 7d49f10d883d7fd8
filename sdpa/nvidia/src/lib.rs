#![doc = include_str!("../README.md")]

pub mod call;
mod host;
mod job;
mod key;
pub mod planfile;
pub mod race;

pub use host::{Hosted, Told};
pub use job::Job;
pub use key::JobQuery;
