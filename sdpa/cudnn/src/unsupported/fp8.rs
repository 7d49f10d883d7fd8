//! Limits of cuDNN's attention over 8-bit floats. They are narrower than for other types.

use super::row::{Case, Row, when};
use crate::lower::{self, Job, Operand};
use cudnn_graph::Version;
use sdpa_core::error::Reason;
use sdpa_core::expr::{Axis, Node, ParamKind, Place, Precision};
use sdpa_core::{DType, Problem};

/// Returns whether a row may have no key: the mask reads call data, the batch entry or the head, or it leaves some row no key at these extents.
pub(super) fn rule_may_leave_no_key(problem: &Problem) -> bool {
    let Some(rule) = problem.kept().rest.as_deref() else { return false };
    let reads_more = |node: &Node| matches!(node, Node::Param(_) | Node::Read(..) | Node::Index(Axis::Batch | Axis::Head));
    if rule.nodes().iter().any(reads_more) {
        return true;
    }
    let extents @ [.., seq_q, seq_kv] = problem.extents();
    let keeps = |q: i64, k: i64| {
        let place = Place { score: 0.0, upstream: 0.0, index: [0, 0, q, k], extents, params: &[] };
        problem.region().keeps(q, k) && rule.eval_first(&place, Precision::F32) != 0.0
    };
    // Search outward from the diagonal: most masks keep a key near the query.
    let nearest = |q: i64| {
        let about = q.min(seq_kv - 1);
        (0..seq_kv).flat_map(move |distance| [about - distance, about + distance]).filter(move |k| (0..seq_kv).contains(k))
    };
    (0..seq_q).any(|q| !nearest(q).any(|k| keeps(q, k)))
}

fn is_short(dtype: DType) -> bool {
    dtype == DType::F16 || dtype == DType::BF16
}

