//! Convolutions and their gradients.

use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;
use serde::{Deserialize, Serialize};

/// The geometry of a convolution. Each list has one number per spatial axis, outermost axis first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConvGeometry {
    /// Distance between the inputs of neighbouring outputs, at least 1.
    pub stride: Vec<i64>,
    /// Distance between the inputs of neighbouring filter elements, at least 1.
    pub dilation: Vec<i64>,
    /// Number of zeros before the first input.
    pub pre_padding: Vec<i64>,
    /// Number of zeros after the last input.
    pub post_padding: Vec<i64>,
}

impl ConvGeometry {
    /// Creates a geometry for a number of spatial axes, with strides and dilations of 1 and without padding.
    pub fn new(axes: usize) -> ConvGeometry {
        ConvGeometry { stride: vec![1; axes], dilation: vec![1; axes], pre_padding: vec![0; axes], post_padding: vec![0; axes] }
    }

    /// Sets the stride of each spatial axis.
    #[must_use]
    pub fn stride(mut self, stride: impl Into<Vec<i64>>) -> Self {
        self.stride = stride.into();
        self
    }

    /// Sets the dilation of each spatial axis.
    #[must_use]
    pub fn dilation(mut self, dilation: impl Into<Vec<i64>>) -> Self {
        self.dilation = dilation.into();
        self
    }

    /// Sets the padding before and after each spatial axis to the same numbers.
    #[must_use]
    pub fn padding(mut self, padding: impl Into<Vec<i64>>) -> Self {
        self.pre_padding = padding.into();
        self.post_padding.clone_from(&self.pre_padding);
        self
    }

    /// Sets the padding after each spatial axis.
    #[must_use]
    pub fn post_padding(mut self, padding: impl Into<Vec<i64>>) -> Self {
        self.post_padding = padding.into();
        self
    }

    /// Returns the number of outputs along spatial axis `axis` for `inputs` inputs and a filter of `taps` elements. `None` if the lists
    /// have no such axis, a number is out of range, or the filter is longer than the padded input.
    pub fn outputs(&self, axis: usize, inputs: i64, taps: i64) -> Option<i64> {
        let (&stride, &dilation) = (self.stride.get(axis)?, self.dilation.get(axis)?);
        let (&before, &after) = (self.pre_padding.get(axis)?, self.post_padding.get(axis)?);
        if stride < 1 || dilation < 1 || before < 0 || after < 0 || taps < 1 {
            return None;
        }
        let padded = inputs.checked_add(before)?.checked_add(after)?;
        let reach = (taps - 1).checked_mul(dilation)?.checked_add(1)?;
        (padded >= reach).then(|| (padded - reach) / stride + 1)
    }
}

/// A convolution (cross-correlation: the filter is not flipped). The number of groups is the ratio of the channels of `x` and of `w`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvForward {
    /// Images, (n, c, spatial axes).
    pub x: TensorId,
    /// Filters, (k, c / groups, spatial axes).
    pub w: TensorId,
    /// Result, (n, k, spatial axes).
    pub y: TensorId,
    /// Strides, dilations and paddings.
    pub geometry: ConvGeometry,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// The gradient of [`ConvForward`] with respect to its images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvBackwardData {
    /// Gradient of the result, (n, k, spatial axes).
    pub dy: TensorId,
    /// Filters, (k, c / groups, spatial axes).
    pub w: TensorId,
    /// Gradient of the images, (n, c, spatial axes).
    pub dx: TensorId,
    /// Strides, dilations and paddings of the convolution.
    pub geometry: ConvGeometry,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// The gradient of [`ConvForward`] with respect to its filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConvBackwardFilter {
    /// Gradient of the result, (n, k, spatial axes).
    pub dy: TensorId,
    /// Images, (n, c, spatial axes).
    pub x: TensorId,
    /// Gradient of the filters, (k, c / groups, spatial axes).
    pub dw: TensorId,
    /// Strides, dilations and paddings of the convolution.
    pub geometry: ConvGeometry,
    /// Element type of the accumulation.
    pub compute: DType,
}
