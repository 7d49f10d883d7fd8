//! One function per op: rows of attribute and value.

use super::Encoder;
use crate::ffi::codes::{
    Attribute, AttributeType, Kind, PointwiseMode, ReductionOperator, ReshapeMode as ReshapeModeCode, RngDistribution,
};
use crate::ir::TensorId;
use crate::ir::op::{
    BandMask, BandSide, BlockScaleDequantize, BlockScaleQuantize, Distribution, Matmul, Op, PagedLoad, Pointwise, Reduction, ReductionMode,
    Reshape, ReshapeMode, Rng, Seed, Slice, Softmax, Transpose,
};
use crate::ir::pointwise::Mode;
use crate::program::DescriptorId;

impl Encoder<'_> {
    pub(super) fn op(&mut self, op: &Op) -> DescriptorId {
        match op {
            Op::Pointwise(p) => self.pointwise(p),
            Op::Matmul(m) => self.matmul(m),
            Op::Reduction(r) => self.reduction(r),
            Op::Reshape(r) => self.reshape(r),
            Op::Transpose(t) => self.transpose(t),
            Op::Slice(s) => self.slice(s),
            Op::Concat(c) => self.concat(c),
            Op::ConvForward(c) => self.conv_forward(c),
            Op::ConvBackwardData(c) => self.conv_backward_data(c),
            Op::ConvBackwardFilter(c) => self.conv_backward_filter(c),
            Op::NormForward(n) => self.norm_forward(n),
            Op::NormBackward(n) => self.norm_backward(n),
            Op::GenStats(s) => self.gen_stats(s),
            Op::BnFinalize(b) => self.bn_finalize(b),
            Op::BnBackwardWeights(b) => self.bn_backward_weights(b),
            Op::ResampleForward(r) => self.resample_forward(r),
            Op::ResampleBackward(r) => self.resample_backward(r),
            Op::Upsample(u) => self.upsample(u),
            Op::MoeMatmul(m) => self.moe_matmul(m),
            Op::MoeMatmulBackward(m) => self.moe_matmul_backward(m),
            Op::Rope(r) => self.rope(r),
            Op::RopeBackward(r) => self.rope_backward(r),
            Op::Rng(r) => self.rng(r),
            Op::Softmax(s) => self.softmax(s),
            Op::BandMask(m) => self.band_mask(m),
            Op::PagedLoad(p) => self.paged_load(p),
            Op::BlockScaleQuantize(q) => self.block_scale_quantize(q),
            Op::BlockScaleDequantize(q) => self.block_scale_dequantize(q),
            Op::SdpaForward(s) => self.sdpa_forward(s),
            Op::SdpaBackward(s) => self.sdpa_backward(s),
        }
    }

    pub(super) fn optional(&mut self, id: Option<TensorId>) -> Option<DescriptorId> {
        id.map(|id| self.tensor(id))
    }

    fn pointwise(&mut self, p: &Pointwise) -> DescriptorId {
        let mode = pointwise_mode(p.mode);
        let function = self.push(Kind::POINTWISE, p.mode.name(), |d| {
            d.code(Attribute::POINTWISE_MODE, AttributeType::POINTWISE_MODE, mode.0, mode.since(), mode);
            d.dtype(Attribute::POINTWISE_MATH_PREC, p.compute);
            d.f64(Attribute::POINTWISE_RELU_LOWER_CLIP, p.params.relu_lower_clip);
            d.f64(Attribute::POINTWISE_RELU_UPPER_CLIP, p.params.relu_upper_clip);
            d.f64(Attribute::POINTWISE_RELU_LOWER_CLIP_SLOPE, p.params.relu_lower_slope);
            d.f64(Attribute::POINTWISE_ELU_ALPHA, p.params.elu_alpha);
            d.f64(Attribute::POINTWISE_SOFTPLUS_BETA, p.params.softplus_beta);
            d.f64(Attribute::POINTWISE_SWISH_BETA, p.params.swish_beta);
            if let Some(axis) = p.params.axis {
                d.i64(Attribute::POINTWISE_AXIS, &[axis]);
            }
        });
        let (x, b, t, dy, y) = (self.tensor(p.x), self.optional(p.b), self.optional(p.t), self.optional(p.dy), self.tensor(p.y));
        self.push(Kind::OPERATION_POINTWISE, p.mode.name(), |d| {
            d.descriptor(Attribute::OPERATION_POINTWISE_PW_DESCRIPTOR, function);
            d.descriptor(Attribute::OPERATION_POINTWISE_DYDESC, dy);
            d.descriptor(Attribute::OPERATION_POINTWISE_XDESC, x);
            d.descriptor(Attribute::OPERATION_POINTWISE_BDESC, b);
            d.descriptor(Attribute::OPERATION_POINTWISE_TDESC, t);
            let result = if dy.is_some() { Attribute::OPERATION_POINTWISE_DXDESC } else { Attribute::OPERATION_POINTWISE_YDESC };
            d.descriptor(result, y);
        })
    }

    fn matmul(&mut self, m: &Matmul) -> DescriptorId {
        let product = self.push(Kind::MATMUL, "matmul", |d| {
            d.dtype(Attribute::MATMUL_COMP_TYPE, m.compute);
            d.f64(Attribute::MATMUL_PADDING_VALUE, m.padding);
        });
        let (a, b, c) = (self.tensor(m.a), self.tensor(m.b), self.tensor(m.c));
        let rows = self.optional(m.m_override);
        let columns = self.optional(m.n_override);
        let inner = self.optional(m.k_override);
        self.push(Kind::OPERATION_MATMUL, "matmul", |d| {
            d.descriptor(Attribute::OPERATION_MATMUL_ADESC, a);
            d.descriptor(Attribute::OPERATION_MATMUL_BDESC, b);
            d.descriptor(Attribute::OPERATION_MATMUL_CDESC, c);
            d.descriptor(Attribute::OPERATION_MATMUL_DESC, product);
            d.descriptor(Attribute::OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, rows);
            d.descriptor(Attribute::OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, columns);
            d.descriptor(Attribute::OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, inner);
        })
    }

    fn reduction(&mut self, r: &Reduction) -> DescriptorId {
        let mode = match r.mode {
            ReductionMode::Add => ReductionOperator::ADD,
            ReductionMode::Mul => ReductionOperator::MUL,
            ReductionMode::Min => ReductionOperator::MIN,
            ReductionMode::Max => ReductionOperator::MAX,
            ReductionMode::Amax => ReductionOperator::AMAX,
        };
        let fold = self.push(Kind::REDUCTION, r.mode.name(), |d| {
            d.code(Attribute::REDUCTION_OPERATOR, AttributeType::REDUCTION_OPERATOR_TYPE, mode.0, mode.since(), mode);
            d.dtype(Attribute::REDUCTION_COMP_TYPE, r.compute);
            if r.deterministic {
                d.bool(Attribute::REDUCTION_IS_DETERMINISTIC, true);
            }
        });
        let (x, y) = (self.tensor(r.x), self.tensor(r.y));
        self.push(Kind::OPERATION_REDUCTION, "reduction", |d| {
            d.descriptor(Attribute::OPERATION_REDUCTION_XDESC, x);
            d.descriptor(Attribute::OPERATION_REDUCTION_YDESC, y);
            d.descriptor(Attribute::OPERATION_REDUCTION_DESC, fold);
        })
    }

    fn reshape(&mut self, r: &Reshape) -> DescriptorId {
        let (x, y) = (self.tensor(r.x), self.tensor(r.y));
        let mode = r.mode.map(|mode| match mode {
            ReshapeMode::ViewOnly => ReshapeModeCode::VIEW_ONLY,
            ReshapeMode::Logical => ReshapeModeCode::LOGICAL,
        });
        self.push(Kind::OPERATION_RESHAPE, "reshape", |d| {
            d.descriptor(Attribute::OPERATION_RESHAPE_XDESC, x);
            d.descriptor(Attribute::OPERATION_RESHAPE_YDESC, y);
            if let Some(mode) = mode {
                d.code(Attribute::OPERATION_RESHAPE_MODE, AttributeType::RESHAPE_MODE, mode.0, mode.since(), mode);
            }
        })
    }

    fn transpose(&mut self, t: &Transpose) -> DescriptorId {
        let (x, y) = (self.tensor(t.x), self.tensor(t.y));
        self.push(Kind::OPERATION_TRANSPOSE, "transpose", |d| {
            d.descriptor(Attribute::OPERATION_TRANSPOSE_XDESC, x);
            d.descriptor(Attribute::OPERATION_TRANSPOSE_YDESC, y);
            d.i64(Attribute::OPERATION_TRANSPOSE_PERMUTATION, &t.permutation);
        })
    }

    fn slice(&mut self, s: &Slice) -> DescriptorId {
        let (x, y) = (self.tensor(s.x), self.tensor(s.y));
        self.push(Kind::OPERATION_SLICE, "slice", |d| {
            d.descriptor(Attribute::OPERATION_SLICE_XDESC, x);
            d.descriptor(Attribute::OPERATION_SLICE_YDESC, y);
            d.i64(Attribute::OPERATION_SLICE_START_INDICES, &s.start);
            d.i64(Attribute::OPERATION_SLICE_LIMIT_INDICES, &s.limit);
            d.i64(Attribute::OPERATION_SLICE_STRIDES, &s.step);
        })
    }

    fn rng(&mut self, r: &Rng) -> DescriptorId {
        let kind = match r.distribution {
            Distribution::Bernoulli(_) => RngDistribution::BERNOULLI,
            Distribution::Uniform(..) => RngDistribution::UNIFORM,
            Distribution::Normal(..) => RngDistribution::NORMAL,
        };
        let source = self.push(Kind::RNG, "rng", |d| {
            d.code(Attribute::RNG_DISTRIBUTION, AttributeType::RNG_DISTRIBUTION, kind.0, kind.since(), kind);
            match r.distribution {
                Distribution::Bernoulli(p) => d.f64(Attribute::RNG_BERNOULLI_DIST_PROBABILITY, Some(p)),
                Distribution::Uniform(low, high) => {
                    d.f64(Attribute::RNG_UNIFORM_DIST_MINIMUM, Some(low));
                    d.f64(Attribute::RNG_UNIFORM_DIST_MAXIMUM, Some(high));
                }
                Distribution::Normal(mean, deviation) => {
                    d.f64(Attribute::RNG_NORMAL_DIST_MEAN, Some(mean));
                    d.f64(Attribute::RNG_NORMAL_DIST_STANDARD_DEVIATION, Some(deviation));
                }
            }
        });
        let y = self.tensor(r.y);
        let offset = self.optional(r.offset);
        let seed = match r.seed {
            Seed::Value(_) => None,
            Seed::Tensor(id) => Some(self.tensor(id)),
        };
        self.push(Kind::OPERATION_RNG, "rng", |d| {
            d.descriptor(Attribute::OPERATION_RNG_YDESC, y);
            match r.seed {
                Seed::Value(seed) => d.i64(Attribute::OPERATION_RNG_SEED, &[seed]),
                Seed::Tensor(_) => d.descriptor(Attribute::OPERATION_RNG_SEED, seed),
            }
            d.descriptor(Attribute::OPERATION_RNG_DESC, source);
            d.descriptor(Attribute::OPERATION_RNG_OFFSET_DESC, offset);
        })
    }

    fn softmax(&mut self, s: &Softmax) -> DescriptorId {
        let (x, y) = (self.tensor(s.x), self.tensor(s.y));
        self.softmax_over(x, y, [s.stats, s.max, s.sum_exp, s.sink], s.stats_log2)
    }

    /// Encodes a softmax between tensor descriptors, with optional stats, max, sum of exponentials and sink.
    pub(super) fn softmax_over(&mut self, x: DescriptorId, y: DescriptorId, others: [Option<TensorId>; 4], log2: bool) -> DescriptorId {
        let [stats, max, sum_exp, sink] = others.map(|id| self.optional(id));
        self.push(Kind::OPERATION_SOFTMAX, "softmax", |d| {
            d.descriptor(Attribute::OPERATION_SOFTMAX_XDESC, x);
            d.descriptor(Attribute::OPERATION_SOFTMAX_YDESC, y);
            d.descriptor(Attribute::OPERATION_SOFTMAX_STATS_DESC, stats);
            d.descriptor(Attribute::OPERATION_SOFTMAX_MAX_DESC, max);
            d.descriptor(Attribute::OPERATION_SOFTMAX_SUM_EXP_DESC, sum_exp);
            d.descriptor(Attribute::OPERATION_SOFTMAX_SINK_DESC, sink);
            if log2 {
                d.bool(Attribute::OPERATION_SOFTMAX_STATS_LOG2, true);
            }
        })
    }

    fn band_mask(&mut self, m: &BandMask) -> DescriptorId {
        let (x, y, fill) = (self.tensor(m.x), self.tensor(m.y), self.tensor(m.fill));
        let (shift, left) = (self.optional(m.shift_right), self.optional(m.left));
        let (seq_q, seq_kv) = (self.optional(m.seq_q), self.optional(m.seq_kv));
        let comparison = match m.side {
            BandSide::Right => PointwiseMode::CMP_GE,
            BandSide::Left => PointwiseMode::CMP_GT,
        };
        self.push(Kind::OPERATION_DIAGONAL_BAND_MASK, "band_mask", |d| {
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_XDESC, x);
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_BDESC, fill);
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_YDESC, y);
            d.code(
                Attribute::OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE,
                AttributeType::POINTWISE_MODE,
                comparison.0,
                comparison.since(),
                comparison,
            );
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC, shift);
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC, left);
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_QDESC, seq_q);
            d.descriptor(Attribute::OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_KVDESC, seq_kv);
        })
    }

    fn paged_load(&mut self, p: &PagedLoad) -> DescriptorId {
        let (container, y) = (self.tensor(p.container), self.tensor(p.y));
        let (lengths, pages) = (self.tensor(p.seq_len), self.tensor(p.page_table));
        self.push(Kind::OPERATION_PAGED_CACHE_LOAD, "paged_load", |d| {
            d.descriptor(Attribute::OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC, container);
            d.descriptor(Attribute::OPERATION_PAGED_CACHE_LOAD_YDESC, y);
            d.descriptor(Attribute::OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC, lengths);
            d.descriptor(Attribute::OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC, pages);
        })
    }

    fn block_scale_quantize(&mut self, q: &BlockScaleQuantize) -> DescriptorId {
        let (x, y, scale) = (self.tensor(q.x), self.tensor(q.y), self.tensor(q.scale));
        self.push(Kind::OPERATION_BLOCK_SCALE_QUANTIZE, "block_scale_quantize", |d| {
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_QUANTIZE_XDESC, x);
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_QUANTIZE_YDESC, y);
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_QUANTIZE_SCALE_DESC, scale);
            d.dtype(Attribute::OPERATION_BLOCK_SCALE_QUANTIZE_MATH_PREC, q.compute);
            d.i32(Attribute::OPERATION_BLOCK_SCALE_QUANTIZE_BLOCK_SIZE, &q.block);
        })
    }

    fn block_scale_dequantize(&mut self, q: &BlockScaleDequantize) -> DescriptorId {
        let (x, y, scale) = (self.tensor(q.x), self.tensor(q.y), self.tensor(q.scale));
        self.push(Kind::OPERATION_BLOCK_SCALE_DEQUANTIZE, "block_scale_dequantize", |d| {
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_DEQUANTIZE_XDESC, x);
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_DEQUANTIZE_SCALE_DESC, scale);
            d.descriptor(Attribute::OPERATION_BLOCK_SCALE_DEQUANTIZE_YDESC, y);
            d.dtype(Attribute::OPERATION_BLOCK_SCALE_DEQUANTIZE_MATH_PREC, q.compute);
            d.i32(Attribute::OPERATION_BLOCK_SCALE_DEQUANTIZE_BLOCK_SIZE, &q.block);
        })
    }
}