/// Limits on everything except operands.
const ROWS: [Row; 23] = [
    Row {
        field: "block_scaled",
        limit: "false, unless the compute capability is 10.x",
        breaks: |c| when(c.job.problem().block_scaled() && !c.major(10), format!("true on sm {}", c.sm)),
    },
    Row {
        field: "cudnn",
        limit: "9.21 or newer for block scales",
        breaks: |c| when(c.job.problem().block_scaled() && c.runtime < lower::BLOCK_SCALES_SINCE, c.runtime),
    },
    Row {
        field: "seq_q",
        limit: "more than one query with block scales: cuDNN 9.27 crashes the process",
        breaks: |c| when(c.job.problem().block_scaled() && c.job.problem().seq_q() == 1, 1),
    },
    Row {
        field: "seq_kv",
        limit: "at least 5 keys with block scales: block_scale_v is padded to 4 scales along the keys, and cuDNN's graph needs more keys than scales",
        breaks: |c| when(c.job.problem().block_scaled() && c.job.problem().seq_kv() < lower::FEWEST_KEYS, c.job.problem().seq_kv()),
    },
    Row { field: "device", limit: "compute capability 9.0 or newer for FP8", breaks: |c| when(c.sm < 90, format!("sm {}", c.sm)) },
    Row { field: "device", limit: "compute capability 9.0 to 11.x for FP8", breaks: |c| when(c.major(12), format!("sm {}", c.sm)) },
    Row {
        field: "cudnn",
        limit: "9.1 or newer for FP8, except 9.10.0",
        breaks: |c| when(c.runtime < lower::FP8_SINCE || c.runtime == Version::new(9, 10, 0), c.runtime),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "multiples of 16 with FP8",
        breaks: |c| when(c.dims().iter().any(|dim| dim % 16 != 0), format!("{:?}", c.dims())),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "[128, 128] for FP8 gradients on compute capability 9",
        breaks: |c| when(c.before_blackwell() && c.is_backward() && c.dims() != [128; 2], format!("{:?}", c.dims())),
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 with FP8 on compute capability 10 or newer, or [192, 128] with cuDNN 9.19 or newer, or [256, 256] in forward \
                passes with cuDNN 9.26 or newer",
        breaks: |c| {
            let taken = match c.dims() {
                [192, 128] => c.runtime.at_least(9, 19),
                [256, 256] => c.runtime.at_least(9, 26) && !c.is_backward(),
                dims => dims.iter().all(|dim| *dim <= 128),
            };
            when(!c.before_blackwell() && !taken, format!("{:?}", c.dims()))
        },
    },
    Row {
        field: "dim_qk and dim_v",
        limit: "at most 128 with block scales, or [192, 128]: the kernel for 256 does not compile (cuDNN 9.27)",
        breaks: |c| when(c.job.problem().block_scaled() && c.dims() == [256; 2], format!("{:?}", c.dims())),
    },
    Row {
        field: "o_dtype",
        limit: "an FP8 type: a 16-bit output needs cuDNN 9.13 or newer and compute capability 10 or newer",
        breaks: |c| {
            let dtype = c.job.dtype_of(Operand::O);
            when(!c.is_backward() && is_short(dtype) && (c.before_blackwell() || !c.runtime.at_least(9, 13)), dtype)
        },
    },
    Row {
        field: "gradient_dtype",
        limit: "an FP8 type: 16-bit gradients need cuDNN 9.13 or newer and compute capability 10 or newer",
        breaks: |c| {
            let dtype = c.job.dtype_of(Operand::DQ);
            when(c.is_backward() && is_short(dtype) && (c.before_blackwell() || !c.runtime.at_least(9, 13)), dtype)
        },
    },
    Row {
        field: "seq_q",
        limit: "more than one query with FP8 if the compute capability is below 10 or gradients are computed; pad to two queries",
        breaks: |c| when(c.job.problem().seq_q() == 1 && (c.before_blackwell() || c.is_backward()), 1),
    },
    Row {
        field: "packed",
        limit: "none with FP8: NVIDIA's tests exclude this combination on compute capability 9, where it ends in an illegal instruction",
        breaks: |c| when(c.job.problem().packed().is_some(), "packed sequences"),
    },
    Row {
        field: "paged",
        limit: "none with FP8: this combination was never tested",
        breaks: |c| when(c.job.problem().paged().is_some(), "a paged KV cache"),
    },
    Row {
        field: "sink",
        limit: "false with FP8 if the compute capability is below 10, cuDNN is older than 9.13, there is one query, or gradients are computed",
        breaks: |c| {
            let in_graph = lower::sink_in_graph(c.job.problem(), c.runtime);
            when(c.job.problem().sink() && (c.before_blackwell() || c.is_backward() || !in_graph), true)
        },
    },
    Row {
        field: "score_mods",
        limit: "no tensor over queries or keys, such as a bias, with FP8",
        breaks: |c| {
            let along = |kind: ParamKind| match kind {
                ParamKind::Scalar => false,
                ParamKind::Tensor { axes, dtype: _ } => axes.iter().any(|axis| matches!(axis, Axis::Q | Axis::K)),
            };
            let trace = c.job.problem().score_mod()?;
            let bias = trace.params().iter().find(|p| along(p.kind))?;
            Some(bias.name.clone())
        },
    },
    Row {
        field: "masks",
        limit: "no mask that is aligned to the end of each sequence, such as causal-ends, with FP8",
        breaks: |c| c.job.problem().ends().map(|_| c.job.problem().kept().to_string()),
    },
    Row {
        field: "masks",
        limit: "no left bound together with lengths in FP8 gradients: cuDNN 9.19 crashes the process",
        breaks: |c| {
            let p = c.job.problem();
            when(c.is_backward() && p.region().lower.is_some() && super::is_padded(c.job), p.kept())
        },
    },
    Row {
        field: "masks",
        limit: "a diagonal band or prefix in which every query attends to a key, for FP8 gradients: a row without keys becomes \
                −∞ − −∞, which is NaN",
        breaks: |c| {
            let (p, kept) = (c.job.problem(), c.job.problem().kept());
            let keyless = (0..p.seq_q()).any(|query| kept.key_range(query, [p.seq_q(), p.seq_kv()]).is_empty());
            when(c.is_backward() && (keyless || kept.rest.is_some()), kept)
        },
    },
    Row {
        field: "stats_base",
        limit: "natural with FP8",
        breaks: |c| when(c.job.problem().stats_base() == sdpa_core::StatsBase::Two, "two"),
    },
    Row {
        field: "deterministic",
        limit: "false in FP8 gradients below compute capability 10: the only engine sums dq in no fixed order",
        breaks: |c| when(c.before_blackwell() && c.job.deterministic(), true),
    },
];

