//! Problems as the kernels are told of them, and their reasons as everyone is told of them.

use crate::backward::BackwardProblem;
use crate::error::{ExecutorName, Reason, Unsupported};
use crate::mask::Region;
use crate::problem::Problem;
use crate::spec::TensorSpec;
use metal_fallback::{Backward, Band, Declined, Forward, Tensor};
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
///
/// # Errors
/// Gradients that no kernel computes.
pub fn backward(problem: &BackwardProblem) -> Result<Backward, Unsupported> {
    let wrt: Vec<&str> = problem.wrt().iter().map(|g| g.name.as_str()).collect();
    if !wrt.is_empty() {
        let limit = "no kernel computes gradients of parameters yet".to_owned();
        return Err(unsupported(vec![Declined::Limit { field: "wrt".to_owned(), value: wrt.join(", "), limit }]));
    }
    Ok(Backward {
        forward: forward(problem.forward()),
        d_o: tensor(problem.d_o()),
        dq: tensor(problem.dq()),
        dk: tensor(problem.dk()),
        dv: tensor(problem.dv()),
        gradient: problem.gradient().map(|gradient| Arc::new(gradient.trace.clone())),
    })
}

/// Reasons of the kernels, as every executor gives them.
pub fn unsupported(declined: Vec<Declined>) -> Unsupported {
    let reason = |why: Declined| match why {
        Declined::Limit { field, value, limit } => Reason::Limit { field, value, limit },
        Declined::NoDevice { .. } | Declined::NoGpu | Declined::System { .. } | Declined::Gpu { .. } => Reason::Absent(why.to_string()),
    };
    Unsupported { executor: ExecutorName::Metal, reasons: declined.into_iter().map(reason).collect() }
}
