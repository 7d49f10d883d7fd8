//! Problems of attention without any computation: expressions and score_mods, masks, specifications and validated problems, parameters, values of
//! calls, reasons of refusal, and the traits of executors.
//!
//! It has no device code and loads no library. Executors are crates that depend on this one; the `sdpa` crate re-exports them and everything here.
//!
//! Begin at [`AttentionSpec`], which the caller writes, and [`Problem`], which an executor receives. An executor implements [`Executor`] and
//! [`Prepared`]; its calls are [`HostForward`] and [`HostBackward`]. Closures on scores are [`ScoreMod`] and [`Mask`].
//!
//! ```
//! use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
//!
//! let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 7, dim_qk: 8, dim_v: 8 };
//! let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal_bottom_right()).validate()?;
//! assert_eq!(problem.kept().to_string(), "k - q <= 2");
//! # Ok::<(), sdpa_core::SpecErrors>(())
//! ```

pub mod backward;
mod block_scale;
mod check;
pub mod device;
mod dropout;
pub mod dtype;
pub mod empty;
pub mod error;
pub mod executor;
pub mod expr;
pub mod fact;
mod float8;
pub mod fp8;
pub mod host;
pub mod library;
pub mod mask;
pub mod operand;
pub mod packed;
pub mod paged;
pub mod params;
mod piece;
pub mod placed;
pub mod problem;
pub mod score_mod;
pub mod seq;
mod sink;
pub mod spec;
mod statistic;
pub mod tensor;
pub mod unpacked;
mod unproven;

/// The crate of [`f16`](half::f16) and [`bf16`](half::bf16), for slices in [`Elements`].
///
/// ```
/// use sdpa_core::Elements;
/// use sdpa_core::half::bf16;
///
/// let elements = Elements::from(&[bf16::ONE; 4]);
/// assert_eq!(elements.len(), 4);
/// ```
pub use half;
/// The crate that defines `SmallVec`, the list type of [`device::DeviceParams`].
pub use smallvec;

pub use backward::{BackwardProblem, BackwardSpec, GradientSpec};
pub use block_scale::{BLOCK, BlockScale, BlockScales};
pub use device::{DeviceAmax, DeviceExecutor, DevicePrepared};
pub use dropout::{DROPOUT_OFFSET, DROPOUT_SEED, Dropout, DropoutMask, SQUARE};
pub use dtype::DType;
pub use error::{Error, ExecutorName, Failure, Reason, SpecError, SpecErrors, Unsupported};
pub use executor::{Executor, Prepared, PreparedBackward, Report};
pub use expr::ExprErrors;
pub use fact::Fact;
pub use float8::{F8E4M3, F8E5M2, F8E8M0};
pub use fp8::{Amax, Fp8Scale, Fp8Scales};
pub use host::{HostAmax, HostBackward, HostForward, HostGradient};
pub use library::ParseError;
pub use mask::{Align, Ends, Kept, Mask, Piece, Region};
pub use operand::{Direction, Operand, Side};
pub use packed::{Documents, Packed};
pub use paged::{Paged, Pages};
pub use placed::{Chunk, Placed, Placement};
pub use problem::Problem;
pub use score_mod::{Gradient, ScoreMod, TableRead};
pub use sink::SINK;
pub use spec::{AttentionSpec, Layout, Shape, TensorSpec};
pub use statistic::{Statistic, StatsBase};
pub use tensor::{Elements, ElementsMut, Param, ParamValue};
pub use unproven::{Unproven, Untested};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
