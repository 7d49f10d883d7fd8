//! The number of packed tokens that the buffers of a call hold.

use crate::problem::{Forward, Packs};
use sdpa_core::device::DeviceCall;
use sdpa_core::{Operand, Problem, Side, Statistic, TensorSpec, packed};
use sdpa_driver::DeviceSlice;

/// The operands of a packed pass, whose buffer sizes determine the number of tokens of a call.
#[derive(Clone, Debug)]
pub(crate) struct PackedTokens {
    packs: Packs,
    /// Whether keys have `cu_seqlens` of their own.
    cross: bool,
    element_bytes: u64,
    operands: Vec<(Operand, TensorSpec)>,
    statistics: TensorSpec,
}

impl PackedTokens {
    /// Returns the operands of a packed pass whose buffer sizes determine the number of tokens; `None` if neither queries nor keys are
    /// packed.
    pub(crate) fn of(
        problem: &Problem,
        attention: &Forward,
        operands: impl Iterator<Item = (Operand, TensorSpec)>,
    ) -> Option<PackedTokens> {
        let packs = attention.packed?;
        Some(PackedTokens {
            packs,
            cross: problem.packed().is_some_and(|packed| packed.cross),
            element_bytes: u64::from(attention.dtype.bits() / 8),
            operands: operands.filter(|(operand, _)| attention.packs(operand.side())).collect(),
            statistics: problem.stats_tensor(),
        })
    }

    /// Returns the numbers of query and key tokens for which every operand of a call has memory, at most the totals of the problem. If
    /// queries and keys share `cu_seqlens`, both numbers are the smaller one.
    pub(crate) fn of_call(&self, call: &DeviceCall<'_, DeviceSlice>) -> [i64; 2] {
        let mut least = self.packs.totals;
        let mut has = |side: Side, tensor: &TensorSpec, elements: u64| {
            least[side as usize] = packed::tokens(tensor, elements).min(least[side as usize]);
        };
        for (operand, tensor) in &self.operands {
            if let Some(slice) = call.operand(*operand) {
                has(operand.side(), tensor, slice.bytes / self.element_bytes);
            }
        }
        for slice in Statistic::ALL.into_iter().filter_map(|statistic| call.statistic(statistic)) {
            has(Side::Queries, &self.statistics, slice.bytes / 4);
        }
        if self.cross { least } else { [least[0].min(least[1]); 2] }
    }
}
