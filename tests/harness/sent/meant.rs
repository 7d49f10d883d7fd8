//! What a plan should have on record of the graph that it was made of.

use super::{Counts, op_line};
use cudnn_graph::ir::op::{
    BandMask, BandSide, BlockScaleDequantize, Matmul, Op, PagedLoad, Pointwise, Reduction, Reshape, ReshapeMode, ScoreGraph, SdpaForward,
    Softmax,
};
use cudnn_graph::ir::pointwise::Signature;
use cudnn_graph::ir::{Mode, Reordering, Storage, Tensor, TensorId};
use cudnn_graph::{DType, Verified};

pub(super) struct Meant<'g> {
    graph: &'g Verified,
    pub(super) tensors: Counts,
    pub(super) ops: Counts,
    /// For tensors that the graph does not have.
    next_uid: i64,
}

impl Meant<'_> {
    pub(super) fn of(graph: &Verified) -> Meant<'_> {
        let mut meant = Meant { graph, tensors: Counts::new(), ops: Counts::new(), next_uid: graph.tensors().len() as i64 + 1 };
        for op in graph.ops() {
            let line = meant.op(op);
            *meant.ops.entry(line).or_default() += 1;
        }
        meant
    }

    fn tensor(&mut self, id: TensorId) -> String {
        let tensor = &self.graph.tensors()[id.index()];
        self.describe(id.uid(), tensor)
    }

    fn describe(&mut self, uid: i64, tensor: &Tensor) -> String {
        let line = self.line(uid, tensor);
        self.tensors.insert(line, 1);
        uid.to_string()
    }

    fn line(&self, uid: i64, tensor: &Tensor) -> String {
        let list = |v: &[i64]| format!("[{}]", v.iter().map(i64::to_string).collect::<Vec<_>>().join(","));
        let by_value = match tensor.storage {
            Storage::ByValue(_) | Storage::Constant(_) => true,
            Storage::Device | Storage::Virtual => false,
        };
        let mut fields = vec![
            ("name", uid.to_string()),
            ("dataType", data_type(tensor.dtype).to_owned()),
            ("dim", list(&tensor.dims.0)),
            ("stride", list(&tensor.strides.0)),
            ("isVirtual", tensor.is_virtual().to_string()),
            ("isByValue", by_value.to_string()),
            ("ptrAlignment", tensor.alignment.to_string()),
        ];
        match tensor.reordering {
            Reordering::None => {}
            Reordering::F8x128x4 => fields.push(("reordering", "CUDNN_TENSOR_REORDERING_F8_128x4".to_owned())),
        }
        // Offsets are on record with each tensor that has them, and nowhere else.
        if let Some(ragged) = tensor.ragged {
            fields.push(("isRagged", self.line(ragged.offsets.uid(), &self.graph.tensors()[ragged.offsets.index()])));
            fields.extend(ragged.multiplier.map(|_| ("multiplier", "no plan had one when this comparison was written".to_owned())));
        }
        op_line("tensor", fields)
    }

    fn fields<'n>(&mut self, operands: &[(&'n str, Option<TensorId>)]) -> Vec<(&'n str, String)> {
        operands.iter().filter_map(|&(name, id)| id.map(|id| (name, self.tensor(id)))).collect()
    }

    fn op(&mut self, op: &Op) -> String {
        match op {
            Op::Pointwise(p) => self.pointwise(p),
            Op::Matmul(m) => self.matmul(m),
            Op::Reduction(r) => self.reduction(r),
            Op::Softmax(s) => self.softmax(s),
            Op::BandMask(m) => self.band_mask(m),
            Op::SdpaForward(s) => self.sdpa_forward(s),
            Op::Reshape(r) => self.reshape(r),
            Op::PagedLoad(p) => self.paged_load(p),
            Op::BlockScaleDequantize(q) => self.dequantize(q),
            Op::Transpose(_)
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
            | Op::BlockScaleQuantize(_)
            | Op::SdpaBackward(_) => {
                format!("{}: no plan had one when this comparison was written", op.name())
            }
        }
    }

    fn pointwise(&mut self, p: &Pointwise) -> String {
        let mut fields = self.fields(&[("X", Some(p.x)), ("B", p.b), ("T", p.t), ("DY", p.dy), ("Y", Some(p.y))]);
        fields.push(("pointwiseMode", mode_name(p.mode)));
        fields.push(("mathPrec", data_type(p.compute).to_owned()));
        fields.extend(p.params.axis.map(|axis| ("axis", axis.to_string())));
        op_line("POINTWISE", fields)
    }

    fn dequantize(&mut self, q: &BlockScaleDequantize) -> String {
        let mut fields = self.fields(&[("X", Some(q.x)), ("scale", Some(q.scale)), ("Y", Some(q.y))]);
        let sizes: Vec<String> = q.block.iter().map(i32::to_string).collect();
        fields.push(("block_size", format!("[{}]", sizes.join(","))));
        fields.push(("mathPrec", data_type(q.compute).to_owned()));
        op_line("BLOCK_SCALE_DEQUANTIZE", fields)
    }

    fn matmul(&mut self, m: &Matmul) -> String {
        let overrides = [("mOverride", m.m_override), ("nOverride", m.n_override), ("kOverride", m.k_override)];
        let mut fields = self.fields(&[("matA", Some(m.a)), ("matB", Some(m.b)), ("matC", Some(m.c))]);
        fields.extend(self.fields(&overrides));
        fields.push(("mathPrec", data_type(m.compute).to_owned()));
        if let Some(padding) = m.padding {
            fields.push(("paddingDataType", "CUDNN_TYPE_DOUBLE".to_owned()));
            fields.push(("paddingValue", format!("{padding:?}")));
        }
        op_line("MATMUL", fields)
    }

    fn reduction(&mut self, r: &Reduction) -> String {
        let mut fields = self.fields(&[("X", Some(r.x)), ("Y", Some(r.y))]);
        fields.push(("reductionOp", r.mode.name().to_uppercase()));
        fields.push(("mathPrec", data_type(r.compute).to_owned()));
        if r.deterministic {
            fields.push(("isDeterministic", "true".to_owned()));
        }
        op_line("REDUCTION", fields)
    }

    fn reshape(&mut self, r: &Reshape) -> String {
        let mut fields = self.fields(&[("X", Some(r.x)), ("Y", Some(r.y))]);
        match r.mode {
            None | Some(ReshapeMode::ViewOnly) => {}
            Some(ReshapeMode::Logical) => fields.push(("mode", "CUDNN_RESHAPE_LOGICAL".to_owned())),
        }
        op_line("RESHAPE", fields)
    }

    fn softmax(&mut self, s: &Softmax) -> String {
        let mut fields = self.fields(&[
            ("X", Some(s.x)),
            ("Y", Some(s.y)),
            ("statsDesc", s.stats),
            ("maxDesc", s.max),
            ("sumExpDesc", s.sum_exp),
            ("sinkDesc", s.sink),
        ]);
        if s.stats_log2 {
            fields.push(("statsLog2", "true".to_owned()));
        }
        op_line("SOFTMAX", fields)
    }

    fn paged_load(&mut self, p: &PagedLoad) -> String {
        let fields = [("container", Some(p.container)), ("pageTable", Some(p.page_table)), ("sequence", Some(p.seq_len)), ("Y", Some(p.y))];
        op_line("PAGED_CACHE_LOAD", self.fields(&fields))
    }

    fn band_mask(&mut self, m: &BandMask) -> String {
        let mut fields = self.fields(&[
            ("X", Some(m.x)),
            ("B", Some(m.fill)),
            ("Y", Some(m.y)),
            ("shiftRightBoundDesc", m.shift_right),
            ("leftBoundDesc", m.left),
            ("seqLenQDesc", m.seq_q),
            ("seqLenKVDesc", m.seq_kv),
        ]);
        let comparison = match m.side {
            BandSide::Right => "CMP_GE",
            BandSide::Left => "CMP_GT",
        };
        fields.push(("comparisonMode", comparison.to_owned()));
        op_line("DIAGONAL_BAND_MASK", fields)
    }

    fn sdpa_forward(&mut self, s: &SdpaForward) -> String {
        let mut fields = self.fields(&[
            ("Q", Some(s.q)),
            ("K", Some(s.k)),
            ("V", Some(s.v)),
            ("O", Some(s.o)),
            ("scale", s.attn_scale),
            ("pageTableK", s.page_table_k),
            ("pageTableV", s.page_table_v),
            ("seqLenQ", s.seq_len_q),
            ("seqLenKV", s.seq_len_kv),
        ]);
        if s.stats.or(s.max).or(s.sum_exp).is_some() {
            let dims = |id: TensorId| self.graph.tensors()[id.index()].dims.0.clone();
            let (q, k) = (dims(s.q), dims(s.k));
            // Keys of a cache are as many as the score says, or else what the table reaches.
            let reached = s.page_table_k.map_or(k[2], |table| k[2] * dims(table)[2]);
            let seq_kv = s.score.as_ref().map_or(reached, |score| dims(score.input)[3]);
            let stand_in = Tensor::virtual_("", DType::F32, vec![q[0], q[1], q[2], seq_kv]);
            let (x, y) = (self.describe(self.next_uid, &stand_in), self.describe(self.next_uid + 1, &stand_in));
            self.next_uid += 2;
            let results = self.fields(&[("statsDesc", s.stats), ("maxDesc", s.max), ("sumExpDesc", s.sum_exp)]);
            let inner = [("X", x), ("Y", y)].into_iter().chain(results).collect();
            fields.push(("softmax", op_line("SOFTMAX", inner)));
        }
        if let Some(ScoreGraph { input, output, ops }) = &s.score {
            for op in ops {
                let line = self.op(op);
                *self.ops.entry(line).or_default() += 1;
            }
            fields.push(("subgraphInputUid", input.uid().to_string()));
            fields.push(("subgraphOutputUid", output.uid().to_string()));
        }
        op_line("SDPA_FWD", fields)
    }
}

