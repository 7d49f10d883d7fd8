//! Parameters of the WGMMA kernels.

use crate::params::params;
use crate::schedule::Address;

params! {
    /// The parameters of the WGMMA forward kernels in addition to tensor maps: device addresses, strides in elements, then numbers.
    ForwardParams as "Params" {
        /// Destination of the log-sum-exp of each row, f32 (batch, heads_q, seq_q); 0 if it is not requested.
        stats: Address = "float* ",
        /// Destination of the largest score of each row, in the order of `stats`.
        row_max: Address = "float* ",
        /// Destination of the sum of exponentials of each row, in the order of `stats`.
        sum_exp: Address = "float* ",
        seq_len_q,
        seq_len_kv,
        sink,
        block_list_begin,
        block_list_end,
        block_list,
        /// Address of the tile counter, i32, from which each CTA takes its tiles after the first; it is 0 when the kernel begins. The
        /// number of items in the tile list, i32, follows the counter.
        tile_counter: Address = "int* ",
        /// Address of the tile list, if there is one.
        tile_items: Address = "TileItem* ",
        /// Address of the index in `tile_items` of the first item of each tile of each batch entry, i32, for split-KV.
        first_items: Address = "int* ",
        /// Address of the outputs of splits: f32 (item of the tile list, head or group of heads, row of a tile, column of the tile).
        split_o: Address = "float* ",
        /// Address of the log-sum-exps of splits, two f32 each: origin, and base-2 logarithm of the sum relative to it (item, head or
        /// group of heads, row of a tile).
        split_lse: Address = "float2* ",
        /// Address of the row maxima of splits, f32 in the order of `split_lse`; 0 if no row statistic needs them.
        split_row_max: Address = "float* ",
        /// Address of the output, for tiles that do not store it with TMA.
        o: Address = "void* ",
        /// Batch stride of the output, in elements.
        o_batch: i64 = "long ",
        /// Head stride of the output, in elements.
        o_head: i64 = "long ",
        /// Query stride of the output, in elements.
        o_row: i64 = "long ",
        /// Address of the page table, one i32 per page of each batch entry.
        page_table: Address = "const int* ",
        boundaries_q,
        boundaries_kv,
        dropout_seed,
        dropout_offset,
        batch,
        heads_q,
        group,
        seq_q,
        seq_kv,
        dim_v,
        /// Number of heads of a batch entry, or of packed GQA groups of heads.
        head_groups: i32 = "int ",
        /// Number of tiles that cover the query heads of a GQA group.
        head_tiles: i32 = "int ",
        /// The requested number of splits over all tiles; some tiles have one more.
        max_splits: i32 = "int ",
        /// Number of tokens per page of the paged KV cache.
        page_size: i32 = "int ",
        /// Number of pages in each page pool of the paged KV cache.
        pages: i32 = "int ",
        /// Number of page-table entries per batch entry.
        table_row: i32 = "int ",
        tokens_q,
        tokens_kv,
        /// The largest number of items that the tile list can hold.
        max_items: i32 = "int ",
        tiles,
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
    }
}

