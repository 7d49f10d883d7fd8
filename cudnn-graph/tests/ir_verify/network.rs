//! Rules of convolutions, norms, pooling, grouped matrix products, rotary embeddings and concatenation.

use crate::*;

fn conv(dims: [&[i64]; 3], dtype: DType, geometry: ConvGeometry, compute: DType) -> impl FnOnce(&mut Graph) + use<> {
    over_inputs([("x", dtype, dims[0]), ("w", F16, dims[1]), ("y", F32, dims[2])], move |[x, w, y]| {
        Op::ConvForward(ConvForward { x, w, y, geometry, compute })
    })
}

#[test]
fn convolution_rules() {
    let plain = || ConvGeometry::new(2);
    let (x, w, y): (&[i64], &[i64], &[i64]) = (&[2, 4, 6, 5], &[6, 4, 3, 2], &[2, 6, 4, 4]);
    let with = |geometry| conv([x, w, y], F16, geometry, F32);
    good(with(plain()));
    good(conv([x, &[6, 2, 3, 2], y], F16, plain(), F32));
    good(conv([&[2, 4, 6], &[6, 4, 3], &[2, 6, 4]], F16, ConvGeometry::new(1), F32));
    good(conv([x, w, &[2, 6, 3, 2]], F16, plain().stride([2, 3]).padding([0, 1]).post_padding([1, 0]), F32));
    let at = "= conv_forward(";
    check(vec![
        case(at, "x, w and y have ranks 2, 4 and 4, expected one rank from 3 to 5", conv([&[2, 4], w, y], F16, plain(), F32)),
        case(at, "x, w and y have ranks 4, 3 and 4", conv([x, &[6, 4, 3], y], F16, plain(), F32)),
        case(at, "y has 3 images, x has 2", conv([x, w, &[3, 6, 4, 4]], F16, plain(), F32)),
        case(at, "y has 5 channels, but w has 6 filters", conv([x, w, &[2, 5, 4, 4]], F16, plain(), F32)),
        case(at, "x has 4 channels, expected a multiple of the 3 channels of w", conv([x, &[6, 3, 3, 2], y], F16, plain(), F32)),
        case(at, "w has 3 filters, expected a multiple of the 2 groups", conv([x, &[3, 2, 3, 2], &[2, 3, 4, 4]], F16, plain(), F32)),
        case(at, "y has 5 elements along spatial axis 0, expected 4", conv([x, w, &[2, 6, 5, 4]], F16, plain(), F32)),
        case(at, "y has 4 elements along spatial axis 1, expected 3", with(plain().dilation([1, 2]))),
        case(at, "spatial axis 0: the filter of 7 is longer than the padded axis", conv([x, &[6, 4, 7, 2], y], F16, plain(), F32)),
        case(at, "stride has 1 numbers, expected 2, one per spatial axis", with(plain().stride([1]))),
        case(at, "stride has 0, expected numbers from 1", with(plain().stride([1, 0]))),
        case(at, "dilation has -1, expected numbers from 1", with(plain().dilation([-1, 1]))),
        case(at, "post_padding has -1, expected numbers from 0", with(plain().post_padding([-1, 0]))),
        case(at, "pre_padding has -2", with(plain().padding([-2, 0]).post_padding([0, 0]))),
        case(at, "x t0 is bool, not a number", conv([x, w, y], Bool, plain(), F32)),
        case(at, "computes in f8e4m3", conv([x, w, y], F16, plain(), F8E4M3)),
        case(
            "= conv_backward_data(",
            "dy has 4 elements along spatial axis 1, expected 5",
            over_inputs([("dy", F16, y), ("w", F16, w), ("dx", F16, &[2, 4, 6, 6])], |[dy, w, dx]| {
                Op::ConvBackwardData(ConvBackwardData { dy, w, dx, geometry: ConvGeometry::new(2), compute: F32 })
            }),
        ),
        case(
            "= conv_backward_filter(",
            "dy has 6 channels, but dw has 7 filters",
            over_inputs([("dy", F16, y), ("x", F16, x), ("dw", F16, &[7, 4, 3, 2])], |[dy, x, dw]| {
                Op::ConvBackwardFilter(ConvBackwardFilter { dy, x, dw, geometry: ConvGeometry::new(2), compute: F32 })
            }),
        ),
    ]);
}

