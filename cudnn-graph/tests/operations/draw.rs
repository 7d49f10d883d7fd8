//! Random problems for a device: a problem is a function of its seed, small enough for the interpreter, and of a form that most versions of cuDNN have
//! engines for.

#[path = "../generator/dice.rs"]
pub(crate) mod dice;
#[path = "draw_products.rs"]
mod products;

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{BnFinalizeInputs, BnGradientInputs, Graph, Mode, NormGradientInputs, RunningInputs, Scalar, Tensor, TensorId};
use dice::Dice;
use std::collections::BTreeMap;

/// A graph, and the values of inputs that are not any numbers.
pub(crate) struct Problem {
    pub(crate) operation: &'static str,
    pub(crate) dtype: DType,
    pub(crate) graph: Graph,
    pub(crate) given: BTreeMap<TensorId, Vec<f64>>,
}

const HALF: &[DType] = &[F16, BF16];
const FLOAT: &[DType] = &[F16, BF16, F32];
const EIGHT: &[DType] = &[F8E4M3, F8E5M2];
/// Products of which the interpreter computes a problem in about a tenth of a second.
const PRODUCTS: i64 = 1 << 20;

/// An operation: its name, its share of the problems, its element types, and its graph.
type Operation = (&'static str, usize, &'static [DType], fn(&mut Draw));

