//! Builder methods for convolutions, norms and pooling. Results have channels last strides if the images have them.

use crate::ir::Graph;
use crate::ir::op::{
    BnBackwardWeights, BnFinalize, ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry, GenStats, NormBackward, NormForward,
    NormMode, Op, ResampleBackward, ResampleForward, ResampleMode, RunningStats, Upsample, Window,
};
use crate::ir::tensor::{Scalar, Tensor, TensorId};
use crate::ir::ty::{DType, Dims};

/// The running statistics that [`Graph::norm_training`] and [`Graph::bn_finalize`] update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunningInputs {
    /// Weight of the current batch, such as 0.1.
    pub factor: f32,
    /// Running mean before this batch, f32 (1, c, 1, …).
    pub mean: TensorId,
    /// Running variance before this batch, f32 (1, c, 1, …).
    pub variance: TensorId,
}

/// The results of [`Graph::norm_training`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormOutputs {
    /// The normalized tensor, virtual f32.
    pub y: TensorId,
    /// The mean, f32 in device memory; `None` for RMS norm.
    pub mean: Option<TensorId>,
    /// `1 / √(variance + epsilon)`, f32 in device memory.
    pub inv_variance: TensorId,
    /// Running mean and variance after this batch, f32 in device memory, if there are running statistics.
    pub running: Option<(TensorId, TensorId)>,
}

/// The operands of [`Graph::norm_backward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormGradientInputs {
    /// The input of the forward op.
    pub x: TensorId,
    /// Gradient of its result.
    pub dy: TensorId,
    /// The scale of the forward op.
    pub scale: TensorId,
    /// The mean of the forward op; `None` for RMS norm.
    pub mean: Option<TensorId>,
    /// The inverse deviation of the forward op.
    pub inv_variance: TensorId,
}

/// The results of [`Graph::norm_backward`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormGradients {
    /// Gradient of the input, virtual f32.
    pub dx: TensorId,
    /// Gradient of the scale, f32 in device memory.
    pub dscale: TensorId,
    /// Gradient of the bias, f32 in device memory; `None` for RMS norm.
    pub dbias: Option<TensorId>,
}

/// The operands of [`Graph::bn_finalize`], f32 (1, c, 1, …).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BnFinalizeInputs {
    /// Sum of each channel.
    pub sum: TensorId,
    /// Sum of squares of each channel.
    pub square_sum: TensorId,
    /// The scale of the norm.
    pub scale: TensorId,
    /// The bias of the norm.
    pub bias: TensorId,
    /// Summand of the variance.
    pub epsilon: f32,
    /// Number of elements per channel in the sums.
    pub count: i64,
    /// Running statistics.
    pub running: RunningInputs,
}

/// The results of [`Graph::bn_finalize`], f32 (1, c, 1, …) in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BnFinalizeOutputs {
    /// Mean of each channel.
    pub mean: TensorId,
    /// `1 / √(variance + epsilon)` of each channel.
    pub inv_variance: TensorId,
    /// Factor that applies the norm.
    pub eq_scale: TensorId,
    /// Summand that applies the norm.
    pub eq_bias: TensorId,
    /// Running mean after this batch.
    pub running_mean: TensorId,
    /// Running variance after this batch.
    pub running_variance: TensorId,
}

/// The operands of [`Graph::bn_backward_weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BnGradientInputs {
    /// The input of the norm.
    pub x: TensorId,
    /// Gradient of the result of the norm.
    pub dy: TensorId,
    /// The scale of the norm, f32 (1, c, 1, …).
    pub scale: TensorId,
    /// Mean of each channel, f32 (1, c, 1, …).
    pub mean: TensorId,
    /// `1 / √(variance + epsilon)` of each channel, f32 (1, c, 1, …).
    pub inv_variance: TensorId,
}

/// The results of [`Graph::bn_backward_weights`], f32 (1, c, 1, …) in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BnGradients {
    /// Gradient of the scale.
    pub dscale: TensorId,
    /// Gradient of the bias.
    pub dbias: TensorId,
    /// Factor of `dy` in the gradient of `x`.
    pub eq_scale_dy: TensorId,
    /// Factor of `x` in the gradient of `x`.
    pub eq_scale_x: TensorId,
    /// Summand of the gradient of `x`.
    pub eq_bias: TensorId,
}

