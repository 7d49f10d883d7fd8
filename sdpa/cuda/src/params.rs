//! The parameter structures of kernels: one table for the fields shared by all, and one for the additions of each pass.

use crate::schedule::{Address, Number};

/// Defines the structure of the shared fields, or the structure of a pass. A field with a type is the pass's own; one without is shared. The order is
/// that of the kernel's structure, by size.
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
            /// Returns the structure in CUDA C++.
            pub(crate) fn cuda() -> String {
                let mut text = format!("struct {} {{\n", $cuda_name);
                $(text.push_str(&format!("    {}{};\n", params!(@cuda $field $($cuda)?), stringify!($field)));)*
                text.push_str("};\n");
                text
            }
        }

        impl $crate::schedule::arguments::Member for $name {
            fn push(&self, to: &mut $crate::schedule::arguments::Arguments) {
                // Deliberately without `..`: if a kernel's structure lacks a shared field, this does not compile.
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
    /// The fields that all kernels have: device addresses, then numbers.
    AttentionParams, AttentionTypes {
        /// Address of the lengths of queries, one i32 per batch entry.
        seq_len_q: Address = "const int* ",
        /// Address of the lengths of keys, one i32 per batch entry.
        seq_len_kv: Address = "const int* ",
        /// Address of the sinks, one f32 per query head.
        sink: Address = "const float* ",
        /// Address of the start of each block list in `block_list`, u32.
        block_list_begin: Address = "const uint* ",
        /// Address of their ends.
        block_list_end: Address = "const uint* ",
        /// Address of the items of the block lists, u32: KV blocks of a query tile, or query tiles of a KV block. The highest bit marks partial
        /// blocks.
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
        /// Packed query tokens for which the call has memory.
        tokens_q: Number = "int ",
        /// Packed key tokens for which the call has memory.
        tokens_kv: Number = "int ",
        /// Query tiles, of the longest sequence.
        tiles: i32 = "int ",
        /// Heads, over all batch entries, that are processed together so that their operands fit L2: query heads, or KV heads in the WGMMA backward
        /// pass.
        section_heads: i32 = "int ",
        /// Stride of batch entries in lists, in units of the lists of a head; 0 if all share them.
        block_list_batch: i32 = "int ",
        /// Stride of heads in lists, in units of the lists of a head; 0 if all share them.
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
        /// Whether scores are multiplied by `scale` first: 1 or 0.
        natural: Number = "int ",
        /// `attn_scale`.
        scale: Number = "float ",
        /// Factor from a score to the exponent of 2: positive.
        softmax_scale_log2: Number = "float ",
        /// The largest random number for which an element of P is kept.
        dropout_threshold: i32 = "int ",
        /// Factor of the kept elements of P.
        dropout_scale: f32 = "float ",
    }
}

/// An absent bound: no difference of a query's and a key's index reaches it.
pub(crate) const FAR: i32 = 1 << 30;
