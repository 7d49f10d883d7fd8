//! Runs the steps of one call over device memory.
#![allow(unsafe_code, reason = "launches and transfers take addresses; see DeviceContextParallel::forward")]

use crate::device::kernels::{Finished, Kernels, Merged, Mode, SINK_PARTS, Sinks};
use crate::device::program::{Action, Cut, Local, Part, PartGradient, PartParam, Piece, Program, Read, ResolvedStep, SlotMemory};
use crate::device::view::{View, bytes};
use crate::error::ParallelError;
use crate::host::bug;
use crate::problem::ParallelProblem;
use crate::schedule::{Pass, Role, Tensor};
use sdpa_core::device::{DeviceBackward, DeviceCall, DeviceForward, DeviceGradient, DeviceParam, DeviceParams, DeviceValue};
use sdpa_core::{DType, SINK, StatsBase};
use sdpa_driver::{Communicator, DeviceSlice, Event, Stream, Submission};

/// Transfers in progress, with the memory that they read and that they write.
struct Pending {
    end: Event,
    sent: Vec<DeviceSlice>,
    received: Vec<DeviceSlice>,
}

/// One call in progress.
pub(super) struct Run<'a, 's> {
    pub(super) problem: &'a ParallelProblem,
    pub(super) program: &'a Program,
    pub(super) kernels: &'static Kernels,
    pub(super) communicator: &'a mut Communicator,
    pub(super) on: &'a Submission<'s>,
    pub(super) transfers: &'a Stream,
    /// The first byte of the slots, and of the scratch memory.
    pub(super) memory: [u64; 2],
    /// The tensors of the call.
    pub(super) shards: &'a [(Tensor, View)],
    pub(super) params: &'a [DeviceParam<'a, DeviceSlice>],
    /// This rank's contributions to gradients of parameters, f32.
    pub(super) sums: &'a [(String, DeviceSlice)],
    pub(super) scale: f32,
    pending: Vec<Pending>,
}

fn overlap(a: &DeviceSlice, b: &DeviceSlice) -> bool {
    a.address < b.address + b.bytes && b.address < a.address + a.bytes
}

