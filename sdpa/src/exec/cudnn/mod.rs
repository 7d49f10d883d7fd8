//! cuDNN.
pub mod guard;
pub mod plan;
pub use plan::{PlanOptions, Planned};
