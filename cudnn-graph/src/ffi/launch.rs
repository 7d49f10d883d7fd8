//! Safe execution: each execution owns the resources that it uses until the device is done.

use crate::bind::Bindings;
use crate::error::Error;
use crate::ir::{Scalar, TensorId};
use crate::plan::Plan;
use sdpa_driver::{Buffer, DeviceSlice, Event, Stream};
use std::sync::Arc;

/// Buffers and scalars that a caller binds to the tensors of a plan, by id. The bindings keep the buffers alive.
#[derive(Debug, Default)]
pub struct OwnedBindings {
    buffers: Vec<(TensorId, Arc<Buffer>, u64)>,
    values: Vec<(TensorId, Scalar)>,
}

impl OwnedBindings {
    /// Creates bindings that bind no tensor yet.
    pub fn new() -> OwnedBindings {
        OwnedBindings::default()
    }

    /// Binds a tensor to a whole buffer.
    #[must_use]
    pub fn buffer(self, tensor: TensorId, buffer: &Arc<Buffer>) -> Self {
        self.buffer_at(tensor, buffer, 0)
    }

    /// Binds a tensor to a buffer, from byte `offset` on.
    #[must_use]
    pub fn buffer_at(mut self, tensor: TensorId, buffer: &Arc<Buffer>, offset: u64) -> Self {
        self.buffers.push((tensor, buffer.clone(), offset));
        self
    }

    /// Binds a tensor to a scalar from host memory.
    #[must_use]
    pub fn value(mut self, tensor: TensorId, value: Scalar) -> Self {
        self.values.push((tensor, value));
        self
    }
}

/// An execution that may still be running. It keeps the plan, the buffers and the workspace alive. Dropping it waits.
#[derive(Debug)]
#[must_use = "dropping it waits for the device"]
pub struct InFlight {
    event: Event,
    _plan: Arc<Plan>,
    _buffers: Vec<Arc<Buffer>>,
    /// `None` only after waiting.
    workspace: Option<Buffer>,
    _stream: Arc<Stream>,
}

impl InFlight {
    /// Returns whether the device has finished the execution.
    ///
    /// # Errors
    /// Returns a driver error, also if a kernel failed.
    pub fn done(&self) -> Result<bool, Error> {
        Ok(self.event.passed()?)
    }

    /// Waits until the device has finished the execution, and returns the workspace for the next one.
    ///
    /// # Errors
    /// Returns a driver error, also if a kernel failed.
    pub fn wait(mut self) -> Result<Buffer, Error> {
        self.event.synchronize()?;
        match self.workspace.take() {
            Some(workspace) => Ok(workspace),
            None => Ok(Buffer::new(self._stream.device(), 0)?),
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.workspace.is_some()
            && let Err(error) = self.event.synchronize()
        {
            tracing::warn!(%error, "an execution failed and nobody waited for it");
        }
    }
}

/// Submits an execution of a plan to a stream, without waiting. The execution owns the workspace; [`InFlight::wait`] returns it.
///
/// # Errors
/// Returns every mistake in the bindings before anything runs, including a buffer of another device. Returns
/// [`BindingError::Addressing`](crate::BindingError::Addressing) for a plan that reads lengths, offsets or pages, which needs
/// [`launch_addressed`]. Any other error is from cuDNN.
pub fn launch(plan: &Arc<Plan>, stream: &Arc<Stream>, bindings: OwnedBindings, workspace: Buffer) -> Result<InFlight, Error> {
    plan.ports().refuse_addressing()?;
    // SAFETY: as checked above, no tensor determines which addresses the plan accesses.
    unsafe { launch_addressed(plan, stream, bindings, workspace) }
}

/// Submits a plan like [`launch`], but also accepts plans with tensors whose contents determine the addresses that the plan accesses.
///
/// # Safety
/// Until the device is done, the contents of such tensors ([`DevicePort::addressing`](crate::bind::DevicePort::addressing)) are in range: lengths
/// from 0 to the extent, offsets within the buffer, pages within the pool.
///
/// # Errors
/// Fails as [`launch`] does.
pub unsafe fn launch_addressed(
    plan: &Arc<Plan>,
    stream: &Arc<Stream>,
    bindings: OwnedBindings,
    workspace: Buffer,
) -> Result<InFlight, Error> {
    let mut raw = Bindings::new();
    for (tensor, buffer, offset) in &bindings.buffers {
        same_device(stream, buffer)?;
        let bytes = (buffer.bytes() as u64).saturating_sub(*offset);
        raw = raw.slice(*tensor, DeviceSlice { address: buffer.address().saturating_add(*offset), bytes });
    }
    for (tensor, value) in &bindings.values {
        raw = raw.value(*tensor, *value);
    }
    same_device(stream, &workspace)?;
    let handle = plan.library().handle(stream)?;
    let scratch = DeviceSlice { address: workspace.address(), bytes: workspace.bytes() as u64 };
    // Create the event before anything runs: without an event, no resource that the device uses could be freed safely.
    let event = Event::new(stream.device(), false)?;
    // SAFETY: every slice is inside an owned buffer of the stream's device. The result keeps buffers, plan and workspace until the event has passed.
    // Two executions that share a buffer race only on its contents; these determine no addresses, or the caller vouches for them.
    let submitted = unsafe { plan.execute(&handle, &raw, scratch) };
    // If the event cannot be recorded, wait for the stream: no resource may be freed before the device is done with it.
    let recorded = stream.record_again(&event).or_else(|error| stream.synchronize().and(Err(error)));
    drop(handle);
    let running = InFlight {
        event,
        _plan: plan.clone(),
        _buffers: bindings.buffers.into_iter().map(|(_, buffer, _)| buffer).collect(),
        workspace: Some(workspace),
        _stream: stream.clone(),
    };
    submitted?;
    recorded?;
    Ok(running)
}

fn same_device(stream: &Stream, buffer: &Buffer) -> Result<(), Error> {
    let (want, have) = (stream.device().ordinal(), buffer.device().ordinal());
    if want == have {
        return Ok(());
    }
    Err(sdpa_driver::Error::OtherDevice { what: "a buffer", got: have, expected: want }.into())
}
