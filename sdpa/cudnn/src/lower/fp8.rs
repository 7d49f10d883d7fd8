//! 8-bit floats in the graph pattern of NVIDIA's frontend: descales after the GEMMs, scales before rounding, and amax of the unscaled values.
//!
//! The graphs are those of a composite pass with other ops in between. Engines match each pattern as a whole.

use super::backward::{Ports, fold, turned};
use super::composite::{product, scores_like};
use super::expr::{Draft, Pass};
use super::lowered::{Lowered, Supply};
use super::mask::{self, Lengths};
use super::{Form, LowerError, Spelling, dtype, transposed};
use cudnn_graph::ir::op::{Op, Reduction, ReductionMode};
use cudnn_graph::ir::ty::Dims;
use cudnn_graph::ir::{Mode, Tensor, TensorId};
use cudnn_graph::{DType, Graph, Version};
use sdpa_core::backward::BackwardProblem;
use sdpa_core::{Amax, Direction, Fp8Scale, Operand, Side};

/// The scales of a pass, and its amax tensors.
pub(super) struct Scales {
    scales: Vec<(Fp8Scale, TensorId)>,
    amax: Vec<(Amax, TensorId)>,
}

impl Scales {
    /// Declares the scales of a pass over operands of this type; `None` unless they are 8-bit floats.
    pub(super) fn of(to: &mut Draft<'_>, operands: sdpa_core::DType, direction: Direction) -> Option<Scales> {
        if !operands.is_fp8() {
            return None;
        }
        let mut number = |name: &str, supply: Supply| {
            let tensor = to.graph.tensor(Tensor::device(name, DType::F32, [1; 4]));
            to.supplies.push((tensor, supply));
            tensor
        };
        let scale = |scale: &Fp8Scale| (*scale, number(scale.name(), Supply::Param(scale.name().to_owned())));
        let scales = Fp8Scale::of(direction).iter().map(scale).collect();
        let amax = Amax::of(direction).iter().map(|amax| (*amax, number(amax.name(), Supply::Amax(*amax)))).collect();
        Some(Scales { scales, amax })
    }

    /// Multiplies by these scales in order.
    pub(super) fn multiply<const N: usize>(&self, g: &mut Graph, x: TensorId, by: [Fp8Scale; N]) -> TensorId {
        by.into_iter().filter_map(|by| self.at(by)).fold(x, |x, scale| g.pointwise(Mode::Mul, &[x, scale]))
    }

    fn at(&self, which: Fp8Scale) -> Option<TensorId> {
        self.scales.iter().find(|(scale, _)| *scale == which).map(|(_, tensor)| *tensor)
    }

    /// Emits the amax of a tensor.
    pub(super) fn tell(&self, g: &mut Graph, x: TensorId, amax: Amax) {
        if let Some((_, y)) = self.amax.iter().find(|(of, _)| *of == amax) {
            g.push(Op::Reduction(Reduction { mode: ReductionMode::Amax, x, y: *y, compute: DType::F32, deterministic: false }));
        }
    }

    /// Emits the amax, and multiplies by the scale into an existing tensor.
    fn narrow_into(&self, g: &mut Graph, x: TensorId, (amax, scale): (Amax, Fp8Scale), into: TensorId) {
        self.tell(g, x, amax);
        if let Some(scale) = self.at(scale) {
            g.pointwise_into(Mode::Mul, &[x, scale], into);
        }
    }

    /// Emits the amax of P, and rounds P for the second GEMM of a forward pass.
    pub(super) fn weights(&self, g: &mut Graph, weights: TensorId, like: DType) -> TensorId {
        self.tell(g, weights, Amax::S);
        let narrow = self.multiply(g, weights, [Fp8Scale::ScaleS]);
        g.set_dtype(narrow, like)
    }

    /// Applies the descales to the result of the second GEMM, and rounds it into `o`.
    pub(super) fn output(&self, g: &mut Graph, product: TensorId, o: TensorId) {
        let real = self.multiply(g, product, [Fp8Scale::DescaleS, Fp8Scale::DescaleV]);
        self.narrow_into(g, real, (Amax::O, Fp8Scale::ScaleO), o);
    }
}

/// Why a backward pass of 8-bit floats is refused with score_mods.
const NO_SCORE_MODS: &str =
    "score_mods in an FP8 backward pass are not supported: NVIDIA's frontend has no graph for them; use the cpu executor";
const NO_DROPOUT: &str = "dropout in an FP8 backward pass is not supported: the graph of NVIDIA's frontend does not drop dP where P is \
                          dropped; use the cpu executor";

