//! Schedules: a pass on cuDNN as slots (where bytes come from) and steps (what runs on them).
//!
//! Each pass has one schedule. Keys, support checks, builds, loads, saves, workspaces, calls, captures and reports iterate over it, alike for both
//! directions. `P` is the state of a step's graph: `()`, or a [`Plan`](cudnn_graph::Plan).

mod digest;
mod documents;
mod entries;
mod outline;
mod pieces;
mod sink;
mod sums;
mod text;

pub(super) use digest::outline as outline_digest;
pub(super) use outline::PIECE;
pub use outline::outline;
pub(super) use pieces::pieces;
pub use text::{ScheduleReport, SlotReport, StepReport};

use crate::kernels::Own;
use crate::lower::{Operand, Side, Statistic, Table};
use cudnn_graph::ir::{Scalar, TensorId};
use cudnn_graph::{DType, Verified};
use sdpa_core::Amax;
use sdpa_core::expr::Trace;
use std::fmt;
use std::sync::Arc;

/// The id of a slot, a range of device memory: its index in [`Schedule::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId(pub(super) usize);

impl SlotId {
    /// Returns the slot's index in [`Schedule::slots`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// The memory that a slot refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The caller's memory of an operand, strided as the problem says.
    Operand(Operand),
    /// The caller's memory of an operand from this byte offset on: the rows of one piece of a decomposed mask.
    Rows(Operand, u64),
    /// The caller's memory of a row statistic: f32, (batch, heads_q, seq_q), dense.
    Statistic(Statistic),
    /// The tensor of a declared parameter, by its index among the declared parameters.
    Param(usize),
    /// The caller's memory of the gradient of a parameter, by its index in [`Schedule::gradients`].
    Gradient(usize),
    /// The caller's memory of an amax: one f32.
    Amax(Amax),
    /// A table in device memory, by its index in [`Schedule::tables`].
    Table(usize),
    /// Workspace memory of the schedule, at this byte offset after the part that cuDNN's plans use.
    Scratch(u64),
    /// Workspace memory with clamped lengths. If the caller promises that its lengths need no clamping, it is the caller's tensor
    /// instead.
    Lengths {
        /// The byte offset in the workspace, as in [`Source::Scratch`].
        offset: u64,
        /// The index of the declared parameter with the caller's lengths, as in [`Source::Param`]; `None` if engines need more than
        /// clamped lengths.
        param: Option<usize>,
    },
}

/// A range of device memory that steps read and write.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// The name of the slot in reports and errors.
    pub name: String,
    /// The memory that the slot refers to.
    pub source: Source,
    /// Number of bytes that steps access in the slot.
    pub bytes: u64,
    /// Required alignment of the slot's address, in bytes.
    pub alignment: u32,
}

/// The contents of a table in device memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Contents {
    /// The numbers of a table for a mask or a score_mod.
    Numbers(Table),
    /// A table of ones: their element type and their number. A GEMM with them computes sums.
    Ones(DType, u64),
}

/// A scalar that a plan reads from host memory at each call.
#[derive(Clone, Debug)]
pub enum Number {
    /// The scale of the scores, `attn_scale`.
    Scale,
    /// A constant of the graph.
    Fixed(Scalar),
    /// The value of a declared scalar, by its index among the declared parameters.
    Param(usize),
    /// A function of declared scalars, each by its index among the declared parameters.
    Of(Trace, Vec<usize>),
}

/// The purpose of a step of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes the attention; for a pass that is computed in pieces, its first piece.
    Attention,
    /// Computes the piece of the attention with this number; the first piece has the number 0.
    Piece(usize),
    /// Merges the results of one piece of the attention, which has this number, with those of earlier pieces.
    Merge(usize),
    /// Copies an operand that engines cannot use in place.
    Copy(Operand),
    /// Converts the declared parameters of these names to a form that engines read.
    Conversion(Vec<String>),
    /// Sums terms of the gradient of the declared parameter of this name. A gradient has one or two sums; the number is 0 for the first.
    Sum(String, usize),
    /// Rounds the gradient of the declared parameter of this name from f32, in which it was summed, to its element type.
    Rounding(String),
    /// Computes the lengths and offsets of packed sequences.
    Documents,
    /// Clamps the lengths and page tables of these names to values that engines can handle.
    Entries(Vec<String>),
    /// Adds attention sinks to rows that were computed without them.
    Sink,
    /// Computes the gradient of the attention sinks.
    SinkGradient,
    /// Writes 0 as the sum of exponentials of rows without keys.
    RowSums,
    /// Fills result rows of packed sequences that have queries but no keys, or keys but no queries, in the result of this name.
    Unpaired(String),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Attention => f.write_str("attention"),
            Role::Piece(n) => write!(f, "attention, piece {n}"),
            Role::Merge(n) => write!(f, "merge of piece {n}"),
            Role::Copy(operand) => write!(f, "copy of {operand}"),
            Role::Conversion(names) => write!(f, "conversion of {}", names.join(" and ")),
            Role::Sum(name, n) => write!(f, "sum {n} of the gradient of {name}"),
            Role::Rounding(name) => write!(f, "rounding of the gradient of {name}"),
            Role::Documents => f.write_str("lengths and offsets of documents"),
            Role::Entries(names) => write!(f, "check of {}", names.join(" and ")),
            Role::Sink => f.write_str("sinks of rows"),
            Role::SinkGradient => f.write_str("gradient of sinks"),
            Role::RowSums => f.write_str("sums of rows without keys"),
            Role::Unpaired(name) => write!(f, "rows of {name} without the other side"),
        }
    }
}

