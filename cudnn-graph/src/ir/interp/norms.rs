//! Norms. Statistics and results are computed in f64 and rounded once, when they are stored.

use super::axes::{count, each, place};
use super::{InterpError, State, Value};
use crate::ir::norms::statistics;
use crate::ir::op::{BnBackwardWeights, BnFinalize, GenStats, NormBackward, NormForward, NormMode, RunningStats};
use crate::ir::tensor::TensorId;

/// Returns the position of an element of shorter axes that the element at `index` uses.
fn shared(dims: &[i64], index: &[i64]) -> usize {
    place(dims, index.iter().zip(dims).map(|(&i, &n)| if n == 1 { 0 } else { i }))
}

/// Returns the sums of `f(index, position)` over the elements of `x`, one for each element of `dims`.
fn sums(x: &[i64], dims: &[i64], mut f: impl FnMut(&[i64], usize) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0; count(dims)];
    each(x, |index| sums[shared(dims, index)] += f(index, place(x, index.iter().copied())));
    sums
}

fn stats_dims(state: &State<'_>, mode: NormMode, x: &[i64], scale: &[i64]) -> Result<Vec<i64>, InterpError> {
    statistics(mode, x, scale).map_err(|_| InterpError::NotDefined { at: state.at(), what: "a norm with a scale of this shape" })
}

pub(super) fn forward(state: &mut State<'_>, op: &NormForward) -> Result<(), InterpError> {
    let (x, scale, bias) = (state.value(op.x)?.clone(), state.value(op.scale)?.clone(), state.optional(op.bias)?.cloned());
    let epsilon = state.number(Some(op.epsilon))?.unwrap_or(0.0);
    let dims = stats_dims(state, op.mode, &x.dims, &scale.dims)?;
    let n = (x.data.len() / count(&dims).max(1)) as f64;
    let mean = match op.mode {
        NormMode::Rms => vec![0.0; count(&dims)],
        NormMode::Layer | NormMode::Instance | NormMode::Batch | NormMode::AdaLayer => {
            sums(&x.dims, &dims, |_, at| x.data[at]).into_iter().map(|sum| sum / n).collect()
        }
    };
    let squares = sums(&x.dims, &dims, |index, at| (x.data[at] - mean[shared(&dims, index)]).powi(2));
    let variance: Vec<f64> = squares.iter().map(|sum| sum / n).collect();
    let inverse: Vec<f64> = variance.iter().map(|variance| 1.0 / (variance + epsilon).sqrt()).collect();
    let mut y = Vec::with_capacity(x.data.len());
    each(&x.dims, |index| {
        let (group, at) = (shared(&dims, index), shared(&scale.dims, index));
        let normal = (x.data[place(&x.dims, index.iter().copied())] - mean[group]) * inverse[group];
        y.push(normal * scale.data[at] + bias.as_ref().map_or(0.0, |bias| bias.data[at]));
    });
    if let Some(stats) = &op.running {
        running(state, stats, &mean, &variance, n)?;
    }
    state.store(op.y, y)?;
    state.store_optional(op.mean, mean)?;
    state.store_optional(op.inv_variance, inverse)
}

fn running(state: &mut State<'_>, op: &RunningStats, mean: &[f64], variance: &[f64], n: f64) -> Result<(), InterpError> {
    let factor = state.number(Some(op.factor))?.unwrap_or(0.0);
    let mix = |old: &Value, new: &mut dyn Iterator<Item = f64>| -> Vec<f64> {
        old.data.iter().zip(new).map(|(old, new)| (1.0 - factor) * old + factor * new).collect()
    };
    let unbiased = if n > 1.0 { n / (n - 1.0) } else { 1.0 };
    let next_mean = mix(state.value(op.mean)?, &mut mean.iter().copied());
    let next_variance = mix(state.value(op.variance)?, &mut variance.iter().map(|v| v * unbiased));
    state.store(op.next_mean, next_mean)?;
    state.store(op.next_variance, next_variance)
}

