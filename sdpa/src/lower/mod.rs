//! Problem → graph, in either of the two forms that cuDNN knows.
//!
//! The *composite* form is some ten primitive ops that engines recognise by pattern (any cuDNN 9). The *unified* form is one
//! op with the masks attached as an inner graph (from 9.21). Both compute the same; which one is asked first is
//! [`forms`]' to say.

mod composite;
mod copy;
mod mask;
mod unified;

pub(crate) use copy::densify;
pub use copy::{Copy, copy};

use crate::problem::Problem;
use crate::spec::TensorSpec;
use cudnn_graph::ir::{Tensor, TensorId};
use cudnn_graph::{DType, Graph, Verified, Version};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a problem is spelled for cuDNN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Primitive ops.
    Composite,
    /// One op.
    Unified,
}

impl Form {
    /// The name used in reports and options.
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

/// The first runtime whose unified op takes masks.
pub const UNIFIED_SINCE: Version = Version::new(9, 21, 0);

/// The first runtime with a unified op at all: no masks.
pub const UNIFIED_PLAIN_SINCE: Version = Version::new(9, 13, 1);

/// The forms worth asking for a problem on a runtime, the better one first.
///
/// Composite comes first: measured on an H200 under 9.27 the two are equally fast where the mask is a plain band, and the
/// unified form skips no blocks of a mask that is spelled as ops.
pub fn forms(problem: &Problem, runtime: Version) -> &'static [Form] {
    let unified = if problem.region().is_full() { UNIFIED_PLAIN_SINCE } else { UNIFIED_SINCE };
    if runtime >= unified { &[Form::Composite, Form::Unified] } else { &[Form::Composite] }
}

/// A forward graph and the tensors that a caller binds.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The graph.
    pub graph: Verified,
    /// Its form.
    pub form: Form,
    /// Queries.
    pub q: TensorId,
    /// Keys.
    pub k: TensorId,
    /// Values.
    pub v: TensorId,
    /// By-value f32.
    pub attn_scale: TensorId,
    /// Output.
    pub o: TensorId,
    /// f32 (batch, heads_q, seq_q, 1).
    pub stats: Option<TensorId>,
}

/// Lowers a problem's forward pass to one form.
///
/// # Errors
/// What [`Graph::verify`] finds: a bug of the lowering.
pub fn forward(problem: &Problem, form: Form, runtime: Version) -> Result<Forward, cudnn_graph::Error> {
    match form {
        Form::Composite => composite::forward(problem, runtime),
        Form::Unified => unified::forward(problem, runtime),
    }
}

fn operand(name: &str, dtype: DType, tensor: &TensorSpec) -> Tensor {
    Tensor::device(name, dtype, tensor.dims.to_vec()).strides(tensor.strides.to_vec()).alignment(tensor.alignment.max(16))
}

/// The tensors that both forms have, in the same order, so that ids do not depend on the form.
struct Operands {
    q: TensorId,
    k: TensorId,
    v: TensorId,
    attn_scale: TensorId,
    o: TensorId,
    stats: Option<TensorId>,
}

fn operands(g: &mut Graph, problem: &Problem, key: Tensor) -> Operands {
    let dtype = problem.dtype();
    Operands {
        q: g.tensor(operand("q", dtype, problem.q())),
        k: g.tensor(key),
        v: g.tensor(operand("v", dtype, problem.v())),
        attn_scale: g.parameter("attn_scale", DType::F32),
        o: g.tensor(operand("o", dtype, problem.o())),
        stats: problem.stats().then(|| g.input("stats", DType::F32, [problem.batch(), problem.heads_q(), problem.seq_q(), 1])),
    }
}
