//! Softmax and band masks.

use super::axes::each;
use super::scalar::least;
use super::{InterpError, Precision, State, Value};
use crate::ir::op::{BandMask, BandSide, Softmax};
use std::f64::consts::LOG2_E;

/// The statistics of one row of scores, next to its probabilities.
pub(super) struct Row {
    pub(super) max: f64,
    pub(super) sum_exp: f64,
    /// Natural logarithm of the sum of exponentials of the scores themselves.
    pub(super) stats: f64,
}

/// Turns scores into probabilities, in f32 steps: difference to the maximum, exponential, sum in order (the sink last), quotient. The maximum, the
/// sum and the statistics include the sink. A row of only −∞ has probabilities 0, sum 0, and maximum and statistics of −∞, never NaN; +∞ gives NaN.
pub(super) fn normalize(precision: Precision, scores: &mut [f64], sink: Option<f64>) -> Row {
    if scores.iter().chain(&sink).all(|&s| s == f64::NEG_INFINITY) {
        scores.fill(0.0);
        return Row { max: f64::NEG_INFINITY, sum_exp: 0.0, stats: f64::NEG_INFINITY };
    }
    let max = scores.iter().copied().chain(sink).fold(f64::NAN, |max, s| -least(-max, -s));
    let exp = |s: f64| precision.f32(libm::exp(precision.f32(s - max)));
    let mut sum_exp = 0.0;
    for s in scores.iter_mut() {
        *s = exp(*s);
        sum_exp = precision.f32(sum_exp + *s);
    }
    if let Some(sink) = sink {
        sum_exp = precision.f32(sum_exp + exp(sink));
    }
    for s in scores.iter_mut() {
        *s = precision.f32(*s / sum_exp);
    }
    Row { max, sum_exp, stats: precision.f32(max + precision.f32(libm::log(sum_exp))) }
}

pub(super) fn softmax(state: &mut State<'_>, op: &Softmax) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let sink = state.optional(op.sink)?;
    let columns = x.dims.last().copied().unwrap_or(1).max(1) as usize;
    let mut y = x.data.clone();
    let (mut stats, mut max, mut sum_exp) = (Vec::new(), Vec::new(), Vec::new());
    for (row, scores) in y.chunks_mut(columns).enumerate() {
        // There is one sink per head; x is (b, h, s_q, s_kv).
        let sink = match (sink, &x.dims[..]) {
            (Some(sink), &[_, heads, rows, _]) => sink.data.get((row as i64 / rows % heads) as usize).copied(),
            (Some(_) | None, _) => None,
        };
        let found = normalize(state.precision, scores, sink);
        stats.push(if op.stats_log2 { state.precision.f32(found.stats * LOG2_E) } else { found.stats });
        max.push(found.max);
        sum_exp.push(found.sum_exp);
    }
    state.store(op.y, y)?;
    state.store_optional(op.stats, stats)?;
    state.store_optional(op.max, max)?;
    state.store_optional(op.sum_exp, sum_exp)
}

/// Keeps `row + shift + align ≥ col` (right) or `col + left − align > row` (left), where `align = seq_kv − seq_q` if both lengths are given, else 0.
/// Masked-out scores become `fill`.
pub(super) fn band_mask(state: &mut State<'_>, op: &BandMask) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let fill = state.number(Some(op.fill))?.unwrap_or(f64::NEG_INFINITY);
    let shift = state.number(op.shift_right)?.unwrap_or(0.0);
    let left = state.number(op.left)?.unwrap_or(0.0);
    let (seq_q, seq_kv) = (state.optional(op.seq_q)?, state.optional(op.seq_kv)?);
    let mut y = Vec::with_capacity(x.data.len());
    let mut from = x.data.iter().copied();
    each(&x.dims, |index| {
        let (&[batch, _, row, col], Some(x)) = (index, from.next()) else { return };
        let align = match (seq_q, seq_kv) {
            (Some(q), Some(kv)) => length(kv, batch) - length(q, batch),
            (Some(_) | None, _) => 0.0,
        };
        let (row, col) = (row as f64, col as f64);
        let keep = match op.side {
            BandSide::Right => row + shift + align >= col,
            BandSide::Left => col + left - align > row,
        };
        y.push(if keep { x } else { fill });
    });
    state.store(op.y, y)
}

/// Returns the length of a batch entry: one for all, or one per batch entry.
fn length(value: &Value, batch: i64) -> f64 {
    let at = if value.data.len() == 1 { 0 } else { batch as usize };
    value.data.get(at).copied().unwrap_or(0.0)
}
