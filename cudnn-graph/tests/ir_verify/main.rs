//! One hand-built graph per rule of `ir::verify`. Each is refused with one error that names the op or tensor.

mod attention;
mod flow;
mod network;
mod ops;
mod pointwise;
mod strides;
mod tensors;

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Graph, Mode, Op, Storage, Tensor, TensorId};

/// A bad graph, the op or tensor in the error, and its message.
pub(crate) struct Case {
    graph: Graph,
    at: &'static str,
    message: &'static str,
}

pub(crate) fn case(at: &'static str, message: &'static str, build: impl FnOnce(&mut Graph)) -> Case {
    let mut graph = Graph::new();
    build(&mut graph);
    Case { graph, at, message }
}

pub(crate) fn check(cases: Vec<Case>) {
    for Case { graph, at, message } in cases {
        let text = graph.to_string();
        let Err(errors) = graph.verify() else { panic!("accepted, expected {message:?} at {at:?}:\n{text}") };
        let [error] = &errors.0[..] else { panic!("expected {message:?} at {at:?} alone:\n{errors}\n{text}") };
        assert!(error.at.contains(at), "{error}\nstands at {:?}, not {at:?}", error.at);
        assert!(error.message.contains(message), "{error}\ndoes not say {message:?}");
        assert!(text.contains(error.at.as_str()) || error.at == "graph", "{:?} is not a line of\n{text}", error.at);
    }
}

/// Returns an id that no graph of these tests has.
pub(crate) fn stranger() -> TensorId {
    let mut other = Graph::new();
    (0..100).map(|_| other.input("x", F32, [1])).last().unwrap()
}

/// Builds `y = exp(x)` over a caller's tensor.
pub(crate) fn exp_of(g: &mut Graph, x: Tensor) {
    let dims = x.dims.clone();
    let x = g.tensor(x);
    let y = g.tensor(Tensor::device("y", F32, dims));
    g.push(pointwise(Mode::Exp, x, y));
}

pub(crate) fn pointwise(mode: Mode, x: TensorId, y: TensorId) -> Op {
    Op::Pointwise(Pointwise { mode, x, b: None, t: None, dy: None, y, compute: F32, params: Params::default() })
}

pub(crate) fn value(dtype: DType, storage: Storage, dims: &[i64]) -> Tensor {
    Tensor { storage, dims: dims.to_vec().into(), strides: vec![1; dims.len()].into(), ..Tensor::device("value", dtype, [1]) }
}

/// Builds one op over inputs with these names, types and extents; ids have the same order.
pub(crate) fn over_inputs<const N: usize, F>(inputs: [(&str, DType, &[i64]); N], op: F) -> impl FnOnce(&mut Graph) + use<N, F>
where
    F: FnOnce([TensorId; N]) -> Op,
{
    let inputs = inputs.map(|(name, dtype, dims)| (name.to_owned(), dtype, dims.to_vec()));
    move |g| {
        let ids = inputs.map(|(name, dtype, dims)| g.input(&name, dtype, dims));
        g.push(op(ids));
    }
}

pub(crate) fn good(build: impl FnOnce(&mut Graph)) {
    let mut g = Graph::new();
    build(&mut g);
    g.verify().unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn several_mistakes_are_all_reported_once() {
    let mut g = Graph::new();
    let x = g.tensor(Tensor::device("x", F32, [2, 0]));
    let a = g.tensor(Tensor::device("a", F32, [2, 3]).alignment(3));
    g.input("idle", F32, [1]);
    // The shape of the input is invalid, so this op is not checked further.
    let shapeless = g.pointwise(Mode::Exp, &[x]);
    g.output(shapeless, "y0", F32);
    let lost = g.pointwise(Mode::Add, &[a, stranger()]);
    g.output(lost, "y1", F32);
    let wrong = g.pointwise_as(Mode::Exp, &[a], I32, F32, Params { axis: Some(0), ..Params::default() });
    g.output(wrong, "y2", F32);
    let errors = g.verify().unwrap_err();
    let messages: Vec<&str> = errors.0.iter().map(|e| e.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "extent 0 is not in 1..=2147483647",
            "alignment 3 is not a power of two",
            "no op uses it",
            "refers to tensors that are not in the graph: b t99",
            "axis is not an attribute of exp",
            "computes in i32, not in f32, f64, f16 or bf16",
        ]
    );
    assert_eq!(errors.to_string().lines().count(), messages.len());
}

#[test]
fn verified_gives_the_graph_back() {
    let mut g = Graph::new();
    exp_of(&mut g, Tensor::device("x", F32, [2]));
    let verified = g.clone().verify().unwrap();
    assert_eq!(verified.graph(), &g);
    assert_eq!(verified.tensors().len(), 2);
    assert_eq!(verified.into_inner(), g);
}
