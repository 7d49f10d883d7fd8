//! Apple GPUs: problems as the kernels are told of them. Nothing runs yet, and [`MetalExecutor`] says so.

use crate::backward::{BackwardProblem, GradientSpec};
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::exec::{Executor, Prepared, PreparedBackward};
use crate::mask::Region;
use crate::problem::Problem;
use crate::spec::TensorSpec;
use cudnn_graph::expr::{Axes, ParamKind};
use metal_fallback::{Along, Backward, Band, Declined, Forward, Tensor};
use std::sync::Arc;

/// Attention on an Apple GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct MetalExecutor;

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
        Declined::NoDevice { .. } | Declined::NoHost => Reason::Absent(why.to_string()),
    };
    Unsupported { executor: ExecutorName::Metal, reasons: declined.into_iter().map(reason).collect() }
}

impl Executor for MetalExecutor {
    fn name(&self) -> ExecutorName {
        ExecutorName::Metal
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        let mut declined: Vec<Declined> = metal_fallback::supports().err().into_iter().collect();
        declined.extend(forward(problem).supports().err().unwrap_or_default());
        if declined.is_empty() { Ok(()) } else { Err(unsupported(declined)) }
    }

    fn prepare(&self, problem: &Problem) -> Result<Arc<dyn Prepared>, Error> {
        self.supports(problem)?;
        Err(Error::Unsupported(unsupported(vec![Declined::NoHost])))
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
        let mut refused = unsupported(metal_fallback::supports().err().into_iter().collect());
        refused.reasons.extend(unsupported(backward(problem).supports().err().unwrap_or_default()).reasons);
        if refused.reasons.is_empty() { Ok(()) } else { Err(refused) }
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
        self.supports_backward(problem)?;
        Err(Error::Unsupported(unsupported(vec![Declined::NoHost])))
    }
}
