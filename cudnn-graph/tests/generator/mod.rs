//! Random graphs: a graph is a function of its seed.

mod dice;
mod elements;

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::interp::Value;
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{BnFinalizeInputs, BnGradientInputs, Graph, Mode, NormGradientInputs, RunningInputs, Scalar, Storage, TensorId};
use dice::Dice;
use std::collections::BTreeMap;

impl Dice {
    pub(crate) fn float(&mut self) -> DType {
        [F16, BF16, F32][self.roll(3) as usize]
    }
}

pub(crate) fn input(g: &mut Graph, dice: &mut Dice, dtype: DType, dims: Vec<i64>) -> TensorId {
    let name = format!("in{}", g.tensors().len());
    if dice.roll(2) == 0 { g.input(&name, dtype, dims) } else { g.input_channels_last(&name, dtype, dims) }
}

pub(crate) fn per_channel(dims: &[i64]) -> Vec<i64> {
    dims.iter().enumerate().map(|(axis, &n)| if axis == 1 { n } else { 1 }).collect()
}

fn geometry(dice: &mut Dice, axes: usize) -> ConvGeometry {
    let plain = ConvGeometry::new(axes).stride(dice.list(axes, 1, 2)).dilation(dice.list(axes, 1, 2));
    plain.padding(dice.list(axes, 1, 2)).post_padding(dice.list(axes, 1, 3))
}

/// The extents of a convolution of images of extents `x` with filters of extents `w`.
fn convolved(geometry: &ConvGeometry, x: &[i64], w: &[i64]) -> Vec<i64> {
    let spatial = (2..x.len()).map(|axis| geometry.outputs(axis - 2, x[axis], w[axis]).unwrap());
    [x[0], w[0]].into_iter().chain(spatial).collect()
}

fn convolve(g: &mut Graph, dice: &mut Dice, x: TensorId, dims: &[i64]) -> TensorId {
    let axes = dims.len() - 2;
    let divisors: Vec<i64> = (1..=dims[1]).filter(|n| dims[1] % n == 0).collect();
    let groups = divisors[dice.roll(divisors.len() as u64) as usize];
    let mut w = vec![groups * dice.from(1, 2), dims[1] / groups];
    w.extend(dice.list(axes, 1, 2));
    let (dtype, geometry) = (dice.float(), geometry(dice, axes));
    match dice.roll(3) {
        0 => {
            let filters = input(g, dice, dtype, w);
            g.convolution(x, filters, geometry)
        }
        // A gradient of a convolution to which x would be an input.
        1 => {
            let y = convolved(&geometry, dims, &w);
            let dy = input(g, dice, dtype, y);
            let dw = g.convolution_backward_filter(dy, x, w, geometry);
            g.output(dw, &format!("dw{}", g.tensors().len()), F32);
            x
        }
        _ => {
            let y = convolved(&geometry, dims, &w);
            let (dy, filters) = (input(g, dice, dtype, y), input(g, dice, dtype, w));
            let dx = g.convolution_backward_data(dy, filters, dims.to_vec(), geometry);
            g.pointwise(Mode::Add, &[x, dx])
        }
    }
}

fn normalize(g: &mut Graph, dice: &mut Dice, x: TensorId, dims: &[i64]) -> TensorId {
    let mode = NormMode::ALL[dice.roll(5) as usize];
    let scale_dims = match mode {
        NormMode::Batch | NormMode::Instance => per_channel(dims),
        NormMode::Layer | NormMode::Rms => [&[1], &dims[1..]].concat(),
        NormMode::AdaLayer => dims.to_vec(),
    };
    let scale = input(g, dice, F32, scale_dims.clone());
    let bias = (mode != NormMode::Rms).then(|| {
        let bias = input(g, dice, F32, scale_dims);
        g.set_strides(bias, g.get(scale).unwrap().strides.clone())
    });
    if mode != NormMode::Batch && dice.roll(2) == 0 {
        return g.norm_inference(mode, x, scale, bias, 1e-3);
    }
    let running = (mode == NormMode::Batch && dice.roll(2) == 0).then(|| {
        let [mean, variance] = [0, 1].map(|_| input(g, dice, F32, per_channel(dims)));
        RunningInputs { factor: 0.5, mean, variance }
    });
    let norm = g.norm_training(mode, x, scale, bias, 1e-3, running);
    if dice.roll(2) == 0 {
        let inputs = NormGradientInputs { x, dy: norm.y, scale, mean: norm.mean, inv_variance: norm.inv_variance };
        return g.norm_backward(mode, inputs).dx;
    }
    norm.y
}

