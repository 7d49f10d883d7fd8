//! Packed sequences: tensors with ragged offsets and per-sequence lengths.

use super::expr::Draft;
use super::lowered::{Supply, Told};
use cudnn_graph::DType;
use cudnn_graph::ir::{Ragged, Tensor, TensorId};
use sdpa_core::Side;
use sdpa_core::problem::Problem;

/// Makes a tensor ragged if its side is packed. Offsets count elements in 64 bits: 32 bits would end at packs of 2³¹ elements.
pub(super) fn placed(to: &mut Draft<'_>, problem: &Problem, side: Side, tensor: Tensor) -> Tensor {
    match offsets(to, problem, side, &tensor) {
        Some(offsets) => tensor.ragged(Ragged { offsets, multiplier: None }),
        None => tensor,
    }
}

/// Returns the offsets tensor for a tensor with these strides; `None` if the side is not packed.
fn offsets(to: &mut Draft<'_>, problem: &Problem, side: Side, tensor: &Tensor) -> Option<TensorId> {
    if !problem.packs(side) {
        return None;
    }
    let token = tokens_apart(tensor)?;
    let name = match side {
        Side::Queries => format!("offsets_q_{token}"),
        Side::Keys => format!("offsets_kv_{token}"),
    };
    Some(told(to, Told::Offsets(side, token), name, DType::I64, problem.batch() + 1))
}

/// Returns the token stride, which is the row stride. Keys are described as columns.
fn tokens_apart(tensor: &Tensor) -> Option<i64> {
    let [.., row, column] = tensor.strides.0[..] else { return None };
    Some(row.max(column))
}

/// Returns the tensor of sequence lengths. Repeated calls return the same tensor.
pub(super) fn lengths(to: &mut Draft<'_>, problem: &Problem, side: Side) -> TensorId {
    let name = match side {
        Side::Queries => "seq_len_q",
        Side::Keys => "seq_len_kv",
    };
    told(to, Told::Lengths(side), name.to_owned(), DType::I32, problem.batch())
}

fn told(to: &mut Draft<'_>, what: Told, name: String, dtype: DType, count: i64) -> TensorId {
    if let Some((tensor, _)) = to.supplies.iter().find(|(_, supply)| *supply == Supply::Documents(what)) {
        return *tensor;
    }
    let tensor = to.graph.tensor(Tensor::device(name, dtype, [count, 1, 1, 1]));
    to.supplies.push((tensor, Supply::Documents(what)));
    tensor
}
