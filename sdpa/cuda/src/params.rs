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
            /// The fields that all kernels share.
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
    /// The parameters that forward and backward kernels of both families share: device addresses, then numbers.
    AttentionParams, AttentionTypes {
        /// Address of the number of queries of each batch entry, one i32 per batch entry.
        seq_len_q: Address = "const int* ",
        /// Address of the number of keys of each batch entry, one i32 per batch entry.
        seq_len_kv: Address = "const int* ",
        /// Address of the sinks, one f32 per query head.
        sink: Address = "const float* ",
        /// Address of the start index of each block list in `block_list`, u32.
        block_list_begin: Address = "const uint* ",
        /// Address of the end index of each block list in `block_list`, u32.
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
        /// Address of the offset of dropout in the sequence of random numbers, i64.
        dropout_offset: Address = "const ulong64* ",
        /// Number of batch entries.
        batch: i32 = "int ",
        /// Number of query heads.
        heads_q: i32 = "int ",
        /// Number of query heads per KV head.
        group: i32 = "int ",
        /// Number of queries per head; for packed sequences, of the longest sequence.
        seq_q: i32 = "int ",
        /// Number of keys per head; for packed sequences, of the longest sequence.
        seq_kv: i32 = "int ",
        /// Number of columns of values and outputs.
        dim_v: i32 = "int ",
        /// Number of packed query tokens for which the call has memory.
        tokens_q: Number = "int ",
        /// Number of packed key tokens for which the call has memory.
        tokens_kv: Number = "int ",
        /// Number of query tiles of the longest sequence.
        tiles: i32 = "int ",
        /// Number of heads, over all batch entries, that are processed together so that their operands fit L2. They are KV heads in the
        /// WGMMA backward pass, and otherwise query heads.
        section_heads: i32 = "int ",
        /// Distance between the block lists of adjacent batch entries, in units of the lists of a head; 0 if all batch entries share
        /// lists.
        block_list_batch: i32 = "int ",
        /// Distance between the block lists of adjacent heads, in units of the lists of a head; 0 if all heads share lists.
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
        /// Whether scores are multiplied by `scale` before the softmax (1), or the scale is part of `softmax_scale_log2` (0).
        natural: Number = "int ",
        /// The factor of the scores, `attn_scale`.
        scale: Number = "float ",
        /// The positive factor from a score to the exponent in base 2: log₂(e), times `scale` if `natural` is 0.
        softmax_scale_log2: Number = "float ",
        /// The largest random number for which an element of P is kept.
        dropout_threshold: i32 = "int ",
        /// The factor of the elements of P that dropout keeps.
        dropout_scale: f32 = "float ",
    }
}

/// The value of an absent bound of a band: no difference between the index of a key and that of a query reaches it.
pub(crate) const FAR: i32 = 1 << 30;
