//! The unified attention op: `o = softmax(score(q·kᵀ · scale)) · v`.
//!
//! Steps in order: q·kᵀ, scale, score ops, padding and block mask, softmax with the sink, dropout, rounding of P to the type of `v`, P·v. Padding is
//! a score of −∞ in columns at and past the key length and in rows at and past the query length; keys and values there are never read. Sums are in
//! f32, in order.

use super::axes::{count, place};
use super::pages::gather;
use super::scalar::least;
use super::softmax::{band_mask, normalize};
use super::{InterpError, State, accumulate, elementwise};
use crate::ir::op::{Op, ScoreGraph, SdpaForward};
use crate::ir::shape::{AttentionShape, attention_shape};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

/// The number of valid rows and columns of each batch entry.
pub(super) struct Lengths {
    pub(super) q: Vec<i64>,
    pub(super) kv: Vec<i64>,
}

/// Returns lengths from a tensor of lengths, from prefix sums, or from the extent.
pub(super) fn lengths(
    state: &State<'_>,
    each: Option<TensorId>,
    sums: Option<TensorId>,
    batch: i64,
    all: i64,
) -> Result<Vec<i64>, InterpError> {
    let bounded = |n: f64| (n as i64).clamp(0, all);
    if let Some(each) = state.optional(each)? {
        return Ok(each.data.iter().map(|&n| bounded(n)).collect());
    }
    if let Some(sums) = state.optional(sums)? {
        return Ok(sums.data.windows(2).map(|pair| bounded(pair[1] - pair[0])).collect());
    }
    Ok(vec![all; batch as usize])
}

/// The position of one row of an attention.
pub(super) struct At {
    pub(super) batch: i64,
    pub(super) head: i64,
    pub(super) row: i64,
}

/// Iterates over the rows, in the order of (b, h, s_q).
pub(super) fn rows(s: &AttentionShape) -> impl Iterator<Item = At> + use<> {
    let (heads, rows) = (s.heads_q, s.seq_q);
    (0..s.batch).flat_map(move |batch| (0..heads).flat_map(move |head| (0..rows).map(move |row| At { batch, head, row })))
}

/// Returns a dot product in f32, summed in order.
pub(super) fn dot(state: &State<'_>, a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| accumulate(state.precision, DType::F32, sum, a * b))
}

/// Returns row `row` of one head of a (b, h, s, d) operand. Its `heads` heads serve the `heads_q` heads of the scores.
pub(super) fn row_of<'v>(data: &'v [f64], s: &AttentionShape, heads: i64, at: &At, row: i64, (rows, dim): (i64, i64)) -> &'v [f64] {
    let head = at.head / (s.heads_q / heads);
    let from = place(&[s.batch, heads, rows, dim], [at.batch, head, row, 0]);
    &data[from..from + dim as usize]
}

/// Returns the scaled scores without masks; −∞ in invalid rows and columns.
pub(super) fn scores(state: &State<'_>, s: &AttentionShape, q: &[f64], k: &[f64], lengths: &Lengths, factors: &[f64]) -> Vec<f64> {
    let mut scores = vec![f64::NEG_INFINITY; count(&s.scores())];
    for at in rows(s).filter(|at| at.row < lengths.q[at.batch as usize]) {
        let query = row_of(q, s, s.heads_q, &at, at.row, (s.seq_q, s.dim_qk));
        for col in 0..lengths.kv[at.batch as usize] {
            let key = row_of(k, s, s.heads_k, &at, col, (s.seq_kv, s.dim_qk));
            let score = factors.iter().fold(dot(state, query, key), |score, factor| state.precision.f32(score * factor));
            scores[place(&s.scores(), [at.batch, at.head, at.row, col])] = score;
        }
    }
    scores
}

