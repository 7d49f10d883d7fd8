//! A lowered pass: the graph, and what has to be bound to its tensors.

use super::Form;
use super::backward::Spelling;
use super::paged::Pages;
use cudnn_graph::ir::TensorId;
use cudnn_graph::{DType, Verified};
use sdpa_core::expr::Trace;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{Amax, Operand, Side, Statistic};

/// Numbers that a graph reads from device memory and that the executor supplies, such as the slopes of ALiBi.
#[derive(Clone, Debug, PartialEq)]
pub enum Table {
    /// binary32.
    F32(Vec<f32>),
    /// 32-bit integers.
    I32(Vec<i32>),
}

impl Table {
    /// Element type of the table.
    pub fn dtype(&self) -> DType {
        match self {
            Table::F32(_) => DType::F32,
            Table::I32(_) => DType::I32,
        }
    }

    /// Bytes of the table in memory.
    pub fn bytes(&self) -> u64 {
        4 * match self {
            Table::F32(x) => x.len() as u64,
            Table::I32(x) => x.len() as u64,
        }
    }
}

/// What engines are told of packed documents, beside their tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The tokens of each document, i32.
    Lengths(Side),
    /// Where each document begins in tensors of so many elements to a token, i64, with one number more for the end of the last.
    Offsets(Side, i64),
}

impl Told {
    /// Whether it is told of queries or of keys.
    pub fn side(self) -> Side {
        match self {
            Told::Lengths(side) | Told::Offsets(side, _) => side,
        }
    }
}

/// Lengths of batch entries as engines can take them, whatever the caller's memory holds: engines write as many rows as lengths say, also
/// past the end of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarded {
    /// Whether these are lengths of queries or of keys.
    pub of: Side,
    /// The extent: no length is more, and none is negative.
    pub most: i64,
    /// For engines that go wrong without keys: an entry without keys has one, and no queries.
    pub keyless: bool,
}

impl Guarded {
    /// The declared tensor of the lengths.
    pub fn param(self) -> &'static str {
        match self.of {
            Side::Queries => SEQ_LEN_Q,
            Side::Keys => SEQ_LEN_KV,
        }
    }
}

/// What is bound to a tensor besides operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Supply {
    /// One number in host memory: a function of declared scalars, computed at each call.
    Number(Trace),
    /// A declared tensor, by name.
    Param(String),
    /// A declared tensor, by name, as engines read it: truth values as numbers, and over more axes than it spans.
    Spread {
        /// Its name.
        name: String,
        /// Its element type in the caller's memory; a truth value is a byte.
        dtype: DType,
        /// Its extents there.
        dims: [i64; 4],
    },
    /// Lengths that lead no engine past the end of a tensor: see [`Guarded`].
    Guarded(Guarded),
    /// What engines are told of packed documents, computed on the device from their boundaries.
    Documents(Told),
    /// The page table of a cache, in pages as engines take them, none of which is outside of the containers.
    Pages(Pages),
    /// A table that the executor keeps in device memory.
    Table(Table),
    /// Device memory of the workspace, whose contents mean nothing to the caller.
    Scratch,
    /// The gradient of a declared parameter, by name.
    Gradient(String),
    /// The caller's memory for a largest magnitude.
    Amax(Amax),
    /// The terms of the gradient of a declared parameter, in the workspace: they lie over queries and keys, one or both of which the parameter does not
    /// span, and are summed afterwards. See [`Lowered::sums`].
    Terms {
        /// The name of the parameter.
        name: String,
        /// The extents of its gradient.
        dims: [i64; 4],
    },
}

/// The lengths of a side that are within its extent, where a graph reads such: clamped ones, and those of packed documents.
pub(crate) fn within(supplies: &[(TensorId, Supply)], side: Side) -> Option<TensorId> {
    let is = |supply: &Supply| match supply {
        Supply::Guarded(which) => which.of == side,
        Supply::Documents(told) => *told == Told::Lengths(side),
        Supply::Number(_)
        | Supply::Param(_)
        | Supply::Spread { .. }
        | Supply::Pages(_)
        | Supply::Table(_)
        | Supply::Scratch
        | Supply::Gradient(_)
        | Supply::Amax(_)
        | Supply::Terms { .. } => false,
    };
    supplies.iter().find(|(_, supply)| is(supply)).map(|(tensor, _)| *tensor)
}

/// A pass as a graph, and what is bound to its tensors at a call.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The graph of the attention itself.
    pub graph: Verified,
    /// How it is spelled.
    pub form: Form,
    /// How a backward pass in the composite form is spelled; `None` of others.
    pub spelling: Option<Spelling>,
    /// The tensor of each strided operand.
    pub operands: Vec<(Operand, TensorId)>,
    /// The tensor of the scale that scores are multiplied by: one f32 from host memory.
    pub attn_scale: TensorId,
    /// The tensor of `stats`: f32 (batch, heads_q, seq_q, 1).
    pub stats: Option<TensorId>,
    /// The tensor of the largest score of each row: f32 (batch, heads_q, seq_q, 1).
    pub row_max: Option<TensorId>,
    /// The tensor of the sum of exponentials of each row: f32 (batch, heads_q, seq_q, 1).
    pub sum_exp: Option<TensorId>,
    /// The tensor of the sums of `o · d_o` of each row, in the workspace of a backward pass in the composite form.
    pub row_sum: Option<TensorId>,
    /// Tokens of queries and of keys that a packed call has at most: what tensors in the workspace have room for.
    pub totals: [i64; 2],
    /// Every other tensor that has to be bound, and what is bound to it.
    pub supplies: Vec<(TensorId, Supply)>,
}

impl Lowered {
    /// The tensor of an operand.
    pub fn operand(&self, operand: Operand) -> Option<TensorId> {
        self.operands.iter().find(|(o, _)| *o == operand).map(|(_, id)| *id)
    }

    /// The tensor of a row statistic.
    pub fn statistic(&self, statistic: Statistic) -> Option<TensorId> {
        match statistic {
            Statistic::Stats => self.stats,
            Statistic::RowMax => self.row_max,
            Statistic::SumExp => self.sum_exp,
        }
    }

    /// Which documents' offsets a tensor has.
    fn side(&self, offsets: TensorId) -> Option<Side> {
        self.supplies.iter().find(|(id, _)| *id == offsets).and_then(|(_, supply)| {
            let Supply::Documents(told) = supply else { return None };
            Some(told.side())
        })
    }

    /// Bytes of device memory that a tensor's elements reach; of packed documents, with all the tokens that a call has at most.
    pub fn bytes(&self, id: TensorId) -> u64 {
        self.graph.graph().get(id).map_or(0, |t| {
            let mut dims = t.dims.0.clone();
            if let (Some(side), [batch, _, seq, _]) = (t.ragged.and_then(|ragged| self.side(ragged.offsets)), &mut dims[..]) {
                (*batch, *seq) = (1, self.totals[side as usize]);
            }
            let elements = t.strides.extent(&dims.into()).and_then(|n| u64::try_from(n).ok());
            t.dtype.bytes(elements.unwrap_or(0))
        })
    }
}
