//! Numbers that kernels with `mma.sync` are told, of both passes.

use crate::params::params;
use sdpa_core::spec::TensorSpec;

/// A tensor of any strides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Strided {
    /// Address of the first element.
    pub at: u64,
    /// Strides in elements: from one batch entry, head, row and column to the next.
    pub strides: [i64; 4],
}

impl Strided {
    /// The structure in CUDA C++, of the same layout.
    pub(super) const CUDA: &str = "struct Strided {\n    Element* at;\n    long batch;\n    long head;\n    long row;\n    long dim;\n};\n";

    /// A tensor at an address; where it is packed, tokens of all documents are its rows.
    pub(crate) fn of(at: u64, tensor: &TensorSpec, packed: bool) -> Strided {
        let [batch, head, row, dim] = tensor.strides;
        Strided { at, strides: [if packed { 0 } else { batch }, head, row, dim] }
    }
}

params! {
    /// What the kernels are told of a call: operands, addresses in device memory, then numbers. A forward pass leaves out what is of gradients.
    MmaParams {
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
        /// Address of the log-sum-exp of each row, f32 (batch, heads_q, seq_q): forward it is written, where anybody asks.
        stats: u64 = "float* ",
        /// Address that the largest score of each row goes to, as `stats` lies.
        row_max: u64 = "float* ",
        /// Address that the sum of exponentials of each row goes to, as `stats` lies.
        sum_exp: u64 = "float* ",
        /// Address of the stats in units of the exponent of 2, as `stats` lies.
        lse: u64 = "float* ",
        /// Address of the log-sum-exps as two f32 each, a score and the rest in base 2, in the order of `stats`.
        exact: u64 = "float2* ",
        /// Address of the sums of `o` times `d_o`, as `stats` lies.
        delta: u64 = "float* ",
        /// Address of the lengths of queries, i32 for each batch entry.
        seq_len_q: u64 = "const int* ",
        /// Address of the lengths of keys, i32 for each batch entry.
        seq_len_kv: u64 = "const int* ",
        /// Address of the boundaries of documents of queries.
        boundaries_q: u64 = "const void* ",
        /// Address of the boundaries of documents of keys.
        boundaries_kv: u64 = "const void* ",
        /// Address of the sinks, f32 for each query head.
        sink: u64 = "const float* ",
        /// Address of the gradient of the sinks, f32 for each query head.
        sink_gradient: u64 = "float* ",
        /// Address of where each list begins in `map_blocks`, u32.
        map_begin: u64 = "const uint* ",
        /// Address of where they end.
        map_end: u64 = "const uint* ",
        /// Address of blocks of the other side, u32, the highest bit set where a rule may drop a part of one.
        map_blocks: u64 = "const uint* ",
        /// Address of the page table, i32 for each page of each batch entry.
        page_table: u64 = "const int* ",
        /// Address of the seed of dropout, i64, of a call that has one.
        dropout_seed: u64 = "const ulong64* ",
        /// Address of where its random numbers begin, i64.
        dropout_offset: u64 = "const ulong64* ",
        /// Batch entries.
        batch: i32 = "int ",
        /// Query heads.
        heads_q: i32 = "int ",
        /// Query heads that share a key head.
        group: i32 = "int ",
        /// Queries.
        seq_q: i32 = "int ",
        /// Keys.
        seq_kv: i32 = "int ",
        /// Tokens of packed queries.
        tokens_q: i32 = "int ",
        /// Tokens of packed keys.
        tokens_kv: i32 = "int ",
        /// Columns of queries and keys.
        dim_qk: i32 = "int ",
        /// Columns of values and outputs.
        dim_v: i32 = "int ",
        /// Tiles of queries.
        tiles: i32 = "int ",
        /// Blocks of keys.
        blocks: i32 = "int ",
        /// Heads of batch entries whose keys and values are walked over side by side.
        section: i32 = "int ",
        /// Rows of the map from one batch entry to the next, in units of the lists of a head; 0 where all have the same.
        map_batch: i32 = "int ",
        /// Rows of the map from one head to the next, in units of the lists of a head; 0 where all have the same.
        map_head: i32 = "int ",
        /// Keys at `k - q <= lower` are dropped.
        lower: i32 = "int ",
        /// Keys at `k - q > upper` are dropped.
        upper: i32 = "int ",
        /// Keys at `k > q` and `k >= prefix` are dropped.
        prefix: i32 = "int ",
        /// Keys at `(k - q) - (len_kv - len_q) <= ends_lower` are dropped.
        ends_lower: i32 = "int ",
        /// Keys at `(k - q) - (len_kv - len_q) > ends_upper` are dropped.
        ends_upper: i32 = "int ",
        /// Whether scores are multiplied by `scale` before anything else: 1 or 0.
        natural: i32 = "int ",
        /// `attn_scale`.
        scale: f32 = "float ",
        /// What a score is multiplied by in the exponent of 2: positive.
        unit: f32 = "float ",
        /// The largest random number with which a weight stays.
        dropout_most: i32 = "int ",
        /// What weights that stay are multiplied by.
        dropout_scale: f32 = "float ",
        /// Keys of a page.
        page_size: i32 = "int ",
        /// Pages of the containers.
        pages: i32 = "int ",
        /// Entries of the page table from one batch entry to the next.
        table_row: i32 = "int ",
    }
}
