//! The extents of an attention op, for verification and interpretation.

use super::Graph;
use super::op::SdpaForward;
use super::tensor::TensorId;

/// Extents of an attention op, derived from its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    pub(crate) batch: i64,
    pub(crate) heads_q: i64,
    pub(crate) heads_k: i64,
    pub(crate) heads_v: i64,
    pub(crate) seq_q: i64,
    pub(crate) seq_kv: i64,
    pub(crate) dim_qk: i64,
    pub(crate) dim_v: i64,
}

impl AttentionShape {
    /// Derives the extents of an attention op from those of q, k and v; the error names those that do not fit.
    pub(crate) fn of(q: &[i64], k: &[i64], v: &[i64]) -> Result<AttentionShape, String> {
        let (&[batch, heads_q, seq_q, dim_qk], &[k_batch, heads_k, seq_kv, k_dim], &[v_batch, heads_v, v_seq, dim_v]) = (q, k, v) else {
            return Err("q, k and v do not all have the four axes (batch, heads, sequence, dim)".to_owned());
        };
        if k_batch != batch || v_batch != batch {
            return Err(format!("q has {batch} batch entries, k has {k_batch} and v has {v_batch}, expected equal numbers"));
        }
        if k_dim != dim_qk {
            return Err(format!("q has head dim {dim_qk} and k has head dim {k_dim}, expected equal head dims"));
        }
        if v_seq != seq_kv {
            return Err(format!("k has sequence length {seq_kv} and v has {v_seq}, expected equal lengths"));
        }
        for (name, heads) in [("k", heads_k), ("v", heads_v)] {
            if heads_q % heads != 0 {
                return Err(format!("q has {heads_q} heads, expected a multiple of the {heads} heads of {name}"));
            }
        }
        Ok(AttentionShape { batch, heads_q, heads_k, heads_v, seq_q, seq_kv, dim_qk, dim_v })
    }

    /// Returns the extents of the scores: (b, h_q, s_q, s_kv).
    pub(crate) fn scores(&self) -> [i64; 4] {
        [self.batch, self.heads_q, self.seq_q, self.seq_kv]
    }
}

/// Returns the extents of a forward attention op. With page tables, the key length is that of the score graph, or else the capacity of
/// the shorter table. Missing tensors count as tensors with wrong extents.
pub(crate) fn attention_shape(graph: &Graph, op: &SdpaForward) -> Result<AttentionShape, String> {
    let dims = |id: TensorId| graph.get(id).map_or(&[][..], |t| &t.dims.0[..]);
    let (q, k, v) = (dims(op.q), dims(op.k), dims(op.v));
    let (Some(table_k), Some(table_v)) = (op.page_table_k, op.page_table_v) else { return AttentionShape::of(q, k, v) };
    let (&[batch, ..], &[_, heads_k, block_k, dim_k], &[_, heads_v, block_v, dim_v]) = (q, k, v) else {
        return Err("the containers k and v are not (blocks, heads, block, dim)".to_owned());
    };
    let (&[_, _, pages_k, _], &[_, _, pages_v, _]) = (dims(table_k), dims(table_v)) else {
        return Err("page tables are not (batch, 1, pages, 1)".to_owned());
    };
    let reach = pages_k.saturating_mul(block_k).min(pages_v.saturating_mul(block_v));
    let seq_kv = match op.score.as_ref().map(|s| dims(s.input)) {
        Some(&[.., last]) => last,
        Some([]) | None => reach,
    };
    AttentionShape::of(q, &[batch, heads_k, seq_kv, dim_k], &[batch, heads_v, seq_kv, dim_v])
}
