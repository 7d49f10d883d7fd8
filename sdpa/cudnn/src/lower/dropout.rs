//! Dropout as NVIDIA's frontend spells it: random truth values as numbers, and a multiplication that makes up for them.

use super::expr::Draft;
use super::lowered::Supply;
use cudnn_graph::ir::op::{Distribution, Op, Rng, Seed};
use cudnn_graph::ir::{Mode, Scalar, Tensor, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::problem::Problem;
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED};

/// Tensors of a graph that drops weights.
#[derive(Clone, Copy)]
pub(super) struct Dropout {
    /// 1 where a weight stays.
    stays: TensorId,
    scale: TensorId,
    /// One divided by that, for what is not scaled yet.
    unscaled: f32,
}

impl Dropout {
    /// Of a problem with dropout.
    pub(super) fn of(to: &mut Draft<'_>, problem: &Problem) -> Option<Dropout> {
        let dropout = problem.dropout()?;
        let [seed, offset] = [DROPOUT_SEED, DROPOUT_OFFSET].map(|name| {
            // Two numbers of one tensor are as good as two tensors.
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

    /// What is dropped of a tensor like the scores is zero.
    pub(super) fn drop(self, g: &mut Graph, scores: TensorId) -> TensorId {
        g.pointwise(Mode::Mul, &[scores, self.stays])
    }

    /// Makes up for what was dropped.
    pub(super) fn scale(self, g: &mut Graph, scores: TensorId) -> TensorId {
        g.pointwise(Mode::Mul, &[scores, self.scale])
    }

    /// What sums are multiplied by that meet what is not scaled yet.
    pub(super) fn unscaled(self) -> f32 {
        self.unscaled
    }
}
