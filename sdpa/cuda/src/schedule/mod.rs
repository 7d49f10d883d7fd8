//! A pass as a schedule: its workspace, and the zero fills and kernel launches of a call.
//!
//! A family of kernels makes the schedule once, with the plan. It is plain data: the plan submits it, and `inspect` prints it.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | builds schedules, for both families |
//! | `arguments` | kernel arguments, and the values in them that calls fill in |
//! | `tensor_map` | the tensor maps of operands |
//! | `tokens` | the number of packed tokens for which a call has memory |
//! | `block_lists` | block-sparse index lists |
//! | `report` | the schedule as text and numbers |

pub(crate) mod arguments;
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
pub(crate) use block_lists::{BlockLists, Blocking};
pub(crate) use builder::{Builder, grid};
pub use report::{LaunchReport, ScheduleReport, SlotReport, StepReport};
pub(crate) use tensor_map::OperandMap;
pub(crate) use tokens::PackedTokens;

/// Alignment of workspace slots, in bytes.
const SLOT_ALIGNMENT: u64 = 256;

/// The properties of a GPU on which a schedule depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu {
    /// The compute capability: 90 for 9.0.
    pub(crate) sm: u32,
    pub(crate) multiprocessors: u32,
}

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

/// A range of device memory that a pass uses in addition to its operands.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: Cow<'static, str>,
    pub(crate) bytes: u64,
    pub(crate) source: Source,
}

/// The source of a slot's memory.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The workspace of a call.
    Workspace,
    /// Block lists of a mask that reads tensors: the workspace of a call, or memory of a plan that keeps the lists of one call.
    BlockLists,
    /// Memory of the plan, initialised with these numbers.
    Table(Vec<u32>),
}

/// A range of device memory.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    /// Adjacent slots in the workspace.
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
    /// Number of thread blocks of the one-dimensional grid.
    pub(crate) grid: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: SmallVec<[Argument; 10]>,
}

/// Work that a call submits.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sets a range of memory to 0.
    Zero(Memory),
    Launch(Launch),
}

/// The schedule of a pass on a device: its kernels, memory and steps. It depends on the device's compute capability and its number of
/// SMs.
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
    /// Names of the declared parameters that kernels read.
    pub(crate) params: Vec<String>,
    /// Names of the declared parameters whose gradients kernels write.
    pub(crate) gradients: Vec<String>,
    pub(crate) tokens: Option<PackedTokens>,
    /// The factor of the scores in a call without `attn_scale`.
    pub(crate) default_scale: f32,
    /// Whether a score_mod reads scaled scores, so that the scale cannot be part of the exponent.
    pub(crate) has_score_mod: bool,
}

impl Schedule {
    /// Returns the byte offset of each slot in the workspace, and the size of the workspace in bytes. Slots for which `is_resident` holds
    /// are not in it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Target;
    use sdpa_core::backward::BackwardProblem;
    use sdpa_core::{AttentionSpec, DType, Layout, Mask, Packed, Paged, Problem, SINK, Shape};

    /// The most kernel parameters of a launch, a limit of the driver's interface.
    const MOST_ARGUMENTS: usize = 16;

    fn problems() -> (Vec<Problem>, Vec<BackwardProblem>) {
        let shape = |seq_q, dim| Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q, seq_kv: 3000, dim_qk: dim, dim_v: dim };
        let dense = |seq_q, dim, mask: &str| {
            AttentionSpec::dense(DType::BF16, shape(seq_q, dim), Layout::Bshd).mask(mask.parse::<Mask>().unwrap()).with_stats()
        };
        let packed = AttentionSpec::packed(DType::F16, Shape { seq_kv: 500, ..shape(500, 64) }, Packed::default()).with_stats();
        let all = [64, 128, 256, 13].into_iter().flat_map(|dim| {
            ["causal", "document", "natten:9"].into_iter().flat_map(move |mask| [1, 700].map(|seq_q| dense(seq_q, dim, mask)))
        });
        let all: Vec<AttentionSpec> = all.chain([packed]).collect();
        let paged = AttentionSpec::paged(DType::F16, shape(3, 128), Paged::new(16, 900)).with_row_max();
        let with_gradients = |spec: &AttentionSpec| {
            let spec = spec.clone().score_mod("bias:hq".parse().unwrap()).with_sink().backward();
            [spec.clone().wrt("bias", DType::BF16).wrt(SINK, DType::F32), spec.deterministic().wrt("bias", DType::F32)]
        };
        let backward = all.iter().flat_map(|spec| [vec![spec.clone().backward()], with_gradients(spec).to_vec()].concat());
        let backward = backward.map(|spec| spec.validate().unwrap()).collect();
        (all.iter().chain([&paged]).map(|spec| spec.validate().unwrap()).collect(), backward)
    }

    fn schedules() -> Vec<Schedule> {
        let (forward, backward) = problems();
        let on = |target: Target| {
            let there = forward.iter().filter_map(|problem| target.forward(problem).ok()).collect::<Vec<_>>();
            there.into_iter().chain(backward.iter().filter_map(|problem| target.backward(problem).ok()).collect::<Vec<_>>())
        };
        let all: Vec<Schedule> = [(90, 132), (80, 108)].into_iter().flat_map(|(sm, sms)| on(Target::new(sm, sms))).collect();
        assert_eq!(all.len(), 2 * (forward.len() + backward.len()), "every problem has a schedule");
        all
    }

    #[test]
    fn every_launch_has_an_entry_point_of_its_source_with_as_much_shared_memory() {
        for schedule in schedules() {
            for step in &schedule.steps {
                let Step::Launch(launch) = step else { continue };
                let entries = &schedule.kernels[launch.kernel.0].entries;
                assert!(entries.contains(&(launch.entry, launch.shared_bytes)), "{}: {launch:?}", schedule.label);
                assert!(launch.arguments.len() <= MOST_ARGUMENTS && launch.grid > 0, "{}: {launch:?}", schedule.label);
            }
            assert_eq!(schedule.kernels[0].architecture, schedule.kernels.last().unwrap().architecture);
        }
    }

    #[test]
    fn every_slot_is_used_and_those_of_the_workspace_do_not_overlap() {
        for schedule in schedules() {
            let (offsets, workspace) = schedule.layout(|slot| matches!(slot.source, Source::Table(_)));
            let mut end = 0;
            for (n, (slot, offset)) in schedule.slots.iter().zip(offsets).enumerate() {
                let is_filled =
                    |fill: &arguments::Fill| matches!(fill.value, arguments::Value::Address(Address::Slot(SlotId(at), _)) if at == n);
                assert!(slot.bytes > 0 && schedule.arguments.fills().iter().any(is_filled), "{}: {}", schedule.label, slot.name);
                if let Some(offset) = offset {
                    assert!(offset >= end && offset % SLOT_ALIGNMENT == 0, "{}: {}", schedule.label, slot.name);
                    end = offset + slot.bytes;
                }
            }
            assert!(end <= workspace && workspace - end < SLOT_ALIGNMENT, "{}", schedule.label);
        }
    }

    #[test]
    fn slots_that_are_set_to_zero_are_in_the_workspace() {
        for schedule in schedules() {
            for step in &schedule.steps {
                let Step::Zero(Memory::Slots(slots)) = step else { continue };
                let all = &schedule.slots[slots.clone()];
                assert!(!all.is_empty() && all.iter().all(|slot| matches!(slot.source, Source::Workspace)), "{}", schedule.label);
            }
        }
    }
}
