//! Normalizations, and the statistics of batch norm.

use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;
use serde::{Deserialize, Serialize};

/// The axes over which a norm computes its statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormMode {
    /// Layer norm: over the axes, except the first, along which the scale has the extent of `x`.
    Layer,
    /// Instance norm: over the spatial axes of each image and channel. The scale is (1, c, 1, …).
    Instance,
    /// Batch norm: over all axes except the channels. The scale is (1, c, 1, …).
    Batch,
    /// RMS norm: the axes of layer norm, but elements are divided by their root mean square, and no mean is subtracted.
    Rms,
    /// Adaptive layer norm: layer norm whose scale and bias differ between batch entries (from cuDNN 9.7 on).
    AdaLayer,
}

impl NormMode {
    /// Every mode of a norm.
    pub const ALL: [NormMode; 5] = [NormMode::Layer, NormMode::Instance, NormMode::Batch, NormMode::Rms, NormMode::AdaLayer];

    /// Returns the name of the mode in printed graphs.
    pub fn name(self) -> &'static str {
        match self {
            NormMode::Layer => "layer",
            NormMode::Instance => "instance",
            NormMode::Batch => "batch",
            NormMode::Rms => "rms",
            NormMode::AdaLayer => "ada_layer",
        }
    }
}

/// Running statistics of batch norm: `next = (1 − factor) · running + factor · current`. The variance of the current batch is the
/// unbiased one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningStats {
    /// Weight of the current batch: one f32 by value.
    pub factor: TensorId,
    /// Running mean before this batch, f32 (1, c, 1, …).
    pub mean: TensorId,
    /// Running variance before this batch, f32 (1, c, 1, …).
    pub variance: TensorId,
    /// Running mean after this batch, an output, f32 (1, c, 1, …).
    pub next_mean: TensorId,
    /// Running variance after this batch, an output, f32 (1, c, 1, …).
    pub next_variance: TensorId,
}

/// A normalization: `y = (x − mean) / √(variance + epsilon) · scale + bias`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormForward {
    /// The axes over which statistics are computed.
    pub mode: NormMode,
    /// The tensor that is read, (n, c, …).
    pub x: TensorId,
    /// Factor of the normalized elements.
    pub scale: TensorId,
    /// Summand of the result, with the extents of `scale`. Only RMS norm may have none.
    pub bias: Option<TensorId>,
    /// Summand of the variance: one f32 by value.
    pub epsilon: TensorId,
    /// The result, with the extents of `x`.
    pub y: TensorId,
    /// Mean, an output for the backward op, f32. The normalized axes have extent 1. RMS norm has none.
    pub mean: Option<TensorId>,
    /// `1 / √(variance + epsilon)`, an output for the backward op, f32, with the extents of the mean. `None` for inference.
    pub inv_variance: Option<TensorId>,
    /// Running statistics of batch norm.
    pub running: Option<RunningStats>,
}

/// The gradients of [`NormForward`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormBackward {
    /// The axes over which statistics were computed.
    pub mode: NormMode,
    /// The input of the forward op.
    pub x: TensorId,
    /// Gradient of the result, with the extents of `x`.
    pub dy: TensorId,
    /// The scale of the forward op.
    pub scale: TensorId,
    /// The mean of the forward op; `None` for RMS norm.
    pub mean: Option<TensorId>,
    /// The inverse deviation `inv_variance` of the forward op.
    pub inv_variance: TensorId,
    /// Gradient of `x`.
    pub dx: TensorId,
    /// Gradient of the scale.
    pub dscale: TensorId,
    /// Gradient of the bias. Only RMS norm may have none.
    pub dbias: Option<TensorId>,
}

/// The sums that batch norm needs: of the elements of each channel, and of their squares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenStats {
    /// The tensor that is read, (n, c, …).
    pub x: TensorId,
    /// Sum of each channel, f32 (1, c, 1, …).
    pub sum: TensorId,
    /// Sum of squares of each channel, f32 (1, c, 1, …).
    pub square_sum: TensorId,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// Computes the statistics of batch norm from the sums of [`GenStats`], and `y = eq_scale · x + eq_bias` as factors. All tensors are f32
/// (1, c, 1, …).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BnFinalize {
    /// Sum of each channel.
    pub sum: TensorId,
    /// Sum of squares of each channel.
    pub square_sum: TensorId,
    /// The scale of the norm.
    pub scale: TensorId,
    /// The bias of the norm.
    pub bias: TensorId,
    /// Summand of the variance: one f32 by value.
    pub epsilon: TensorId,
    /// Number of elements per channel in the sums: one i64 by value.
    pub count: TensorId,
    /// Running statistics.
    pub running: RunningStats,
    /// Mean of each channel.
    pub mean: TensorId,
    /// `1 / √(variance + epsilon)` of each channel.
    pub inv_variance: TensorId,
    /// `scale · inv_variance`.
    pub eq_scale: TensorId,
    /// `bias − mean · eq_scale`.
    pub eq_bias: TensorId,
    /// Element type of the arithmetic.
    pub compute: DType,
}

/// The gradients of the scale and bias of batch norm, and the factors of the gradient of its input: `dx = eq_scale_dy · dy + eq_scale_x · x + eq_bias`,
/// which pointwise ops compute. All tensors except `x` and `dy` are f32 (1, c, 1, …).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BnBackwardWeights {
    /// The input of the norm, (n, c, …).
    pub x: TensorId,
    /// Gradient of the result of the norm, with the extents of `x`.
    pub dy: TensorId,
    /// The scale of the norm.
    pub scale: TensorId,
    /// Mean of each channel.
    pub mean: TensorId,
    /// `1 / √(variance + epsilon)` of each channel.
    pub inv_variance: TensorId,
    /// Gradient of the scale.
    pub dscale: TensorId,
    /// Gradient of the bias.
    pub dbias: TensorId,
    /// `scale · inv_variance`.
    pub eq_scale_dy: TensorId,
    /// `−scale · inv_variance² · dscale / count`, where `count` is the number of elements per channel.
    pub eq_scale_x: TensorId,
    /// `−scale · inv_variance · dbias / count − mean · eq_scale_x`.
    pub eq_bias: TensorId,
    /// Element type of the arithmetic.
    pub compute: DType,
}
