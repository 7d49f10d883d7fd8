//! Concatenations, grouped matrix products and rotary embeddings.

use super::axes::{count, each, place};
use super::{InterpError, State, Value, accumulate};
use crate::ir::op::{Concat, MoeMatmul, MoeMatmulBackward, Rope, RopeBackward, Routing};
use crate::ir::tensor::TensorId;

pub(super) fn concat(state: &mut State<'_>, op: &Concat) -> Result<(), InterpError> {
    let dims = state.dims(op.y)?;
    let inputs: Vec<&Value> = op.inputs.iter().map(|&id| state.value(id)).collect::<Result<_, _>>()?;
    let axis = op.axis as usize;
    let mut y = Vec::with_capacity(count(&dims));
    each(&dims, |index| {
        let mut index = index.to_vec();
        for x in &inputs {
            if index[axis] < x.dims[axis] {
                y.push(x.data[place(&x.dims, index)]);
                return;
            }
            index[axis] -= x.dims[axis];
        }
    });
    state.store(op.y, y)
}

/// Returns the expert of each of `rows` rows.
fn experts(state: &State<'_>, first_token: TensorId, rows: i64) -> Result<Vec<usize>, InterpError> {
    let first: Vec<i64> = state.value(first_token)?.data.iter().map(|&n| n as i64).collect();
    if first.first() != Some(&0) || !first.is_sorted() || first.last().is_some_and(|&last| last > rows) {
        return Err(InterpError::NotDefined {
            at: state.at(),
            what: "first_token unless it starts with 0, does not decrease and ends within the rows",
        });
    }
    Ok((0..rows).map(|row| first.partition_point(|&first| first <= row) - 1).collect())
}

fn entry(state: &State<'_>, values: &Value, row: usize, limit: i64) -> Result<usize, InterpError> {
    let found = values.data.get(row).map_or(-1, |&n| n as i64);
    if (0..limit).contains(&found) {
        Ok(found as usize)
    } else {
        Err(InterpError::NotDefined { at: state.at(), what: "an index or slot that is out of range" })
    }
}

/// Computes row by row. A row of the result to which no row is scattered is 0.
pub(super) fn moe_matmul(state: &mut State<'_>, op: &MoeMatmul) -> Result<(), InterpError> {
    let (tokens, weights) = (state.value(op.tokens)?, state.value(op.weights)?);
    let dims = state.dims(op.y)?;
    let (k, n) = (weights.dims[1] as usize, weights.dims[2] as usize);
    let mut y = vec![0.0; count(&dims)];
    for (row, expert) in experts(state, op.first_token, dims[1])?.into_iter().enumerate() {
        let (from, to) = match op.routing {
            Routing::None => (row, row),
            Routing::Gather(index) => (entry(state, state.value(index)?, row, tokens.dims[1])?, row),
            Routing::Scatter { index, slot, top_k } => {
                let token = entry(state, state.value(index)?, row, dims[1] / i64::from(top_k))?;
                (row, token * top_k as usize + entry(state, state.value(slot)?, row, i64::from(top_k))?)
            }
        };
        for j in 0..n {
            let products = (0..k).map(|i| tokens.data[from * k + i] * weights.data[(expert * k + i) * n + j]);
            y[to * n + j] = products.fold(0.0, |sum, term| accumulate(state.precision, op.compute, sum, term));
        }
    }
    state.store(op.y, y)
}

pub(super) fn moe_matmul_backward(state: &mut State<'_>, op: &MoeMatmulBackward) -> Result<(), InterpError> {
    let (tokens, dy, dims) = (state.value(op.tokens)?, state.value(op.dy)?, state.dims(op.dweights)?);
    let (k, n) = (dims[1] as usize, dims[2] as usize);
    let mut dweights = vec![0.0; count(&dims)];
    for (row, expert) in experts(state, op.first_token, tokens.dims[1])?.into_iter().enumerate() {
        for i in 0..k {
            for j in 0..n {
                let sum = &mut dweights[(expert * k + i) * n + j];
                *sum = accumulate(state.precision, op.compute, *sum, tokens.data[row * k + i] * dy.data[row * n + j]);
            }
        }
    }
    state.store(op.dweights, dweights)
}

pub(super) fn rope(state: &mut State<'_>, op: &Rope) -> Result<(), InterpError> {
    rotate(state, op.x, op.angles, op.y, op.width, f64::from(op.scale), 1.0)
}

pub(super) fn rope_backward(state: &mut State<'_>, op: &RopeBackward) -> Result<(), InterpError> {
    rotate(state, op.dy, op.angles, op.dx, op.width, f64::from(op.scale), -1.0)
}

fn rotate(
    state: &mut State<'_>,
    x: TensorId,
    angles: TensorId,
    y: TensorId,
    width: Option<i64>,
    scale: f64,
    sign: f64,
) -> Result<(), InterpError> {
    let (x, angles) = (state.value(x)?, state.value(angles)?);
    let d = x.dims[3];
    let width = width.unwrap_or(d);
    let (passed, half) = (d - width, width / 2);
    let mut result = Vec::with_capacity(x.data.len());
    each(&x.dims, |index| {
        let (s, i) = (index[2], index[3]);
        let at = |i: i64| x.data[place(&x.dims, [index[0], index[1], s, i])];
        let lane = i - passed;
        let turned = if lane < 0 {
            at(i)
        } else {
            let angle = angles.data[place(&angles.dims, [s, 0, 0, lane % half])];
            let (sin, cos) = (sign * libm::sin(angle), libm::cos(angle));
            if lane < half { at(i) * cos - at(i + half) * sin } else { at(i) * cos + at(i - half) * sin }
        };
        result.push(scale * turned);
    });
    state.store(y, result)
}
