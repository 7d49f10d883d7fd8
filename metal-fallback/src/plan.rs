//! Types of problems and plans.

use crate::packed::Tokens;
use crate::params::{BackwardParams, ForwardParams, Numbers, Params};
use crate::source::PARAMS_SLOT;
use sdpa_core::DType;

/// Scratch memory of a pass, f32: only its kernels access it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scratch {
    /// Its purpose; unique within the pass.
    pub name: String,
    /// Number of elements.
    pub elements: i64,
}

impl Scratch {
    pub(crate) fn new(name: impl Into<String>, extents: &[i64]) -> Scratch {
        Scratch { name: name.into(), elements: extents.iter().fold(1, |product: i64, &n| product.saturating_mul(n)) }
    }
}

/// The contents of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    Q,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    K,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    V,
    /// Output; written by a forward pass, read by a backward pass.
    O,
    /// Gradient of the output.
    DO,
    /// Gradient of the queries; written.
    DQ,
    /// Gradient of the keys; written.
    DK,
    /// Gradient of the values; written.
    DV,
    /// Results that one kernel of a pass passes to another.
    Scratch(Scratch),
    /// Gradient of a declared parameter, dense; written.
    Gradient {
        /// The name of the parameter.
        name: String,
        /// Element type of the gradient.
        dtype: DType,
        /// Number of elements; one for a scalar.
        elements: i64,
    },
    /// The parameters of a call: [`Plan::params`].
    Params,
    /// The log-sum-exp of each row, f32; written by a forward pass, read by a backward pass.
    Stats,
    /// The largest score of each row, f32; written.
    RowMax,
    /// The sum of exponentials of each row, f32; written.
    SumExp,
    /// The number of queries of each batch entry, i32.
    SeqLenQ,
    /// The number of keys of each batch entry, i32.
    SeqLenKv,
    /// The declared scalars of these names in this order, f32.
    Scalars(Vec<String>),
    /// A declared tensor, dense.
    Declared {
        /// Its name.
        name: String,
        /// Element type; booleans are bytes.
        dtype: DType,
        /// Number of elements.
        elements: i64,
    },
}

/// A buffer of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The index to which it is bound.
    pub slot: u32,
    /// The MSL type of the argument.
    pub ty: String,
    /// Its contents.
    pub operand: Operand,
    /// Whether the kernel writes it.
    pub written: bool,
}

impl Binding {
    /// Binds a buffer for reading.
    pub(crate) fn read(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("const device {element}*"), operand, written: false }
    }

    /// Binds a buffer for writing.
    pub(crate) fn written(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("device {element}*"), operand, written: true }
    }

    /// Binds the structure of parameters.
    pub(crate) fn params(name: &str) -> Binding {
        Binding::constant(PARAMS_SLOT, &format!("{name}&"), Operand::Params)
    }

    /// Binds constants.
    pub(crate) fn constant(slot: u32, ty: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("constant {ty}"), operand, written: false }
    }
}

/// A kernel and its dispatch: everything except the buffers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The MSL source.
    pub source: String,
    /// The kernel's name in the source.
    pub entry: &'static str,
    /// Threadgroups along each axis of the grid.
    pub grid: [u32; 3],
    /// The most 32-bit registers per lane that the kernel's arrays take at a time; estimated, not from a compiler.
    pub registers: u32,
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Buffers, by slot.
    pub buffers: Vec<Binding>,
    /// Threadgroup memory, by slot: the MSL type of elements, and bytes.
    pub threadgroup: Vec<(&'static str, usize)>,
    pub(crate) params: Numbers,
}

/// The parts of a plan other than its source.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) registers: u32,
    pub(crate) buffers: Vec<Binding>,
    pub(crate) threadgroup: Vec<(&'static str, usize)>,
}

impl Cut {
    pub(crate) fn plan(self, source: String, entry: &'static str, params: Numbers) -> Plan {
        let Cut { grid, threads, registers, mut buffers, threadgroup } = self;
        buffers.sort_by_key(|b| b.slot);
        Plan { source, entry, grid, registers, threads, buffers, threadgroup, params }
    }
}

impl Plan {
    /// Returns the parameters of a call with this scale. For packed sequences, with this many tokens, or the problem's maximum.
    pub fn params(&self, attn_scale: f32, said: Option<Tokens>) -> Params {
        let scale = attn_scale.clamp(f32::MIN, f32::MAX);
        Params(match self.params {
            Numbers::Forward(params) => {
                let Tokens { queries, keys } = Tokens { queries: params.tokens_q, keys: params.tokens_kv }.up_to(said);
                Numbers::Forward(ForwardParams { scale, tokens_q: queries, tokens_kv: keys, ..params })
            }
            Numbers::Backward(params) => {
                let Tokens { queries, keys } = Tokens { queries: params.tokens_q, keys: params.tokens_kv }.up_to(said);
                Numbers::Backward(BackwardParams { scale, tokens_q: queries, tokens_kv: keys, ..params })
            }
            Numbers::Sum(params) => Numbers::Sum(params),
        })
    }
}

/// The kernels of a pass. Each runs after the one before has ended.
#[derive(Clone, Debug)]
pub struct Pass {
    /// The kernels, in order.
    pub plans: Vec<Plan>,
}

impl Pass {
    /// Returns the scratch memory of the pass. It needs no initialisation.
    pub fn scratch(&self) -> Vec<&Scratch> {
        let mut all: Vec<&Scratch> = Vec::new();
        for binding in self.plans.iter().flat_map(|plan| &plan.buffers) {
            if let Operand::Scratch(scratch) = &binding.operand
                && !all.contains(&scratch)
            {
                all.push(scratch);
            }
        }
        all
    }
}
