//! A pass with built kernels, over host memory.

use super::buffer::Host;
use super::encode::Argument;
use super::gpu::Gpu;
use super::pipeline::Pipeline;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::plan::Operand;
use crate::run::{Call, Ran, Ready};
use crate::task::Task;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue, MTLDevice};
use std::sync::Arc;
use std::time::Duration;

/// A pass whose kernels are built, ready to run.
#[derive(Debug)]
pub struct Built {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    task: Task,
    pipelines: Vec<Arc<Kernel<Pipeline>>>,
}

impl Built {
    pub(super) fn new(gpu: &Gpu, task: Task, pipelines: Vec<Arc<Kernel<Pipeline>>>) -> Built {
        Built { device: gpu.device.clone(), queue: gpu.queue.clone(), task, pipelines }
    }

    pub(super) fn device(&self) -> &ProtocolObject<dyn MTLDevice> {
        &self.device
    }

    /// Returns the pipeline of each plan.
    pub(super) fn pipelines(&self) -> &[Arc<Kernel<Pipeline>>] {
        &self.pipelines
    }

    fn submit(&self, call: Call<'_>) -> Result<Ran, Error> {
        let (attn_scale, tokens) = (call.attn_scale, call.tokens);
        let operands = call.operands.into_iter().map(|(operand, contents)| Ok((operand, Host::new(&self.device, contents)?)));
        let operands = operands.collect::<Result<Vec<_>, Error>>()?;
        let exhausted = || Error::Exhausted { what: "a command buffer".to_owned() };
        let commands = self.queue.commandBuffer().ok_or_else(exhausted)?;
        let argument = |operand: &Operand| {
            let found = operands.iter().find(|(o, _)| o == operand);
            found.map(|(_, host)| Argument::Buffer { buffer: &host.buffer, offset: 0 })
        };
        // SAFETY: a new command buffer of this GPU's queue. The call borrows the buffers' memory, mutably for written ones. Buffers and kept objects
        // live until the wait below has ended.
        let kept = unsafe { self.encode(&commands, attn_scale, tokens, &argument)? };
        commands.commit();
        commands.waitUntilCompleted();
        drop(kept);
        if commands.status() != MTLCommandBufferStatus::Completed {
            let entries: Vec<&str> = self.task.plans().iter().map(|plan| plan.entry).collect();
            let text = commands.error().map_or_else(|| format!("{:?}", commands.status()), |e| e.localizedDescription().to_string());
            return Err(Error::Execution { entry: entries.join(", "), text });
        }
        let kernels = Duration::try_from_secs_f64(commands.GPUEndTime() - commands.GPUStartTime()).unwrap_or_default();
        let copied = operands.iter().filter(|(_, host)| host.copied).map(|(operand, _)| operand.clone()).collect();
        operands.into_iter().for_each(|(_, host)| host.finish());
        Ok(Ran { kernels, copied })
    }
}

impl Ready for Built {
    fn task(&self) -> &Task {
        &self.task
    }

    fn run(&self, call: Call<'_>) -> Result<Ran, Error> {
        call.check(&self.task)?;
        autoreleasepool(|_| self.submit(call))
    }
}