/// The memory slot that is bound to one tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The tensor in the graph that the memory is bound to.
    pub tensor: TensorId,
    /// The slot, a range of device memory, that is bound to the tensor.
    pub slot: SlotId,
    /// Distance in bytes from the memory of one run of the graph to that of the next, for a graph that runs repeatedly in one call.
    pub step: u64,
}

/// A step that executes the plan of a graph.
#[derive(Clone, Debug)]
pub struct Run<P> {
    /// The purpose of the step.
    pub role: Role,
    /// The graph that runs.
    pub graph: Arc<Verified>,
    /// The memory of each tensor in device memory, in the order of the plan's arguments.
    pub ports: Vec<Port>,
    /// The tensors that are scalars in host memory, with their values, in the order of the plan's arguments.
    pub numbers: Vec<(TensorId, Number)>,
    /// The number of times that the plan runs in one call.
    pub repeats: u64,
    /// The state of the graph: `()` before it has a plan, or its plan.
    pub plan: P,
}

/// A 64-bit argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The address of a slot.
    Slot(SlotId),
    /// The number of query or key tokens for which the call has memory.
    Tokens(Side),
    /// A constant number.
    Fixed(i64),
}

/// A launch of a kernel of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The purpose of the launch.
    pub role: Role,
    /// The kernel that is launched.
    pub kernel: Own,
    /// The number of thread blocks of the grid, and the number of threads per block.
    pub grid: [u32; 2],
    /// One argument per kernel parameter, in order.
    pub arguments: Vec<Argument>,
    /// The indices of the declared parameters that the kernel clamps. The launch is skipped if the caller promises that all of them are
    /// within their extents. If the list is empty, the launch is never skipped.
    pub spared_by: Vec<usize>,
}

/// One operation of a pass on the stream; operations run in order.
#[derive(Clone, Debug)]
pub enum Step<P> {
    /// Executes the plan of a cuDNN graph.
    Run(Box<Run<P>>),
    /// Launches a kernel of this crate.
    Launch(Launch),
    /// Fills a memory slot with zeros.
    Zero(SlotId),
    /// Copies the bytes of the first memory slot to the beginning of the second.
    Move(SlotId, SlotId),
}

/// A pass on cuDNN: the memory that it needs, and the steps that it runs.
#[derive(Clone, Debug)]
pub struct Schedule<P> {
    slots: Vec<Slot>,
    steps: Vec<Step<P>>,
    tables: Vec<Contents>,
    gradients: Vec<String>,
    scratch: u64,
}

impl<P> Schedule<P> {
    /// Returns every slot of the pass: the ranges of device memory that steps read and write.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the slot, a range of device memory, with this id.
    pub fn slot(&self, id: SlotId) -> &Slot {
        &self.slots[id.0]
    }

    /// Returns every step of the pass, in order.
    pub fn steps(&self) -> &[Step<P>] {
        &self.steps
    }

    /// Returns the contents of the tables that must be in device memory before the first call.
    pub fn tables(&self) -> &[Contents] {
        &self.tables
    }

    /// Returns the names of the declared parameters for whose gradients the caller passes memory.
    pub fn gradients(&self) -> &[String] {
        &self.gradients
    }

    /// Returns the workspace size of all slots in bytes, without the workspace of cuDNN's plans.
    pub fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Returns the steps that execute a cuDNN graph, in order.
    pub fn runs(&self) -> impl Iterator<Item = &Run<P>> {
        self.steps.iter().filter_map(|step| match step {
            Step::Run(run) => Some(&**run),
            Step::Launch(_) | Step::Zero(_) | Step::Move(..) => None,
        })
    }

    /// Returns the kernels of this crate that steps launch, in order.
    pub fn kernels(&self) -> impl Iterator<Item = Own> {
        self.steps.iter().filter_map(|step| match step {
            Step::Launch(launch) => Some(launch.kernel),
            Step::Run(_) | Step::Zero(_) | Step::Move(..) => None,
        })
    }

    /// Replaces the state of each graph by the result of `make`, for example by its plan.
    ///
    /// # Errors
    /// Returns the first error of `make`.
    pub fn try_map<Q, E>(self, mut make: impl FnMut(&Run<P>) -> Result<Q, E>) -> Result<Schedule<Q>, E> {
        let Schedule { slots, steps, tables, gradients, scratch } = self;
        let mut mapped = Vec::with_capacity(steps.len());
        for step in steps {
            mapped.push(match step {
                Step::Run(run) => {
                    let plan = make(&run)?;
                    let Run { role, graph, ports, numbers, repeats, plan: _ } = *run;
                    Step::Run(Box::new(Run { role, graph, ports, numbers, repeats, plan }))
                }
                Step::Launch(launch) => Step::Launch(launch),
                Step::Zero(slot) => Step::Zero(slot),
                Step::Move(from, to) => Step::Move(from, to),
            });
        }
        Ok(Schedule { slots, steps: mapped, tables, gradients, scratch })
    }
}
