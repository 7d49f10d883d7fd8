//! Device sums over queries and keys as one-op graphs, for gradients that the attention engines do not sum.
//!
//! A sum is a GEMM with ones. cuDNN supports every GEMM of these types, but has no engine for a stand-alone reduction (9.19 and 9.27, compute
//! capability 8.0, 8.9, 9.0 and 10.0). Terms have the element type of the gradient; sums are f32. A separate graph rounds them: a GEMM of f32 into a
//! single two-byte number writes the four bytes of an f32 (9.19 on an H200, under memcheck).

use super::copy::{CopyGraph, convert};
use super::lowered::{Lowered, Supply};
use cudnn_graph::ir::op::{Matmul, Op};
use cudnn_graph::ir::{Tensor, TensorId};
use cudnn_graph::{DType, Graph, Verified};
use sdpa_core::spec::{Layout, TensorSpec};

/// A graph that sums a tensor along one axis, and the tensors that a caller binds.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The graph that sums.
    pub graph: Verified,
    /// The tensor that is read.
    pub from: TensorId,
    /// The tensor of ones by which a GEMM multiplies the terms, with one element per term.
    pub ones: TensorId,
    /// The number of terms in each sum.
    pub terms: i64,
    /// Element type of the terms.
    pub dtype: DType,
    /// The tensor that is written, f32.
    pub to: TensorId,
}

/// The sums that compute the gradient of a declared parameter from its terms, which the attention graph writes.
#[derive(Clone, Debug)]
pub struct Sums {
    /// The tensor with the terms, which the attention graph writes.
    pub tensor: TensorId,
    /// The name of the declared parameter.
    pub name: String,
    /// One or two sums, along queries, keys or both. The second reads the output of the first.
    pub steps: Vec<Sum>,
    /// The graph that rounds the last sum from f32 to the element type of the gradient.
    pub rounding: CopyGraph,
}

/// The axis, of the last two, along which a step sums.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    Queries,
    Keys,
}

/// Returns the sum of `matrices` of `rows` and `columns` along one of the two.
fn step([matrices, rows, columns]: [i64; 3], along: Along, [from, to]: [DType; 2]) -> Result<Sum, cudnn_graph::Error> {
    let mut g = Graph::new();
    let x = g.tensor(Tensor::device("from", from, vec![matrices, rows, columns]));
    let (terms, ones, dims) = match along {
        Along::Queries => (rows, [1, 1, rows], [matrices, 1, columns]),
        Along::Keys => (columns, [1, columns, 1], [matrices, rows, 1]),
    };
    let ones = g.tensor(Tensor::device("ones", from, ones.to_vec()));
    let y = g.tensor(Tensor::device("to", to, dims.to_vec()));
    let (a, b) = if along == Along::Queries { (ones, x) } else { (x, ones) };
    g.push(Op::Matmul(Matmul { a, b, c: y, m_override: None, n_override: None, k_override: None, padding: None, compute: DType::F32 }));
    Ok(Sum { graph: g.verify()?, from: x, ones, terms, dtype: from, to: y })
}

/// Returns the sums from extents (batch, heads_q, seq_q, seq_kv) to others that differ in the last two.
fn steps(dtype: DType, from: [i64; 4], to: [i64; 4]) -> Result<Vec<Sum>, cudnn_graph::Error> {
    let [batch, heads, rows, columns] = from;
    let matrices = batch * heads;
    let [over_queries, over_keys] = [to[2] != rows, to[3] != columns];
    Ok(match (over_queries, over_keys) {
        (true, true) => vec![
            step([matrices, rows, columns], Along::Queries, [dtype, DType::F32])?,
            step([matrices, 1, columns], Along::Keys, [DType::F32, DType::F32])?,
        ],
        (true, false) => vec![step([matrices, rows, columns], Along::Queries, [dtype, DType::F32])?],
        (false, true) => vec![step([matrices, rows, columns], Along::Keys, [dtype, DType::F32])?],
        (false, false) => Vec::new(),
    })
}

impl Lowered {
    /// Returns the sums for every parameter gradient that the attention graph writes over more axes than the parameter spans.
    ///
    /// # Errors
    /// Returns an error of [`Graph::verify`], which is a bug of the lowering.
    pub fn sums(&self) -> Result<Vec<Sums>, cudnn_graph::Error> {
        let mut all = Vec::new();
        for (id, supply) in &self.supplies {
            if let Supply::Terms { name, dims } = supply
                && let Some(tensor) = self.graph.graph().get(*id)
                && let [batch, heads, rows, columns] = tensor.dims.0[..]
            {
                let flat = TensorSpec::dense([1, 1, 1, dims.iter().product()], Layout::Bhsd);
                let rounding = convert([DType::F32, tensor.dtype], &flat, &flat)?;
                let steps = steps(tensor.dtype, [batch, heads, rows, columns], *dims)?;
                all.push(Sums { tensor: *id, name: name.clone(), steps, rounding });
            }
        }
        Ok(all)
    }
}