pub(super) fn forward(state: &mut State<'_>, op: &SdpaForward) -> Result<(), InterpError> {
    let s = attention_shape(state.graph, op).map_err(|_| InterpError::NotDefined { at: state.at(), what: "attention of these extents" })?;
    let counts = Lengths {
        q: lengths(state, op.seq_len_q, op.cu_seq_len_q, s.batch, s.seq_q)?,
        kv: lengths(state, op.seq_len_kv, op.cu_seq_len_kv, s.batch, s.seq_kv)?,
    };
    let k = cache(state, op.k, op.page_table_k, &counts, &[s.batch, s.heads_k, s.seq_kv, s.dim_qk])?;
    let v = cache(state, op.v, op.page_table_v, &counts, &[s.batch, s.heads_v, s.seq_kv, s.dim_v])?;
    let fp8 = op.fp8.as_ref();
    let number = |id: Option<TensorId>| Ok(state.number(id)?.unwrap_or(1.0));
    let factors = [number(fp8.map(|f| f.descale_q))?, number(fp8.map(|f| f.descale_k))?, number(op.attn_scale)?];
    let (scale_s, scale_o) = (number(fp8.map(|f| f.scale_s))?, number(fp8.map(|f| f.scale_o))?);
    let descales = [number(fp8.map(|f| f.descale_s))?, number(fp8.map(|f| f.descale_v))?];

    let mut scores = scores(state, &s, &state.value(op.q)?.data, &k, &counts, &factors);
    if let Some(score) = &op.score {
        scores = replay(state, score, scores)?;
    }
    mask(state, op, &s, &counts, &mut scores)?;

    let sink = state.optional(op.sink)?;
    let (mut stats, mut max, mut sum_exp) = (Vec::new(), Vec::new(), Vec::new());
    let columns = s.seq_kv as usize;
    for (at, row) in rows(&s).zip(scores.chunks_mut(columns)) {
        let sink = sink.and_then(|sink| sink.data.get(at.head as usize).copied());
        let found = normalize(state.precision, row, sink);
        stats.push(found.stats);
        max.push(found.max);
        sum_exp.push(found.sum_exp);
    }
    let mut p = scores;
    let bits = dropout(state, op, &mut p)?;

    let precision = state.precision;
    let narrow = state.tensor(op.v)?.dtype;
    let amax_s = p.iter().fold(0.0, |amax: f64, p| -least(-amax, -p.abs()));
    for p in &mut p {
        *p = precision.convert(precision.f32(*p * scale_s), narrow);
    }
    let mut o = Vec::with_capacity(p.len() / columns * s.dim_v as usize);
    for (at, row) in rows(&s).zip(p.chunks(columns)) {
        let mut sums = vec![0.0; s.dim_v as usize];
        for col in 0..counts.kv[at.batch as usize] {
            let value = row_of(&v, &s, s.heads_v, &at, col, (s.seq_kv, s.dim_v));
            // A row past the sequence length has no probabilities, so its sum stays 0 whatever the values are.
            if at.row < counts.q[at.batch as usize] {
                for (sum, v) in sums.iter_mut().zip(value) {
                    *sum = accumulate(precision, DType::F32, *sum, row[col as usize] * v);
                }
            }
        }
        o.extend(sums.into_iter().map(|sum| descales.iter().fold(sum, |sum, factor| precision.f32(sum * factor))));
    }
    let amax_o = o.iter().fold(0.0, |amax: f64, o| -least(-amax, -o.abs()));
    for o in &mut o {
        *o = precision.f32(*o * scale_o);
    }
    state.store(op.o, o)?;
    state.store_optional(op.stats, stats)?;
    state.store_optional(op.max, max)?;
    state.store_optional(op.sum_exp, sum_exp)?;
    state.store_optional(op.dropout.and_then(|d| d.rng_dump), bits)?;
    state.store_optional(fp8.map(|f| f.amax_s), vec![amax_s])?;
    state.store_optional(fp8.map(|f| f.amax_o), vec![amax_o])
}

/// Returns the rows of `k` or `v`, gathered from its pages if it is paged.
fn cache(state: &State<'_>, id: TensorId, table: Option<TensorId>, counts: &Lengths, dims: &[i64]) -> Result<Vec<f64>, InterpError> {
    match table {
        Some(table) => gather(state, id, table, &counts.kv, dims),
        None => Ok(state.value(id)?.data.clone()),
    }
}

/// Applies the score ops to scaled scores.
fn replay(state: &mut State<'_>, score: &ScoreGraph, scores: Vec<f64>) -> Result<Vec<f64>, InterpError> {
    state.store(score.input, scores)?;
    for op in &score.ops {
        match op {
            Op::Pointwise(op) => elementwise(state, op)?,
            Op::BandMask(op) => band_mask(state, op)?,
            Op::Matmul(_)
            | Op::Reduction(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Concat(_)
            | Op::ConvForward(_)
            | Op::ConvBackwardData(_)
            | Op::ConvBackwardFilter(_)
            | Op::NormForward(_)
            | Op::NormBackward(_)
            | Op::GenStats(_)
            | Op::BnFinalize(_)
            | Op::BnBackwardWeights(_)
            | Op::ResampleForward(_)
            | Op::ResampleBackward(_)
            | Op::Upsample(_)
            | Op::MoeMatmul(_)
            | Op::MoeMatmulBackward(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::Rng(_)
            | Op::Softmax(_)
            | Op::PagedLoad(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_)
            | Op::SdpaForward(_)
            | Op::SdpaBackward(_) => return Err(InterpError::NotDefined { at: state.at(), what: "this op in a score graph" }),
        }
    }
    Ok(state.value(score.output)?.data.clone())
}

/// Sets scores to −∞ where padding or the block mask excludes them.
fn mask(state: &State<'_>, op: &SdpaForward, s: &AttentionShape, counts: &Lengths, scores: &mut [f64]) -> Result<(), InterpError> {
    let tiles = state.optional(op.block_mask)?;
    for (at, row) in rows(s).zip(scores.chunks_mut(s.seq_kv as usize)) {
        let (rows, columns) = (counts.q[at.batch as usize], counts.kv[at.batch as usize]);
        for (col, score) in (0..).zip(row) {
            let kept = tiles.is_none_or(|tiles| {
                let byte = tiles.data[place(&tiles.dims, [at.batch, at.head, at.row / 128, col / 128 / 8])] as u8;
                byte >> (col / 128 % 8) & 1 == 1
            });
            if at.row >= rows || col >= columns || !kept {
                *score = f64::NEG_INFINITY;
            }
        }
    }
    Ok(())
}

/// Applies dropout: multiplies by random numbers, 1 for kept probabilities, and by 1 / (1 − chance). Returns the random numbers.
fn dropout(state: &State<'_>, op: &SdpaForward, p: &mut [f64]) -> Result<Vec<f64>, InterpError> {
    let Some(dropout) = &op.dropout else { return Ok(Vec::new()) };
    if dropout.probability == 0.0 {
        return Ok(vec![1.0; p.len()]);
    }
    let Some(dump) = dropout.rng_dump else {
        return Err(InterpError::NotDefined { at: state.at(), what: "dropout without its random numbers" });
    };
    let bits = state.inputs.get(&dump).map(|bits| bits.data.clone()).unwrap_or_default();
    let back = state.precision.f32(1.0 / (1.0 - f64::from(dropout.probability)));
    for (p, bit) in p.iter_mut().zip(&bits) {
        *p = state.precision.f32(state.precision.f32(*p * bit) * back);
    }
    Ok(bits)
}