params! {
    /// The parameters of the WGMMA backward kernels in addition to tensor maps: device addresses, strides in elements, then numbers.
    BackwardParams as "BackwardParams" {
        /// Address of the log-sum-exp of each row, f32 (batch, heads_q, seq_q).
        stats: Address = "const float* ",
        /// Address of the output.
        o: Address = "const void* ",
        /// Address of the gradient of the output.
        d_o: Address = "const void* ",
        /// Address of a copy of `d_o` that TMA can read: (batch, heads_q, seq_q, `copy_row`); 0 if TMA reads `d_o` itself.
        d_o_copy: Address = "Element* ",
        /// Address of the gradient of the queries.
        dq: Address = "void* ",
        /// Number of packed query tokens for which the call has memory.
        lse: Address = "float* ",
        /// Address of the log-sum-exp of each row as two f32, in the order of `lse`: the largest score, and the base-2 logarithm of the
        /// sum of exponentials relative to it.
        exact_lse: Address = "float2* ",
        /// Address of an i32 flag: whether any log-sum-exp is so large that kernels must use `exact_lse`. It is 0 when the kernels begin.
        any_large_lse: Address = "int* ",
        /// Address of the queries.
        q: Address = "const void* ",
        /// Address of the keys.
        k: Address = "const void* ",
        /// Address of delta, the row sums of `o` times `d_o`, in the order of `lse`.
        delta: Address = "float* ",
        /// Address of the f32 dQ accumulator, in the order in which threads hold its elements; it is 0 when the kernels begin.
        dq_accum: Address = "float* ",
        /// Address of the f32 accumulators of dK and dV that several CTAs share, in the order in which threads hold the elements; 0 when
        /// the kernels begin. In a deterministic pass each of these CTAs has its own.
        dkv_accum: Address = "float* ",
        /// Address of the number of CTAs that have finished their share of each KV block, i32; 0 when the kernels begin.
        splits_done: Address = "int* ",
        /// Address of the counter from which CTAs take work items, i32; 0 when the kernels begin.
        tile_counter: Address = "int* ",
        /// Address of the number of finished KV blocks, one i32 per head section; 0 when the kernels begin.
        blocks_done: Address = "int* ",
        /// Address of the number of converted dQ accumulator slices, one i32 per head section; 0 when the kernels begin.
        slices_converted: Address = "int* ",
        seq_len_q,
        seq_len_kv,
        boundaries_q,
        boundaries_kv,
        sink,
        /// Address of the gradient of the sinks, one f32 per query head; 0 when the kernels begin.
        sink_gradient: Address = "float* ",
        block_list_begin,
        block_list_end,
        block_list,
        /// Batch stride of `q`.
        q_batch: i64 = "long ",
        /// Head stride of `q`.
        q_head: i64 = "long ",
        /// Query stride of `q`.
        q_row: i64 = "long ",
        /// Batch stride of `k`.
        k_batch: i64 = "long ",
        /// Head stride of `k`.
        k_head: i64 = "long ",
        /// Key stride of `k`.
        k_row: i64 = "long ",
        /// Batch stride of `o`.
        o_batch: i64 = "long ",
        /// Head stride of `o`.
        o_head: i64 = "long ",
        /// Query stride of `o`.
        o_row: i64 = "long ",
        /// Batch stride of `d_o`.
        d_o_batch: i64 = "long ",
        /// Head stride of `d_o`.
        d_o_head: i64 = "long ",
        /// Query stride of `d_o`.
        d_o_row: i64 = "long ",
        /// Column stride of `d_o`.
        d_o_dim: i64 = "long ",
        /// Batch stride of `dq`.
        dq_batch: i64 = "long ",
        /// Head stride of `dq`.
        dq_head: i64 = "long ",
        /// Query stride of `dq`.
        dq_row: i64 = "long ",
        /// Query stride of `d_o_copy`.
        copy_row: i64 = "long ",
        dropout_seed,
        dropout_offset,
        batch,
        heads_q,
        group,
        /// Number of CTAs that share the query heads of a GQA group.
        head_splits: i32 = "int ",
        seq_q,
        seq_kv,
        /// Number of columns of queries and keys.
        dim_qk: i32 = "int ",
        dim_v,
        tiles,
        /// Number of query tiles of a head; for packed sequences, over all sequences of a call.
        head_tiles: i32 = "int ",
        /// Number of KV blocks of the longest sequence.
        blocks: i32 = "int ",
        tokens_q,
        tokens_kv,
        section_heads,
        /// Number of head sections (KV heads that are processed together so that their operands fit L2).
        sections: i32 = "int ",
        /// Number of head sections whose dQ accumulators are in memory at once; 0 if every query tile has its own accumulator.
        ring_sections: i32 = "int ",
        /// Number of later head sections that are processed before the dQ accumulators of a section are converted.
        conversion_lag: i32 = "int ",
        /// Number of work items that process KV blocks, over all KV heads, column parts and shares of a GQA group.
        block_items: i32 = "int ",
        /// Number of work items, after those for KV blocks, that convert the dQ accumulators of each of the last head sections.
        conversion_items: i32 = "int ",
        /// Number of all work items: KV blocks and conversions.
        all_items: i32 = "int ",
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
        // For fixed-point sums of dQ only, so last: the machine code of other passes stays the same.
        /// Address of the fixed-point scale of dQ of each row, f32 in the order of `lse`; 0 unless dQ is summed in fixed point.
        dq_scale: Address = "float* ",
        /// Address of the bounds of each KV head, the bits of two f32: max |K| and max |V|_1. They are 0 when the kernels begin.
        kv_bounds: Address = "int* ",
        /// Address of an i32 for each query tile of each head, in the order of `lse`: the number of parts in its fixed-point sums of dQ. They are 0 when
        /// the kernels begin.
        dq_parts: Address = "int* ",
        /// Address of the values.
        v: Address = "const void* ",
        /// Batch stride of `v`.
        v_batch: i64 = "long ",
        /// Head stride of `v`.
        v_head: i64 = "long ",
        /// Key stride of `v`.
        v_row: i64 = "long ",
    }
}
