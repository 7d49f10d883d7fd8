//! Convolutions, norms and pooling: rows of attribute and value.

use super::Encoder;
use crate::ffi::codes::{
    Attribute, AttributeType, BnFinalizeMode, ConvolutionMode, GenStatsMode, Kind, NormMode as NormModeCode, NormPhase, PaddingMode,
    ResampleMode as ResampleModeCode,
};
use crate::ir::op::{
    BnBackwardWeights, BnFinalize, ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry, GenStats, NormBackward, NormForward,
    NormMode, ResampleBackward, ResampleForward, ResampleMode, Upsample, Window,
};
use crate::ir::ty::DType;
use crate::program::DescriptorId;

impl Encoder<'_> {
    fn convolution(&mut self, geometry: &ConvGeometry, compute: DType) -> DescriptorId {
        let ConvGeometry { stride, dilation, pre_padding, post_padding } = geometry;
        self.push(Kind::CONVOLUTION, "convolution", |d| {
            d.dtype(Attribute::CONVOLUTION_COMP_TYPE, compute);
            let mode = ConvolutionMode::CROSS_CORRELATION;
            d.code(Attribute::CONVOLUTION_CONV_MODE, AttributeType::CONVOLUTION_MODE, mode.0, mode.since(), mode);
            d.i64(Attribute::CONVOLUTION_SPATIAL_DIMS, &[stride.len() as i64]);
            d.i64(Attribute::CONVOLUTION_PRE_PADDINGS, pre_padding);
            d.i64(Attribute::CONVOLUTION_POST_PADDINGS, post_padding);
            d.i64(Attribute::CONVOLUTION_DILATIONS, dilation);
            d.i64(Attribute::CONVOLUTION_FILTER_STRIDES, stride);
        })
    }

    pub(super) fn conv_forward(&mut self, c: &ConvForward) -> DescriptorId {
        let geometry = self.convolution(&c.geometry, c.compute);
        let (x, w, y) = (self.tensor(c.x), self.tensor(c.w), self.tensor(c.y));
        self.push(Kind::OPERATION_CONVOLUTION_FORWARD, "conv_forward", |d| {
            d.descriptor(Attribute::OPERATION_CONVOLUTION_FORWARD_X, x);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_FORWARD_W, w);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_FORWARD_Y, y);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_FORWARD_CONV_DESC, geometry);
            d.blend(Attribute::OPERATION_CONVOLUTION_FORWARD_ALPHA, c.compute, 1.0);
            d.blend(Attribute::OPERATION_CONVOLUTION_FORWARD_BETA, c.compute, 0.0);
        })
    }

    pub(super) fn conv_backward_data(&mut self, c: &ConvBackwardData) -> DescriptorId {
        let geometry = self.convolution(&c.geometry, c.compute);
        let (dy, w, dx) = (self.tensor(c.dy), self.tensor(c.w), self.tensor(c.dx));
        self.push(Kind::OPERATION_CONVOLUTION_BACKWARD_DATA, "conv_backward_data", |d| {
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_DATA_DY, dy);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_DATA_W, w);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_DATA_DX, dx);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, geometry);
            d.blend(Attribute::OPERATION_CONVOLUTION_BWD_DATA_ALPHA, c.compute, 1.0);
            d.blend(Attribute::OPERATION_CONVOLUTION_BWD_DATA_BETA, c.compute, 0.0);
        })
    }

    pub(super) fn conv_backward_filter(&mut self, c: &ConvBackwardFilter) -> DescriptorId {
        let geometry = self.convolution(&c.geometry, c.compute);
        let (dy, x, dw) = (self.tensor(c.dy), self.tensor(c.x), self.tensor(c.dw));
        self.push(Kind::OPERATION_CONVOLUTION_BACKWARD_FILTER, "conv_backward_filter", |d| {
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_DY, dy);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_X, x);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_DW, dw);
            d.descriptor(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, geometry);
            d.blend(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, c.compute, 1.0);
            d.blend(Attribute::OPERATION_CONVOLUTION_BWD_FILTER_BETA, c.compute, 0.0);
        })
    }

    pub(super) fn norm_forward(&mut self, n: &NormForward) -> DescriptorId {
        let (x, y) = (self.tensor(n.x), self.tensor(n.y));
        let (scale, bias, epsilon) = (self.tensor(n.scale), self.optional(n.bias), self.tensor(n.epsilon));
        let (mean, inverse) = (self.optional(n.mean), self.optional(n.inv_variance));
        let running = n.running.map(|r| [r.factor, r.mean, r.variance, r.next_mean, r.next_variance].map(|id| self.tensor(id)));
        let mode = norm_mode(n.mode);
        let phase = if n.inv_variance.is_some() { NormPhase::TRAINING } else { NormPhase::INFERENCE };
        self.push(Kind::OPERATION_NORM_FORWARD, "norm_forward", |d| {
            d.code(Attribute::OPERATION_NORM_FWD_MODE, AttributeType::NORM_MODE, mode.0, mode.since(), mode);
            d.code(Attribute::OPERATION_NORM_FWD_PHASE, AttributeType::NORM_FWD_PHASE, phase.0, phase.since(), phase);
            d.descriptor(Attribute::OPERATION_NORM_FWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_NORM_FWD_MEAN_DESC, mean);
            d.descriptor(Attribute::OPERATION_NORM_FWD_INV_VARIANCE_DESC, inverse);
            d.descriptor(Attribute::OPERATION_NORM_FWD_SCALE_DESC, scale);
            d.descriptor(Attribute::OPERATION_NORM_FWD_BIAS_DESC, bias);
            d.descriptor(Attribute::OPERATION_NORM_FWD_EPSILON_DESC, epsilon);
            if let Some([factor, mean, variance, next_mean, next_variance]) = running {
                d.descriptor(Attribute::OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, factor);
                d.descriptor(Attribute::OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, mean);
                d.descriptor(Attribute::OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, variance);
                d.descriptor(Attribute::OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC, next_mean);
                d.descriptor(Attribute::OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC, next_variance);
            }
            d.descriptor(Attribute::OPERATION_NORM_FWD_YDESC, y);
        })
    }

    pub(super) fn norm_backward(&mut self, n: &NormBackward) -> DescriptorId {
        let (x, dy, scale) = (self.tensor(n.x), self.tensor(n.dy), self.tensor(n.scale));
        let (mean, inverse) = (self.optional(n.mean), self.tensor(n.inv_variance));
        let (dx, dscale, dbias) = (self.tensor(n.dx), self.tensor(n.dscale), self.optional(n.dbias));
        let mode = norm_mode(n.mode);
        self.push(Kind::OPERATION_NORM_BACKWARD, "norm_backward", |d| {
            d.code(Attribute::OPERATION_NORM_BWD_MODE, AttributeType::NORM_MODE, mode.0, mode.since(), mode);
            d.descriptor(Attribute::OPERATION_NORM_BWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_NORM_BWD_MEAN_DESC, mean);
            d.descriptor(Attribute::OPERATION_NORM_BWD_INV_VARIANCE_DESC, inverse);
            d.descriptor(Attribute::OPERATION_NORM_BWD_DYDESC, dy);
            d.descriptor(Attribute::OPERATION_NORM_BWD_SCALE_DESC, scale);
            d.descriptor(Attribute::OPERATION_NORM_BWD_DSCALE_DESC, dscale);
            d.descriptor(Attribute::OPERATION_NORM_BWD_DBIAS_DESC, dbias);
            d.descriptor(Attribute::OPERATION_NORM_BWD_DXDESC, dx);
        })
    }

    pub(super) fn gen_stats(&mut self, s: &GenStats) -> DescriptorId {
        let (x, sum, squares) = (self.tensor(s.x), self.tensor(s.sum), self.tensor(s.square_sum));
        self.push(Kind::OPERATION_GEN_STATS, "gen_stats", |d| {
            let mode = GenStatsMode::SUM_SQSUM;
            d.code(Attribute::OPERATION_GENSTATS_MODE, AttributeType::GENSTATS_MODE, mode.0, mode.since(), mode);
            d.dtype(Attribute::OPERATION_GENSTATS_MATH_PREC, s.compute);
            d.descriptor(Attribute::OPERATION_GENSTATS_XDESC, x);
            d.descriptor(Attribute::OPERATION_GENSTATS_SUMDESC, sum);
            d.descriptor(Attribute::OPERATION_GENSTATS_SQSUMDESC, squares);
        })
    }

    pub(super) fn bn_finalize(&mut self, b: &BnFinalize) -> DescriptorId {
        let inputs = [b.sum, b.square_sum, b.scale, b.bias, b.epsilon, b.count].map(|id| self.tensor(id));
        let outputs = [b.mean, b.inv_variance, b.eq_scale, b.eq_bias].map(|id| self.tensor(id));
        let r = b.running;
        let running = [r.factor, r.mean, r.variance, r.next_mean, r.next_variance].map(|id| self.tensor(id));
        self.push(Kind::OPERATION_BN_FINALIZE_STATISTICS, "bn_finalize", |d| {
            let mode = BnFinalizeMode::TRAINING;
            d.code(Attribute::OPERATION_BN_FINALIZE_STATS_MODE, AttributeType::BN_FINALIZE_STATS_MODE, mode.0, mode.since(), mode);
            d.dtype(Attribute::OPERATION_BN_FINALIZE_MATH_PREC, b.compute);
            let [sum, squares, scale, bias, epsilon, count] = inputs;
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_Y_SUM_DESC, sum);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_Y_SQ_SUM_DESC, squares);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_SCALE_DESC, scale);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_BIAS_DESC, bias);
            let [factor, mean, variance, next_mean, next_variance] = running;
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_PREV_RUNNING_MEAN_DESC, mean);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_PREV_RUNNING_VAR_DESC, variance);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_UPDATED_RUNNING_MEAN_DESC, next_mean);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_UPDATED_RUNNING_VAR_DESC, next_variance);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_EXP_AVERATE_FACTOR_DESC, factor);
            let [mean, inverse, eq_scale, eq_bias] = outputs;
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_SAVED_MEAN_DESC, mean);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_SAVED_INV_STD_DESC, inverse);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_EQ_SCALE_DESC, eq_scale);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_EQ_BIAS_DESC, eq_bias);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_ACCUM_COUNT_DESC, count);
            d.descriptor(Attribute::OPERATION_BN_FINALIZE_EPSILON_DESC, epsilon);
        })
    }

    pub(super) fn bn_backward_weights(&mut self, b: &BnBackwardWeights) -> DescriptorId {
        use Attribute as A;
        let rows = [
            (A::OPERATION_BN_BWD_WEIGHTS_X_DESC, b.x),
            (A::OPERATION_BN_BWD_WEIGHTS_DY_DESC, b.dy),
            (A::OPERATION_BN_BWD_WEIGHTS_BN_SCALE_DESC, b.scale),
            (A::OPERATION_BN_BWD_WEIGHTS_MEAN_DESC, b.mean),
            (A::OPERATION_BN_BWD_WEIGHTS_INVSTD_DESC, b.inv_variance),
            (A::OPERATION_BN_BWD_WEIGHTS_DBN_SCALE_DESC, b.dscale),
            (A::OPERATION_BN_BWD_WEIGHTS_DBN_BIAS_DESC, b.dbias),
            (A::OPERATION_BN_BWD_WEIGHTS_EQ_DY_SCALE_DESC, b.eq_scale_dy),
            (A::OPERATION_BN_BWD_WEIGHTS_EQ_X_SCALE_DESC, b.eq_scale_x),
            (A::OPERATION_BN_BWD_WEIGHTS_EQ_BIAS, b.eq_bias),
        ]
        .map(|(attribute, id)| (attribute, self.tensor(id)));
        self.push(Kind::OPERATION_BN_BWD_WEIGHTS, "bn_backward_weights", |d| {
            d.dtype(A::OPERATION_BN_BWD_WEIGHTS_MATH_PREC, b.compute);
            for (attribute, tensor) in rows {
                d.descriptor(attribute, tensor);
            }
        })
    }

    fn resample(&mut self, mode: ResampleMode, window: &Window, compute: DType) -> DescriptorId {
        let (code, padding) = match mode {
            ResampleMode::Max => (ResampleModeCode::MAXPOOL, PaddingMode::NEG_INF_PAD),
            ResampleMode::AverageIncludePadding => (ResampleModeCode::AVGPOOL_INCLUDE_PADDING, PaddingMode::ZERO_PAD),
            ResampleMode::AverageExcludePadding => (ResampleModeCode::AVGPOOL_EXCLUDE_PADDING, PaddingMode::ZERO_PAD),
        };
        let Window { extent, stride, pre_padding, post_padding } = window;
        self.push(Kind::RESAMPLE, mode.name(), |d| {
            d.code(Attribute::RESAMPLE_MODE, AttributeType::RESAMPLE_MODE, code.0, code.since(), code);
            d.dtype(Attribute::RESAMPLE_COMP_TYPE, compute);
            d.code(Attribute::RESAMPLE_PADDING_MODE, AttributeType::PADDING_MODE, padding.0, padding.since(), padding);
            d.i64(Attribute::RESAMPLE_SPATIAL_DIMS, &[extent.len() as i64]);
            d.i64(Attribute::RESAMPLE_WINDOW_DIMS, extent);
            d.i64(Attribute::RESAMPLE_PRE_PADDINGS, pre_padding);
            d.i64(Attribute::RESAMPLE_POST_PADDINGS, post_padding);
            d.i64(Attribute::RESAMPLE_STRIDES, stride);
        })
    }

    pub(super) fn resample_forward(&mut self, r: &ResampleForward) -> DescriptorId {
        let windows = self.resample(r.mode, &r.window, r.compute);
        let (x, y, index) = (self.tensor(r.x), self.tensor(r.y), self.optional(r.index));
        self.push(Kind::OPERATION_RESAMPLE_FWD, "resample_forward", |d| {
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_DESC, windows);
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_YDESC, y);
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_IDXDESC, index);
        })
    }

    /// The window, paddings and stride are the only ones for which cuDNN has an engine. Its kernel repeats the last element whatever the padding mode is.
    pub(super) fn upsample(&mut self, u: &Upsample) -> DescriptorId {
        let resample = self.push(Kind::RESAMPLE, "bilinear", |d| {
            let (mode, padding) = (ResampleModeCode::BILINEAR, PaddingMode::EDGE_VAL_PAD);
            d.code(Attribute::RESAMPLE_MODE, AttributeType::RESAMPLE_MODE, mode.0, mode.since(), mode);
            d.dtype(Attribute::RESAMPLE_COMP_TYPE, u.compute);
            d.code(Attribute::RESAMPLE_PADDING_MODE, AttributeType::PADDING_MODE, padding.0, padding.since(), padding);
            d.i64(Attribute::RESAMPLE_SPATIAL_DIMS, &[2]);
            d.fractions(Attribute::RESAMPLE_WINDOW_DIMS, [2, 1]);
            d.fractions(Attribute::RESAMPLE_PRE_PADDINGS, [1, 2]);
            d.fractions(Attribute::RESAMPLE_POST_PADDINGS, [1, 1]);
            d.fractions(Attribute::RESAMPLE_STRIDES, [1, 2]);
        });
        let (x, y) = (self.tensor(u.x), self.tensor(u.y));
        self.push(Kind::OPERATION_RESAMPLE_FWD, "upsample", |d| {
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_DESC, resample);
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_RESAMPLE_FWD_YDESC, y);
        })
    }

    pub(super) fn resample_backward(&mut self, r: &ResampleBackward) -> DescriptorId {
        let windows = self.resample(r.mode, &r.window, r.compute);
        let (dy, dx) = (self.tensor(r.dy), self.tensor(r.dx));
        let (index, x, y) = (self.optional(r.index), self.optional(r.x), self.optional(r.y));
        self.push(Kind::OPERATION_RESAMPLE_BWD, "resample_backward", |d| {
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_DESC, windows);
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_DYDESC, dy);
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_DXDESC, dx);
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_IDXDESC, index);
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_XDESC, x);
            d.descriptor(Attribute::OPERATION_RESAMPLE_BWD_YDESC, y);
        })
    }
}

fn norm_mode(mode: NormMode) -> NormModeCode {
    match mode {
        NormMode::Layer => NormModeCode::LAYER_NORM,
        NormMode::Instance => NormModeCode::INSTANCE_NORM,
        NormMode::Batch => NormModeCode::BATCH_NORM,
        NormMode::Rms => NormModeCode::RMS_NORM,
        NormMode::AdaLayer => NormModeCode::ADA_LAYER_NORM,
    }
}
