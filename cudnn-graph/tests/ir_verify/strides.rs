//! Rules of strides and alignments, which cuDNN checks when it finalizes a descriptor: a valid graph with one tensor changed.

use crate::*;
use cudnn_graph::ir::{BnFinalizeInputs, NormGradientInputs, RunningInputs};

/// The graph of `build` with other strides of the tensor `name`.
fn with(build: fn(&mut Graph), name: &'static str, strides: &'static [i64]) -> impl FnOnce(&mut Graph) {
    good(build);
    move |g| {
        build(g);
        let id = g.ids().find(|id| g.get(*id).unwrap().name.trim_end_matches(|c: char| c.is_ascii_digit()) == name);
        g.set_strides(id.unwrap_or_else(|| panic!("no tensor {name}")), strides.to_vec());
    }
}

fn convolution(g: &mut Graph) {
    let (x, w, y) = (g.input("x", F16, [2, 4, 6, 5]), g.input("w", F16, [6, 4, 1, 1]), g.input("y", F16, [2, 6, 6, 5]));
    g.push(Op::ConvForward(ConvForward { x, w, y, geometry: ConvGeometry::new(2), compute: F32 }));
}

fn batch_norm(g: &mut Graph) {
    let x = g.input("x", F16, [4, 6, 2]);
    let [scale, bias, mean, variance] = ["scale", "bias", "old_mean", "old_variance"].map(|name| g.input(name, F32, [1, 6, 1]));
    let running = Some(RunningInputs { factor: 0.1, mean, variance });
    let norm = g.norm_training(NormMode::Batch, x, scale, Some(bias), 1e-5, running);
    g.output(norm.y, "y", F16);
}

fn rms_norm(g: &mut Graph) {
    let (x, scale) = (g.input("x", F16, [4, 6, 2]), g.input("scale", F32, [1, 6, 2]));
    let norm = g.norm_training(NormMode::Rms, x, scale, None, 1e-5, None);
    g.output(norm.y, "y", F16);
}

/// RMS norm over all axes but the first.
fn rms_of(dims: [i64; 3], strides: [i64; 3]) -> impl FnOnce(&mut Graph) {
    move |g| {
        let x = g.tensor(Tensor::device("x", F16, dims).strides(strides));
        let scale = g.input("scale", F32, [1, dims[1], dims[2]]);
        let y = g.norm_inference(NormMode::Rms, x, scale, None, 1e-5);
        g.output(y, "y", F16);
    }
}

fn gradient(g: &mut Graph) {
    let [x, dy] = ["x", "dy"].map(|name| g.input(name, F16, [4, 6, 2]));
    let scale = g.input("scale", F32, [1, 6, 2]);
    let [mean, inv_variance] = ["mean", "inv"].map(|name| g.input(name, F32, [4, 1, 1]));
    let d = g.norm_backward(NormMode::Layer, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
    g.output(d.dx, "dx", F16);
}

fn finalize(g: &mut Graph) {
    let names = ["sum", "square_sum", "scale", "bias", "old_mean", "old_variance"];
    let [sum, square_sum, scale, bias, mean, variance] = names.map(|name| g.input(name, F32, [1, 6, 1]));
    let running = RunningInputs { factor: 0.1, mean, variance };
    g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: 1e-5, count: 16, running });
}

