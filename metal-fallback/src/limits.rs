//! Compares the limits of a compiled kernel with its plan.

use crate::plan::Plan;
use crate::tile_config::SIMD;
use crate::unsupported::Check;
use sdpa_core::Reason;

/// The limits of a compiled kernel. They may be lower than those of the device, because they depend on the kernel's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of threads per threadgroup.
    pub threads: u64,
    /// The number of lanes per simdgroup.
    pub simd: u64,
    /// Threadgroup memory that the source declares, in bytes.
    pub static_bytes: u64,
    /// Threadgroup memory of the device, in bytes.
    pub threadgroup_bytes: u64,
}

impl Limits {
    /// Checks that a plan can be dispatched.
    ///
    /// # Errors
    /// Returns every limit that the plan breaks.
    pub fn check(&self, plan: &Plan) -> Result<(), Vec<Reason>> {
        let mut check = Check::default();
        let field = |what: &str| format!("{what} of {}", plan.entry);
        let most = self.threads;
        check.that(u64::from(plan.threads) <= most, &field("threads"), plan.threads, format!("at most {most} for this kernel on this GPU"));
        check.that(self.simd == u64::from(SIMD), &field("lanes of a simdgroup"), self.simd, SIMD.to_string());
        let bytes = self.static_bytes + plan.threadgroup.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let room = self.threadgroup_bytes;
        check.that(bytes <= room, &field("threadgroup memory"), format!("{bytes} bytes"), format!("at most {room} bytes on this GPU"));
        if check.0.is_empty() { Ok(()) } else { Err(check.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Forward;
    use sdpa_core::DType;
    use sdpa_core::{Ends, Region, TensorSpec};

    #[test]
    fn every_limit_is_told_with_what_the_plan_needs() {
        let tensor = TensorSpec { dims: [1, 1, 64, 64], strides: [4096, 4096, 64, 1], alignment: 16 };
        let band = Region::default();
        let (q, k, v, o) = (tensor, tensor, tensor, tensor);
        let forward = Forward {
            dtype: DType::F16,
            q,
            k,
            v,
            o,
            band,
            ends: Ends::default(),
            seq_len_q: false,
            seq_len_kv: false,
            packed: None,
            paged: None,
            score_mod: None,
            keep: None,
            sink: false,
            dropout: None,
            stats: false,
            row_max: false,
            sum_exp: false,
        };
        let task = forward.task(None).unwrap();
        let plan = &task.plans()[0];
        let bytes = plan.threadgroup.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let just = Limits { threads: plan.threads.into(), simd: 32, static_bytes: 16, threadgroup_bytes: bytes + 16 };
        assert_eq!(just.check(plan), Ok(()));
        for (limits, said) in [
            (
                Limits { threads: just.threads - 1, ..just },
                "threads of attention_forward: got 128, expected at most 127 for this kernel on this GPU",
            ),
            (Limits { simd: 64, ..just }, "lanes of a simdgroup of attention_forward: got 64, expected 32"),
            (Limits { static_bytes: 17, ..just }, "threadgroup memory of attention_forward: got"),
        ] {
            let told = limits.check(plan).unwrap_err();
            assert!(told.len() == 1 && told[0].to_string().starts_with(said), "{told:?}");
        }
    }
}
