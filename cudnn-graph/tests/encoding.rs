//! Encodings of convolutions, norms, pooling and experts, with the numbers of NVIDIA's header instead of the names of this crate: a number of an
//! attribute, and what it is set to.

use cudnn_graph::DType::*;
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{BnFinalizeInputs, BnGradientInputs, Graph, NormGradientInputs, RunningInputs};
use cudnn_graph::program::{Program, Values};
use cudnn_graph::{Version, encode, encode_dynamic};
use std::collections::BTreeMap;

fn program(build: impl FnOnce(&mut Graph), version: (u32, u32)) -> Program {
    let mut g = Graph::new();
    build(&mut g);
    let graph = g.verify().unwrap_or_else(|e| panic!("{e}"));
    encode(&graph, Version::new(version.0, version.1, 0)).unwrap_or_else(|e| panic!("{e}"))
}

/// The settings of the only descriptor of a kind. Tensors are their names without numbers, other descriptors their kinds.
fn settings(program: &Program, kind: i32) -> BTreeMap<i32, String> {
    let label = |label: &str| label.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    let names: Vec<(i32, String)> = program.descriptors.iter().map(|d| (d.kind.0, label(&d.label))).collect();
    let mut found = program.descriptors.iter().filter(|d| d.kind.0 == kind);
    let descriptor = found.next().unwrap_or_else(|| panic!("no descriptor of kind {kind}\n{program}"));
    assert!(found.next().is_none(), "{program}");
    let text = |values: &Values| match values {
        Values::I64(v) => format!("{v:?}"),
        Values::I32(v) => format!("{v:?}"),
        Values::F32(v) => format!("{v:?}"),
        Values::F64(v) => format!("{v:?}"),
        Values::Fractions(v) => format!("{v:?}"),
        Values::Bool(v) => v.to_string(),
        Values::Code(code, _) => code.to_string(),
        Values::Bytes(bytes) => format!("{bytes:?}"),
        Values::Descriptors(ids) => {
            let all: Vec<_> = program.ids().zip(&names).collect();
            let one = |id| {
                let (_, (kind, label)) = all.iter().find(|(other, _)| other == id).unwrap();
                if *kind == 17 { label.clone() } else { format!("kind {kind}") }
            };
            ids.iter().map(one).collect::<Vec<_>>().join(" ")
        }
    };
    descriptor.settings.iter().map(|s| (s.attribute.0, text(&s.values))).collect()
}

fn check(program: &Program, kind: i32, want: &[(i32, &str)]) {
    let want: BTreeMap<i32, String> = want.iter().map(|&(attribute, value)| (attribute, value.to_owned())).collect();
    assert_eq!(settings(program, kind), want, "kind {kind}\n{program}");
}

fn geometry() -> ConvGeometry {
    ConvGeometry::new(2).stride([1, 2]).dilation([3, 1]).padding([4, 0]).post_padding([5, 1])
}

const GEOMETRY: [(i32, &str); 7] = [(100, "0"), (101, "1"), (102, "[3, 1]"), (103, "[1, 2]"), (104, "[5, 1]"), (105, "[4, 0]"), (106, "2")];

