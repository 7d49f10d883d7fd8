//! Packed documents: tensors whose batch entries begin where offsets say, and are as long as lengths say.

use super::expr::Draft;
use super::lowered::{Supply, Told};
use cudnn_graph::DType;
use cudnn_graph::ir::{Ragged, Tensor, TensorId};
use sdpa_core::Side;
use sdpa_core::problem::Problem;

/// A tensor of one side of a problem as its documents lie, where it has such. Offsets count elements, in 64 bits: those of 32 end at packs of
/// 2³¹ elements.
pub(super) fn placed(to: &mut Draft<'_>, problem: &Problem, side: Side, tensor: Tensor) -> Tensor {
    match offsets(to, problem, side, &tensor) {
        Some(offsets) => tensor.ragged(Ragged { offsets, multiplier: None }),
        None => tensor,
    }
}

/// Where documents begin in a tensor of these strides.
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

/// The stride of tokens, which is that of rows: keys are told of as columns.
fn tokens_apart(tensor: &Tensor) -> Option<i64> {
    let [.., row, column] = tensor.strides.0[..] else { return None };
    Some(row.max(column))
}

/// How many tokens each document has; the same tensor wherever it is asked for.
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