impl<'a, 's> Run<'a, 's> {
    #[expect(clippy::too_many_arguments, reason = "the parts of a call; it is made in one place")]
    pub(super) fn new(
        (problem, program): (&'a ParallelProblem, &'a Program),
        kernels: &'static Kernels,
        communicator: &'a mut Communicator,
        (on, transfers): (&'a Submission<'s>, &'a Stream),
        memory: [u64; 2],
        shards: &'a [(Tensor, View)],
        params: &'a [DeviceParam<'a, DeviceSlice>],
        (sums, scale): (&'a [(String, DeviceSlice)], f32),
    ) -> Run<'a, 's> {
        Run { problem, program, kernels, communicator, on, transfers, memory, shards, params, sums, scale, pending: Vec::new() }
    }

    fn shard(&self, tensor: Tensor) -> Result<View, ParallelError> {
        let found = self.shards.iter().find(|(own, _)| *own == tensor).map(|(_, view)| *view);
        found.ok_or_else(|| bug("a tensor that the call does not have"))
    }

    fn address(&self, n: usize) -> Result<u64, ParallelError> {
        match self.program.slot_memory[n] {
            SlotMemory::Caller => Ok(self.shard(self.program.schedule.slots[n].tensor)?.address),
            SlotMemory::At(place) => Ok(self.memory[0] + place),
            SlotMemory::Unused => Err(bug("a slot without memory")),
        }
    }

    /// Returns the memory of a slot.
    fn slice(&self, n: usize) -> Result<DeviceSlice, ParallelError> {
        let slot = &self.program.schedule.slots[n];
        Ok(DeviceSlice { address: self.address(n)?, bytes: self.program.schedule.extents.bytes(slot, slot.len()) })
    }

    /// Returns a part of a slot where it is in memory.
    fn view(&self, local: &Local) -> Result<View, ParallelError> {
        Ok(View { address: self.address(local.slot)? + local.view.address, ..local.view })
    }

    /// Returns a slot with all of its tokens in memory order.
    fn whole(&self, n: usize) -> Result<View, ParallelError> {
        let slot = &self.program.schedule.slots[n];
        Ok(View::tokens_of(self.address(n)?, slot, &self.program.schedule.extents, &slot.heads))
    }

    fn scratch(&self, place: u64) -> u64 {
        self.memory[1] + place
    }

    fn transfer(&self, from: &View, to: &View, mode: Mode) -> Result<(), ParallelError> {
        // SAFETY: views are memory of the call, of this rank's slots or of its scratch memory; all work of the call that uses it is ordered by the stream.
        Ok(unsafe { self.kernels.transfer(self.on, from, to, mode) }?)
    }

    /// Runs every step, and makes the stream wait for all transfers.
    pub(super) fn steps(&mut self) -> Result<(), ParallelError> {
        for (n, slot) in self.program.schedule.slots.iter().enumerate() {
            if slot.role == Role::Input && matches!(self.program.slot_memory[n], SlotMemory::At(_)) {
                self.transfer(&self.shard(slot.tensor)?, &self.whole(n)?, Mode::Copy)?;
            }
        }
        for (_, sum) in self.sums {
            // SAFETY: the sums are memory of this rank, which only this call uses.
            unsafe { self.on.zero(*sum) }?;
        }
        for step in &self.program.steps {
            self.wait(step)?;
            for &slot in &step.begins {
                self.begin(slot)?;
            }
            match &step.action {
                Action::Move { mode, pairs } => {
                    for [from, to] in pairs {
                        self.transfer(&self.view(from)?, &self.view(to)?, *mode)?;
                    }
                }
                Action::Exchange { sends, receives } => self.exchange(sends, receives)?,
                Action::Attend(part) => match self.program.schedule.pass {
                    Pass::Forward => self.forward(part)?,
                    Pass::Backward => self.backward(part)?,
                },
                Action::Finish { reads, writes, first_head } => self.finish(reads, writes, *first_head)?,
            }
        }
        for at in std::mem::take(&mut self.pending) {
            self.on.stream().wait(&at.end)?;
        }
        for (n, slot) in self.program.schedule.slots.iter().enumerate() {
            if slot.role == Role::Output && matches!(self.program.slot_memory[n], SlotMemory::At(_)) {
                self.transfer(&self.whole(n)?, &self.shard(slot.tensor)?, Mode::Copy)?;
            }
        }
        Ok(())
    }

    /// Makes the stream wait for transfers that write memory of a step, or read memory that it writes. Exchanges have one stream, which keeps their order.
    fn wait(&mut self, step: &ResolvedStep) -> Result<(), ParallelError> {
        if self.pending.is_empty() || matches!(step.action, Action::Exchange { .. }) {
            return Ok(());
        }
        let slices = |slots: &[usize]| slots.iter().map(|&n| self.slice(n)).collect::<Result<Vec<_>, _>>();
        let [reads, writes] = &step.uses;
        let (reads, writes) = (slices(reads)?, slices(writes)?);
        let any = |all: &[DeviceSlice], own: &[DeviceSlice]| all.iter().any(|a| own.iter().any(|b| overlap(a, b)));
        let hinders = |at: &Pending| any(&at.received, &reads) || any(&at.received, &writes) || any(&at.sent, &writes);
        let (hindering, others) = std::mem::take(&mut self.pending).into_iter().partition::<Vec<_>, _>(hinders);
        self.pending = others;
        for at in hindering {
            self.on.stream().wait(&at.end)?;
        }
        Ok(())
    }

    /// Fills an accumulator with the result of no contribution.
    fn begin(&self, n: usize) -> Result<(), ParallelError> {
        let value = match self.program.schedule.slots[n].tensor {
            // Adding −0 changes no number, not even +0 and −0.
            Tensor::DQ | Tensor::DK | Tensor::DV => -0.0,
            Tensor::RowMax => f32::NEG_INFINITY,
            Tensor::Q | Tensor::K | Tensor::V | Tensor::O | Tensor::DO | Tensor::Stats | Tensor::SumExp => 0.0,
        };
        // SAFETY: the slot is memory of this rank; earlier uses of the memory precede on the stream, and transfers of it were waited for.
        Ok(unsafe { self.on.fill(self.slice(n)?, value) }?)
    }

    fn exchange(&mut self, sends: &[Piece], receives: &[Piece]) -> Result<(), ParallelError> {
        let place = |p: &Piece| Ok((p.peer, DeviceSlice { address: self.address(p.slot)? + p.first, bytes: p.bytes }));
        let sends = sends.iter().map(place).collect::<Result<Vec<_>, ParallelError>>()?;
        let receives = receives.iter().map(place).collect::<Result<Vec<_>, ParallelError>>()?;
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        // Earlier work computes the data to send, and reads the memory to overwrite.
        self.transfers.wait(&self.on.stream().record(false)?)?;
        // SAFETY: transfers use memory of the call and of this rank's slots. Later steps wait for those that touch their memory, and the call ends behind all.
        unsafe { self.communicator.exchange(self.transfers, &sends, &receives) }?;
        let slices = |all: &[(usize, DeviceSlice)]| all.iter().map(|(_, slice)| *slice).collect();
        self.pending.push(Pending { end: self.transfers.record(false)?, sent: slices(&sends), received: slices(&receives) });
        Ok(())
    }

    fn value(&self, name: &str) -> Result<DeviceValue<DeviceSlice>, ParallelError> {
        let found = self.params.iter().find(|p| p.name == name).map(|p| p.value);
        found.ok_or_else(|| bug("a parameter that the call does not have"))
    }

    /// Returns the parameters of a part, after the copies of those of which it reads a part.
    fn part_params<'p>(&self, part: &'p Part) -> Result<DeviceParams<'p, DeviceSlice>, ParallelError> {
        let one = |param: &'p PartParam| {
            Ok(match param {
                PartParam::Number(name, number) => DeviceParam::new(name, DeviceValue::Scalar(*number)),
                // Lengths within the extents of the whole may exceed those of the part.
                PartParam::Whole(name) => match self.value(name)? {
                    DeviceValue::WithinExtent(dtype, slice) => DeviceParam::new(name, DeviceValue::Tensor(dtype, slice)),
                    value @ (DeviceValue::Scalar(_) | DeviceValue::Tensor(..)) => DeviceParam::new(name, value),
                },
                PartParam::Cut { name, dtype, cut: Cut { dims, strides, first }, copy } => {
                    let (_, slice) = self.value(name)?.tensor().ok_or_else(|| bug("a number instead of a tensor"))?;
                    let own = View::dense(self.scratch(*copy), *dtype, *dims);
                    let whole = View { address: slice.address + bytes(*dtype, *first), dtype: *dtype, dims: *dims, strides: *strides };
                    self.transfer(&whole, &own, Mode::Copy)?;
                    DeviceParam::new(name, DeviceValue::Tensor(*dtype, own.slice()))
                }
                PartParam::Shifted { name, more, copy } => {
                    let (dtype, slice) = self.value(name)?.tensor().ok_or_else(|| bug("a number instead of a tensor"))?;
                    let [own, whole] = [self.scratch(*copy), slice.address].map(|at| View::dense(at, dtype, [1; 4]));
                    self.transfer(&whole, &own, Mode::Shift(*more))?;
                    DeviceParam::new(name, DeviceValue::Tensor(dtype, own.slice()))
                }
            })
        };
        part.params.iter().map(one).collect()
    }

    /// Returns the memory of each tensor that a part reads, in the type of the part.
    fn operands(&self, part: &Part) -> Result<Vec<DeviceSlice>, ParallelError> {
        let one = |read: &Read| {
            let view = self.view(&read.from)?;
            let Some(copy) = read.copy else { return Ok(view.slice()) };
            let is_statistic = self.program.schedule.slots[read.from.slot].tensor.is_statistic();
            let own = View::dense(self.scratch(copy), if is_statistic { DType::F32 } else { part.dtype }, view.dims);
            self.transfer(&view, &own, Mode::Copy)?;
            Ok(own.slice())
        };
        part.reads.iter().map(one).collect()
    }

    /// Returns where a result goes, if it is asked for.
    fn target(&self, writes: &[(Tensor, Local)], tensor: Tensor) -> Result<Option<View>, ParallelError> {
        writes.iter().find(|(own, _)| *own == tensor).map(|(_, local)| self.view(local)).transpose()
    }

    fn output(&self, writes: &[(Tensor, Local)]) -> Result<View, ParallelError> {
        self.target(writes, Tensor::O)?.ok_or_else(|| bug("a part without an output"))
    }

    fn forward(&self, part: &Part) -> Result<(), ParallelError> {
        let params = self.part_params(part)?;
        let operands = self.operands(part)?;
        let &[q, k, v] = &operands[..] else { return Err(bug("a forward part without operands")) };
        let [o, statistics @ ..] = part.results;
        let to = self.output(&part.writes)?;
        let rows = to.dims;
        let o_view = o.map_or(to, |place| View::dense(self.scratch(place), part.dtype, rows));
        let statistics =
            statistics.map(|place| place.map(|place| View::dense(self.scratch(place), DType::F32, [rows[0], rows[1], rows[2], 1])));
        let [stats, row_max, sum_exp] = statistics.map(|view| view.map(|view| view.slice()));
        let call = DeviceForward::new(q, k, v, o_view.slice()).stats(stats).row_max(row_max).sum_exp(sum_exp).attn_scale(self.scale);
        // SAFETY: as for transfers: all memory is that of the call or of this rank, and the stream orders its uses.
        unsafe { part.plan.submit(self.on.stream(), &DeviceCall::from(&call.params(&params))) }?;
        if part.partial {
            let (Some(row_max), Some(sum_exp)) = (row_max, sum_exp) else { return Err(bug("a partial result without statistics")) };
            let &[(_, o), (_, max), (_, sum)] = &part.writes[..] else { return Err(bug("a partial result without accumulators")) };
            let to = self.merged(&[o, max, sum])?;
            // SAFETY: as above.
            return Ok(unsafe { self.kernels.merge(self.on, &o_view, [row_max, sum_exp], &to) }?);
        }
        for (tensor, view) in [Tensor::Stats, Tensor::RowMax, Tensor::SumExp].into_iter().zip(statistics) {
            if let (Some(to), Some(view)) = (self.target(&part.writes, tensor)?, view) {
                self.transfer(&view, &to, Mode::Copy)?;
            }
        }
        Ok(())
    }

    fn merged(&self, [o, row_max, sum_exp]: &[Local; 3]) -> Result<Merged, ParallelError> {
        Ok(Merged { o: self.view(o)?, row_max: self.view(row_max)?, sum_exp: self.view(sum_exp)? })
    }

    fn sinks(&self, first_head: i64) -> Result<Sinks, ParallelError> {
        let (dtype, slice) = self.value(SINK)?.tensor().ok_or_else(|| bug("a number instead of a tensor"))?;
        Ok(Sinks { address: slice.address, dtype, first_head })
    }

    fn finish(&self, reads: &[Local; 3], writes: &[(Tensor, Local)], first_head: i64) -> Result<(), ParallelError> {
        let problem = self.problem.problem();
        let from = self.merged(reads)?;
        let [stats, row_max, sum_exp] = [Tensor::Stats, Tensor::RowMax, Tensor::SumExp].map(|tensor| self.target(writes, tensor));
        let to = Finished { o: self.output(writes)?, stats: stats?, row_max: row_max?, sum_exp: sum_exp? };
        let sinks = problem.sink().then(|| self.sinks(first_head)).transpose()?;
        let base = match problem.stats_base() {
            StatsBase::Natural => 1.0,
            StatsBase::Two => std::f32::consts::LOG2_E,
        };
        // SAFETY: as above.
        Ok(unsafe { self.kernels.finish(self.on, &from, sinks, base, &to) }?)
    }

    fn backward(&self, part: &Part) -> Result<(), ParallelError> {
        let params = self.part_params(part)?;
        let operands = self.operands(part)?;
        let &[q, k, v, o, d_o, stats] = &operands[..] else { return Err(bug("a backward part without operands")) };
        let targets = part.writes.iter().map(|(_, local)| self.view(local)).collect::<Result<Vec<_>, _>>()?;
        let [dq, dk, dv, _] = part.results;
        let mut made = Vec::new();
        for (place, to) in [dq, dk, dv].into_iter().zip(&targets) {
            let place = place.ok_or_else(|| bug("a gradient without memory"))?;
            made.push(View::dense(self.scratch(place), part.dtype, to.dims));
        }
        let [dq, dk, dv] = &made[..] else { return Err(bug("a backward part without accumulators")) };
        let own = |g: &PartGradient| View::dense(self.scratch(g.own), DType::F32, g.cut.dims);
        let gradients: Vec<_> = part.gradients.iter().map(|g| DeviceGradient::new(&g.name, own(g).slice())).collect();
        let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq.slice(), dk.slice(), dv.slice())).attn_scale(self.scale);
        // SAFETY: as above.
        unsafe { part.plan.submit(self.on.stream(), &DeviceCall::from(&call.params(&params).gradients(&gradients))) }?;
        for (view, to) in made.iter().zip(&targets) {
            self.transfer(view, to, Mode::Add)?;
        }
        for g in &part.gradients {
            let sum = self.sums.iter().find(|(name, _)| *name == g.name).map(|(_, slice)| *slice);
            let sum = sum.ok_or_else(|| bug("a gradient that the call does not ask for"))?;
            let Cut { dims, strides, first } = g.cut;
            let whole = View { address: sum.address + bytes(DType::F32, first), dtype: DType::F32, dims, strides };
            self.transfer(&own(g), &whole, Mode::Add)?;
        }
        Ok(())
    }

    /// Computes this rank's contribution to the gradient of the sinks. Rows need no exchange: `stats` covers all keys.
    pub(super) fn sink_gradient(&self, scratch: u64) -> Result<(), ParallelError> {
        let Some((_, sum)) = self.sums.iter().find(|(name, _)| name == SINK) else { return Ok(()) };
        let (o, d_o, stats) = (self.shard(Tensor::O)?, self.shard(Tensor::DO)?, self.shard(Tensor::Stats)?);
        debug_assert!(o.strides[3] == 1 && d_o.strides[3] == 1);
        // SAFETY: as above; the scratch memory has `SINK_PARTS` numbers for each head.
        Ok(unsafe { self.kernels.sink_gradient(self.on, [&o, &d_o, &stats], self.sinks(0)?, scratch, sum.address) }?)
    }
}

/// Returns the bytes that [`Run::sink_gradient`] needs.
pub(super) fn sink_bytes(heads: i64) -> u64 {
    bytes(DType::F32, heads * SINK_PARTS)
}
