//! Types of plans: operands, buffer bindings, kernels with their dispatches, and passes.

use crate::packed::Tokens;
use crate::params::{BackwardParams, ForwardParams, Numbers, Params};
use crate::source::PARAMS_SLOT;
use sdpa_core::DType;

/// An f32 scratch buffer of a pass, which only kernels of the pass access.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scratch {
    /// The purpose of the buffer, a name that is unique within the pass.
    pub name: String,
    /// Number of elements.
    pub elements: i64,
}

impl Scratch {
    pub(crate) fn new(name: impl Into<String>, extents: &[i64]) -> Scratch {
        Scratch { name: name.into(), elements: extents.iter().fold(1, |product: i64, &n| product.saturating_mul(n)) }
    }
}

/// The tensor or the parameters in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    Q,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    K,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    V,
    /// Output, (batch, heads_q, seq_q, dim_v). A forward pass writes it, and a backward pass reads it.
    O,
    /// Gradient of the output, (batch, heads_q, seq_q, dim_v).
    DO,
    /// Gradient of the queries, (batch, heads_q, seq_q, dim_qk), which a backward pass writes.
    DQ,
    /// Gradient of the keys, (batch, heads_kv, seq_kv, dim_qk), which a backward pass writes.
    DK,
    /// Gradient of the values, (batch, heads_kv, seq_kv, dim_v), which a backward pass writes.
    DV,
    /// A scratch buffer, in which one kernel of a pass passes results to another.
    Scratch(Scratch),
    /// The dense gradient of a declared parameter, which a backward pass writes.
    Gradient {
        /// The name of the parameter.
        name: String,
        /// Element type of the gradient.
        dtype: DType,
        /// Number of elements; 1 for a scalar.
        elements: i64,
    },
    /// The parameter structure of a kernel in a call, from [`Plan::params`].
    Params,
    /// The log-sum-exp of each row, f32. A forward pass writes it, and a backward pass reads it.
    Stats,
    /// The largest score of each row, f32, which a forward pass writes.
    RowMax,
    /// The sum of exponentials of each row, f32, which a forward pass writes.
    SumExp,
    /// The number of queries of each batch entry, i32.
    SeqLenQ,
    /// The number of keys of each batch entry, i32.
    SeqLenKv,
    /// The values of the declared scalars of these names, in this order, f32.
    Scalars(Vec<String>),
    /// A declared tensor, dense.
    Declared {
        /// The name of the declared tensor.
        name: String,
        /// Element type; booleans are bytes.
        dtype: DType,
        /// Number of elements.
        elements: i64,
    },
}

/// The binding of a buffer to a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The index to which the buffer is bound.
    pub slot: u32,
    /// The MSL type of the kernel's argument.
    pub ty: String,
    /// The contents of the buffer.
    pub operand: Operand,
    /// Whether the kernel writes the buffer.
    pub written: bool,
}

impl Binding {
    /// Returns the binding of a buffer that a kernel reads, with elements of this MSL type.
    pub(crate) fn read(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("const device {element}*"), operand, written: false }
    }

    /// Returns the binding of a buffer that a kernel writes, with elements of this MSL type.
    pub(crate) fn written(slot: u32, element: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("device {element}*"), operand, written: true }
    }

    /// Returns the binding of a kernel's parameter structure, whose MSL name is `name`.
    pub(crate) fn params(name: &str) -> Binding {
        Binding::constant(PARAMS_SLOT, &format!("{name}&"), Operand::Params)
    }

    /// Returns the binding of a buffer in MSL's constant address space.
    pub(crate) fn constant(slot: u32, ty: &str, operand: Operand) -> Binding {
        Binding { slot, ty: format!("constant {ty}"), operand, written: false }
    }
}

/// A kernel and its dispatch, without the buffers themselves.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The MSL source of the kernel.
    pub source: String,
    /// The name of the kernel in the source.
    pub entry: &'static str,
    /// Number of threadgroups along each axis of the grid.
    pub grid: [u32; 3],
    /// The largest number of 32-bit registers per lane that the kernel's arrays take at a time. It is an estimate, not the number of a
    /// compiler.
    pub registers: u32,
    /// Number of threads per threadgroup.
    pub threads: u32,
    /// The buffers that the kernel accesses, by slot.
    pub buffers: Vec<Binding>,
    /// The threadgroup memory of the kernel, by slot: the MSL type of its elements, and its size in bytes.
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
    /// Returns the parameters of a call with this scale. For packed sequences, `said` is the number of tokens; `None` means the problem's
    /// maximum.
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

/// The kernels of a forward or backward pass. Each kernel runs after the one before it has ended.
#[derive(Clone, Debug)]
pub struct Pass {
    /// The kernels, in order.
    pub plans: Vec<Plan>,
}

impl Pass {
    /// Returns the scratch buffers of the pass. They need no initialisation.
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
