//! The graphs: each is one kernel, or one pass of a norm.

use cudnn_graph::ir::{ConvGeometry, Mode, NormGradientInputs, NormMode, ReductionMode};
use cudnn_graph::{DType, Graph};

/// A fusion: its name, and the function that builds its graph.
pub(crate) type Fusion = (&'static str, fn(&mut Graph));

/// Every fusion of this example.
pub(crate) const FUSIONS: [Fusion; 9] = [
    ("conv_bias_relu", conv_bias_relu),
    ("conv_norm_add_relu", conv_norm_add_relu),
    ("conv_data_gradient_relu", conv_data_gradient_relu),
    ("conv_filter_gradient", conv_filter_gradient),
    ("swish_gate", swish_gate),
    ("layer_norm", layer_norm),
    ("rms_norm", rms_norm),
    ("rms_norm_backward", rms_norm_backward),
    ("sum_per_channel", sum_per_channel),
];

const T: DType = DType::BF16;
const IMAGES: [i64; 4] = [4, 32, 14, 14];
const FILTERS: [i64; 4] = [64, 32, 3, 3];
const RESULTS: [i64; 4] = [4, 64, 14, 14];

fn same() -> ConvGeometry {
    ConvGeometry::new(2).padding([1, 1])
}

/// `y = relu(conv(x, w) + bias)`.
fn conv_bias_relu(g: &mut Graph) {
    let (x, w) = (g.input_channels_last("x", T, IMAGES), g.input_channels_last("w", T, FILTERS));
    let bias = g.input_channels_last("bias", T, [1, 64, 1, 1]);
    let y = g.convolution(x, w, same());
    let y = g.pointwise(Mode::Add, &[y, bias]);
    let y = g.pointwise(Mode::ReluFwd, &[y]);
    g.output(y, "y", T);
}

/// Inference of a residual block: the batch norm is a factor and a summand per channel, `y = relu(conv(x, w) · scale + bias + z)`.
fn conv_norm_add_relu(g: &mut Graph) {
    let (x, w) = (g.input_channels_last("x", T, IMAGES), g.input_channels_last("w", T, FILTERS));
    let [scale, bias] = ["scale", "bias"].map(|name| g.input_channels_last(name, DType::F32, [1, 64, 1, 1]));
    let z = g.input_channels_last("z", T, RESULTS);
    let y = g.convolution(x, w, same());
    let y = g.pointwise(Mode::Mul, &[y, scale]);
    let y = g.pointwise(Mode::Add, &[y, bias]);
    let y = g.pointwise(Mode::Add, &[y, z]);
    let y = g.pointwise(Mode::ReluFwd, &[y]);
    g.output(y, "y", T);
}

/// The gradient of a convolution that follows a relu: `dx = relu'(x) · conv_data_gradient(dy, w)`.
fn conv_data_gradient_relu(g: &mut Graph) {
    let (dy, w) = (g.input_channels_last("dy", T, RESULTS), g.input_channels_last("w", T, FILTERS));
    let x = g.input_channels_last("x", T, IMAGES);
    let dx = g.convolution_backward_data(dy, w, IMAGES, same());
    let dx = g.pointwise(Mode::ReluBwd, &[dx, x]);
    g.output(dx, "dx", T);
}

fn conv_filter_gradient(g: &mut Graph) {
    let (dy, x) = (g.input_channels_last("dy", T, RESULTS), g.input_channels_last("x", T, IMAGES));
    let dw = g.convolution_backward_filter(dy, x, FILTERS, same());
    g.output(dw, "dw", T);
}

/// The first half of a gated MLP: `y = swish(a · gate) · (a · up)`.
fn swish_gate(g: &mut Graph) {
    let a = g.input("a", T, [1, 256, 128]);
    let [gate, up] = ["gate", "up"].map(|name| g.input(name, T, [1, 128, 256]));
    let (gate, up) = (g.matmul(a, gate), g.matmul(a, up));
    let gate = g.pointwise(Mode::SwishFwd, &[gate]);
    let y = g.pointwise(Mode::Mul, &[gate, up]);
    g.output(y, "y", T);
}

/// cuDNN 9.19 and 9.27 offer no engine that also adds a residual.
fn layer_norm(g: &mut Graph) {
    let x = g.input_channels_last("x", T, [256, 512, 1, 1]);
    let [scale, bias] = ["scale", "bias"].map(|name| g.input_channels_last(name, DType::F32, [1, 512, 1, 1]));
    let y = g.norm_inference(NormMode::Layer, x, scale, Some(bias), 1e-5);
    g.output(y, "y", T);
}

/// With the inverse deviation, for the gradient.
fn rms_norm(g: &mut Graph) {
    let x = g.input_channels_last("x", T, [256, 512, 1, 1]);
    let scale = g.input_channels_last("scale", DType::F32, [1, 512, 1, 1]);
    let norm = g.norm_training(NormMode::Rms, x, scale, None, 1e-5, None);
    g.output(norm.y, "y", T);
}

fn rms_norm_backward(g: &mut Graph) {
    let [x, dy] = ["x", "dy"].map(|name| g.input_channels_last(name, T, [256, 512, 1, 1]));
    let scale = g.input_channels_last("scale", DType::F32, [1, 512, 1, 1]);
    let inv_variance = g.input_channels_last("inv_variance", DType::F32, [256, 1, 1, 1]);
    let d = g.norm_backward(NormMode::Rms, NormGradientInputs { x, dy, scale, mean: None, inv_variance });
    g.output(d.dx, "dx", T);
}

/// A sum over images and their elements, in NHWC.
fn sum_per_channel(g: &mut Graph) {
    let x = g.input_channels_last("x", T, IMAGES);
    let y = g.reduce(ReductionMode::Add, x, [1, 32, 1, 1]);
    g.set_strides(y, [32, 1, 32, 32]);
    g.output(y, "sum", DType::F32);
}