const OPERATIONS: &[Operation] = &[
    ("conv forward", 6, FLOAT, |d| d.convolution(|_, y| y)),
    ("conv forward, 8-bit floats", 2, EIGHT, |d| d.convolution(|_, y| y)),
    ("conv forward, 8-bit floats, groups", 3, EIGHT, |d| d.grouped().convolution(|_, y| y)),
    ("conv data gradient", 5, FLOAT, |d| d.data_gradient(false)),
    ("conv data gradient, groups", 2, FLOAT, |d| d.grouped().data_gradient(false)),
    ("conv filter gradient", 5, FLOAT, Draw::filter_gradient),
    ("conv + bias + relu", 4, FLOAT, |d| d.convolution(Draw::bias_relu)),
    ("conv + scale + shift + add + relu", 4, HALF, |d| d.convolution(Draw::residual)),
    ("conv data gradient + relu gradient", 2, HALF, |d| d.data_gradient(true)),
    ("scale + bias + relu + conv", 2, HALF, Draw::before_convolution),
    ("conv + gen_stats", 2, HALF, Draw::with_statistics),
    ("gen_stats", 1, HALF, Draw::gen_stats),
    ("bn_finalize", 2, &[F32], Draw::bn_finalize),
    ("bn_backward_weights", 1, HALF, Draw::bn_backward_weights),
    ("batch norm inference", 3, FLOAT, Draw::norm_pointwise),
    ("batch norm forward", 3, FLOAT, |d| d.channel_norm(NormMode::Batch)),
    ("batch norm forward + add + relu", 2, HALF, Draw::norm_add_relu),
    ("batch norm backward", 3, FLOAT, |d| d.channel_gradient(NormMode::Batch)),
    ("instance norm forward", 3, HALF, |d| d.channel_norm(NormMode::Instance)),
    ("instance norm backward", 4, FLOAT, |d| d.channel_gradient(NormMode::Instance)),
    ("layer norm forward, inference", 3, FLOAT, |d| d.row_norm(NormMode::Layer, false)),
    ("layer norm forward, training", 3, FLOAT, |d| d.row_norm(NormMode::Layer, true)),
    ("layer norm backward", 3, FLOAT, |d| d.row_gradient(NormMode::Layer)),
    ("RMS norm forward, inference", 3, FLOAT, |d| d.row_norm(NormMode::Rms, false)),
    ("RMS norm forward, training", 3, FLOAT, |d| d.row_norm(NormMode::Rms, true)),
    ("RMS norm backward", 3, FLOAT, |d| d.row_gradient(NormMode::Rms)),
    ("adaptive layer norm forward", 2, HALF, |d| d.adaptive(false)),
    ("adaptive layer norm backward", 2, HALF, |d| d.adaptive(true)),
    ("layer norm to 8-bit floats", 2, HALF, Draw::norm_quantized),
    ("max pooling", 4, FLOAT, |d| d.pool(ResampleMode::Max)),
    ("max pooling with index", 2, HALF, Draw::pool_index),
    ("max pooling backward", 2, HALF, |d| d.pool_gradient(ResampleMode::Max)),
    ("average pooling, padding included", 3, FLOAT, |d| d.pool(ResampleMode::AverageIncludePadding)),
    ("average pooling, padding excluded", 3, FLOAT, |d| d.pool(ResampleMode::AverageExcludePadding)),
    ("average pooling backward", 2, HALF, |d| d.pool_gradient(ResampleMode::AverageIncludePadding)),
    ("bilinear upsampling", 3, &[F32], |d| d.upsample(false)),
    ("bilinear upsampling + bias + relu", 2, &[F32], |d| d.upsample(true)),
    ("matmul", 5, FLOAT, |d| d.matmul(|_, y| y)),
    ("matmul, any extents", 3, FLOAT, Draw::matmul_any),
    ("matmul, 8-bit floats with scales", 4, EIGHT, Draw::matmul_eight),
    ("matmul to 8-bit floats", 2, EIGHT, Draw::matmul_quantized),
    ("matmul + bias + gelu", 3, FLOAT, |d| d.matmul(|d, y| d.bias_activation(y, Mode::GeluFwd))),
    ("matmul + bias + silu", 3, FLOAT, |d| d.matmul(|d, y| d.bias_activation(y, Mode::SwishFwd))),
    ("matmul + reduction", 2, HALF, Draw::matmul_reduced),
    ("two matmuls + swish gate", 2, HALF, Draw::gate),
    ("mul + matmul", 2, HALF, Draw::scaled_matmul),
    ("matmul with 8-bit integer weights", 4, HALF, Draw::integer_weights),
    ("8-bit float weights with a scale per block + matmul", 2, HALF, Draw::block_weights),
    ("block scale quantize", 1, HALF, Draw::block_quantize),
    ("scale + add + activation", 5, FLOAT, Draw::elementwise),
    ("conversion to 8-bit floats", 2, EIGHT, Draw::quantize),
    ("conversion from 8-bit floats", 2, EIGHT, Draw::dequantize),
    ("reduction, add", 3, FLOAT, |d| d.reduction(ReductionMode::Add)),
    ("reduction, min", 2, HALF, |d| d.reduction(ReductionMode::Min)),
    ("reduction, max", 2, HALF, |d| d.reduction(ReductionMode::Max)),
    ("reduction, amax", 2, HALF, |d| d.reduction(ReductionMode::Amax)),
    ("MoE matmul", 3, HALF, |d| d.experts(Route::None)),
    ("MoE matmul, gather", 3, HALF, |d| d.experts(Route::Gather)),
    ("MoE matmul, scatter", 3, HALF, |d| d.experts(Route::Scatter)),
    ("MoE matmul backward", 1, HALF, Draw::experts_backward),
    ("softmax", 1, HALF, Draw::softmax),
    ("concat", 1, HALF, Draw::concat),
    ("transpose", 1, HALF, Draw::transpose),
    ("slice", 1, HALF, Draw::slice),
    ("RoPE", 1, HALF, |d| d.rotary(false)),
    ("RoPE backward", 1, HALF, |d| d.rotary(true)),
];

/// The names of all operations.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    OPERATIONS.iter().map(|operation| operation.0)
}

/// Number of seeds after which the operations repeat.
pub(crate) fn round() -> u64 {
    OPERATIONS.iter().map(|operation| operation.1 as u64).sum()
}

