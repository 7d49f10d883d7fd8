//! Operands and names of ops.

use super::op::{Op, Routing, RunningStats, ScoreGraph, SdpaForward, Seed};
use super::tensor::TensorId;

/// One operand of an op: the name of a field of the op, and the tensor in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The name of the field of the op that holds the operand.
    pub field: &'static str,
    /// The tensor that the op reads or writes.
    pub tensor: TensorId,
}

/// The tensors that an op reads and writes, in field order, without those of an inner [`ScoreGraph`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operands {
    /// Tensors that the op reads.
    pub inputs: Vec<Operand>,
    /// Tensors that the op writes.
    pub outputs: Vec<Operand>,
}

impl Operands {
    fn read(mut self, field: &'static str, tensor: impl Into<Option<TensorId>>) -> Self {
        self.inputs.extend(tensor.into().map(|tensor| Operand { field, tensor }));
        self
    }

    fn write(mut self, field: &'static str, tensor: impl Into<Option<TensorId>>) -> Self {
        self.outputs.extend(tensor.into().map(|tensor| Operand { field, tensor }));
        self
    }

    fn running(self, stats: Option<&RunningStats>) -> Self {
        let Some(s) = stats else { return self };
        self.read("factor", s.factor)
            .read("running_mean", s.mean)
            .read("running_variance", s.variance)
            .write("next_running_mean", s.next_mean)
            .write("next_running_variance", s.next_variance)
    }
}

impl Routing {
    /// Returns the tensors `index` and `slot`, as far as the routing has them.
    pub(crate) fn operands(&self) -> (Option<TensorId>, Option<TensorId>) {
        match *self {
            Routing::None => (None, None),
            Routing::Gather(index) => (Some(index), None),
            Routing::Scatter { index, slot, top_k: _ } => (Some(index), Some(slot)),
        }
    }
}