#[test]
fn every_mistake_of_a_convolution_is_reported_at_once() {
    let mut g = Graph::new();
    let geometry = ConvGeometry::new(2).stride([0, 1]).padding([1]);
    conv([&[2, 4, 6, 5], &[7, 3, 3, 2], &[3, 6, 4, 4]], F16, geometry, Bool)(&mut g);
    let errors = g.verify().unwrap_err();
    let messages: Vec<&str> = errors.0.iter().map(|e| e.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "computes in bool, not in f32, f64, f16, bf16, i32 or i64",
            "stride has 0, expected numbers from 1 to 2147483647",
            "pre_padding has 1 numbers, expected 2, one per spatial axis",
            "post_padding has 1 numbers, expected 2, one per spatial axis",
            "y has 3 images, x has 2",
            "y has 6 channels, but w has 7 filters",
            "x has 4 channels, expected a multiple of the 3 channels of w",
        ]
    );
}

/// A norm over (4, 6, 2, 2), with changes to the op before it is added.
fn norm(mode: NormMode, scale: &'static [i64], change: impl FnOnce(&mut Graph, &mut NormForward)) -> impl FnOnce(&mut Graph) {
    move |g| {
        let x = g.input("x", F16, [4, 6, 2, 2]);
        let [scale, bias] = ["scale", "bias"].map(|name| g.input(name, F32, scale));
        let epsilon = g.tensor(Tensor::by_value("epsilon", F32, None, 4));
        let y = g.input("y", F16, [4, 6, 2, 2]);
        let bias = (mode != NormMode::Rms).then_some(bias);
        let mut op = NormForward { mode, x, scale, bias, epsilon, y, mean: None, inv_variance: None, running: None };
        change(g, &mut op);
        if bias.is_none() {
            exp_of_input(g, "bias");
        }
        g.push(Op::NormForward(op));
    }
}

/// Uses a tensor that would otherwise be unused.
fn exp_of_input(g: &mut Graph, name: &str) {
    let x = g.find(name).unwrap();
    g.pointwise(Mode::Exp, &[x]);
}

fn stats(dims: &'static [i64]) -> impl Fn(&mut Graph, &mut NormForward) {
    move |g, op| {
        op.mean = (op.mode != NormMode::Rms).then(|| g.input("mean", F32, dims));
        op.inv_variance = Some(g.input("inv_variance", F32, dims));
    }
}

fn running(g: &mut Graph, dims: &[i64]) -> RunningStats {
    let factor = g.tensor(Tensor::by_value("factor", F32, None, 4));
    let [mean, variance, next_mean, next_variance] = ["rm", "rv", "nm", "nv"].map(|name| g.input(name, F32, dims));
    RunningStats { factor, mean, variance, next_mean, next_variance }
}

#[test]
fn norm_rules() {
    const CHANNELS: &[i64] = &[1, 6, 1, 1];
    const ROWS: &[i64] = &[1, 6, 2, 2];
    good(norm(NormMode::Layer, ROWS, |_, _| {}));
    good(norm(NormMode::Layer, ROWS, stats(&[4, 1, 1, 1])));
    good(norm(NormMode::Rms, ROWS, stats(&[4, 1, 1, 1])));
    good(norm(NormMode::Instance, CHANNELS, stats(&[4, 6, 1, 1])));
    good(norm(NormMode::AdaLayer, &[4, 6, 1, 1], stats(&[4, 1, 2, 2])));
    good(norm(NormMode::Batch, CHANNELS, |g, op| {
        stats(CHANNELS)(g, op);
        op.running = Some(running(g, CHANNELS));
    }));
    let at = "= norm_forward(";
    check(vec![
        case(at, "mean and inv_variance are missing: batch norm computes them", norm(NormMode::Batch, CHANNELS, |_, _| {})),
        case(
            at,
            "inv_variance t6 is [4,6,1,1], not [1,6,1,1]",
            norm(NormMode::Batch, CHANNELS, |g, op| {
                op.mean = Some(g.input("mean", F32, CHANNELS));
                op.inv_variance = Some(g.input("inv_variance", F32, [4, 6, 1, 1]));
            }),
        ),
        case(
            at,
            "mean and inv_variance are given together or not at all",
            norm(NormMode::Layer, ROWS, |g, op| {
                op.inv_variance = Some(g.input("inv_variance", F32, [4, 1, 1, 1]));
            }),
        ),
        case(
            at,
            "mean is given, expected none: the mode rms has no mean",
            norm(NormMode::Rms, ROWS, |g, op| {
                op.mean = Some(g.input("mean", F32, [4, 1, 1, 1]));
            }),
        ),
        case(at, "the scale has extents [1, 6, 2, 2], expected one per channel, [1, 6, 1, 1]", norm(NormMode::Instance, ROWS, |_, _| {})),
        case(at, "axis 0 of the scale is 4, expected 1", norm(NormMode::Layer, &[4, 6, 2, 2], |_, _| {})),
        case(at, "axis 0 of the scale is 1, expected 4", norm(NormMode::AdaLayer, ROWS, |_, _| {})),
        case(at, "axis 1 of the scale is 3, expected 1, or 6 as in x", norm(NormMode::Layer, &[1, 3, 2, 2], |_, _| {})),
        case(at, "so no axis is normalized", norm(NormMode::Layer, &[1, 1, 1, 1], |_, _| {})),
        case(at, "x has 4 axes and the scale 3", norm(NormMode::Layer, &[6, 2, 2], |_, _| {})),
        case(
            at,
            "running statistics are given, expected none: the mode layer has none",
            norm(NormMode::Layer, ROWS, |g, op| {
                op.running = Some(running(g, CHANNELS));
            }),
        ),
    ]);
}