#[test]
fn convolutions() {
    let geometry_of = |program: &Program| {
        let want: Vec<(i32, &str)> = GEOMETRY.iter().map(|&(a, v)| (a, if a == 106 { "[2]" } else { v })).collect();
        check(program, 1, &want);
    };
    let forward = program(
        |g| {
            let (x, w) = (g.input("x", F16, [2, 4, 9, 8]), g.input("w", F16, [6, 2, 3, 3]));
            let y = g.convolution(x, w, geometry());
            g.output(y, "y", F16);
        },
        (9, 0),
    );
    geometry_of(&forward);
    check(&forward, 10, &[(700, "[1.0]"), (701, "[0.0]"), (702, "kind 1"), (703, "w"), (704, "x"), (705, "y")]);
    let y = [2, 6, 12, 4];
    let data = program(
        |g| {
            let (dy, w) = (g.input("dy", F16, y), g.input("w", F16, [6, 2, 3, 3]));
            let dx = g.convolution_backward_data(dy, w, [2, 4, 9, 8], geometry());
            g.output(dx, "dx", F16);
        },
        (9, 0),
    );
    geometry_of(&data);
    check(&data, 12, &[(706, "[1.0]"), (707, "[0.0]"), (708, "kind 1"), (709, "w"), (710, "dx"), (711, "dy")]);
    let filter = program(
        |g| {
            let (dy, x) = (g.input("dy", F16, y), g.input("x", F16, [2, 4, 9, 8]));
            let dw = g.convolution_backward_filter(dy, x, [6, 2, 3, 3], geometry());
            g.output(dw, "dw", F16);
        },
        (9, 0),
    );
    geometry_of(&filter);
    check(&filter, 11, &[(712, "[1.0]"), (713, "[0.0]"), (714, "kind 1"), (715, "dw"), (716, "x"), (717, "dy")]);
}

