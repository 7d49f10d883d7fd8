//! Kernels with `mma.sync`: what they take, how they are cut, their text.
//!
//! | file | what it has |
//! |---|---|
//! | `fact`, `problem` | which facts they decline, and what else |
//! | `cut` | how a problem is cut |
//! | `params` | what a call tells them |
//! | `ordered` | what warps leave of gradients of parameters that are added up in one order |
//! | `source` | their texts |

mod cut;
mod fact;
mod ordered;
mod params;
mod problem;
mod source;

pub use cut::{Cut, SHARED_BYTES};
pub(crate) use ordered::Left;
pub use ordered::MOST_LEFT_BYTES;
pub use params::{MmaParams, Strided};
pub use problem::{backward, forward};
pub use source::{SINKS_SHARED_BYTES, forward_text, keys_text, queries_text};
