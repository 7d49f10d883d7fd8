//! The WGMMA kernels: their parameters, and the schedules of their passes.

mod backward;
mod forward;
mod params;

pub(crate) use backward::schedule as backward_schedule;
pub(crate) use forward::schedule as forward_schedule;
pub(crate) use params::{BackwardParams, ForwardParams};