impl Graph {
    /// Adds a convolution of the images `x`, (n, c, spatial axes), with the filters `w`, (k, c / groups, spatial axes), whose result is a
    /// virtual f32 tensor (n, k, spatial axes).
    pub fn convolution(&mut self, x: TensorId, w: TensorId, geometry: ConvGeometry) -> TensorId {
        let (images, filters) = (self.dims(x).0, self.dims(w).0);
        let mut dims = images.clone();
        for (axis, d) in dims.iter_mut().enumerate() {
            let taps = filters.get(axis).copied().unwrap_or(1);
            *d = match axis {
                0 => *d,
                1 => filters.first().copied().unwrap_or(1),
                _ => geometry.outputs(axis - 2, *d, taps).unwrap_or(1),
            };
        }
        let y = self.result("conv", DType::F32, Dims(dims));
        self.like_channels_last(y, self.is_channels_last(x));
        self.push(Op::ConvForward(ConvForward { x, w, y, geometry, compute: DType::F32 }));
        y
    }

    /// Adds the gradient of a convolution with respect to its images, a virtual f32 tensor of extents `dims`, which are those of the images.
    pub fn convolution_backward_data(&mut self, dy: TensorId, w: TensorId, dims: impl Into<Dims>, geometry: ConvGeometry) -> TensorId {
        let dx = self.result("conv_dx", DType::F32, dims.into());
        self.like_channels_last(dx, self.is_channels_last(dy));
        self.push(Op::ConvBackwardData(ConvBackwardData { dy, w, dx, geometry, compute: DType::F32 }));
        dx
    }

    /// Adds the gradient of a convolution with respect to its filters, a virtual f32 tensor of extents `dims`, which are those of the
    /// filters.
    pub fn convolution_backward_filter(&mut self, dy: TensorId, x: TensorId, dims: impl Into<Dims>, geometry: ConvGeometry) -> TensorId {
        let dw = self.result("conv_dw", DType::F32, dims.into());
        self.like_channels_last(dw, self.is_channels_last(x));
        self.push(Op::ConvBackwardFilter(ConvBackwardFilter { dy, x, dw, geometry, compute: DType::F32 }));
        dw
    }

    fn number(&mut self, value: Scalar, rank: usize) -> TensorId {
        let name = format!("scalar{}", self.tensors.len());
        self.tensor(Tensor::by_value(name, value.dtype(), Some(value), rank))
    }

    /// Adds an f32 output in device memory, named after `name` and its number.
    fn side(&mut self, name: &str, dims: Vec<i64>, channels_last: bool) -> TensorId {
        let name = format!("{name}{}", self.tensors.len());
        let id = self.tensor(Tensor::device(name, DType::F32, dims));
        self.like_channels_last(id, channels_last);
        id
    }

    fn statistics(&self, mode: NormMode, x: TensorId, scale: TensorId) -> Vec<i64> {
        let (x, scale) = (self.dims(x).0, self.dims(scale).0);
        crate::ir::norms::statistics(mode, &x, &scale).unwrap_or_else(|_| vec![1; x.len()])
    }

    fn update(&mut self, inputs: RunningInputs, dims: &[i64], channels_last: bool) -> RunningStats {
        let RunningInputs { factor, mean, variance } = inputs;
        let factor = self.number(Scalar::F32(factor), dims.len());
        let next_mean = self.side("running_mean", dims.to_vec(), channels_last);
        let next_variance = self.side("running_variance", dims.to_vec(), channels_last);
        RunningStats { factor, mean, variance, next_mean, next_variance }
    }

    /// Adds a norm without statistics for a backward op, whose result is a virtual f32 tensor. Every mode except batch norm has such a
    /// form; [`NormForward`] describes the operands.
    pub fn norm_inference(&mut self, mode: NormMode, x: TensorId, scale: TensorId, bias: Option<TensorId>, epsilon: f32) -> TensorId {
        let epsilon = self.number(Scalar::F32(epsilon), self.dims(x).rank());
        let y = self.result("norm", DType::F32, self.dims(x));
        self.like_strides(y, x);
        self.push(Op::NormForward(NormForward { mode, x, scale, bias, epsilon, y, mean: None, inv_variance: None, running: None }));
        y
    }

