//! Operands and names of ops.

use super::op::{Op, ScoreGraph, SdpaForward, Seed};
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
