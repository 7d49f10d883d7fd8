//! Parameters of the WGMMA kernels.

use crate::params::params;
use crate::schedule::Address;

params! {
    /// The parameters of the forward kernels, next to tensor maps: addresses in device memory, strides in elements, then numbers.
    ForwardParams as "Params" {
        /// Address that the log-sum-exp of each row goes to, f32 (batch, heads_q, seq_q); 0 where they are not computed.
        stats: Address = "float* ",
        /// Address that the largest score of each row goes to, in the order of `stats`.
        row_max: Address = "float* ",
        /// Address that the sum of exponentials of each row goes to, in the order of `stats`.
        sum_exp: Address = "float* ",
        seq_len_q,
        seq_len_kv,
        sink,
        block_list_begin,
        block_list_end,
        block_list,
        /// Address of the counter that hands out tiles after the first of each CTA, i32: 0 when the kernel begins. After it, the number of items of a tile list, i32.
        tile_counter: Address = "int* ",
        /// Address of the list of tiles, where there is one.
        tile_items: Address = "TileItem* ",
        /// Address of the item that each tile of each batch entry begins with, i32, where keys are split.
        first_items: Address = "int* ",
        /// Address of the outputs of splits: f32 (item, head or group of heads, row of a tile, column of the tile).
        split_o: Address = "float* ",
        /// Address of their log-sum-exps, two f32 each, origin and logarithm in base 2 (item, head or group of heads, row of a tile).
        split_lse: Address = "float2* ",
        /// Address of their largest scores, f32 in the same order, where row statistics ask for them.
        split_row_max: Address = "float* ",
        /// Address of the output, for tiles that do not store it with TMA.
        o: Address = "void* ",
        /// Stride of the output from one batch entry to the next, in elements.
        o_batch: i64 = "long ",
        /// Stride of the output from one head to the next.
        o_head: i64 = "long ",
        /// Stride of the output from one query to the next.
        o_row: i64 = "long ",
        /// Address of the page table, i32 for each page of each batch entry.
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
        /// Heads of a batch entry, or groups of heads that share a tile.
        head_groups: i32 = "int ",
        /// Tiles that the heads of a group have.
        head_tiles: i32 = "int ",
        /// Splits of the keys, at most.
        max_splits: i32 = "int ",
        /// Keys of a page.
        page_size: i32 = "int ",
        /// Pages of the containers.
        pages: i32 = "int ",
        /// Entries of the page table from one batch entry to the next.
        table_row: i32 = "int ",
        tokens_q,
        tokens_kv,
        /// Items that the list has memory for.
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
    /// The parameters of the backward kernels, next to tensor maps: addresses in device memory, strides in elements, then numbers.
    BackwardParams as "BackwardParams" {
        /// Address of the log-sum-exp of each row, f32 (batch, heads_q, seq_q).
        stats: Address = "const float* ",
        /// Address of the output.
        o: Address = "const void* ",
        /// Address of the gradient of the output.
        d_o: Address = "const void* ",
        /// Address of a copy of `d_o` that TMA can read: (batch, heads_q, seq_q, `copy_row`); 0 where TMA reads `d_o` itself.
        d_o_copy: Address = "Element* ",
        /// Address of the gradient of the queries.
        dq: Address = "void* ",
        /// Address of the stats in units of the exponent of 2, f32 (batch, heads_q, tiles, queries of a tile).
        lse: Address = "float* ",
        /// Address of the log-sum-exps as two f32 each, a score and the rest in base 2, in the order of `lse`.
        exact_lse: Address = "float2* ",
        /// Address of whether any of them is large, i32; 0 when the kernels begin.
        any_large_lse: Address = "int* ",
        /// Address of the queries.
        q: Address = "const void* ",
        /// Address of the keys.
        k: Address = "const void* ",
        /// Address of delta, the row sums of `o` times `d_o`, in the order of `lse`.
        delta: Address = "float* ",
        /// Address of the dQ accumulator, f32, in the order of threads; 0 when the kernels begin.
        dq_accum: Address = "float* ",
        /// Address of the dK and dV accumulators that several CTAs share, f32, in the order of threads; 0 when the kernels begin.
        dkv_accum: Address = "float* ",
        /// Address of how many of these CTAs are done with each KV block, i32; 0 when the kernels begin.
        splits_done: Address = "int* ",
        /// Address of the counter that hands out KV blocks, i32; 0 when the kernels begin, like the next two.
        tile_counter: Address = "int* ",
        /// Address of how many KV blocks are done, i32 for each head section.
        blocks_done: Address = "int* ",
        /// Address of how many slices of the dQ accumulator are converted, i32 for each head section.
        slices_converted: Address = "int* ",
        seq_len_q,
        seq_len_kv,
        boundaries_q,
        boundaries_kv,
        sink,
        /// Address of the gradient of the sinks, f32 for each query head; 0 when the kernels begin.
        sink_gradient: Address = "float* ",
        block_list_begin,
        block_list_end,
        block_list,
        /// Stride of `q` from one batch entry to the next.
        q_batch: i64 = "long ",
        /// Stride of `q` from one head to the next.
        q_head: i64 = "long ",
        /// Stride of `q` from one query to the next.
        q_row: i64 = "long ",
        /// Stride of `k` from one batch entry to the next.
        k_batch: i64 = "long ",
        /// Stride of `k` from one head to the next.
        k_head: i64 = "long ",
        /// Stride of `k` from one key to the next.
        k_row: i64 = "long ",
        /// Stride of `o` from one batch entry to the next.
        o_batch: i64 = "long ",
        /// Stride of `o` from one head to the next.
        o_head: i64 = "long ",
        /// Stride of `o` from one query to the next.
        o_row: i64 = "long ",
        /// Stride of `d_o` from one batch entry to the next.
        d_o_batch: i64 = "long ",
        /// Stride of `d_o` from one head to the next.
        d_o_head: i64 = "long ",
        /// Stride of `d_o` from one query to the next.
        d_o_row: i64 = "long ",
        /// Stride of `d_o` from one column to the next.
        d_o_dim: i64 = "long ",
        /// Stride of `dq` from one batch entry to the next.
        dq_batch: i64 = "long ",
        /// Stride of `dq` from one head to the next.
        dq_head: i64 = "long ",
        /// Stride of `dq` from one query to the next.
        dq_row: i64 = "long ",
        /// Stride of `d_o_copy` from one query to the next.
        copy_row: i64 = "long ",
        dropout_seed,
        dropout_offset,
        batch,
        heads_q,
        group,
        /// CTAs that share the query heads of a GQA group.
        head_splits: i32 = "int ",
        seq_q,
        seq_kv,
        /// Columns of queries and keys.
        dim_qk: i32 = "int ",
        dim_v,
        tiles,
        /// Tiles of queries of a head, of all documents of a packed call.
        head_tiles: i32 = "int ",
        /// Blocks of keys, of the longest document.
        blocks: i32 = "int ",
        tokens_q,
        tokens_kv,
        section_heads,
        /// Head sections.
        sections: i32 = "int ",
        /// Head sections whose dQ accumulators are in memory at once; 0 where every query tile has its own.
        ring_sections: i32 = "int ",
        /// Number of head sections after which the dQ accumulators of one are converted.
        conversion_lag: i32 = "int ",
        /// Work items for KV blocks, of all KV heads, parts and shares.
        block_items: i32 = "int ",
        /// Work items after them that convert the dQ accumulators of each of the last head sections.
        conversion_items: i32 = "int ",
        /// All work items.
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
    }
}
