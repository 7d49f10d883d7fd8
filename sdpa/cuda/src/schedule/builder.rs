//! Builds the schedule of a pass, for either family.

use super::arguments::{Arguments, Member, Scalar};
use super::{
    Address, Argument, Gpu, GradientId, KernelId, Launch, MapId, Memory, OperandMap, PackedTokens, ParamId, Schedule, Slot, SlotId, Source,
    Step,
};
use crate::entry_point::EntryPoint;
use crate::family::Family;
use crate::kernel::KernelKey;
use crate::problem::{Forward, Lists};
use crate::source::MAP_SHARED_BYTES;
use sdpa_core::expr::Declared;
use sdpa_core::{Operand, Problem, Side, TensorSpec};
use sdpa_nvidia::JobQuery;
use std::borrow::Cow;

/// Converts the number of thread blocks of a one-dimensional grid to u32; saturates.
pub(crate) fn grid(blocks: i64) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// A schedule under construction.
pub(crate) struct Builder<'a> {
    job: JobQuery<'a>,
    pub(crate) attention: &'a Forward,
    architecture: String,
    schedule: Schedule,
}

impl<'a> Builder<'a> {
    /// Creates an empty schedule of a pass, for a family on a GPU. `label` describes the tile configuration.
    pub(crate) fn new(job: JobQuery<'a>, attention: &'a Forward, (family, gpu): (Family, Gpu), label: String) -> Builder<'a> {
        let schedule = Schedule {
            label,
            kernels: Vec::new(),
            slots: Vec::new(),
            steps: Vec::new(),
            maps: Vec::new(),
            arguments: Arguments::default(),
            params: Vec::new(),
            gradients: Vec::new(),
            tokens: None,
            default_scale: job.problem().default_scale(),
            has_score_mod: attention.score_mod.is_some(),
        };
        Builder { job, attention, architecture: family.architecture(gpu.sm), schedule }
    }

    pub(crate) fn finish(self) -> Schedule {
        self.schedule
    }

    pub(crate) fn problem(&self) -> &'a Problem {
        self.job.problem()
    }

    /// Returns extents and strides of an operand as it is stored: as a page pool, or as packed tokens. `None` if the pass does not have
    /// the operand.
    pub(crate) fn in_memory(&self, operand: Operand) -> Option<TensorSpec> {
        self.job.in_memory(operand)
    }

    /// Adds a kernel source with its entry points, each with its shared memory in bytes. If calls make block lists, each source also gets
    /// the kernel for this.
    pub(crate) fn kernel(&mut self, source: String, mut entries: Vec<(EntryPoint, u32)>) -> KernelId {
        entries.extend((self.attention.lists() == Lists::AtCall).then_some((EntryPoint::BlockLists, MAP_SHARED_BYTES)));
        let (tile, architecture) = (self.schedule.label.clone(), self.architecture.clone());
        self.schedule.kernels.push(KernelKey { source: source.into(), entries, tile, architecture });
        KernelId(self.schedule.kernels.len() - 1)
    }

    pub(super) fn push_slot(&mut self, name: Cow<'static, str>, bytes: u64, source: Source) -> SlotId {
        self.schedule.slots.push(Slot { name, bytes, source });
        SlotId(self.schedule.slots.len() - 1)
    }

    /// Adds a workspace slot, and returns its address: [`Address::Null`] if it has no bytes.
    pub(crate) fn slot(&mut self, name: impl Into<Cow<'static, str>>, bytes: i64) -> Address {
        match bytes.unsigned_abs() {
            0 => Address::Null,
            bytes => Address::Slot(self.push_slot(name.into(), bytes, Source::Workspace), 0),
        }
    }

    /// Returns the number of slots that were added so far, as an argument for [`Builder::zero_slots`].
    pub(crate) fn slots(&self) -> usize {
        self.schedule.slots.len()
    }

    /// Adds a step that sets all slots with index `first` or later to 0.
    pub(crate) fn zero_slots(&mut self, first: usize) {
        let all = first..self.slots();
        if !all.is_empty() {
            self.step(Step::Zero(Memory::Slots(all)));
        }
    }

    /// Adds a step that sets memory to 0: a whole slot, or the gradient of a parameter.
    pub(crate) fn zero(&mut self, address: Address) {
        match address {
            Address::Slot(SlotId(slot), _) => self.step(Step::Zero(Memory::Slots(slot..slot + 1))),
            Address::Gradient(gradient) => self.step(Step::Zero(Memory::Gradient(gradient))),
            // Kernels do not accumulate into these.
            Address::Null | Address::Operand(_) | Address::Statistic(_) | Address::Param(_) => {}
        }
    }

    pub(crate) fn step(&mut self, step: Step) {
        self.schedule.steps.push(step);
    }

    /// Adds a launch without dynamic shared memory.
    pub(crate) fn launch(
        &mut self,
        kernel: KernelId,
        entry: EntryPoint,
        [blocks, threads]: [i64; 2],
        arguments: impl IntoIterator<Item = Argument>,
    ) {
        self.launch_with(kernel, entry, ([blocks, threads], 0), arguments);
    }

    /// Adds a launch with this much dynamic shared memory.
    pub(crate) fn launch_with(
        &mut self,
        kernel: KernelId,
        entry: EntryPoint,
        ([blocks, threads], shared_bytes): ([i64; 2], u32),
        arguments: impl IntoIterator<Item = Argument>,
    ) {
        let (grid, threads, arguments) = (grid(blocks), grid(threads), arguments.into_iter().collect());
        self.step(Step::Launch(Launch { kernel, entry, grid, threads, shared_bytes, arguments }));
    }

    /// Sets the operands whose buffer sizes determine the number of packed tokens of a call.
    pub(crate) fn tokens_of(&mut self, operands: impl IntoIterator<Item = (Operand, TensorSpec)>) {
        self.schedule.tokens = PackedTokens::of(self.problem(), self.attention, operands.into_iter());
    }

    fn declared(&self) -> &'a [Declared] {
        match self.job {
            JobQuery::Forward(problem) => problem.params(),
            JobQuery::Backward(backward) => backward.params(),
        }
    }

    fn param_id(&mut self, name: &str) -> ParamId {
        let known = &mut self.schedule.params;
        ParamId(known.iter().position(|other| other == name).unwrap_or_else(|| {
            known.push(name.to_owned());
            known.len() - 1
        }))
    }

    /// Returns the address of the declared tensor `name`; [`Address::Null`] if the pass declares no such tensor.
    pub(crate) fn param(&mut self, name: &str) -> Address {
        if self.declared().iter().any(|declared| declared.name == name) { Address::Param(self.param_id(name)) } else { Address::Null }
    }

    /// Returns the address of the `cu_seqlens` of one side (queries or keys); [`Address::Null`] if this side is not packed.
    pub(crate) fn boundaries(&mut self, side: Side) -> Address {
        let packed = self.problem().packed();
        packed.map_or(Address::Null, |packed| self.param(packed.boundaries(side)))
    }

    /// Returns the address of the caller's memory for the gradient of the declared parameter `name`.
    pub(crate) fn gradient(&mut self, name: &str) -> Address {
        self.schedule.gradients.push(name.to_owned());
        Address::Gradient(GradientId(self.schedule.gradients.len() - 1))
    }

    /// Adds the tensor map of an operand as a kernel argument.
    pub(crate) fn map(&mut self, map: OperandMap) -> Argument {
        self.schedule.maps.push(map);
        Argument::Map(MapId(self.schedule.maps.len() - 1))
    }

    /// Adds a kernel argument that is a structure, whose members `push` adds.
    pub(crate) fn structure(&mut self, push: impl FnOnce(&mut Arguments)) -> Argument {
        Argument::Block(self.schedule.arguments.block(push))
    }

    /// Adds a kernel argument that is one number or address.
    pub(crate) fn value(&mut self, member: impl Member) -> Argument {
        self.structure(|to| member.push(to))
    }

    /// Adds the kernel argument with the declared parameters that traces read: addresses of tensors, then scalars.
    pub(crate) fn captured(&mut self) -> Argument {
        let captured = &self.attention.captured;
        let tensors: Vec<ParamId> = captured.tensors().into_iter().map(|(name, ..)| self.param_id(name)).collect();
        let scalars: Vec<ParamId> = captured.scalars().into_iter().map(|name| self.param_id(name)).collect();
        self.structure(|to| {
            tensors.into_iter().for_each(|param| Address::Param(param).push(to));
            scalars.into_iter().for_each(|param| Scalar(param).push(to));
        })
    }
}
