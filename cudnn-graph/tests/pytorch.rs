//! The interpreter next to PyTorch's CPU operations: `data/make.py` wrote inputs and results. Both compute in f64.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::interp::{Precision, Value, run};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{BnFinalizeInputs, BnGradientInputs, Graph, Mode, NormGradientInputs, RunningInputs, Scalar, TensorId};
use cudnn_graph::{Version, encode};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{LazyLock, Mutex};

#[derive(serde::Deserialize)]
struct Plain {
    dims: Vec<i64>,
    data: Vec<f64>,
}

type Tensors = BTreeMap<String, Plain>;

static CASES: LazyLock<BTreeMap<String, Tensors>> = LazyLock::new(|| serde_json::from_str(include_str!("data/pytorch.json")).unwrap());

/// Sums of at most a few hundred terms near 1, in different orders, and functions within a few units in the last place.
const TOLERANCE: f64 = 1e-12;

const EPSILON: f32 = 1.0 / 1024.0;

/// A graph over the tensors of a case.
struct Check {
    g: Graph,
    tensors: &'static Tensors,
    inputs: BTreeMap<TensorId, Value>,
    want: Vec<(TensorId, &'static str)>,
}

impl Check {
    fn new(name: &str) -> Check {
        Check { g: Graph::new(), tensors: &CASES[name], inputs: BTreeMap::new(), want: Vec::new() }
    }

    fn dims(&self, name: &str) -> Vec<i64> {
        self.tensors[name].dims.clone()
    }

    fn input(&mut self, name: &'static str) -> TensorId {
        self.typed(name, F32)
    }

    fn typed(&mut self, name: &'static str, dtype: DType) -> TensorId {
        let plain = &self.tensors[name];
        self.given(name, dtype, Value::new(plain.dims.clone(), plain.data.clone()))
    }

    fn given(&mut self, name: &str, dtype: DType, value: Value) -> TensorId {
        let id = self.g.input(name, dtype, value.dims.clone());
        self.inputs.insert(id, value);
        id
    }

    /// Expects that a result equals the tensor `name` of the case.
    fn expect(&mut self, id: TensorId, name: &'static str) {
        let dtype = self.g.get(id).unwrap().dtype;
        self.g.output(id, &format!("result {name}"), dtype);
        self.want.push((id, name));
    }