/// The problem of a seed.
pub(crate) fn problem(seed: u64) -> Problem {
    let shares: Vec<&Operation> = OPERATIONS.iter().flat_map(|operation| std::iter::repeat_n(operation, operation.1)).collect();
    // A prime, so that neighbouring seeds are of other operations.
    let &(operation, _, types, build) = shares[(seed.wrapping_mul(1_000_003) % shares.len() as u64) as usize];
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    dice.roll(2);
    let (dtype, channels_last) = (types[(seed / shares.len() as u64 + dice.roll(2)) as usize % types.len()], dice.roll(4) > 0);
    let mut draw = Draw { g: Graph::new(), dice, t: dtype, channels_last, groups: false, given: BTreeMap::new() };
    build(&mut draw);
    Problem { operation, dtype, graph: draw.g, given: draw.given }
}

struct Draw {
    g: Graph,
    dice: Dice,
    t: DType,
    channels_last: bool,
    /// Convolutions have several groups.
    groups: bool,
    given: BTreeMap<TensorId, Vec<f64>>,
}

/// The order of the rows of a grouped matrix product.
enum Route {
    None,
    Gather,
    Scatter,
}

/// The extents of a convolution.
struct Shapes {
    x: Vec<i64>,
    w: Vec<i64>,
    y: Vec<i64>,
    geometry: ConvGeometry,
}

impl Draw {
    fn images(&mut self, name: &str, dims: &[i64]) -> TensorId {
        self.images_of(name, self.t, dims)
    }

    fn images_of(&mut self, name: &str, t: DType, dims: &[i64]) -> TensorId {
        if self.channels_last { self.g.input_channels_last(name, t, dims.to_vec()) } else { self.g.input(name, t, dims.to_vec()) }
    }

    /// One number per channel of images of these extents.
    fn per_channel(&mut self, name: &str, t: DType, dims: &[i64]) -> TensorId {
        let dims: Vec<i64> = dims.iter().enumerate().map(|(axis, &n)| if axis == 1 { n } else { 1 }).collect();
        self.images_of(name, t, &dims)
    }

    fn output(&mut self, y: TensorId) {
        // 8-bit floats are multiplied, and the products are kept in more bits.
        let t = if self.t.bits() == 8 { BF16 } else { self.t };
        self.g.output(y, "y", t);
    }

    /// Some multiple of what one vector of 16 bytes holds; rarely any number.
    fn channels(&mut self, most: i64) -> i64 {
        if self.dice.roll(10) == 0 { self.dice.from(1, 8 * most) } else { 16 / i64::from(self.t.bits() / 8) * self.dice.from(1, most) }
    }

    fn shapes(&mut self) -> Shapes {
        loop {
            let axes = self.dice.pick(&[1, 2, 2, 2, 3]);
            let groups = if self.groups || self.dice.roll(4) == 0 { self.dice.pick(&[2, 4]) } else { 1 };
            let (c, k) = (self.channels(3), groups * self.channels(3));
            let x = [vec![self.dice.from(1, 3), groups * c], self.dice.list(axes, 4, [40, 14, 6][axes - 1])].concat();
            let w = [vec![k, c], self.dice.list(axes, 1, 3)].concat();
            let d = &mut self.dice;
            let mut geometry = ConvGeometry::new(axes).padding(d.list(axes, 0, 1));
            if d.roll(3) == 0 {
                geometry = geometry.stride(d.list(axes, 1, 2));
            }
            if d.roll(3) == 0 {
                geometry = geometry.dilation(d.list(axes, 1, 2));
            }
            if d.roll(6) == 0 {
                geometry = geometry.post_padding(d.list(axes, 0, 2));
            }
            let outputs: Option<Vec<i64>> = (0..axes).map(|axis| geometry.outputs(axis, x[axis + 2], w[axis + 2])).collect();
            let Some(outputs) = outputs else { continue };
            let y = [vec![x[0], k], outputs].concat();
            if y.iter().product::<i64>() * w[1..].iter().product::<i64>() <= PRODUCTS {
                return Shapes { x, w, y, geometry };
            }
        }
    }

    /// Several groups, in either layout.
    fn grouped(&mut self) -> &mut Draw {
        self.groups = true;
        self.channels_last = self.dice.coin();
        self
    }

