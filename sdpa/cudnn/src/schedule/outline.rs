//! Builds the schedule of a lowered pass: the attention, and the steps around it.

use super::{Contents, Number, Port, Role, Run, Schedule, Slot, SlotId, Source, Step};
use super::{documents, entries, sink, sums};
use crate::error::Error;
use crate::lower::{self, CopyGraph, Guarded, Job, Lowered, Statistic, Supply};
use cudnn_graph::bind::Ports;
use cudnn_graph::ir::TensorId;
use cudnn_graph::{DType, Verified};
use sdpa_core::expr::{Declared, Node, Trace, Type};
use std::sync::Arc;

/// Alignment of workspace slots, in bytes.
pub(in super::super) const PIECE: u64 = 256;

/// Returns the schedule of the pass `job` around the attention graph `lowered`. The graph computes the pass `dense`, which is `job` with
/// every operand made dense that engines cannot use in place.
///
/// # Errors
/// Any error is a bug of the lowering.
pub fn outline(job: &Job, dense: &Job, lowered: &Lowered) -> Result<Schedule<()>, Error> {
    let mut made = Outline::new(job);
    // The slot of each tensor of the attention graph.
    let mut bound: Vec<(TensorId, SlotId)> = Vec::new();
    let mut numbers = vec![(lowered.attn_scale, Number::Scale)];
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for &(operand, tensor) in &lowered.operands {
        let caller = made.slot(operand.name().to_owned(), Source::Operand(operand));
        let (given, used) = (job.tensor(operand), dense.tensor(operand));
        let (Some(given), Some(used)) = (given, used) else {
            return Err(Error::Bug(format!("the {} pass has no {operand}", job.name())));
        };
        if given == used {
            bound.push((tensor, caller));
            continue;
        }
        let piece = made.scratch(format!("{operand}, dense"), lowered.bytes(tensor));
        bound.push((tensor, piece));
        let dtype = lower::dtype(job.dtype_of(operand));
        let role = Role::Copy(operand);
        if job.writes(operand) {
            after.push((role, lower::copy(dtype, used, given)?, piece, caller));
        } else {
            before.push((role, lower::copy(dtype, given, used)?, caller, piece));
        }
    }
    for statistic in Statistic::ALL {
        if let Some(tensor) = lowered.statistic(statistic) {
            bound.push((tensor, sink::statistic(&mut made, job, lowered, (statistic, tensor))));
        }
    }
    let (mut conversions, mut told, mut checked) = (Vec::new(), Vec::new(), entries::Told::default());
    for (tensor, supply) in &lowered.supplies {
        let slot = match supply {
            Supply::Number(trace) => {
                numbers.push((*tensor, made.number(trace)?));
                continue;
            }
            Supply::Param(name) => made.param(name)?,
            Supply::Documents(what) => {
                told.push((*tensor, *what));
                continue;
            }
            Supply::Pages(pages) => {
                let to = made.scratch("page table, checked".to_owned(), lowered.bytes(*tensor));
                checked.pages = Some((*pages, to));
                to
            }
            Supply::Table(table) => made.table(Contents::Numbers(table.clone()), table.bytes()),
            Supply::Scratch => made.scratch("scratch".to_owned(), lowered.bytes(*tensor)),
            Supply::Gradient(name) => made.gradient(name),
            Supply::Amax(amax) => made.slot(amax.name().to_owned(), Source::Amax(*amax)),
            Supply::Terms { name, dims: _ } => made.scratch(format!("terms of the gradient of {name}"), lowered.bytes(*tensor)),
            Supply::Spread { name, dtype, dims } => {
                let to = made.scratch(format!("{name}, as engines read it"), lowered.bytes(*tensor));
                let (like, extents) = made.tensor(lowered, *tensor)?;
                let from = made.param(name)?;
                let copy = lower::spread([*dtype, like], *dims, extents)?;
                conversions.push((Role::Conversion(vec![name.clone()]), copy, from, to));
                to
            }
            Supply::Guarded(which) => {
                let to = made.lengths(*which, lowered.bytes(*tensor))?;
                checked.lengths[which.of as usize] = Some((*which, to));
                to
            }
        };
        bound.push((*tensor, slot));
    }
    bound.extend(documents::tell(&mut made, job, lowered, &told)?);
    for (role, copy, from, to) in conversions.into_iter().chain(before) {
        made.copy(role, copy, from, to)?;
    }
    entries::check(&mut made, job.problem(), &checked)?;
    made.run(Role::Attention, Arc::new(lowered.graph.clone()), &bound, numbers)?;
    sink::add(&mut made, dense, lowered, &bound)?;
    sums::mend(&mut made, dense, lowered, &bound)?;
    for sums in lowered.sums()? {
        made.sums(sums, &bound)?;
    }
    if let Job::Backward(problem) = dense {
        sink::differentiate(&mut made, problem, lowered, &bound)?;
    }
    for (role, copy, from, to) in after {
        made.copy(role, copy, from, to)?;
    }
    documents::fill_unpaired(&mut made, job)?;
    Ok(made.finish())
}

