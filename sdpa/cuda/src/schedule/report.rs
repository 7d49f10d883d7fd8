//! Reports of a schedule: every slot, and every step with its launch.

use super::{Argument, Launch, Memory, Schedule, Source, Step};
use serde::Serialize;
use std::fmt;

/// The schedule of a pass, for display and for machine-readable output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScheduleReport {
    /// The tile configuration of the main kernel.
    pub tile: String,
    /// The architecture for which the kernel sources are compiled, such as `sm_90a`.
    pub architecture: String,
    /// Number of kernel sources.
    pub sources: usize,
    /// The device memory that a call uses in addition to its operands and parameters.
    pub slots: Vec<SlotReport>,
    /// The work that a call submits, in order.
    pub steps: Vec<StepReport>,
    /// Size of the workspace in bytes.
    pub workspace: u64,
}

/// A range of device memory that the kernels use in addition to operands and parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotReport {
    /// The name of the slot.
    pub name: String,
    /// Size of the slot in bytes.
    pub bytes: u64,
    /// Offset of the slot in the workspace, in bytes; `None` if the memory belongs to the plan.
    pub offset: Option<u64>,
}

/// One step of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepReport {
    /// Sets memory to 0. The field contains the names of the slots, or of the parameter gradient, that are set.
    Zero(Vec<String>),
    /// Launches a kernel.
    Launch(LaunchReport),
}

/// A kernel launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LaunchReport {
    /// The index of the kernel source that contains the kernel, from 0 on; 0 is the main source.
    pub source: usize,
    /// The name of the entry point.
    pub kernel: String,
    /// Number of thread blocks.
    pub grid: u32,
    /// Number of threads per thread block.
    pub threads: u32,
    /// Dynamic shared memory per thread block, in bytes.
    pub shared_bytes: u32,
    /// Number of tensor maps among the arguments.
    pub tensor_maps: usize,
    /// Number of arguments, including tensor maps.
    pub arguments: usize,
}

impl Schedule {
    /// Returns a report of the schedule.
    pub(crate) fn report(&self) -> ScheduleReport {
        let (offsets, workspace) = self.layout(|slot| matches!(slot.source, Source::Table(_)));
        let slots = self.slots.iter().zip(offsets);
        let slots = slots.map(|(slot, offset)| SlotReport { name: slot.name.to_string(), bytes: slot.bytes, offset }).collect();
        let steps = self.steps.iter().map(|step| match step {
            Step::Zero(memory) => StepReport::Zero(self.names(memory)),
            Step::Launch(launch) => StepReport::Launch(launch_report(launch)),
        });
        let architecture = self.kernels.first().map_or_else(String::new, |key| key.architecture.clone());
        let (tile, sources) = (self.label.clone(), self.kernels.len());
        ScheduleReport { tile, architecture, sources, slots, steps: steps.collect(), workspace }
    }

    fn names(&self, memory: &Memory) -> Vec<String> {
        match memory {
            Memory::Slots(slots) => self.slots[slots.clone()].iter().map(|slot| slot.name.to_string()).collect(),
            Memory::Gradient(gradient) => vec![format!("gradient of {}", self.gradients[gradient.0])],
        }
    }
}

fn launch_report(launch: &Launch) -> LaunchReport {
    let Launch { kernel, entry, grid, threads, shared_bytes, arguments } = launch;
    let is_map = |argument: &&Argument| match argument {
        Argument::Map(_) => true,
        Argument::Block(_) => false,
    };
    LaunchReport {
        source: kernel.0,
        kernel: entry.to_string(),
        grid: *grid,
        threads: *threads,
        shared_bytes: *shared_bytes,
        tensor_maps: arguments.iter().filter(is_map).count(),
        arguments: arguments.len(),
    }
}

impl fmt::Display for ScheduleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {}", self.tile, self.architecture)?;
        writeln!(f, "slots")?;
        let width = self.slots.iter().map(|slot| slot.name.chars().count()).max().unwrap_or(0);
        for (n, SlotReport { name, bytes, offset }) in self.slots.iter().enumerate() {
            let memory = offset.map_or_else(|| "memory of the plan".to_owned(), |offset| format!("workspace + {offset}"));
            writeln!(f, "{n:>4}  {name:<width$}  {bytes:>12} bytes  {memory}")?;
        }
        writeln!(f, "steps")?;
        for (n, step) in self.steps.iter().enumerate() {
            match step {
                StepReport::Zero(names) => writeln!(f, "{n:>4}  zeros to {}", names.join(", "))?,
                StepReport::Launch(LaunchReport { source, kernel, grid, threads, shared_bytes, tensor_maps, arguments }) => {
                    let of = if self.sources > 1 { format!(" of source {source}") } else { String::new() };
                    let maps = if *tensor_maps > 0 { format!(", {tensor_maps} of them tensor maps") } else { String::new() };
                    let arguments = if *arguments == 1 { "1 argument".to_owned() } else { format!("{arguments} arguments") };
                    writeln!(
                        f,
                        "{n:>4}  {kernel}{of}: grid {grid}, {threads} threads, {shared_bytes} bytes of shared memory, {arguments}{maps}"
                    )?;
                }
            }
        }
        write!(f, "workspace: {} bytes", self.workspace)
    }
}
