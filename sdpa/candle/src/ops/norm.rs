//! RMS norm and layer norm.

use super::{unlike, untyped, wide, without_rows};
use crate::error::none;
use crate::op::{binary, ternary};
use candle_core::{D, DType, Result, Tensor};
use candle_nn::ops;
use sdpa::SpecError;

fn mistakes(x: &Tensor, weights: &[(&str, &Tensor)], eps: f32) -> Vec<SpecError> {
    let mut errors: Vec<SpecError> = untyped("x", x).into_iter().chain(without_rows(x)).collect();
    for (name, weight) in weights {
        errors.extend(unlike(name, weight, x));
        let dim = x.dims().last().copied().unwrap_or_default();
        if weight.dims() != [dim] {
            errors.push(SpecError::new(format!("{name} shape"), format!("{:?}", weight.dims()), format!("[{dim}], the last axis of x")));
        }
    }
    if !(eps >= 0.0 && eps.is_finite()) {
        errors.push(SpecError::new("eps", eps, "a finite number, at least 0"));
    }
    errors
}

/// The inputs of a backward pass: `x` normalised, and the factor of each row that normalised it.
fn normalised(x: &Tensor, eps: f32, remove_mean: bool) -> Result<[Tensor; 2]> {
    let x = wide(x)?;
    let x = if remove_mean { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let factor = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(eps))?.sqrt()?.recip()?;
    Ok([x.broadcast_mul(&factor)?, factor])
}

/// Returns the gradient of `x` of both norms, from `upstream` = the gradient of the result times the weight.
fn gradient_of_x(upstream: &Tensor, [x, factor]: &[Tensor; 2], remove_mean: bool) -> Result<Tensor> {
    let along = x.broadcast_mul(&(upstream * x)?.mean_keepdim(D::Minus1)?)?;
    let rest = (upstream - along)?;
    let rest = if remove_mean { rest.broadcast_sub(&upstream.mean_keepdim(D::Minus1)?)? } else { rest };
    rest.broadcast_mul(factor)
}

/// Sums over all axes but the last.
fn rows_summed(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let dim = x.dim(D::Minus1)?;
    x.reshape((x.elem_count() / dim, dim))?.sum(0)?.to_dtype(dtype)
}

/// Normalises the last axis, `x / √(mean(x²) + eps) · weight`, as `candle_nn::ops::rms_norm` does, with gradients of `x` and `weight`.
/// `x` has any shape (…, dim), `weight` is (dim). In f16 and bf16, sums and the backward pass are computed in f32.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use sdpa_candle::ops;
///
/// let x = Tensor::new(&[[3f32, 4.], [0., 2.]], &Device::Cpu)?;
/// let weight = Var::new(&[1f32, 10.], &Device::Cpu)?;
/// let y = ops::rms_norm(&x, &weight, 0.)?;
/// let gradient = y.sum_all()?.backward()?.remove(&weight).unwrap();
/// // The sums of the normalised columns: 3 / √12.5, and 4 / √12.5 + 2 / √2.
/// let rounded: Vec<i32> = gradient.to_vec1::<f32>()?.iter().map(|x| (x * 1e3).round() as i32).collect();
/// assert_eq!(rounded, [849, 2546]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Returns every argument with a wrong shape, element type or device.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    none(mistakes(x, &[("weight", weight)], eps))?;
    if x.dtype() == DType::F64 {
        // candle has no fused kernel for f64.
        return ops::rms_norm_slow(x, weight, eps);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let y = ops::rms_norm(&x.detach(), &weight.detach(), eps)?;
    let [needs_x, needs_weight] = [&x, &weight].map(|t| t.track_op());
    if !needs_x && !needs_weight {
        return Ok(y);
    }
    let (saved, scale) = (x.detach(), weight.detach());
    binary("sdpa-rms-norm", [&x, &weight], y, move |_, gradient| {
        let gradient = wide(gradient)?;
        let parts = normalised(&saved, eps, false)?;
        let of_x = || gradient_of_x(&gradient.broadcast_mul(&wide(&scale)?)?, &parts, false)?.to_dtype(saved.dtype());
        let of_weight = || rows_summed(&(&gradient * &parts[0])?, scale.dtype());
        Ok([needs_x.then(of_x).transpose()?, needs_weight.then(of_weight).transpose()?])
    })
}

/// Normalises the last axis, `(x - mean(x)) / √(var(x) + eps) · weight + bias`, as `candle_nn::ops::layer_norm` does, with gradients of
/// `x`, `weight` and `bias`. `x` has any shape (…, dim), `weight` and `bias` are (dim).
///
/// # Errors
/// Fails as [`rms_norm`] does.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
    none(mistakes(x, &[("weight", weight), ("bias", bias)], eps))?;
    if x.dtype() == DType::F64 {
        return ops::layer_norm_slow(x, weight, bias, eps);
    }
    let [x, weight, bias] = [x.contiguous()?, weight.contiguous()?, bias.contiguous()?];
    let y = ops::layer_norm(&x.detach(), &weight.detach(), &bias.detach(), eps)?;
    let [needs_x, needs_weight, needs_bias] = [&x, &weight, &bias].map(|t| t.track_op());
    if !needs_x && !needs_weight && !needs_bias {
        return Ok(y);
    }
    let (saved, scale) = (x.detach(), weight.detach());
    ternary("sdpa-layer-norm", [&x, &weight, &bias], y, move |_, gradient| {
        let gradient = wide(gradient)?;
        let parts = normalised(&saved, eps, true)?;
        let of_x = || gradient_of_x(&gradient.broadcast_mul(&wide(&scale)?)?, &parts, true)?.to_dtype(saved.dtype());
        let of_weight = || rows_summed(&(&gradient * &parts[0])?, scale.dtype());
        let of_bias = || rows_summed(&gradient, scale.dtype());
        Ok([needs_x.then(of_x).transpose()?, needs_weight.then(of_weight).transpose()?, needs_bias.then(of_bias).transpose()?])
    })
}
