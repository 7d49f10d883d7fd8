//! The values of a call that a plan's schedule leaves open: addresses, scalars and token counts.

use super::Home;
use crate::schedule::arguments::{Fill, Value, write_u32};
use crate::schedule::{Address, GradientId, Memory, Number, ParamId, Schedule, SlotId};
use sdpa_core::device::{DeviceCall, DeviceValue};
use sdpa_driver::DeviceSlice;
use smallvec::SmallVec;

/// The arguments of all launches of a call, as 8-byte words.
pub(super) type Words = SmallVec<[u64; 256]>;

/// A call of a plan, with values that several of its kernel arguments need.
pub(super) struct Call<'a> {
    schedule: &'a Schedule,
    homes: &'a [Home],
    call: &'a DeviceCall<'a, DeviceSlice>,
    workspace: u64,
    /// Number of packed query tokens and of packed key tokens for which the call has memory.
    pub(super) tokens: [i64; 2],
    scale: f32,
    /// Whether scores are multiplied by the scale first.
    natural: bool,
}

impl<'a> Call<'a> {
    pub(super) fn new(schedule: &'a Schedule, homes: &'a [Home], call: &'a DeviceCall<'a, DeviceSlice>, workspace: u64) -> Call<'a> {
        let scale = call.attn_scale.unwrap_or(schedule.default_scale);
        // The scale can be folded into the exponent only if it is positive: otherwise the largest score would become the smallest.
        let natural = schedule.has_score_mod || scale <= 0.0;
        let tokens = schedule.tokens.as_ref().map_or([0; 2], |tokens| tokens.of_call(call));
        Call { schedule, homes, call, workspace, tokens, scale, natural }
    }

    fn slot(&self, SlotId(slot): SlotId) -> u64 {
        match self.homes[slot] {
            Home::Workspace(offset) => self.workspace + offset,
            Home::Plan(address) => address,
        }
    }

    fn param(&self, ParamId(param): ParamId) -> Option<DeviceValue<DeviceSlice>> {
        let name = &self.schedule.params[param];
        self.call.params.iter().find(|p| p.name == name).map(|p| p.value)
    }

    fn gradient(&self, GradientId(gradient): GradientId) -> DeviceSlice {
        let name = &self.schedule.gradients[gradient];
        self.call.gradients.iter().find(|g| g.name == name).map_or(DeviceSlice { address: 0, bytes: 0 }, |g| g.slice)
    }

    /// Returns the device address that `address` names in this call; 0 if the call has no such memory.
    pub(super) fn address(&self, address: Address) -> u64 {
        match address {
            Address::Null => 0,
            Address::Operand(operand) => self.call.operand(operand).map_or(0, |slice| slice.address),
            Address::Statistic(statistic) => self.call.statistic(statistic).map_or(0, |slice| slice.address),
            Address::Param(param) => self.param(param).and_then(|value| value.tensor()).map_or(0, |(_, slice)| slice.address),
            Address::Gradient(gradient) => self.gradient(gradient).address,
            Address::Slot(slot, offset) => self.slot(slot) + offset,
        }
    }

    fn number(&self, number: Number) -> u32 {
        let log2_e = std::f32::consts::LOG2_E;
        match number {
            Number::Natural => self.natural.into(),
            Number::Scale => self.scale.to_bits(),
            Number::Unit if self.natural => log2_e.to_bits(),
            Number::Unit => (self.scale * log2_e).to_bits(),
            Number::Tokens(side) => (self.tokens[side as usize] as i32).cast_unsigned(),
        }
    }

    fn scalar(&self, param: ParamId) -> f32 {
        match self.param(param) {
            Some(DeviceValue::Scalar(x)) => x,
            Some(DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..)) | None => f32::NAN,
        }
    }

    /// Returns the arguments of all launches, with the values of this call.
    pub(super) fn arguments(&self) -> Words {
        let mut words = Words::from_slice(self.schedule.arguments.words());
        for &Fill { at, value } in self.schedule.arguments.fills() {
            match value {
                Value::Address(address) => words[at / 8] = self.address(address),
                Value::Number(number) => write_u32(&mut words, at, self.number(number)),
                Value::Scalar(param) => write_u32(&mut words, at, self.scalar(param).to_bits()),
            }
        }
        words
    }

    /// Returns the device memory that `memory` names in this call.
    pub(super) fn memory(&self, memory: &Memory) -> DeviceSlice {
        match memory {
            Memory::Gradient(gradient) => self.gradient(*gradient),
            Memory::Slots(slots) => {
                let (first, last) = (SlotId(slots.start), SlotId(slots.end.saturating_sub(1)));
                let address = self.slot(first);
                DeviceSlice { address, bytes: self.slot(last) - address + self.schedule.slots[last.0].bytes }
            }
        }
    }
}
