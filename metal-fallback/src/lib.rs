//! Attention on Apple GPUs.
//!
//! A [`Forward`] is a problem in plain data, a [`Backward`] its gradient; each makes a [`Pass`] of it, which is a list of plans to run
//! in order. A [`Plan`] is a kernel and its dispatch: the MSL source, grid, threadgroup memory and the table of buffers. Kernels are
//! the `.metal` files in `kernels/`; what depends on a problem's types, dims, masks and score_mods is a prelude before them. Lengths,
//! strides, bands and the scale are parameters of a call.
//!
//! Nothing here needs an Apple machine, and nothing here calls one yet: [`supports`] declines with that reason. What a plan says
//! is executed on an emulation of MSL by the tests of the workspace.

mod backward;
mod declined;
mod emit;
mod forward;
mod kernels;
mod parameter;
mod params;
mod plan;
mod rows;
mod source;
mod tiles;

pub use backward::{Along, Backward};
pub use declined::Declined;
pub use emit::Captured;
pub use forward::Forward;
pub use kernels::Kernels;
pub use params::{BackwardParams, Field, ForwardParams, Params, SumParams};
pub use plan::{Band, Binding, Operand, Pass, Plan, Scratch, Tensor};
pub use tiles::{FRAGMENT, REGISTER_LIMIT, SIMD, THREADGROUP_BYTES, Tiles};

/// Whether attention runs on this machine's Apple GPU.
///
/// # Errors
/// Why not; at present always.
pub fn supports() -> Result<(), Declined> {
    if cfg!(target_vendor = "apple") {
        Err(Declined::NoHost)
    } else {
        Err(Declined::NoDevice { target_os: std::env::consts::OS.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_is_told_why() {
        let reason = supports().unwrap_err();
        assert_eq!(matches!(reason, Declined::NoHost), cfg!(target_vendor = "apple"), "{reason}");
    }
}