fn pool(g: &mut Graph, dice: &mut Dice, x: TensorId, dims: &[i64]) -> TensorId {
    let axes = dims.len() - 2;
    if axes == 2 && g.get(x).is_some_and(|x| x.dtype == F32) && dice.roll(3) == 0 {
        return g.upsample(x);
    }
    let window =
        Window::new(vec![2; axes]).stride(dice.list(axes, 1, 2)).padding(dice.list(axes, 1, 1)).post_padding(dice.list(axes, 0, 1));
    let mode = ResampleMode::ALL[dice.roll(3) as usize];
    if dice.roll(2) == 0 {
        return g.resample(mode, x, window);
    }
    let (y, index) = match mode {
        ResampleMode::Max => {
            let (y, index) = g.max_pool_with_index(x, window.clone());
            (y, Some(index))
        }
        ResampleMode::AverageIncludePadding | ResampleMode::AverageExcludePadding => (g.resample(mode, x, window.clone()), None),
    };
    g.resample_backward(mode, y, index, dims.to_vec(), window)
}

/// Adds an op on `x`, and returns its result.
fn step(g: &mut Graph, dice: &mut Dice, x: TensorId) -> TensorId {
    let tensor = g.get(x).unwrap();
    let (dims, dtype) = (tensor.dims.0.clone(), tensor.dtype);
    match dice.roll(9) {
        0 | 1 => convolve(g, dice, x, &dims),
        2 => normalize(g, dice, x, &dims),
        3 => pool(g, dice, x, &dims),
        4 => {
            let two = g.scalar(Scalar::F32(2.0));
            let y = g.pointwise(Mode::Mul, &[x, two]);
            g.pointwise(Mode::SwishFwd, &[y])
        }
        5 => {
            let other = input(g, dice, dtype, dims.clone());
            let axis = dice.roll(dims.len() as u64) as i64;
            g.concat(&[x, other], axis)
        }
        6 => {
            let (sum, square_sum) = g.gen_stats(x);
            let [scale, bias, mean, variance] = [0; 4].map(|_| input(g, dice, F32, per_channel(&dims)));
            let running = RunningInputs { factor: 0.5, mean, variance };
            let count = dims.iter().product::<i64>() / dims[1];
            let last = g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: 1e-3, count, running });
            let [mean, inv_variance] = [last.mean, last.inv_variance];
            let dy = input(g, dice, F16, dims.clone());
            let d = g.bn_backward_weights(BnGradientInputs { x, dy, scale, mean, inv_variance });
            let y = g.pointwise(Mode::Mul, &[x, last.eq_scale]);
            let y = g.pointwise(Mode::Add, &[y, d.eq_bias]);
            g.pointwise(Mode::Add, &[y, last.eq_bias])
        }
        7 => {
            let mode = ReductionMode::ALL[dice.roll(5) as usize];
            let y = g.reduce(mode, x, per_channel(&dims));
            g.pointwise(Mode::Add, &[x, y])
        }
        _ => {
            let mut permutation: Vec<i64> = (0..dims.len() as i64).collect();
            permutation.swap(0, dice.roll(dims.len() as u64) as usize);
            g.transpose(x, &permutation)
        }
    }
}

