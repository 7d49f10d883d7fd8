//! Known faults: for each, graphs whose engines are passed over, and their nearest neighbours, whose engines are not.

use crate::said_by_all;
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::{Mode, NormGradientInputs, Tensor, TensorId};
use cudnn_graph::{
    DType, DeviceProfile, EngineReport, Error, Graph, KnownFault, Library, Outcome, Planner, Policy, Search, Target, Verified, Version,
};
use std::path::Path;
use std::sync::Arc;

/// Graphs with a known fault, and their neighbours without one.
struct Case {
    faulty: Vec<Graph>,
    right: Vec<Graph>,
}

fn images(g: &mut Graph, name: &str, t: DType, dims: &[i64], channels_last: bool) -> TensorId {
    if channels_last { g.input_channels_last(name, t, dims.to_vec()) } else { g.input(name, t, dims.to_vec()) }
}

/// The sum of a tensor and one that is broadcast.
fn sum(x: &[i64], z: &[i64], channels_last: bool) -> Graph {
    let mut g = Graph::new();
    let (x, z) = (images(&mut g, "x", DType::BF16, x, channels_last), images(&mut g, "z", DType::BF16, z, channels_last));
    let z = g.pointwise(Mode::ReluFwd, &[z]);
    let y = g.pointwise(Mode::Add, &[x, z]);
    g.output(y, "y", DType::BF16);
    g
}

/// A copy of attention: an addend whose first axis, of extent 1, has a stride of its own.
fn expansion(first_stride: i64) -> Graph {
    let mut g = Graph::new();
    let (zeros, x) = (g.input("zeros", DType::BF16, [2, 8, 64]), Tensor::device("x", DType::BF16, [1, 8, 1]).strides([first_stride, 1, 1]));
    let x = g.tensor(x);
    let y = g.pointwise(Mode::Add, &[zeros, x]);
    g.output(y, "y", DType::BF16);
    g
}

fn product_and_bias() -> Graph {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", DType::BF16, [2, 16, 32]), g.input("b", DType::BF16, [2, 32, 64]));
    let (y, bias) = (g.matmul(a, b), g.input("bias", DType::BF16, [1, 1, 64]));
    let y = g.pointwise(Mode::Add, &[y, bias]);
    g.output(y, "y", DType::BF16);
    g
}

fn pooling(t: DType, mode: ResampleMode, channels_last: bool, index: bool) -> Graph {
    let mut g = Graph::new();
    let (x, window) = (images(&mut g, "x", t, &[2, 16, 8, 8], channels_last), Window::new([2, 2]));
    let y = if index { g.max_pool_with_index(x, window).0 } else { g.resample(mode, x, window) };
    g.output(y, "y", t);
    g
}

fn experts(routing: fn(&mut Graph) -> Routing) -> Graph {
    let mut g = Graph::new();
    let tokens = g.input("tokens", DType::BF16, [1, 32, 64]);
    let weights = g.tensor(Tensor::device("weights", DType::BF16, [4, 64, 32]).strides([64 * 32, 1, 64]));
    let first = g.input("first_token", DType::I32, [4, 1, 1]);
    let routing = routing(&mut g);
    let y = g.moe_matmul(tokens, weights, first, routing);
    g.output(y, "y", DType::BF16);
    g
}

fn gathered(g: &mut Graph) -> Routing {
    Routing::Gather(g.input("index", DType::I32, [1, 32, 1]))
}

fn scattered(g: &mut Graph) -> Routing {
    let [index, slot] = ["index", "slot"].map(|name| g.input(name, DType::I32, [1, 32, 1]));
    Routing::Scatter { index, slot, top_k: 2 }
}

fn norm_gradient(mode: NormMode, channels_last: bool) -> Graph {
    let mut g = Graph::new();
    let [x, dy] = ["x", "dy"].map(|name| images(&mut g, name, DType::F16, &[2, 16, 8, 8], channels_last));
    let scale = images(&mut g, "scale", DType::F32, &[1, 16, 1, 1], channels_last);
    let of = if mode == NormMode::Instance { 2 } else { 1 };
    let [mean, inv_variance] = ["mean", "inv"].map(|name| images(&mut g, name, DType::F32, &[of, 16, 1, 1], channels_last));
    let d = g.norm_backward(mode, NormGradientInputs { x, dy, scale, mean: Some(mean), inv_variance });
    g.output(d.dx, "dx", DType::F16);
    g
}

/// Which of the three passes of a convolution.
#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Images,
    Filters,
}

