//! Kernels with `mma.sync`: what they support, their tile configurations, sources and schedules.
//!
//! | file | what it has |
//! |---|---|
//! | `fact`, `problem` | which facts they do not support, and what else |
//! | `tile_config` | the tile configuration of a problem |
//! | `params` | the structure that they get as a parameter |
//! | `warp_partials` | gradients of parameters that are added up in one order: the partial sums of each warp |
//! | `source` | their sources |
//! | `forward`, `backward` | the schedules of their passes |

mod backward;
mod fact;
mod forward;
mod params;
mod problem;
mod source;
mod tile_config;
mod warp_partials;

pub(crate) use backward::schedule as backward_schedule;
pub(crate) use forward::schedule as forward_schedule;
pub use problem::{backward, forward};
pub use source::{forward_text, keys_text, queries_text};
pub use tile_config::{SHARED_BYTES, TileConfig};
pub use warp_partials::MOST_PARTIAL_BYTES;
pub(crate) use warp_partials::WarpPartials;
