//! Score_mods and masks as programs: a trace is compiled once to steps over registers, which run on a few hundred scores at a time.
//!
//! Each value is computed as seldom as possible. Constants and values of a batch entry are computed once per strip, values of rows once per tile, values of
//! keys once per block, and all others once per (row, key). All levels compute [`Trace::eval`](sdpa_core::expr::Trace::eval) in f32, each function within 2
//! units in the last place.
//!
//! | file | contents |
//! |---|---|
//! | `compile` | a trace as steps |
//! | `machine` | registers, and their inputs |
//! | `load` | elements of tensors |
//! | `apply` | the functions of the expression language, over registers |
//! | `math` | exponential, tanh and others, one number at a time, for the compiler to vectorise |
//! | `rules` | the score_mod, mask, dropout and lengths of a problem |

mod apply;
mod compile;
mod load;
mod machine;
mod math;
mod rules;
#[cfg(test)]
mod tests;

#[cfg(test)]
use compile::Program;
pub(super) use machine::{CHUNK, Machine, Row, strides};
pub(super) use rules::{DropUnkept, Lengths, Rules, RulesOf, Worker};
