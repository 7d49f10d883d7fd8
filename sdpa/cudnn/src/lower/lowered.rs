//! A lowered pass: its graph, and the memory and numbers to bind to the graph's tensors.

use super::Form;
use super::backward::Spelling;
use super::paged::Pages;
use cudnn_graph::ir::TensorId;
use cudnn_graph::{DType, Verified};
use sdpa_core::expr::Trace;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{Amax, Operand, Side, Statistic};

/// A table of numbers that the executor supplies and a graph reads from device memory, such as ALiBi slopes.
#[derive(Clone, Debug, PartialEq)]
pub enum Table {
    /// A table of f32 numbers.
    F32(Vec<f32>),
    /// A table of i32 numbers.
    I32(Vec<i32>),
}

impl Table {
    /// Returns the element type of the table.
    pub fn dtype(&self) -> DType {
        match self {
            Table::F32(_) => DType::F32,
            Table::I32(_) => DType::I32,
        }
    }

    /// Returns the size of the table in memory, in bytes.
    pub fn bytes(&self) -> u64 {
        4 * match self {
            Table::F32(x) => x.len() as u64,
            Table::I32(x) => x.len() as u64,
        }
    }
}

/// Lengths or offsets of packed sequences, which a kernel computes from `cu_seqlens` and engines read in addition to the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The length of each sequence of queries or keys, in tokens, i32.
    Lengths(Side),
    /// The offset of each sequence of queries or keys, and the end of the last one, in elements, i64. The number is the elements per
    /// token of the tensors to which the offsets apply.
    Offsets(Side, i64),
}

impl Told {
    /// Returns whether the lengths or offsets are those of queries or of keys.
    pub fn side(self) -> Side {
        match self {
            Told::Lengths(side) | Told::Offsets(side, _) => side,
        }
    }
}

/// Per-sequence lengths, clamped to values that engines can handle. Without clamping, a large length would make engines write past the
/// end of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarded {
    /// Whether these are lengths of queries or of keys.
    pub of: Side,
    /// The maximum length on this side, queries or keys. Lengths are clamped to the range from 0 to this value.
    pub most: i64,
    /// True if the engines compute wrong results for sequences without keys. Such a sequence then gets one key and no queries.
    pub keyless: bool,
}

impl Guarded {
    /// Returns the name of the declared parameter with the lengths.
    pub fn param(self) -> &'static str {
        match self.of {
            Side::Queries => SEQ_LEN_Q,
            Side::Keys => SEQ_LEN_KV,
        }
    }
}

/// The source of the contents of a tensor that is not an operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Supply {
    /// A scalar in host memory: a function of declared scalars, which is computed at each call.
    Number(Trace),
    /// The caller's tensor for the declared parameter of this name.
    Param(String),
    /// The declared tensor of this name, converted for engines: booleans become numbers, and the tensor is broadcast over more axes.
    Spread {
        /// The name of the tensor.
        name: String,
        /// The element type in the caller's memory; a boolean is a byte.
        dtype: DType,
        /// The extents of the tensor in the caller's memory.
        dims: [i64; 4],
    },
    /// Per-sequence lengths, clamped to values that engines can handle.
    Guarded(Guarded),
    /// Lengths or offsets of packed sequences, computed on the device from `cu_seqlens`.
    Documents(Told),
    /// The page table in units of engine pages, into which the caller's pages are divided. Every page number is clamped to the pool.
    Pages(Pages),
    /// A table that the executor keeps in device memory.
    Table(Table),
    /// Workspace memory, whose contents the caller neither supplies nor reads.
    Scratch,
    /// The caller's memory for the gradient of the declared parameter of this name.
    Gradient(String),
    /// The caller's memory for an amax.
    Amax(Amax),
    /// The terms of the gradient of a declared parameter, in the workspace. They span queries and keys. Later steps sum them over the
    /// axes that the parameter does not span: see [`Lowered::sums`].
    Terms {
        /// The name of the declared parameter.
        name: String,
        /// The extents of the parameter's gradient.
        dims: [i64; 4],
    },
}

/// Returns the tensor of query or key lengths that are known to be within the extent: clamped lengths, or those of packed sequences.
/// `None` if the graph has no such tensor.
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

/// A pass as a graph, and the source of the contents of each tensor of the graph.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The graph of the attention itself.
    pub graph: Verified,
    /// The form of the graph: composite or unified.
    pub form: Form,
    /// The graph pattern of a backward pass in the composite form; `None` for other passes.
    pub spelling: Option<Spelling>,
    /// Each strided operand of the pass, with its tensor in the graph.
    pub operands: Vec<(Operand, TensorId)>,
    /// The tensor of the scale that scores are multiplied by: one f32 from host memory.
    pub attn_scale: TensorId,
    /// The tensor of `stats`: f32 (batch, heads_q, seq_q, 1); `None` if the graph has none.
    pub stats: Option<TensorId>,
    /// The tensor of the largest score of each row: f32 (batch, heads_q, seq_q, 1); `None` if the graph has none.
    pub row_max: Option<TensorId>,
    /// The tensor of the sum of exponentials of each row: f32 (batch, heads_q, seq_q, 1); `None` if the graph has none.
    pub sum_exp: Option<TensorId>,
    /// The workspace tensor with the sum of `o · d_o` of each row; only for backward passes in the composite form.
    pub row_sum: Option<TensorId>,
    /// The largest numbers of query and key tokens in a packed call, which determine the size of workspace tensors.
    pub totals: [i64; 2],
    /// Every tensor that is neither an operand nor a row statistic but needs memory or a number, with the source of its contents.
    pub supplies: Vec<(TensorId, Supply)>,
}

impl Lowered {
    /// Returns the tensor of an operand; `None` if the pass does not have the operand.
    pub fn operand(&self, operand: Operand) -> Option<TensorId> {
        self.operands.iter().find(|(o, _)| *o == operand).map(|(_, id)| *id)
    }

    /// Returns the tensor of a row statistic; `None` if the pass does not have it.
    pub fn statistic(&self, statistic: Statistic) -> Option<TensorId> {
        match statistic {
            Statistic::Stats => self.stats,
            Statistic::RowMax => self.row_max,
            Statistic::SumExp => self.sum_exp,
        }
    }

    /// Returns the side that a tensor of offsets describes.
    fn side(&self, offsets: TensorId) -> Option<Side> {
        self.supplies.iter().find(|(id, _)| *id == offsets).and_then(|(_, supply)| {
            let Supply::Documents(told) = supply else { return None };
            Some(told.side())
        })
    }

    /// Returns the size of the device memory that a tensor's elements span, in bytes. For packed sequences, this assumes the largest
    /// number of tokens of a call.
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
