//! The structures that kernels get as parameters: one table for the fields that all of them have, and one for what each pass adds.

use crate::schedule::{Address, Number};

/// Makes the structure of the shared fields, or the structure of a pass: a field with a type is the pass's own, one without is shared. The order is that
/// of the kernel's structure, whose members are in the order of their sizes.
macro_rules! params {
    (shared $(#[$top:meta])* $name:ident, $types:ident { $($(#[$doc:meta])* $field:ident: $ty:ty = $cuda:literal,)* }) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name { $($(#[$doc])* pub(crate) $field: $ty,)* }

        /// The declaration of each shared field in CUDA C++.
        pub(crate) struct $types { $(pub(crate) $field: &'static str,)* }

        impl $name {
            pub(crate) const CUDA: $types = $types { $($field: $cuda,)* };
        }
    };
    ($(#[$top:meta])* $name:ident as $cuda_name:literal { $($fields:tt)* }) => {
        params!(@field [$(#[$top])* $name $cuda_name] [] [] [] [] $($fields)*);
    };
    (@field $head:tt [$($own:tt)*] [$($names:ident)*] [$($shared:ident)*] [$($order:tt)*]
        $(#[$doc:meta])* $field:ident: $ty:ty = $cuda:literal, $($rest:tt)*) => {
        params!(@field $head [$($own)* $(#[$doc])* pub(crate) $field: $ty,] [$($names)* $field] [$($shared)*] [$($order)* {$field $cuda}] $($rest)*);
    };
    (@field $head:tt [$($own:tt)*] [$($names:ident)*] [$($shared:ident)*] [$($order:tt)*] $field:ident, $($rest:tt)*) => {
        params!(@field $head [$($own)*] [$($names)*] [$($shared)* $field] [$($order)* {$field}] $($rest)*);
    };
    (@field [$(#[$top:meta])* $name:ident $cuda_name:literal] [$($own:tt)*] [$($names:ident)*] [$($shared:ident)*]
        [$({$field:ident $($cuda:literal)?})*]) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name {
            /// The fields that all kernels have.
            pub(crate) attention: $crate::params::AttentionParams,
            $($own)*
        }

        impl $name {
            /// The structure in CUDA C++.
            pub(crate) fn cuda() -> String {
                let mut text = format!("struct {} {{\n", $cuda_name);
                $(text.push_str(&format!("    {}{};\n", params!(@cuda $field $($cuda)?), stringify!($field)));)*
                text.push_str("};\n");
                text
            }
        }

        impl $crate::schedule::arguments::Member for $name {
            fn push(&self, to: &mut $crate::schedule::arguments::Arguments) {
                // Without `..`: a shared field that the structure of a kernel lacks does not compile.
                let $name { attention: $crate::params::AttentionParams { $($shared,)* }, $($names,)* } = self;
                $($crate::schedule::arguments::Member::push($field, to);)*
            }
        }
    };
    (@cuda $field:ident $cuda:literal) => { $cuda };
    (@cuda $field:ident) => { $crate::params::AttentionParams::CUDA.$field };
}
pub(crate) use params;

params! {
    shared
    /// The fields that all kernels have: addresses in device memory, then numbers.
    AttentionParams, AttentionTypes {
        /// Address of the lengths of queries, i32 for each batch entry.
        seq_len_q: Address = "const int* ",
        /// Address of the lengths of keys, i32 for each batch entry.
        seq_len_kv: Address = "const int* ",
        /// Address of the sinks, f32 for each query head.
        sink: Address = "const float* ",
        /// Address of where each block list begins in `map_blocks`, u32.
        block_list_begin: Address = "const uint* ",
        /// Address of where they end.
        block_list_end: Address = "const uint* ",
        /// Address of the items of the block lists, u32: KV blocks of a query tile, or query tiles of a KV block. The highest bit is set where the mask masks out a part of one.
        block_list: Address = "const uint* ",
        /// Address of the `cu_seqlens` offsets of queries, i32 or i64.
        boundaries_q: Address = "const void* ",
        /// Address of the `cu_seqlens` offsets of keys, i32 or i64.
        boundaries_kv: Address = "const void* ",
        /// Address of the seed of dropout, i64.
        dropout_seed: Address = "const ulong64* ",
        /// Address of the offset of its random numbers, i64.
        dropout_offset: Address = "const ulong64* ",
        /// Batch entries.
        batch: i32 = "int ",
        /// Query heads.
        heads_q: i32 = "int ",
        /// Query heads per KV head.
        group: i32 = "int ",
        /// Queries.
        seq_q: i32 = "int ",
        /// Keys.
        seq_kv: i32 = "int ",
        /// Columns of values and outputs.
        dim_v: i32 = "int ",
        /// Tokens of packed queries that the call has memory for.
        tokens_q: Number = "int ",
        /// Tokens of packed keys that the call has memory for.
        tokens_kv: Number = "int ",
        /// Query tiles, of the longest sequence.
        tiles: i32 = "int ",
        /// Heads of batch entries that are worked on together, so that their operands fit L2: query heads, or key heads of the backward pass with `wgmma`.
        section_heads: i32 = "int ",
        /// Lists from one batch entry to the next, in units of the lists of a head; 0 where all have the same.
        block_list_batch: i32 = "int ",
        /// Lists from one head to the next, in units of the lists of a head; 0 where all have the same.
        block_list_head: i32 = "int ",
        /// Keys at `k - q <= lower` are masked out.
        lower: i32 = "int ",
        /// Keys at `k - q > upper` are masked out.
        upper: i32 = "int ",
        /// Keys at `k > q` and `k >= prefix` are masked out.
        prefix: i32 = "int ",
        /// Keys at `(k - q) - (len_kv - len_q) <= ends_lower` are masked out.
        ends_lower: i32 = "int ",
        /// Keys at `(k - q) - (len_kv - len_q) > ends_upper` are masked out.
        ends_upper: i32 = "int ",
        /// Whether scores are multiplied by `scale` before anything else: 1 or 0.
        natural: Number = "int ",
        /// `attn_scale`.
        scale: Number = "float ",
        /// Factor from a score to the exponent of 2: positive.
        softmax_scale_log2: Number = "float ",
        /// The largest random number with which a softmax probability is kept.
        dropout_threshold: i32 = "int ",
        /// Factor of the probabilities that are kept.
        dropout_scale: f32 = "float ",
    }
}

/// Stands for a bound that is absent: no difference of a query's and a key's index reaches it.
pub(crate) const FAR: i32 = 1 << 30;
