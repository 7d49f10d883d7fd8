//! Submission of a call: the steps of the schedule, in order.
#![allow(unsafe_code)]

use super::call::Call;
use super::{CudaPlan, ReadyStep};
use crate::error::Error;
use crate::schedule::arguments::BlockId;
use crate::schedule::{Argument, MapId};
use sdpa_core::device::DeviceCall;
use sdpa_driver::{DeviceSlice, Launch, Stream, Submission, TensorMap};
use sdpa_nvidia::call;
use smallvec::SmallVec;
use std::ffi::c_void;

impl CudaPlan {
    /// # Safety
    /// As for [`DevicePrepared::submit`](sdpa_core::device::DevicePrepared::submit).
    ///
    /// # Errors
    /// As for [`DevicePrepared::submit`](sdpa_core::device::DevicePrepared::submit).
    pub(super) unsafe fn submit_to(&self, stream: &Stream, call: &DeviceCall<'_, DeviceSlice>) -> Result<(), Error> {
        call::check(&self.job, call, self.workspace_bytes)?;
        let device = self.device();
        if stream.device().ordinal() != device.ordinal() {
            let (got, expected) = (device.ordinal(), stream.device().ordinal());
            return Err(sdpa_driver::Error::OtherDevice { what: "the plan", got, expected }.into());
        }
        let submission = &stream.begin()?;
        let workspace = match call.workspace.filter(|_| self.workspace_bytes > 0) {
            Some(workspace) => workspace,
            None => submission.workspace(self.workspace_bytes)?,
        };
        let call = Call::new(&self.schedule, &self.homes, call, workspace.address);
        let mut maps: SmallVec<[TensorMap; 8]> = SmallVec::new();
        for map in &self.schedule.maps {
            maps.push(map.encode(submission, call.address(map.address), call.tokens)?);
        }
        let words = call.arguments();
        let argument = |argument: &Argument| -> *const c_void {
            match argument {
                Argument::Map(MapId(map)) => std::ptr::from_ref(&maps[*map]).cast(),
                Argument::Block(BlockId(word)) => words[*word..].as_ptr().cast(),
            }
        };
        self.noting_use(submission, || {
            for step in &self.steps {
                match step {
                    // SAFETY: the caller upholds the contract. Slots are within the workspace, or memory of the plan.
                    ReadyStep::Zero(memory) => unsafe { submission.zero(call.memory(memory)) }?,
                    ReadyStep::Launch { entry, launch } => {
                        let arguments: SmallVec<[*const c_void; 16]> = launch.arguments.iter().map(argument).collect();
                        let launch = Launch { blocks: [launch.grid, 1, 1], threads: launch.threads, shared_bytes: launch.shared_bytes };
                        // SAFETY: as above; the family made the arguments for this entry point.
                        unsafe { submission.launch_entry(entry, launch, &arguments) }?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Submits work. From then on the plan's resources are freed only after that work; a graph that captures the work keeps them alive.
    fn noting_use(&self, submission: &Submission<'_>, submit: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.used.get_or_init(|| submission.device());
        if submission.is_capturing() {
            submission.keep_in_graph(Box::new(self.resources.clone()))?;
            return submit();
        }
        let submitted = submit();
        submission.mark()?;
        submitted
    }
}
