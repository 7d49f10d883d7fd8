//! What problems and plans are made of.

use crate::packed::Tokens;
use crate::params::{BackwardParams, ForwardParams, Numbers, Params};
use crate::source::PARAMS_SLOT;
use sdpa_core::DType;

/// Memory of a pass, f32: only its kernels write and read it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scratch {
    /// What it is for; no other memory of the pass has this name.
    pub name: String,
    /// How many elements.
    pub elements: i64,
}

impl Scratch {
    pub(crate) fn new(name: impl Into<String>, extents: &[i64]) -> Scratch {
        Scratch { name: name.into(), elements: extents.iter().fold(1, |product: i64, &n| product.saturating_mul(n)) }
    }
}

/// What a buffer holds.
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
    /// What one kernel of a pass leaves to another.
    Scratch(Scratch),
    /// Gradient of a declared parameter, dense; written.
    Gradient {
        /// The name of the parameter.
        name: String,
        /// Element type of the gradient.
        dtype: DType,
        /// How many elements: one of a scalar.
        elements: i64,
    },
    /// The numbers of a call: [`Plan::params`].
    Params,
    /// The natural logarithm of each row's sum of exponentials, f32; written by a forward pass, read by a backward pass.
    Stats,
    /// The largest score of each row, f32; written.
    RowMax,
    /// The sum of exponentials of each row, f32; written.
    SumExp,
    /// How many queries each batch entry has, i32.
    SeqLenQ,
    /// How many keys each batch entry has, i32.
    SeqLenKv,
    /// The declared scalars of these names in this order, f32.
    Scalars(Vec<String>),
    /// A declared tensor, dense.
    Declared {
        /// Its name.
        name: String,
        /// Element type; truth values are bytes.
        dtype: DType,
        /// How many elements.
        elements: i64,
    },
}

/// A buffer of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The index that it is bound at.
    pub slot: u32,
    /// The MSL type of the argument.
    pub ty: String,
    /// What it holds.
    pub operand: Operand,
    /// Whether the kernel writes it.
    pub written: bool,
}

impl Binding {
    /// A buffer that is read.
    pub(crate) fn read(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("const device {element}*"), operand, written: false }
    }

    /// A buffer that is written.
    pub(crate) fn written(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("device {element}*"), operand, written: true }
    }

    /// The structure of parameters.
    pub(crate) fn params(name: &str) -> Binding {
        Binding::constant(PARAMS_SLOT, &format!("{name}&"), Operand::Params)
    }

    /// Constants.
    pub(crate) fn constant(slot: u32, ty: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("constant {ty}"), operand, written: false }
    }
}

/// A kernel and its dispatch: everything that is needed besides the buffers themselves.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The MSL text.
    pub source: String,
    /// The kernel in it.
    pub entry: &'static str,
    /// Threadgroups along each axis of the grid.
    pub grid: [u32; 3],
    /// 32-bit registers of a lane that the arrays of the kernel take, at most at a time; counted, not by a compiler.
    pub registers: u32,
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Buffers, by their slots.
    pub buffers: Vec<Binding>,
    /// Threadgroup memory, by its slots: the MSL type of elements, and bytes.
    pub threadgroup: Vec<(&'static str, usize)>,
    pub(crate) params: Numbers,
}

/// What a plan has besides its source.
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
    /// The parameters of a call with this scale; of packed documents, with so many tokens, or as many as there may be.
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

/// The kernels that a pass runs, in order: each after all of the one before.
#[derive(Clone, Debug)]
pub struct Pass {
    /// The kernels, in the order in which they run.
    pub plans: Vec<Plan>,
}

impl Pass {
    /// The memory that kernels leave results in for others; nothing needs to be in it before.
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
