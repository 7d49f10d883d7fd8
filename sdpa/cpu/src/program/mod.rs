//! Functions of scores: a trace, compiled once to steps over registers, run on a few hundred scores at a time.
//!
//! A value is computed as seldom as it can be: once per strip where it depends on the batch entry or on nothing, once per tile
//! where it depends on rows, once per block where it depends on keys, and otherwise for every pair of a row and a key. All of
//! them compute what [`Trace::eval`](sdpa_core::expr::Trace::eval) says, in f32, each function within 2 units in the last place.
//!
//! | file | what it has |
//! |---|---|
//! | `compile` | a trace as steps |
//! | `machine` | registers, and what goes into them |
//! | `load` | elements of tensors |
//! | `apply` | the functions of the language, over registers |
//! | `math` | exponential, tanh and others, one number at a time, for the compiler to vectorise |
//! | `rules` | what a problem asks for: a function of the score, a mask, lengths |

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
