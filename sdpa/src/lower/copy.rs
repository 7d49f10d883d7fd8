//! A copy on the device as a graph of one op, for operands that the attention engines cannot read or write in place.

use crate::problem::{OPERANDS, Problem};
use crate::spec::{Layout, TensorSpec};
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Verified};

/// A copy graph and the tensors that a caller binds.
#[derive(Clone, Debug)]
pub struct Copy {
    /// The graph.
    pub graph: Verified,
    /// What is read.
    pub from: TensorId,
    /// What is written.
    pub to: TensorId,
}

/// Copies a tensor of one description to another of the same extents.
///
/// # Errors
/// What [`Graph::verify`] finds: a bug of the lowering.
pub fn copy(dtype: DType, from: &TensorSpec, to: &TensorSpec) -> Result<Copy, cudnn_graph::Error> {
    let mut g = Graph::new();
    let tensor = |name: &str, t: &TensorSpec| {
        Tensor::device(name, dtype, t.dims.to_vec()).strides(t.strides.to_vec()).alignment(t.alignment.min(16))
    };
    let x = g.tensor(tensor("from", from));
    let y = g.pointwise_as(Mode::Identity, &[x], DType::F32, dtype, Params::default());
    let target = tensor("to", to);
    g.output(y, "to", dtype);
    g.set_strides(y, target.strides);
    g.set_alignment(y, target.alignment);
    Ok(Copy { graph: g.verify()?, from: x, to: y })
}

/// Bytes that engines read at once: base addresses and strides must be multiples.
const VECTOR_BYTES: i64 = 16;

/// Whether the engines can use a tensor where it is.
pub(crate) fn in_place(tensor: &TensorSpec, dtype: DType) -> bool {
    let element = i64::from(dtype.bits() / 8);
    let steps = (0..3).filter(|&axis| tensor.dims[axis] > 1).map(|axis| tensor.strides[axis]);
    tensor.alignment >= VECTOR_BYTES as u32 && steps.into_iter().all(|s| s > 0 && s * element % VECTOR_BYTES == 0)
}

/// The same problem with every operand that cannot be used in place made dense, and which those are.
pub(crate) fn densify(problem: &Problem) -> (Problem, Vec<usize>) {
    let copied: Vec<usize> = (0..OPERANDS.len()).filter(|&n| !in_place(&problem.tensors()[n], problem.dtype())).collect();
    let dense = copied.iter().fold(*problem, |p, &n| p.with_tensor(n, TensorSpec::dense(p.tensors()[n].dims, Layout::Bhsd)));
    (dense, copied)
}