fn convolution(pass: Pass, t: DType, groups: i64, channels_last: bool) -> Graph {
    let mut g = Graph::new();
    let (x, w, y) = ([2, 32 * groups, 8, 8], [32 * groups, 32, 3, 3], [2, 32 * groups, 8, 8]);
    let geometry = ConvGeometry::new(2).padding([1, 1]);
    let mut read = |name: &str, dims: &[i64]| images(&mut g, name, t, dims, channels_last);
    let result = match pass {
        Pass::Forward => {
            let (x, w) = (read("x", &x), read("w", &w));
            g.convolution(x, w, geometry)
        }
        Pass::Images => {
            let (dy, w) = (read("dy", &y), read("w", &w));
            g.convolution_backward_data(dy, w, x, geometry)
        }
        Pass::Filters => {
            let (dy, x) = (read("dy", &y), read("x", &x));
            g.convolution_backward_filter(dy, x, w, geometry)
        }
    };
    g.output(result, "result", DType::BF16);
    g
}

/// A product with weights of `k` rows and `n` columns, whose rows or columns are contiguous.
fn weights(t: DType, [k, n]: [i64; 2], columns: bool) -> Graph {
    let mut g = Graph::new();
    let a = g.input("a", DType::BF16, [1, 16, k]);
    let b = Tensor::device("b", t, [1, k, n]);
    let b = g.tensor(if columns { b.strides([k * n, 1, k]) } else { b });
    let b = g.pointwise(Mode::Identity, &[b]);
    g.set_dtype(b, DType::BF16);
    let y = g.matmul(a, b);
    g.output(y, "y", DType::BF16);
    g
}

/// Two products as in attention, with integers of odd rows between them.
fn integers_between_products() -> Graph {
    let mut g = Graph::new();
    let (q, k, v) = (g.input("q", DType::BF16, [1, 16, 32]), g.input("k", DType::BF16, [1, 32, 9]), g.input("v", DType::BF16, [1, 9, 32]));
    let bias = g.input("bias", DType::I8, [1, 16, 9]);
    let (scores, bias) = (g.matmul(q, k), g.pointwise(Mode::Identity, &[bias]));
    let scores = g.pointwise(Mode::Add, &[scores, bias]);
    g.set_dtype(scores, DType::BF16);
    let y = g.matmul(scores, v);
    g.output(y, "y", DType::BF16);
    g
}

/// In the order of [`KnownFault::ALL`].
fn cases() -> Vec<Case> {
    use DType::{BF16, F8E4M3, F8E5M2, F16, I8, U8};
    let average = ResampleMode::AverageExcludePadding;
    vec![
        Case {
            faulty: vec![
                sum(&[2, 8, 64], &[1, 1, 64], false),
                sum(&[2, 8, 64], &[1, 8, 64], false),
                sum(&[2, 8, 64], &[1, 8, 1], false),
                expansion(8),
                sum(&[2, 64, 8, 8], &[1, 64, 8, 1], true),
                sum(&[2, 64, 8, 8], &[1, 1, 8, 8], false),
            ],
            right: vec![
                sum(&[1, 8, 64], &[1, 1, 64], false),
                sum(&[2, 8, 64], &[1, 1, 1], false),
                sum(&[2, 64, 8, 8], &[1, 1, 1, 1], true),
                sum(&[2, 8, 64], &[2, 1, 64], false),
                sum(&[2, 8, 64], &[2, 8, 1], false),
                sum(&[2, 64, 8, 8], &[1, 64, 1, 1], true),
                sum(&[2, 64, 8, 8], &[1, 64, 1, 1], false),
                expansion(1),
                product_and_bias(),
            ],
        },
        Case {
            faulty: vec![pooling(BF16, ResampleMode::Max, true, false), pooling(BF16, average, true, false)],
            right: vec![
                pooling(BF16, ResampleMode::Max, false, false),
                pooling(F16, ResampleMode::Max, true, false),
                pooling(F16, average, true, false),
                pooling(BF16, ResampleMode::Max, true, true),
            ],
        },
        Case { faulty: vec![experts(gathered)], right: vec![experts(|_| Routing::None), experts(scattered)] },
        Case {
            faulty: vec![norm_gradient(NormMode::Instance, true)],
            right: vec![norm_gradient(NormMode::Instance, false), norm_gradient(NormMode::Batch, true)],
        },
        Case {
            faulty: vec![
                convolution(Pass::Forward, F8E4M3, 2, false),
                convolution(Pass::Forward, F8E5M2, 4, false),
                convolution(Pass::Forward, F8E4M3, 1, false),
                convolution(Pass::Images, F8E4M3, 1, false),
                convolution(Pass::Images, F8E4M3, 2, false),
                convolution(Pass::Filters, F8E4M3, 2, false),
            ],
            right: vec![
                convolution(Pass::Forward, F8E4M3, 2, true),
                convolution(Pass::Images, F8E4M3, 1, true),
                convolution(Pass::Forward, BF16, 2, false),
                convolution(Pass::Filters, BF16, 2, false),
            ],
        },
        Case {
            faulty: vec![weights(I8, [32, 9], false), weights(U8, [32, 12], false), weights(I8, [9, 32], true)],
            right: vec![
                weights(I8, [32, 8], false),
                weights(I8, [9, 40], false),
                weights(I8, [16, 9], true),
                weights(BF16, [32, 9], false),
                integers_between_products(),
            ],
        },
        Case {
            faulty: vec![pooling(F16, average, true, false), pooling(F16, ResampleMode::Max, true, false)],
            right: vec![weights(BF16, [32, 9], false), convolution(Pass::Forward, BF16, 1, true)],
        },
    ]
}