pub(super) fn backward(state: &mut State<'_>, op: &NormBackward) -> Result<(), InterpError> {
    let (x, dy, scale) = (state.value(op.x)?.clone(), state.value(op.dy)?.clone(), state.value(op.scale)?.clone());
    let (mean, inverse) = (state.optional(op.mean)?.cloned(), state.value(op.inv_variance)?.clone());
    let dims = stats_dims(state, op.mode, &x.dims, &scale.dims)?;
    let n = (x.data.len() / count(&dims).max(1)) as f64;
    let normal = |index: &[i64], at: usize| {
        let group = shared(&dims, index);
        (x.data[at] - mean.as_ref().map_or(0.0, |mean| mean.data[group])) * inverse.data[group]
    };
    let inner = |index: &[i64], at: usize| dy.data[at] * scale.data[shared(&scale.dims, index)];
    let mean_inner = match op.mode {
        NormMode::Rms => vec![0.0; count(&dims)],
        NormMode::Layer | NormMode::Instance | NormMode::Batch | NormMode::AdaLayer => sums(&x.dims, &dims, &inner),
    };
    let mean_product = sums(&x.dims, &dims, |index, at| inner(index, at) * normal(index, at));
    let mut dx = Vec::with_capacity(x.data.len());
    each(&x.dims, |index| {
        let (group, at) = (shared(&dims, index), place(&x.dims, index.iter().copied()));
        dx.push(inverse.data[group] * (inner(index, at) - mean_inner[group] / n - normal(index, at) * mean_product[group] / n));
    });
    let dscale = sums(&x.dims, &scale.dims, |index, at| dy.data[at] * normal(index, at));
    let dbias = sums(&x.dims, &scale.dims, |_, at| dy.data[at]);
    state.store(op.dx, dx)?;
    state.store(op.dscale, dscale)?;
    state.store_optional(op.dbias, dbias)
}

pub(super) fn gen_stats(state: &mut State<'_>, op: &GenStats) -> Result<(), InterpError> {
    let (x, dims) = (state.value(op.x)?, state.dims(op.sum)?);
    let sum = sums(&x.dims, &dims, |_, at| x.data[at]);
    let squares = sums(&x.dims, &dims, |_, at| x.data[at] * x.data[at]);
    state.store(op.sum, sum)?;
    state.store(op.square_sum, squares)
}

pub(super) fn bn_finalize(state: &mut State<'_>, op: &BnFinalize) -> Result<(), InterpError> {
    let data = |id: TensorId| -> Result<Vec<f64>, InterpError> { Ok(state.value(id)?.data.clone()) };
    let (sum, squares, scale, bias) = (data(op.sum)?, data(op.square_sum)?, data(op.scale)?, data(op.bias)?);
    let epsilon = state.number(Some(op.epsilon))?.unwrap_or(0.0);
    let n = state.number(Some(op.count))?.unwrap_or(1.0);
    let mean: Vec<f64> = sum.iter().map(|sum| sum / n).collect();
    let variance: Vec<f64> = squares.iter().zip(&mean).map(|(square, mean)| square / n - mean * mean).collect();
    let inverse: Vec<f64> = variance.iter().map(|variance| 1.0 / (variance + epsilon).sqrt()).collect();
    let eq_scale: Vec<f64> = scale.iter().zip(&inverse).map(|(scale, inverse)| scale * inverse).collect();
    let eq_bias = bias.iter().zip(&mean).zip(&eq_scale).map(|((bias, mean), scale)| bias - mean * scale).collect();
    running(state, &op.running, &mean, &variance, n)?;
    state.store(op.mean, mean)?;
    state.store(op.inv_variance, inverse)?;
    state.store(op.eq_scale, eq_scale)?;
    state.store(op.eq_bias, eq_bias)
}

pub(super) fn bn_backward_weights(state: &mut State<'_>, op: &BnBackwardWeights) -> Result<(), InterpError> {
    let (x, dy, dims) = (state.value(op.x)?, state.value(op.dy)?, state.dims(op.mean)?);
    let (scale, mean, inverse) = (&state.value(op.scale)?.data, &state.value(op.mean)?.data, &state.value(op.inv_variance)?.data);
    let n = (x.data.len() / count(&dims).max(1)) as f64;
    let dbias = sums(&x.dims, &dims, |_, at| dy.data[at]);
    let dscale = sums(&x.dims, &dims, |index, at| {
        let channel = shared(&dims, index);
        dy.data[at] * (x.data[at] - mean[channel]) * inverse[channel]
    });
    let channels = 0..count(&dims);
    let eq_scale_dy: Vec<f64> = channels.clone().map(|c| scale[c] * inverse[c]).collect();
    let eq_scale_x: Vec<f64> = channels.clone().map(|c| -eq_scale_dy[c] * inverse[c] * dscale[c] / n).collect();
    let eq_bias = channels.map(|c| -eq_scale_dy[c] * dbias[c] / n - mean[c] * eq_scale_x[c]).collect();
    state.store(op.dscale, dscale)?;
    state.store(op.dbias, dbias)?;
    state.store(op.eq_scale_dy, eq_scale_dy)?;
    state.store(op.eq_scale_x, eq_scale_x)?;
    state.store(op.eq_bias, eq_bias)
}
