//! Lowering: from a problem to a graph, in either of the two forms that cuDNN knows.
//!
//! The *composite* form has about ten primitive ops, which engines recognise by pattern (any cuDNN 9). The *unified* form is one op with the masks as
//! an inner graph (from 9.21). Both compute the same; [`forms`] decides which one is tried first.

mod backward;
mod blocks;
mod composite;
mod copy;
mod dropout;
mod expr;
mod fp8;
mod lowered;
mod mask;
mod mode;
mod packed;
mod paged;
mod since;
#[cfg(test)]
mod spelled;
mod sum;
#[cfg(test)]
mod tests;
mod unified;

pub use backward::{QueryGradient, Spelling};
pub(crate) use blocks::FEWEST_KEYS;
pub use copy::{CopyGraph, convert, copy};
pub(crate) use copy::{densify, spread};
pub use expr::Vectors;
pub(crate) use lowered::within as lengths_within;
pub use lowered::{Guarded, Lowered, Supply, Table, Told};
pub use paged::Pages;
pub(crate) use paged::UNEVEN;
pub use sdpa_core::{Operand, Side, Statistic};
pub use sdpa_nvidia::Job;
pub(crate) use sdpa_nvidia::JobQuery;
pub use since::{
    BASE_TWO_SINCE, BLOCK_SCALES_SINCE, FP8_SINCE, PAGED_SINCE, SINK_SINCE, UNIFIED_BACKWARD_SINCE, UNIFIED_PLAIN_SINCE, UNIFIED_SINCE,
    forms,
};
pub use sum::{Sum, Sums};

use cudnn_graph::ir::{Tensor, TensorId, VerifyErrors};
use cudnn_graph::{DType, Version};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::problem::Problem;
use sdpa_core::spec::TensorSpec;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The form of the graph of a pass: many primitive ops, or one attention op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Attention as a graph of primitive ops, which engines recognise by pattern.
    Composite,
    /// Attention as one op, with the score_mods and masks as its inner graph.
    Unified,
}

