//! A typed builder over the cuDNN backend graph API.

pub mod error;
pub mod ir;

pub use error::Error;
pub use ir::ty::DType;
