//! Converts problems to the kernels' terms, and reasons to those of all executors.

use crate::{Along, Backward, Forward};
use sdpa_core::backward::{BackwardProblem, GradientSpec};
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use sdpa_core::expr::{Axes, ParamKind};
use sdpa_core::problem::Problem;
use std::sync::Arc;

impl From<&Problem> for Forward {
    fn from(problem: &Problem) -> Forward {
        let kept = problem.kept();
        Forward {
            dtype: problem.dtype(),
            q: *problem.q(),
            k: *problem.k(),
            v: *problem.v(),
            o: *problem.o(),
            band: kept.region,
            ends: kept.ends,
            seq_len_q: kept.seq_len_q,
            seq_len_kv: kept.seq_len_kv,
            packed: problem.packed().copied(),
            paged: problem.paged().copied(),
            score_mod: problem.score_mod().cloned(),
            keep: kept.rest.clone(),
            sink: problem.sink(),
            dropout: problem.dropout(),
            stats: problem.stats(),
            row_max: problem.row_max(),
            sum_exp: problem.sum_exp(),
        }
    }
}

impl From<&BackwardProblem> for Backward {
    fn from(problem: &BackwardProblem) -> Backward {
        let axes = |name: &str| match problem.params().iter().find(|p| p.name == name).map(|p| p.kind) {
            Some(ParamKind::Tensor { axes, dtype: _ }) => axes,
            Some(ParamKind::Scalar) | None => Axes::NONE,
        };
        let along = |wanted: &GradientSpec| Along { name: wanted.name.clone(), dtype: wanted.dtype, axes: axes(&wanted.name) };
        Backward {
            forward: Forward::from(problem.forward()),
            d_o: *problem.d_o(),
            dq: *problem.dq(),
            dk: *problem.dk(),
            dv: *problem.dv(),
            gradient: problem.gradient().map(|gradient| Arc::new(gradient.trace.clone())),
            along: problem.wrt_scores().map(along).collect(),
            sink_gradient: problem.sink_gradient(),
        }
    }
}

/// Creates the error of a problem that the Metal executor does not support, for these reasons.
pub(crate) fn unsupported(reasons: Vec<Reason>) -> Unsupported {
    Unsupported::new(ExecutorName::METAL, reasons)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::fact::supported;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Packed, Paged, Shape, StatsBase};

    #[test]
    fn packed_queries_with_pages_are_unsupported_and_either_alone_is_not() {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 30, dim_qk: 8, dim_v: 8 };
        let pages = AttentionSpec::paged(DType::F16, shape, Paged::new(7, 9));
        let supports = |spec: &AttentionSpec| Forward::from(&spec.validate().unwrap()).supports();
        supports(&pages.clone().mask(Mask::padding())).unwrap();
        let unsupported = supports(&pages.with_packed_queries(12)).unwrap_err();
        assert!(
            matches!(&unsupported[..], [Reason::Limit { field, limit, .. }] if field == "packed" && limit.contains("with a paged KV cache")),
            "{unsupported:?}"
        );
    }

    #[test]
    fn what_the_kernels_do_not_do_is_told_by_its_field() {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 8, dim_v: 8 };
        let dense = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd);
        let paged = AttentionSpec::paged(DType::F16, shape, Paged::new(4, 6));
        let narrow = AttentionSpec::dense(DType::F8E5M2, Shape { dim_qk: 32, ..shape }, Layout::Bhsd);
        let cases = [
            (dense.clone(), &[][..]),
            (AttentionSpec::packed(DType::F16, shape, Packed::new()), &[]),
            (paged.clone().with_sink(), &[]),
            (dense.clone().with_dropout(0.5), &[]),
            (dense.clone().mask(Mask::causal_ends()), &[]),
            (dense.clone().with_dtype(DType::F8E4M3), &["dtype"]),
            (narrow.with_block_scales(), &["dtype", "block_scaled"]),
            (dense.clone().with_stats_in(StatsBase::Two), &["stats_base"]),
            (dense.clone().with_stats().with_row_max().with_sum_exp(), &[]),
            (dense.mask(Mask::padding()).mask(Mask::causal_ends()), &[]),
        ];
        for (spec, fields) in cases {
            let told = supported(spec.validate().unwrap().facts()).err().unwrap_or_default();
            let field = |reason: &Reason| match reason {
                Reason::Limit { field, .. } => field.clone(),
                Reason::KnownBad { .. } | Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) | _ => format!("{reason:?}"),
            };
            assert_eq!(told.iter().map(field).collect::<Vec<_>>(), fields);
        }
    }
}