impl Form {
    /// Returns the name of the form in reports and options.
    pub fn name(self) -> &'static str {
        match self {
            Form::Composite => "composite",
            Form::Unified => "unified",
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Converts an element type of this crate to cuDNN's.
pub fn dtype(dtype: sdpa_core::DType) -> DType {
    match dtype {
        sdpa_core::DType::F32 => DType::F32,
        sdpa_core::DType::F16 => DType::F16,
        sdpa_core::DType::BF16 => DType::BF16,
        sdpa_core::DType::I32 => DType::I32,
        sdpa_core::DType::I64 => DType::I64,
        sdpa_core::DType::Bool => DType::Bool,
        sdpa_core::DType::F8E4M3 => DType::F8E4M3,
        sdpa_core::DType::F8E5M2 => DType::F8E5M2,
        sdpa_core::DType::F8E8M0 => DType::F8E8M0,
    }
}

/// Returns whether the graph computes attention sinks. Otherwise a kernel adds them after the attention: for versions of cuDNN without
/// sinks, and for one query, which NVIDIA's frontend refuses.
pub(crate) fn sink_in_graph(problem: &Problem, runtime: Version) -> bool {
    problem.sink() && runtime >= SINK_SINCE && problem.seq_q() > 1
}

/// Returns true if batch entries have query lengths but no key lengths, or the reverse (`Quirk::LengthsOfOneSide`).
pub(crate) fn has_lengths_of_one_side(problem: &Problem) -> bool {
    problem.has_lengths(Side::Queries) != problem.has_lengths(Side::Keys)
}

/// Returns the graph of a pass in one form, composite or unified, for a version of cuDNN.
///
/// # Errors
/// Returns [`LowerError::Unsupported`] if this form cannot express the pass, and [`LowerError::Bug`] if the graph breaks a rule of
/// [`Graph::verify`](cudnn_graph::Graph::verify).
pub fn lower(job: &Job, form: Form, runtime: Version) -> Result<Lowered, LowerError> {
    if form == Form::Unified && job.problem().dtype().is_fp8() {
        return Err(LowerError::Unsupported(
            "8-bit floats in the unified form are not supported; use the composite form, which supports them on every runtime that \
             supports FP8"
                .to_owned(),
        ));
    }
    if job.problem().block_scaled() && job.problem().seq_kv() < FEWEST_KEYS {
        return Err(LowerError::Unsupported(format!("block scales with fewer than {FEWEST_KEYS} keys are not supported")));
    }
    if has_lengths_of_one_side(job.problem()) && !job.problem().kept().ends.is_full() {
        return Err(LowerError::Unsupported(
            "a mask aligned to the sequence ends with lengths of one side only is not supported: engines read \
             these lengths by head, not by batch entry; pass lengths of both sides"
                .to_owned(),
        ));
    }
    match (job, form) {
        (Job::Forward(problem), Form::Composite) => composite::lower(problem, runtime),
        (Job::Forward(problem), Form::Unified) => unified::lower(problem, runtime),
        (Job::Backward(problem), Form::Composite) => backward::composite(problem, runtime, Spelling::usual(problem)),
        (Job::Backward(problem), Form::Unified) => backward::unified(problem),
    }
}

/// Returns the graph of a backward pass in the composite form, with the way of computing dQ and of reading tensors that `spelling` names.
///
/// # Errors
/// Fails as [`lower`] does.
pub fn lower_backward(problem: &BackwardProblem, runtime: Version, spelling: Spelling) -> Result<Lowered, LowerError> {
    backward::composite(problem, runtime, spelling)
}

/// The reason why a pass has no graph.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LowerError {
    /// This form of graph cannot express the pass, for this reason.
    #[error("{0}")]
    Unsupported(String),
    /// The graph breaks a rule: a bug of the lowering.
    #[error(transparent)]
    Bug(#[from] cudnn_graph::Error),
}

impl From<VerifyErrors> for LowerError {
    fn from(errors: VerifyErrors) -> LowerError {
        LowerError::Bug(errors.into())
    }
}

fn tensor(operand: Operand, dtype: DType, tensor: &TensorSpec) -> Tensor {
    Tensor::device(operand.name(), dtype, tensor.dims.to_vec()).strides(tensor.strides.to_vec()).alignment(tensor.alignment.max(16))
}

/// Swaps the last two axes of a tensor: a view of the descriptor, not an op.
fn transposed(mut tensor: Tensor) -> Tensor {
    tensor.dims.0.swap(2, 3);
    tensor.strides.0.swap(2, 3);
    tensor
}

/// The forward operands. Their order is the same in both forms, so tensor ids do not depend on the form.
struct Operands {
    q: TensorId,
    k: TensorId,
    v: TensorId,
    attn_scale: TensorId,
    o: TensorId,
    stats: Option<TensorId>,
    row_max: Option<TensorId>,
    sum_exp: Option<TensorId>,
}

impl Operands {
    fn new(to: &mut expr::Draft<'_>, problem: &Problem, sink_in_graph: bool, key: impl FnOnce(Tensor) -> Tensor) -> Operands {
        let dtype = dtype(problem.dtype());
        Operands {
            q: operand(to, problem, tensor(Operand::Q, dtype, problem.q()), Operand::Q),
            k: operand(to, problem, key(tensor(Operand::K, dtype, &paged::container(problem, Operand::K, problem.k()))), Operand::K),
            v: operand(to, problem, tensor(Operand::V, dtype, &paged::container(problem, Operand::V, problem.v())), Operand::V),
            attn_scale: to.graph.parameter("attn_scale", DType::F32),
            o: operand(to, problem, tensor(Operand::O, self::dtype(problem.dtype_of(Operand::O)), problem.o()), Operand::O),
            stats: (problem.stats() || problem.sink() && !sink_in_graph).then(|| statistic(to, problem, Statistic::Stats)),
            row_max: problem.row_max().then(|| statistic(to, problem, Statistic::RowMax)),
            sum_exp: problem.sum_exp().then(|| statistic(to, problem, Statistic::SumExp)),
        }
    }

    fn list(&self) -> Vec<(Operand, TensorId)> {
        vec![(Operand::Q, self.q), (Operand::K, self.k), (Operand::V, self.v), (Operand::O, self.o)]
    }
}

fn operand(to: &mut expr::Draft<'_>, problem: &Problem, tensor: Tensor, operand: Operand) -> TensorId {
    let tensor = packed::placed(to, problem, operand.side(), tensor);
    to.graph.tensor(tensor)
}

fn statistic(to: &mut expr::Draft<'_>, problem: &Problem, statistic: Statistic) -> TensorId {
    let TensorSpec { dims, strides, .. } = problem.stats_tensor();
    let tensor = packed::placed(to, problem, Side::Queries, Tensor::device(statistic.name(), DType::F32, dims).strides(strides));
    to.graph.tensor(tensor)
}

/// Applies the score_mods to scores.
fn modify(to: &mut expr::Draft<'_>, scores: TensorId, problem: &Problem) -> TensorId {
    match problem.score_mod() {
        Some(trace) => {
            expr::Emitter::new(trace, expr::Reading::new(problem, expr::Pass::Forward), scores).emit_inside(to, trace.roots()[0])
        }
        None => scores,
    }
}
