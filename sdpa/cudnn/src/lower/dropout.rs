//! Dropout in the graph pattern of NVIDIA's frontend: multiply by a random 0/1 tensor, then by the inverse keep probability.

use super::expr::Draft;
use super::lowered::Supply;
use cudnn_graph::ir::op::{Distribution, Op, Rng, Seed};
use cudnn_graph::ir::{Mode, Scalar, Tensor, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::problem::Problem;
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED};

/// Tensors of a graph with dropout.
#[derive(Clone, Copy)]
pub(super) struct Dropout {
    /// 1 where a probability is kept, else 0.
    stays: TensorId,
    scale: TensorId,
    /// The keep probability, for sums over values that are not scaled yet.
    unscaled: f32,
}

impl Dropout {
    /// Emits the random tensor of a problem; `None` without dropout.
    pub(super) fn of(to: &mut Draft<'_>, problem: &Problem) -> Option<Dropout> {
        let dropout = problem.dropout()?;
        let [seed, offset] = [DROPOUT_SEED, DROPOUT_OFFSET].map(|name| {
            // Alignment 8 lets seed and offset be two elements of one i64 tensor.
            let tensor = to.graph.tensor(Tensor::device(name, DType::I64, [1; 4]).alignment(8));
            to.supplies.push((tensor, Supply::Param(name.to_owned())));
            tensor
        });
        let stays = to.graph.result("stays", DType::F32, super::composite::scores_like(problem));
        let distribution = Distribution::Bernoulli(dropout.keep());
        to.graph.push(Op::Rng(Rng { y: stays, distribution, seed: Seed::Tensor(seed), offset: Some(offset) }));
        let scale = to.graph.scalar(Scalar::F32(dropout.scale()));
        Some(Dropout { stays, scale, unscaled: 1.0 - dropout.p() })
    }

    /// Sets dropped elements of a score-shaped tensor to zero.
    pub(super) fn drop(self, g: &mut Graph, scores: TensorId) -> TensorId {
        g.pointwise(Mode::Mul, &[scores, self.stays])
    }

    /// Multiplies by the inverse keep probability.
    pub(super) fn scale(self, g: &mut Graph, scores: TensorId) -> TensorId {
        g.pointwise(Mode::Mul, &[scores, self.scale])
    }

    /// Returns the factor for sums over values that are not scaled yet.
    pub(super) fn unscaled(self) -> f32 {
        self.unscaled
    }
}
