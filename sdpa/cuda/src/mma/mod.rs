//! The `mma.sync` kernels: their limits, tile configurations, sources and schedules.
//!
//! | file | contents |
//! |---|---|
//! | `fact`, `problem` | the facts that they do not support, and other limits |
//! | `tile_config` | the tile configuration of a problem |
//! | `params` | their parameter structure |
//! | `source` | their sources |
//! | `forward`, `backward` | the schedules of their passes |

mod backward;
mod fact;
mod forward;
mod params;
mod problem;
mod source;
mod tile_config;

pub(crate) use backward::schedule as backward_schedule;
pub(crate) use forward::schedule as forward_schedule;
pub use problem::{backward, forward};
pub use source::{forward_text, keys_text, queries_text};
pub use tile_config::{SHARED_BYTES, TileConfig};