fn data_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "FLOAT",
        DType::F64 => "DOUBLE",
        DType::F16 => "HALF",
        DType::BF16 => "BFLOAT16",
        DType::I8 => "INT8",
        DType::U8 => "UINT8",
        DType::I32 => "INT32",
        DType::I64 => "INT64",
        DType::Bool => "BOOLEAN",
        DType::F8E4M3 => "FP8_E4M3",
        DType::F8E5M2 => "FP8_E5M2",
        DType::F8E8M0 => "FP8_E8M0",
        DType::F4E2M1 => "FP4_E2M1",
        DType::I4 => "INT4",
        DType::U4 => "UINT4",
    }
}

/// The functions that the library calls forward because it has their derivatives too.
const FORWARD: [Mode; 8] = [
    Mode::ReluFwd,
    Mode::TanhFwd,
    Mode::SigmoidFwd,
    Mode::EluFwd,
    Mode::GeluFwd,
    Mode::SoftplusFwd,
    Mode::SwishFwd,
    Mode::GeluApproxTanhFwd,
];

/// The library's name.
fn mode_name(mode: Mode) -> String {
    let name = mode.name().to_uppercase();
    match mode.signature() {
        Signature::LogicalBinary | Signature::LogicalUnary => format!("LOGICAL_{name}"),
        Signature::Select => "BINARY_SELECT".to_owned(),
        Signature::Unary if FORWARD.contains(&mode) => format!("{name}_FWD"),
        Signature::Unary | Signature::Identity | Signature::Binary | Signature::Compare | Signature::Index | Signature::Backward => name,
    }
}
