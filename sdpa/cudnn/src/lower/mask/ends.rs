//! Bands about the last query and the last key of each batch entry, spelled as NVIDIA's frontend does: the place of a query is moved by the difference
//! of the lengths.

use super::super::expr::Draft;
use super::super::lowered::guarded;
use super::{F32_WHOLE, bound, declared_length, index, shifted};
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Mode, TensorId};
use cudnn_graph::{DType, Graph};
use sdpa_core::Side;
use sdpa_core::expr::{Binary, Builder, Const, NodeId};
use sdpa_core::mask::{Ends, SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa_core::problem::Problem;

/// Lengths that are within the extents, where the graph has such besides those of the masks.
pub(super) fn lengths(to: &Draft<'_>, masked: [Option<TensorId>; 2]) -> [Option<TensorId>; 2] {
    Side::ALL.map(|side| guarded(&to.supplies[..], side).or(masked[side as usize]))
}

/// Drops what such a band drops. Lengths are those of queries and of keys, where they are tensors; else they are extents.
pub(super) fn apply(
    g: &mut Graph,
    scores: TensorId,
    fill: TensorId,
    problem: &Problem,
    lengths: [Option<TensorId>; 2],
    band_op: bool,
) -> TensorId {
    let Ends { lower, upper } = problem.kept().ends;
    if lower.is_none() && upper.is_none() {
        return scores;
    }
    let [q, kv] = Side::ALL.map(|side| lengths[side as usize].unwrap_or_else(|| bound(g, problem.seq(side))));
    let mut out = scores;
    if let Some(upper) = upper {
        out = if band_op {
            let shift = (upper != 0).then(|| bound(g, upper));
            g.band_mask_right(out, fill, shift, Some((q, kv)))
        } else {
            let (row, col) = (index(g, out, 2), index(g, out, 3));
            let row = moved(g, row, [kv, q]);
            let row = shifted(g, row, upper);
            let keep = g.pointwise(Mode::CmpGe, &[row, col]);
            g.pointwise(Mode::BinarySelect, &[out, fill, keep])
        };
    }
    if let Some(lower) = lower {
        out = if band_op && lower < 0 && lower.abs() <= F32_WHOLE {
            let left = bound(g, -lower);
            g.band_mask_left(out, fill, left, Some((q, kv)))
        } else {
            let col = index(g, out, 3);
            let col = shifted(g, col, -lower);
            let col = moved(g, col, [q, kv]);
            let row = index(g, out, 2);
            let keep = g.pointwise(Mode::CmpGt, &[col, row]);
            g.pointwise(Mode::BinarySelect, &[out, fill, keep])
        };
    }
    out
}

/// A place, further by one length and back by another.
fn moved(g: &mut Graph, place: TensorId, [by, back]: [TensorId; 2]) -> TensorId {
    let further = g.pointwise_as(Mode::Add, &[place, by], DType::I32, DType::I32, Params::default());
    g.pointwise_as(Mode::Sub, &[further, back], DType::I32, DType::I32, Params::default())
}

/// The same of the only query, as terms of a rule.
pub(super) fn terms(b: &mut Builder, problem: &Problem, key: NodeId) -> Vec<NodeId> {
    let kept = problem.kept();
    let Ends { lower, upper } = kept.ends;
    if lower.is_none() && upper.is_none() {
        return Vec::new();
    }
    let mut length = |there: bool, name: &str, extent: i64| {
        if there { declared_length(b, name) } else { b.konst(Const::I32(extent as i32)) }
    };
    let q = length(kept.seq_len_q, SEQ_LEN_Q, problem.seq_q());
    let kv = length(kept.seq_len_kv, SEQ_LEN_KV, problem.seq_kv());
    // In the order in which no difference leaves 32 bits: lengths are data that nobody has checked.
    let corner = b.binary(Binary::Sub, kv, q);
    [(lower, Binary::Gt), (upper, Binary::Le)]
        .into_iter()
        .filter_map(|(limit, f)| {
            let limit = b.konst(Const::I32(limit? as i32));
            let end = b.binary(Binary::Add, corner, limit);
            Some(b.binary(f, key, end))
        })
        .collect()
}
