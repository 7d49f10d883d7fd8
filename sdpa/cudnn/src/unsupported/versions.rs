//! Limits of earlier versions or of some architectures, from NVIDIA's frontend; a newer version or another device lifts them. Version 9.9.0, which
//! could be asked on a machine without a GPU, refuses the same problems.

use super::row::{Case, Row, when};
use super::{open_window, wide_keys};
use crate::lower::Job;
use cudnn_graph::Version;
use sdpa_core::SINK;
use sdpa_core::error::Reason;

/// The largest head dim that every version supports on all of its devices.
const NARROW: i64 = 128;

fn wide(case: &Case<'_>) -> Option<String> {
    let dims = case.dims();
    when(dims.iter().any(|&dim| dim > NARROW), format!("{dims:?}"))
}

const ROWS: [Row; 11] = [
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 on compute capability 8 before cuDNN 9.10",
        breaks: |c| wide(c).filter(|_| c.major(8) && !c.runtime.at_least(9, 10)),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 on compute capability 10 before cuDNN 9.9",
        breaks: |c| wide(c).filter(|_| c.major(10) && !c.runtime.at_least(9, 9)),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 with one query on compute capability 12",
        breaks: |c| wide(c).filter(|_| c.major(12) && c.job.problem().seq_q() == 1),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 with a paged KV cache before cuDNN 9.10",
        breaks: |c| wide(c).filter(|_| c.job.problem().paged().is_some() && !c.runtime.at_least(9, 10)),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 for gradients, unless the compute capability is 9.x, or 10.x with cuDNN 9.11 or newer",
        breaks: |c| {
            let taken = c.major(9) || c.major(10) && c.runtime.at_least(9, 11);
            wide(c).filter(|_| c.is_backward() && !taken)
        },
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "[192, 128] for gradients with cuDNN 9.11 and 9.12 on compute capability 9 if dim_qk is between 129 and 192 and \
                dim_v between 65 and 128",
        breaks: |c| {
            let without = c.runtime.at_least(9, 11) && !c.runtime.at_least(9, 13);
            wide(c).filter(|_| c.is_backward() && c.major(9) && without && wide_keys(c.job))
        },
    },
    Row {
        field: "masks",
        limit: "no right bound with one query before cuDNN 9.10",
        breaks: |c| {
            let p = c.job.problem();
            when(p.seq_q() == 1 && p.region().upper.is_some() && !c.runtime.at_least(9, 10), p.kept())
        },
    },
    Row {
        field: "masks",
        limit: "no window with dropout or a score_mod before cuDNN 9.10.2",
        breaks: |c| {
            let p = c.job.problem();
            let windowed = p.region().lower.is_some() || open_window(c.job);
            let others = p.dropout().is_some() || p.score_mod().is_some();
            when(windowed && others && c.runtime < Version::new(9, 10, 2), p.kept())
        },
    },
    Row {
        field: "deterministic",
        limit: "false on compute capability 10 before cuDNN 9.18",
        breaks: |c| when(c.is_backward() && c.job.deterministic() && c.major(10) && !c.runtime.at_least(9, 18), true),
    },
    Row {
        field: "deterministic",
        limit: "false with the gradient of a bias on compute capability 10",
        breaks: |c| when(c.job.deterministic() && summed(c).is_some() && c.major(10), true),
    },
    Row {
        field: "wrt",
        limit: "no gradient of a bias with packed sequences on compute capability 10",
        breaks: |c| summed(c).filter(|_| c.job.problem().packed().is_some() && c.major(10)),
    },
];

/// Returns the first parameter whose gradient an engine has to sum. A native kernel computes the gradient of a sink.
fn summed(case: &Case<'_>) -> Option<String> {
    match case.job {
        Job::Forward(_) => None,
        Job::Backward(backward) => backward.wrt().iter().find(|gradient| gradient.name != SINK).map(|gradient| gradient.name.clone()),
    }
}