impl Op {
    /// Returns the name of the op in printed graphs; for a pointwise op, the name of its mode.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Pointwise(p) => p.mode.name(),
            Op::Matmul(_) => "matmul",
            Op::Reduction(_) => "reduction",
            Op::Reshape(_) => "reshape",
            Op::Transpose(_) => "transpose",
            Op::Slice(_) => "slice",
            Op::Concat(_) => "concat",
            Op::ConvForward(_) => "conv_forward",
            Op::ConvBackwardData(_) => "conv_backward_data",
            Op::ConvBackwardFilter(_) => "conv_backward_filter",
            Op::NormForward(_) => "norm_forward",
            Op::NormBackward(_) => "norm_backward",
            Op::GenStats(_) => "gen_stats",
            Op::BnFinalize(_) => "bn_finalize",
            Op::BnBackwardWeights(_) => "bn_backward_weights",
            Op::ResampleForward(_) => "resample_forward",
            Op::ResampleBackward(_) => "resample_backward",
            Op::Upsample(_) => "upsample",
            Op::MoeMatmul(_) => "moe_matmul",
            Op::MoeMatmulBackward(_) => "moe_matmul_backward",
            Op::Rope(_) => "rope",
            Op::RopeBackward(_) => "rope_backward",
            Op::Rng(_) => "rng",
            Op::Softmax(_) => "softmax",
            Op::BandMask(_) => "band_mask",
            Op::PagedLoad(_) => "paged_load",
            Op::BlockScaleQuantize(_) => "block_scale_quantize",
            Op::BlockScaleDequantize(_) => "block_scale_dequantize",
            Op::SdpaForward(_) => "sdpa_forward",
            Op::SdpaBackward(_) => "sdpa_backward",
        }
    }

    /// Returns the tensors that the op reads and writes, in field order.
    pub fn operands(&self) -> Operands {
        let none = Operands::default();
        match self {
            Op::Pointwise(p) => none.read("x", p.x).read("b", p.b).read("t", p.t).read("dy", p.dy).write("y", p.y),
            Op::Matmul(m) => none
                .read("a", m.a)
                .read("b", m.b)
                .read("m_override", m.m_override)
                .read("n_override", m.n_override)
                .read("k_override", m.k_override)
                .write("c", m.c),
            Op::Reduction(r) => none.read("x", r.x).write("y", r.y),
            Op::Reshape(r) => none.read("x", r.x).write("y", r.y),
            Op::Transpose(t) => none.read("x", t.x).write("y", t.y),
            Op::Slice(s) => none.read("x", s.x).write("y", s.y),
            Op::Concat(c) => c.inputs.iter().fold(none, |all, &x| all.read("x", x)).write("y", c.y),
            Op::ConvForward(c) => none.read("x", c.x).read("w", c.w).write("y", c.y),
            Op::ConvBackwardData(c) => none.read("dy", c.dy).read("w", c.w).write("dx", c.dx),
            Op::ConvBackwardFilter(c) => none.read("dy", c.dy).read("x", c.x).write("dw", c.dw),
            Op::NormForward(n) => none
                .read("x", n.x)
                .read("scale", n.scale)
                .read("bias", n.bias)
                .read("epsilon", n.epsilon)
                .write("y", n.y)
                .write("mean", n.mean)
                .write("inv_variance", n.inv_variance)
                .running(n.running.as_ref()),
            Op::NormBackward(n) => none
                .read("x", n.x)
                .read("dy", n.dy)
                .read("scale", n.scale)
                .read("mean", n.mean)
                .read("inv_variance", n.inv_variance)
                .write("dx", n.dx)
                .write("dscale", n.dscale)
                .write("dbias", n.dbias),
            Op::GenStats(s) => none.read("x", s.x).write("sum", s.sum).write("square_sum", s.square_sum),
            Op::BnFinalize(b) => none
                .read("sum", b.sum)
                .read("square_sum", b.square_sum)
                .read("scale", b.scale)
                .read("bias", b.bias)
                .read("epsilon", b.epsilon)
                .read("count", b.count)
                .write("mean", b.mean)
                .write("inv_variance", b.inv_variance)
                .write("eq_scale", b.eq_scale)
                .write("eq_bias", b.eq_bias)
                .running(Some(&b.running)),
            Op::BnBackwardWeights(b) => none
                .read("x", b.x)
                .read("dy", b.dy)
                .read("scale", b.scale)
                .read("mean", b.mean)
                .read("inv_variance", b.inv_variance)
                .write("dscale", b.dscale)
                .write("dbias", b.dbias)
                .write("eq_scale_dy", b.eq_scale_dy)
                .write("eq_scale_x", b.eq_scale_x)
                .write("eq_bias", b.eq_bias),
            Op::ResampleForward(r) => none.read("x", r.x).write("y", r.y).write("index", r.index),
            Op::ResampleBackward(r) => none.read("dy", r.dy).read("index", r.index).read("x", r.x).read("y", r.y).write("dx", r.dx),
            Op::Upsample(u) => none.read("x", u.x).write("y", u.y),
            Op::MoeMatmul(m) => {
                let (index, slot) = m.routing.operands();
                none.read("tokens", m.tokens)
                    .read("weights", m.weights)
                    .read("first_token", m.first_token)
                    .read("index", index)
                    .read("slot", slot)
                    .write("y", m.y)
            }
            Op::MoeMatmulBackward(m) => {
                none.read("tokens", m.tokens).read("dy", m.dy).read("first_token", m.first_token).write("dweights", m.dweights)
            }
            Op::Rope(r) => none.read("x", r.x).read("angles", r.angles).write("y", r.y),
            Op::RopeBackward(r) => none.read("dy", r.dy).read("angles", r.angles).write("dx", r.dx),
            Op::Rng(r) => {
                let seed = match r.seed {
                    Seed::Value(_) => None,
                    Seed::Tensor(t) => Some(t),
                };
                none.read("seed", seed).read("offset", r.offset).write("y", r.y)
            }
            Op::Softmax(s) => none
                .read("x", s.x)
                .read("sink", s.sink)
                .write("y", s.y)
                .write("stats", s.stats)
                .write("max", s.max)
                .write("sum_exp", s.sum_exp),
            Op::BandMask(m) => none
                .read("x", m.x)
                .read("fill", m.fill)
                .read("shift_right", m.shift_right)
                .read("left", m.left)
                .read("seq_q", m.seq_q)
                .read("seq_kv", m.seq_kv)
                .write("y", m.y),
            Op::PagedLoad(p) => {
                none.read("container", p.container).read("seq_len", p.seq_len).read("page_table", p.page_table).write("y", p.y)
            }
            Op::BlockScaleQuantize(q) => none.read("x", q.x).write("y", q.y).write("scale", q.scale),
            Op::BlockScaleDequantize(q) => none.read("x", q.x).read("scale", q.scale).write("y", q.y),
            Op::SdpaForward(s) => s.operands(none),
            Op::SdpaBackward(s) => none
                .read("q", s.q)
                .read("k", s.k)
                .read("v", s.v)
                .read("o", s.o)
                .read("d_o", s.d_o)
                .read("stats", s.stats)
                .read("attn_scale", s.attn_scale)
                .read("seq_len_q", s.seq_len_q)
                .read("seq_len_kv", s.seq_len_kv)
                .write("dq", s.dq)
                .write("dk", s.dk)
                .write("dv", s.dv),
        }
    }

    /// Returns the ops that modify the scores inside a unified attention op; `None` for any other op, or if there are none.
    pub fn score(&self) -> Option<&ScoreGraph> {
        match self {
            Op::SdpaForward(s) => s.score.as_ref(),
            Op::SdpaBackward(s) => s.score.as_ref(),
            Op::Pointwise(_)
            | Op::Matmul(_)
            | Op::Reduction(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Concat(_)
            | Op::ConvForward(_)
            | Op::ConvBackwardData(_)
            | Op::ConvBackwardFilter(_)
            | Op::NormForward(_)
            | Op::NormBackward(_)
            | Op::GenStats(_)
            | Op::BnFinalize(_)
            | Op::BnBackwardWeights(_)
            | Op::ResampleForward(_)
            | Op::ResampleBackward(_)
            | Op::Upsample(_)
            | Op::MoeMatmul(_)
            | Op::MoeMatmulBackward(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::Rng(_)
            | Op::Softmax(_)
            | Op::BandMask(_)
            | Op::PagedLoad(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_) => None,
        }
    }
}

impl SdpaForward {
    fn operands(&self, none: Operands) -> Operands {
        let mut all = none
            .read("q", self.q)
            .read("k", self.k)
            .read("v", self.v)
            .read("attn_scale", self.attn_scale)
            .read("sink", self.sink)
            .read("block_mask", self.block_mask)
            .read("page_table_k", self.page_table_k)
            .read("page_table_v", self.page_table_v)
            .read("seq_len_q", self.seq_len_q)
            .read("seq_len_kv", self.seq_len_kv)
            .read("cu_seq_len_q", self.cu_seq_len_q)
            .read("cu_seq_len_kv", self.cu_seq_len_kv)
            .write("o", self.o)
            .write("stats", self.stats)
            .write("max", self.max)
            .write("sum_exp", self.sum_exp);
        if let Some(d) = &self.dropout {
            all = all.read("seed", d.seed).read("offset", d.offset).write("rng_dump", d.rng_dump);
        }
        if let Some(f) = &self.fp8 {
            all = all
                .read("descale_q", f.descale_q)
                .read("descale_k", f.descale_k)
                .read("descale_v", f.descale_v)
                .read("descale_s", f.descale_s)
                .read("scale_s", f.scale_s)
                .read("scale_o", f.scale_o)
                .write("amax_s", f.amax_s)
                .write("amax_o", f.amax_o);
        }
        all
    }
}
