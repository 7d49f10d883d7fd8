//! Parameters of the `mma.sync` kernels, forward and backward.

use crate::params::params;
use crate::schedule::Address;
use crate::schedule::arguments::{Arguments, Member};
use sdpa_core::Operand;
use sdpa_core::spec::TensorSpec;

/// A four-dimensional tensor with any strides, as the kernels receive it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strided {
    /// Address of the first element.
    at: Address,
    /// Distances between batch entries, heads, rows and columns, in elements.
    strides: [i64; 4],
}

impl Member for Strided {
    fn push(&self, to: &mut Arguments) {
        self.at.push(to);
        self.strides.iter().for_each(|stride| stride.push(to));
    }
}

impl Strided {
    /// The structure in CUDA C++, with the same layout.
    pub(super) const CUDA: &str = "struct Strided {\n    Element* at;\n    long batch;\n    long head;\n    long row;\n    long dim;\n};\n";

    /// A null tensor, for an operand that the kernels of the pass do not read.
    pub(crate) const NONE: Strided = Strided { at: Address::Null, strides: [0; 4] };

    /// Describes an operand for the kernels. For a packed operand, the rows are the tokens of all sequences.
    pub(crate) fn of(operand: Operand, tensor: &TensorSpec, packed: bool) -> Strided {
        let [batch, head, row, dim] = tensor.strides;
        Strided { at: Address::Operand(operand), strides: [if packed { 0 } else { batch }, head, row, dim] }
    }
}

params! {
    /// The parameters of the forward and backward kernels: operands, device addresses, then numbers.
    MmaParams as "MmaParams" {
        /// Queries.
        q: Strided = "Strided ",
        /// Keys.
        k: Strided = "Strided ",
        /// Values.
        v: Strided = "Strided ",
        /// Outputs.
        o: Strided = "Strided ",
        /// Gradients of outputs.
        d_o: Strided = "Strided ",
        /// Gradients of queries.
        dq: Strided = "Strided ",
        /// Gradients of keys.
        dk: Strided = "Strided ",
        /// Gradients of values.
        dv: Strided = "Strided ",
        /// Address of the log-sum-exp of each row, f32 (batch, heads_q, seq_q). The forward pass writes it on request.
        stats: Address = "float* ",
        /// Destination of the largest score of each row, in the order of `stats`.
        row_max: Address = "float* ",
        /// Destination of the sum of exponentials of each row, in the order of `stats`.
        sum_exp: Address = "float* ",
        /// Address of the log-sum-exp of each row in base 2, in the order of `stats`.
        lse: Address = "float* ",
        /// Address of the log-sum-exp of each row as two f32, in the order of `stats`: the largest score, and the base-2 logarithm of the
        /// sum of exponentials relative to it.
        exact_lse: Address = "float2* ",
        /// Address of delta, the row sums of `o` times `d_o`, in the order of `stats`.
        delta: Address = "float* ",
        seq_len_q,
        seq_len_kv,
        boundaries_q,
        boundaries_kv,
        sink,
        /// Address of the gradient of the sinks, one f32 per query head.
        sink_gradient: Address = "float* ",
        block_list_begin,
        block_list_end,
        block_list,
        /// Address of the page table, one i32 per page of each batch entry.
        page_table: Address = "const int* ",
        dropout_seed,
        dropout_offset,
        batch,
        heads_q,
        group,
        seq_q,
        seq_kv,
        tokens_q,
        tokens_kv,
        /// Number of columns of queries and keys.
        dim_qk: i32 = "int ",
        dim_v,
        tiles,
        /// Number of KV blocks.
        blocks: i32 = "int ",
        section_heads,
        block_list_batch,
        block_list_head,
        lower,
        upper,
        prefix,
        ends_lower,
        ends_upper,
        natural,
        scale,
        softmax_scale_log2,
        dropout_threshold,
        dropout_scale,
        /// Number of tokens per page of the paged KV cache.
        page_size: i32 = "int ",
        /// Number of pages in each page pool of the paged KV cache.
        pages: i32 = "int ",
        /// Number of page-table entries per batch entry.
        table_row: i32 = "int ",
    }
}

/// The parameters of backward passes only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradients {
    pub(super) d_o: Strided,
    pub(super) dq: Strided,
    pub(super) dk: Strided,
    pub(super) dv: Strided,
    pub(super) lse: Address,
    pub(super) exact: Address,
    pub(super) delta: Address,
    pub(super) sink_gradient: Address,
}

impl Gradients {
    /// Parameters of a forward pass.
    pub(super) const NONE: Gradients = Gradients {
        d_o: Strided::NONE,
        dq: Strided::NONE,
        dk: Strided::NONE,
        dv: Strided::NONE,
        lse: Address::Null,
        exact: Address::Null,
        delta: Address::Null,
        sink_gradient: Address::Null,
    };
}
