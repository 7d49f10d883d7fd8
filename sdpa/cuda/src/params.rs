//! Numbers that a kernel is told: one table gives the Rust structure and its CUDA text.

macro_rules! params {
    ($(#[$top:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $ty:ty = $cuda:literal,)* }) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        pub struct $name { $($(#[$doc])* pub $field: $ty,)* }

        impl $name {
            /// The structure in CUDA C++, of the same layout: members are in the order of their sizes.
            pub fn cuda() -> String {
                let mut text = format!("struct {} {{\n", stringify!($name));
                $(text.push_str(&format!("    {}{};\n", $cuda, stringify!($field)));)*
                text.push_str("};\n");
                text
            }
        }
    };
}
pub(crate) use params;

params! {
    /// What the forward kernel is told of a call beside its operands: addresses in device memory, then numbers.
    Params {
        /// Address that the log-sum-exp of each row goes to, f32 (batch, heads_q, seq_q); 0 where nobody asks.
        stats: u64 = "float* ",
        /// Address that the largest score of each row goes to, as `stats` lies.
        row_max: u64 = "float* ",
        /// Address that the sum of exponentials of each row goes to, as `stats` lies.
        sum_exp: u64 = "float* ",
        /// Address of the lengths of queries, i32 for each batch entry.
        seq_len_q: u64 = "const int* ",
        /// Address of the lengths of keys, i32 for each batch entry.
        seq_len_kv: u64 = "const int* ",
        /// Address of the sinks, f32 for each query head.
        sink: u64 = "const float* ",
        /// Address of where the blocks of each tile begin in `map_blocks`, u32.
        map_begin: u64 = "const uint* ",
        /// Address of where they end.
        map_end: u64 = "const uint* ",
        /// Address of blocks of keys, u32, the highest bit set where a rule may drop a part of one.
        map_blocks: u64 = "const uint* ",
        /// Address of how many tiles beside the first of each block of threads were taken, i32: 0 when the kernel begins. Behind it, of a list, how many
        /// items it has, i32.
        taken: u64 = "int* ",
        /// Address of the list of tiles, where there is one.
        items: u64 = "TileItem* ",
        /// Address of the item that each tile of each batch entry begins with, i32, where keys are split.
        firsts: u64 = "int* ",
        /// Address of what parts of keys come to: f32 (item, head or group of heads, row of a tile, column of the tile).
        part_sums: u64 = "float* ",
        /// Address of their log-sum-exps, two f32 each, origin and logarithm in base 2 (item, head or group of heads, row of a tile).
        part_logs: u64 = "float2* ",
        /// Address of their largest scores, f32 in the same order, where row statistics ask for them.
        part_largest: u64 = "float* ",
        /// Address of the output, where it leaves past shared memory.
        o: u64 = "void* ",
        /// Stride of the output from one batch entry to the next, in elements.
        o_batch: i64 = "long ",
        /// Stride of the output from one head to the next.
        o_head: i64 = "long ",
        /// Stride of the output from one query to the next.
        o_row: i64 = "long ",
        /// Address of the page table, i32 for each page of each batch entry.
        page_table: u64 = "const int* ",
        /// Address of where documents of queries begin and end, i32 or i64.
        boundaries_q: u64 = "const void* ",
        /// Address of where documents of keys begin and end.
        boundaries_kv: u64 = "const void* ",
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
        /// Columns of values and outputs.
        dim_v: i32 = "int ",
        /// Heads of a batch entry, or groups of heads that share a tile.
        units: i32 = "int ",
        /// Tiles that the heads of a group have.
        head_tiles: i32 = "int ",
        /// Parts of keys that are asked for.
        most_parts: i32 = "int ",
        /// Keys of a page.
        page_size: i32 = "int ",
        /// Pages of the containers.
        pages: i32 = "int ",
        /// Entries of the page table from one batch entry to the next.
        table_row: i32 = "int ",
        /// Tokens of packed queries that the call has memory for.
        tokens_q: i32 = "int ",
        /// Tokens of packed keys that the call has memory for.
        tokens_kv: i32 = "int ",
        /// Items that the list has room for.
        most_items: i32 = "int ",
        /// Tiles of queries.
        tiles: i32 = "int ",
        /// Heads of batch entries whose keys and values are walked over side by side.
        section: i32 = "int ",
        /// Rows of the map from one batch entry to the next, in units of `tiles`; 0 where all have the same.
        map_batch: i32 = "int ",
        /// Rows of the map from one head to the next, in units of `tiles`; 0 where all have the same.
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
    }
}

params! {
    /// What the backward kernels are told of a call beside what the copy engine brings: addresses in device memory, strides in elements, then numbers.
    BackwardParams {
        /// Address of the log-sum-exp of each row, f32 (batch, heads_q, seq_q).
        stats: u64 = "const float* ",
        /// Address of the output.
        o: u64 = "const void* ",
        /// Address of the gradient of the output.
        d_o: u64 = "const void* ",
        /// Address of a copy of `d_o` that the copy engine takes: (batch, heads_q, seq_q, `copy_row`); 0 where it takes `d_o` itself.
        d_o_copy: u64 = "Element* ",
        /// Address of the gradient of the queries.
        dq: u64 = "void* ",
        /// Address of the stats in units of the exponent of 2, f32 (batch, heads_q, tiles, queries of a tile).
        lse: u64 = "float* ",
        /// Address of the log-sum-exps as two f32 each, a score and the rest in base 2, in the order of `lse`.
        exact: u64 = "float2* ",
        /// Address of whether any of them is large, i32; 0 when the kernels begin.
        large: u64 = "int* ",
        /// Address of the queries.
        q: u64 = "const void* ",
        /// Address of the keys.
        k: u64 = "const void* ",
        /// Address of the sums of `o` times `d_o`, as `lse` lies.
        delta: u64 = "float* ",
        /// Address of the sums of gradients of queries, f32, in the order of threads; 0 when the kernels begin.
        sums: u64 = "float* ",
        /// Address of the sums of gradients of keys and values that several blocks of threads share, f32, in the order of threads; 0 when the kernels begin.
        key_sums: u64 = "float* ",
        /// Address of how many of them are done with each block of keys, i32; 0 when the kernels begin.
        shares_done: u64 = "int* ",
        /// Address of how many blocks of keys were taken, i32; 0 when the kernels begin, as what follows.
        taken: u64 = "int* ",
        /// Address of how many of them are done, i32 for each section.
        done: u64 = "int* ",
        /// Address of how many slices of sums have left, i32 for each section.
        settled: u64 = "int* ",
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
        /// Address of the gradient of the sinks, f32 for each query head; 0 when the kernels begin.
        sink_gradient: u64 = "float* ",
        /// Address of where the tiles of each block of keys begin in `map_blocks`, u32.
        map_begin: u64 = "const uint* ",
        /// Address of where they end.
        map_end: u64 = "const uint* ",
        /// Address of tiles of queries, u32, the highest bit set where a rule may drop a part of one.
        map_blocks: u64 = "const uint* ",
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
        /// Blocks of threads that share the heads of a group.
        shares: i32 = "int ",
        /// Queries.
        seq_q: i32 = "int ",
        /// Keys.
        seq_kv: i32 = "int ",
        /// Columns of queries and keys.
        dim_qk: i32 = "int ",
        /// Columns of values and outputs.
        dim_v: i32 = "int ",
        /// Tiles of queries, of the longest document.
        tiles: i32 = "int ",
        /// Tiles of queries of a head, of all documents of a packed call.
        head_tiles: i32 = "int ",
        /// Blocks of keys, of the longest document.
        blocks: i32 = "int ",
        /// Tokens of packed queries.
        tokens_q: i32 = "int ",
        /// Tokens of packed keys.
        tokens_kv: i32 = "int ",
        /// Key heads of batch entries whose queries are walked over side by side.
        section: i32 = "int ",
        /// How many such sections there are.
        sections: i32 = "int ",
        /// How many of them have a place for their sums at once; 0 where every tile of queries has its own.
        ring: i32 = "int ",
        /// How many sections behind the one that is taken the sums leave.
        behind: i32 = "int ",
        /// Blocks of keys that are taken, of all key heads, parts and shares.
        numbers: i32 = "int ",
        /// Numbers behind them that stand for sums of each of the last sections, which leave.
        tail: i32 = "int ",
        /// How many numbers there are in all.
        last: i32 = "int ",
        /// Rows of the map from one batch entry to the next, in units of `blocks`; 0 where all have the same.
        map_batch: i32 = "int ",
        /// Rows of the map from one head to the next, in units of `blocks`; 0 where all have the same.
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
    }
}

/// Stands for a bound that is absent: no difference of a query's and a key's index reaches it.
pub const FAR: i32 = 1 << 30;
