//! The raw tier: attention over device memory that the caller answers for.
#![allow(unsafe_code)]

use super::bind::{Bound, Call};
use super::plan::Planned;
use super::schedule::{Contents, Run, Step};
use crate::error::Error;
use crate::lower::Table;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Plan, Stream};
use half::{bf16, f16};
use sdpa_core::DType;
use sdpa_core::expr::Declared;
use smallvec::SmallVec;
use std::sync::Arc;

/// A declared parameter in one call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceParam<'a> {
    /// The name that it was declared by.
    pub name: &'a str,
    /// Its value.
    pub value: DeviceValue,
}

/// The value of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum DeviceValue {
    /// For a scalar.
    Scalar(f32),
    /// For a tensor: dense, of this element type, 16-byte aligned. A truth value is a byte, 0 or 1.
    Tensor(DType, DeviceSlice),
    /// The same of lengths (`seq_len_q`, `seq_len_kv`), of which the caller promises that each lies between 0 and the extent of its axis:
    /// from cuDNN 9.26 on nothing is spent on clamping them. **A length that breaks the promise has results written past the end of `stats`
    /// and of gradients.**
    WithinExtent(DType, DeviceSlice),
}

impl DeviceValue {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<(DType, DeviceSlice)> {
        match *self {
            DeviceValue::Scalar(_) => None,
            DeviceValue::Tensor(dtype, slice) | DeviceValue::WithinExtent(dtype, slice) => Some((dtype, slice)),
        }
    }

    pub(super) fn is_within_extent(&self) -> bool {
        match self {
            DeviceValue::Scalar(_) | DeviceValue::Tensor(..) => false,
            DeviceValue::WithinExtent(..) => true,
        }
    }
}

/// The parameters of a call, with the defaults of the scalars that it does not name.
pub fn with_defaults<'a>(declared: &'a [Declared], given: Vec<DeviceParam<'a>>) -> Vec<DeviceParam<'a>> {
    defaults_added(declared, given.into()).into_vec()
}

/// [`with_defaults`] without an allocation, for as many as most calls have.
pub(crate) fn defaults_added<'a>(declared: &'a [Declared], mut given: SmallVec<[DeviceParam<'a>; 8]>) -> SmallVec<[DeviceParam<'a>; 8]> {
    for p in declared {
        if let Some(default) = p.default.filter(|_| given.iter().all(|g| g.name != p.name)) {
            given.push(DeviceParam { name: &p.name, value: DeviceValue::Scalar(default) });
        }
    }
    given
}

/// The gradient of a declared parameter.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGradient<'a> {
    /// The name of the parameter.
    pub name: &'a str,
    /// Dense, of the element type that the problem asks for, 16-byte aligned.
    pub slice: DeviceSlice,
}

/// Device memory and numbers of one forward call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceForward<'a> {
    /// Queries, strided as the problem says.
    pub q: DeviceSlice,
    /// Keys.
    pub k: DeviceSlice,
    /// Values.
    pub v: DeviceSlice,
    /// Output.
    pub o: DeviceSlice,
    /// f32, (batch, heads_q, seq_q), dense, 16-byte aligned; there exactly when the problem asks for stats.
    pub stats: Option<DeviceSlice>,
    /// Multiplies the scores; positive. `None`: `1 / √dim_qk`.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, every one: plans are shared by specifications that differ in defaults alone. See
    /// [`with_defaults`].
    pub params: &'a [DeviceParam<'a>],
    /// At least [`Planned::workspace_bytes`], 256-byte aligned. `None`: memory that is kept for calls of this thread on this stream.
    pub workspace: Option<DeviceSlice>,
}

/// Device memory and numbers of one backward call.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBackward<'a> {
    /// Queries, strided as the problem says.
    pub q: DeviceSlice,
    /// Keys.
    pub k: DeviceSlice,
    /// Values.
    pub v: DeviceSlice,
    /// Output of the forward pass.
    pub o: DeviceSlice,
    /// f32, (batch, heads_q, seq_q), dense, 16-byte aligned: the forward pass's.
    pub stats: DeviceSlice,
    /// Gradient of the output.
    pub d_o: DeviceSlice,
    /// Gradient of the queries.
    pub dq: DeviceSlice,
    /// Gradient of the keys.
    pub dk: DeviceSlice,
    /// Gradient of the values.
    pub dv: DeviceSlice,
    /// The scale of the forward pass.
    pub attn_scale: Option<f32>,
    /// Values of declared parameters, every one, those of the forward pass.
    pub params: &'a [DeviceParam<'a>],
    /// Gradients of declared parameters: each that the problem asks for, once.
    pub gradients: &'a [DeviceGradient<'a>],
    /// At least [`Planned::workspace_bytes`], 256-byte aligned. `None`: memory that is kept for calls of this thread on this stream.
    pub workspace: Option<DeviceSlice>,
}

impl Planned {
    /// Puts the tables of the graphs into device memory, and waits for that.
    ///
    /// # Errors
    /// The environment's.
    pub fn upload_tables(&mut self, stream: &Stream) -> Result<(), Error> {
        for contents in self.schedule.tables() {
            self.tables.push(Arc::new(uploaded(contents, stream)?));
        }
        stream.synchronize()?;
        Ok(())
    }

