//! A prepared pass: the kernels of its schedule, the plan's own memory, and its calls.

mod call;
mod submit;

use crate::entry_point::EntryPoint;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::schedule::{KernelId, Launch, Memory, Schedule, Slot, Source, Step};
use sdpa_cache::{CacheValue, Weight};
use sdpa_core::device::{DeviceCall, DevicePrepared};
use sdpa_driver::{Buffer, Device, DeviceSlice, Entry, Stream};
use sdpa_nvidia::Job;
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};

/// Plan resources that in-flight GPU work may still read.
#[derive(Clone, Debug)]
struct Resources {
    /// The kernels of the main source.
    main: Arc<Kernel>,
    /// The kernels of every source.
    #[expect(dead_code, reason = "entry points of the steps are valid while their kernels are loaded")]
    kernels: SmallVec<[Arc<Kernel>; 2]>,
    /// Memory of slots that are not in the workspace.
    buffers: Arc<[Buffer]>,
}

/// The memory of a slot.
#[derive(Clone, Copy, Debug)]
enum Home {
    /// This byte offset in the workspace.
    Workspace(u64),
    /// This address in a buffer of the plan.
    Plan(u64),
}

/// A step with its loaded entry point.
#[derive(Clone, Debug)]
enum ReadyStep {
    Zero(Memory),
    Launch { entry: Entry, launch: Launch },
}

/// A forward or backward pass that is prepared on a device.
#[derive(Debug)]
pub struct CudaPlan {
    job: Job,
    schedule: Arc<Schedule>,
    steps: Vec<ReadyStep>,
    resources: Resources,
    /// The memory of each slot.
    homes: Vec<Home>,
    workspace_bytes: u64,
    /// The device to which its work was submitted.
    used: OnceLock<&'static Device>,
}

impl CacheValue for CudaPlan {
    fn weight(&self) -> Weight {
        let device = self.resources.buffers.iter().map(|buffer| buffer.bytes() as u64).sum();
        Weight { host: 0, device, workspace: 0 }
    }
}

/// Returns whether a step makes block lists.
fn makes_lists(step: &ReadyStep) -> bool {
    match step {
        ReadyStep::Zero(_) => false,
        ReadyStep::Launch { launch, .. } => launch.entry == EntryPoint::BlockLists,
    }
}

/// Returns the memory of each slot, and the size of the workspace. `buffers` is the memory of the slots for which `is_resident` holds, in order.
fn homes(schedule: &Schedule, buffers: &[Buffer], is_resident: impl Fn(&Slot) -> bool) -> Result<(Vec<Home>, u64), Error> {
    let (offsets, workspace_bytes) = schedule.layout(is_resident);
    let mut addresses = buffers.iter().map(Buffer::address);
    let mut home = |offset: Option<u64>| match offset {
        Some(offset) => Ok(Home::Workspace(offset)),
        None => addresses.next().map(Home::Plan).ok_or_else(|| Error::Bug("a slot has no memory".to_owned())),
    };
    Ok((offsets.into_iter().map(&mut home).collect::<Result<_, _>>()?, workspace_bytes))
}

/// Returns the numbers of a slot that every plan stores in its memory.
fn table(slot: &Slot) -> Option<&Vec<u32>> {
    match &slot.source {
        Source::Workspace | Source::BlockLists => None,
        Source::Table(numbers) => Some(numbers),
    }
}

impl CudaPlan {
    /// Creates a plan. The kernels are those of the schedule, in order.
    pub(crate) fn new(job: Job, schedule: Schedule, kernels: SmallVec<[Arc<Kernel>; 2]>, stream: &Stream) -> Result<CudaPlan, Error> {
        let upload = |numbers: &Vec<u32>| {
            let mut buffer = Buffer::new(stream.device(), size_of_val(&numbers[..]).max(4))?;
            buffer.upload(stream, 0, numbers)?;
            Ok::<_, Error>(buffer)
        };
        let buffers: Arc<[Buffer]> = schedule.slots.iter().filter_map(table).map(upload).collect::<Result<_, _>>()?;
        let ready = |step: &Step| match step {
            Step::Zero(memory) => Ok(ReadyStep::Zero(memory.clone())),
            Step::Launch(launch) => {
                let KernelId(source) = launch.kernel;
                let kernel = kernels.get(source).ok_or_else(|| Error::Bug(format!("a pass has no kernel source {source}")))?;
                Ok(ReadyStep::Launch { entry: *kernel.entry(launch.entry)?, launch: launch.clone() })
            }
        };
        let steps = schedule.steps.iter().map(ready).collect::<Result<_, Error>>()?;
        let (homes, workspace_bytes) = homes(&schedule, &buffers, |slot| table(slot).is_some())?;
        let main = kernels.first().cloned().ok_or_else(|| Error::Bug("a pass has no kernel source".to_owned()))?;
        let resources = Resources { main, kernels, buffers };
        Ok(CudaPlan { job, schedule: Arc::new(schedule), steps, resources, homes, workspace_bytes, used: OnceLock::new() })
    }

