//! Reports of a schedule: every slot, and every step with its slots.

use super::{Argument, Contents, Launch, Number, Run, Schedule, Slot, SlotId, Source, Step};
use crate::lower::Side;
use cudnn_graph::ir::TensorId;
use sdpa_core::expr::Declared;
use serde::Serialize;
use std::fmt;

/// A schedule as text and numbers, for display and for machine-readable output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScheduleReport {
    /// The slots (ranges of device memory) of the schedule, by index.
    pub slots: Vec<SlotReport>,
    /// The steps of the schedule, in order.
    pub steps: Vec<StepReport>,
    /// The workspace size of all slots in bytes, without the workspace of cuDNN's plans.
    pub scratch: u64,
}

/// The report of a slot, a range of device memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotReport {
    /// The name of the slot.
    pub name: String,
    /// A description of the memory that the slot refers to.
    pub source: String,
    /// Number of bytes that steps access in the slot.
    pub bytes: u64,
    /// Required alignment of the slot's address, in bytes.
    pub alignment: u32,
}

/// The report of a step of a schedule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// A description of the step.
    pub what: String,
    /// Number of ops in the graph of the step; 0 if it has no graph.
    pub ops: usize,
    /// The number of times that the step runs in one call.
    pub repeats: u64,
    /// Names of the declared parameters that the step clamps. The step is skipped if the caller promises that all of them are within
    /// their extents. If the list is empty, the step is never skipped.
    pub spared_by: Vec<String>,
    /// The memory of the step: for each tensor or argument its name, the index of its slot, and the distance in bytes from one repetition
    /// to the next.
    pub memory: Vec<(String, usize, u64)>,
    /// The scalars of the step: for each the name of its tensor or argument, and a description of the value.
    pub numbers: Vec<(String, String)>,
}

impl<P> Schedule<P> {
    /// Returns a report of the schedule. `declared` are the declared parameters of the pass.
    pub fn told(&self, declared: &[Declared]) -> ScheduleReport {
        let slots = self.slots.iter().map(|slot| self.told_slot(slot, declared)).collect();
        let steps = self.steps.iter().map(|step| match step {
            Step::Run(run) => told_run(run, declared),
            Step::Launch(launch) => told_launch(launch, declared),
            Step::Zero(to) => moved("zeros", &[("to", *to)]),
            Step::Move(from, to) => moved("bytes of one slot to another", &[("from", *from), ("to", *to)]),
        });
        ScheduleReport { slots, steps: steps.collect(), scratch: self.scratch }
    }

    fn told_slot(&self, slot: &Slot, declared: &[Declared]) -> SlotReport {
        let source = match slot.source {
            Source::Operand(_) => "operand".to_owned(),
            Source::Rows(_, offset) => format!("operand + {offset}"),
            Source::Statistic(statistic) => statistic.name().to_owned(),
            Source::Param(_) => "parameter".to_owned(),
            Source::Gradient(_) => "gradient of a parameter".to_owned(),
            Source::Amax(amax) => amax.name().to_owned(),
            Source::Table(at) => match &self.tables[at] {
                Contents::Numbers(table) => format!("table of {}", table.dtype()),
                Contents::Ones(dtype, count) => format!("{count} ones of {dtype}"),
            },
            Source::Scratch(offset) | Source::Lengths { offset, param: None } => format!("workspace + {offset}"),
            Source::Lengths { offset, param: Some(at) } => {
                format!("workspace + {offset}, or {} where it is promised to lie within its extent", name(declared, at))
            }
        };
        SlotReport { name: slot.name.clone(), source, bytes: slot.bytes, alignment: slot.alignment }
    }
}

fn name(declared: &[Declared], at: usize) -> String {
    declared.get(at).map_or_else(|| format!("parameter {at}"), |p| p.name.clone())
}

fn moved(what: &str, slots: &[(&str, SlotId)]) -> StepReport {
    let memory = slots.iter().map(|(end, slot)| ((*end).to_owned(), slot.0, 0)).collect();
    StepReport { what: what.to_owned(), ops: 0, repeats: 1, spared_by: Vec::new(), memory, numbers: Vec::new() }
}

fn told_launch(launch: &Launch, declared: &[Declared]) -> StepReport {
    let Launch { role, kernel, grid: [blocks, threads], arguments, spared_by } = launch;
    let (mut memory, mut numbers) = (Vec::new(), Vec::new());
    for (n, argument) in arguments.iter().enumerate() {
        match argument {
            Argument::Slot(slot) => memory.push((format!("argument {n}"), slot.0, 0)),
            Argument::Tokens(side) => {
                let of = match side {
                    Side::Queries => "queries",
                    Side::Keys => "keys",
                };
                numbers.push((format!("argument {n}"), format!("tokens of {of} that there is memory for")));
            }
            Argument::Fixed(x) => numbers.push((format!("argument {n}"), x.to_string())),
        }
    }
    let what = format!("{role}: kernel {}, {blocks} x {threads}", kernel.name().to_string_lossy());
    let spared_by = spared_by.iter().map(|&at| name(declared, at)).collect();
    StepReport { what, ops: 0, repeats: 1, spared_by, memory, numbers }
}

fn told_run<P>(run: &Run<P>, declared: &[Declared]) -> StepReport {
    let tensor = |id: TensorId| run.graph.graph().get(id).map_or_else(|| id.to_string(), |t| t.name.clone());
    let number = |number: &Number| match number {
        Number::Scale => "attn_scale".to_owned(),
        Number::Fixed(value) => value.to_f64().to_string(),
        Number::Param(at) => name(declared, *at),
        Number::Of(trace, _) => trace.to_string(),
    };
    StepReport {
        what: run.role.to_string(),
        ops: run.graph.ops().len(),
        repeats: run.repeats,
        spared_by: Vec::new(),
        memory: run.ports.iter().map(|port| (tensor(port.tensor), port.slot.0, port.step)).collect(),
        numbers: run.numbers.iter().map(|(id, value)| (tensor(*id), number(value))).collect(),
    }
}

impl fmt::Display for ScheduleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.slots.iter().map(|slot| slot.name.chars().count()).max().unwrap_or(0);
        writeln!(f, "slots")?;
        for (n, SlotReport { name, source, bytes, alignment }) in self.slots.iter().enumerate() {
            writeln!(f, "{n:>4}  {name:<width$}  {bytes:>12} bytes, aligned to {alignment:>2}  {source}")?;
        }
        writeln!(f, "steps")?;
        for (n, step) in self.steps.iter().enumerate() {
            write!(f, "{n:>4}  {}", step.what)?;
            if step.ops > 0 {
                write!(f, ", {} ops", step.ops)?;
            }
            if step.repeats > 1 {
                write!(f, ", {} times", step.repeats)?;
            }
            if !step.spared_by.is_empty() {
                write!(f, ", spared where {} are promised to lie within their extents", step.spared_by.join(" and "))?;
            }
            writeln!(f)?;
            let width = step.memory.iter().map(|(end, ..)| end).chain(step.numbers.iter().map(|(end, _)| end));
            let width = width.map(|end| end.chars().count()).max().unwrap_or(0);
            for (end, slot, bytes) in &step.memory {
                let further = if *bytes == 0 { String::new() } else { format!(", {bytes} bytes further each time") };
                writeln!(f, "        {end:<width$}  slot {slot}{further}")?;
            }
            for (end, value) in &step.numbers {
                writeln!(f, "        {end:<width$}  {}", value.trim_end())?;
            }
        }
        write!(f, "workspace: what plans need for themselves, and {} bytes", self.scratch)
    }
}