    /// A convolution, and what `then` makes of it.
    fn convolution(&mut self, then: fn(&mut Draw, TensorId) -> TensorId) {
        let s = self.shapes();
        let (x, w) = (self.images("x", &s.x), self.images("w", &s.w));
        let y = self.g.convolution(x, w, s.geometry);
        let y = then(self, y);
        self.output(y);
    }

    fn extents(&self, id: TensorId) -> Vec<i64> {
        self.g.get(id).map_or_else(Vec::new, |t| t.dims.0.clone())
    }

    fn bias_relu(&mut self, y: TensorId) -> TensorId {
        let bias = self.per_channel("bias", self.t, &self.extents(y));
        let y = self.g.pointwise(Mode::Add, &[y, bias]);
        self.g.pointwise(Mode::ReluFwd, &[y])
    }

    fn residual(&mut self, y: TensorId) -> TensorId {
        let dims = self.extents(y);
        let [scale, shift] = ["scale", "shift"].map(|name| self.per_channel(name, F32, &dims));
        let z = self.images("z", &dims);
        let y = self.g.pointwise(Mode::Mul, &[y, scale]);
        let y = self.g.pointwise(Mode::Add, &[y, shift]);
        let y = self.g.pointwise(Mode::Add, &[y, z]);
        self.g.pointwise(Mode::ReluFwd, &[y])
    }

    fn data_gradient(&mut self, relu: bool) {
        let s = self.shapes();
        let (dy, w) = (self.images("dy", &s.y), self.images("w", &s.w));
        let mut dx = self.g.convolution_backward_data(dy, w, s.x.clone(), s.geometry);
        if relu {
            let x = self.images("x", &s.x);
            dx = self.g.pointwise(Mode::ReluBwd, &[dx, x]);
        }
        self.output(dx);
    }

    fn filter_gradient(&mut self) {
        let s = self.shapes();
        let (dy, x) = (self.images("dy", &s.y), self.images("x", &s.x));
        let dw = self.g.convolution_backward_filter(dy, x, s.w, s.geometry);
        self.output(dw);
    }

    fn before_convolution(&mut self) {
        let s = self.shapes();
        let (x, w) = (self.images("x", &s.x), self.images("w", &s.w));
        let [scale, bias] = ["scale", "bias"].map(|name| self.per_channel(name, self.t, &s.x));
        let x = self.g.pointwise(Mode::Mul, &[x, scale]);
        let x = self.g.pointwise(Mode::Add, &[x, bias]);
        let x = self.g.pointwise(Mode::ReluFwd, &[x]);
        self.g.set_dtype(x, self.t);
        let y = self.g.convolution(x, w, s.geometry);
        self.output(y);
    }

    fn with_statistics(&mut self) {
        let s = self.shapes();
        let (x, w) = (self.images("x", &s.x), self.images("w", &s.w));
        let y = self.g.convolution(x, w, s.geometry);
        self.output(y);
        self.g.gen_stats(y);
    }

    /// Extents of images with at least 16 elements per channel.
    fn image_dims(&mut self) -> Vec<i64> {
        [vec![self.dice.from(2, 4), self.channels(6)], self.dice.list(2, 4, 12)].concat()
    }

    fn gen_stats(&mut self) {
        let dims = self.image_dims();
        let x = self.images("x", &dims);
        self.g.gen_stats(x);
    }