#[test]
fn norms() {
    let channels = [1, 6, 1, 1];
    let batch = program(
        |g| {
            let x = g.input("x", F16, [4, 6, 2, 2]);
            let [scale, bias, mean, variance] = ["scale", "bias", "old_mean", "old_variance"].map(|name| g.input(name, F32, channels));
            let running = Some(RunningInputs { factor: 0.1, mean, variance });
            let norm = g.norm_training(NormMode::Batch, x, scale, Some(bias), 1e-5, running);
            g.output(norm.y, "y", F16);
        },
        (9, 0),
    );
    check(
        &batch,
        29,
        &[
            (2000, "2"),
            (2001, "1"),
            (2002, "x"),
            (2003, "mean"),
            (2004, "inv_variance"),
            (2005, "scale"),
            (2006, "bias"),
            (2007, "scalar"),
            (2008, "scalar"),
            (2009, "old_mean"),
            (2010, "old_variance"),
            (2011, "running_mean"),
            (2012, "running_variance"),
            (2013, "y"),
        ],
    );
    for (mode, code) in [(NormMode::Layer, "0"), (NormMode::Instance, "1"), (NormMode::Rms, "4"), (NormMode::AdaLayer, "5")] {
        let scale: [i64; 4] = match mode {
            NormMode::Layer | NormMode::Rms => [1, 6, 2, 2],
            NormMode::Instance | NormMode::Batch => channels,
            NormMode::AdaLayer => [4, 6, 1, 1],
        };
        let rms = mode == NormMode::Rms;
        let made = program(
            |g| {
                let (x, s) = (g.input("x", F16, [4, 6, 2, 2]), g.input("scale", F32, scale));
                let bias = (!rms).then(|| g.input("bias", F32, scale));
                let y = g.norm_inference(mode, x, s, bias, 1e-5);
                g.output(y, "y", F16);
            },
            (9, 7),
        );
        let mut want = vec![(2000, code), (2001, "0"), (2002, "x"), (2005, "scale"), (2007, "scalar"), (2013, "y")];
        want.extend((!rms).then_some((2006, "bias")));
        check(&made, 29, &want);
    }
    let backward = program(
        |g| {
            let (x, dy) = (g.input("x", F16, [4, 6, 2, 2]), g.input("dy", F16, [4, 6, 2, 2]));
            let scale = g.input("scale", F32, [1, 6, 2, 2]);
            let [mean, inv_variance] = ["mean", "inv_variance"].map(|name| g.input(name, F32, [4, 1, 1, 1]));
            let d = g.norm_backward(NormMode::Layer, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
            g.output(d.dx, "dx", F16);
        },
        (9, 0),
    );
    let want = [(2100, "0"), (2101, "x"), (2102, "mean"), (2103, "inv_variance"), (2104, "dy"), (2105, "scale")];
    check(&backward, 30, &[&want[..], &[(2107, "dscale"), (2108, "dbias"), (2109, "dx")]].concat());
}

#[test]
fn statistics_of_batch_norm() {
    let sums = program(
        |g| {
            let x = g.input("x", F16, [4, 6, 2, 2]);
            g.gen_stats(x);
        },
        (9, 0),
    );
    check(&sums, 14, &[(770, "0"), (771, "0"), (772, "x"), (773, "sum"), (774, "square_sum")]);
    let last = program(
        |g| {
            let names = ["sum", "square_sum", "scale", "bias", "old_mean", "old_variance"];
            let [sum, square_sum, scale, bias, mean, variance] = names.map(|name| g.input(name, F32, [1, 6, 1, 1]));
            let running = RunningInputs { factor: 0.1, mean, variance };
            g.bn_finalize(BnFinalizeInputs { sum, square_sum, scale, bias, epsilon: 1e-5, count: 16, running });
        },
        (9, 0),
    );
    check(
        &last,
        20,
        &[
            (780, "0"),
            (781, "0"),
            (782, "sum"),
            (783, "square_sum"),
            (784, "scale"),
            (785, "bias"),
            (786, "old_mean"),
            (787, "old_variance"),
            (788, "running_mean"),
            (789, "running_variance"),
            (790, "mean"),
            (791, "inv_variance"),
            (792, "eq_scale"),
            (793, "eq_bias"),
            (794, "scalar"),
            (795, "scalar"),
            (796, "scalar"),
        ],
    );
}

#[test]
fn gradients_of_the_weights_of_batch_norm() {
    let made = program(
        |g| {
            let [x, dy] = ["x", "dy"].map(|name| g.input(name, F16, [4, 6, 2, 2]));
            let [scale, mean, inv_variance] = ["scale", "old_mean", "inv_variance"].map(|name| g.input(name, F32, [1, 6, 1, 1]));
            g.bn_backward_weights(BnGradientInputs { x, dy, scale, mean, inv_variance });
        },
        (9, 0),
    );
    check(
        &made,
        23,
        &[
            (1620, "0"),
            (1621, "old_mean"),
            (1622, "inv_variance"),
            (1623, "scale"),
            (1624, "x"),
            (1625, "dy"),
            (1626, "dscale"),
            (1627, "dbias"),
            (1628, "eq_scale_dy"),
            (1629, "eq_scale_x"),
            (1630, "eq_bias"),
        ],
    );
}

/// A tensor has the number of its element type, from the version that the header names.
#[test]
fn element_types() {
    let types = [(F32, 0), (F64, 1), (F16, 2), (I8, 3), (I32, 4), (U8, 6), (BF16, 9), (I64, 10), (Bool, 11), (F8E4M3, 12), (F8E5M2, 13)];
    let newer = [(F8E8M0, 15, 7), (F4E2M1, 16, 7), (I4, 17, 11), (U4, 18, 11)];
    let all = types.into_iter().map(|(dtype, code)| (dtype, code, 0)).chain(newer);
    let mut seen = Vec::new();
    for (dtype, code, minor) in all {
        let copy = |g: &mut Graph| {
            let x = g.input("x", dtype, [4, 4]);
            let y = g.pointwise(cudnn_graph::ir::Mode::Identity, &[x]);
            g.output(y, "y", F32);
        };
        let made = program(copy, (9, minor));
        let x = made.descriptors.iter().find(|d| d.label == "x").unwrap();
        let set = x.settings.iter().find(|s| s.attribute.0 == 901).unwrap();
        assert!(matches!(set.values, Values::Code(got, _) if got == code), "{dtype} is {:?}", set.values);
        if minor > 0 {
            let mut g = Graph::new();
            copy(&mut g);
            let error = encode(&g.verify().unwrap(), Version::new(9, minor - 1, 0)).unwrap_err();
            assert_eq!(error.needs.len(), 1, "{error}");
        }
        seen.push(dtype);
    }
    assert_eq!(seen.len(), cudnn_graph::DType::ALL.len());
}

#[test]
fn pooling() {
    let window = || Window::new([3, 2]).stride([2, 1]).padding([1, 0]).post_padding([2, 1]);
    for (mode, code, padding) in
        [(ResampleMode::Max, "3", "1"), (ResampleMode::AverageIncludePadding, "2", "0"), (ResampleMode::AverageExcludePadding, "4", "0")]
    {
        let made = program(
            |g| {
                let x = g.input("x", F16, [2, 3, 6, 5]);
                let y = g.resample(mode, x, window());
                g.output(y, "y", F16);
            },
            (9, 0),
        );
        let want = [(1700, code), (1701, "0"), (1702, "[2]"), (1703, "[2, 1]"), (1704, "[1, 0]"), (1705, "[2, 1]"), (1706, "[3, 2]")];
        check(&made, 24, &[&want[..], &[(1708, padding)]].concat());
        check(&made, 25, &[(1710, "x"), (1711, "y"), (1716, "kind 24")]);
    }
    let both = program(
        |g| {
            let (x, dy) = (g.input("x", F16, [2, 3, 6, 5]), g.input("dy", F16, [2, 3, 4, 5]));
            let (y, index) = g.max_pool_with_index(x, window());
            g.output(y, "y", F16);
            let dx = g.tensor(cudnn_graph::ir::Tensor::device("dx", F16, [2, 3, 6, 5]));
            let (mode, window) = (ResampleMode::Max, Window::new([3, 2]).stride([2, 1]).padding([1, 0]).post_padding([2, 1]));
            let op = ResampleBackward { mode, dy, dx, index: Some(index), x: Some(x), y: Some(y), window, compute: F32 };
            g.push(Op::ResampleBackward(op));
        },
        (9, 0),
    );
    check(&both, 25, &[(1710, "x"), (1711, "y"), (1712, "index"), (1716, "kind 24")]);
    let want = [(1720, "dx"), (1721, "dy"), (1722, "index"), (1725, "kind 24"), (1726, "x"), (1727, "y")];
    check(&both, 26, &want);
}

/// The only geometry for which cuDNN has an engine.
#[test]
fn upsampling() {
    let made = program(
        |g| {
            let x = g.input_channels_last("x", F32, [2, 3, 6, 5]);
            let y = g.upsample(x);
            g.output(y, "y", F32);
        },
        (9, 0),
    );
    let [half, one, two] = [[1, 2], [1, 1], [2, 1]].map(|fraction| format!("{:?}", [fraction; 2]));
    let want = [(1700, "1"), (1701, "0"), (1702, "[2]"), (1703, &one), (1704, &half), (1705, &half), (1706, &two), (1708, "2")];
    check(&made, 24, &want);
    check(&made, 25, &[(1710, "x"), (1711, "y"), (1716, "kind 24")]);
}

#[test]
fn experts_and_the_rest() {
    let joined = program(
        |g| {
            let (a, b) = (g.input("a", F16, [2, 3]), g.input("b", F16, [2, 4]));
            let y = g.concat(&[b, a], 1);
            g.output(y, "y", F16);
        },
        (9, 0),
    );
    check(&joined, 27, &[(1800, "[1]"), (1801, "b a"), (1803, "y")]);
    let moe = |scatter: bool| {
        program(
            |g| {
                let (tokens, weights) = (g.input("tokens", F16, [1, 6, 4]), g.input("weights", F16, [3, 4, 5]));
                let first = g.input("first", I32, [3, 1, 1]);
                let index = g.input("index", I32, [1, 6, 1]);
                let routing = if scatter {
                    Routing::Scatter { index, slot: g.input("slot", I32, [1, 6, 1]), top_k: 2 }
                } else {
                    Routing::Gather(index)
                };
                let y = g.moe_matmul(tokens, weights, first, routing);
                g.output(y, "y", F16);
            },
            (9, 15),
        )
    };
    let common = [(2901, "0"), (2902, "tokens"), (2903, "weights"), (2904, "first"), (2905, "y"), (2906, "index")];
    check(&moe(false), 42, &[&common[..], &[(2900, "1")]].concat());
    check(&moe(true), 42, &[&common[..], &[(2900, "2"), (2907, "slot"), (2908, "[2]")]].concat());
    let backward = program(
        |g| {
            let (tokens, dy) = (g.input("tokens", F16, [1, 6, 4]), g.input("dy", F16, [1, 6, 5]));
            let first = g.input("first", I32, [3, 1, 1]);
            let dw = g.moe_matmul_backward(tokens, dy, first);
            g.output(dw, "dw", F32);
        },
        (9, 22),
    );
    check(&backward, 48, &[(2951, "0"), (2952, "tokens"), (2953, "dw"), (2954, "first"), (2955, "dy")]);
    check(&program(|g| rope(g, false), (9, 24)), 49, &[(3400, "x"), (3401, "y"), (3402, "angles"), (3403, "[0.5]"), (3404, "[6]")]);
    check(&program(|g| rope(g, true), (9, 25)), 50, &[(3410, "x"), (3411, "y"), (3412, "angles"), (3413, "[0.5]"), (3414, "[6]")]);
}

fn rope(g: &mut Graph, backward: bool) {
    let (x, angles) = (g.input("x", F16, [2, 2, 4, 8]), g.input("angles", F32, [4, 1, 1, 6]));
    let y = if backward { g.rope_backward(x, angles, 0.5, Some(6)) } else { g.rope(x, angles, 0.5, Some(6)) };
    g.output(y, "y", F16);
}

/// An operation is refused before the version that the header names, with everything that is missing.
#[test]
fn operations_have_their_first_version() {
    type Build = fn(&mut Graph);
    let first: [(u32, usize, Build); 4] = [
        (24, 6, |g| rope(g, false)),
        (25, 6, |g| rope(g, true)),
        (15, 8, |g| {
            let (tokens, weights) = (g.input("tokens", F16, [1, 6, 4]), g.input("weights", F16, [3, 4, 5]));
            let first = g.input("first", I32, [3, 1, 1]);
            let y = g.moe_matmul(tokens, weights, first, Routing::None);
            g.output(y, "y", F16);
        }),
        (7, 1, |g| {
            let (x, scale) = (g.input("x", F16, [2, 3, 4]), g.input("scale", F32, [2, 1, 4]));
            let y = g.norm_inference(NormMode::AdaLayer, x, scale, Some(scale), 1e-5);
            g.output(y, "y", F16);
        }),
    ];
    for (minor, missing, build) in first {
        let mut g = Graph::new();
        build(&mut g);
        let graph = g.verify().unwrap();
        encode(&graph, Version::new(9, minor, 0)).unwrap();
        let error = encode(&graph, Version::new(9, minor - 1, 0)).unwrap_err();
        assert_eq!(error.needs.len(), missing, "{error}");
        assert!(error.needs.iter().all(|(_, since)| *since == Version::new(9, minor, 0)), "{error}");
    }
}

/// Dynamic shapes are one more attribute of the operation graph. They need kernel caches, which 9.4 has only in part.
#[test]
fn dynamic_shapes_are_marked_from_their_first_version_on() {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", F16, [1, 8, 16]), g.input("b", F16, [1, 16, 8]));
    let y = g.matmul(a, b);
    g.output(y, "y", F16);
    let graph = g.verify().unwrap();
    let encoded = |minor| encode_dynamic(&graph, Version::new(9, minor, 0));
    check(&encoded(5).unwrap(), 15, &[(801, "kind 19"), (803, "true")]);
    check(&encode(&graph, Version::new(9, 5, 0)).unwrap(), 15, &[(801, "kind 19")]);
    let needs = |minor| encoded(minor).unwrap_err().needs.into_iter().map(|(name, since)| format!("{name} {since}")).collect::<Vec<_>>();
    assert_eq!(needs(4), ["KERNEL_CACHE_OPERATION_GRAPH 9.5.0"]);
    let older = [
        "EXECUTION_PLAN_KERNEL_CACHE 9.4.0",
        "KERNEL_CACHE 9.4.0",
        "KERNEL_CACHE_IS_ENGINECFG_KERNEL_CACHED 9.4.0",
        "OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED 9.4.0",
        "KERNEL_CACHE_OPERATION_GRAPH 9.5.0",
    ];
    assert_eq!(needs(3), older);
}