/// A schedule under construction.
pub(super) struct Outline<'a> {
    declared: &'a [Declared],
    all: Schedule<()>,
}

pub(super) fn bug(text: String) -> Error {
    Error::Bug(text)
}

impl<'a> Outline<'a> {
    pub(super) fn new(job: &'a Job) -> Outline<'a> {
        let all = Schedule { slots: Vec::new(), steps: Vec::new(), tables: Vec::new(), gradients: Vec::new(), scratch: 0 };
        Outline { declared: job.params(), all }
    }

    pub(super) fn finish(self) -> Schedule<()> {
        self.all
    }

    /// Returns the slot of this source, and adds it if it is missing.
    pub(super) fn slot(&mut self, name: String, source: Source) -> SlotId {
        if let Some(at) = self.all.slots.iter().position(|slot| slot.source == source) {
            return SlotId(at);
        }
        self.all.slots.push(Slot { name, source, bytes: 0, alignment: 1 });
        SlotId(self.all.slots.len() - 1)
    }

    /// Returns the slot of this source, if there is one.
    pub(super) fn known(&self, source: Source) -> Option<SlotId> {
        self.all.slots.iter().position(|slot| slot.source == source).map(SlotId)
    }

    /// Raises the size and alignment of a slot to at least these.
    pub(super) fn holds(&mut self, slot: SlotId, bytes: u64, alignment: u32) {
        let held = &mut self.all.slots[slot.0];
        (held.bytes, held.alignment) = (held.bytes.max(bytes), held.alignment.max(alignment));
    }

    pub(super) fn source(&self, slot: SlotId) -> Source {
        self.all.slots[slot.0].source
    }

    pub(super) fn name(&self, slot: SlotId) -> String {
        self.all.slots[slot.0].name.clone()
    }

    pub(super) fn step(&mut self, step: Step<()>) {
        self.all.steps.push(step);
    }

    fn take(&mut self, bytes: u64) -> u64 {
        let offset = self.all.scratch;
        self.all.scratch += bytes.next_multiple_of(PIECE);
        offset
    }

    fn push(&mut self, name: String, source: Source, bytes: u64) -> SlotId {
        self.all.slots.push(Slot { name, source, bytes, alignment: 1 });
        SlotId(self.all.slots.len() - 1)
    }

    pub(super) fn scratch(&mut self, name: String, bytes: u64) -> SlotId {
        let offset = self.take(bytes);
        self.push(name, Source::Scratch(offset), bytes)
    }

    fn lengths(&mut self, which: Guarded, bytes: u64) -> Result<SlotId, Error> {
        let param = if which.keyless { None } else { Some(self.declared(which.param())?) };
        let offset = self.take(bytes);
        Ok(self.push(format!("{}, clamped", which.param()), Source::Lengths { offset, param }, bytes))
    }

    fn declared(&self, name: &str) -> Result<usize, Error> {
        self.declared.iter().position(|p| p.name == name).ok_or_else(|| bug(format!("{name} is not declared")))
    }

    pub(super) fn param(&mut self, name: &str) -> Result<SlotId, Error> {
        let at = self.declared(name)?;
        Ok(self.slot(format!("parameter {name}"), Source::Param(at)))
    }

    pub(super) fn gradient(&mut self, name: &str) -> SlotId {
        let at = self.all.gradients.len();
        self.all.gradients.push(name.to_owned());
        self.slot(format!("gradient of {name}"), Source::Gradient(at))
    }

    pub(super) fn table(&mut self, contents: Contents, bytes: u64) -> SlotId {
        let at = self.all.tables.len();
        self.all.tables.push(contents);
        self.push(format!("table {at}"), Source::Table(at), bytes)
    }

    fn number(&self, trace: &Trace) -> Result<Number, Error> {
        let params = trace.params().iter().map(|p| self.declared(&p.name)).collect::<Result<Vec<_>, _>>()?;
        let [root] = trace.roots() else { return Err(bug("a number has one value".to_owned())) };
        Ok(match (trace.node(*root), trace.ty(*root)) {
            (Node::Param(p), Type::F32) if params.len() == 1 => Number::Param(params[p.index()]),
            _ => Number::Of(trace.clone(), params),
        })
    }

    /// Returns the element type and extents of a tensor of the attention graph.
    fn tensor(&self, lowered: &Lowered, id: TensorId) -> Result<(DType, [i64; 4]), Error> {
        let tensor = lowered.graph.graph().get(id).ok_or_else(|| bug(format!("{id} is no tensor of the graph")))?;
        let dims = tensor.dims.0[..].try_into().map_err(|_| bug(format!("{id} has other axes than (batch, heads, seq_q, seq_kv)")))?;
        Ok((tensor.dtype, dims))
    }

    fn copy(&mut self, role: Role, copy: CopyGraph, from: SlotId, to: SlotId) -> Result<(), Error> {
        let CopyGraph { graph, from: first, to: written, zeros, repeats, from_step, to_step } = copy;
        let mut bound = vec![(written, to, to_step), (first, from, from_step)];
        if let Some(zeros) = zeros {
            // The zeros share the output's memory: the copy reads them and overwrites them.
            bound.push((zeros, to, to_step));
            self.all.steps.push(Step::Zero(to));
        }
        self.stepped(role, Arc::new(graph), &bound, Vec::new(), repeats)
    }

    fn sums(&mut self, sums: lower::Sums, bound: &[(TensorId, SlotId)]) -> Result<(), Error> {
        let lower::Sums { tensor, name, steps, rounding } = sums;
        let terms = bound.iter().find(|(id, _)| *id == tensor).map(|(_, slot)| *slot);
        let mut from = terms.ok_or_else(|| bug(format!("the terms of the gradient of {name} have no memory")))?;
        let written = |graph: &Verified, id: TensorId| {
            graph.graph().get(id).map_or(0, |t| t.dtype.bytes(t.dims.0.iter().product::<i64>().unsigned_abs()))
        };
        let mut results = Vec::new();
        for (n, step) in steps.iter().enumerate() {
            results.push(self.scratch(format!("sum {n} of the gradient of {name}"), written(&step.graph, step.to)));
        }
        let rounded = self.scratch(format!("gradient of {name}, rounded"), written(&rounding.graph, rounding.to));
        for (n, (step, to)) in steps.into_iter().zip(results).enumerate() {
            let ones = Contents::Ones(step.dtype, step.terms.unsigned_abs());
            let ones = self.table(ones, step.dtype.bytes(step.terms.unsigned_abs()));
            let bound = [(step.from, from), (step.ones, ones), (step.to, to)];
            self.run(Role::Sum(name.clone(), n), Arc::new(step.graph), &bound, Vec::new())?;
            from = to;
        }
        self.copy(Role::Rounding(name.clone()), rounding, from, rounded)?;
        let gradient = self.gradient(&name);
        let bytes = self.all.slot(rounded).bytes;
        self.all.slots[gradient.0].bytes = bytes;
        self.all.steps.push(Step::Move(rounded, gradient));
        Ok(())
    }

    fn run(
        &mut self,
        role: Role,
        graph: Arc<Verified>,
        bound: &[(TensorId, SlotId)],
        numbers: Vec<(TensorId, Number)>,
    ) -> Result<(), Error> {
        let bound: Vec<_> = bound.iter().map(|&(tensor, slot)| (tensor, slot, 0)).collect();
        self.stepped(role, graph, &bound, numbers, 1)
    }

    fn stepped(
        &mut self,
        role: Role,
        graph: Arc<Verified>,
        bound: &[(TensorId, SlotId, u64)],
        numbers: Vec<(TensorId, Number)>,
        repeats: u64,
    ) -> Result<(), Error> {
        let order = Ports::of(&graph);
        let mut ports = Vec::with_capacity(order.device.len());
        for port in &order.device {
            let found = bound.iter().find(|(tensor, _, _)| *tensor == port.id);
            let &(tensor, slot, step) = found.ok_or_else(|| bug(format!("{role}: {} has no memory", port.name)))?;
            let held = &mut self.all.slots[slot.0];
            held.bytes = held.bytes.max(step.saturating_mul(repeats.saturating_sub(1)).saturating_add(port.bytes));
            held.alignment = held.alignment.max(port.alignment);
            ports.push(Port { tensor, slot, step });
        }
        if ports.len() != bound.len() {
            return Err(bug(format!("{role}: memory for {} tensors, of which the graph has {}", bound.len(), ports.len())));
        }
        let given = numbers;
        let mut numbers = Vec::with_capacity(order.values.len());
        for port in &order.values {
            let number = given.iter().find(|(tensor, _)| *tensor == port.id).map(|(_, number)| number.clone());
            let number = number.or(port.value.map(Number::Fixed));
            numbers.push((port.id, number.ok_or_else(|| bug(format!("{role}: {} has no number", port.name)))?));
        }
        self.all.steps.push(Step::Run(Box::new(Run { role, graph, ports, numbers, repeats, plan: () })));
        Ok(())
    }
}
