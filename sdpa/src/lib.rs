//! Scaled dot product attention.

pub mod cache;
pub mod dispatch;
pub mod error;
pub mod exec;
pub mod lower;
pub mod mask;
pub mod problem;
pub mod spec;
pub mod tensor;

pub use cudnn_graph::DType;
pub use error::{Error, ExecutorName, Reason, SpecError, SpecErrors, Unsupported};
pub use exec::{Executor, Prepared, Report};
pub use mask::{Align, Mask, Region};
pub use problem::Problem;
pub use spec::{AttentionSpec, Layout, Shape, TensorSpec};
pub use tensor::{Elements, ElementsMut, HostForward};
