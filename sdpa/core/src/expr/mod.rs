//! Functions of one attention score: the basis of score_mods and masks.
//!
//! A closure over [`Expr`] runs once and is recorded as a [`Trace`]: plain data that can be compared, printed, parsed, evaluated, differentiated and
//! lowered to executor code. The closure itself is not kept. Closures with equal traces are the same function.
//!
//! ```
//! use sdpa_core::expr::{Axis, F32, Trace};
//!
//! let alibi = Trace::of_score(|score, at, p| score + p.tensor("slopes", [Axis::Head], F32) * (at.k - at.q).to_f32())?;
//! assert_eq!(alibi.to_string(), "tensor slopes[head]: f32; score + slopes * f32(k - q)");
//! assert_eq!(alibi.to_string().parse::<Trace>()?, alibi);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `node` | functions, values |
//! | `made` | functions that are composed of others |
//! | `params` | declared parameters |
//! | `build` | builder: shares equal values, folds constants |
//! | `typed` | types that closures see |
//! | `trace` | the finished trace |
//! | `eval` | reference semantics, one score at a time |
//! | `interval` | ranges over a box of indices |
//! | `jumps` | values that decide a discontinuity |
//! | `grad` | derivatives, by reverse mode |
//! | `text`, `parse` | printing and parsing of the text form |

mod build;
mod eval;
mod gain;
mod grad;
mod interval;
mod jumps;
mod made;
mod near;
mod node;
mod params;
mod parse;
mod text;
mod trace;
mod typed;

pub use build::{Builder, Inputs};
pub use eval::{Place, Precision, binary, unary};
pub use grad::{TanhSlope, tanh_slope};
pub use interval::Judged;
pub use made::Made;
pub use near::nearest;
pub use node::{Axis, Binary, Const, Kind, Node, NodeId, ParamId, Spelling, Type, Unary};
pub use params::{Axes, Declared, ParamKind};
pub use trace::{Depends, ExprError, ExprErrors, Trace};
pub use typed::{At, BF16, Bool, Expr, F16, F32, I32, Operand, Params, Stored, Table, Traced};
