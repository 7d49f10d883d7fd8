//! Grouped matrix products of mixture-of-experts layers, concatenation, and rotary position embeddings.

use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;
use serde::{Deserialize, Serialize};

/// A concatenation of tensors along one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Concat {
    /// The tensors that are read, in order.
    pub inputs: Vec<TensorId>,
    /// The tensor that is written.
    pub y: TensorId,
    /// The axis along which the inputs follow one another.
    pub axis: i64,
}

/// The rows of a grouped matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// Row `r` of the result is that of row `r` of the tokens.
    None,
    /// Row `r` of the result is that of row `index[r]` of the tokens: i32 (1, rows, 1).
    Gather(TensorId),
    /// Row `r` of the tokens yields row `index[r] · top_k + slot[r]` of the result.
    Scatter {
        /// The token of each row, i32 (1, rows, 1).
        index: TensorId,
        /// The rank of the expert among those of the token, i32 (1, rows, 1).
        slot: TensorId,
        /// Number of experts per token.
        top_k: i32,
    },
}

/// A matrix product in which each row has the weights of its expert (from cuDNN 9.15 on).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeMatmul {
    /// Rows, (1, rows, k), sorted by expert unless they are gathered.
    pub tokens: TensorId,
    /// Weights of each expert, (experts, k, n).
    pub weights: TensorId,
    /// Index of the first row of each expert, i32 (experts, 1, 1): it starts with 0 and does not decrease.
    pub first_token: TensorId,
    /// The order of rows in the tokens and in the result.
    pub routing: Routing,
    /// Result, (1, rows, n).
    pub y: TensorId,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// The gradient of [`MoeMatmul`] with respect to its weights (from cuDNN 9.22 on).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeMatmulBackward {
    /// Rows, (1, rows, k), sorted by expert.
    pub tokens: TensorId,
    /// Gradient of the result, (1, rows, n), sorted by expert.
    pub dy: TensorId,
    /// Index of the first row of each expert, i32 (experts, 1, 1).
    pub first_token: TensorId,
    /// Gradient of the weights, (experts, k, n).
    pub dweights: TensorId,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// A rotary position embedding of the last `width` elements of each head (from cuDNN 9.24 on). The two halves of these elements are the
/// coordinates that are rotated by the angle; the elements before them are only scaled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Queries or keys, (b, h, s, d).
    pub x: TensorId,
    /// Angles in radians, (s, 1, 1, width). The first half of each row is read.
    pub angles: TensorId,
    /// Result, (b, h, s, d).
    pub y: TensorId,
    /// Factor of all elements of the result.
    #[serde(with = "crate::ir::float::f32")]
    pub scale: f32,
    /// Number of rotated elements, even; `None` means all of a head.
    pub width: Option<i64>,
}

/// The gradient of [`Rope`] (from cuDNN 9.25 on): the rotation by the opposite angle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeBackward {
    /// Gradient of the result, (b, h, s, d).
    pub dy: TensorId,
    /// Angles in radians, (s, 1, 1, width).
    pub angles: TensorId,
    /// Gradient of the input, (b, h, s, d).
    pub dx: TensorId,
    /// Factor of all elements of the result of the forward op.
    #[serde(with = "crate::ir::float::f32")]
    pub scale: f32,
    /// Number of rotated elements, even; `None` means all of a head.
    pub width: Option<i64>,
}
