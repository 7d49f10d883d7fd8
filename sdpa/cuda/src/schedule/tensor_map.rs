//! Tensor maps (TMA descriptors) of operands.

use super::Address;
use sdpa_core::{Side, TensorSpec};
use sdpa_driver::{Error, Submission, TensorMap, Tiled};

/// The tensor map (TMA descriptor) of an operand, without the address and token counts of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandMap {
    pub(crate) address: Address,
    tiled: Tiled,
    /// The side of the packed tokens, if any.
    packed: Option<Side>,
}

impl OperandMap {
    /// Describes the tensor map of an operand with a box of these numbers of rows and heads.
    pub(crate) fn new(address: Address, tensor: &TensorSpec, rows_and_heads: [u32; 2]) -> OperandMap {
        OperandMap { address, tiled: tiled(tensor, rows_and_heads), packed: None }
    }

    /// Describes the tensor map of an operand with packed tokens. Two axes both step along tokens, and the first ends after one box, so
    /// that a kernel can choose where a box ends.
    pub(crate) fn packed(address: Address, side: Side, tensor: &TensorSpec, [rows, of_heads]: [u32; 2]) -> OperandMap {
        let [_, heads, _, dim] = tensor.dims.map(|d| d.max(1) as u64);
        let bytes = |axis: usize| 2 * tensor.strides[axis].unsigned_abs();
        let head = if heads == 1 { 16 } else { bytes(1) };
        let tiled = Tiled { extents: [dim, rows.into(), heads, 0], strides: [bytes(2), head, bytes(2)], tile: [64, rows, of_heads, 1] };
        OperandMap { address, tiled, packed: Some(side) }
    }

    /// Encodes the tensor map of the operand at `address`, for these numbers of query and key tokens. With packed tokens, the map begins
    /// one box before `address`.
    pub(crate) fn encode(&self, submission: &Submission<'_>, address: u64, tokens: [i64; 2]) -> Result<TensorMap, Error> {
        let Some(side) = self.packed else { return submission.tensor_map(address, &self.tiled) };
        let Tiled { extents: [dim, rows, heads, _], strides, tile } = self.tiled;
        let tiled = Tiled { extents: [dim, rows, heads, tokens[side as usize].unsigned_abs() + 1], strides, tile };
        submission.tensor_map(address.wrapping_sub(strides[0] * rows), &tiled)
    }
}

/// Returns the tensor of an operand whose box has these numbers of rows and heads.
fn tiled(tensor: &TensorSpec, [rows, heads]: [u32; 2]) -> Tiled {
    let [batch, head, seq, dim] = tensor.dims.map(|d| d.max(1) as u64);
    // The stride of an axis of one element is never used, but TMA must accept it.
    let bytes = |axis: usize| if tensor.dims[axis] <= 1 { 16 } else { 2 * tensor.strides[axis].unsigned_abs() };
    Tiled { extents: [dim, seq, head, batch], strides: [bytes(2), bytes(1), bytes(0)], tile: [64, rows, heads, 1] }
}