    /// Submits one forward pass to the handle's stream. Nothing waits.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice is device memory of the handle's device, really as large as said; lengths are what
    /// [`DeviceValue::WithinExtent`] says of them; `o`, `stats` and the workspace are not used by anything else; `q`, `k`, `v` and parameters are not written. `self` may go:
    /// what the device needs of it stays until it is done, and until a graph that this call was captured into is gone.
    ///
    /// # Errors
    /// Everything that is wrong with the call, before anything runs: a scale that is not positive, stats missing or too many, parameters
    /// missing, unknown, doubled or of another type, slices that are too short or misaligned; cuDNN's own.
    pub unsafe fn forward(&self, handle: &Handle<'_>, call: &DeviceForward<'_>) -> Result<(), Error> {
        let call = Call {
            operands: [Some(call.q), Some(call.k), Some(call.v), Some(call.o), None, None, None, None],
            stats: call.stats,
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: &[],
            workspace: self.workspace(handle, call.workspace)?,
        };
        // SAFETY: the caller's.
        unsafe { self.submit(handle, &call) }
    }

    /// Submits one backward pass to the handle's stream. Nothing waits.
    ///
    /// # Safety
    /// Until the stream has passed this call: every slice is device memory of the handle's device, really as large as said;
    /// gradients and the workspace are not used by anything else; what is read is not written. `self` may go, as there.
    ///
    /// # Errors
    /// As [`Planned::forward`], and for gradients of parameters.
    pub unsafe fn backward(&self, handle: &Handle<'_>, call: &DeviceBackward<'_>) -> Result<(), Error> {
        let call = Call {
            operands: [call.q, call.k, call.v, call.o, call.d_o, call.dq, call.dk, call.dv].map(Some),
            stats: Some(call.stats),
            attn_scale: call.attn_scale,
            params: call.params,
            gradients: call.gradients,
            workspace: self.workspace(handle, call.workspace)?,
        };
        // SAFETY: the caller's.
        unsafe { self.submit(handle, &call) }
    }

    /// # Safety
    /// As [`Planned::forward`] and [`Planned::backward`].
    unsafe fn submit(&self, handle: &Handle<'_>, call: &Call<'_>) -> Result<(), Error> {
        self.plan.check_device(handle.device())?;
        let bound = self.bind(call)?;
        self.noting_use(handle, || {
            for step in self.schedule.steps() {
                // SAFETY: the caller's; memory has been seen to hold what steps reach of it, and pieces of the workspace do not overlap.
                unsafe { self.step(handle, step, &bound, call.workspace) }?;
            }
            Ok(())
        })
    }

    /// # Safety
    /// As [`Planned::forward`] and [`Planned::backward`].
    unsafe fn step(&self, handle: &Handle<'_>, step: &Step<Arc<Plan>>, bound: &Bound, workspace: DeviceSlice) -> Result<(), Error> {
        match step {
            Step::Run(run) if bound.spares(run.spared_by) => Ok(()),
            // SAFETY: the caller's.
            Step::Run(run) => unsafe { execute(handle, run, bound, workspace) },
            Step::Zero(to) => {
                let to = DeviceSlice { address: bound.address(*to), bytes: self.schedule.slot(*to).bytes };
                // SAFETY: the caller's.
                Ok(unsafe { handle.zero(to) }?)
            }
            Step::Move(from, to) => {
                let bytes = self.schedule.slot(*from).bytes;
                let [from, to] = [from, to].map(|&slot| DeviceSlice { address: bound.address(slot), bytes });
                // SAFETY: the caller's.
                Ok(unsafe { handle.copy(from, to) }?)
            }
        }
    }

    /// The caller's workspace, or that of the calls of this thread on the handle's stream.
    fn workspace(&self, handle: &Handle<'_>, given: Option<DeviceSlice>) -> Result<DeviceSlice, Error> {
        given.map_or_else(|| Ok(handle.workspace(self.workspace_bytes())?), Ok)
    }
}

/// # Safety
/// As [`Planned::forward`].
unsafe fn execute(handle: &Handle<'_>, run: &Run<Arc<Plan>>, bound: &Bound, workspace: DeviceSlice) -> Result<(), Error> {
    // Inline: a call that hits allocates nothing.
    let numbers: SmallVec<[_; 24]> = run.numbers.iter().map(|(_, number)| bound.number(number)).collect();
    for n in 0..run.repeats {
        let addresses: SmallVec<[u64; 32]> = run.ports.iter().map(|port| bound.address(port.slot) + n * port.step).collect();
        // SAFETY: the caller's.
        unsafe { run.plan.execute_in_order(handle, &addresses, &numbers, workspace) }?;
    }
    Ok(())
}

fn uploaded(contents: &Contents, stream: &Stream) -> Result<Buffer, Error> {
    let bytes = match contents {
        Contents::Numbers(table) => table.bytes(),
        Contents::Ones(dtype, count) => dtype.bytes(*count),
    };
    let mut buffer = Buffer::new(stream.device(), usize::try_from(bytes).unwrap_or(usize::MAX))?;
    match contents {
        Contents::Numbers(Table::F32(x)) => buffer.upload(stream, 0, x)?,
        Contents::Numbers(Table::I32(x)) => buffer.upload(stream, 0, x)?,
        // Terms are of these three types: see `lower::sum`.
        Contents::Ones(cudnn_graph::DType::F16, count) => buffer.upload(stream, 0, &vec![f16::ONE; *count as usize])?,
        Contents::Ones(cudnn_graph::DType::BF16, count) => buffer.upload(stream, 0, &vec![bf16::ONE; *count as usize])?,
        Contents::Ones(_, count) => buffer.upload(stream, 0, &vec![1f32; *count as usize])?,
    }
    Ok(buffer)
}
