//! Cases where cuDNN's own order of engines is not the fastest.
//!
//! Measured on an H200 (compute capability 9.0, 132 SMs) under 9.19.0 and 9.27.0, bf16, 32 query heads, dims 64 and 128, lengths from 8 to 512
//! (`benches/results/`). The first offer is a kernel for 9.0 (64 × 128 tiles, four at a time). The second is one for 8.0 with 64 × 64 tiles. It wins
//! while a head is one or two such tiles and the device is not full; elsewhere the first offer is the fastest of all.

use crate::lower::{Form, Job};
use cudnn_graph::{Target, Version};
use sdpa_core::problem::Problem;

/// Rows of the small tile.
const TILE: i64 = 64;

/// Returns tags of the engines to try first.
pub(super) fn prefer(job: &Job, form: Form, runtime: Version, target: &Target<'_>) -> Vec<String> {
    let Job::Forward(problem) = job else { return Vec::new() };
    if small(problem, runtime, target.sm(), i64::from(target.sm_count())) {
        let engine = match form {
            Form::Composite => "eng1",
            Form::Unified => "eng8",
        };
        vec![engine.to_owned()]
    } else {
        Vec::new()
    }
}

fn small(problem: &Problem, runtime: Version, sm: u32, sm_count: i64) -> bool {
    let longest = problem.seq_q().max(problem.seq_kv());
    let heads = problem.batch() * problem.heads_q();
    if sm != 90 || longest > 2 * TILE {
        return false;
    }
    if runtime.at_least(9, 21) {
        longest <= TILE || (2 * heads <= sm_count && problem.dim_qk() > 64)
    } else {
        longest <= TILE && heads <= sm_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Shape};

    fn is_small(batch: i64, seq: i64, dim: i64, minor: u32) -> bool {
        let shape = Shape { batch, heads_q: 32, heads_kv: 8, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
        let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).validate().unwrap();
        small(&problem, Version::new(9, minor, 0), 90, 132)
    }

    #[test]
    fn the_rule_follows_the_measurements() {
        for (batch, seq, dim, minor, want) in [
            (1, 8, 128, 19, true),
            (16, 8, 128, 19, false),
            (1, 65, 128, 19, false),
            (1, 8, 128, 27, true),
            (16, 64, 128, 27, true),
            (16, 65, 128, 27, false),
            (1, 128, 128, 27, true),
            (1, 128, 64, 27, false),
            (1, 129, 128, 27, false),
        ] {
            assert_eq!(is_small(batch, seq, dim, minor), want, "batch {batch}, seq {seq}, dim {dim}, 9.{minor}");
        }
    }
}
