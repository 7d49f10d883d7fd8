//! Runtimes that are known to compute some problems wrongly, and what the engines do not take at all.
//!
//! A row is added when a source says so or a test has seen it, and names that source. NVIDIA's frontend refuses the same
//! regions: its refusals mark wrong answers, not only missing kernels.

use crate::error::{Reason, SpecError, SpecErrors};
use crate::lower::{self, Job, Operand};
use crate::mask::Region;
use crate::spec::TensorSpec;
use cudnn_graph::{DType, Version};

/// One known-bad region.
struct Row {
    /// First and last version that has it.
    versions: (Version, Version),
    /// Compute capabilities that have it.
    sm: std::ops::RangeInclusive<u32>,
    /// Which problems.
    applies: fn(&Job) -> bool,
    /// What goes wrong.
    what: &'static str,
    /// Where that is written down.
    source: &'static str,
}

const fn v(minor: u32, patch: u32) -> Version {
    Version::new(9, minor, patch)
}

const ANY: std::ops::RangeInclusive<u32> = 0..=u32::MAX;

/// A window that is not causal: dropped on the left, and keys right of the diagonal kept.
fn open_window(job: &Job) -> bool {
    let Region { lower, upper, prefix } = *job.problem().region();
    lower.is_some() && prefix.is_none() && upper.is_none_or(|u| u > 0)
}

fn off_diagonal_by(job: &Job, tile: i64) -> bool {
    let p = job.problem();
    let region = p.region();
    let shifted = region.upper.is_some_and(|u| u != 0) || region.lower.is_some();
    shifted && (p.seq_q() % tile != 0 || p.seq_kv() % tile != 0)
}

fn is_backward(job: &Job) -> bool {
    match job {
        Job::Forward(_) => false,
        Job::Backward(_) => true,
    }
}

/// Elements from the first to behind the last of an operand as the engines see it: dense, where it is copied first.
fn reach(job: &Job, operand: Operand) -> i64 {
    let (dense, _) = lower::densify(job);
    dense.tensor(operand).and_then(|tensor| tensor.extent()).unwrap_or(0)
}

/// Lengths of batch entries, of queries and of keys.
fn is_padded(job: &Job) -> bool {
    let kept = job.problem().kept();
    kept.seq_len_q && kept.seq_len_kv
}

const KNOWN_BAD: [Row; 11] = [
    Row {
        versions: (v(0, 0), v(99, 0)),
        sm: ANY,
        applies: |j| is_backward(j) && [Operand::O, Operand::DO].iter().any(|&operand| reach(j, operand) > 1 << 31),
        what: "sums of rows of o and d_o are taken at 32-bit offsets: dq and dk are wrong where o or d_o reaches past 2³¹ elements",
        source: "seen on an H200 under 9.19.0: benches, device limits",
    },
    Row {
        versions: (v(0, 0), v(99, 0)),
        sm: ANY,
        applies: |j| is_backward(j) && reach(j, Operand::DQ) > 1 << 32,
        what: "dq is written at 32-bit offsets: wrong where it reaches past 2³² elements",
        source: "seen on an H200 under 9.19.0: benches, device limits",
    },
    Row {
        versions: (v(0, 0), v(18, 99)),
        sm: ANY,
        applies: is_padded,
        what: "entries of a batch without queries or keys get no numbers, also where their lengths are guarded, before 9.19",
        source: "seen on an H200 under 9.13.1 and 9.16.0; cudnn-frontend #943",
    },
    Row {
        versions: (v(10, 0), v(10, 1)),
        sm: ANY,
        applies: |_| true,
        what: "attention is disabled by NVIDIA's frontend on these releases",
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention",
    },
    Row {
        versions: (v(14, 0), v(14, 0)),
        sm: ANY,
        applies: |j| open_window(j) && j.problem().seq_kv() > 1024,
        what: "a window that is not causal gives wrong results past 1024 keys; fixed in 9.14.1",
        source: "cudnn-frontend 1.32; TransformerEngine #2344",
    },
    Row {
        versions: (v(0, 0), v(10, 1)),
        sm: ANY,
        applies: open_window,
        what: "a window must be causal before 9.10.2",
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention",
    },
    Row {
        versions: (v(19, 0), v(25, 0)),
        sm: 100..=129,
        applies: |j| !is_backward(j) && j.problem().seq_q() == 1,
        what: "decode corrupts silently with few key heads on Blackwell; fixed in 9.25.1",
        source: "pytorch #193893, #194927",
    },
    Row {
        versions: (v(0, 0), v(5, 99)),
        sm: ANY,
        applies: |j| off_diagonal_by(j, 64),
        what: "masks off the main diagonal need lengths that are multiples of 64 before 9.6",
        source: "cudnn-frontend 1.32, support surface of scaled dot product attention",
    },
    Row {
        versions: (v(0, 0), v(5, 99)),
        sm: ANY,
        applies: is_backward,
        what: "the library does not zero the accumulator of dq before 9.6",
        source: "cudnn-frontend 1.32, backward node",
    },
    Row {
        versions: (v(0, 0), v(15, 0)),
        sm: ANY,
        applies: |j| is_backward(j) && j.problem().seq_kv() % 128 != 0,
        what: "the backward pass reads past the keys where their number is no multiple of 128; fixed after 9.15.0",
        source: "cudnn-frontend 1.16 release notes",
    },
    Row {
        versions: (v(26, 0), v(26, 0)),
        sm: ANY,
        applies: |j| is_backward(j) && j.problem().extents() == [1; 4],
        what: "the planner crashes where batch, heads and lengths are all 1",
        source: "cudnn-frontend #1071",
    },
];