fn experts(g: &mut Graph, dice: &mut Dice) {
    let (experts, rows, k, n) = (dice.from(1, 3), 2 * dice.from(1, 3), dice.from(1, 4), dice.from(1, 4));
    let dtype = dice.float();
    let tokens = g.input("tokens", dtype, [1, rows, k]);
    let weights = g.input("weights", dtype, [experts, k, n]);
    let first = g.input("first", I32, [experts, 1, 1]);
    let routing = match dice.roll(3) {
        0 => Routing::None,
        1 => Routing::Gather(g.input("index", I32, [1, rows, 1])),
        _ => {
            let (index, slot) = (g.input("index", I32, [1, rows, 1]), g.input("slot", I32, [1, rows, 1]));
            Routing::Scatter { index, slot, top_k: 2 }
        }
    };
    let y = g.moe_matmul(tokens, weights, first, routing);
    g.output(y, "y", dtype);
    let dw = g.moe_matmul_backward(tokens, y, first);
    g.output(dw, "dw", F32);
}

fn rotary(g: &mut Graph, dice: &mut Dice) {
    let (s, d) = (dice.from(1, 4), 2 * dice.from(2, 4));
    let width = (dice.roll(2) == 0).then_some(2);
    let x = g.input("x", F16, [1, 2, s, d]);
    let angles = g.input("angles", F32, [s, 1, 1, width.unwrap_or(d)]);
    let y = g.rope(x, angles, 0.5, width);
    let dx = g.rope_backward(y, angles, 0.5, width);
    g.output(dx, "dx", F16);
}

/// The graph of a seed.
pub(crate) fn graph(seed: u64) -> Graph {
    let mut dice = Dice(seed);
    let mut g = Graph::new();
    match dice.roll(16) {
        0 => experts(&mut g, &mut dice),
        1 => rotary(&mut g, &mut dice),
        2..=5 => elements::elementwise(&mut g, &mut dice),
        6 => elements::moves(&mut g, &mut dice),
        7 => elements::products(&mut g, &mut dice),
        8 => elements::scores(&mut g, &mut dice),
        9 => elements::scales_and_pages(&mut g, &mut dice),
        _ => {
            let axes = dice.from(1, 3) as usize;
            let dims = [dice.list(2, 1, 3), dice.list(axes, 2, 4)].concat();
            let dtype = dice.float();
            let mut x = input(&mut g, &mut dice, dtype, dims);
            for _ in 0..dice.from(1, 4) {
                x = step(&mut g, &mut dice, x);
            }
            let y = g.pointwise(Mode::Identity, &[x]);
            g.output(y, "y", F32);
        }
    }
    g
}

/// Values for every input: floats in a pattern, and zeros, which are valid indices, elsewhere.
pub(crate) fn inputs(graph: &Graph) -> BTreeMap<TensorId, Value> {
    let random = |op: &Op| matches!(op, Op::Rng(_));
    let written: Vec<TensorId> =
        graph.ops().iter().filter(|op| !random(op)).flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    let bits: Vec<TensorId> = graph.ops().iter().filter(|op| random(op)).flat_map(|op| op.operands().outputs).map(|o| o.tensor).collect();
    let needed =
        graph.ids().zip(graph.tensors()).filter(|(id, t)| bits.contains(id) || (t.storage == Storage::Device && !written.contains(id)));
    needed
        .map(|(id, tensor)| {
            let n = tensor.dims.elements().unwrap();
            let data: Vec<f64> = (0..n).map(|i| if tensor.dtype.is_float() { (i % 7) as f64 / 4.0 - 0.5 } else { 0.0 }).collect();
            (id, Value::new(tensor.dims.0.clone(), data))
        })
        .collect()
}

/// Collects the JSON pointers of all integers.
pub(crate) fn paths(json: &serde_json::Value, here: &mut String, found: &mut Vec<String>) {
    let mut inside = |key: &str, value: &serde_json::Value| {
        let length = here.len();
        here.push('/');
        here.push_str(key);
        paths(value, here, found);
        here.truncate(length);
    };
    match json {
        serde_json::Value::Array(items) => items.iter().enumerate().for_each(|(n, item)| inside(&n.to_string(), item)),
        serde_json::Value::Object(fields) => fields.iter().for_each(|(key, item)| inside(key, item)),
        serde_json::Value::Number(n) if n.is_i64() || n.is_u64() => found.push(here.clone()),
        serde_json::Value::Number(_) | serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {}
    }
}
