//! Calls over raw device memory: the caller vouches for addresses and lengths.
//!
//! The types are those of [`sdpa_core::device`], with [`DeviceSlice`] for memory.
#![allow(unsafe_code)]

use super::bind::Bound;
use super::plan::Planned;
use super::schedule::{Contents, Launch, Run, Step};
use crate::error::Error;
use crate::kernels::Loaded;
use crate::lower::Table;
use cudnn_graph::{Buffer, DeviceSlice, Handle, Plan, Stream, Submission};
use half::{bf16, f16};
use sdpa_core::device::{self, DevicePrepared};
use smallvec::SmallVec;
use std::sync::Arc;

/// A declared parameter in one call.
pub type DeviceParam<'a> = device::DeviceParam<'a, DeviceSlice>;
/// The value of a declared parameter: a number or device memory.
pub type DeviceValue = device::DeviceValue<DeviceSlice>;
/// Device memory for the gradient of a declared parameter.
pub type DeviceGradient<'a> = device::DeviceGradient<'a, DeviceSlice>;
/// Device memory and scalars of one forward call.
pub type DeviceForward<'a> = device::DeviceForward<'a, DeviceSlice>;
/// Device memory and scalars of one backward call.
pub type DeviceBackward<'a> = device::DeviceBackward<'a, DeviceSlice>;
/// A call of a forward or backward pass.
pub type DeviceCall<'a> = device::DeviceCall<'a, DeviceSlice>;

impl Planned {
    /// Copies the tables that the graphs read to device memory, and loads the kernels of this crate that run before or after the graphs.
    /// Waits until both are done. It must be called before the first call of the plans.
    ///
    /// # Errors
    /// Returns a failure of the environment.
    pub fn upload_tables(&mut self, stream: &Stream) -> Result<(), Error> {
        for contents in self.schedule.tables() {
            self.tables.push(Arc::new(uploaded(contents, stream)?));
        }
        if self.launches {
            self.kernels = Some(Loaded::on(stream.device(), self.schedule.kernels())?);
        }
        stream.synchronize()?;
        Ok(())
    }