    fn run(self) {
        let text = self.g.to_string();
        let graph = self.g.verify().unwrap_or_else(|e| panic!("{e}\n{text}"));
        encode(&graph, Version::new(9, 27, 0)).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let got = run(&graph, &self.inputs, Precision::F64).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert!(!self.want.is_empty());
        for (id, name) in self.want {
            let (got, want) = (&got[&id], &self.tensors[name]);
            assert_eq!(got.dims, want.dims, "{name}\n{text}");
            for (n, (got, want)) in got.data.iter().zip(&want.data).enumerate() {
                let error = (got - want).abs();
                assert!(error <= TOLERANCE * want.abs().max(1.0), "element {n} of {name} is {got}, not {want}\n{text}");
            }
        }
    }
}

fn convolution(name: &str, geometry: &ConvGeometry) {
    let mut c = Check::new(name);
    let (x, w, dy) = (c.input("x"), c.input("w"), c.input("dy"));
    let y = c.g.convolution(x, w, geometry.clone());
    c.expect(y, "y");
    let dims = c.dims("x");
    let dx = c.g.convolution_backward_data(dy, w, dims, geometry.clone());
    c.expect(dx, "dx");
    let dims = c.dims("w");
    let dw = c.g.convolution_backward_filter(dy, x, dims, geometry.clone());
    c.expect(dw, "dw");
    c.run();
}

#[test]
fn convolutions_and_their_gradients() {
    convolution("conv1d", &ConvGeometry::new(1).stride([2]).padding([1]).post_padding([2]));
    convolution("conv2d", &ConvGeometry::new(2).stride([1, 2]).padding([1, 0]).post_padding([1, 1]));
    convolution("conv2d_groups", &ConvGeometry::new(2).stride([2, 1]).dilation([3, 2]).padding([2, 1]).post_padding([0, 3]));
    convolution("conv3d", &ConvGeometry::new(3).stride([1, 2, 1]).dilation([2, 1, 1]).padding([1, 1, 0]).post_padding([0, 1, 1]));
    convolution("conv_depthwise", &ConvGeometry::new(2).padding([1, 1]));
}

fn norm(name: &str, mode: NormMode) {
    let mut c = Check::new(name);
    let (x, scale, dy) = (c.input("x"), c.input("scale"), c.input("dy"));
    let rms = mode == NormMode::Rms;
    let bias = (!rms).then(|| c.input("bias"));
    let trained = c.g.norm_training(mode, x, scale, bias, EPSILON, None);
    c.expect(trained.y, "y");
    c.expect(trained.inv_variance, "inv_variance");
    let mean = trained.mean.inspect(|&mean| c.expect(mean, "mean"));
    let inputs = NormGradientInputs { x, dy, scale, mean, inv_variance: trained.inv_variance };
    let gradients = c.g.norm_backward(mode, inputs);
    c.expect(gradients.dx, "dx");
    c.expect(gradients.dscale, "dscale");
    if let Some(dbias) = gradients.dbias {
        c.expect(dbias, "dbias");
    }
    c.want.sort_by_key(|want| want.1);
    c.run();
    if mode != NormMode::Batch {
        let mut c = Check::new(name);
        let (x, scale) = (c.input("x"), c.input("scale"));
        let bias = (!rms).then(|| c.input("bias"));
        let y = c.g.norm_inference(mode, x, scale, bias, EPSILON);
        c.expect(y, "y");
        c.run();
    }
}

#[test]
fn norms_and_their_gradients() {
    norm("layer", NormMode::Layer);
    norm("layer_last", NormMode::Layer);
    norm("instance", NormMode::Instance);
    norm("batch", NormMode::Batch);
    norm("rms", NormMode::Rms);
    norm("ada_layer", NormMode::AdaLayer);
}

#[test]
fn batch_norm_in_one_op_and_in_three() {
    let mut c = Check::new("batch_running");
    let [x, scale, bias, mean, variance] = ["x", "scale", "bias", "running_mean", "running_variance"].map(|name| c.input(name));
    let running = Some(RunningInputs { factor: 0.25, mean, variance });
    let whole = c.g.norm_training(NormMode::Batch, x, scale, Some(bias), EPSILON, running);
    c.expect(whole.y, "y");
    let (next_mean, next_variance) = whole.running.unwrap();
    c.expect(next_mean, "next_mean");
    c.expect(next_variance, "next_variance");
    c.run();

    let mut c = Check::new("batch_running");
    let [x, scale, bias, mean, variance] = ["x", "scale", "bias", "running_mean", "running_variance"].map(|name| c.input(name));
    let running = RunningInputs { factor: 0.25, mean, variance };
    let (sum, square_sum) = c.g.gen_stats(x);
    c.expect(sum, "sum");
    c.expect(square_sum, "square_sum");
    let last = c.g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: EPSILON, count: 24, running });
    c.expect(last.mean, "mean");
    c.expect(last.inv_variance, "inv_variance");
    c.expect(last.running_mean, "next_mean");
    c.expect(last.running_variance, "next_variance");
    let y = c.g.pointwise(Mode::Mul, &[x, last.eq_scale]);
    let y = c.g.pointwise(Mode::Add, &[y, last.eq_bias]);
    c.expect(y, "y");
    c.run();
}

#[test]
fn the_gradient_of_batch_norm_in_two_steps() {
    let mut c = Check::new("batch_weights");
    let [x, dy, scale, mean, inv_variance] = ["x", "dy", "scale", "mean", "inv_variance"].map(|name| c.input(name));
    let d = c.g.bn_backward_weights(BnGradientInputs { x, dy, scale, mean, inv_variance });
    c.expect(d.dscale, "dscale");
    c.expect(d.dbias, "dbias");
    let from_dy = c.g.pointwise(Mode::Mul, &[dy, d.eq_scale_dy]);
    let from_x = c.g.pointwise(Mode::Mul, &[x, d.eq_scale_x]);
    let dx = c.g.pointwise(Mode::Add, &[from_dy, from_x]);
    let dx = c.g.pointwise(Mode::Add, &[dx, d.eq_bias]);
    c.expect(dx, "dx");
    c.run();
}