/// Returns every limit that a job breaks.
pub(super) fn reasons(job: &Job, runtime: Version, sm: u32) -> impl Iterator<Item = Reason> {
    let case = Case { job, runtime, sm };
    ROWS.iter().filter_map(move |row| row.reason(&case))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::{AttentionSpec, DType, Layout, Packed, Paged, Shape};

    fn shape(seq_q: i64, [dim_qk, dim_v]: [i64; 2]) -> Shape {
        Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q, seq_kv: 256, dim_qk, dim_v }
    }

    fn spec(seq_q: i64, dims: [i64; 2], masks: &[&str]) -> AttentionSpec {
        let mut spec = AttentionSpec::dense(DType::BF16, shape(seq_q, dims), Layout::Bhsd);
        spec.masks = masks.iter().map(|mask| mask.parse().unwrap()).collect();
        spec
    }

    fn limits(job: impl Into<Job>, minor: u32, patch: u32, sm: u32) -> Vec<String> {
        let text = |reason: Reason| reason.to_string();
        reasons(&job.into(), Version::new(9, minor, patch), sm).map(text).collect()
    }

    fn forward(spec: AttentionSpec, minor: u32, sm: u32) -> Vec<String> {
        limits(spec.validate().unwrap(), minor, 2, sm)
    }

    fn backward(dims: [i64; 2], minor: u32, sm: u32) -> Vec<String> {
        limits(spec(128, dims, &[]).backward().validate().unwrap(), minor, 2, sm)
    }

    #[test]
    fn wide_heads_are_taken_by_later_versions() {
        let of = |dims, minor, sm| forward(spec(128, dims, &[]), minor, sm);
        for dims in [[192, 192], [256, 256], [64, 136]] {
            for sm in [80, 86, 89] {
                assert_eq!(of(dims, 9, sm).len(), 1, "{dims:?} {sm}");
                assert!(of(dims, 10, sm).is_empty(), "{dims:?} {sm}");
            }
            assert!(of(dims, 8, 90).is_empty() && of(dims, 9, 100).is_empty());
            assert_eq!(of(dims, 8, 100).len(), 1);
        }
        assert!(of([128, 128], 8, 80).is_empty() && of([128, 128], 8, 100).is_empty());
        let decode = |dims| forward(spec(1, dims, &[]), 27, 120);
        assert!(decode([128, 128]).is_empty() && of([256, 256], 27, 120).is_empty());
        assert!(decode([136, 64])[0].contains("with one query on compute capability 12"));
    }

    #[test]
    fn wide_pages_are_taken_by_later_versions() {
        let paged = |dims, minor| forward(AttentionSpec::paged(DType::BF16, shape(64, dims), Paged::new(16, 20)), minor, 90);
        assert!(paged([192, 192], 9)[0].contains("at most 128 with a paged KV cache"));
        assert!(paged([192, 192], 10).is_empty() && paged([128, 128], 9).is_empty());
    }

    #[test]
    fn wide_gradients_are_of_some_architectures() {
        for (sm, minor, taken) in [(90, 9, true), (100, 10, false), (100, 11, true), (80, 27, false), (89, 27, false), (120, 27, false)] {
            assert_eq!(backward([256, 256], minor, sm).is_empty(), taken, "{sm} {minor}");
            assert!(backward([128, 128], minor, sm).is_empty());
        }
        for (dims, minor, taken) in
            [([192, 128], 12, true), ([144, 128], 11, false), ([144, 128], 12, false), ([144, 128], 13, true), ([144, 64], 12, true)]
        {
            assert_eq!(backward(dims, minor, 90).is_empty(), taken, "{dims:?} {minor}");
        }
    }

    #[test]
    fn equal_bits_and_biases_of_documents_have_limits_on_compute_capability_10() {
        let gradient = |spec: AttentionSpec| spec.score_mod("bias16:qk".parse().unwrap()).backward().wrt("bias", DType::BF16);
        let plain = || spec(128, [64, 64], &[]).backward().deterministic().validate().unwrap();
        assert!(limits(plain(), 17, 2, 100)[0].contains("before cuDNN 9.18") && limits(plain(), 18, 0, 100).is_empty());
        assert!(limits(plain(), 17, 2, 90).is_empty());
        let biased = || gradient(spec(128, [64, 64], &[]));
        assert!(limits(biased().deterministic().validate().unwrap(), 27, 0, 100)[0].contains("with the gradient of a bias"));
        assert!(limits(biased().validate().unwrap(), 27, 0, 100).is_empty());
        let square = Shape { seq_kv: 128, ..shape(128, [64, 64]) };
        let documents = || gradient(AttentionSpec::packed(DType::BF16, square, Packed::of(200))).validate().unwrap();
        assert_eq!(
            limits(documents(), 27, 0, 100),
            ["wrt: got bias, expected no gradient of a bias with packed sequences on compute capability 10"]
        );
        assert!(limits(documents(), 27, 0, 90).is_empty());
    }

    #[test]
    fn bounds_beside_others_are_taken_by_later_versions() {
        assert!(forward(spec(1, [64, 64], &["window:inf,3"]), 9, 90)[0].contains("no right bound with one query"));
        assert!(forward(spec(1, [64, 64], &["window:inf,3"]), 10, 90).is_empty() && forward(spec(1, [64, 64], &[]), 9, 90).is_empty());
        let window = || spec(128, [64, 64], &["window:9,0"]);
        for beside in [window().with_dropout(0.5), window().score_mod("bias:qk".parse().unwrap())] {
            let problem = beside.validate().unwrap();
            assert!(limits(problem.clone(), 10, 1, 90)[0].contains("no window with dropout") && limits(problem, 10, 2, 90).is_empty());
        }
        assert!(limits(window().validate().unwrap(), 10, 1, 90).is_empty());
        assert!(limits(spec(128, [64, 64], &["causal"]).with_dropout(0.5).validate().unwrap(), 9, 0, 90).is_empty());
    }
}
