//! Block scales, in the graph pattern of NVIDIA's frontend: operands are dequantized before the GEMMs; P and the output are rounded as usual.

use super::expr::Draft;
use super::lowered::Supply;
use super::transposed;
use cudnn_graph::ir::op::{BlockScaleDequantize, Op, Reduction, ReductionMode};
use cudnn_graph::ir::{Reordering, Tensor, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::problem::Problem;
use sdpa_core::{Amax, BLOCK, BlockScale};

/// The smallest number of keys that block scales support: one more than the number of scales along the keys, which is at least four.
pub(crate) const FEWEST_KEYS: i64 = 5;

/// The block scales of a forward pass, and the tensor for the amax of its output.
pub(super) struct Blocks {
    scales: [(BlockScale, TensorId); 3],
    amax: TensorId,
}

impl Blocks {
    /// Declares the scale tensors of a problem; `None` if it has no block scales.
    pub(super) fn of(to: &mut Draft<'_>, problem: &Problem) -> Option<Blocks> {
        let mut scales = Vec::new();
        for which in BlockScale::ALL {
            let extents = problem.block_scales(which.operand())?.extents();
            let mut tensor = Tensor::device(which.name(), DType::F8E8M0, extents);
            tensor.reordering = Reordering::F8x128x4;
            // K and V are right-hand operands of their GEMMs, so rows of scales are columns there.
            let tensor = match which {
                BlockScale::Q => tensor,
                BlockScale::K | BlockScale::V => transposed(tensor),
            };
            let tensor = to.graph.tensor(tensor);
            to.supplies.push((tensor, Supply::Param(which.name().to_owned())));
            scales.push((which, tensor));
        }
        let amax = to.graph.tensor(Tensor::device(Amax::O.name(), DType::F32, [1; 4]));
        to.supplies.push((amax, Supply::Amax(Amax::O)));
        Some(Blocks { scales: scales.try_into().ok()?, amax })
    }

    /// Dequantizes an operand to f32, with the strides of the operand.
    pub(super) fn widen(&self, g: &mut Graph, x: TensorId, which: BlockScale) -> TensorId {
        let Some((_, scale)) = self.scales.iter().find(|(own, _)| *own == which) else { return x };
        let Some(Tensor { dims, strides, .. }) = g.get(x).cloned() else { return x };
        let y = g.result("wide", DType::F32, dims);
        g.set_strides(y, strides);
        let block = vec![1, BLOCK as i32];
        g.push(Op::BlockScaleDequantize(BlockScaleDequantize { x, scale: *scale, y, block, compute: DType::F32 }));
        y
    }

    /// Emits the amax of the output.
    pub(super) fn tell(&self, g: &mut Graph, o: TensorId) {
        g.push(Op::Reduction(Reduction { mode: ReductionMode::Amax, x: o, y: self.amax, compute: DType::F32, deterministic: false }));
    }
}
