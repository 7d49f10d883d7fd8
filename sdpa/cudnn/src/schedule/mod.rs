//! Schedules: what a pass is on cuDNN. Slots say where bytes come from, steps say what runs on them.
//!
//! A schedule is made once for a pass. Its key, whether it is supported, building, loading, saving, workspace, calls, captures and reports are
//! loops over it, the same for both passes. `P` is what a step's graph has become: `()`, or a [`Plan`](cudnn_graph::Plan).

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

/// A slot of one schedule, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId(pub(super) usize);

impl SlotId {
    /// The slot's place in [`Schedule::slots`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// Where the bytes of a slot come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The caller's memory for an operand, strided as the problem says.
    Operand(Operand),
    /// The caller's memory for an operand, from so many bytes behind its beginning on: rows of a piece.
    Rows(Operand, u64),
    /// The caller's memory for a row statistic: f32, (batch, heads_q, seq_q), dense.
    Statistic(Statistic),
    /// The tensor of a declared parameter, by its place among the declared.
    Param(usize),
    /// The caller's memory for the gradient of a parameter, by its place in [`Schedule::gradients`].
    Gradient(usize),
    /// The caller's memory for a largest magnitude: one f32.
    Amax(Amax),
    /// A table in device memory, by its place in [`Schedule::tables`].
    Table(usize),
    /// The workspace, so many bytes behind what plans need for themselves.
    Scratch(u64),
    /// The workspace, of lengths that have been clamped; or the parameter's own tensor, where the caller promises that it needs no clamping.
    Lengths {
        /// Where in the workspace, as in [`Source::Scratch`].
        offset: u64,
        /// The declared parameter, as in [`Source::Param`]; `None` where engines need more than clamped lengths.
        param: Option<usize>,
    },
}

/// Device memory that steps read and write.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// A name for reports and errors.
    pub name: String,
    /// Where the memory comes from.
    pub source: Source,
    /// How many bytes of it steps reach.
    pub bytes: u64,
    /// Bytes that its address is a multiple of.
    pub alignment: u32,
}

/// What a table in device memory holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Contents {
    /// Numbers of a mask or a score_mod.
    Numbers(Table),
    /// So many ones, to sum by a product.
    Ones(DType, u64),
}

/// A number that a plan reads from host memory at each call.
#[derive(Clone, Debug)]
pub enum Number {
    /// The scale that scores are multiplied by.
    Scale,
    /// A number that the graph itself has.
    Fixed(Scalar),
    /// The value of a declared scalar, by its place among the declared.
    Param(usize),
    /// A function of declared scalars, each by its place among the declared.
    Of(Trace, Vec<usize>),
}

/// What a graph is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The attention itself, or the first piece of it.
    Attention,
    /// Another piece of the attention, by its number: the first one is 0.
    Piece(usize),
    /// Merges what a piece, by its number, wrote with what those before it wrote.
    Merge(usize),
    /// Copies an operand that engines cannot read, or write, in place.
    Copy(Operand),
    /// Makes what engines read of the parameters of these names.
    Conversion(Vec<String>),
    /// A sum of what the attention writes for the gradient of the parameter of this name, and its number among such sums.
    Sum(String, usize),
    /// Rounds the last of these sums to the type of the gradient.
    Rounding(String),
    /// Computes the lengths and offsets of packed documents that engines read.
    Documents,
    /// Brings lengths and the page table of batch entries, by their names, to what engines may be given.
    Entries(Vec<String>),
    /// Adds sinks to rows that were computed without.
    Sink,
    /// Computes the gradient of sinks.
    SinkGradient,
    /// Writes 0 for the sums of exponentials of rows without keys.
    RowSums,
    /// Fills the rows of a result that belong to documents without tokens on the other side.
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

/// The memory of one tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The tensor of the graph.
    pub tensor: TensorId,
    /// Where its memory is.
    pub slot: SlotId,
    /// Bytes from one repetition to the next.
    pub step: u64,
}

/// A graph that runs.
#[derive(Clone, Debug)]
pub struct Run<P> {
    /// What the graph is for.
    pub role: Role,
    /// The graph that runs.
    pub graph: Arc<Verified>,
    /// Memory, in the order in which a plan takes it.
    pub ports: Vec<Port>,
    /// Numbers, in the order in which a plan takes them.
    pub numbers: Vec<(TensorId, Number)>,
    /// How often it runs in one call.
    pub repeats: u64,
    /// What the graph has become.
    pub plan: P,
}

/// A number that a kernel of this crate takes, of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The address of a slot.
    Slot(SlotId),
    /// Tokens of a side that the memory of the call holds.
    Tokens(Side),
    /// A number that is the same at each call.
    Fixed(i64),
}

/// A kernel of this crate that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What the launch is for.
    pub role: Role,
    /// The kernel that is launched.
    pub kernel: Own,
    /// Blocks of the grid, and threads of each.
    pub grid: [u32; 2],
    /// An argument for each parameter of the kernel, in order.
    pub arguments: Vec<Argument>,
    /// The launch is left out where the caller promises that these parameters, by their places among the declared, need no clamping; of none, never.
    pub spared_by: Vec<usize>,
}

/// What is done on a stream, one after the other.
#[derive(Clone, Debug)]
pub enum Step<P> {
    /// A plan of a graph is executed.
    Run(Box<Run<P>>),
    /// A kernel of this crate is launched.
    Launch(Launch),
    /// A slot is filled with zeros.
    Zero(SlotId),
    /// The bytes of a slot are copied to the beginning of another.
    Move(SlotId, SlotId),
}

/// A pass on cuDNN: the memory that it needs, and what it does, step by step.
#[derive(Clone, Debug)]
pub struct Schedule<P> {
    slots: Vec<Slot>,
    steps: Vec<Step<P>>,
    tables: Vec<Contents>,
    gradients: Vec<String>,
    scratch: u64,
}

impl<P> Schedule<P> {
    /// Every slot of the pass.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The slot of an id.
    pub fn slot(&self, id: SlotId) -> &Slot {
        &self.slots[id.0]
    }

    /// Every step, in order.
    pub fn steps(&self) -> &[Step<P>] {
        &self.steps
    }

    /// The tables that have to be in device memory before the first call.
    pub fn tables(&self) -> &[Contents] {
        &self.tables
    }

    /// The parameters whose gradients the caller has memory for.
    pub fn gradients(&self) -> &[String] {
        &self.gradients
    }

    /// Bytes of the workspace that slots take, behind what plans need for themselves.
    pub fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Every graph that runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = &Run<P>> {
        self.steps.iter().filter_map(|step| match step {
            Step::Run(run) => Some(&**run),
            Step::Launch(_) | Step::Zero(_) | Step::Move(..) => None,
        })
    }

    /// The kernels of this crate that run, in order.
    pub fn kernels(&self) -> impl Iterator<Item = Own> {
        self.steps.iter().filter_map(|step| match step {
            Step::Launch(launch) => Some(launch.kernel),
            Step::Run(_) | Step::Zero(_) | Step::Move(..) => None,
        })
    }

    /// The schedule with what `make` makes of each graph in its place: a plan, for one.
    ///
    /// # Errors
    /// Those of `make`.
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
