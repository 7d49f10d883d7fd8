//! Rules of data flow.

use crate::*;
use cudnn_graph::ir::Scalar;

/// Builds `o = softmax(score(q·kᵀ)) · v` with a score graph from `ops`, which returns its output.
fn scored(g: &mut Graph, ops: impl FnOnce(&mut Graph, TensorId) -> (TensorId, Vec<Op>)) {
    let (q, k, v) = qkv(g);
    let o = g.input("o", F16, [2, 4, 5, 8]);
    let input = g.tensor(Tensor::virtual_("score", F32, [2, 4, 5, 7]));
    let (output, ops) = ops(g, input);
    let score = Some(ScoreGraph { input, output, ops });
    g.push(Op::SdpaForward(Box::new(SdpaForward { score, ..SdpaForward::plain(q, k, v, o) })));
}

pub(crate) fn qkv(g: &mut Graph) -> (TensorId, TensorId, TensorId) {
    (g.input("q", F16, [2, 4, 5, 8]), g.input("k", F16, [2, 2, 7, 8]), g.input("v", F16, [2, 2, 7, 8]))
}

fn virtual_score(g: &mut Graph, name: &str) -> TensorId {
    g.tensor(Tensor::virtual_(name, F32, [2, 4, 5, 7]))
}

#[test]
fn flow_rules() {
    check(vec![
        case("graph", "got no op, expected at least one", |_| {}),
        case("exp(x t99)", "refers to tensors that are not in the graph: x t99", |g| {
            let y = g.input("y", F32, [2]);
            g.push(pointwise(Mode::Exp, stranger(), y));
        }),
        case("add(x t99, b t99)", "refers to tensors that are not in the graph: x t99, b t99, y t99", |g| {
            let x = stranger();
            g.push(Op::Pointwise(Pointwise {
                mode: Mode::Add,
                x,
                b: Some(x),
                t: None,
                dy: None,
                y: x,
                compute: F32,
                params: Params::default(),
            }));
        }),
        case("\"idle\"", "no op uses it", |g| {
            exp_of(g, Tensor::device("x", F32, [2]));
            g.input("idle", F32, [2]);
        }),
        case("\"idle\"", "no op uses it", |g| {
            exp_of(g, Tensor::device("x", F32, [2]));
            g.tensor(Tensor::virtual_("idle", F32, [2]));
        }),
        case("\"scalar2\"", "no op uses it", |g| {
            exp_of(g, Tensor::device("x", F32, [2]));
            g.scalar(Scalar::F32(1.0));
        }),
        case("\"ghost\"", "no op writes it", |g| exp_of(g, Tensor::virtual_("ghost", F32, [2]))),
        case("\"y\"", "2 operands write it (exp, sin)", |g| {
            let (x, y) = (g.input("x", F32, [2]), g.input("y", F32, [2]));
            g.push(pointwise(Mode::Exp, x, y));
            g.push(pointwise(Mode::Sin, x, y));
        }),
        case("\"v\"", "2 operands write it (exp, sin)", |g| {
            let (x, v) = (g.input("x", F32, [2]), g.tensor(Tensor::virtual_("v", F32, [2])));
            g.push(pointwise(Mode::Exp, x, v));
            g.push(pointwise(Mode::Sin, x, v));
            let y = g.pointwise(Mode::Exp, &[v]);
            g.output(y, "y", F32);
        }),
        case("\"stats\"", "2 operands write it (softmax, softmax)", |g| {
            let x = g.input("x", F32, [2, 3]);
            let stats = g.input("stats", F32, [2, 1]);
            let y = g.input("y", F32, [2, 3]);
            g.push(Op::Softmax(Softmax { x, y, stats: Some(stats), max: Some(stats), sum_exp: None, sink: None, stats_log2: false }));
        }),
        case("\"scalar1\"", "a scalar value cannot be the result of an op (exp)", |g| {
            let (x, y) = (g.input("x", F32, [1, 1, 1, 1]), g.scalar(Scalar::F32(1.0)));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("= sin(x t1)", "x t1 is read before exp writes it", |g| {
            let (x, m, y) = (g.input("x", F32, [2]), g.tensor(Tensor::virtual_("m", F32, [2])), g.input("y", F32, [2]));
            g.push(pointwise(Mode::Sin, m, y));
            g.push(pointwise(Mode::Exp, x, m));
        }),
        case("= exp(x t0)", "x t0 is its own result", |g| {
            let x = g.input("x", F32, [2]);
            g.push(pointwise(Mode::Exp, x, x));
        }),
        case("= add(x t0)", "x t0 is its own result", |g| {
            let y = g.pointwise(Mode::Add, &[]);
            g.output(y, "y", F32);
        }),
    ]);
}

/// Builds an op of two operands.
fn binary(mode: Mode, x: TensorId, b: TensorId, y: TensorId) -> Op {
    Op::Pointwise(Pointwise { mode, x, b: Some(b), t: None, dy: None, y, compute: F32, params: Params::default() })
}

/// Builds a score graph over this input that adds a bias.
pub(crate) fn over(g: &mut Graph, input: Tensor) {
    let (q, k, v) = qkv(g);
    let (o, bias) = (g.input("o", F16, [2, 4, 5, 8]), g.input("bias", F32, [2, 4, 5, 7]));
    let (input, output) = (g.tensor(input), virtual_score(g, "y"));
    let score = Some(ScoreGraph { input, output, ops: vec![binary(Mode::Add, input, bias, output)] });
    g.push(Op::SdpaForward(Box::new(SdpaForward { score, ..SdpaForward::plain(q, k, v, o) })));
}

#[test]
fn score_rules() {
    check(vec![
        case("sdpa_forward", "a score graph needs an op", |g| scored(g, |_, x| (x, vec![]))),
        case("= softmax(x t4)", "softmax is not allowed among score ops", |g| {
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                (y, vec![Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: None, stats_log2: false })])
            });
        }),
        case("y t5 = exp", "y t5 is not virtual, but results of score ops must be", |g| {
            scored(g, |g, x| {
                let (dump, y) = (g.input("dump", F32, [2, 4, 5, 7]), virtual_score(g, "y"));
                (y, vec![pointwise(Mode::Exp, x, dump), pointwise(Mode::Sin, x, y)])
            });
        }),
        case("sdpa_forward", "score input t4 is the result of an op", |g| {
            scored(g, |g, x| {
                let (y, bias) = (virtual_score(g, "y"), g.input("bias", F32, [2, 4, 5, 7]));
                g.push(pointwise(Mode::Exp, bias, x));
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
        }),
        case("sdpa_forward", "score input t5 is [2,4,5,1], not [2,4,5,7]", |g| over(g, Tensor::virtual_("score", F32, [2, 4, 5, 1]))),
        case("sdpa_forward", "score input t5 is f16, not f32", |g| over(g, Tensor::virtual_("score", F16, [2, 4, 5, 7]))),
        case("sdpa_forward", "score input t5 is not virtual", |g| over(g, Tensor::device("score", F32, [2, 4, 5, 7]))),
        case("sdpa_forward", "score input t4 is the score input of two ops", |g| {
            scored(g, |g, x| {
                let (y, z) = (virtual_score(g, "y"), virtual_score(g, "z"));
                let [q, k, v, o] = ["q", "k", "v", "o"].map(|name| g.find(name).unwrap());
                let score = Some(ScoreGraph { input: x, output: z, ops: vec![pointwise(Mode::Exp, x, z)] });
                let dims = g.get(o).unwrap().dims.clone();
                let o = g.tensor(Tensor::device("o2", F16, dims));
                g.push(Op::SdpaForward(Box::new(SdpaForward { score, ..SdpaForward::plain(q, k, v, o) })));
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
        }),
        case("= sin(x t5)", "x t5 belongs to a score graph, and ops outside of it", |g| {
            let mut inner = None;
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                inner = Some(y);
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
            let dump = g.pointwise(Mode::Sin, &[inner.unwrap()]);
            g.output(dump, "dump", F32);
        }),
        case("= sin(x t4)", "x t4 belongs to a score graph, and ops outside of it", |g| {
            let mut inner = None;
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                inner = Some(x);
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
            let dump = g.pointwise(Mode::Sin, &[inner.unwrap()]);
            g.output(dump, "dump", F32);
        }),
        case("= add(x t4, b t6)", "b t6 is virtual, and no op of this score graph writes it", |g| {
            scored(g, |g, x| {
                let bias = g.input("bias", F32, [2, 4, 5, 7]);
                let doubled = g.pointwise(Mode::Exp, &[bias]);
                let y = virtual_score(g, "y");
                (y, vec![binary(Mode::Add, x, doubled, y)])
            });
        }),
        case("= add(x t4, b t5)", "b t5 is read before exp writes it", |g| {
            scored(g, |g, x| {
                let (early, y) = (virtual_score(g, "early"), virtual_score(g, "y"));
                (y, vec![binary(Mode::Add, x, early, y), pointwise(Mode::Exp, x, early)])
            });
        }),
    ]);
}

/// Engines match a log-sum-exp even if no stats are requested.
#[test]
fn a_virtual_result_may_be_left_unread() {
    good(|g| {
        let x = g.input("x", F32, [2]);
        g.pointwise(Mode::Exp, &[x]);
    });
}

#[test]
fn score_output_must_be_made_inside() {
    let mut g = Graph::new();
    scored(&mut g, |g, x| {
        let y = virtual_score(g, "y");
        (x, vec![pointwise(Mode::Exp, x, y)])
    });
    let errors = g.verify().unwrap_err();
    assert!(
        errors.0.iter().any(|e| e.at.contains("sdpa_forward") && e.message == "score output t4 is not the result of a score op"),
        "{errors}"
    );
}