/// Lowers the backward pass. Masks precede the subtraction of stats, row sums are not in the workspace, and dQ is computed in one GEMM.
pub(super) fn backward(b: &BackwardProblem, runtime: Version, spelling: Spelling) -> Result<Lowered, LowerError> {
    if b.gradient().is_some() {
        return Err(LowerError::Unsupported(NO_SCORE_MODS.to_owned()));
    }
    if b.forward().dropout().is_some() {
        return Err(LowerError::Unsupported(NO_DROPOUT.to_owned()));
    }
    let (mut g, mut supplies) = (Graph::new(), Vec::new());
    let p = b.forward();
    let to = &mut Draft { graph: &mut g, supplies: &mut supplies };
    let ports = Ports::new(to, b, transposed);
    let Some(scales) = Scales::of(to, p.dtype(), Direction::Backward) else {
        return Err(LowerError::Unsupported("the FP8 backward pass supports 8-bit floats only".to_owned()));
    };
    let lengths = Lengths::of(p);
    let [rows, keys] = lengths.overrides(to, p, runtime);
    let (attn_scale, elements) = (ports.attn_scale, dtype(p.dtype()));

    let products = to.graph.pointwise(Mode::Mul, &[ports.at(Operand::DO), ports.at(Operand::O)]);
    let sums = to.graph.reduce(ReductionMode::Add, products, [p.batch(), p.heads_q(), p.seq_q(), 1]);
    let row_sum = scales.multiply(to.graph, sums, [Fp8Scale::DescaleDO, Fp8Scale::DescaleO]);

    let scores = product(to.graph, [ports.at(Operand::Q), ports.at(Operand::K)], scores_like(p), [rows, keys, None], None);
    let scaled = to.graph.pointwise(Mode::Mul, &[scores, attn_scale]);
    let scaled = scales.multiply(to.graph, scaled, [Fp8Scale::DescaleQ, Fp8Scale::DescaleK]);
    let masked = mask::apply(to, scaled, p, lengths, runtime, Pass::Backward(spelling.vectors));
    let shifted = to.graph.pointwise(Mode::Sub, &[masked, ports.stats]);
    let weights = to.graph.pointwise(Mode::Exp, &[shifted]);
    let narrow = scales.multiply(to.graph, weights, [Fp8Scale::ScaleS]);
    to.graph.set_dtype(narrow, elements);
    let narrow = turned(to.graph, p, narrow, elements);
    let dv = fold(to, b, [narrow, ports.at(Operand::DO)], [keys, None, rows]);
    let dv = scales.multiply(to.graph, dv, [Fp8Scale::DescaleS, Fp8Scale::DescaleDO]);
    scales.narrow_into(to.graph, dv, (Amax::DV, Fp8Scale::ScaleDV), ports.at(Operand::DV));

    let d_weights = product(to.graph, [ports.at(Operand::DO), ports.at(Operand::V)], scores_like(p), [rows, keys, None], None);
    let d_weights = scales.multiply(to.graph, d_weights, [Fp8Scale::DescaleDO, Fp8Scale::DescaleV]);
    let centred = to.graph.pointwise(Mode::Sub, &[d_weights, row_sum]);
    let slopes = to.graph.pointwise(Mode::Mul, &[centred, weights]);
    let slopes = to.graph.pointwise(Mode::Mul, &[slopes, attn_scale]);
    scales.tell(to.graph, slopes, Amax::DP);
    let narrow = scales.multiply(to.graph, slopes, [Fp8Scale::ScaleDP]);
    let upstream = dtype(b.dtype_of(Operand::DO));
    to.graph.set_dtype(narrow, upstream);
    let narrow_turned = turned(to.graph, p, narrow, upstream);
    let dk = fold(to, b, [narrow_turned, ports.at(Operand::Q)], [keys, None, rows]);
    let dk = scales.multiply(to.graph, dk, [Fp8Scale::DescaleDP, Fp8Scale::DescaleQ]);
    scales.narrow_into(to.graph, dk, (Amax::DK, Fp8Scale::ScaleDK), ports.at(Operand::DK));

    let key = p.k();
    let key = g.reshape(ports.at(Operand::K), key.dims, key.strides, None);
    // As in NVIDIA's frontend, the view has another element type than its source.
    g.set_dtype(key, DType::F32);
    let dq = product(&mut g, [narrow, key], Dims::from([p.batch(), p.heads_q(), p.seq_q(), p.dim_qk()]), [rows, None, keys], None);
    let dq = scales.multiply(&mut g, dq, [Fp8Scale::DescaleDP, Fp8Scale::DescaleK]);
    scales.narrow_into(&mut g, dq, (Amax::DQ, Fp8Scale::ScaleDQ), ports.at(Operand::DQ));
    let Ports { operands, stats, attn_scale } = ports;
    Ok(Lowered {
        graph: g.verify()?,
        form: Form::Composite,
        spelling: Some(spelling),
        operands,
        attn_scale,
        stats: Some(stats),
        row_max: None,
        sum_exp: None,
        row_sum: None,
        totals: Side::ALL.map(|side| p.total(side)),
        supplies,
    })
}
