//! What kernels are told of a call, whichever the pass.

use super::lists::Made;
use super::{CudaPlan, Mapped, Walk};
use crate::params::FAR;
use crate::problem::Forward;
pub(super) use crate::work::{heads_in_cache, steps};
use sdpa_core::device::{DeviceCall, DeviceValue};
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED, Operand, Side, Statistic, TensorSpec, packed};
use sdpa_driver::{DeviceSlice, Submission, TensorMap, Tiled};
use smallvec::SmallVec;

/// The kernel's structure of what traces read, in words of 8 bytes.
pub(super) type Captured = SmallVec<[u64; 16]>;

/// A bound of differences of indices, or what stands for none.
pub(super) fn bound(x: Option<i64>, none: i32) -> i32 {
    x.map_or(none, |x| i32::try_from(x).map_or(none, |x| x.clamp(-FAR, FAR)))
}

/// `attn_scale` as kernels take it.
pub(super) struct Scale {
    /// Whether scores are multiplied by it before anything else: 1 or 0.
    pub natural: i32,
    pub scale: f32,
    /// What a score is multiplied by in the exponent of 2.
    pub unit: f32,
}

/// Dropout as kernels take it: all 0 where no weights are dropped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drops {
    /// Addresses of the seed, and of where random numbers begin.
    pub seed: u64,
    pub offset: u64,
    /// The largest random number with which a weight stays.
    pub most: i32,
    /// What weights that stay are multiplied by.
    pub scale: f32,
}

impl Drops {
    /// Those of a call.
    pub(super) fn of(forward: &Forward, call: &DeviceCall<'_, DeviceSlice>) -> Drops {
        forward.dropout.map_or_else(Drops::default, |dropout| Drops {
            seed: tensor(call, DROPOUT_SEED),
            offset: tensor(call, DROPOUT_OFFSET),
            most: dropout.most().cast_signed(),
            scale: dropout.scale(),
        })
    }
}

/// An operand as the copy engine is told of it, its boxes of so many rows of so many heads.
pub(super) fn tiled(tensor: &TensorSpec, [rows, heads]: [u32; 2]) -> Tiled {
    let [batch, head, seq, dim] = tensor.dims.map(|d| d.max(1) as u64);
    // An axis of one element has any stride that the engine takes.
    let bytes = |axis: usize| if tensor.dims[axis] <= 1 { 16 } else { 2 * tensor.strides[axis].unsigned_abs() };
    Tiled { extents: [dim, seq, head, batch], strides: [bytes(2), bytes(1), bytes(0)], tile: [64, rows, heads, 1] }
}

/// Packed tokens of an operand as the copy engine is told of them, its boxes of so many rows of so many heads, from `rows` tokens before its address on: two axes of tokens
/// add up, of which the first ends behind a box, so that a kernel says where a box is cut off.
pub(super) fn clipped(tensor: &TensorSpec, tokens: i64, [rows, of_heads]: [u32; 2]) -> Tiled {
    let [_, heads, _, dim] = tensor.dims.map(|d| d.max(1) as u64);
    let bytes = |axis: usize| 2 * tensor.strides[axis].unsigned_abs();
    let head = if heads == 1 { 16 } else { bytes(1) };
    Tiled {
        extents: [dim, rows.into(), heads, tokens.unsigned_abs() + 1],
        strides: [bytes(2), head, bytes(2)],
        tile: [64, rows, of_heads, 1],
    }
}

/// The map of packed tokens at an address: it begins a box before them.
pub(super) fn packed_map(submission: &Submission<'_>, address: u64, map: &Tiled) -> Result<TensorMap, sdpa_driver::Error> {
    submission.tensor_map(address.wrapping_sub(map.strides[0] * map.extents[1]), map)
}

/// The map of an operand at an address.
pub(super) fn map_of(submission: &Submission<'_>, address: u64, tensor: &TensorSpec, rows: u32) -> Result<TensorMap, sdpa_driver::Error> {
    submission.tensor_map(address, &tiled(tensor, [rows, 1]))
}

/// Addresses of row statistics in this call, in the order of [`Statistic::ALL`]; 0 of those that nobody asks for.
pub(super) fn statistics(call: &DeviceCall<'_, DeviceSlice>) -> [u64; 3] {
    Statistic::ALL.map(|statistic| call.statistic(statistic).map_or(0, |slice| slice.address))
}

