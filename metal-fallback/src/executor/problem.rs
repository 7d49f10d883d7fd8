//! Problems as the kernels are told of them, and their reasons as everyone is told of them.

use crate::{Along, Backward, Band, Declined, Forward, Tensor};
use sdpa_core::backward::{BackwardProblem, GradientSpec};
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use sdpa_core::expr::{Axes, ParamKind};
use sdpa_core::mask::Region;
use sdpa_core::problem::Problem;
use sdpa_core::spec::TensorSpec;
use std::sync::Arc;

fn tensor(t: &TensorSpec) -> Tensor {
    Tensor { dims: t.dims, strides: t.strides }
}

impl From<&Problem> for Forward {
    fn from(problem: &Problem) -> Forward {
        let kept = problem.kept();
        let Region { lower, upper, prefix } = kept.region;
        Forward {
            dtype: problem.dtype(),
            q: tensor(problem.q()),
            k: tensor(problem.k()),
            v: tensor(problem.v()),
            o: tensor(problem.o()),
            band: Band { lower, upper, prefix },
            seq_len_q: kept.seq_len_q,
            seq_len_kv: kept.seq_len_kv,
            score_mod: problem.score_mod().cloned(),
            keep: kept.rest.clone(),
            stats: problem.stats(),
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
            d_o: tensor(problem.d_o()),
            dq: tensor(problem.dq()),
            dk: tensor(problem.dk()),
            dv: tensor(problem.dv()),
            gradient: problem.gradient().map(|gradient| Arc::new(gradient.trace.clone())),
            along: problem.wrt().iter().map(along).collect(),
        }
    }
}

/// Reasons of the kernels, as every executor gives them.
pub(crate) fn unsupported(declined: Vec<Declined>) -> Unsupported {
    let reason = |why: Declined| match why {
        Declined::Limit { field, value, limit } => Reason::Limit { field, value, limit },
        Declined::NoDevice { .. } | Declined::NoGpu | Declined::System { .. } | Declined::Gpu { .. } => Reason::Absent(why.to_string()),
    };
    Unsupported { executor: ExecutorName::METAL, reasons: declined.into_iter().map(reason).collect() }
}
