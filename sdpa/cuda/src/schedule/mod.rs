//! A pass as a schedule: the workspace that it uses, and the zero fills and kernel launches of a call.
//!
//! A family of kernels makes the schedule once, when the plan is made. It is plain data: the plan submits it, and `inspect` prints it.
//!
//! | file | what it has |
//! |---|---|
//! | `builder` | how a family makes a schedule |
//! | `arguments` | the bytes that kernels get, and the values in them that a call has |
//! | `attention` | the parameters that all kernels share |
//! | `tensor_map` | the tensor maps of operands |
//! | `tokens` | how many packed tokens a call has memory for |
//! | `block_lists` | block-sparse index lists |
//! | `report` | the schedule in words and numbers |

pub(crate) mod arguments;
mod attention;
mod block_lists;
mod builder;
mod report;
mod tensor_map;
mod tokens;

use crate::entry_point::EntryPoint;
use crate::kernel::KernelKey;
use arguments::{Arguments, BlockId};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::ops::Range;

pub(crate) use arguments::{Address, Number};
pub(crate) use attention::Tiling;
pub(crate) use block_lists::{BlockLists, Blocking};
pub(crate) use builder::{Builder, grid};
pub use report::{LaunchReport, ScheduleReport, SlotReport, StepReport};
pub(crate) use tensor_map::OperandMap;
pub(crate) use tokens::PackedTokens;

/// Slots begin at multiples of this in the workspace.
const SLOT_ALIGNMENT: u64 = 256;

/// The index of a slot in [`Schedule::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlotId(pub(crate) usize);

/// The index of a kernel source in [`Schedule::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelId(pub(crate) usize);

/// The index of a tensor map in [`Schedule::maps`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapId(pub(crate) usize);

/// The index of a declared parameter in [`Schedule::params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ParamId(pub(crate) usize);

/// The index of a gradient of a declared parameter in [`Schedule::gradients`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GradientId(pub(crate) usize);

/// Device memory of a pass that the caller does not name.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: Cow<'static, str>,
    pub(crate) bytes: u64,
    pub(crate) source: Source,
}

/// The memory that a slot has.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The workspace of a call.
    Workspace,
    /// Block lists of a mask that reads tensors: the workspace of a call, or memory of a plan that keeps the lists of one call.
    BlockLists,
    /// Memory of the plan, which has these numbers from the begin.
    Table(Vec<u32>),
}

/// A stretch of device memory.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    /// Slots that follow one another in the workspace.
    Slots(Range<usize>),
    /// The caller's gradient of a declared parameter.
    Gradient(GradientId),
}

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    /// A tensor map, by value.
    Map(MapId),
    /// A structure or a number, by value.
    Block(BlockId),
}

/// A kernel launch.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: KernelId,
    pub(crate) entry: EntryPoint,
    /// Thread blocks: grids are one-dimensional.
    pub(crate) grid: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: SmallVec<[Argument; 10]>,
}

/// Work that a call submits.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sets memory to 0.
    Zero(Memory),
    Launch(Launch),
}

/// A pass on a device, as far as the device's compute capability and its number of SMs say it.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// The tile configuration of the main kernel, for reports.
    pub(crate) label: String,
    /// The kernel sources, the main one first.
    pub(crate) kernels: Vec<KernelKey>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) steps: Vec<Step>,
    pub(crate) maps: Vec<OperandMap>,
    pub(crate) arguments: Arguments,
    /// Names of declared parameters that kernels read.
    pub(crate) params: Vec<String>,
    /// Names of declared parameters whose gradients kernels write.
    pub(crate) gradients: Vec<String>,
    pub(crate) tokens: Option<PackedTokens>,
    /// The scale of a call that names none.
    pub(crate) default_scale: f32,
    /// Whether a score_mod reads scaled scores, so that the scale is not a part of the exponent.
    pub(crate) has_score_mod: bool,
}

impl Schedule {
    /// Returns the offset of each slot in the workspace, and the size of the workspace. Slots of which `is_resident` holds are not in it.
    pub(crate) fn layout(&self, is_resident: impl Fn(&Slot) -> bool) -> (Vec<Option<u64>>, u64) {
        let mut end = 0;
        let place = |slot: &Slot| {
            (!is_resident(slot)).then(|| {
                let begin = end;
                end += slot.bytes.next_multiple_of(SLOT_ALIGNMENT);
                begin
            })
        };
        (self.slots.iter().map(place).collect(), end)
    }
}
