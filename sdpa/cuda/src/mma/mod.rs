//! The `mma.sync` kernels: their limits, tile configurations, sources and schedules.
//!
//! | file | contents |
//! |---|---|
//! | `fact`, `problem` | the facts that they do not support, and other limits |
//! | `tile_config` | the tile configuration of a problem |
//! | `params` | their parameter structure |
//! | `warp_partials` | parameter gradients summed in a fixed order: the partial sums of each warp |
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