    /// Submits one forward pass to the handle's stream, without waiting.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::submit`].
    ///
    /// # Errors
    /// Fails as [`Planned::submit`] does.
    pub unsafe fn forward(&self, handle: &Handle<'_>, call: &DeviceForward<'_>) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `submit`.
        unsafe { self.submit(handle, &call.into()) }
    }

    /// Submits one backward pass to the handle's stream, without waiting.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`Planned::submit`].
    ///
    /// # Errors
    /// Fails as [`Planned::submit`] does.
    pub unsafe fn backward(&self, handle: &Handle<'_>, call: &DeviceBackward<'_>) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `submit`.
        unsafe { self.submit(handle, &call.into()) }
    }

    /// Submits one pass to the handle's stream, without waiting.
    ///
    /// # Safety
    /// The caller fulfils the contract of [`DevicePrepared::submit`]. Every slice is memory of the handle's device.
    ///
    /// # Errors
    /// Returns every mistake in the call before anything runs:
    /// - operands of the other pass, or a scale that is not positive
    /// - row statistics that are missing or superfluous
    /// - parameters and gradients that are missing, unknown, repeated or of another type
    /// - slices that are too short or misaligned
    ///
    /// Any other error is from cuDNN.
    pub unsafe fn submit(&self, handle: &Handle<'_>, call: &DeviceCall<'_>) -> Result<(), Error> {
        self.plan.check_device(handle.device())?;
        let submission = &handle.begin()?;
        let workspace = self.workspace(submission, call.workspace)?;
        let bound = &mut Bound::new(self.scale(call));
        self.bind(call, workspace, bound)?;
        self.noting_use(submission, || {
            for step in self.schedule.steps() {
                // SAFETY: the caller upholds the contract. `bind` checked that memory is as large as the steps need, and workspace slots do not
                // overlap.
                unsafe { self.step(submission, step, bound, workspace) }?;
            }
            Ok(())
        })
    }

    /// # Safety
    /// As for [`Planned::submit`].
    unsafe fn step(&self, submission: &Submission<'_>, step: &Step<Arc<Plan>>, bound: &Bound, workspace: DeviceSlice) -> Result<(), Error> {
        match step {
            // SAFETY: the caller upholds the contract of `submit`.
            Step::Run(run) => unsafe { execute(submission, run, bound, workspace) },
            Step::Launch(launch) if bound.spares(&launch.spared_by) => Ok(()),
            // SAFETY: the caller upholds the contract of `submit`.
            Step::Launch(launch) => unsafe { self.launch(submission, launch, bound) },
            Step::Zero(to) => {
                let to = DeviceSlice { address: bound.address(*to), bytes: self.schedule.slot(*to).bytes };
                // SAFETY: the caller upholds the contract of `submit`.
                Ok(unsafe { submission.zero(to) }?)
            }
            Step::Move(from, to) => {
                let bytes = self.schedule.slot(*from).bytes;
                let [from, to] = [from, to].map(|&slot| DeviceSlice { address: bound.address(slot), bytes });
                // SAFETY: the caller upholds the contract of `submit`.
                Ok(unsafe { submission.copy(from, to) }?)
            }
        }
    }

    /// A separate function, so that steps without a launch keep a small stack frame.
    ///
    /// # Safety
    /// As for [`Planned::submit`].
    #[inline(never)]
    unsafe fn launch(&self, submission: &Submission<'_>, launch: &Launch, bound: &Bound) -> Result<(), Error> {
        let arguments: SmallVec<[u64; 32]> = launch.arguments.iter().map(|argument| bound.argument(*argument)).collect();
        let kernel = self.kernels.and_then(|kernels| kernels.get(launch.kernel));
        let kernel = kernel.ok_or_else(|| Error::Bug("a call was bound without its kernels".to_owned()))?;
        // SAFETY: the caller upholds the contract. A kernel accesses only its slots, and for packed sequences only the tokens that the call's memory
        // holds.
        Ok(unsafe { submission.launch(kernel, launch.grid, &arguments) }?)
    }

    /// Returns the caller's workspace, or that of this thread's calls on the handle's stream.
    fn workspace(&self, submission: &Submission<'_>, given: Option<DeviceSlice>) -> Result<DeviceSlice, Error> {
        given.map_or_else(|| Ok(submission.workspace(self.workspace_bytes())?), Ok)
    }
}

/// # Safety
/// As for [`Planned::submit`].
unsafe fn execute(submission: &Submission<'_>, run: &Run<Arc<Plan>>, bound: &Bound, workspace: DeviceSlice) -> Result<(), Error> {
    // Inline storage, so that a call with a cached plan allocates no heap memory.
    let numbers: SmallVec<[_; 24]> = run.numbers.iter().map(|(_, number)| bound.number(number)).collect();
    for n in 0..run.repeats {
        let addresses: SmallVec<[u64; 32]> = run.ports.iter().map(|port| bound.address(port.slot) + n * port.step).collect();
        // SAFETY: the caller upholds the contract of `submit`.
        unsafe { run.plan.execute_in_order(submission, &addresses, &numbers, workspace) }?;
    }
    Ok(())
}

impl DevicePrepared for Planned {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        Planned::workspace_bytes(self)
    }

    fn engine(&self) -> String {
        format!("{} {}", self.lowered.form, self.engine)
    }

    fn copied(&self) -> Vec<&'static str> {
        Planned::copied(self)
    }

    unsafe fn submit(&self, stream: &Stream, call: &DeviceCall<'_>) -> Result<(), sdpa_core::Error> {
        let submit = || {
            let handle = self.plan.library().handle(stream)?;
            // SAFETY: the caller upholds the contract of `submit`.
            unsafe { Planned::submit(self, &handle, call) }
        };
        Ok(submit()?)
    }
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
        // The tables of ones are f16, bf16 or f32, the types of the terms that `lower::sum` adds.
        Contents::Ones(cudnn_graph::DType::F16, count) => buffer.upload(stream, 0, &vec![f16::ONE; *count as usize])?,
        Contents::Ones(cudnn_graph::DType::BF16, count) => buffer.upload(stream, 0, &vec![bf16::ONE; *count as usize])?,
        Contents::Ones(_, count) => buffer.upload(stream, 0, &vec![1f32; *count as usize])?,
    }
    Ok(buffer)
}
