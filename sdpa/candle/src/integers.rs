//! Conversions of integer tensors. candle's CUDA backend can neither convert i32 nor copy it from a strided view.

use candle_core::{DType, Result, Tensor};

/// Returns true if candle's CUDA backend lacks the kernels for this tensor. It is then converted in host memory, which synchronises.
fn needs_the_host(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::I32 && tensor.device().is_cuda()
}

/// Returns a contiguous tensor.
pub(crate) fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    if needs_the_host(tensor) && !tensor.is_contiguous() {
        return tensor.to_device(&candle_core::Device::Cpu)?.contiguous()?.to_device(tensor.device());
    }
    tensor.contiguous()
}

/// Converts to another type.
pub(crate) fn cast(tensor: &Tensor, to: DType) -> Result<Tensor> {
    if needs_the_host(tensor) && to != DType::I32 {
        return tensor.to_device(&candle_core::Device::Cpu)?.to_dtype(to)?.to_device(tensor.device());
    }
    tensor.to_dtype(to)
}

/// Converts to i32, or on CUDA to u32 with the same bits: candle cannot convert to i32 there.
pub(crate) fn to_32_bits(tensor: &Tensor) -> Result<Tensor> {
    match (tensor.device().is_cuda(), tensor.dtype()) {
        (true, DType::U32 | DType::I32) => Ok(tensor.clone()),
        (true, _) => tensor.to_dtype(DType::U32),
        (false, _) => tensor.to_dtype(DType::I32),
    }
}