    /// Adds a norm with statistics for [`Graph::norm_backward`], and for batch norm with running statistics if `running` is given.
    pub fn norm_training(
        &mut self,
        mode: NormMode,
        x: TensorId,
        scale: TensorId,
        bias: Option<TensorId>,
        epsilon: f32,
        running: Option<RunningInputs>,
    ) -> NormOutputs {
        let (stats, last) = (self.statistics(mode, x, scale), self.is_channels_last(x));
        let epsilon = self.number(Scalar::F32(epsilon), self.dims(x).rank());
        let y = self.result("norm", DType::F32, self.dims(x));
        self.like_strides(y, x);
        let mean = (mode != NormMode::Rms).then(|| self.side("mean", stats.clone(), last));
        let inv_variance = self.side("inv_variance", stats.clone(), last);
        let running = running.map(|inputs| self.update(inputs, &stats, last));
        let inverse = Some(inv_variance);
        self.push(Op::NormForward(NormForward { mode, x, scale, bias, epsilon, y, mean, inv_variance: inverse, running }));
        NormOutputs { y, mean, inv_variance, running: running.map(|r| (r.next_mean, r.next_variance)) }
    }

    /// Adds the gradients of a norm.
    pub fn norm_backward(&mut self, mode: NormMode, inputs: NormGradientInputs) -> NormGradients {
        let NormGradientInputs { x, dy, scale, mean, inv_variance } = inputs;
        let dx = self.result("norm_dx", DType::F32, self.dims(x));
        self.like_strides(dx, x);
        let like_scale = self.dims(scale).0;
        let dscale = self.side("dscale", like_scale.clone(), false);
        let dbias = (mode != NormMode::Rms).then(|| self.side("dbias", like_scale, false));
        for id in [Some(dscale), dbias].into_iter().flatten() {
            self.like_strides(id, scale);
        }
        self.push(Op::NormBackward(NormBackward { mode, x, dy, scale, mean, inv_variance, dx, dscale, dbias }));
        NormGradients { dx, dscale, dbias }
    }

    /// Adds the sum and the sum of squares of each channel of `x`, f32 (1, c, 1, …) in device memory.
    pub fn gen_stats(&mut self, x: TensorId) -> (TensorId, TensorId) {
        let (dims, last) = (self.per_channel(x), self.is_channels_last(x));
        let sum = self.side("sum", dims.clone(), last);
        let square_sum = self.side("square_sum", dims, last);
        self.push(Op::GenStats(GenStats { x, sum, square_sum, compute: DType::F32 }));
        (sum, square_sum)
    }

    fn per_channel(&self, x: TensorId) -> Vec<i64> {
        self.dims(x).0.iter().enumerate().map(|(axis, &n)| if axis == 1 { n } else { 1 }).collect()
    }

    /// Adds the last step of batch norm: statistics, and the factor and summand that apply the norm.
    pub fn bn_finalize(&mut self, inputs: BnFinalizeInputs) -> BnFinalizeOutputs {
        let BnFinalizeInputs { sum, square_sum, scale, bias, epsilon, count, running } = inputs;
        let dims = self.dims(sum).0;
        let last = self.is_channels_last(sum);
        let epsilon = self.number(Scalar::F32(epsilon), dims.len());
        let count = self.number(Scalar::I64(count), dims.len());
        let running = self.update(running, &dims, last);
        let [mean, inv_variance, eq_scale, eq_bias] =
            ["mean", "inv_variance", "eq_scale", "eq_bias"].map(|name| self.side(name, dims.clone(), last));
        self.push(Op::BnFinalize(BnFinalize {
            sum,
            square_sum,
            scale,
            bias,
            epsilon,
            count,
            running,
            mean,
            inv_variance,
            eq_scale,
            eq_bias,
            compute: DType::F32,
        }));
        BnFinalizeOutputs {
            mean,
            inv_variance,
            eq_scale,
            eq_bias,
            running_mean: running.next_mean,
            running_variance: running.next_variance,
        }
    }