/// Returns every limit that a job over 8-bit floats breaks.
pub(super) fn reasons(job: &Job, runtime: Version, sm: u32) -> Vec<Reason> {
    let case = Case { job, runtime, sm };
    let mut all: Vec<Reason> = ROWS.iter().filter_map(|row| row.reason(&case)).collect();
    let copied = lower::densify(job).1;
    for (operand, tensor) in job.tensors().filter(|(operand, _)| copied.contains(operand)) {
        let rule = "alignment and strides that are multiples of 16 bytes: FP8 operands are read and written in place";
        let (field, value) = (format!("{operand}.strides"), format!("{:?}", tensor.strides));
        all.push(Reason::Limit { field, value, limit: rule.to_owned() });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quirks::Quirk;
    use sdpa_core::{AttentionSpec, BackwardSpec, Layout, Mask, Shape};

    const NEW: Version = Version::new(9, 27, 0);

    fn spec(dims: [i64; 2]) -> AttentionSpec {
        let [dim_qk, dim_v] = dims;
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 4, seq_q: 130, seq_kv: 200, dim_qk, dim_v };
        AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd)
    }

    /// Returns the refused fields of a forward pass.
    fn forward(spec: AttentionSpec, runtime: Version, sm: u32) -> Vec<String> {
        fields(&spec.validate().unwrap().into(), runtime, sm)
    }

    fn backward(spec: &BackwardSpec, runtime: Version, sm: u32) -> Vec<String> {
        fields(&spec.validate().unwrap().into(), runtime, sm)
    }

    fn fields(job: &Job, runtime: Version, sm: u32) -> Vec<String> {
        let field = |reason: Reason| match reason {
            Reason::Limit { field, .. } => field,
            Reason::KnownBad { what, .. } => what,
            Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) | _ => reason.to_string(),
        };
        super::super::reasons(job, runtime, sm, false).into_iter().map(field).collect()
    }

    #[test]
    fn devices_and_versions() {
        let of = |runtime, sm| forward(spec([64, 64]), runtime, sm);
        assert!(of(NEW, 90).is_empty() && of(NEW, 100).is_empty());
        assert_eq!(of(NEW, 89), ["device"]);
        assert!(of(Version::new(9, 0, 0), 90).contains(&"cudnn".to_owned()));
        assert!(of(Version::new(9, 10, 0), 90).contains(&"cudnn".to_owned()));
    }

    #[test]
    fn scales_of_blocks_are_of_compute_capability_10() {
        let of = |dims, runtime, sm| forward(spec(dims).with_block_scales(), runtime, sm);
        for sm in [100, 103, 107] {
            assert!(of([64, 64], NEW, sm).is_empty() && of([192, 128], NEW, sm).is_empty(), "{sm}");
        }
        for sm in [90, 110, 120] {
            assert!(of([64, 64], NEW, sm).contains(&"block_scaled".to_owned()), "{sm}");
        }
        assert_eq!(of([64, 64], Version::new(9, 20, 0), 100), ["cudnn"]);
        assert!(of([64, 64], Version::new(9, 21, 0), 100).is_empty());
        assert_eq!(of([256, 256], NEW, 100), ["dim_qk and dim_v"]);
        for (queries, keys, refused) in [(1, 200, "seq_q"), (130, 4, "seq_kv")] {
            let shape = Shape { batch: 2, heads_q: 4, heads_kv: 4, seq_q: queries, seq_kv: keys, dim_qk: 64, dim_v: 64 };
            let few = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd).with_block_scales();
            assert_eq!(forward(few, NEW, 100), [refused]);
        }
        // A score_mod's own table of this name is not a block scale, so it is refused as a table.
        let table = "table block_scale_q[4]: f32; score + block_scale_q[head]";
        let refused = forward(spec([64, 64]).score_mod(table.parse().unwrap()), NEW, 100);
        assert!(refused.contains(&"parameter block_scale_q".to_owned()), "{refused:?}");
    }

    #[test]
    fn dims_of_each_architecture() {
        for (dims, hopper, blackwell) in [
            ([128, 128], true, true),
            ([192, 128], true, true),
            ([256, 256], true, true),
            ([144, 144], true, false),
            ([72, 64], false, false),
        ] {
            assert_eq!(forward(spec(dims), NEW, 90).is_empty(), hopper, "{dims:?}");
            assert_eq!(forward(spec(dims), NEW, 100).is_empty(), blackwell, "{dims:?}");
        }
        assert!(!forward(spec([256, 256]), Version::new(9, 19, 0), 100).is_empty());
        for (dims, hopper, blackwell) in
            [([128, 128], true, true), ([64, 64], false, true), ([192, 128], false, true), ([256, 256], false, false)]
        {
            assert_eq!(backward(&spec(dims).backward(), NEW, 90).is_empty(), hopper, "{dims:?}");
            assert_eq!(backward(&spec(dims).backward(), NEW, 100).is_empty(), blackwell, "{dims:?}");
        }
    }

    #[test]
    fn results_in_16_bits_are_of_compute_capability_10() {
        let short = |dtype| spec([128, 128]).with_output_in(dtype);
        assert_eq!(forward(short(DType::BF16), NEW, 90), ["o_dtype"]);
        assert!(forward(short(DType::BF16), NEW, 100).is_empty() && forward(short(DType::F8E5M2), NEW, 90).is_empty());
        assert_eq!(backward(&spec([128, 128]).backward().with_gradients_in(DType::F16), NEW, 90), ["gradient_dtype"]);
        let mixed = spec([128, 128]).backward().with_upstream_in(DType::F8E5M2).with_gradients_in(DType::F8E5M2);
        assert!(backward(&mixed, NEW, 90).is_empty());
        assert_eq!(backward(&mixed.deterministic(), NEW, 90), ["deterministic"]);
    }

    #[test]
    fn what_is_composed_with_8_bit_floats() {
        let masked = |text: &str| spec([128, 128]).mask(text.parse::<Mask>().unwrap());
        for text in ["causal", "causal-bottom-right", "window:30,5", "prefix-lm:7"] {
            assert!(forward(masked(text), NEW, 90).is_empty(), "{text}");
        }
        assert_eq!(forward(masked("padding"), NEW, 90), [Quirk::LengthsOf8Bits.row().what]);
        assert!(forward(masked("padding"), NEW, 100).is_empty());
        // Masks that leave every row a key are supported. Masks that leave some row none, or that depend on call data, are refused.
        for text in ["dilated:3", "(q - k) % 3 != 1 & k <= q"] {
            assert!(forward(masked(text), NEW, 90).is_empty(), "{text}");
        }
        for text in ["(q - k) % 3 == 1 & k <= q", "q % 40 != 39 | k > 1000", "document", "scalar t = 0.75; t < 0.75", "k < 40 + 10 * batch"]
        {
            assert_eq!(forward(masked(text), NEW, 90), [Quirk::RowsWithoutKeysOf8Bits.row().what], "{text}");
        }
        assert_eq!(backward(&masked("window:30,0").mask("padding".parse().unwrap()).backward(), NEW, 100), ["masks"]);
        assert!(backward(&masked("causal-bottom-right").backward(), NEW, 90).is_empty());
        let mut long = masked("causal-bottom-right");
        for tensor in [&mut long.k, &mut long.v] {
            *tensor = sdpa_core::TensorSpec::dense([2, 4, 100, 128], Layout::Bshd);
        }
        assert_eq!(backward(&long.backward(), NEW, 90), ["masks"]);
        assert_eq!(backward(&masked("document").backward(), NEW, 90), ["masks"]);
        assert_eq!(forward(spec([128, 128]).score_mod("bias:qk".parse().unwrap()), NEW, 100), ["score_mods"]);
        let capped = || spec([128, 128]).score_mod("softcap:20".parse().unwrap());
        assert_eq!(forward(capped(), NEW, 90), [Quirk::ScoreModsOf8Bits.row().what]);
        assert!(forward(capped(), NEW, 100).is_empty());
        assert_eq!(forward(spec([128, 128]).with_dropout(0.5), NEW, 90), [Quirk::DropoutOf8Bits.row().what]);
        assert_eq!(forward(spec([128, 128]).with_row_max(), NEW, 90), [Quirk::RowMaximaOf8Bits.row().what]);
        assert!(forward(spec([128, 128]).with_sum_exp(), NEW, 90).is_empty());
        let plain = || spec([128, 128]).backward();
        assert_eq!(backward(&plain(), Version::new(9, 19, 0), 90), [Quirk::SmallGradientsOf8Bits.row().what]);
        assert!(backward(&plain(), NEW, 90).is_empty() && backward(&plain(), Version::new(9, 19, 0), 100).is_empty());
        assert_eq!(forward(spec([128, 128]).with_sink(), NEW, 90), ["sink"]);
        let mut apart = spec([128, 128]);
        apart.q.alignment = 8;
        assert_eq!(forward(apart, NEW, 90), ["q.strides"]);
    }
}
