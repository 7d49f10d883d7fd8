//! The graph.
pub mod ty;
