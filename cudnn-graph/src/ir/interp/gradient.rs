//! The gradient of the unified attention op.
//!
//! `P = exp(q·kᵀ·scale − stats)`, 0 in rows with stats of −∞ and in padding; `dP = dO·vᵀ`; `dS = P ∘ (dP − rowsum(dO ∘ o)) · scale`; `dv = Pᵀ·dO`,
//! `dq = dS·k`, `dk = dSᵀ·q`, summed over the query heads of a GQA group. Before the GEMMs, `P` is rounded to the type of `dO` and `dS` to that of
//! `q`.

use super::attention::{Lengths, dot, lengths, row_of, rows, scores};
use super::axes::place;
use super::{InterpError, State, accumulate};
use crate::ir::op::SdpaBackward;
use crate::ir::shape::AttentionShape;
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn backward(state: &mut State<'_>, op: &SdpaBackward) -> Result<(), InterpError> {
    if op.score.is_some() {
        return Err(InterpError::NotDefined { at: state.at(), what: "the derivative of a score graph" });
    }
    let data = |id: TensorId| state.value(id).map(|value| &value.data[..]);
    let (q, k, v, o, d_o, stats) = (data(op.q)?, data(op.k)?, data(op.v)?, data(op.o)?, data(op.d_o)?, data(op.stats)?);
    let s = AttentionShape::of(&state.value(op.q)?.dims, &state.value(op.k)?.dims, &state.value(op.v)?.dims)
        .map_err(|_| InterpError::NotDefined { at: state.at(), what: "attention of these extents" })?;
    let counts =
        Lengths { q: lengths(state, op.seq_len_q, None, s.batch, s.seq_q)?, kv: lengths(state, op.seq_len_kv, None, s.batch, s.seq_kv)? };
    let scale = state.number(op.attn_scale)?.unwrap_or(1.0);
    let (p_type, ds_type) = (state.tensor(op.d_o)?.dtype, state.tensor(op.q)?.dtype);
    let precision = state.precision;
    let all = scores(state, &s, q, k, &counts, &[scale]);

    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let add = |into: &mut [f64], from: &[f64], factor: f64| {
        for (sum, x) in into.iter_mut().zip(from) {
            *sum = accumulate(precision, DType::F32, *sum, factor * x);
        }
    };
    for at in rows(&s).filter(|at| at.row < counts.q[at.batch as usize]) {
        let stat = stats[place(&[s.batch, s.heads_q, s.seq_q], [at.batch, at.head, at.row])];
        let (q_row, o_row) = ((s.seq_q, s.dim_qk), (s.seq_q, s.dim_v));
        let query = row_of(q, &s, s.heads_q, &at, at.row, q_row);
        let d_out = row_of(d_o, &s, s.heads_q, &at, at.row, o_row);
        let delta = dot(state, d_out, row_of(o, &s, s.heads_q, &at, at.row, o_row));
        let dq_from = place(&[s.batch, s.heads_q, s.seq_q, s.dim_qk], [at.batch, at.head, at.row, 0]);
        for col in 0..counts.kv[at.batch as usize] {
            let score = all[place(&s.scores(), [at.batch, at.head, at.row, col])];
            let p = if stat == f64::NEG_INFINITY { 0.0 } else { precision.f32(libm::exp(precision.f32(score - stat))) };
            let key = row_of(k, &s, s.heads_k, &at, col, (s.seq_kv, s.dim_qk));
            let value = row_of(v, &s, s.heads_v, &at, col, (s.seq_kv, s.dim_v));
            let d_p = precision.f32(dot(state, d_out, value) - delta);
            let d_s = precision.f32(precision.f32(p * d_p) * scale);
            let (p, d_s) = (precision.convert(p, p_type), precision.convert(d_s, ds_type));
            let shared = |heads: i64, dim: i64| {
                let head = at.head / (s.heads_q / heads);
                let from = place(&[s.batch, heads, s.seq_kv, dim], [at.batch, head, col, 0]);
                from..from + dim as usize
            };
            add(&mut dq[dq_from..dq_from + s.dim_qk as usize], key, d_s);
            add(&mut dk[shared(s.heads_k, s.dim_qk)], query, d_s);
            add(&mut dv[shared(s.heads_v, s.dim_v)], d_out, p);
        }
    }
    state.store(op.dq, dq)?;
    state.store(op.dk, dk)?;
    state.store(op.dv, dv)
}
