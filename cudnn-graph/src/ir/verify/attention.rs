//! Rules of the unified attention ops.

use super::{At, Class};
use crate::ir::op::{Fp8Scales, ScoreGraph, SdpaBackward, SdpaForward};
use crate::ir::shape::{AttentionShape, attention_shape};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn forward(at: &mut At<'_>, op: &SdpaForward) {
    for (field, id) in [("q", op.q), ("k", op.k), ("v", op.v), ("o", op.o)] {
        at.type_in(field, id, Class::Float);
    }
    if let Some(fp8) = &op.fp8 {
        scales(at, op, fp8);
    }
    let both = op.page_table_k.is_some() == op.page_table_v.is_some();
    at.rule(both, || "only one of k and v has a page table; give both or none".to_owned());
    if op.page_table_k.is_some() || op.page_table_v.is_some() {
        at.rule(op.seq_len_kv.is_some(), || "page tables need seq_len_kv".to_owned());
    }
    for (side, lengths, sums) in [("q", op.seq_len_q, op.cu_seq_len_q), ("kv", op.seq_len_kv, op.cu_seq_len_kv)] {
        at.rule(lengths.is_none() || sums.is_none(), || {
            format!("seq_len_{side} and cu_seq_len_{side} are both given; give only one of them")
        });
    }
    if let Some(dropout) = &op.dropout {
        at.rule((0.0..1.0).contains(&dropout.probability), || format!("dropout probability {} is not in [0, 1)", dropout.probability));
        at.one("seed", dropout.seed, Class::Integer);
        at.one("offset", dropout.offset, Class::Integer);
    }
    if !both {
        return;
    }
    let Some(s) = shape(at, attention_shape(at.graph, op)) else { return };
    at.extents("o", op.o, &[s.batch, s.heads_q, s.seq_q, s.dim_v]);
    shared(at, &s, op.attn_scale, op.score.as_ref());
    for (field, id) in [("stats", op.stats), ("max", op.max), ("sum_exp", op.sum_exp)] {
        if let Some(id) = id {
            row_statistics(at, &s, field, id);
        }
    }
    if let Some(id) = op.sink {
        at.extents("sink", id, &[1, s.heads_q, 1, 1]);
        at.type_is("sink", id, DType::F32);
    }
    if let Some(id) = op.block_mask {
        let tiles = |n: i64| (n - 1) / 128 + 1;
        at.extents("block_mask", id, &[s.batch, s.heads_q, tiles(s.seq_q), (tiles(s.seq_kv) - 1) / 8 + 1]);
        at.type_is("block_mask", id, DType::U8);
    }
    for (field, id) in [("page_table_k", op.page_table_k), ("page_table_v", op.page_table_v)] {
        if let Some(id) = id {
            let container = at.dims(if field == "page_table_k" { op.k } else { op.v })[2];
            at.extents(field, id, &[s.batch, 1, (s.seq_kv - 1) / container + 1, 1]);
            at.type_is(field, id, DType::I32);
        }
    }
    lengths(at, &s, &[("seq_len_q", op.seq_len_q), ("seq_len_kv", op.seq_len_kv)], 0);
    lengths(at, &s, &[("cu_seq_len_q", op.cu_seq_len_q), ("cu_seq_len_kv", op.cu_seq_len_kv)], 1);
    if let Some(id) = op.dropout.and_then(|d| d.rng_dump) {
        at.extents("rng_dump", id, &s.scores());
        at.type_in("rng_dump", id, Class::Number);
    }
}

pub(super) fn backward(at: &mut At<'_>, op: &SdpaBackward) {
    let floats = [("q", op.q), ("k", op.k), ("v", op.v), ("o", op.o), ("d_o", op.d_o), ("dq", op.dq), ("dk", op.dk), ("dv", op.dv)];
    for (field, id) in floats {
        at.type_in(field, id, Class::Float);
    }
    let Some(s) = shape(at, AttentionShape::of(at.dims(op.q), at.dims(op.k), at.dims(op.v))) else { return };
    let o = [s.batch, s.heads_q, s.seq_q, s.dim_v];
    at.extents("o", op.o, &o);
    at.extents("d_o", op.d_o, &o);
    for (field, id, like) in [("dq", op.dq, op.q), ("dk", op.dk, op.k), ("dv", op.dv, op.v)] {
        let like = at.dims(like).to_vec();
        at.extents(field, id, &like);
    }
    row_statistics(at, &s, "stats", op.stats);
    shared(at, &s, op.attn_scale, op.score.as_ref());
    lengths(at, &s, &[("seq_len_q", op.seq_len_q), ("seq_len_kv", op.seq_len_kv)], 0);
}

fn shape(at: &mut At<'_>, shape: Result<AttentionShape, String>) -> Option<AttentionShape> {
    shape.map_err(|message| at.fail(message)).ok()
}

fn shared(at: &mut At<'_>, s: &AttentionShape, attn_scale: Option<TensorId>, score: Option<&ScoreGraph>) {
    if let Some(id) = attn_scale {
        at.one("attn_scale", id, Class::F32);
    }
    if let Some(score) = score {
        for (field, id) in [("score input", score.input), ("score output", score.output)] {
            at.extents(field, id, &s.scores());
            at.type_is(field, id, DType::F32);
            let holds = at.tensor(id).is_virtual();
            at.rule(holds, || format!("{field} {id} is not virtual"));
        }
    }
}

fn row_statistics(at: &mut At<'_>, s: &AttentionShape, field: &str, id: TensorId) {
    at.extents(field, id, &[s.batch, s.heads_q, s.seq_q, 1]);
    at.type_is(field, id, DType::F32);
}

fn lengths(at: &mut At<'_>, s: &AttentionShape, list: &[(&str, Option<TensorId>)], more: i64) {
    for &(field, id) in list {
        if let Some(id) = id {
            at.extents(field, id, &[s.batch + more, 1, 1, 1]);
            at.type_in(field, id, Class::Integer);
        }
    }
}

fn scales(at: &mut At<'_>, op: &SdpaForward, fp8: &Fp8Scales) {
    let Fp8Scales { descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o } = *fp8;
    let all = [
        ("descale_q", descale_q),
        ("descale_k", descale_k),
        ("descale_v", descale_v),
        ("descale_s", descale_s),
        ("scale_s", scale_s),
        ("scale_o", scale_o),
        ("amax_s", amax_s),
        ("amax_o", amax_o),
    ];
    for (field, id) in all {
        at.one(field, id, Class::F32);
    }
    for (field, id) in [("q", op.q), ("k", op.k), ("v", op.v)] {
        let dtype = at.dtype(id);
        at.rule([DType::F8E4M3, DType::F8E5M2].contains(&dtype), || format!("8-bit scales are given, but {field} {id} is {dtype}"));
    }
}
