//! Paged KV cache: the page pools, and the page table by which engines find keys and values.

use super::expr::Draft;
use super::lowered::Supply;
use super::{LowerError, transposed};
use cudnn_graph::DType;
use cudnn_graph::ir::op::{Op, PagedLoad};
use cudnn_graph::ir::{Tensor, TensorId};
use sdpa_core::problem::Problem;
use sdpa_core::spec::TensorSpec;
use sdpa_core::{Operand, Paged};

/// The pages that cuDNN's engines read. Each has a power of two of tokens. A page of another size is divided into several contiguous
/// engine pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Number of tokens per engine page.
    pub tokens: i64,
    /// Number of engine pages into which each page of the caller is divided.
    pub parts: i64,
}

impl Pages {
    /// Returns the engine pages for a problem; `None` if the problem is not paged, or if its pages cannot be divided into engine pages.
    pub fn of(problem: &Problem) -> Option<Pages> {
        let paged = problem.paged()?;
        let tokens = 1 << paged.page_size.trailing_zeros();
        let parts = paged.page_size / tokens;
        let even = |tensor: &TensorSpec| tensor.strides[0] == paged.page_size * tensor.strides[2];
        (parts == 1 || even(problem.k()) && even(problem.v())).then_some(Pages { tokens, parts })
    }

    /// Returns the number of engine pages of a batch entry with `seq_kv` keys.
    pub fn per_entry(self, seq_kv: i64) -> i64 {
        seq_kv.unsigned_abs().div_ceil(self.tokens.unsigned_abs()) as i64
    }

    fn container(self, paged: &Paged, tensor: &TensorSpec) -> TensorSpec {
        let [page, head, token, element] = tensor.strides;
        let dims = [paged.pages * self.parts, tensor.dims[1], self.tokens, tensor.dims[3]];
        TensorSpec { dims, strides: [page / self.parts, head, token, element], alignment: tensor.alignment }
    }
}

/// Inputs of a paged load: the page table and the lengths of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub(super) entries: TensorId,
    pub(super) lengths: TensorId,
}

/// The rule that the page size breaks if the caller's pages cannot be divided into engine pages, of a power of two of tokens.
pub(crate) const UNEVEN: &str = "a power of two, or pages stored without gaps as (pages, page_size, heads_kv, dim)";

/// Returns the page pool of an operand as a tensor of engine pages; other operands unchanged.
pub(super) fn container(problem: &Problem, operand: Operand, tensor: &TensorSpec) -> TensorSpec {
    match (problem.paged(), Pages::of(problem), operand) {
        (Some(paged), Some(pages), Operand::K | Operand::V) => pages.container(paged, tensor),
        (_, _, _) => *tensor,
    }
}

/// Declares the page table, and returns it with the lengths of keys: those of the masks, or the extent for every batch entry.
pub(super) fn table(to: &mut Draft<'_>, problem: &Problem, lengths: Option<TensorId>) -> Result<Option<Table>, LowerError> {
    if problem.paged().is_none() {
        return Ok(None);
    }
    let pages = Pages::of(problem).ok_or_else(|| LowerError::Unsupported(format!("paged.page_size: expected {UNEVEN}")))?;
    let dims = [problem.batch(), 1, pages.per_entry(problem.seq_kv()), 1];
    let entries = to.graph.tensor(Tensor::device("page_table", DType::I32, dims));
    to.supplies.push((entries, Supply::Pages(pages)));
    let lengths = lengths.unwrap_or_else(|| all(to, "seq_len_kv_all", problem.batch(), problem.seq_kv()));
    Ok(Some(Table { entries, lengths }))
}

/// Declares a table with the same length for each batch entry.
pub(super) fn all(to: &mut Draft<'_>, name: &str, batch: i64, length: i64) -> TensorId {
    let tensor = to.graph.tensor(Tensor::device(name, DType::I32, [batch, 1, 1, 1]));
    let length = i32::try_from(length).unwrap_or(i32::MAX);
    to.supplies.push((tensor, Supply::Table(super::Table::I32(vec![length; batch as usize]))));
    tensor
}

/// Emits a paged load of keys or values; keys as columns.
pub(super) fn load(to: &mut Draft<'_>, problem: &Problem, table: Table, container: TensorId, operand: Operand) -> TensorId {
    let [batch, heads, seq_kv] = [problem.batch(), problem.heads_kv(), problem.seq_kv()];
    let dim = if operand == Operand::K { problem.dim_qk() } else { problem.dim_v() };
    let (dims, strides) = ([batch, heads, seq_kv, dim], [heads * seq_kv * dim, seq_kv * dim, dim, 1]);
    let ordered = Tensor::virtual_(format!("{operand}_in_order"), super::dtype(problem.dtype()), dims).strides(strides);
    let y = to.graph.tensor(if operand == Operand::K { transposed(ordered) } else { ordered });
    to.graph.push(Op::PagedLoad(PagedLoad { container, seq_len: table.lengths, page_table: table.entries, y }));
    y
}
