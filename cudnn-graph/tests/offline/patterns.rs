//! The graphs of the support table: one op each, and fusions that cuDNN supports.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{
    BnFinalizeInputs, BnGradientInputs, Graph, Mode, NormGradientInputs, Reordering, RunningInputs, Scalar, Tensor, TensorId,
};

/// One row of the table: a graph for each element type.
pub(crate) struct Pattern {
    /// The operation, as the table prints it.
    pub(crate) name: &'static str,
    /// The element types for which it is planned.
    pub(crate) types: &'static [DType],
    /// Builds the graph for an element type.
    pub(crate) build: fn(&mut Graph, DType),
}

const HALF: &[DType] = &[F16, BF16];
const FLOAT: &[DType] = &[F16, BF16, F32];

const N: i64 = 8;
const C: i64 = 64;
const K: i64 = 64;
const H: i64 = 16;

fn images(g: &mut Graph, name: &str, t: DType, channels: i64) -> TensorId {
    g.input_channels_last(name, t, [N, channels, H, H])
}

fn filters(g: &mut Graph, t: DType) -> TensorId {
    g.input_channels_last("w", t, [K, C, 3, 3])
}

fn per_channel(g: &mut Graph, name: &str, t: DType) -> TensorId {
    g.input_channels_last(name, t, [1, K, 1, 1])
}

fn same() -> ConvGeometry {
    ConvGeometry::new(2).padding([1, 1])
}

fn conv(g: &mut Graph, t: DType) -> TensorId {
    let (x, w) = (images(g, "x", t, C), filters(g, t));
    g.convolution(x, w, same())
}

fn rows(g: &mut Graph, name: &str, t: DType) -> TensorId {
    g.input_channels_last(name, t, [512, 1024, 1, 1])
}

fn row(g: &mut Graph, name: &str, t: DType) -> TensorId {
    g.input_channels_last(name, t, [1, 1024, 1, 1])
}

fn statistic(g: &mut Graph, name: &str) -> TensorId {
    g.input_channels_last(name, F32, [512, 1, 1, 1])
}

fn product(g: &mut Graph, t: DType) -> TensorId {
    let (a, b) = (g.input("a", t, [1, 256, 128]), g.input("b", t, [1, 128, 512]));
    g.matmul(a, b)
}

fn norm_training(g: &mut Graph, t: DType, mode: NormMode) {
    let (x, scale) = (rows(g, "x", t), row(g, "scale", F32));
    let bias = (mode != NormMode::Rms).then(|| row(g, "bias", F32));
    let norm = g.norm_training(mode, x, scale, bias, 1e-5, None);
    g.output(norm.y, "y", t);
}

fn norm_inference(g: &mut Graph, t: DType, mode: NormMode) {
    let (x, scale) = (rows(g, "x", t), row(g, "scale", F32));
    let bias = (mode != NormMode::Rms).then(|| row(g, "bias", F32));
    let y = g.norm_inference(mode, x, scale, bias, 1e-5);
    g.output(y, "y", t);
}

fn norm_backward(g: &mut Graph, t: DType, mode: NormMode) {
    let (x, dy, scale) = (rows(g, "x", t), rows(g, "dy", t), row(g, "scale", F32));
    let mean = (mode != NormMode::Rms).then(|| statistic(g, "mean"));
    let inv_variance = statistic(g, "inv_variance");
    let d = g.norm_backward(mode, NormGradientInputs { x, dy, scale, mean, inv_variance });
    g.output(d.dx, "dx", t);
}

fn reduce(g: &mut Graph, t: DType, mode: ReductionMode) {
    let x = images(g, "x", t, C);
    let y = g.reduce(mode, x, [1, C, 1, 1]);
    g.set_strides(y, [C, 1, C, C]);
    g.output(y, "y", F32);
}

fn pool(g: &mut Graph, t: DType, mode: ResampleMode) {
    let x = images(g, "x", t, C);
    let y = g.resample(mode, x, Window::new([2, 2]));
    g.output(y, "y", t);
}