    /// Adds the gradients of the scale and bias of batch norm, and the factors of the gradient of its input:
    /// `dx = eq_scale_dy · dy + eq_scale_x · x + eq_bias`.
    pub fn bn_backward_weights(&mut self, inputs: BnGradientInputs) -> BnGradients {
        let BnGradientInputs { x, dy, scale, mean, inv_variance } = inputs;
        let (dims, last) = (self.per_channel(x), self.is_channels_last(x));
        let [dscale, dbias, eq_scale_dy, eq_scale_x, eq_bias] =
            ["dscale", "dbias", "eq_scale_dy", "eq_scale_x", "eq_bias"].map(|name| self.side(name, dims.clone(), last));
        self.push(Op::BnBackwardWeights(BnBackwardWeights {
            x,
            dy,
            scale,
            mean,
            inv_variance,
            dscale,
            dbias,
            eq_scale_dy,
            eq_scale_x,
            eq_bias,
            compute: DType::F32,
        }));
        BnGradients { dscale, dbias, eq_scale_dy, eq_scale_x, eq_bias }
    }

    fn pooled(&self, x: TensorId, window: &Window) -> Dims {
        let pooled = |(axis, &n): (usize, &i64)| if axis < 2 { n } else { window.outputs(axis - 2, n).unwrap_or(1) };
        Dims(self.dims(x).0.iter().enumerate().map(pooled).collect())
    }

    /// Adds pooling over windows of `x`, whose result is a virtual f32 tensor.
    pub fn resample(&mut self, mode: ResampleMode, x: TensorId, window: Window) -> TensorId {
        let y = self.result("resample", DType::F32, self.pooled(x, &window));
        self.like_channels_last(y, self.is_channels_last(x));
        self.push(Op::ResampleForward(ResampleForward { mode, x, y, index: None, window, compute: DType::F32 }));
        y
    }

    /// Adds max pooling over windows of `x`. Returns the result, a virtual f32 tensor, and the positions of the maxima for
    /// [`Graph::resample_backward`], i8 in device memory.
    pub fn max_pool_with_index(&mut self, x: TensorId, window: Window) -> (TensorId, TensorId) {
        let (dims, last) = (self.pooled(x, &window), self.is_channels_last(x));
        let y = self.result("resample", DType::F32, dims.clone());
        let index = self.tensor(Tensor::device(format!("index{}", self.tensors.len()), DType::I8, dims));
        self.like_channels_last(y, last);
        self.like_channels_last(index, last);
        let index_output = Some(index);
        let mode = ResampleMode::Max;
        self.push(Op::ResampleForward(ResampleForward { mode, x, y, index: index_output, window, compute: DType::F32 }));
        (y, index)
    }

    /// Adds bilinear interpolation of `x`, f32 images (n, c, h, w), to twice the spatial extents. The result is a virtual f32 tensor; [`Upsample`] says where
    /// the samples are.
    pub fn upsample(&mut self, x: TensorId) -> TensorId {
        let double = |(axis, &n): (usize, &i64)| if axis < 2 { n } else { n.saturating_mul(2) };
        let dims = Dims(self.dims(x).0.iter().enumerate().map(double).collect());
        let y = self.result("upsample", DType::F32, dims);
        // Images of one pixel and one channel are in both orders, but their result is not.
        let last = self.get(x).is_some_and(|x| x.strides == x.dims.channels_last());
        self.like_channels_last(y, last);
        self.push(Op::Upsample(Upsample { x, y, compute: DType::F32 }));
        y
    }

    /// Adds the gradient of pooling, a virtual f32 tensor of extents `dims`, which are those of the images. Max pooling needs the index of
    /// its forward op.
    pub fn resample_backward(
        &mut self,
        mode: ResampleMode,
        dy: TensorId,
        index: Option<TensorId>,
        dims: impl Into<Dims>,
        window: Window,
    ) -> TensorId {
        let dx = self.result("resample_dx", DType::F32, dims.into());
        self.like_channels_last(dx, self.is_channels_last(dy));
        self.push(Op::ResampleBackward(ResampleBackward { mode, dy, dx, index, x: None, y: None, window, compute: DType::F32 }));
        dx
    }
}
