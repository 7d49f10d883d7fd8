//! Pooling and upsampling.

use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;
use serde::{Deserialize, Serialize};

/// The value that a resample computes from a window of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResampleMode {
    /// The largest element; padding is −∞.
    Max,
    /// The mean of the window, in which padding counts as zeros.
    AverageIncludePadding,
    /// The mean of the elements of the window that are not padding.
    AverageExcludePadding,
}

impl ResampleMode {
    /// Every mode of a resample.
    pub const ALL: [ResampleMode; 3] = [ResampleMode::Max, ResampleMode::AverageIncludePadding, ResampleMode::AverageExcludePadding];

    /// Returns the name of the mode in printed graphs.
    pub fn name(self) -> &'static str {
        match self {
            ResampleMode::Max => "max",
            ResampleMode::AverageIncludePadding => "average_include_padding",
            ResampleMode::AverageExcludePadding => "average_exclude_padding",
        }
    }
}

/// The windows of a resample. Each list has one number per spatial axis, outermost axis first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Extent of a window, at least 1.
    pub extent: Vec<i64>,
    /// Distance between neighbouring windows, at least 1.
    pub stride: Vec<i64>,
    /// Number of padded elements before the first input; smaller than the window.
    pub pre_padding: Vec<i64>,
    /// Number of padded elements after the last input; smaller than the window.
    pub post_padding: Vec<i64>,
}

impl Window {
    /// Creates windows of these extents that do not overlap, without padding.
    pub fn new(extent: impl Into<Vec<i64>>) -> Window {
        let extent = extent.into();
        let none = vec![0; extent.len()];
        Window { stride: extent.clone(), extent, pre_padding: none.clone(), post_padding: none }
    }

    /// Sets the distance between neighbouring windows.
    #[must_use]
    pub fn stride(mut self, stride: impl Into<Vec<i64>>) -> Self {
        self.stride = stride.into();
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

    /// Returns the number of windows along spatial axis `axis` over `inputs` inputs. `None` if the lists have no such axis, a number is
    /// out of range, or the window is longer than the padded input.
    pub fn outputs(&self, axis: usize, inputs: i64) -> Option<i64> {
        let (&extent, &stride) = (self.extent.get(axis)?, self.stride.get(axis)?);
        let (&before, &after) = (self.pre_padding.get(axis)?, self.post_padding.get(axis)?);
        if extent < 1 || stride < 1 || !(0..extent).contains(&before) || !(0..extent).contains(&after) {
            return None;
        }
        let padded = inputs.checked_add(before)?.checked_add(after)?;
        (padded >= extent).then(|| (padded - extent) / stride + 1)
    }
}

/// Pooling: one result per window of `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResampleForward {
    /// The value that is computed from a window.
    pub mode: ResampleMode,
    /// Images, (n, c, spatial axes).
    pub x: TensorId,
    /// Result, (n, c, spatial axes).
    pub y: TensorId,
    /// For [`ResampleMode::Max`], the row-major position of the maximum in its window, an integer output for the backward op.
    pub index: Option<TensorId>,
    /// Extents, strides and paddings of the windows.
    pub window: Window,
    /// Element type of the arithmetic.
    pub compute: DType,
}

/// The gradient of [`ResampleForward`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResampleBackward {
    /// The value that the forward op computes from a window.
    pub mode: ResampleMode,
    /// Gradient of the result, (n, c, spatial axes).
    pub dy: TensorId,
    /// Gradient of the images, (n, c, spatial axes).
    pub dx: TensorId,
    /// The index of the forward op, which [`ResampleMode::Max`] needs.
    pub index: Option<TensorId>,
    /// The images of the forward op. cuDNN reads them only if the channels are not the innermost axis.
    pub x: Option<TensorId>,
    /// The result of the forward op. cuDNN reads it only if the channels are not the innermost axis.
    pub y: Option<TensorId>,
    /// Extents, strides and paddings of the windows.
    pub window: Window,
    /// Element type of the arithmetic.
    pub compute: DType,
}

/// Doubles the extents of the two spatial axes: bilinear interpolation at halves of the positions. Along each axis, result `2 i` is element `i`, result
/// `2 i + 1` is the mean of the elements `i` and `i + 1`, and the last result is the last element.
///
/// It is the one form of bilinear resampling for which cuDNN 9.19 and 9.27 have an engine, and only for f32 with channels last. The weights were read off
/// results on an H200 under 9.19.0. PyTorch computes the same if it aligns the corners of images whose last elements are repeated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Upsample {
    /// Images, (n, c, h, w).
    pub x: TensorId,
    /// Result, (n, c, 2 h, 2 w).
    pub y: TensorId,
    /// Element type of the arithmetic.
    pub compute: DType,
}