#[test]
fn pooling_and_its_gradients() {
    let window = Window::new([3, 2]).stride([2, 2]).padding([1, 1]);
    let mut c = Check::new("max_pool");
    let (x, dy) = (c.input("x"), c.input("dy"));
    let (y, index) = c.g.max_pool_with_index(x, window.clone());
    c.expect(y, "y");
    c.expect(index, "index");
    let dims = c.dims("x");
    let dx = c.g.resample_backward(ResampleMode::Max, dy, Some(index), dims, window);
    c.expect(dx, "dx");
    c.run();
    let window = Window::new([2, 3]).stride([2, 1]).padding([1, 1]);
    for (name, mode) in
        [("average_pool_included", ResampleMode::AverageIncludePadding), ("average_pool_excluded", ResampleMode::AverageExcludePadding)]
    {
        let mut c = Check::new(name);
        let (x, dy) = (c.input("x"), c.input("dy"));
        let y = c.g.resample(mode, x, window.clone());
        c.expect(y, "y");
        let dims = c.dims("x");
        let dx = c.g.resample_backward(mode, dy, None, dims, window.clone());
        c.expect(dx, "dx");
        c.run();
    }
}

#[test]
fn upsampling() {
    let mut c = Check::new("upsample");
    let x = c.input("x");
    let y = c.g.upsample(x);
    c.expect(y, "y");
    c.run();
}

#[test]
fn experts_have_their_own_weights() {
    let mut c = Check::new("moe");
    let (tokens, weights, dy) = (c.input("tokens"), c.input("weights"), c.input("dy"));
    let first = c.typed("first_token", I32);
    let y = c.g.moe_matmul(tokens, weights, first, Routing::None);
    c.expect(y, "y");
    let dweights = c.g.moe_matmul_backward(tokens, dy, first);
    c.expect(dweights, "dweights");
    c.run();

    let shared = &CASES["moe"];
    let of = |name: &str| Value::new(shared[name].dims.clone(), shared[name].data.clone());
    let mut c = Check::new("moe_gather");
    let index = c.typed("index", I32);
    let [tokens, weights] = ["tokens", "weights"].map(|name| c.given(name, F32, of(name)));
    let first = c.given("first_token", I32, of("first_token"));
    let y = c.g.moe_matmul(tokens, weights, first, Routing::Gather(index));
    c.expect(y, "y");
    c.run();

    let mut c = Check::new("moe_scatter");
    let (tokens, index, slot) = (c.input("tokens"), c.typed("index", I32), c.typed("slot", I32));
    let weights = c.given("weights", F32, of("weights"));
    let first = c.given("first_token", I32, of("first_token"));
    let y = c.g.moe_matmul(tokens, weights, first, Routing::Scatter { index, slot, top_k: 2 });
    c.expect(y, "y");
    c.run();
}

#[test]
fn rotary_embeddings_turn_complex_numbers() {
    let mut c = Check::new("rope");
    let (x, angles, dy) = (c.input("x"), c.input("angles"), c.input("dy"));
    let y = c.g.rope(x, angles, 0.5, Some(6));
    c.expect(y, "y");
    let dx = c.g.rope_backward(dy, angles, 0.5, Some(6));
    c.expect(dx, "dx");
    c.run();
}

#[test]
fn matrix_products_and_reductions() {
    let mut c = Check::new("matmul");
    let (a, b) = (c.input("a"), c.input("b"));
    let y = c.g.matmul(a, b);
    c.expect(y, "y");
    c.run();
    let mut c = Check::new("reduction");
    let x = c.input("x");
    let minus = c.g.pointwise(Mode::Neg, &[x]);
    for mode in ReductionMode::ALL {
        let from = if mode == ReductionMode::Amax { minus } else { x };
        let y = c.g.reduce(mode, from, [1, 4, 1]);
        c.expect(y, mode.name());
    }
    c.run();
}

#[test]
fn elements_that_only_move() {
    let mut c = Check::new("moves");
    let x = c.input("x");
    let y = c.g.transpose(x, &[2, 0, 1]);
    c.expect(y, "transposed");
    let y = c.g.reshape(x, [4, 6], [6, 1], Some(ReshapeMode::Logical));
    c.expect(y, "reshaped");
    let y = c.g.result("slice", F32, [1, 2, 2].into());
    c.g.push(Op::Slice(Slice { x, y, start: vec![1, 0, 1], limit: vec![2, 3, 3], step: vec![1, 2, 1] }));
    c.expect(y, "sliced");
    c.run();
    let mut c = Check::new("concat");
    let inputs = ["a", "b", "c"].map(|name| c.input(name));
    let y = c.g.concat(&inputs, 1);
    c.expect(y, "y");
    c.run();
    let mut c = Check::new("pages");
    let container = c.input("container");
    let (table, lengths) = (c.typed("table", I32), c.typed("lengths", I32));
    let y = c.g.paged_load(container, lengths, table, 5);
    c.expect(y, "y");
    c.run();
}

