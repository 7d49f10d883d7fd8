//! Results that were computed before their op: the storage that an op of candle's autograd graph returns as its forward pass.

use crate::error::bug;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor};
use std::sync::{Mutex, PoisonError};

/// A result that was computed before its op is created.
pub(crate) struct Made {
    storage: Mutex<Option<Storage>>,
    shape: Shape,
}

impl Made {
    pub(crate) fn new(storage: Storage, shape: impl Into<Shape>) -> Made {
        Made { storage: Mutex::new(Some(storage)), shape: shape.into() }
    }

    /// Moves the storage out of a contiguous tensor that nothing else refers to. A copy would cost as much as a fused op.
    pub(crate) fn of(tensor: Tensor) -> Result<Made> {
        let taken = Taken::default();
        // candle has no in-place ops on tensors without elements.
        if tensor.device().is_metal() || tensor.elem_count() == 0 {
            let (storage, layout) = tensor.storage_and_layout();
            return Ok(Made::new(storage.try_clone(layout)?, tensor.shape()));
        }
        tensor.inplace_op1(&taken)?;
        let storage = taken.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Made::new(storage.ok_or_else(|| bug("a result has no storage"))?, tensor.shape()))
    }

    fn take(&self) -> Result<(Storage, Shape)> {
        let storage = self.storage.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok((storage.ok_or_else(|| bug("an op was applied twice"))?, self.shape.clone()))
    }

    pub(crate) fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            (Storage::Cuda(_) | Storage::Metal(_), _) => Err(bug("a result on the CPU is somewhere else")),
        }
    }

    pub(crate) fn on_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            (Storage::Cpu(_) | Storage::Metal(_), _) => Err(bug("a result on CUDA is somewhere else")),
        }
    }

    pub(crate) fn on_metal(&self) -> Result<(MetalStorage, Shape)> {
        match self.take()? {
            (Storage::Metal(storage), shape) => Ok((storage, shape)),
            (Storage::Cpu(_) | Storage::Cuda(_), _) => Err(bug("a result on Metal is somewhere else")),
        }
    }
}

/// An in-place op that moves a tensor's storage out, and leaves one element behind.
#[derive(Default)]
struct Taken(Mutex<Option<Storage>>);

impl Taken {
    fn put(&self, storage: Storage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
    }
}

impl InplaceOp1 for Taken {
    fn name(&self) -> &'static str {
        "sdpa-take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.put(Storage::Cpu(std::mem::replace(storage, CpuStorage::U8(Vec::new()))));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let device = storage.device.clone();
        let left = CudaStorage::wrap_cuda_slice(device.alloc_zeros::<u8>(1)?, device);
        self.put(Storage::Cuda(std::mem::replace(storage, left)));
        Ok(())
    }
}

/// Returns storage of one element on a device.
pub(crate) fn one_element(device: &candle_core::Device) -> Result<Storage> {
    let zero = Tensor::zeros(1, candle_core::DType::F32, device)?;
    let (storage, layout) = zero.storage_and_layout();
    storage.try_clone(layout)
}
