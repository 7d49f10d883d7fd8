//! Differentiable versions of candle-nn's fused ops, with the same names and arguments.
//!
//! candle-nn's own `rope`, `rms_norm`, `layer_norm` and `softmax_last_dim` cut the autograd graph: variables before them silently receive
//! no gradient. These functions run the same fused forward pass, so the results have the same bits, and have a backward pass of their own.
//! They also accept tensors that are not contiguous. Calls on tensors without gradient tracking cost the same as candle-nn's.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use sdpa_candle::ops;
//!
//! let x = Var::from_tensor(&Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?)?;
//! let weight = Var::from_tensor(&Tensor::ones(8, candle_core::DType::F32, &Device::Cpu)?)?;
//! // candle-nn's own function gives a gradient to neither.
//! let cut = candle_nn::ops::rms_norm(&x, &weight, 1e-5)?.sqr()?.sum_all()?.backward()?;
//! assert!(cut.get(&x).is_none() && cut.get(&weight).is_none());
//! let gradients = ops::rms_norm(&x, &weight, 1e-5)?.sqr()?.sum_all()?.backward()?;
//! assert!(gradients.get(&x).is_some() && gradients.get(&weight).is_some());
//! # Ok::<(), candle_core::Error>(())
//! ```

mod norm;
mod rope;
mod softmax;

pub use norm::{layer_norm, rms_norm};
pub use rope::{rope, rope_i, rope_thd};
pub use softmax::softmax_last_dim;

use candle_core::{DType, Result, Tensor};
use sdpa::SpecError;

/// The element types that the functions of this module accept.
const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

/// Returns a mistake if a tensor is not of a supported element type.
fn untyped(name: &str, x: &Tensor) -> Option<SpecError> {
    let rule = "one of f32, f16, bf16, f64";
    (!TYPES.contains(&x.dtype())).then(|| SpecError::new(format!("{name} dtype"), x.dtype().as_str(), rule))
}

/// Returns the mistakes of an argument that must have the element type and device of `x`.
fn unlike(name: &str, tensor: &Tensor, x: &Tensor) -> Vec<SpecError> {
    let mut errors = Vec::new();
    if tensor.dtype() != x.dtype() {
        let rule = format!("{}, the type of x", x.dtype().as_str());
        errors.push(SpecError::new(format!("{name} dtype"), tensor.dtype().as_str(), rule));
    }
    if !tensor.device().same_device(x.device()) {
        let rule = format!("{:?}, the device of x", x.device().location());
        errors.push(SpecError::new(format!("{name} device"), format!("{:?}", tensor.device().location()), rule));
    }
    errors
}

/// Returns a mistake if a tensor has no axis, or a last axis without elements.
fn without_rows(x: &Tensor) -> Option<SpecError> {
    let none = x.dims().last().is_none_or(|dim| *dim == 0);
    none.then(|| SpecError::new("x shape", format!("{:?}", x.dims()), "a last axis of at least one element"))
}

/// Converts half precision to f32, in which gradients are computed. Keeps f64.
fn wide(x: &Tensor) -> Result<Tensor> {
    if x.dtype() == DType::F64 { Ok(x.clone()) } else { x.to_dtype(DType::F32) }
}
