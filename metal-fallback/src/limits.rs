//! What a compiled kernel can be asked for, against what its plan asks.

use crate::declined::{Check, Declined};
use crate::plan::Plan;
use crate::tiles::SIMD;

/// What Metal says of a compiled kernel, which may be less than what it says of the device: registers decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads of a threadgroup at most.
    pub threads: u64,
    /// Lanes of a simdgroup.
    pub simd: u64,
    /// Bytes of threadgroup memory that the source declares itself.
    pub static_bytes: u64,
    /// Bytes of threadgroup memory of the device.
    pub threadgroup_bytes: u64,
}

impl Limits {
    /// Whether a plan can be dispatched.
    ///
    /// # Errors
    /// Every limit that it breaks.
    pub fn check(&self, plan: &Plan) -> Result<(), Vec<Declined>> {
        let mut check = Check::default();
        let field = |what: &str| format!("{what} of {}", plan.entry);
        let most = self.threads;
        check.that(u64::from(plan.threads) <= most, &field("threads"), plan.threads, format!("at most {most} of this kernel on this GPU"));
        check.that(self.simd == u64::from(SIMD), &field("lanes of a simdgroup"), self.simd, format!("kernels are written for {SIMD}"));
        let bytes = self.static_bytes + plan.threadgroup.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let room = self.threadgroup_bytes;
        check.that(bytes <= room, &field("threadgroup memory"), format!("{bytes} bytes"), format!("at most {room} on this GPU"));
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }
}
