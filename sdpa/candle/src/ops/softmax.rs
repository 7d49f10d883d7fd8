//! Softmax over the last axis.

use super::{untyped, wide, without_rows};
use crate::error::none;
use crate::op::unary;
use candle_core::{D, Result, Tensor};

/// Computes softmax over the last axis, as `candle_nn::ops::softmax_last_dim` does, with a gradient of `x`. For attention use
/// [`Attention`](crate::Attention), which does not store the scores.
///
/// ```
/// use candle_core::{Device, Var};
/// use sdpa_candle::ops;
///
/// let x = Var::new(&[[0f32, 0.]], &Device::Cpu)?;
/// let y = ops::softmax_last_dim(&x)?;
/// let gradient = y.narrow(1, 0, 1)?.sum_all()?.backward()?.remove(&x).unwrap();
/// assert_eq!(gradient.to_vec2::<f32>()?, [[0.25, -0.25]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Fails if `x` is not a float tensor, or has no elements along the last axis.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    none(untyped("x", x).into_iter().chain(without_rows(x)).collect())?;
    let x = x.contiguous()?;
    let y = candle_nn::ops::softmax_last_dim(&x.detach())?;
    if !x.track_op() {
        return Ok(y);
    }
    unary("sdpa-softmax", &x, y, |y, gradient| {
        let (wide_y, gradient) = (wide(y)?, wide(gradient)?);
        let product = (&gradient * &wide_y)?;
        let along = wide_y.broadcast_mul(&product.sum_keepdim(D::Minus1)?)?;
        Ok([Some((product - along)?.to_dtype(y.dtype())?)])
    })
}