fn pointwise_mode(mode: Mode) -> PointwiseMode {
    match mode {
        Mode::Add => PointwiseMode::ADD,
        Mode::Mul => PointwiseMode::MUL,
        Mode::Min => PointwiseMode::MIN,
        Mode::Max => PointwiseMode::MAX,
        Mode::Sqrt => PointwiseMode::SQRT,
        Mode::AddSquare => PointwiseMode::ADD_SQUARE,
        Mode::Div => PointwiseMode::DIV,
        Mode::Mod => PointwiseMode::MOD,
        Mode::Pow => PointwiseMode::POW,
        Mode::Sub => PointwiseMode::SUB,
        Mode::Abs => PointwiseMode::ABS,
        Mode::Ceil => PointwiseMode::CEIL,
        Mode::Cos => PointwiseMode::COS,
        Mode::Exp => PointwiseMode::EXP,
        Mode::Floor => PointwiseMode::FLOOR,
        Mode::Log => PointwiseMode::LOG,
        Mode::Neg => PointwiseMode::NEG,
        Mode::Rsqrt => PointwiseMode::RSQRT,
        Mode::Sin => PointwiseMode::SIN,
        Mode::Tan => PointwiseMode::TAN,
        Mode::Erf => PointwiseMode::ERF,
        Mode::Identity => PointwiseMode::IDENTITY,
        Mode::Reciprocal => PointwiseMode::RECIPROCAL,
        Mode::Atan2 => PointwiseMode::ATAN2,
        Mode::FloorMod => PointwiseMode::FLOOR_MOD,
        Mode::ReluFwd => PointwiseMode::RELU_FWD,
        Mode::TanhFwd => PointwiseMode::TANH_FWD,
        Mode::SigmoidFwd => PointwiseMode::SIGMOID_FWD,
        Mode::EluFwd => PointwiseMode::ELU_FWD,
        Mode::GeluFwd => PointwiseMode::GELU_FWD,
        Mode::SoftplusFwd => PointwiseMode::SOFTPLUS_FWD,
        Mode::SwishFwd => PointwiseMode::SWISH_FWD,
        Mode::GeluApproxTanhFwd => PointwiseMode::GELU_APPROX_TANH_FWD,
        Mode::ReluBwd => PointwiseMode::RELU_BWD,
        Mode::TanhBwd => PointwiseMode::TANH_BWD,
        Mode::SigmoidBwd => PointwiseMode::SIGMOID_BWD,
        Mode::EluBwd => PointwiseMode::ELU_BWD,
        Mode::GeluBwd => PointwiseMode::GELU_BWD,
        Mode::SoftplusBwd => PointwiseMode::SOFTPLUS_BWD,
        Mode::SwishBwd => PointwiseMode::SWISH_BWD,
        Mode::GeluApproxTanhBwd => PointwiseMode::GELU_APPROX_TANH_BWD,
        Mode::CmpEq => PointwiseMode::CMP_EQ,
        Mode::CmpNeq => PointwiseMode::CMP_NEQ,
        Mode::CmpGt => PointwiseMode::CMP_GT,
        Mode::CmpGe => PointwiseMode::CMP_GE,
        Mode::CmpLt => PointwiseMode::CMP_LT,
        Mode::CmpLe => PointwiseMode::CMP_LE,
        Mode::LogicalAnd => PointwiseMode::LOGICAL_AND,
        Mode::LogicalOr => PointwiseMode::LOGICAL_OR,
        Mode::LogicalNot => PointwiseMode::LOGICAL_NOT,
        Mode::GenIndex => PointwiseMode::GEN_INDEX,
        Mode::BinarySelect => PointwiseMode::BINARY_SELECT,
    }
}
