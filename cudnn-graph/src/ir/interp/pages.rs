//! Paged caches and block scales.

use super::axes::{count, each, place};
use super::number::largest;
use super::scalar::least;
use super::{InterpError, State, Value};
use crate::ir::blocks::blocks_of;
use crate::ir::op::{BlockScaleDequantize, BlockScaleQuantize, PagedLoad};
use crate::ir::tensor::TensorId;

/// Gathers `y[b, h, s, d] = container[table[b, 0, s / block, 0], h, s % block, d]`; 0 at and past the length of a batch entry. Pages after the length
/// are not read.
pub(super) fn paged_load(state: &mut State<'_>, op: &PagedLoad) -> Result<(), InterpError> {
    let to = state.tensor(op.y)?;
    let (transposed, dims) = (op.transposed(to), to.dims.0.clone());
    let lengths: Vec<i64> = state.value(op.seq_len)?.data.iter().map(|&n| n as i64).collect();
    let mut flat = dims.clone();
    if transposed && flat.len() == 4 {
        flat.swap(2, 3);
    }
    let rows = gather(state, op.container, op.page_table, &lengths, &flat)?;
    let mut y = Vec::with_capacity(rows.len());
    each(&dims, |index| {
        let mut index = index.to_vec();
        if transposed && index.len() == 4 {
            index.swap(2, 3);
        }
        y.push(rows[place(&flat, index)]);
    });
    state.store(op.y, y)
}

/// Returns the rows of a paged cache as (b, h, s, d).
pub(super) fn gather(
    state: &State<'_>,
    container: TensorId,
    table: TensorId,
    lengths: &[i64],
    dims: &[i64],
) -> Result<Vec<f64>, InterpError> {
    let (container, table) = (state.value(container)?, state.value(table)?);
    let (Some(&blocks), Some(&block), Some(&pages)) = (container.dims.first(), container.dims.get(2), table.dims.get(2)) else {
        return Err(InterpError::NotDefined { at: state.at(), what: "a paged cache whose rank is not 4" });
    };
    let mut wrong = None;
    let mut y = Vec::with_capacity(count(dims));
    each(dims, |index| {
        let &[batch, head, s, d] = index else { return };
        if lengths.get(batch as usize).is_none_or(|&length| s >= length) {
            y.push(0.0);
            return;
        }
        let page = s / block;
        let found = table.data.get((batch * pages + page) as usize).map_or(-1, |&found| found as i64);
        if !(0..blocks).contains(&found) {
            wrong.get_or_insert((batch, page, found));
            return;
        }
        y.push(container.data[place(&container.dims, [found, head, s % block, d])]);
    });
    match wrong {
        Some((batch, page, block)) => Err(InterpError::Page { at: state.at(), batch, page, block, blocks }),
        None => Ok(y),
    }
}

/// Returns the position of the scale for each element of `x`.
fn scale_places(state: &State<'_>, x: &Value, scale: TensorId, block: &[i32]) -> Result<Vec<usize>, InterpError> {
    let scale = state.tensor(scale)?;
    let sizes =
        blocks_of(&x.dims, scale, block).map_err(|_| InterpError::NotDefined { at: state.at(), what: "a block scale of this shape" })?;
    let mut places = Vec::with_capacity(x.data.len());
    each(&x.dims, |index| places.push(place(&scale.dims.0, index.iter().zip(&sizes).map(|(i, size)| i / size))));
    Ok(places)
}

/// Computes `scale = largest magnitude of the block / largest number of y's type`, rounded to the type of the scale, and `y = x / scale`, 0 where the
/// scale is 0. A scale without a block, from padding by reordering, is 0.
pub(super) fn quantize(state: &mut State<'_>, op: &BlockScaleQuantize) -> Result<(), InterpError> {
    let x = state.value(op.x)?.clone();
    let places = scale_places(state, &x, op.scale, &op.block)?;
    let precision = state.precision;
    let top = largest(state.tensor(op.y)?.dtype);
    let mut amax = vec![0.0; count(&state.dims(op.scale)?)];
    for (&at, x) in places.iter().zip(&x.data) {
        amax[at] = -least(-amax[at], -x.abs());
    }
    state.store(op.scale, amax.iter().map(|&amax| precision.convert(amax / top, op.compute)).collect())?;
    let scale = &state.value(op.scale)?.data;
    let divide = |(&at, &x): (&usize, &f64)| if scale[at] == 0.0 { 0.0 } else { precision.convert(x / scale[at], op.compute) };
    let y = places.iter().zip(&x.data).map(divide).collect();
    state.store(op.y, y)
}

/// Computes `y = x · scale`.
pub(super) fn dequantize(state: &mut State<'_>, op: &BlockScaleDequantize) -> Result<(), InterpError> {
    let x = state.value(op.x)?;
    let places = scale_places(state, x, op.scale, &op.block)?;
    let scale = &state.value(op.scale)?.data;
    let y = places.iter().zip(&x.data).map(|(&at, &x)| state.precision.convert(x * scale[at], op.compute)).collect();
    state.store(op.y, y)
}