fn verified(graph: &Graph) -> Arc<Verified> {
    Arc::new(graph.clone().verify().unwrap_or_else(|e| panic!("{e}\n{graph}")))
}

#[test]
fn a_fault_has_its_graphs_and_not_their_neighbours() {
    let cases = cases();
    assert_eq!(cases.len(), KnownFault::ALL.len());
    for (fault, case) in KnownFault::ALL.iter().zip(&cases) {
        let known = |graph: &Graph| {
            let known = KnownFault::of(&verified(graph), Version::new(9, 19, 0), fault.dynamic_only);
            known.iter().map(|fault| fault.condition).collect::<Vec<_>>()
        };
        let fixed = |graph: &Graph| KnownFault::of(&verified(graph), Version::new(9, 19, 0), false).len();
        for graph in &case.faulty {
            assert_eq!(known(graph), [fault.condition], "{graph}");
            assert_eq!(fixed(graph), usize::from(!fault.dynamic_only), "{graph}");
        }
        for graph in &case.right {
            assert!(known(graph).is_empty(), "{}\n{graph}", fault.condition);
        }
    }
}

/// Plans every graph with the runtime of this process. Runs only if it is named.
#[test]
fn planner() {
    if !std::env::args().any(|argument| argument == "--exact") {
        return;
    }
    let library = Library::load(&Search::default()).unwrap_or_else(|e| panic!("{e}"));
    let profile = DeviceProfile::named("h200").unwrap();
    let report = |graph: &Graph, policy: &Policy| -> (EngineReport, bool) {
        match Planner::new(library, verified(graph), &Target::Profile(&profile), policy) {
            Ok(planner) => (planner.report().clone(), true),
            Err(Error::NoEngine(report)) => (*report, false),
            Err(e) => panic!("{e}\n{graph}"),
        }
    };
    for (n, (fault, case)) in KnownFault::ALL.iter().zip(&cases()).enumerate() {
        let usual = Policy::default().with_dynamic_shapes(fault.dynamic_only);
        let any = usual.clone().with_known_faults(true);
        let mut met = 0;
        for graph in &case.faulty {
            let ((offered, _), (left, works)) = (report(graph, &any), report(graph, &usual));
            assert!(offered.candidates.iter().all(|c| c.outcome == Outcome::NotTried), "{offered}\n{graph}");
            assert_eq!(offered.candidates.len(), left.candidates.len(), "{graph}");
            for candidate in &left.candidates {
                let expected = if fault.is_of(candidate.engine) { Outcome::PassedOver(fault.reason()) } else { Outcome::NotTried };
                assert_eq!(candidate.outcome, expected, "{}\n{graph}", candidate.tag());
                met += usize::from(fault.is_of(candidate.engine));
            }
            assert_eq!(works, left.candidates.iter().any(|c| !fault.is_of(c.engine)), "{graph}");
        }
        for graph in &case.right {
            let (left, _) = report(graph, &usual);
            assert!(left.candidates.iter().all(|c| c.outcome == Outcome::NotTried), "{left}\n{graph}");
        }
        // Engine 3 of pooling is not among the engines that are compiled at run time, and cuDNN 9.27 offers none for pooling with dynamic shapes.
        let none = n == 1 || fault.dynamic_only && library.version() >= Version::new(9, 27, 0);
        assert_eq!(met > 0, !none, "{}: {met} offers of the faulty engine", fault.condition);
    }
}

#[test]
fn engines_with_known_faults_are_passed_over() {
    said_by_all("faults::planner");
}

/// `SDPA_BLESS=1` rewrites the table.
#[test]
fn the_page_has_the_table_of_known_faults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/graph.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begins, ends) = ("<!-- made from cudnn-graph/src/known_faults.rs -->\n", "<!-- end -->\n");
    let (before, rest) = page.split_once(begins).unwrap();
    let (_, after) = rest.split_once(ends).unwrap();
    let made = format!("{before}{begins}{}{ends}{after}", KnownFault::table());
    if std::env::var_os("SDPA_BLESS").is_some() {
        std::fs::write(&path, &made).unwrap();
    } else {
        assert!(page == made, "docs/graph.md differs from the table; SDPA_BLESS=1 rewrites it:\n{made}");
    }
}