/// A product with weights of type `weight`, which have a scale for each 32 of one column.
fn weights(g: &mut Graph, t: DType, weight: DType) {
    let (a, b) = (g.input("a", t, [1, 256, 128]), g.input("b", weight, [1, 128, 512]));
    let scale = g.input("scale", t, [1, 4, 512]);
    let b = g.block_scale_dequantize(b, scale, &[32, 1]);
    g.set_dtype(b, t);
    let y = g.matmul(a, b);
    g.output(y, "y", t);
}

fn moe(g: &mut Graph, t: DType, routing: fn(&mut Graph) -> Routing) {
    let tokens = g.input("tokens", t, [1, 256, 128]);
    let weights = g.tensor(Tensor::device("weights", t, [8, 128, 256]).strides([128 * 256, 1, 128]));
    let first = g.input("first_token", I32, [8, 1, 1]);
    let routing = routing(g);
    let y = g.moe_matmul(tokens, weights, first, routing);
    g.output(y, "y", t);
}

/// Block scales in the order that tensor cores read.
fn reordered(name: &str, dims: [i64; 3], strides: [i64; 3]) -> Tensor {
    Tensor { reordering: Reordering::F8x128x4, ..Tensor::device(name, F8E8M0, dims).strides(strides) }
}

/// Every row of the table.
pub(crate) fn patterns() -> Vec<Pattern> {
    let p = |name, types, build| Pattern { name, types, build };
    vec![
        p("conv forward", FLOAT, |g, t| {
            let y = conv(g, t);
            g.output(y, "y", t);
        }),
        p("conv forward, NCHW", FLOAT, |g, t| {
            let (x, w) = (g.input("x", t, [N, C, H, H]), g.input("w", t, [K, C, 3, 3]));
            let y = g.convolution(x, w, same());
            g.output(y, "y", t);
        }),
        p("conv forward, 4 groups", HALF, |g, t| {
            let (x, w) = (images(g, "x", t, C), g.input_channels_last("w", t, [K, C / 4, 3, 3]));
            let y = g.convolution(x, w, same());
            g.output(y, "y", t);
        }),
        p("conv forward, 1 spatial axis", HALF, |g, t| {
            let (x, w) = (g.input_channels_last("x", t, [N, C, 64]), g.input_channels_last("w", t, [K, C, 3]));
            let y = g.convolution(x, w, ConvGeometry::new(1));
            g.output(y, "y", t);
        }),
        p("conv forward, 3 spatial axes", HALF, |g, t| {
            let (x, w) = (g.input_channels_last("x", t, [2, C, 8, 8, 8]), g.input_channels_last("w", t, [K, C, 3, 3, 3]));
            let y = g.convolution(x, w, ConvGeometry::new(3).padding([1, 1, 1]));
            g.output(y, "y", t);
        }),
        p("conv forward, stride, dilation, post padding", HALF, |g, t| {
            let (x, w) = (images(g, "x", t, C), filters(g, t));
            let y = g.convolution(x, w, ConvGeometry::new(2).stride([2, 1]).dilation([1, 2]).padding([1, 0]).post_padding([2, 1]));
            g.output(y, "y", t);
        }),
        p("conv data gradient", FLOAT, |g, t| {
            let (dy, w) = (images(g, "dy", t, K), filters(g, t));
            let dx = g.convolution_backward_data(dy, w, [N, C, H, H], same());
            g.output(dx, "dx", t);
        }),
        p("conv filter gradient", FLOAT, |g, t| {
            let (dy, x) = (images(g, "dy", t, K), images(g, "x", t, C));
            let dw = g.convolution_backward_filter(dy, x, [K, C, 3, 3], same());
            g.output(dw, "dw", t);
        }),
        p("conv + bias + relu", FLOAT, |g, t| {
            let y = conv(g, t);
            let bias = per_channel(g, "bias", t);
            let y = g.pointwise(Mode::Add, &[y, bias]);
            let y = g.pointwise(Mode::ReluFwd, &[y]);
            g.output(y, "y", t);
        }),
        p("conv + scale + bias + add + relu", HALF, |g, t| {
            let y = conv(g, t);
            let (scale, bias, z) = (per_channel(g, "scale", F32), per_channel(g, "bias", F32), images(g, "z", t, K));
            let y = g.pointwise(Mode::Mul, &[y, scale]);
            let y = g.pointwise(Mode::Add, &[y, bias]);
            let y = g.pointwise(Mode::Add, &[y, z]);
            let y = g.pointwise(Mode::ReluFwd, &[y]);
            g.output(y, "y", t);
        }),
        p("conv data gradient + relu gradient", HALF, |g, t| {
            let (dy, w, x) = (images(g, "dy", t, K), filters(g, t), images(g, "x", t, C));
            let dx = g.convolution_backward_data(dy, w, [N, C, H, H], same());
            let dx = g.pointwise(Mode::ReluBwd, &[dx, x]);
            g.output(dx, "dx", t);
        }),
        p("scale + bias + relu + conv", HALF, |g, t| {
            let x = images(g, "x", t, C);
            let (scale, bias, w) = (per_channel(g, "scale", t), per_channel(g, "bias", t), filters(g, t));
            let x = g.pointwise(Mode::Mul, &[x, scale]);
            let x = g.pointwise(Mode::Add, &[x, bias]);
            let x = g.pointwise(Mode::ReluFwd, &[x]);
            g.set_dtype(x, t);
            let y = g.convolution(x, w, same());
            g.output(y, "y", t);
        }),
        p("conv + gen_stats", HALF, |g, t| {
            let y = conv(g, t);
            g.output(y, "y", t);
            g.gen_stats(y);
        }),
        p("gen_stats", HALF, |g, t| {
            let x = images(g, "x", t, C);
            g.gen_stats(x);
        }),
        p("bn_finalize", &[F32], |g, _| {
            let names = ["sum", "square_sum", "scale", "bias", "running_mean", "running_variance"];
            let [sum, square_sum, scale, bias, mean, variance] = names.map(|name| per_channel(g, name, F32));
            let running = RunningInputs { factor: 0.1, mean, variance };
            g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: 1e-5, count: N * H * H, running });
        }),
        p("bn_backward_weights", HALF, |g, t| {
            let (x, dy) = (images(g, "x", t, K), images(g, "dy", t, K));
            let [scale, mean, inv_variance] = ["scale", "mean", "inv"].map(|name| per_channel(g, name, F32));
            g.bn_backward_weights(BnGradientInputs { x, dy, scale, mean, inv_variance });
        }),
        p("conv data gradient + relu gradient + bn_backward_weights", HALF, |g, t| {
            let (dy, w) = (images(g, "dy", t, K), filters(g, t));
            let dx = g.convolution_backward_data(dy, w, [N, C, H, H], same());
            let x = images(g, "x", t, C);
            let dx = g.pointwise(Mode::ReluBwd, &[dx, x]);
            g.output(dx, "dx", t);
            let [scale, mean, inv_variance] = ["scale", "mean", "inv"].map(|name| per_channel(g, name, F32));
            g.bn_backward_weights(BnGradientInputs { x, dy: dx, scale, mean, inv_variance });
        }),
        p("batch norm forward", HALF, |g, t| {
            let x = images(g, "x", t, K);
            let [scale, bias, mean, variance] = ["scale", "bias", "mean", "variance"].map(|name| per_channel(g, name, F32));
            let running = Some(RunningInputs { factor: 0.1, mean, variance });
            let norm = g.norm_training(NormMode::Batch, x, scale, Some(bias), 1e-5, running);
            g.output(norm.y, "y", t);
        }),
        p("batch norm forward + add + relu", HALF, |g, t| {
            let (x, z) = (images(g, "x", t, K), images(g, "z", t, K));
            let [scale, bias] = ["scale", "bias"].map(|name| per_channel(g, name, F32));
            let norm = g.norm_training(NormMode::Batch, x, scale, Some(bias), 1e-5, None);
            let y = g.pointwise(Mode::Add, &[norm.y, z]);
            let y = g.pointwise(Mode::ReluFwd, &[y]);
            g.output(y, "y", t);
        }),
        p("batch norm backward", HALF, |g, t| {
            let (x, dy) = (images(g, "x", t, K), images(g, "dy", t, K));
            let [scale, mean, inv_variance] = ["scale", "mean", "inv"].map(|name| per_channel(g, name, F32));
            let d = g.norm_backward(NormMode::Batch, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
            g.output(d.dx, "dx", t);
        }),
        p("instance norm forward", HALF, |g, t| {
            let x = images(g, "x", t, K);
            let [scale, bias] = ["scale", "bias"].map(|name| per_channel(g, name, F32));
            let norm = g.norm_training(NormMode::Instance, x, scale, Some(bias), 1e-5, None);
            g.output(norm.y, "y", t);
        }),
        p("instance norm backward", HALF, |g, t| {
            let (x, dy, scale) = (images(g, "x", t, K), images(g, "dy", t, K), per_channel(g, "scale", F32));
            let [mean, inv_variance] = ["mean", "inv"].map(|name| g.input_channels_last(name, F32, [N, K, 1, 1]));
            let d = g.norm_backward(NormMode::Instance, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
            g.output(d.dx, "dx", t);
        }),
        p("layer norm forward, inference", FLOAT, |g, t| norm_inference(g, t, NormMode::Layer)),
        p("layer norm forward, training", FLOAT, |g, t| norm_training(g, t, NormMode::Layer)),
        p("layer norm backward", FLOAT, |g, t| norm_backward(g, t, NormMode::Layer)),
        p("RMS norm forward, inference", FLOAT, |g, t| norm_inference(g, t, NormMode::Rms)),
        p("RMS norm forward, training", FLOAT, |g, t| norm_training(g, t, NormMode::Rms)),
        p("RMS norm backward", FLOAT, |g, t| norm_backward(g, t, NormMode::Rms)),
        p("adaptive layer norm forward", HALF, |g, t| {
            let x = g.input("x", t, [4, 128, 1024]);
            let (scale, bias) = (g.input("scale", t, [4, 1, 1024]), g.input("bias", t, [4, 1, 1024]));
            let norm = g.norm_training(NormMode::AdaLayer, x, scale, Some(bias), 1e-5, None);
            g.output(norm.y, "y", t);
        }),
        p("adaptive layer norm backward", HALF, |g, t| {
            let (x, dy) = (g.input("x", t, [4, 128, 1024]), g.input("dy", t, [4, 128, 1024]));
            let scale = g.input("scale", t, [4, 1, 1024]);
            let (mean, inv_variance) = (g.input("mean", F32, [4, 128, 1]), g.input("inv", F32, [4, 128, 1]));
            let d = g.norm_backward(NormMode::AdaLayer, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
            g.output(d.dx, "dx", t);
            // With gradients of the scale and the bias in f32, cuDNN offers no engine.
            g.set_dtype(d.dscale, t);
            d.dbias.map(|dbias| g.set_dtype(dbias, t));
        }),
        p("add + layer norm", HALF, |g, t| {
            let (x, z) = (rows(g, "x", t), rows(g, "z", t));
            let (scale, bias) = (row(g, "scale", F32), row(g, "bias", F32));
            let sum = g.pointwise(Mode::Add, &[x, z]);
            let y = g.norm_inference(NormMode::Layer, sum, scale, Some(bias), 1e-5);
            g.output(y, "y", t);
        }),
        p("layer norm + add", HALF, |g, t| {
            let (x, z) = (rows(g, "x", t), rows(g, "z", t));
            let (scale, bias) = (row(g, "scale", F32), row(g, "bias", F32));
            let y = g.norm_inference(NormMode::Layer, x, scale, Some(bias), 1e-5);
            let y = g.pointwise(Mode::Add, &[y, z]);
            g.output(y, "y", t);
        }),
        p("layer norm + mul to 8-bit floats", HALF, |g, t| {
            let x = rows(g, "x", t);
            let (scale, bias, factor) = (row(g, "scale", F32), row(g, "bias", F32), g.input("factor", F32, [1, 1, 1, 1]));
            let y = g.norm_inference(NormMode::Layer, x, scale, Some(bias), 1e-5);
            let y = g.pointwise(Mode::Mul, &[y, factor]);
            g.output(y, "y", F8E4M3);
        }),
        p("max pooling", FLOAT, |g, t| pool(g, t, ResampleMode::Max)),
        p("max pooling with index", HALF, |g, t| {
            let x = images(g, "x", t, C);
            let (y, _) = g.max_pool_with_index(x, Window::new([2, 2]));
            g.output(y, "y", t);
        }),
        p("max pooling backward", HALF, |g, t| {
            let dy = g.input_channels_last("dy", t, [N, C, H / 2, H / 2]);
            let index = g.input_channels_last("index", I8, [N, C, H / 2, H / 2]);
            let dx = g.resample_backward(ResampleMode::Max, dy, Some(index), [N, C, H, H], Window::new([2, 2]));
            g.output(dx, "dx", t);
        }),
        p("average pooling, padding included", FLOAT, |g, t| pool(g, t, ResampleMode::AverageIncludePadding)),
        p("average pooling, padding excluded", FLOAT, |g, t| pool(g, t, ResampleMode::AverageExcludePadding)),
        p("average pooling backward", HALF, |g, t| {
            let dy = g.input_channels_last("dy", t, [N, C, H / 2, H / 2]);
            let dx = g.resample_backward(ResampleMode::AverageIncludePadding, dy, None, [N, C, H, H], Window::new([2, 2]));
            g.output(dx, "dx", t);
        }),
        p("bilinear upsampling", &[F32], |g, t| {
            let x = images(g, "x", t, C);
            let y = g.upsample(x);
            g.output(y, "y", t);
        }),
        p("bilinear upsampling of channels first", &[F32], |g, t| {
            let x = g.input("x", t, [N, C, H, H]);
            let y = g.upsample(x);
            g.output(y, "y", t);
        }),
        p("bilinear upsampling + bias + relu", &[F32], |g, t| {
            let (x, bias) = (images(g, "x", t, C), g.input_channels_last("bias", t, [1, C, 1, 1]));
            let y = g.upsample(x);
            let y = g.pointwise(Mode::Add, &[y, bias]);
            let y = g.pointwise(Mode::ReluFwd, &[y]);
            g.output(y, "y", t);
        }),
        p("matmul", FLOAT, |g, t| {
            let y = product(g, t);
            g.output(y, "y", t);
        }),
        p("matmul, 8-bit floats with scales", &[F8E4M3, F8E5M2], |g, t| {
            let a = g.input("a", t, [1, 256, 128]);
            let b = g.tensor(Tensor::device("b", t, [1, 128, 512]).strides([128 * 512, 1, 128]));
            let y = g.matmul(a, b);
            let [sa, sb] = ["descale_a", "descale_b"].map(|name| g.input(name, F32, [1, 1, 1]));
            let y = g.pointwise(Mode::Mul, &[y, sa]);
            let y = g.pointwise(Mode::Mul, &[y, sb]);
            g.output(y, "y", BF16);
        }),
        p("matmul + bias + gelu", HALF, |g, t| {
            let y = product(g, t);
            let bias = g.input("bias", t, [1, 1, 512]);
            let y = g.pointwise(Mode::Add, &[y, bias]);
            let y = g.pointwise(Mode::GeluFwd, &[y]);
            g.output(y, "y", t);
        }),
        p("matmul + reduction", HALF, |g, t| {
            let y = product(g, t);
            let y = g.reduce(ReductionMode::Add, y, [1, 256, 1]);
            g.output(y, "y", F32);
        }),
        p("two matmuls + swish gate", HALF, |g, t| {
            let a = g.input("a", t, [1, 256, 128]);
            let (b, c) = (g.input("gate", t, [1, 128, 512]), g.input("up", t, [1, 128, 512]));
            let (gate, up) = (g.matmul(a, b), g.matmul(a, c));
            let gate = g.pointwise(Mode::SwishFwd, &[gate]);
            let y = g.pointwise(Mode::Mul, &[gate, up]);
            g.output(y, "y", t);
        }),
        p("matmul + swish gate from memory", HALF, |g, t| {
            let up = product(g, t);
            let gate = g.input("gate", t, [1, 256, 512]);
            let gate = g.pointwise(Mode::SwishFwd, &[gate]);
            let y = g.pointwise(Mode::Mul, &[gate, up]);
            g.output(y, "y", t);
        }),
        p("mul + matmul", HALF, |g, t| {
            let (a, b, s) = (g.input("a", t, [1, 256, 128]), g.input("b", t, [1, 128, 512]), g.input("scale", t, [1, 256, 1]));
            let a = g.pointwise(Mode::Mul, &[a, s]);
            g.set_dtype(a, t);
            let y = g.matmul(a, b);
            g.output(y, "y", t);
        }),
        p("matmul with 4-bit integer weights", HALF, |g, t| {
            let (a, b) = (g.input("a", t, [1, 256, 128]), g.input("b", I4, [1, 128, 512]));
            let b = g.pointwise(Mode::Identity, &[b]);
            g.set_dtype(b, t);
            let y = g.matmul(a, b);
            g.output(y, "y", t);
        }),
        p("4-bit integer weights with a scale per block + matmul", HALF, |g, t| weights(g, t, I4)),
        p("8-bit float weights with a scale per block + matmul", HALF, |g, t| weights(g, t, F8E4M3)),
        p("matmul with 8-bit integer weights", HALF, |g, t| {
            let (a, b) = (g.input("a", t, [1, 256, 128]), g.input("b", I8, [1, 128, 512]));
            let b = g.pointwise(Mode::Identity, &[b]);
            g.set_dtype(b, t);
            let y = g.matmul(a, b);
            g.output(y, "y", t);
        }),
        p("scalar · x + 1", FLOAT, |g, t| {
            let x = g.input("x", t, [4, 128, 256]);
            let (two, one) = (g.scalar(Scalar::F32(2.0)), g.scalar(Scalar::F32(1.0)));
            let y = g.pointwise(Mode::Mul, &[x, two]);
            let y = g.pointwise(Mode::Add, &[y, one]);
            g.output(y, "y", t);
        }),
        p("reduction, add, per channel", HALF, |g, t| reduce(g, t, ReductionMode::Add)),
        p("reduction, mul, per channel", HALF, |g, t| reduce(g, t, ReductionMode::Mul)),
        p("reduction, min, per channel", HALF, |g, t| reduce(g, t, ReductionMode::Min)),
        p("reduction, max, per channel", HALF, |g, t| reduce(g, t, ReductionMode::Max)),
        p("reduction, amax, per channel", HALF, |g, t| reduce(g, t, ReductionMode::Amax)),
        p("softmax", HALF, |g, t| {
            let x = g.input("x", t, [2, 4, 128, 256]);
            let y = g.softmax(x, None, None);
            g.output(y, "y", t);
        }),
        p("concat", HALF, |g, t| {
            let (a, b) = (images(g, "a", t, C), images(g, "b", t, C));
            let y = g.concat(&[a, b], 1);
            g.output(y, "y", t);
        }),
        p("concat of images", HALF, |g, t| {
            let (a, b) = (images(g, "a", t, C), images(g, "b", t, C));
            let y = g.concat(&[a, b], 0);
            g.output(y, "y", t);
        }),
        p("transpose", HALF, |g, t| {
            let x = g.input("x", t, [4, 128, 256]);
            let y = g.transpose(x, &[0, 2, 1]);
            g.output(y, "y", t);
        }),
        p("reshape", HALF, |g, t| {
            let x = g.input("x", t, [4, 128, 256]);
            let y = g.reshape(x, [1, 512, 256], [512 * 256, 256, 1], None);
            g.output(y, "y", t);
        }),
        p("slice", HALF, |g, t| {
            let x = g.input("x", t, [4, 128, 256]);
            let y = g.slice(x, &[0, 64, 0], &[4, 128, 256]);
            g.output(y, "y", t);
        }),
        p("slice + matmul", HALF, |g, t| {
            let (a, b) = (g.input("a", t, [1, 512, 128]), g.input("b", t, [1, 128, 512]));
            let a = g.slice(a, &[0, 0, 0], &[1, 256, 128]);
            g.set_strides(a, [512 * 128, 128, 1]);
            let y = g.matmul(a, b);
            g.output(y, "y", t);
        }),
        p("rng", &[F32], |g, t| {
            let y = g.rng(Distribution::Uniform(0.0, 1.0), Seed::Value(7), None, [4, 128, 256]);
            g.output(y, "y", t);
        }),
        p("rng, bernoulli", &[F32], |g, t| {
            let (seed, offset) = (g.input("seed", I64, [1, 1, 1]), g.input("offset", I64, [1, 1, 1]));
            let y = g.rng(Distribution::Bernoulli(0.5), Seed::Tensor(seed), Some(offset), [4, 128, 256]);
            g.output(y, "y", t);
        }),
        p("MoE matmul", HALF, |g, t| moe(g, t, |_| Routing::None)),
        p("MoE matmul, gather", HALF, |g, t| moe(g, t, |g| Routing::Gather(g.input("index", I32, [1, 512, 1])))),
        p("MoE matmul, scatter", HALF, |g, t| {
            moe(g, t, |g| {
                let (index, slot) = (g.input("index", I32, [1, 256, 1]), g.input("slot", I32, [1, 256, 1]));
                Routing::Scatter { index, slot, top_k: 2 }
            });
        }),
        p("MoE matmul backward", HALF, |g, t| {
            let (tokens, dy) = (g.input("tokens", t, [1, 256, 128]), g.input("dy", t, [1, 256, 256]));
            let first = g.input("first_token", I32, [8, 1, 1]);
            let dw = g.moe_matmul_backward(tokens, dy, first);
            g.output(dw, "dw", t);
        }),
        p("RoPE", HALF, |g, t| {
            let (x, angles) = (g.input("x", t, [2, 8, 128, 64]), g.input("angles", F32, [128, 1, 1, 64]));
            let y = g.rope(x, angles, 1.0, None);
            g.output(y, "y", t);
        }),
        p("RoPE of q and k + attention", HALF, |g, t| {
            let [q, k, v] = ["q", "k", "v"].map(|name| g.input(name, t, [2, 8, 128, 64]));
            let angles = g.input("angles", F32, [128, 1, 1, 64]);
            let (q, k) = (g.rope(q, angles, 1.0, None), g.rope(k, angles, 1.0, None));
            let o = g.input("o", t, [2, 8, 128, 64]);
            g.push(Op::SdpaForward(Box::new(SdpaForward::plain(q, k, v, o))));
        }),
        p("RoPE backward", HALF, |g, t| {
            let (dy, angles) = (g.input("dy", t, [2, 8, 128, 64]), g.input("angles", F32, [128, 1, 1, 64]));
            let dx = g.rope_backward(dy, angles, 1.0, None);
            g.output(dx, "dx", t);
        }),
        p("matmul + block scale quantize, 8-bit floats", HALF, |g, t| {
            let x = product(g, t);
            let y = g.tensor(Tensor::device("y", F8E4M3, [1, 256, 512]));
            let scale = g.tensor(reordered("scale", [1, 256, 16], [256 * 16, 16, 1]));
            g.push(Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![32], compute: F32 }));
        }),
        p("block scale dequantize + matmul, 8-bit floats", &[F8E4M3], |g, t| {
            let a = g.input("a", t, [1, 256, 256]);
            let b = g.tensor(Tensor::device("b", t, [1, 256, 256]).strides([256 * 256, 1, 256]));
            let sa = g.tensor(reordered("scale_a", [1, 256, 8], [256 * 8, 8, 1]));
            let sb = g.tensor(reordered("scale_b", [1, 8, 256], [256 * 8, 1, 8]));
            let a = g.block_scale_dequantize(a, sa, &[1, 32]);
            let b = g.block_scale_dequantize(b, sb, &[32, 1]);
            g.set_strides(b, [256 * 256, 1, 256]);
            let y = g.matmul(a, b);
            g.output(y, "y", BF16);
        }),
    ]
}
