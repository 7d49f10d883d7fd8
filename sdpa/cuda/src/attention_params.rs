//! Builds the kernel parameters that forward and backward kernels share, from the attention problem of a pass.

use crate::params::{AttentionParams, FAR};
use crate::schedule::{Address, BlockLists, Builder, Number};
use crate::work::steps;
use sdpa_core::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::{DROPOUT_OFFSET, DROPOUT_SEED, SINK, Side};

/// The tile height and the L2 head section, which a kernel reads from its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    /// Number of queries of each head in a query tile.
    pub(crate) queries: u32,
    /// Number of heads, over all batch entries, that are processed together so that their operands fit L2.
    pub(crate) heads_in_l2: i64,
}

/// Converts a bound on differences of indices; an absent bound becomes `none`.
fn bound(x: Option<i64>, none: i32) -> i32 {
    x.map_or(none, |x| i32::try_from(x).map_or(none, |x| x.clamp(-FAR, FAR)))
}

impl Builder<'_> {
    /// Returns the values of the parameters that all kernels share.
    pub(crate) fn attention_params(&mut self, tiling: Tiling, lists: &BlockLists) -> AttentionParams {
        let attention = self.attention;
        let (region, ends, [batch, heads_q, seq_q, seq_kv]) = (attention.region, attention.ends, attention.extents);
        let [map_batch, map_head] = lists.strides;
        let dropout = attention.dropout;
        let mut of_dropout = |name| dropout.map_or(Address::Null, |_| self.param(name));
        let [dropout_seed, dropout_offset] = [DROPOUT_SEED, DROPOUT_OFFSET].map(&mut of_dropout);
        AttentionParams {
            seq_len_q: self.param(SEQ_LEN_Q),
            seq_len_kv: self.param(SEQ_LEN_KV),
            sink: self.param(SINK),
            block_list_begin: lists.begin,
            block_list_end: lists.end,
            block_list: lists.blocks,
            boundaries_q: self.boundaries(Side::Queries),
            boundaries_kv: self.boundaries(Side::Keys),
            dropout_seed,
            dropout_offset,
            batch: batch as i32,
            heads_q: heads_q as i32,
            group: attention.group as i32,
            seq_q: seq_q as i32,
            seq_kv: seq_kv as i32,
            dim_v: attention.tensors[2].dims[3] as i32,
            tokens_q: Number::Tokens(Side::Queries),
            tokens_kv: Number::Tokens(Side::Keys),
            tiles: steps(seq_q, tiling.queries) as i32,
            section_heads: tiling.heads_in_l2 as i32,
            block_list_batch: map_batch,
            block_list_head: map_head,
            lower: bound(region.lower, -FAR),
            upper: bound(region.upper, FAR),
            prefix: bound(region.prefix, 0),
            ends_lower: bound(ends.lower, -FAR),
            ends_upper: bound(ends.upper, FAR),
            natural: Number::Natural,
            scale: Number::Scale,
            softmax_scale_log2: Number::Unit,
            dropout_threshold: dropout.map_or(0, |dropout| dropout.most().cast_signed()),
            dropout_scale: dropout.map_or(0.0, |dropout| dropout.scale()),
        }
    }
}
