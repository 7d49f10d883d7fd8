//! Problems as the kernels are told of them, and their reasons as everyone is told of them.

use crate::backward::{BackwardProblem, GradientSpec};
use crate::error::{ExecutorName, Reason, Unsupported};
use crate::mask::Region;
use crate::problem::Problem;
use crate::spec::TensorSpec;
use cudnn_graph::expr::{Axes, ParamKind};
use metal_fallback::{Along, Backward, Band, Declined, Forward, Tensor};
use std::sync::Arc;

fn tensor(t: &TensorSpec) -> Tensor {
    Tensor { dims: t.dims, strides: t.strides }
}

/// A problem as the kernels are told of it.
pub fn forward(problem: &Problem) -> Forward {
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

/// A backward problem as the kernels are told of it.
pub fn backward(problem: &BackwardProblem) -> Backward {
    let axes = |name: &str| match problem.params().iter().find(|p| p.name == name).map(|p| p.kind) {
        Some(ParamKind::Tensor { axes, dtype: _ }) => axes,
        Some(ParamKind::Scalar) | None => Axes::NONE,
    };
    let along = |wanted: &GradientSpec| Along { name: wanted.name.clone(), dtype: wanted.dtype, axes: axes(&wanted.name) };
    Backward {
        forward: forward(problem.forward()),
        d_o: tensor(problem.d_o()),
        dq: tensor(problem.dq()),
        dk: tensor(problem.dk()),
        dv: tensor(problem.dv()),
        gradient: problem.gradient().map(|gradient| Arc::new(gradient.trace.clone())),
        along: problem.wrt().iter().map(along).collect(),
    }
}

/// Reasons of the kernels, as every executor gives them.
pub fn unsupported(declined: Vec<Declined>) -> Unsupported {
    let reason = |why: Declined| match why {
        Declined::Limit { field, value, limit } => Reason::Limit { field, value, limit },
        Declined::NoDevice { .. } | Declined::NoGpu | Declined::System { .. } | Declined::Gpu { .. } => Reason::Absent(why.to_string()),
    };
    Unsupported { executor: ExecutorName::Metal, reasons: declined.into_iter().map(reason).collect() }
}
