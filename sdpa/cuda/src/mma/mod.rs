//! Kernels with `mma.sync`: what they take, how they are cut, their text.
//!
//! | file | what it has |
//! |---|---|
//! | `fact`, `problem` | which facts they decline, and what else |
//! | `cut` | how a problem is cut |
//! | `params` | what a call tells them |
//! | `ordered` | what warps leave of gradients of parameters that are added up in one order |
//! | `source` | their texts |

mod backward;
mod cut;
mod fact;
mod forward;
mod ordered;
mod params;
mod problem;
mod source;

pub(crate) use backward::schedule as backward_schedule;
pub use cut::{Cut, SHARED_BYTES};
pub(crate) use forward::schedule as forward_schedule;
pub(crate) use ordered::Left;
pub use ordered::MOST_LEFT_BYTES;
pub use problem::{backward, forward};
pub use source::{forward_text, keys_text, queries_text};
