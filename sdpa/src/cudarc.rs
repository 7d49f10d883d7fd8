//! cudarc's streams and slices for the raw tier.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use sdpa::exec::cudnn::{CudnnExecutor, CudnnOptions};
//! use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Before cudarc is touched: it panics where there is no driver, this says so.
//! let executor = CudnnExecutor::new(CudnnOptions::default())?;
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
//! let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
//! let (q, k) = (stream.alloc_zeros::<half::bf16>(8 * 128 * 64)?, stream.alloc_zeros::<half::bf16>(2 * 128 * 64)?);
//! let (v, mut o) = (k.clone(), q.clone());
//! let attention = sdpa::cudarc::Attention::new(&executor, &spec)?;
//! attention.forward(&stream, &q, &k, &v, &mut o, None, None)?;
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
#![allow(unsafe_code)]

use crate::error::{Error, SpecError, SpecErrors};
use crate::exec::cudnn::{CudnnExecutor, DeviceForward, Planned};
use crate::spec::AttentionSpec;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError};
use cudnn_graph::{DType, DeviceSlice, Event, Library, RawStream, Stream};
use parking_lot::Mutex;
use std::sync::Arc;

/// An element type that attention over cudarc's slices takes.
pub trait Element: DeviceRepr {
    /// Its name here.
    const DTYPE: DType;
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}

/// What went wrong with attention over cudarc's slices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudarcError {
    /// The specification, the executor or the environment.
    #[error(transparent)]
    Sdpa(#[from] Error),
    /// cudarc's own.
    #[error("cudarc: {0}")]
    Driver(#[from] DriverError),
}

impl From<SpecErrors> for CudarcError {
    fn from(errors: SpecErrors) -> CudarcError {
        CudarcError::Sdpa(errors.into())
    }
}

impl From<cudnn_graph::Error> for CudarcError {
    fn from(error: cudnn_graph::Error) -> CudarcError {
        CudarcError::Sdpa(error.into())
    }
}

/// Plans of one specification, to be called with cudarc's slices. Dropping it waits for its last call.
#[derive(Debug)]
pub struct Attention {
    library: &'static Library,
    device: &'static cudnn_graph::Device,
    spec: AttentionSpec,
    planned: Arc<Planned>,
    /// Behind the last call on each stream: the kernels must not be unloaded before.
    last: Mutex<Vec<(RawStream, Event)>>,
}

impl Drop for Attention {
    fn drop(&mut self) {
        for (_, event) in self.last.lock().drain(..) {
            if let Err(error) = event.synchronize() {
                tracing::warn!(%error, "waiting for the last call");
            }
        }
    }
}

impl Attention {
    /// Takes the plans from the executor's cache, or makes them.
    ///
    /// # Errors
    /// Every rule that the specification breaks; every reason why cuDNN does not run it; the environment's.
    pub fn new(executor: &CudnnExecutor, spec: &AttentionSpec) -> Result<Attention, Error> {
        let problem = spec.validate()?;
        let (planned, _) = executor.attention(&problem)?;
        Ok(Attention { library: executor.library(), device: executor.device(), spec: spec.clone(), planned, last: Mutex::new(Vec::new()) })
    }

    /// The plans.
    pub fn planned(&self) -> &Arc<Planned> {
        &self.planned
    }

    /// Submits one forward pass to `stream`, which must be of the executor's device. Nothing waits; cudarc's events order it
    /// with other streams. Workspace is allocated on the stream and freed behind the call.
    ///
    /// `stats` is there exactly when the specification asks for it: f32, (batch, heads_q, seq_q). Without `attn_scale`,
    /// `1 / √dim_qk`.
    ///
    /// # Errors
    /// Slices of another type or device, too short or misaligned, before anything runs; cudarc's and cuDNN's own.
    #[allow(clippy::too_many_arguments, reason = "the operands of attention")]
    pub fn forward<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        q: &CudaSlice<T>,
        k: &CudaSlice<T>,
        v: &CudaSlice<T>,
        o: &mut CudaSlice<T>,
        stats: Option<&mut CudaSlice<f32>>,
        attn_scale: Option<f32>,
    ) -> Result<(), CudarcError> {
        self.check::<T>(stream)?;
        // SAFETY: cudarc keeps the stream alive for as long as this borrow of it, and the device was checked.
        let borrowed = unsafe { Stream::borrow(self.device, RawStream(stream.cu_stream().cast())) };
        let handle = self.library.handle(&borrowed)?;
        let bytes = self.planned.workspace_bytes() as usize;
        // SAFETY: scratch memory, whose contents no kernel reads before it writes them.
        let mut workspace = unsafe { stream.alloc::<u8>(bytes.max(1)) }?;
        let slice = |address: u64, bytes: usize| DeviceSlice { address, bytes: bytes as u64 };
        let (q_bytes, k_bytes, v_bytes, o_bytes) = (q.num_bytes(), k.num_bytes(), v.num_bytes(), o.num_bytes());
        let (q, _q) = q.device_ptr(stream);
        let (k, _k) = k.device_ptr(stream);
        let (v, _v) = v.device_ptr(stream);
        let (o, _o) = o.device_ptr_mut(stream);
        let stats = stats.map(|s| {
            let bytes = s.num_bytes();
            (s.device_ptr_mut(stream), bytes)
        });
        let (scratch, _scratch) = workspace.device_ptr_mut(stream);
        let call = DeviceForward {
            q: slice(q, q_bytes),
            k: slice(k, k_bytes),
            v: slice(v, v_bytes),
            o: slice(o, o_bytes),
            stats: stats.as_ref().map(|((address, _), bytes)| slice(*address, *bytes)),
            attn_scale,
            params: &[],
            workspace: slice(scratch, bytes),
        };
        // SAFETY: cudarc's slices are device memory of the length they say; it frees them in the order of the stream, and its
        // events, recorded as the guards above go, keep other streams off them. This value holds the plan, and waits for
        // the event recorded below before it lets go.
        let submitted = unsafe { self.planned.forward(&handle, &call) };
        let event = borrowed.record(false)?;
        let mut last = self.last.lock();
        last.retain(|(stream, _)| *stream != borrowed.raw());
        last.push((borrowed.raw(), event));
        Ok(submitted?)
    }

    fn check<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<(), SpecErrors> {
        let mut errors = Vec::new();
        if T::DTYPE != self.spec.dtype {
            errors.push(SpecError::new("slice dtype", T::DTYPE, format!("the specification's, {}", self.spec.dtype)));
        }
        let ordinal = stream.context().ordinal();
        if ordinal != self.device.ordinal() as usize {
            errors.push(SpecError::new("stream device", ordinal, format!("the executor's, {}", self.device.ordinal())));
        }
        if errors.is_empty() { Ok(()) } else { Err(SpecErrors(errors)) }
    }
}