#[test]
fn strides_that_cudnn_refuses() {
    let (conv, norm, back, last) = ("= conv_forward(", "= norm_forward(", "= norm_backward(", "= bn_finalize(");
    check(vec![
        case(conv, "x t0 has overlapping strides [120,30,4,1]", with(convolution, "x", &[120, 30, 4, 1])),
        // These elements do not overlap, but cuDNN counts a stride of 9 over 5 elements at a distance of 2 as an overlap.
        case(conv, "x t0 has overlapping strides [400,100,9,2]", with(convolution, "x", &[400, 100, 9, 2])),
        case(conv, "w t1 has strides [5,1,1,1], expected dense ones", with(convolution, "w", &[5, 1, 1, 1])),
        case(norm, "y t6 has strides [12,1,6], expected [12,2,1] as x t0", with(batch_norm, "y", &[12, 1, 6])),
        case(norm, "bias t2 has strides [6,2,1], expected [6,1,1] as scale t1", with(batch_norm, "bias", &[6, 2, 1])),
        case(norm, "inv_variance t8 has strides [6,2,1]", with(batch_norm, "inv_variance", &[6, 2, 1])),
        case(norm, "running_mean t3 has strides [6,2,1], expected [6,1,1] as mean t7", with(batch_norm, "old_mean", &[6, 2, 1])),
        case(norm, "next_running_variance t11 has strides", with(batch_norm, "running_variance", &[6, 2, 1])),
        case(back, "dy t1 has strides [12,1,6], expected [12,2,1] as x t0", with(gradient, "dy", &[12, 1, 6])),
        case(back, "dx t5 has strides [24,2,1], expected [12,2,1] as x t0", with(gradient, "dx", &[24, 2, 1])),
        case(back, "dscale t6 has strides [12,1,6], expected [12,2,1] as scale t2", with(gradient, "dscale", &[12, 1, 6])),
        case(back, "dbias t7 has strides [12,1,6], expected [12,2,1] as scale t2", with(gradient, "dbias", &[12, 1, 6])),
        case(back, "scale t2 has strides [24,4,2], expected dense ones", |g| {
            gradient(g);
            for id in g.ids().filter(|id| g.get(*id).unwrap().dims.0 == [1, 6, 2]).collect::<Vec<_>>() {
                g.set_strides(id, [24, 4, 2]);
            }
        }),
        case(norm, "x t0 has strides [2,1,3], expected dense normalized axes", rms_of([1, 3, 2], [2, 1, 3])),
        case(norm, "x t0 has strides [0,2,1], expected dense normalized axes", rms_of([1, 3, 2], [0, 2, 1])),
        case(norm, "x t0 has strides [24,4,2], expected dense normalized axes", rms_of([4, 6, 2], [24, 4, 2])),
        case(norm, "inv_variance t4 has strides [5,1,1], expected dense ones", with(rms_norm, "inv_variance", &[5, 1, 1])),
        case(norm, "inv_variance t12 and mean t7 are in different kinds of storage", |g| {
            batch_norm(g);
            let inverse = g.ids().nth(8).unwrap();
            let Op::NormForward(norm) = &mut g.take_ops(0)[0] else { unreachable!() };
            norm.inv_variance = Some(inverse);
            let tensor = Tensor { storage: Storage::Virtual, ..g.get(inverse).unwrap().clone() };
            let other = g.tensor(tensor);
            assert_eq!(other.index(), 12);
            g.push(Op::NormForward(NormForward { inv_variance: Some(other), ..norm.clone() }));
            let y = g.pointwise(Mode::Identity, &[inverse]);
            g.output(y, "copy", F32);
        }),
        case(last, "square_sum t1 has strides [6,2,1], expected [6,1,1] as sum t0", with(finalize, "square_sum", &[6, 2, 1])),
        case(last, "bias t3 has strides [6,2,1], expected [6,1,1] as scale t2", with(finalize, "bias", &[6, 2, 1])),
        case(last, "inv_variance t12 has strides", with(finalize, "inv_variance", &[6, 2, 1])),
        case(last, "eq_bias t14 has strides [6,2,1], expected [6,1,1] as eq_scale t13", with(finalize, "eq_bias", &[6, 2, 1])),
        case(last, "running_variance t5 has strides", with(finalize, "old_variance", &[6, 2, 1])),
    ]);
    good(rms_of([1, 3, 2], [6, 1, 3]));
    good(rms_of([4, 6, 2], [24, 2, 1]));
    // Strides of axes with one element do not matter, and neither does the order of a filter's axes.
    good(with(batch_norm, "bias", &[99, 1, 7]));
    good(with(convolution, "w", &[1, 6, 9, 9]));
    good(with(convolution, "x", &[1000, 100, 10, 2]));
}

#[test]
fn results_that_share_elements_are_refused() {
    let exp = |strides: &'static [i64]| {
        move |g: &mut Graph| {
            let x = g.input("x", F32, [2, 3]);
            let y = g.tensor(Tensor::device("y", F32, [2, 3]).strides(strides.to_vec()));
            g.push(pointwise(Mode::Exp, x, y));
        }
    };
    check(vec![
        case("\"y\"", "its strides [0,1] place several elements at one index", exp(&[0, 1])),
        case("\"y\"", "its strides [2,1] place several elements at one index", exp(&[2, 1])),
    ]);
    good(exp(&[1, 2]));
    good(exp(&[5, 2]));
    // An input may be broadcast.
    good(|g: &mut Graph| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([0, 1])));
}

#[test]
fn an_alignment_holds_an_element() {
    check(vec![
        case("\"x\"", "alignment 2 is below the 4 bytes of an element", |g| exp_of(g, Tensor::device("x", F32, [2]).alignment(2))),
        case("\"x\"", "alignment 4 is below the 8 bytes of an element", |g| exp_of(g, Tensor::device("x", F64, [2]).alignment(4))),
    ]);
    good(|g: &mut Graph| exp_of(g, Tensor::device("x", F16, [2]).alignment(2)));
}