/// Whether the numbers that rows repeat, if they do, lie without gaps: the engines that copy them read no other.
fn packed_numbers(tensor: &TensorSpec) -> bool {
    if tensor.strides[3] != 0 || tensor.dims[3] == 1 {
        return true;
    }
    let mut axes: Vec<usize> = (0..3).filter(|&a| tensor.dims[a] > 1 && tensor.strides[a] > 0).collect();
    axes.sort_by_key(|&a| tensor.strides[a]);
    let mut next = 1;
    axes.into_iter().all(|a| {
        let packed = tensor.strides[a] == next;
        next *= tensor.dims[a];
        packed
    })
}

/// Every known reason against running a problem on a runtime and an architecture, before the library is asked.
///
/// With `deterministic`, decode is refused: its engines split the keys and combine the parts as they arrive, and although they
/// do not say so in their notes, other work on the device changes the last bit (docs/threads.md).
pub fn reasons(job: &Job, runtime: Version, sm: u32, deterministic: bool) -> Vec<Reason> {
    let problem = job.problem();
    let mut reasons = Vec::new();
    let mut limit = |field: &str, value: String, limit: &str| {
        reasons.push(Reason::Limit { field: field.to_owned(), value, limit: limit.to_owned() });
    };
    if !matches!(problem.dtype(), DType::F16 | DType::BF16) {
        limit("dtype", problem.dtype().to_string(), "cuDNN's attention takes f16 and bf16");
    }
    if is_backward(job) && problem.seq_q() == 1 && problem.seq_kv() == 1 {
        limit("seq_q and seq_kv", "1".to_owned(), "cuDNN's backward pass takes more than one pair of a query and a key");
    }
    if let Job::Backward(backward) = job
        && !packed_numbers(backward.d_o())
    {
        limit("d_o.strides", format!("{:?}", backward.d_o().strides), "where a row is one number repeated, the numbers lie without gaps");
    }
    if sm < 80 {
        limit("device", format!("sm {sm}"), "cuDNN's attention needs compute capability 8.0 or newer");
    }
    if deterministic && problem.seq_q() == 1 && !is_backward(job) {
        limit("policy.deterministic", "true".to_owned(), "cuDNN's decode engines (seq_q = 1) do not give the same bits on every run");
    }
    for (field, dim) in [("dim_qk", problem.dim_qk()), ("dim_v", problem.dim_v())] {
        if dim % 8 != 0 {
            limit(field, dim.to_string(), "cuDNN's attention takes multiples of 8");
        }
        if dim > 256 {
            limit(field, dim.to_string(), "cuDNN's attention takes at most 256");
        }
    }
    for row in &KNOWN_BAD {
        if (row.versions.0..=row.versions.1).contains(&runtime) && row.sm.contains(&sm) && (row.applies)(job) {
            reasons.push(Reason::KnownBad {
                runtime: format!("cuDNN {runtime} on sm {sm}"),
                what: row.what.to_owned(),
                source_note: row.source.to_owned(),
            });
        }
    }
    reasons
}