    fn bn_finalize(&mut self) {
        let dims = self.image_dims();
        let count = dims.iter().product::<i64>() / dims[1];
        let names = ["sum", "square_sum", "scale", "bias", "mean", "variance"];
        let [sum, square_sum, scale, bias, mean, variance] = names.map(|name| self.per_channel(name, F32, &dims));
        // The mean of squares is more than the square of the mean.
        for (id, least, most) in [(sum, -40, 40), (square_sum, 120, 250)] {
            let numbers = (0..dims[1]).map(|_| self.dice.from(least, most) as f64 * count as f64 / 64.0).collect();
            self.given.insert(id, numbers);
        }
        let running = RunningInputs { factor: 0.25, mean, variance };
        self.g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: 1e-3, count, running });
    }

    fn bn_backward_weights(&mut self) {
        let dims = self.image_dims();
        let (x, dy) = (self.images("x", &dims), self.images("dy", &dims));
        let [scale, mean, inv_variance] = ["scale", "mean", "inv"].map(|name| self.per_channel(name, F32, &dims));
        self.g.bn_backward_weights(BnGradientInputs { x, dy, scale, mean, inv_variance });
    }

    fn channel_norm(&mut self, mode: NormMode) {
        let dims = self.image_dims();
        let x = self.images("x", &dims);
        let names = ["scale", "bias", "mean", "variance"];
        let running = mode == NormMode::Batch && self.dice.coin();
        let [scale, bias] = [0, 1].map(|n| self.per_channel(names[n], F32, &dims));
        let running = running.then(|| {
            let [mean, variance] = [2, 3].map(|n| self.per_channel(names[n], F32, &dims));
            RunningInputs { factor: 0.25, mean, variance }
        });
        let norm = self.g.norm_training(mode, x, scale, Some(bias), 1e-3, running);
        self.output(norm.y);
    }

    /// The statistics are constants, so the norm is element-wise.
    fn norm_pointwise(&mut self) {
        let dims = self.image_dims();
        self.channels_last = self.dice.coin();
        let x = self.images("x", &dims);
        let t = if self.dice.coin() { F32 } else { self.t };
        let [mean, inv, scale, bias] = ["mean", "inv", "scale", "bias"].map(|name| self.per_channel(name, t, &dims));
        let y = self.g.pointwise(Mode::Sub, &[x, mean]);
        let y = self.g.pointwise(Mode::Mul, &[y, inv]);
        let y = self.g.pointwise(Mode::Mul, &[y, scale]);
        let y = self.g.pointwise(Mode::Add, &[y, bias]);
        self.output(y);
    }

    fn norm_add_relu(&mut self) {
        let dims = self.image_dims();
        let (x, z) = (self.images("x", &dims), self.images("z", &dims));
        let [scale, bias] = ["scale", "bias"].map(|name| self.per_channel(name, F32, &dims));
        let norm = self.g.norm_training(NormMode::Batch, x, scale, Some(bias), 1e-3, None);
        let y = self.g.pointwise(Mode::Add, &[norm.y, z]);
        let y = self.g.pointwise(Mode::ReluFwd, &[y]);
        self.output(y);
    }

    fn channel_gradient(&mut self, mode: NormMode) {
        let dims = self.image_dims();
        let (x, dy, scale) = (self.images("x", &dims), self.images("dy", &dims), self.per_channel("scale", F32, &dims));
        let images = if mode == NormMode::Batch { 1 } else { dims[0] };
        let [mean, inv_variance] = ["mean", "inv"].map(|name| self.images_of(name, F32, &[images, dims[1], 1, 1]));
        let d = self.g.norm_backward(mode, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
        self.output(d.dx);
    }

    /// Rows of a matrix as images of one pixel, as cuDNN's row norms expect them.
    fn rows(&mut self) -> [i64; 2] {
        [self.dice.from(2, 64), 64 * self.dice.from(1, 10)]
    }

    fn wide(&mut self, name: &str, t: DType, dims: [i64; 2]) -> TensorId {
        self.g.input_channels_last(name, t, [dims[0], dims[1], 1, 1])
    }

    fn row_norm(&mut self, mode: NormMode, training: bool) {
        let [rows, columns] = self.rows();
        let (x, scale) = (self.wide("x", self.t, [rows, columns]), self.wide("scale", F32, [1, columns]));
        let bias = (mode != NormMode::Rms).then(|| self.wide("bias", F32, [1, columns]));
        let y = if training {
            self.g.norm_training(mode, x, scale, bias, 1e-3, None).y
        } else {
            self.g.norm_inference(mode, x, scale, bias, 1e-3)
        };
        self.output(y);
    }

    fn row_gradient(&mut self, mode: NormMode) {
        let [rows, columns] = self.rows();
        let [x, dy] = ["x", "dy"].map(|name| self.wide(name, self.t, [rows, columns]));
        let scale = self.wide("scale", F32, [1, columns]);
        let mean = (mode != NormMode::Rms).then(|| self.wide("mean", F32, [rows, 1]));
        let inv_variance = self.wide("inv", F32, [rows, 1]);
        let d = self.g.norm_backward(mode, NormGradientInputs { x, dy, scale, mean, inv_variance });
        self.output(d.dx);
    }

    fn adaptive(&mut self, backward: bool) {
        let (b, s, n) = (self.dice.from(1, 3), self.dice.from(2, 24), 128 * self.dice.from(1, 4));
        let (x, scale) = (self.g.input("x", self.t, [b, s, n]), self.g.input("scale", self.t, [b, 1, n]));
        if !backward {
            let bias = self.g.input("bias", self.t, [b, 1, n]);
            let norm = self.g.norm_training(NormMode::AdaLayer, x, scale, Some(bias), 1e-3, None);
            return self.output(norm.y);
        }
        let dy = self.g.input("dy", self.t, [b, s, n]);
        let [mean, inv_variance] = ["mean", "inv"].map(|name| self.g.input(name, F32, [b, s, 1]));
        let d = self.g.norm_backward(NormMode::AdaLayer, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
        self.output(d.dx);
        for id in [Some(d.dscale), d.dbias].into_iter().flatten() {
            self.g.set_dtype(id, self.t);
        }
    }

    fn norm_quantized(&mut self) {
        let [rows, columns] = self.rows();
        let x = self.wide("x", self.t, [rows, columns]);
        let [scale, bias] = ["scale", "bias"].map(|name| self.wide(name, F32, [1, columns]));
        let factor = self.g.input("scale_y", F32, [1, 1, 1, 1]);
        let y = self.g.norm_inference(NormMode::Layer, x, scale, Some(bias), 1e-3);
        let y = self.g.pointwise(Mode::Mul, &[y, factor]);
        self.g.output(y, "y", F8E4M3);
    }

    fn window(&mut self) -> Window {
        let extent = self.dice.list(2, 2, 3);
        Window::new(extent).stride(self.dice.list(2, 1, 2)).padding(self.dice.list(2, 0, 1))
    }

    fn pool(&mut self, mode: ResampleMode) {
        let (dims, mut window) = (self.image_dims(), self.window());
        self.channels_last = self.dice.coin();
        if self.dice.coin() {
            window = window.padding([0, 0]);
        }
        let x = self.images("x", &dims);
        let y = self.g.resample(mode, x, window);
        self.output(y);
    }

    fn upsample(&mut self, then: bool) {
        let dims = self.image_dims();
        self.channels_last = true;
        let x = self.images("x", &dims);
        let y = self.g.upsample(x);
        let y = if then { self.bias_relu(y) } else { y };
        self.output(y);
    }

    fn pool_index(&mut self) {
        let (dims, window) = (self.image_dims(), self.window());
        self.channels_last = true;
        let x = self.images("x", &dims);
        let (y, _) = self.g.max_pool_with_index(x, window);
        self.output(y);
    }

    /// Without padding, so that every position in a window is an element.
    fn pool_gradient(&mut self, mode: ResampleMode) {
        let (dims, extent) = (self.image_dims(), self.dice.list(2, 2, 3));
        let window = Window::new(extent.clone()).stride(self.dice.list(2, 1, 2));
        let pooled = |axis: usize| window.outputs(axis, dims[axis + 2]).unwrap_or(1);
        let pooled = [dims[0], dims[1], pooled(0), pooled(1)];
        self.channels_last = true;
        let dy = self.images("dy", &pooled);
        let index = (mode == ResampleMode::Max).then(|| {
            let index = self.images_of("index", I8, &pooled);
            let taps = (0..pooled.iter().product::<i64>()).map(|_| self.dice.from(0, extent[0] * extent[1] - 1) as f64).collect();
            self.given.insert(index, taps);
            index
        });
        let dx = self.g.resample_backward(mode, dy, index, dims, window);
        self.output(dx);
    }
}