/// The address of a declared tensor in this call.
pub(super) fn tensor(call: &DeviceCall<'_, DeviceSlice>, name: &str) -> u64 {
    let given = call.params.iter().find(|p| p.name == name).and_then(|p| p.value.tensor());
    given.map_or(0, |(_, slice)| slice.address)
}

/// Where the lists of blocks of a call are: all 0 where there are none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ListsAt {
    /// Addresses of where each list begins in `blocks`, and where it ends.
    pub begin: u64,
    pub end: u64,
    /// Address of the items.
    pub blocks: u64,
    /// How many batch entries and heads have lists of their own.
    pub rows: [i64; 2],
}

impl ListsAt {
    /// From one batch entry to the next, and from one head to the next, in units of the lists of a head.
    pub(super) fn strides(&self) -> [i32; 2] {
        let [batch, head] = self.rows;
        [if batch > 1 { head as i32 } else { 0 }, i32::from(head > 1)]
    }
}

impl CudaPlan {
    /// Tokens of packed queries and keys that every operand of the call has room for, as far as the problem goes. Where documents are the same, the fewer.
    pub(super) fn tokens<'a>(
        &self,
        forward: &Forward,
        operands: impl Iterator<Item = (Operand, &'a TensorSpec)>,
        call: &DeviceCall<'_, DeviceSlice>,
    ) -> [i64; 2] {
        let (Some(packs), problem) = (forward.packed, self.job.problem()) else { return [0; 2] };
        let mut least = packs.totals;
        let mut room = |side: Side, tensor: &TensorSpec, elements: u64| {
            least[side as usize] = packed::tokens(tensor, elements).min(least[side as usize]);
        };
        for (operand, tensor) in operands {
            if let Some(slice) = call.operand(operand).filter(|_| forward.packs(operand.side())) {
                room(operand.side(), tensor, slice.bytes / u64::from(forward.dtype.bits() / 8));
            }
        }
        for slice in Statistic::ALL.into_iter().filter_map(|statistic| call.statistic(statistic)) {
            room(Side::Queries, &problem.stats_tensor(), slice.bytes / 4);
        }
        let cross = problem.packed().is_some_and(|packed| packed.cross);
        if cross { least } else { [least[0].min(least[1]); 2] }
    }

    /// The address of the boundaries of documents of a side, in this call.
    pub(super) fn boundaries(&self, call: &DeviceCall<'_, DeviceSlice>, side: Side) -> u64 {
        self.job.problem().packed().map_or(0, |packed| tensor(call, packed.boundaries(side)))
    }

    pub(super) fn scale(&self, call: &DeviceCall<'_, DeviceSlice>) -> Scale {
        let scale = call.attn_scale.unwrap_or(self.job.problem().default_scale());
        // In the exponent a scale must be positive, or the largest score is the smallest.
        let natural = self.pass.attention().score_mod.is_some() || scale <= 0.0;
        let log2_e = std::f32::consts::LOG2_E;
        Scale { natural: i32::from(natural), scale, unit: if natural { log2_e } else { scale * log2_e } }
    }

    /// Where the lists of blocks are: with the plan, or in workspace from here on.
    pub(super) fn lists(&self, workspace: u64) -> ListsAt {
        self.lists_of(self.pass.walk(), self.kept.map.as_deref(), workspace)
    }

    /// Where those of a walk are.
    pub(super) fn lists_of(&self, walk: Walk, map: Option<&Mapped>, workspace: u64) -> ListsAt {
        let in_workspace = || Made::of(self.pass.attention(), walk).map(|made| made.at(workspace));
        map.map(|map| map.at).or_else(in_workspace).unwrap_or_default()
    }

    /// What traces read in this call, as the kernel's structure: addresses of tensors, then scalars.
    pub(super) fn captured(&self, call: &DeviceCall<'_, DeviceSlice>) -> Captured {
        let scalar = |name: &String| match call.params.iter().find(|p| p.name == name).map(|p| p.value) {
            Some(DeviceValue::Scalar(x)) => x,
            Some(DeviceValue::Tensor(..) | DeviceValue::WithinExtent(..)) | None => f32::NAN,
        };
        let mut words: Captured = self.tensors.iter().map(|name| tensor(call, name)).collect();
        for pair in self.scalars.chunks(2) {
            let [low, high] = [pair.first(), pair.get(1)].map(|name| name.map_or(0, |name| scalar(name).to_bits()));
            words.push(u64::from(low) | u64::from(high) << 32);
        }
        // An empty structure has a byte.
        if words.is_empty() {
            words.push(0);
        }
        words
    }
}