    /// Submits a call, and returns a plan of the same pass that keeps the block lists of this call. Calls of the returned plan reuse
    /// these lists, for layers that share a mask. If the mask reads no tensors, the plan already has its lists, and this plan is
    /// returned.
    ///
    /// ```
    /// use sdpa_core::device::DeviceCall;
    /// use sdpa_cuda::{CudaPlan, Error};
    /// use sdpa_driver::{DeviceSlice, Stream};
    /// use std::sync::Arc;
    ///
    /// /// # Safety
    /// /// As `DevicePrepared::submit`.
    /// unsafe fn all(plan: &Arc<CudaPlan>, stream: &Stream, layers: &[DeviceCall<'_, DeviceSlice>]) -> Result<(), sdpa_core::Error> {
    ///     use sdpa_core::device::DevicePrepared;
    ///     let Some((first, others)) = layers.split_first() else { return Ok(()) };
    ///     // SAFETY: the caller upholds the contract.
    ///     let mapped = unsafe { plan.with_block_map(stream, first) }?;
    ///     for layer in others {
    ///         // SAFETY: the caller upholds the contract.
    ///         unsafe { mapped.submit(stream, layer) }?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Safety
    /// The caller fulfils the contract of [`DevicePrepared::submit`]. Calls of the returned plan must be submitted to this stream, or
    /// after its work. In these calls, the tensors that the mask reads must have the same values as in this call. Otherwise queries
    /// attend to masked-out keys, or miss others.
    ///
    /// # Errors
    /// Fails as [`DevicePrepared::submit`] does.
    #[allow(unsafe_code, reason = "the device tier's contract is handed on")]
    pub unsafe fn with_block_map(
        self: &Arc<CudaPlan>,
        stream: &Stream,
        call: &DeviceCall<'_, DeviceSlice>,
    ) -> Result<Arc<CudaPlan>, Error> {
        if !self.steps.iter().any(makes_lists) {
            // SAFETY: the caller upholds the contract.
            unsafe { self.submit_to(stream, call) }?;
            return Ok(self.clone());
        }
        let mut mapped = self.with_memory_for_lists()?;
        // SAFETY: the caller upholds the contract.
        unsafe { mapped.submit_to(stream, call) }?;
        mapped.steps.retain(|step| !makes_lists(step));
        Ok(Arc::new(mapped))
    }

    /// Returns a plan of the same pass that keeps its block lists in its own memory.
    fn with_memory_for_lists(&self) -> Result<CudaPlan, Error> {
        if self.schedule.slots.iter().any(|slot| table(slot).is_some()) {
            return Err(Error::Bug("a pass has block lists of the plan and of each call".to_owned()));
        }
        let is_resident = |slot: &Slot| match slot.source {
            Source::Workspace | Source::Table(_) => false,
            Source::BlockLists => true,
        };
        let memory = |slot: &&Slot| is_resident(slot);
        let buffer = |slot: &Slot| Ok::<_, Error>(Buffer::new(self.device(), usize::try_from(slot.bytes).unwrap_or(usize::MAX))?);
        let buffers: Arc<[Buffer]> = self.schedule.slots.iter().filter(memory).map(buffer).collect::<Result<_, _>>()?;
        let (homes, workspace_bytes) = homes(&self.schedule, &buffers, is_resident)?;
        let resources = Resources { buffers, ..self.resources.clone() };
        let (job, schedule, steps) = (self.job.clone(), self.schedule.clone(), self.steps.clone());
        Ok(CudaPlan { job, schedule, steps, resources, homes, workspace_bytes, used: OnceLock::new() })
    }

    /// Returns the device of the plan.
    fn device(&self) -> &'static Device {
        self.kernel().module.device()
    }

    /// Returns a description of the main kernel, for reports: its tile configuration and its registers.
    pub fn engine(&self) -> String {
        let registers = self.kernel().entries.first().map_or(0, |(_, entry)| entry.registers);
        format!("{}, {registers} registers", self.schedule.label)
    }

    /// Returns the compiled kernels of the main source of this plan.
    pub fn kernel(&self) -> &Kernel {
        &self.resources.main
    }
}

impl DevicePrepared for CudaPlan {
    type Memory = DeviceSlice;
    type Stream = Stream;

    fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    fn engine(&self) -> String {
        CudaPlan::engine(self)
    }

    #[allow(unsafe_code, reason = "the device tier's contract is handed on")]
    unsafe fn submit(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), sdpa_core::Error> {
        // SAFETY: the caller upholds the contract.
        Ok(unsafe { self.submit_to(stream, call) }?)
    }
}

impl Drop for CudaPlan {
    fn drop(&mut self) {
        if let Some(device) = self.used.get() {
            device.retire(Box::new(self.resources.clone()));
        }
    }
}
