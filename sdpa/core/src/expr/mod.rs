//! Functions of one attention score: what a score_mod and a mask are made of.
//!
//! A closure over [`Expr`] is run once; what it did is kept as a [`Trace`], plain data that can be compared, printed, read back,
//! evaluated, differentiated and turned into the code of an executor. The closure itself is not kept: two closures with equal traces are the same
//! function.
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
//! | file | what it has |
//! |---|---|
//! | `node` | functions, values |
//! | `made` | functions that are made of others |
//! | `params` | declared parameters |
//! | `build` | values appended: equal ones are one, constants fold |
//! | `typed` | what closures see |
//! | `trace` | the finished thing |
//! | `eval` | its meaning, one score at a time |
//! | `interval` | what may come out over a box of places: a range of each index |
//! | `jumps` | on which values a jump hangs |
//! | `grad` | derivatives, by reverse mode |
//! | `text`, `parse` | its text form, out and in |

mod build;
mod eval;
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