fn bad_norm(dims: [&'static [i64]; 3], epsilon: Tensor) -> impl FnOnce(&mut Graph) {
    move |g| {
        let [x, scale, y] = [("x", dims[0]), ("scale", dims[1]), ("y", dims[2])].map(|(name, dims)| g.input(name, F32, dims));
        let epsilon = g.tensor(epsilon);
        let (mode, mean, running) = (NormMode::Rms, None, None);
        g.push(Op::NormForward(NormForward { mode, x, scale, bias: None, epsilon, y, mean, inv_variance: None, running }));
    }
}

#[test]
fn rules_of_results_and_epsilons() {
    let host = || Tensor::by_value("epsilon", F32, None, 2);
    good(bad_norm([&[4, 6], &[1, 6], &[4, 6]], host()));
    let at = "= norm_forward(";
    check(vec![
        case(at, "y t2 is [4,5], not [4,6]", bad_norm([&[4, 6], &[1, 6], &[4, 5]], host())),
        case(at, "epsilon t3 is not a value from the host", bad_norm([&[4, 6], &[1, 6], &[4, 6]], Tensor::device("epsilon", F32, [1, 1]))),
        case(at, "epsilon t3 is i32, not f32", bad_norm([&[4, 6], &[1, 6], &[4, 6]], Tensor::by_value("epsilon", I32, None, 2))),
    ]);
}

fn norm_backward(mode: NormMode, dy: &'static [i64], mean: bool, dbias: bool, inverse: &'static [i64]) -> impl FnOnce(&mut Graph) {
    move |g| {
        let [x, dy, dx] = [("x", &[4, 6][..]), ("dy", dy), ("dx", &[4, 6])].map(|(name, dims)| g.input(name, F32, dims));
        let [scale, dscale] = ["scale", "dscale"].map(|name| g.input(name, F32, [1, 6]));
        let mean = mean.then(|| g.input("mean", F32, inverse));
        let dbias = dbias.then(|| g.input("dbias", F32, [1, 6]));
        let inv_variance = g.input("inv_variance", F32, inverse);
        g.push(Op::NormBackward(NormBackward { mode, x, dy, scale, mean, inv_variance, dx, dscale, dbias }));
    }
}

#[test]
fn norm_gradient_rules() {
    good(norm_backward(NormMode::Layer, &[4, 6], true, true, &[4, 1]));
    good(norm_backward(NormMode::Rms, &[4, 6], false, false, &[4, 1]));
    good(norm_backward(NormMode::Batch, &[4, 6], true, true, &[1, 6]));
    let at = "= norm_backward(";
    check(vec![
        case(at, "dy t1 is [6,4], not [4,6]", norm_backward(NormMode::Rms, &[6, 4], false, false, &[4, 1])),
        case(at, "mean is missing: the mode layer needs it", norm_backward(NormMode::Layer, &[4, 6], false, true, &[4, 1])),
        case(at, "dbias is missing: the mode batch needs it", norm_backward(NormMode::Batch, &[4, 6], true, false, &[1, 6])),
        case(at, "mean is given, expected none", norm_backward(NormMode::Rms, &[4, 6], true, false, &[4, 1])),
        case(at, "inv_variance t5 is [1,6], not [4,1]", norm_backward(NormMode::Rms, &[4, 6], false, false, &[1, 6])),
    ]);
}

#[test]
fn batch_norm_statistics_rules() {
    let sums = |x: (DType, &'static [i64]), sum: (DType, &'static [i64]), compute: DType| {
        over_inputs([("x", x.0, x.1), ("sum", sum.0, sum.1), ("square_sum", F32, &[1, 6, 1])], move |[x, sum, square_sum]| {
            Op::GenStats(GenStats { x, sum, square_sum, compute })
        })
    };
    good(sums((F16, &[4, 6, 2]), (F32, &[1, 6, 1]), F32));
    const C: &[i64] = &[1, 6, 1, 1];
    let finalize = |sum: &'static [i64], count: DType, scale: &'static [i64]| {
        move |g: &mut Graph| {
            let [sum, square_sum, bias, mean, inv_variance, eq_scale, eq_bias] =
                ["sum", "square_sum", "bias", "mean", "inv", "eq_scale", "eq_bias"].map(|name| g.input(name, F32, sum));
            let scale = g.input("scale", F32, scale);
            let epsilon = g.tensor(Tensor::by_value("epsilon", F32, None, 4));
            let count = g.tensor(Tensor::by_value("count", count, None, 4));
            let [mean_before, variance_before, next_mean, next_variance] =
                ["old_mean", "old_variance", "next_mean", "next_variance"].map(|name| g.input(name, F32, C));
            let factor = g.tensor(Tensor::by_value("factor", F32, None, 4));
            let running = RunningStats { factor, mean: mean_before, variance: variance_before, next_mean, next_variance };
            let compute = F32;
            g.push(Op::BnFinalize(BnFinalize {
                sum,
                square_sum,
                scale,
                bias,
                epsilon,
                count,
                running,
                mean,
                inv_variance,
                eq_scale,
                eq_bias,
                compute,
            }));
        }
    };
    good(finalize(C, I64, C));
    check(vec![
        case("= gen_stats(", "sum t1 is [4,6,1], not [1,6,1]", sums((F16, &[4, 6, 2]), (F32, &[4, 6, 1]), F32)),
        case("= gen_stats(", "sum t1 is f16, not f32", sums((F16, &[4, 6, 2]), (F16, &[1, 6, 1]), F32)),
        case("= gen_stats(", "x t0 is i8, not a float", sums((I8, &[4, 6, 2]), (F32, &[1, 6, 1]), F32)),
        case("= gen_stats(", "computes in i32", sums((F16, &[4, 6, 2]), (F32, &[1, 6, 1]), I32)),
        case("= bn_finalize(", "sum t0 is not (1, c, 1, …)", finalize(&[2, 6, 1, 1], I64, C)),
        case("= bn_finalize(", "count t9 is f32, not i64", finalize(C, F32, C)),
        case("= bn_finalize(", "scale t7 is [1,5,1,1], not [1,6,1,1]", finalize(C, I64, &[1, 5, 1, 1])),
    ]);
}

#[test]
fn batch_norm_gradient_rules() {
    struct W {
        x: DType,
        dy: &'static [i64],
        compute: DType,
        channels: [(DType, &'static [i64]); 8],
    }
    const NAMES: [&str; 8] = ["scale", "mean", "inv_variance", "dscale", "dbias", "eq_scale_dy", "eq_scale_x", "eq_bias"];
    let weights = |spoil: fn(&mut W)| {
        let mut w = W { x: F16, dy: &[4, 6, 2], compute: F32, channels: [(F32, &[1, 6, 1]); 8] };
        spoil(&mut w);
        move |g: &mut Graph| {
            let (x, dy) = (g.input("x", w.x, [4, 6, 2]), g.input("dy", F16, w.dy));
            let mut all = NAMES.into_iter().zip(w.channels).map(|(name, (dtype, dims))| g.input(name, dtype, dims));
            let [scale, mean, inv_variance, dscale, dbias, eq_scale_dy, eq_scale_x, eq_bias] = std::array::from_fn(|_| all.next().unwrap());
            drop(all);
            let compute = w.compute;
            g.push(Op::BnBackwardWeights(BnBackwardWeights {
                x,
                dy,
                scale,
                mean,
                inv_variance,
                dscale,
                dbias,
                eq_scale_dy,
                eq_scale_x,
                eq_bias,
                compute,
            }));
        }
    };
    good(weights(|_| {}));
    let at = "= bn_backward_weights(";
    check(vec![
        case(at, "x t0 is i8, not a float", weights(|w| w.x = I8)),
        case(at, "dy t1 is [4,6,3], not [4,6,2]", weights(|w| w.dy = &[4, 6, 3])),
        case(at, "computes in i32", weights(|w| w.compute = I32)),
        case(at, "scale t2 is f16, not f32", weights(|w| w.channels[0].0 = F16)),
        case(at, "mean t3 is [1,5,1], not [1,6,1]", weights(|w| w.channels[1].1 = &[1, 5, 1])),
        case(at, "inv_variance t4 is [4,6,1], not [1,6,1]", weights(|w| w.channels[2].1 = &[4, 6, 1])),
        case(at, "dscale t5 is f64, not f32", weights(|w| w.channels[3].0 = F64)),
        case(at, "dbias t6 is [1,6,2], not [1,6,1]", weights(|w| w.channels[4].1 = &[1, 6, 2])),
        case(at, "eq_scale_dy t7 is bf16, not f32", weights(|w| w.channels[5].0 = BF16)),
        case(at, "eq_scale_x t8 is [1,1,1], not [1,6,1]", weights(|w| w.channels[6].1 = &[1, 1, 1])),
        case(at, "eq_bias t9 is [1,6], not [1,6,1]", weights(|w| w.channels[7].1 = &[1, 6])),
    ]);
}

fn pool(mode: ResampleMode, y: &'static [i64], window: Window, index: Option<(DType, &'static [i64])>) -> impl FnOnce(&mut Graph) {
    move |g| {
        let (x, y) = (g.input("x", F16, [2, 3, 6, 5]), g.input("y", F16, y));
        let index = index.map(|(dtype, dims)| g.input("index", dtype, dims));
        g.push(Op::ResampleForward(ResampleForward { mode, x, y, index, window, compute: F32 }));
    }
}

#[test]
fn pooling_rules() {
    use ResampleMode::{AverageExcludePadding, AverageIncludePadding, Max};
    const Y: &[i64] = &[2, 3, 3, 2];
    let plain = || Window::new([2, 2]);
    good(pool(Max, Y, plain(), Some((I8, Y))));
    good(pool(AverageIncludePadding, &[2, 3, 3, 3], Window::new([3, 2]).stride([2, 2]).padding([1, 1]).post_padding([0, 0]), None));
    let at = "= resample_forward(";
    let backward = |mode, index: bool, x: bool| {
        move |g: &mut Graph| {
            let (dy, dx) = (g.input("dy", F16, Y), g.input("dx", F16, [2, 3, 6, 5]));
            let index = index.then(|| g.input("index", I8, Y));
            let x = x.then(|| g.input("x", F16, [2, 3, 6, 5]));
            let window = Window::new([2, 2]);
            g.push(Op::ResampleBackward(ResampleBackward { mode, dy, dx, index, x, y: None, window, compute: F32 }));
        }
    };
    good(backward(Max, true, false));
    good(backward(AverageExcludePadding, false, false));
    check(vec![
        case(at, "y has 4 elements along spatial axis 0, expected 3", pool(Max, &[2, 3, 4, 2], plain(), None)),
        case(at, "y has [2, 4] images and channels, x has [2, 3]", pool(Max, &[2, 4, 3, 2], plain(), None)),
        case(at, "x and y have ranks 4 and 3, expected one rank from 3 to 5", pool(Max, &[2, 3, 3], plain(), None)),
        case(at, "window has 1 numbers, expected 2", pool(Max, Y, Window { extent: vec![2], ..plain() }, None)),
        case(at, "stride has 0, expected numbers from 1", pool(Max, Y, plain().stride([2, 0]), None)),
        case(
            at,
            "pre_padding has 2, expected less than the window's extent of 2",
            pool(Max, Y, plain().padding([2, 0]).post_padding([0, 0]), None),
        ),
        case(at, "spatial axis 0: the window of 7 is longer than the padded axis", pool(Max, &[2, 3, 1, 2], Window::new([7, 2]), None)),
        case(at, "index t2 is [2,3,3,3], not [2,3,3,2]", pool(Max, Y, plain(), Some((I8, &[2, 3, 3, 3])))),
        case(at, "index t2 is f32, not an integer", pool(Max, Y, plain(), Some((F32, Y)))),
        case(at, "index is t2, expected none: only the mode max has an index", pool(AverageExcludePadding, Y, plain(), Some((I8, Y)))),
        case("= resample_backward(", "index is missing: the mode max needs it", backward(Max, false, false)),
        case("= resample_backward(", "x and y are given together or not at all", backward(Max, true, true)),
    ]);
}

#[test]
fn upsample_rules() {
    let up = |x: (DType, &'static [i64]), y: (DType, &'static [i64]), compute| {
        over_inputs([("x", x.0, x.1), ("y", y.0, y.1)], move |[x, y]| Op::Upsample(Upsample { x, y, compute }))
    };
    const X: (DType, &[i64]) = (F32, &[2, 3, 5, 4]);
    const Y: (DType, &[i64]) = (F32, &[2, 3, 10, 8]);
    good(up(X, Y, F32));
    let at = "= upsample(";
    check(vec![
        case(at, "y t1 is [2,3,10,4], not [2,3,10,8]", up(X, (F32, &[2, 3, 10, 4]), F32)),
        case(at, "y t1 is [2,6,10,8], not [2,3,10,8]", up(X, (F32, &[2, 6, 10, 8]), F32)),
        case(at, "y t1 is [2,3,5,4], not [2,3,10,8]", up(X, (F32, X.1), F32)),
        case(at, "x has rank 5, expected 4", up((F32, &[2, 3, 5, 4, 1]), (F32, &[2, 3, 10, 8, 2]), F32)),
        case(at, "x has rank 3, expected 4", up((F32, &[2, 3, 5]), (F32, &[2, 3, 10]), F32)),
        case(at, "x t0 is f16, not f32", up((F16, X.1), Y, F32)),
        case(at, "y t1 is bf16, not f32", up(X, (BF16, Y.1), F32)),
        case(at, "computes in f16", up(X, Y, F16)),
    ]);
}

#[test]
fn concat_rules() {
    let concat = |a: (DType, &'static [i64]), axis: i64| {
        over_inputs([("a", a.0, a.1), ("b", F16, &[2, 3]), ("y", F16, &[2, 7])], move |[a, b, y]| {
            Op::Concat(Concat { inputs: vec![a, b], y, axis })
        })
    };
    good(concat((F16, &[2, 4]), 1));
    check(vec![
        case("= concat(", "axis 1 of y is 7, expected 8", concat((F16, &[2, 5]), 1)),
        case("= concat(", "x t0 is [3,4], expected the extents of y except along axis 1", concat((F16, &[3, 4]), 1)),
        case("= concat(", "axis is 2, but y has 2 axes", concat((F16, &[2, 4]), 2)),
        case("= concat(", "axis is -1, but y has 2 axes", concat((F16, &[2, 4]), -1)),
        case("= concat(", "x t0 is f32, but y t2 is f16", concat((F32, &[2, 4]), 1)),
        case(
            "= concat(",
            "got no inputs, expected at least one",
            over_inputs([("y", F16, &[2])], |[y]| Op::Concat(Concat { inputs: vec![], y, axis: 0 })),
        ),
    ]);
}

#[test]
fn rules_of_grouped_products() {
    let moe = |tokens: &'static [i64], weights: &'static [i64], first: (DType, &'static [i64]), y: &'static [i64], top_k: Option<i32>| {
        move |g: &mut Graph| {
            let [tokens, weights, y] = [("tokens", tokens), ("weights", weights), ("y", y)].map(|(name, dims)| g.input(name, F16, dims));
            let first_token = g.input("first", first.0, first.1);
            let routing = top_k.map_or(Routing::None, |top_k| {
                let [index, slot] = ["index", "slot"].map(|name| g.input(name, I32, [1, 6, 1]));
                Routing::Scatter { index, slot, top_k }
            });
            g.push(Op::MoeMatmul(MoeMatmul { tokens, weights, first_token, routing, y, compute: F32 }));
        }
    };
    const T: &[i64] = &[1, 6, 4];
    const W: &[i64] = &[3, 4, 5];
    const F: (DType, &[i64]) = (I32, &[3, 1, 1]);
    good(moe(T, W, F, &[1, 6, 5], None));
    good(moe(T, W, F, &[1, 6, 5], Some(2)));
    let at = "= moe_matmul(";
    let rope = |x: &'static [i64], angles: &'static [i64], scale: f32, width: Option<i64>| {
        over_inputs([("x", F16, x), ("angles", F32, angles), ("y", F16, &[2, 3, 4, 8])], move |[x, angles, y]| {
            Op::Rope(Rope { x, angles, y, scale, width })
        })
    };
    const X: &[i64] = &[2, 3, 4, 8];
    good(rope(X, &[4, 1, 1, 8], 1.0, None));
    good(rope(X, &[4, 1, 1, 6], 1.0, Some(6)));
    check(vec![
        case(at, "tokens have extents [2, 6, 4], expected (1, rows, k)", moe(&[2, 6, 4], W, F, &[1, 6, 5], None)),
        case(at, "weights have extents [4, 5], expected (experts, k, n)", moe(T, &[4, 5], F, &[1, 6, 5], None)),
        case(at, "tokens have 4 inner elements, weights 5", moe(T, &[3, 5, 5], F, &[1, 6, 5], None)),
        case(at, "first_token t3 is [4,1,1], not [3,1,1]", moe(T, W, (I32, &[4, 1, 1]), &[1, 6, 5], None)),
        case(at, "first_token t3 is i64, not i32", moe(T, W, (I64, &[3, 1, 1]), &[1, 6, 5], None)),
        case(at, "y t2 is [1,6,4], not [1,6,5]", moe(T, W, F, &[1, 6, 4], None)),
        case(at, "top_k is 4, expected a number of at least 1 that divides the 6 rows", moe(T, W, F, &[1, 6, 5], Some(4))),
        case(
            "= moe_matmul_backward(",
            "dy t1 is [1,5,5], not [1,6,5]",
            over_inputs(
                [("tokens", F16, T), ("dy", F16, &[1, 5, 5]), ("first", I32, &[3, 1, 1]), ("dw", F16, W)],
                |[tokens, dy, first_token, dweights]| {
                    Op::MoeMatmulBackward(MoeMatmulBackward { tokens, dy, first_token, dweights, compute: F32 })
                },
            ),
        ),
        case("= rope(", "width is 5, expected an even number from 2 to the 8 elements of a head", rope(X, &[4, 1, 1, 5], 1.0, Some(5))),
        case("= rope(", "width is 10, expected an even number", rope(X, &[4, 1, 1, 10], 1.0, Some(10))),
        case("= rope(", "angles t1 is [4,1,1,8], not [4,1,1,6]", rope(X, &[4, 1, 1, 8], 1.0, Some(6))),
        case("= rope(", "scale is inf, expected a finite number", rope(X, &[4, 1, 1, 8], f32::INFINITY, None)),
        case("= rope(", "x t0 has 3 axes, expected (b, h, s, d)", rope(&[2, 3, 8], &[4, 1, 1, 8], 1.0, None)),
        case("= rope(", "y t2 is [2,3,4,8], not [2,3,4,6]", rope(&[2, 3, 4, 6], &[4, 1, 1, 6], 1.0, None)),
    ]);
}

#[test]
fn a_scalar_does_not_change_the_rank_of_a_result() {
    let mut g = Graph::new();
    let (x, z) = (g.input("x", F32, [2, 3]), g.input("z", F32, [2, 3, 4]));
    let two = g.scalar(cudnn_graph::ir::Scalar::F32(2.0));
    let y = g.pointwise(Mode::Mul, &[x, two]);
    g.output(y, "y", F32);
    // A second use with another rank receives a copy.
    let w = g.pointwise(Mode::Mul, &[two, z]);
    g.output(w, "w", F32);
    // Tensors of more axes than the scalar.
    let v = g.input("v", F32, [1, 2, 3, 4, 5]);
    let half = g.scalar(cudnn_graph::ir::Scalar::F32(0.5));
    let u = g.pointwise(Mode::Mul, &[v, half]);
    g.output(u, "u", F32);
    assert_eq!(g.get(half).unwrap().dims.rank(), 5);
    assert_eq!(g.get(y).unwrap().dims, [2, 3].into());
    assert_eq!(g.get(w).unwrap().dims, [2, 3, 4].into());
    let text = g.to_string();
    assert!(text.contains("\"scalar2\" f32 [1,1] strides [1,1] by_value(2.0)"), "{text}");
    g.verify().unwrap_or_else(|e| panic!("{e}\n{text}"));
}