/// The scale is a value of the call, so it is checked there.
///
/// # Errors
/// A scale that is not positive: the fused kernels keep the row maximum of unscaled scores, which starts at −∞, and give NaN
/// (seen with 0 and −0.1 on an H200 under 9.19).
pub fn check_scale(attn_scale: f32) -> Result<(), SpecErrors> {
    if attn_scale > 0.0 {
        return Ok(());
    }
    let rule = "positive: cuDNN's kernels give NaN otherwise; the cpu executor takes any finite scale";
    Err(SpecErrors(vec![SpecError::new("attn_scale", attn_scale, rule)]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Align, AttentionSpec, Layout, Mask, Shape};

    fn problem(seq_q: i64, seq_kv: i64, masks: &[Mask]) -> Job {
        let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q, seq_kv, dim_qk: 64, dim_v: 64 };
        let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
        spec.masks = masks.to_vec();
        spec.validate().unwrap().into()
    }

    #[test]
    fn a_scale_must_be_positive() {
        assert!(check_scale(0.125).is_ok());
        for bad in [0.0, -0.0, -0.1, f32::NAN] {
            assert!(check_scale(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_backward_pass_over_tensors_past_32_bit_offsets_is_refused() {
        let shape = |batch| Shape { batch, heads_q: 128, heads_kv: 128, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
        let spec = |batch| AttentionSpec::dense(DType::BF16, shape(batch), Layout::Bhsd).backward();
        // 2²⁰ elements for each entry of the batch.
        let refused = |spec: &crate::BackwardSpec| !reasons(&spec.validate().unwrap().into(), v(27, 0), 90, false).is_empty();
        assert!(!refused(&spec(2048)) && refused(&spec(2049)));
        let forward: Job = spec(4096).forward.validate().unwrap().into();
        assert!(reasons(&forward, v(27, 0), 90, false).is_empty());
        // What is read in place counts as it lies; what is copied first, as the copy does.
        let mut far = spec(2);
        far.d_o.strides[0] = 1 << 31;
        assert!(refused(&far));
        far.d_o.strides[0] = (1 << 31) - (1 << 20);
        assert!(!refused(&far));
        far.dq.strides[0] = 1 << 32;
        assert!(refused(&far));
        let mut repeated = spec(2049);
        repeated.d_o.strides = [0, 0, 0, 1];
        assert!(refused(&repeated));
    }

    #[test]
    fn each_row_refuses_its_versions_and_no_others() {
        let plain = problem(128, 128, &[]);
        let open = problem(2048, 2048, &[Mask::window(Some(64), Some(64), Align::TopLeft)]);
        let causal_window = problem(2048, 2048, &[Mask::window(Some(64), Some(0), Align::TopLeft)]);
        let decode = problem(1, 4096, &[]);
        let chunk = problem(100, 228, &[Mask::causal_bottom_right()]);
        let refused = |p: &Job, minor, patch, sm| !reasons(p, v(minor, patch), sm, false).is_empty();
        let padded = problem(128, 128, &["padding".parse().unwrap()]);
        assert!(
            refused(&padded, 18, 1, 90)
                && !refused(&padded, 19, 0, 90)
                && !refused(&problem(128, 128, &["causal".parse().unwrap()]), 18, 0, 90)
        );
        assert!(refused(&plain, 10, 0, 90) && refused(&plain, 10, 1, 90) && !refused(&plain, 10, 2, 90) && !refused(&plain, 9, 0, 90));
        assert!(refused(&open, 9, 0, 90) && !refused(&open, 10, 2, 90) && !refused(&causal_window, 9, 0, 90));
        assert!(refused(&open, 14, 0, 90) && !refused(&open, 14, 1, 90) && !refused(&causal_window, 14, 0, 90));
        assert!(
            refused(&decode, 19, 0, 100) && refused(&decode, 25, 0, 120) && !refused(&decode, 25, 1, 100) && !refused(&decode, 19, 0, 90)
        );
        assert!(refused(&chunk, 5, 0, 90) && !refused(&chunk, 6, 0, 90));
        assert!(refused(&plain, 19, 0, 75));
        assert!(!reasons(&decode, v(27, 0), 90, true).is_empty() && reasons(&plain, v(27, 0), 90, true).is_empty());
    }
}