#[test]
fn softmax_and_bands() {
    let mut c = Check::new("softmax");
    let x = c.input("x");
    let [stats, max] = ["stats", "max"].map(|name| c.g.result(name, F32, [1, 2, 3, 1].into()));
    let y = c.g.result("softmax", F32, [1, 2, 3, 5].into());
    c.g.push(Op::Softmax(Softmax { x, y, stats: Some(stats), max: Some(max), sum_exp: None, sink: None, stats_log2: false }));
    for (id, name) in [(y, "y"), (stats, "stats"), (max, "max")] {
        c.expect(id, name);
    }
    c.run();
    let mut c = Check::new("band");
    let x = c.input("x");
    let (fill, one, two) = (c.g.scalar(Scalar::F32(-100.0)), c.g.scalar(Scalar::I32(1)), c.g.scalar(Scalar::F32(2.0)));
    let y = c.g.band_mask_right(x, fill, Some(one), None);
    c.expect(y, "right");
    let y = c.g.band_mask_left(x, fill, two, None);
    c.expect(y, "left");
    c.run();
}

#[test]
fn block_scales() {
    let mut c = Check::new("dequantize");
    let (x, scale) = (c.input("x"), c.input("scale"));
    let y = c.g.block_scale_dequantize(x, scale, &[1, 4]);
    c.expect(y, "y");
    c.run();
    for (name, dtype) in [("dequantize_i4", I4), ("dequantize_u4", U4)] {
        let mut c = Check::new(name);
        let (x, scale) = (c.typed("x", dtype), c.input("scale"));
        let y = c.g.block_scale_dequantize(x, scale, &[2, 1]);
        c.expect(y, "y");
        c.run();
    }
    let mut c = Check::new("quantize");
    let x = c.input("x");
    let (y, scale) = c.g.block_scale_quantize(x, 4, F8E4M3, F32);
    c.expect(y, "y");
    c.expect(scale, "scale");
    c.run();
}

/// The modes that a test compared.
static COMPARED: Mutex<BTreeSet<Mode>> = Mutex::new(BTreeSet::new());

fn modes(name: &str, operands: &[&'static str], also: &[&str]) {
    let mut c = Check::new(name);
    let inputs: Vec<TensorId> = operands.iter().map(|name| c.input(name)).collect();
    for result in c.tensors.keys().filter(|key| !operands.contains(&key.as_str()) && !also.contains(&key.as_str())) {
        let mode = *Mode::ALL.iter().find(|mode| mode.name() == result).unwrap_or_else(|| panic!("no mode {result}"));
        let y = c.g.pointwise_as(mode, &inputs, F32, F32, Default::default());
        c.expect(y, mode.name());
        COMPARED.lock().unwrap().insert(mode);
    }
    c.run();
}

#[test]
fn pointwise_modes() {
    modes("unary", &["x"], &[]);
    modes("positive", &["x"], &[]);
    modes("binary", &["x", "b"], &[]);
    modes("pow", &["x", "b"], &[]);
    modes("gradients", &["dy", "x"], &[]);
    modes("comparisons", &["x", "b"], &["select"]);
    let mut c = Check::new("comparisons");
    let (x, b) = (c.input("x"), c.input("b"));
    let less = c.g.pointwise(Mode::CmpLt, &[x, b]);
    let y = c.g.pointwise(Mode::BinarySelect, &[x, b, less]);
    c.expect(y, "select");
    c.run();
    // Equality, logic and conversions have exact tests of their own, in ir_pointwise.rs.
    let others = [Mode::BinarySelect, Mode::CmpEq, Mode::LogicalAnd, Mode::LogicalOr, Mode::LogicalNot, Mode::Identity, Mode::GenIndex];
    let compared = COMPARED.lock().unwrap();
    let missing: Vec<&Mode> = Mode::ALL.iter().filter(|mode| !compared.contains(mode) && !others.contains(mode)).collect();
    assert!(missing.is_empty(), "not compared: {missing:?}");
}
