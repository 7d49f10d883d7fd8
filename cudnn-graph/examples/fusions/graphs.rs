//! The graphs: each is one kernel, or one pass of a norm.

use cudnn_graph::ir::{ConvGeometry, Mode, NormGradientInputs, NormMode, ReductionMode};
use cudnn_graph::{DType, Graph};

/// A fusion: its name, and the function that builds its graph.
pub(crate) type Fusion = (&'static str, fn(&mut Graph, &Sizes));

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
/// Extents of the tensors.
pub(crate) struct Sizes {
    /// Images of a convolution.
    images: [i64; 4],
    /// Filters of a convolution that keeps the extents of images.
    filters: i64,
    /// Rows, inner extent and columns of the gated product.
    product: [i64; 3],
    /// Rows and columns of norms.
    rows: [i64; 2],
}

/// Shapes that the interpreter computes in a moment.
pub(crate) const SMALL: Sizes = Sizes { images: [4, 32, 14, 14], filters: 64, product: [256, 128, 256], rows: [256, 512] };
/// Layers of networks, for times.
pub(crate) const LARGE: Sizes = Sizes { images: [32, 128, 56, 56], filters: 128, product: [4096, 4096, 4096], rows: [8192, 4096] };

impl Sizes {
    fn w(&self) -> [i64; 4] {
        [self.filters, self.images[1], 3, 3]
    }

    fn results(&self) -> [i64; 4] {
        let [n, _, h, w] = self.images;
        [n, self.filters, h, w]
    }

    fn per_channel(&self) -> [i64; 4] {
        [1, self.filters, 1, 1]
    }

    fn matrix(&self) -> [i64; 4] {
        [self.rows[0], self.rows[1], 1, 1]
    }

    fn row(&self) -> [i64; 4] {
        [1, self.rows[1], 1, 1]
    }
}

fn same() -> ConvGeometry {
    ConvGeometry::new(2).padding([1, 1])
}

/// `y = relu(conv(x, w) + bias)`.
fn conv_bias_relu(g: &mut Graph, s: &Sizes) {
    let (x, w) = (g.input_channels_last("x", T, s.images), g.input_channels_last("w", T, s.w()));
    let bias = g.input_channels_last("bias", T, s.per_channel());
    let y = g.convolution(x, w, same());
    let y = g.pointwise(Mode::Add, &[y, bias]);
    let y = g.pointwise(Mode::ReluFwd, &[y]);
    g.output(y, "y", T);
}

/// Inference of a residual block: the batch norm is a factor and a summand per channel, `y = relu(conv(x, w) · scale + bias + z)`.
fn conv_norm_add_relu(g: &mut Graph, s: &Sizes) {
    let (x, w) = (g.input_channels_last("x", T, s.images), g.input_channels_last("w", T, s.w()));
    let [scale, bias] = ["scale", "bias"].map(|name| g.input_channels_last(name, DType::F32, s.per_channel()));
    let z = g.input_channels_last("z", T, s.results());
    let y = g.convolution(x, w, same());
    let y = g.pointwise(Mode::Mul, &[y, scale]);
    let y = g.pointwise(Mode::Add, &[y, bias]);
    let y = g.pointwise(Mode::Add, &[y, z]);
    let y = g.pointwise(Mode::ReluFwd, &[y]);
    g.output(y, "y", T);
}

/// The gradient of a convolution that follows a relu: `dx = relu'(x) · conv_data_gradient(dy, w)`.
fn conv_data_gradient_relu(g: &mut Graph, s: &Sizes) {
    let (dy, w) = (g.input_channels_last("dy", T, s.results()), g.input_channels_last("w", T, s.w()));
    let x = g.input_channels_last("x", T, s.images);
    let dx = g.convolution_backward_data(dy, w, s.images, same());
    let dx = g.pointwise(Mode::ReluBwd, &[dx, x]);
    g.output(dx, "dx", T);
}

fn conv_filter_gradient(g: &mut Graph, s: &Sizes) {
    let (dy, x) = (g.input_channels_last("dy", T, s.results()), g.input_channels_last("x", T, s.images));
    let dw = g.convolution_backward_filter(dy, x, s.w(), same());
    g.output(dw, "dw", T);
}

/// The first half of a gated MLP: `y = swish(a · gate) · (a · up)`.
fn swish_gate(g: &mut Graph, s: &Sizes) {
    let a = g.input("a", T, [1, s.product[0], s.product[1]]);
    let [gate, up] = ["gate", "up"].map(|name| g.input(name, T, [1, s.product[1], s.product[2]]));
    let (gate, up) = (g.matmul(a, gate), g.matmul(a, up));
    let gate = g.pointwise(Mode::SwishFwd, &[gate]);
    let y = g.pointwise(Mode::Mul, &[gate, up]);
    g.output(y, "y", T);
}

/// cuDNN 9.19 and 9.27 offer no engine that also adds a residual.
fn layer_norm(g: &mut Graph, s: &Sizes) {
    let x = g.input_channels_last("x", T, s.matrix());
    let [scale, bias] = ["scale", "bias"].map(|name| g.input_channels_last(name, DType::F32, s.row()));
    let y = g.norm_inference(NormMode::Layer, x, scale, Some(bias), 1e-5);
    g.output(y, "y", T);
}

/// With the inverse deviation, for the gradient.
fn rms_norm(g: &mut Graph, s: &Sizes) {
    let x = g.input_channels_last("x", T, s.matrix());
    let scale = g.input_channels_last("scale", DType::F32, s.row());
    let norm = g.norm_training(NormMode::Rms, x, scale, None, 1e-5, None);
    g.output(norm.y, "y", T);
}

fn rms_norm_backward(g: &mut Graph, s: &Sizes) {
    let [x, dy] = ["x", "dy"].map(|name| g.input_channels_last(name, T, s.matrix()));
    let scale = g.input_channels_last("scale", DType::F32, s.row());
    let inv_variance = g.input_channels_last("inv_variance", DType::F32, [s.rows[0], 1, 1, 1]);
    let d = g.norm_backward(NormMode::Rms, NormGradientInputs { x, dy, scale, mean: None, inv_variance });
    g.output(d.dx, "dx", T);
}

/// A sum over images and their elements, in NHWC.
fn sum_per_channel(g: &mut Graph, s: &Sizes) {
    let x = g.input_channels_last("x", T, s.images);
    let c = s.images[1];
    let y = g.reduce(ReductionMode::Add, x, [1, c, 1, 1]);
    g.set_strides(y, [c, 1, c, c]);
    g.output(y, "sum", DType::F32);
}
