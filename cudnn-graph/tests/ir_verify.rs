//! One hand-built graph per rule of `ir::verify`: each is refused with one error that names the culprit.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Graph, Mode, Op, Ragged, Scalar, Storage, Tensor, TensorId};

/// A bad graph, what the error stands at, and what it says.
struct Case {
    graph: Graph,
    at: &'static str,
    message: &'static str,
}

fn case(at: &'static str, message: &'static str, build: impl FnOnce(&mut Graph)) -> Case {
    let mut graph = Graph::new();
    build(&mut graph);
    Case { graph, at, message }
}

fn check(cases: Vec<Case>) {
    for Case { graph, at, message } in cases {
        let text = graph.to_string();
        let Err(errors) = graph.verify() else { panic!("accepted, expected {message:?} at {at:?}:\n{text}") };
        let [error] = &errors.0[..] else { panic!("expected {message:?} at {at:?} alone:\n{errors}\n{text}") };
        assert!(error.at.contains(at), "{error}\nstands at {:?}, not {at:?}", error.at);
        assert!(error.message.contains(message), "{error}\ndoes not say {message:?}");
        assert!(text.contains(error.at.as_str()) || error.at == "graph", "{:?} is not a line of\n{text}", error.at);
    }
}

/// An id that no graph of these tests has.
fn stranger() -> TensorId {
    let mut other = Graph::new();
    (0..100).map(|_| other.input("x", F32, [1])).last().unwrap()
}

/// `y = exp(x)` over a tensor of the caller's.
fn exp_of(g: &mut Graph, x: Tensor) {
    let dims = x.dims.clone();
    let x = g.tensor(x);
    let y = g.tensor(Tensor::device("y", F32, dims));
    g.push(pointwise(Mode::Exp, x, y));
}

fn pointwise(mode: Mode, x: TensorId, y: TensorId) -> Op {
    Op::Pointwise(Pointwise { mode, x, b: None, t: None, dy: None, y, compute: F32, params: Params::default() })
}

fn value(dtype: DType, storage: Storage, dims: &[i64]) -> Tensor {
    Tensor { storage, dims: dims.to_vec().into(), strides: vec![1; dims.len()].into(), ..Tensor::device("value", dtype, [1]) }
}

#[test]
fn tensor_rules() {
    check(vec![
        case("\"x\"", "rank 0 is not in", |g| exp_of(g, Tensor::device("x", F32, []))),
        case("\"x\"", "rank 9 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1; 9]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "extent 0 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [2, 0]));
            let y = g.tensor(Tensor::device("y", F32, [2, 3]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "extent 2147483648 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1 << 31]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "1 strides for 2 axes", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([1]))),
        case("\"x\"", "stride -1 is negative", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([3, -1]))),
        case("\"x\"", "does not fit 64 bits", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([i64::MAX, 1]))),
        case("\"x\"", "does not fit 64 bits", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1 << 30, 1 << 30, 1 << 30]).strides([0, 0, 0]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "alignment 24 is not a power of two", |g| exp_of(g, Tensor::device("x", F32, [2]).alignment(24))),
        case("\"x\"", "alignment 0 is not a power of two", |g| exp_of(g, Tensor::device("x", F32, [2]).alignment(0))),
        case("\"value\"", "a value has one element, not [2]", |g| exp_of(g, value(F32, Storage::ByValue(None), &[2]))),
        case("\"value\"", "its value is i32, the tensor f32", |g| {
            exp_of(g, value(F32, Storage::ByValue(Some(Scalar::I32(1))), &[1]));
        }),
        case("\"value\"", "its value is f32, the tensor i64", |g| exp_of(g, value(I64, Storage::Constant(Scalar::F32(1.0)), &[1]))),
        case("t0 \"\"", "without a name", |g| exp_of(g, Tensor::device("", F32, [2]))),
        case("t1 \"y\"", "t0 has the name \"y\" already", |g| exp_of(g, Tensor::device("y", F32, [2]))),
    ]);
}

/// `exp` of a ragged tensor with these offsets.
fn ragged(offsets: Tensor, x: Storage, multiplier: Option<i64>) -> impl FnOnce(&mut Graph) {
    move |g| {
        let offsets = g.tensor(offsets);
        let x = Tensor { storage: x, ..Tensor::device("x", F32, [2, 1, 3, 4]) };
        exp_of(g, x.ragged(Ragged { offsets, multiplier }));
    }
}

#[test]
fn ragged_rules() {
    let offsets = |dtype, dims: [i64; 4]| Tensor::device("offsets", dtype, dims);
    let good = || offsets(I32, [3, 1, 1, 1]);
    check(vec![
        case("\"x\"", "offsets t99 do not exist", |g| {
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets: stranger(), multiplier: None }));
        }),
        case("\"x\"", "offsets t0 are f32", ragged(offsets(F32, [3, 1, 1, 1]), Storage::Device, None)),
        case("\"x\"", "offsets t0 are [2,1,1,1], not [3,1,1,1]", ragged(offsets(I64, [2, 1, 1, 1]), Storage::Device, None)),
        case("\"x\"", "offsets t1 are not in device memory", |g| {
            let seed = g.input("seed", I32, [3, 1, 1, 1]);
            let offsets = g.pointwise_as(Mode::Abs, &[seed], I32, I32, Params::default());
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"value\"", "a value cannot be ragged", |g| {
            let offsets = g.tensor(Tensor::device("offsets", I32, [2, 1, 1, 1]));
            exp_of(g, value(F32, Storage::ByValue(None), &[1, 1, 1, 1]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"x\"", "offsets t1 are the result of an op", |g| {
            let seed = g.input("seed", I32, [3, 1, 1, 1]);
            let offsets = g.pointwise_as(Mode::Abs, &[seed], I32, I32, Params::default());
            g.output(offsets, "offsets", I32);
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"x\"", "multiplier 0 is below 1", ragged(good(), Storage::Device, Some(0))),
    ]);
    let mut g = Graph::new();
    ragged(good(), Storage::Device, Some(4))(&mut g);
    g.verify().unwrap();
}

/// `o = softmax(score(q·kᵀ)) · v` with a score graph that `ops` fills in; it returns the output.
fn scored(g: &mut Graph, ops: impl FnOnce(&mut Graph, TensorId) -> (TensorId, Vec<Op>)) {
    let (q, k, v) = qkv(g);
    let o = g.input("o", F16, [2, 4, 5, 8]);
    let input = g.tensor(Tensor::virtual_("score", F32, [2, 4, 5, 7]));
    let (output, ops) = ops(g, input);
    let score = Some(ScoreGraph { input, output, ops });
    g.push(Op::SdpaForward(Box::new(SdpaForward { score, ..SdpaForward::plain(q, k, v, o) })));
}

fn qkv(g: &mut Graph) -> (TensorId, TensorId, TensorId) {
    (g.input("q", F16, [2, 4, 5, 8]), g.input("k", F16, [2, 2, 7, 8]), g.input("v", F16, [2, 2, 7, 8]))
}

fn virtual_score(g: &mut Graph, name: &str) -> TensorId {
    g.tensor(Tensor::virtual_(name, F32, [2, 4, 5, 7]))
}

#[test]
fn flow_rules() {
    check(vec![
        case("graph", "there is no op", |_| {}),
        case("exp(x t99)", "does not exist: x t99", |g| {
            let y = g.input("y", F32, [2]);
            g.push(pointwise(Mode::Exp, stranger(), y));
        }),
        case("add(x t99, b t99)", "does not exist: x t99, b t99, y t99", |g| {
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
        case("\"scalar1\"", "a value cannot be the result of an op (exp)", |g| {
            let (x, y) = (g.input("x", F32, [1]), g.scalar(Scalar::F32(1.0)));
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

/// One op of two operands.
fn binary(mode: Mode, x: TensorId, b: TensorId, y: TensorId) -> Op {
    Op::Pointwise(Pointwise { mode, x, b: Some(b), t: None, dy: None, y, compute: F32, params: Params::default() })
}

/// A score graph over this input that adds a bias.
fn over(g: &mut Graph, input: Tensor) {
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
        case("= softmax(x t4)", "softmax cannot stand among score ops", |g| {
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                (y, vec![Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: None, stats_log2: false })])
            });
        }),
        case("y t5 = exp", "y t5: score ops have virtual results only", |g| {
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
        case("sdpa_forward", "score input t4 belongs to two ops", |g| {
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
        case("= sin(x t5)", "x t5 stays inside the score ops", |g| {
            let mut inner = None;
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                inner = Some(y);
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
            let dump = g.pointwise(Mode::Sin, &[inner.unwrap()]);
            g.output(dump, "dump", F32);
        }),
        case("= sin(x t4)", "x t4 stays inside the score ops", |g| {
            let mut inner = None;
            scored(g, |g, x| {
                let y = virtual_score(g, "y");
                inner = Some(x);
                (y, vec![pointwise(Mode::Exp, x, y)])
            });
            let dump = g.pointwise(Mode::Sin, &[inner.unwrap()]);
            g.output(dump, "dump", F32);
        }),
        case("= add(x t4, b t6)", "b t6 is virtual and made outside", |g| {
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

/// Engines match a log-sum-exp even where no stats are wanted.
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
    assert!(errors.0.iter().any(|e| e.at.contains("sdpa_forward") && e.message == "score output t4 is not the result of a score op"), "{errors}");
}

/// `y = mode(x, b, t, dy)` over inputs of these types and extents.
struct Pw {
    mode: Mode,
    x: (DType, Vec<i64>),
    b: Option<(DType, Vec<i64>)>,
    t: Option<(DType, Vec<i64>)>,
    dy: Option<(DType, Vec<i64>)>,
    y: (DType, Vec<i64>),
    compute: DType,
    params: Params,
}

impl Pw {
    /// Operands as the mode wants them.
    fn good(mode: Mode) -> Pw {
        use cudnn_graph::ir::pointwise::Signature::*;
        let number = |dtype| (dtype, vec![2, 3]);
        let pw = |b, t, dy, x, y, compute| Pw { mode, x: number(x), b, t, dy, y: number(y), compute, params: Params::default() };
        match mode.signature() {
            Unary | Identity => pw(None, None, None, F32, F16, F32),
            Binary => pw(Some(number(F32)), None, None, F16, F32, F32),
            Compare => pw(Some(number(F32)), None, None, F32, Bool, Bool),
            LogicalBinary => pw(Some(number(Bool)), None, None, Bool, Bool, Bool),
            LogicalUnary => pw(None, None, None, Bool, Bool, Bool),
            Index => Pw { params: Params { axis: Some(1), ..Params::default() }, ..pw(None, None, None, F32, I32, I32) },
            Select => pw(Some(number(F32)), Some(number(Bool)), None, F32, F32, F32),
            Backward => pw(None, None, Some(number(F32)), F32, F16, F32),
        }
    }

    fn build(self, g: &mut Graph) {
        let mut operand = |name: &str, (dtype, dims): (DType, Vec<i64>)| g.input(name, dtype, dims);
        let x = operand("x", self.x);
        let b = self.b.map(|b| operand("b", b));
        let t = self.t.map(|t| operand("t", t));
        let dy = self.dy.map(|dy| operand("dy", dy));
        let y = operand("y", self.y);
        g.push(Op::Pointwise(Pointwise { mode: self.mode, x, b, t, dy, y, compute: self.compute, params: self.params }));
    }
}

#[test]
fn every_mode_accepts_its_operands() {
    for &mode in Mode::ALL {
        let mut g = Graph::new();
        Pw::good(mode).build(&mut g);
        g.verify().unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn pointwise_rules() {
    let bad = |at, message, mode: Mode, spoil: fn(&mut Pw)| {
        let mut pw = Pw::good(mode);
        spoil(&mut pw);
        case(at, message, |g| pw.build(g))
    };
    check(vec![
        bad("= add(", "operands of add: b is missing", Mode::Add, |p| p.b = None),
        bad("= exp(", "operands of exp: b is one too many", Mode::Exp, |p| p.b = Some((F32, vec![2, 3]))),
        bad("= select(", "t is missing", Mode::BinarySelect, |p| p.t = None),
        bad("= add(", "t is one too many", Mode::Add, |p| p.t = Some((Bool, vec![2, 3]))),
        bad("= relu_bwd(", "dy is missing", Mode::ReluBwd, |p| p.dy = None),
        bad("= exp(", "dy is one too many", Mode::Exp, |p| p.dy = Some((F32, vec![2, 3]))),
        bad("= add(", "b t1 does not broadcast to y t2", Mode::Add, |p| p.b = Some((F32, vec![2, 2]))),
        bad("= add(", "b t1 does not broadcast to y t2", Mode::Add, |p| p.b = Some((F32, vec![1, 2, 3]))),
        bad("= exp(", "y t1 is larger than its operands", Mode::Exp, |p| p.x.1 = vec![1, 3]),
        bad("= add(", "b t1 is bool, not a number", Mode::Add, |p| p.b = Some((Bool, vec![2, 3]))),
        bad("= add(", "y t2 is bool, not a number", Mode::Add, |p| p.y.0 = Bool),
        bad("= exp(", "computes in i32, not in f32, f64, f16 or bf16", Mode::Exp, |p| p.compute = I32),
        bad("= add(", "computes in i8, not in", Mode::Add, |p| p.compute = I8),
        bad("= add(", "computes in bool, not in", Mode::Add, |p| p.compute = Bool),
        bad("= relu_bwd(", "dy t1 is i32, not a float", Mode::ReluBwd, |p| p.dy = Some((I32, vec![2, 3]))),
        bad("= relu_bwd(", "y t2 is i32, not a float", Mode::ReluBwd, |p| p.y.0 = I32),
        bad("= relu_bwd(", "computes in i32", Mode::ReluBwd, |p| p.compute = I32),
        bad("= identity(", "computes in u8", Mode::Identity, |p| p.compute = U8),
        bad("= cmp_lt(", "x t0 is bool, not a number", Mode::CmpLt, |p| p.x.0 = Bool),
        bad("= cmp_lt(", "computes in f8e4m3", Mode::CmpLt, |p| p.compute = F8E4M3),
        bad("= and(", "b t1 is f32, not a bool or an integer", Mode::LogicalAnd, |p| p.b = Some((F32, vec![2, 3]))),
        bad("= not(", "y t1 is f32, not a bool or an integer", Mode::LogicalNot, |p| p.y.0 = F32),
        bad("= not(", "computes in f32, not in a bool or an integer", Mode::LogicalNot, |p| p.compute = F32),
        bad("= gen_index(", "axis is missing", Mode::GenIndex, |p| p.params.axis = None),
        bad("= gen_index(", "axis 2 of 2 axes", Mode::GenIndex, |p| p.params.axis = Some(2)),
        bad("= gen_index(", "axis -1 of 2 axes", Mode::GenIndex, |p| p.params.axis = Some(-1)),
        bad("= gen_index(", "y t1 is f32, not an integer", Mode::GenIndex, |p| p.y.0 = F32),
        bad("= gen_index(", "computes in f32, not in i32 or i64", Mode::GenIndex, |p| p.compute = F32),
        bad("= select(", "t t2 is f32, not a bool or an integer", Mode::BinarySelect, |p| p.t = Some((F32, vec![2, 3]))),
        bad("= select(", "b t1 is bool, but y t3 is a number", Mode::BinarySelect, |p| p.b = Some((Bool, vec![2, 3]))),
        bad("= select(", "computes in bool", Mode::BinarySelect, |p| p.compute = Bool),
        bad("= exp(", "axis is no constant of exp", Mode::Exp, |p| p.params.axis = Some(0)),
        bad("= exp(", "relu_lower_clip is no constant of exp", Mode::Exp, |p| p.params.relu_lower_clip = Some(0.0)),
        bad("= exp(", "relu_upper_clip is no constant of exp", Mode::Exp, |p| p.params.relu_upper_clip = Some(0.0)),
        bad("= exp(", "relu_lower_slope is no constant of exp", Mode::Exp, |p| p.params.relu_lower_slope = Some(0.0)),
        bad("= relu(", "elu_alpha is no constant of relu", Mode::ReluFwd, |p| p.params.elu_alpha = Some(0.0)),
        bad("= elu(", "softplus_beta is no constant of elu", Mode::EluFwd, |p| p.params.softplus_beta = Some(1.0)),
        bad("= elu(", "swish_beta is no constant of elu", Mode::EluFwd, |p| p.params.swish_beta = Some(1.0)),
        bad("= swish(", "swish_beta is not a number", Mode::SwishFwd, |p| p.params.swish_beta = Some(f64::NAN)),
        bad("= softplus(", "softplus_beta is zero", Mode::SoftplusFwd, |p| p.params.softplus_beta = Some(0.0)),
        bad("= relu(", "relu clips 0 and -1 are the wrong way round", Mode::ReluFwd, |p| p.params.relu_upper_clip = Some(-1.0)),
    ]);
}

/// One op over inputs with these names, types and extents; the ids come in the same order.
fn over_inputs<const N: usize, F>(inputs: [(&str, DType, &[i64]); N], op: F) -> impl FnOnce(&mut Graph) + use<N, F>
where
    F: FnOnce([TensorId; N]) -> Op,
{
    let inputs = inputs.map(|(name, dtype, dims)| (name.to_owned(), dtype, dims.to_vec()));
    move |g| {
        let ids = inputs.map(|(name, dtype, dims)| g.input(&name, dtype, dims));
        g.push(op(ids));
    }
}

fn matmul_of([a, b, c]: [TensorId; 3]) -> Matmul {
    Matmul { a, b, c, m_override: None, n_override: None, k_override: None, padding: None, compute: F32 }
}

fn matmul(a: &[i64], b: &[i64], c: &[i64]) -> impl FnOnce(&mut Graph) + use<> {
    over_inputs([("a", F16, a), ("b", F16, b), ("c", F32, c)], |ids| Op::Matmul(matmul_of(ids)))
}

fn good(build: impl FnOnce(&mut Graph)) {
    let mut g = Graph::new();
    build(&mut g);
    g.verify().unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn matmul_rules() {
    good(matmul(&[2, 8, 5, 4], &[2, 2, 4, 7], &[2, 8, 5, 7]));
    good(matmul(&[1, 1, 5, 4], &[2, 2, 4, 7], &[2, 2, 5, 7]));
    good(matmul(&[5, 4], &[4, 7], &[5, 7]));
    let with_override = |field: &'static str, rank3: bool, dims: &'static [i64], dtype| {
        move |g: &mut Graph| {
            let (a, b, c): (&[i64], &[i64], &[i64]) =
                if rank3 { (&[2, 5, 4], &[2, 4, 7], &[2, 5, 7]) } else { (&[5, 4], &[4, 7], &[5, 7]) };
            let ids = [("a", a), ("b", b), ("c", c)].map(|(name, dims)| g.input(name, F32, dims));
            let length = Some(g.input("length", dtype, dims));
            let plain = matmul_of(ids);
            g.push(Op::Matmul(match field {
                "m" => Matmul { m_override: length, ..plain },
                "n" => Matmul { n_override: length, ..plain },
                _ => Matmul { k_override: length, ..plain },
            }));
        }
    };
    good(with_override("m", true, &[2, 1, 1], I32));
    check(vec![
        case("= matmul(", "ranks 1, 1 and 1 are not one, of at least 2", matmul(&[4], &[4], &[4])),
        case("= matmul(", "ranks 2, 3 and 2", matmul(&[5, 4], &[1, 4, 7], &[5, 7])),
        case("= matmul(", "a has 4 inner elements, b 3", matmul(&[5, 4], &[3, 7], &[5, 7])),
        case("= matmul(", "c has 6 rows, a 5", matmul(&[5, 4], &[4, 7], &[6, 7])),
        case("= matmul(", "c has 6 columns, b 7", matmul(&[5, 4], &[4, 7], &[5, 6])),
        case("= matmul(", "axis 0 of b (3) does not divide that of a (8)", matmul(&[8, 5, 4], &[3, 4, 7], &[8, 5, 7])),
        case("= matmul(", "axis 0 of b (8) does not divide that of a (2)", matmul(&[2, 5, 4], &[8, 4, 7], &[8, 5, 7])),
        case("= matmul(", "axis 0 of c is 4, not 8", matmul(&[8, 5, 4], &[4, 4, 7], &[4, 5, 7])),
        case("= matmul(", "a t0 is bool, not a number", over_inputs([("a", Bool, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| Op::Matmul(matmul_of(ids)))),
        case("= matmul(", "computes in f8e4m3", over_inputs([("a", F16, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| {
            Op::Matmul(Matmul { compute: F8E4M3, ..matmul_of(ids) })
        })),
        case("= matmul(", "padding is not a number", over_inputs([("a", F16, &[5, 4]), ("b", F16, &[4, 7]), ("c", F32, &[5, 7])], |ids| {
            Op::Matmul(Matmul { padding: Some(f64::NAN), ..matmul_of(ids) })
        })),
        case("= matmul(", "m_override t3 is [2,1], not [2,1,1]", with_override("m", true, &[2, 1], I32)),
        case("= matmul(", "n_override t3 is [1,1,1], not [2,1,1]", with_override("n", true, &[1, 1, 1], I32)),
        case("= matmul(", "k_override t3 is f32, not an integer", with_override("k", true, &[2, 1, 1], F32)),
        case("= matmul(", "k_override t3 needs a batch axis", with_override("k", false, &[1, 1], I32)),
    ]);
}

fn two<F: FnOnce(TensorId, TensorId) -> Op>(x: (DType, &[i64]), y: (DType, &[i64]), op: F) -> impl FnOnce(&mut Graph) + use<F> {
    over_inputs([("x", x.0, x.1), ("y", y.0, y.1)], |[x, y]| op(x, y))
}

#[test]
fn reduction_and_move_rules() {
    let reduce = |compute| move |x, y| Op::Reduction(Reduction { mode: ReductionMode::Add, x, y, compute, deterministic: false });
    let reshape = |mode| move |x, y| Op::Reshape(Reshape { x, y, mode });
    let transpose = |axes: &[i64]| {
        let permutation = axes.to_vec();
        move |x, y| Op::Transpose(Transpose { x, y, permutation })
    };
    let slice = |start: &[i64], limit: &[i64], step: &[i64]| {
        let (start, limit, step) = (start.to_vec(), limit.to_vec(), step.to_vec());
        move |x, y| Op::Slice(Slice { x, y, start, limit, step })
    };
    good(two((F32, &[2, 8, 5]), (F32, &[2, 2, 1]), reduce(F32)));
    // An extent that is 1 already: nothing is left to fold.
    good(two((F32, &[2, 1]), (F32, &[2, 1]), reduce(F32)));
    good(two((F32, &[2, 3, 4]), (F16, &[2, 4, 3]), reshape(None)));
    good(two((F32, &[2, 3, 4]), (F16, &[4, 2, 3]), transpose(&[2, 0, 1])));
    good(two((F32, &[9, 4]), (F32, &[3, 2]), slice(&[1, 2], &[8, 4], &[3, 1])));
    check(vec![
        case("= reduction(", "x has 2 axes, y 1", two((F32, &[2, 3]), (F32, &[2]), reduce(F32))),
        case("= reduction(", "axis 1 of y (2) does not divide that of x (3)", two((F32, &[2, 3]), (F32, &[1, 2]), reduce(F32))),
        case("= reduction(", "x t0 is bool", two((Bool, &[2, 3]), (F32, &[2, 1]), reduce(F32))),
        case("= reduction(", "y t1 is bool", two((F32, &[2, 3]), (Bool, &[2, 1]), reduce(F32))),
        case("= reduction(", "computes in bool", two((F32, &[2, 3]), (F32, &[2, 1]), reduce(Bool))),
        case("= reshape(", "x [2,3] and y [5] do not have as many elements", two((F32, &[2, 3]), (F32, &[5]), reshape(None))),
        case("= reshape(", "do not have as many", two((F32, &[2, 3]), (F32, &[5]), reshape(Some(ReshapeMode::ViewOnly)))),
        case("= reshape(", "do not have as many", two((F32, &[2, 3]), (F32, &[5]), reshape(Some(ReshapeMode::Logical)))),
        case("= reshape(", "x t0 is bool, but y t1 is f32", two((Bool, &[2, 3]), (F32, &[6]), reshape(None))),
        case("= transpose(", "[0,0] does not permute 2 axes", two((F32, &[2, 3]), (F32, &[2, 2]), transpose(&[0, 0]))),
        case("= transpose(", "[0] does not permute 2 axes", two((F32, &[2, 3]), (F32, &[2]), transpose(&[0]))),
        case("= transpose(", "[2,0] does not permute", two((F32, &[2, 3]), (F32, &[2, 3]), transpose(&[2, 0]))),
        case("= transpose(", "y t1 is [2,3], not [3,2]", two((F32, &[2, 3]), (F32, &[2, 3]), transpose(&[1, 0]))),
        case("= transpose(", "x t0 is f32, but y t1 is bool", two((F32, &[2, 3]), (Bool, &[3, 2]), transpose(&[1, 0]))),
        case("= slice(", "[1, 1, 2] bounds for 1 axes", two((F32, &[9]), (F32, &[3]), slice(&[0], &[9], &[3, 1]))),
        case("= slice(", "-1..9 is no part of axis 0 (9)", two((F32, &[9]), (F32, &[9]), slice(&[-1], &[9], &[1]))),
        case("= slice(", "3..3 is no part", two((F32, &[9]), (F32, &[1]), slice(&[3], &[3], &[1]))),
        case("= slice(", "0..10 is no part", two((F32, &[9]), (F32, &[9]), slice(&[0], &[10], &[1]))),
        case("= slice(", "step 0 of axis 0 is below 1", two((F32, &[9]), (F32, &[9]), slice(&[0], &[9], &[0]))),
        case("= slice(", "y t1 is [3], not [4]", two((F32, &[9]), (F32, &[3]), slice(&[1], &[8], &[2]))),
        case("= slice(", "x t0 is f32, but y t1 is bool", two((F32, &[9]), (Bool, &[9]), slice(&[0], &[9], &[1]))),
    ]);
}

#[test]
fn rng_rules() {
    let rng = |distribution, y: DType| over_inputs([("y", y, &[2])], move |[y]| Op::Rng(Rng { y, distribution, seed: Seed::Value(1), offset: None }));
    let seeded = |seed: (DType, &'static [i64]), offset: (DType, &'static [i64])| {
        over_inputs([("y", F32, &[2]), ("seed", seed.0, seed.1), ("offset", offset.0, offset.1)], |[y, seed, offset]| {
            Op::Rng(Rng { y, distribution: Distribution::Bernoulli(0.5), seed: Seed::Tensor(seed), offset: Some(offset) })
        })
    };
    good(rng(Distribution::Bernoulli(1.0), F32));
    good(seeded((I64, &[1, 1, 1, 1]), (I64, &[1])));
    check(vec![
        case("= rng(", "y t0 is bool", rng(Distribution::Bernoulli(0.5), Bool)),
        case("= rng(", "probability 1.5 is not in [0, 1]", rng(Distribution::Bernoulli(1.5), F32)),
        case("= rng(", "probability NaN is not", rng(Distribution::Bernoulli(f64::NAN), F32)),
        case("= rng(", "the interval 2 to 1 is empty", rng(Distribution::Uniform(2.0, 1.0), F32)),
        case("= rng(", "the interval 0 to inf is empty", rng(Distribution::Uniform(0.0, f64::INFINITY), F32)),
        case("= rng(", "deviation -1 describe no distribution", rng(Distribution::Normal(0.0, -1.0), F32)),
        case("= rng(", "seed t1 is f32, not an integer", seeded((F32, &[1]), (I64, &[1]))),
        case("= rng(", "offset t2 is [2], not one element", seeded((I64, &[1]), (I64, &[2]))),
    ]);
}

#[test]
fn softmax_rules() {
    struct S {
        x: DType,
        y: (DType, Vec<i64>),
        stats: (DType, Vec<i64>),
        sink: (DType, Vec<i64>),
    }
    let softmax = |spoil: fn(&mut S)| {
        let mut s = S { x: F32, y: (F16, vec![2, 4, 5, 7]), stats: (F32, vec![2, 4, 5, 1]), sink: (F32, vec![1, 4, 1, 1]) };
        spoil(&mut s);
        let n = [("x", s.x, &[2, 4, 5, 7][..]), ("y", s.y.0, &s.y.1), ("stats", s.stats.0, &s.stats.1), ("sink", s.sink.0, &s.sink.1)];
        over_inputs(n, |[x, y, stats, sink]| {
            Op::Softmax(Softmax { x, y, stats: Some(stats), max: None, sum_exp: None, sink: Some(sink), stats_log2: true })
        })
    };
    good(softmax(|_| {}));
    check(vec![
        case("= softmax(", "x t0 is i32, not a float", softmax(|s| s.x = I32)),
        case("= softmax(", "y t1 is bool, not a float", softmax(|s| s.y.0 = Bool)),
        case("= softmax(", "y t1 is [2,4,5,1], not [2,4,5,7]", softmax(|s| s.y.1 = vec![2, 4, 5, 1])),
        case("= softmax(", "stats t2 is [2,4,5,7], not [2,4,5,1]", softmax(|s| s.stats.1 = vec![2, 4, 5, 7])),
        case("= softmax(", "stats t2 is f16, not f32", softmax(|s| s.stats.0 = F16)),
        case("= softmax(", "sink t3 is f16, not f32", softmax(|s| s.sink.0 = F16)),
        case("= softmax(", "sink t3 is [1,2,1,1], not [1,4,1,1]", softmax(|s| s.sink.1 = vec![1, 2, 1, 1])),
        case("= softmax(", "max t2 is [3,1], not [2,1]", over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("max", F32, &[3, 1])], |[x, y, max]| {
            Op::Softmax(Softmax { x, y, stats: None, max: Some(max), sum_exp: None, sink: None, stats_log2: false })
        })),
        case("= softmax(", "sum_exp t2 is f64, not f32", over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("sum", F64, &[2, 1])], |[x, y, sum]| {
            Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: Some(sum), sink: None, stats_log2: false })
        })),
        case("= softmax(", "sink t2 needs scores (b, h, s_q, s_kv)", over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3]), ("sink", F32, &[1, 1])], |[x, y, sink]| {
            Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: Some(sink), stats_log2: false })
        })),
        case("= softmax(", "stats in base 2 without stats", over_inputs([("x", F32, &[2, 3]), ("y", F32, &[2, 3])], |[x, y]| {
            Op::Softmax(Softmax { x, y, stats: None, max: None, sum_exp: None, sink: None, stats_log2: true })
        })),
    ]);
}

#[test]
fn band_mask_rules() {
    /// Which operands there are, and how.
    struct B {
        side: BandSide,
        x: Vec<i64>,
        y: Vec<i64>,
        dtype: DType,
        fill: Tensor,
        shift: Option<Tensor>,
        left: Option<Tensor>,
        q: Option<Tensor>,
        kv: Option<Tensor>,
    }
    let number = |name: &str, dtype| Tensor::by_value(name, dtype, None, 1);
    let band = |side, spoil: fn(&mut B)| {
        let x = vec![2, 4, 5, 7];
        let lengths = |name| Some(Tensor::device(name, I32, [2, 1, 1, 1]));
        let (shift, left) = match side {
            BandSide::Right => (Some(number("shift", I32)), None),
            BandSide::Left => (None, Some(number("left", F32))),
        };
        let mut b = B { side, y: x.clone(), x, dtype: F32, fill: number("fill", F32), shift, left, q: lengths("seq_q"), kv: lengths("seq_kv") };
        spoil(&mut b);
        move |g: &mut Graph| {
            let (x, y) = (g.input("x", b.dtype, b.x), g.input("y", b.dtype, b.y));
            let fill = g.tensor(b.fill);
            let [shift_right, left, seq_q, seq_kv] = [b.shift, b.left, b.q, b.kv].map(|t| t.map(|t| g.tensor(t)));
            g.push(Op::BandMask(BandMask { x, y, fill, side: b.side, shift_right, left, seq_q, seq_kv }));
        }
    };
    use BandSide::{Left, Right};
    good(band(Right, |_| {}));
    good(band(Left, |_| {}));
    good(band(Right, |b| (b.shift, b.q, b.kv) = (None, None, None)));
    check(vec![
        case("= band_mask(", "x t0 is not (b, h, s_q, s_kv)", band(Right, |b| (b.x, b.y, b.q, b.kv) = (vec![5, 7], vec![5, 7], None, None))),
        case("= band_mask(", "y t1 is [2,4,5,6], not [2,4,5,7]", band(Right, |b| b.y = vec![2, 4, 5, 6])),
        case("= band_mask(", "fill t2 is f16, not f32", band(Right, |b| b.fill = Tensor::by_value("fill", F16, None, 1))),
        case("= band_mask(", "fill t2 is not a value from the host", band(Right, |b| b.fill = Tensor::device("fill", F32, [1]))),
        case("= band_mask(", "shift_right t3 on a left mask", band(Left, |b| b.shift = Some(Tensor::by_value("s", I32, None, 1)))),
        case("= band_mask(", "shift_right t3 is f32, not an integer", band(Right, |b| b.shift = Some(Tensor::by_value("s", F32, None, 1)))),
        case("= band_mask(", "shift_right t3 is not a value from the host", band(Right, |b| b.shift = Some(Tensor::device("s", I32, [1])))),
        case("= band_mask(", "left t4 on a right mask", band(Right, |b| b.left = Some(Tensor::by_value("l", I32, None, 1)))),
        case("= band_mask(", "a left mask needs left", band(Left, |b| b.left = None)),
        case("= band_mask(", "left t3 is bool, not a number", band(Left, |b| b.left = Some(Tensor::by_value("l", Bool, None, 1)))),
        case("= band_mask(", "left t3 is not a value from the host", band(Left, |b| b.left = Some(Tensor::device("l", I32, [1])))),
        case("= band_mask(", "one length without the other", band(Right, |b| b.kv = None)),
        case("= band_mask(", "seq_q t4 is f32, not an integer", band(Right, |b| b.q = Some(Tensor::device("seq_q", F32, [2, 1, 1, 1])))),
        case("= band_mask(", "seq_kv t5 is [3,1,1,1], not one length", band(Right, |b| b.kv = Some(Tensor::device("seq_kv", I32, [3, 1, 1, 1])))),
    ]);
    let mut ints = Graph::new();
    band(Right, |b| b.dtype = I32)(&mut ints);
    assert_eq!(ints.verify().unwrap_err().0.len(), 2, "x and y are both no floats");
}

#[test]
fn page_and_block_scale_rules() {
    let load = |container: &'static [i64], lengths: (DType, &'static [i64]), table: (DType, &'static [i64]), y: (DType, &'static [i64])| {
        over_inputs([("c", F16, container), ("n", lengths.0, lengths.1), ("t", table.0, table.1), ("y", y.0, y.1)], |[container, seq_len, page_table, y]| {
            Op::PagedLoad(PagedLoad { container, seq_len, page_table, y })
        })
    };
    let (c, n, t, y): (&[i64], _, _, _) = (&[9, 2, 4, 8], (I32, &[3, 1, 1, 1][..]), (I32, &[3, 1, 3, 1][..]), (F16, &[3, 2, 10, 8][..]));
    good(load(c, n, t, y));
    good(|g: &mut Graph| {
        let [container, seq_len, page_table] = [("c", F16, c), ("n", n.0, n.1), ("t", t.0, t.1)].map(|(name, dtype, dims)| g.input(name, dtype, dims));
        let y = g.tensor(Tensor::device("y", F16, [3, 2, 8, 10]).strides([160, 80, 1, 8]));
        g.push(Op::PagedLoad(PagedLoad { container, seq_len, page_table, y }));
    });
    let scales = |x: (DType, &'static [i64]), y: &'static [i64], scale: Tensor, block: &'static [i32]| {
        move |g: &mut Graph| {
            let (x, y, scale) = (g.input("x", x.0, x.1), g.input("y", F32, y), g.tensor(scale));
            g.push(Op::BlockScaleDequantize(BlockScaleDequantize { x, scale, y, block: block.to_vec(), compute: F32 }));
        }
    };
    let scale = |dims: &[i64]| Tensor::device("scale", F8E8M0, dims.to_vec());
    let x: (DType, &[i64]) = (F8E4M3, &[2, 64]);
    good(scales(x, &[2, 64], scale(&[2, 2]), &[1, 32]));
    good(scales((F8E4M3, &[64, 2]), &[64, 2], scale(&[2, 2]), &[1, 32]));
    good(scales(x, &[2, 64], Tensor { reordering: cudnn_graph::ir::Reordering::F8x128x4, ..scale(&[128, 4]) }, &[32]));
    check(vec![
        case("= paged_load(", "are not (blocks, h, block, d)", load(&[9, 4, 8], n, t, y)),
        case("= paged_load(", "y has 3 heads, the container 2", load(c, n, t, (F16, &[3, 3, 10, 8]))),
        case("= paged_load(", "y has heads of 7 elements, the container of 8", load(c, n, t, (F16, &[3, 2, 10, 7]))),
        case("= paged_load(", "seq_len t1 is [2,1,1,1], not [3,1,1,1]", load(c, (I32, &[2, 1, 1, 1]), t, y)),
        case("= paged_load(", "seq_len t1 is f32", load(c, (F32, &[3, 1, 1, 1]), t, y)),
        case("= paged_load(", "page_table t2 is [3,1,2,1], not [3,1,3,1]", load(c, n, (I32, &[3, 1, 2, 1]), y)),
        case("= paged_load(", "page_table t2 is i64, not i32", load(c, n, (I64, &[3, 1, 3, 1]), y)),
        case("= paged_load(", "x t0 is f16, but y t3 is bool", load(c, n, t, (Bool, &[3, 2, 10, 8]))),
        case("= block_scale_dequantize(", "x t0 is i8, not a float", scales((I8, &[2, 64]), &[2, 64], scale(&[2, 2]), &[32])),
        case("= block_scale_dequantize(", "y t1 is [2,32], not [2,64]", scales(x, &[2, 32], scale(&[2, 2]), &[32])),
        case("= block_scale_dequantize(", "the scale has 1 axes, the tensor 2", scales(x, &[2, 64], scale(&[2]), &[32])),
        case("= block_scale_dequantize(", "axis 1 of the scale is 3, not 2", scales(x, &[2, 64], scale(&[2, 3]), &[32])),
        case("= block_scale_dequantize(", "axis 0 has blocks, but [1, 1] has no size for it", scales(x, &[2, 64], scale(&[1, 64]), &[1, 1])),
        case("= block_scale_dequantize(", "[32, 16] has a size for no axis", scales(x, &[2, 64], scale(&[2, 2]), &[32, 16])),
        case("= block_scale_dequantize(", "block size 0 is below 1", scales(x, &[2, 64], scale(&[2, 2]), &[0])),
        case("= block_scale_quantize(", "2 block sizes for the last axis", over_inputs([("x", F32, &[2, 64]), ("y", F8E4M3, &[2, 64]), ("scale", F32, &[2, 2])], |[x, y, scale]| {
            Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![1, 32], compute: F32 })
        })),
        case("= block_scale_quantize(", "computes in i32", over_inputs([("x", F32, &[2, 64]), ("y", F8E4M3, &[2, 64]), ("scale", F32, &[2, 2])], |[x, y, scale]| {
            Op::BlockScaleQuantize(BlockScaleQuantize { x, y, scale, block: vec![32], compute: I32 })
        })),
    ]);
}

/// A forward op whose operands `spoil` changes before they become tensors.
fn sdpa(spoil: impl FnOnce(&mut Graph, &mut [Tensor; 4]), finish: impl FnOnce(&mut Graph, SdpaForward) -> SdpaForward) -> impl FnOnce(&mut Graph) {
    move |g| {
        let mut qkvo =
            [("q", [2, 4, 5, 8]), ("k", [2, 2, 7, 8]), ("v", [2, 1, 7, 6]), ("o", [2, 4, 5, 6])].map(|(name, dims)| Tensor::device(name, F16, dims));
        spoil(g, &mut qkvo);
        let [q, k, v, o] = qkvo.map(|t| g.tensor(t));
        let op = finish(g, SdpaForward::plain(q, k, v, o));
        g.push(Op::SdpaForward(Box::new(op)));
    }
}

#[test]
fn sdpa_forward_rules() {
    let shapes = |at: usize, dims: [i64; 4]| sdpa(move |_, t| t[at] = Tensor::device(t[at].name.clone(), F16, dims), |_, op| op);
    type Set = fn(&mut SdpaForward, TensorId);
    let extra = |dtype, dims: &'static [i64], set: Set| {
        sdpa(|_, _| {}, move |g, mut op| {
            let id = g.input("extra", dtype, dims);
            set(&mut op, id);
            op
        })
    };
    let dropout = |probability: f32, seed: DType, offset: &'static [i64], dump: (DType, &'static [i64])| {
        sdpa(|_, _| {}, move |g, op| {
            let (seed, offset) = (g.input("seed", seed, [1]), g.input("offset", I64, offset));
            let rng_dump = Some(g.input("dump", dump.0, dump.1));
            SdpaForward { dropout: Some(Dropout { probability, seed, offset, rng_dump }), ..op }
        })
    };
    let fp8 = |dtype: DType, descale: &'static [i64]| {
        sdpa(
            move |_, t| {
                for t in t {
                    t.dtype = dtype;
                }
            },
            move |g, op| {
                let names = ["descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o", "amax_s", "amax_o"];
                let n = names.map(|name| g.input(name, F32, if name == "descale_q" { descale } else { &[1, 1, 1, 1] }));
                let [descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o] = n;
                SdpaForward { fp8: Some(Fp8Scales { descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, amax_s, amax_o }), ..op }
            },
        )
    };
    /// Pages of 4 rows for k and of 2 for v, and what is there of tables and lengths.
    fn paged(k: Option<(DType, &'static [i64])>, v: Option<(DType, &'static [i64])>, lengths: bool) -> impl FnOnce(&mut Graph) {
        sdpa(
            |_, t| {
                t[1] = Tensor::device("k", F16, [9, 2, 4, 8]);
                t[2] = Tensor::device("v", F16, [9, 1, 2, 6]);
            },
            move |g, op| SdpaForward {
                page_table_k: k.map(|(dtype, dims)| g.input("table_k", dtype, dims)),
                page_table_v: v.map(|(dtype, dims)| g.input("table_v", dtype, dims)),
                seq_len_kv: lengths.then(|| g.input("seq_len_kv", I32, [2, 1, 1, 1])),
                ..op
            },
        )
    }
    let (tk, tv): (Option<(DType, &'static [i64])>, Option<(DType, &'static [i64])>) = (Some((I32, &[2, 1, 2, 1])), Some((I32, &[2, 1, 4, 1])));
    good(sdpa(|_, _| {}, |_, op| op));
    good(extra(F32, &[2, 4, 5, 1], |op, t| op.stats = Some(t)));
    good(dropout(0.5, I64, &[1], (F32, &[2, 4, 5, 7])));
    good(fp8(F8E4M3, &[1]));
    good(paged(tk, tv, true));
    good(over_score);
    check(vec![
        case("sdpa_forward(", "q t0 is i8, not a float", sdpa(|_, t| t[0].dtype = I8, |_, op| op)),
        case("sdpa_forward(", "are not (batch, heads, sequence, dim)", sdpa(|_, t| t[0] = Tensor::device("q", F16, [8, 5, 8]), |_, op| op)),
        case("sdpa_forward(", "q has 2 batch entries, k 3, v 2", shapes(1, [3, 2, 7, 8])),
        case("sdpa_forward(", "q has heads of 8 elements, k of 9", shapes(1, [2, 2, 7, 9])),
        case("sdpa_forward(", "k has 7 rows, v 6", shapes(2, [2, 1, 6, 6])),
        case("sdpa_forward(", "the 3 heads of k do not divide the 4 of q", shapes(1, [2, 3, 7, 8])),
        case("sdpa_forward(", "the 3 heads of v do not divide the 4 of q", shapes(2, [2, 3, 7, 6])),
        case("sdpa_forward(", "o t3 is [2,4,5,8], not [2,4,5,6]", shapes(3, [2, 4, 5, 8])),
        case("sdpa_forward(", "attn_scale t4 is f16, not f32", extra(F16, &[1], |op, t| op.attn_scale = Some(t))),
        case("sdpa_forward(", "attn_scale t4 is [2], not one element", extra(F32, &[2], |op, t| op.attn_scale = Some(t))),
        case("sdpa_forward(", "stats t4 is f16, not f32", extra(F16, &[2, 4, 5, 1], |op, t| op.stats = Some(t))),
        case("sdpa_forward(", "max t4 is [2,4,5], not [2,4,5,1]", extra(F32, &[2, 4, 5], |op, t| op.max = Some(t))),
        case("sdpa_forward(", "sum_exp t4 is [2,4,1,5]", extra(F32, &[2, 4, 1, 5], |op, t| op.sum_exp = Some(t))),
        case("sdpa_forward(", "sink t4 is [4], not [1,4,1,1]", extra(F32, &[4], |op, t| op.sink = Some(t))),
        case("sdpa_forward(", "sink t4 is f16, not f32", extra(F16, &[1, 4, 1, 1], |op, t| op.sink = Some(t))),
        case("sdpa_forward(", "block_mask t4 is [2,4,1,2], not [2,4,1,1]", extra(U8, &[2, 4, 1, 2], |op, t| op.block_mask = Some(t))),
        case("sdpa_forward(", "block_mask t4 is i8, not u8", extra(I8, &[2, 4, 1, 1], |op, t| op.block_mask = Some(t))),
        case("sdpa_forward(", "seq_len_q t4 is [2], not [2,1,1,1]", extra(I32, &[2], |op, t| op.seq_len_q = Some(t))),
        case("sdpa_forward(", "seq_len_kv t4 is f32, not an integer", extra(F32, &[2, 1, 1, 1], |op, t| op.seq_len_kv = Some(t))),
        case("sdpa_forward(", "cu_seq_len_q t4 is [2,1,1,1], not [3,1,1,1]", extra(I32, &[2, 1, 1, 1], |op, t| op.cu_seq_len_q = Some(t))),
        case("sdpa_forward(", "cu_seq_len_kv t4 is f32, not an integer", extra(F32, &[3, 1, 1, 1], |op, t| op.cu_seq_len_kv = Some(t))),
        case("sdpa_forward(", "both seq_len_q and cu_seq_len_q", sdpa(|_, _| {}, |g, op| SdpaForward {
            seq_len_q: Some(g.input("n", I32, [2, 1, 1, 1])),
            cu_seq_len_q: Some(g.input("cu", I32, [3, 1, 1, 1])),
            ..op
        })),
        case("sdpa_forward(", "a page table for one of k and v", paged(tk, None, true)),
        case("sdpa_forward(", "page tables need seq_len_kv", paged(tk, tv, false)),
        case("sdpa_forward(", "page_table_k t4 is i64, not i32", paged(Some((I64, &[2, 1, 2, 1])), tv, true)),
        case("sdpa_forward(", "page_table_v t5 is [2,1,5,1], not [2,1,4,1]", paged(tk, Some((I32, &[2, 1, 5, 1])), true)),
        case("sdpa_forward(", "dropout probability 1 is not in [0, 1)", dropout(1.0, I64, &[1], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "seed t4 is f32, not an integer", dropout(0.5, F32, &[1], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "offset t5 is [2], not one element", dropout(0.5, I64, &[2], (F32, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "rng_dump t6 is [2,4,5,6], not [2,4,5,7]", dropout(0.5, I64, &[1], (F32, &[2, 4, 5, 6]))),
        case("sdpa_forward(", "rng_dump t6 is bool, not a number", dropout(0.5, I64, &[1], (Bool, &[2, 4, 5, 7]))),
        case("sdpa_forward(", "descale_q t4 is [2], not one element", fp8(F8E4M3, &[2])),
    ]);
    let mut wide = Graph::new();
    fp8(F16, &[1])(&mut wide);
    let errors = wide.verify().unwrap_err();
    assert_eq!(errors.0.iter().filter(|e| e.message.contains("8-bit scales, but")).count(), 3, "{errors}");
}

/// A score graph that is right.
fn over_score(g: &mut Graph) {
    over(g, Tensor::virtual_("score", F32, [2, 4, 5, 7]));
}

#[test]
fn sdpa_backward_rules() {
    let backward = |at: usize, dtype: DType, dims: Vec<i64>| {
        move |g: &mut Graph| {
            let qo: &[i64] = &[2, 4, 5, 8];
            let names = [("q", qo), ("k", &[2, 2, 7, 8]), ("v", &[2, 2, 7, 8]), ("o", qo), ("d_o", qo), ("stats", &[2, 4, 5, 1])];
            let grads = [("dq", qo), ("dk", &[2, 2, 7, 8]), ("dv", &[2, 2, 7, 8]), ("scale", &[1]), ("n", &[2, 1, 1, 1])];
            let mut ids = Vec::new();
            for (i, (name, plain)) in names.into_iter().chain(grads).enumerate() {
                let usual = match name {
                    "stats" | "scale" => F32,
                    "n" => I32,
                    _ => F16,
                };
                ids.push(if i == at { g.input(name, dtype, dims.clone()) } else { g.input(name, usual, plain) });
            }
            let &[q, k, v, o, d_o, stats, dq, dk, dv, scale, n] = &ids[..] else { panic!() };
            g.push(Op::SdpaBackward(Box::new(SdpaBackward {
                q,
                k,
                v,
                o,
                d_o,
                stats,
                attn_scale: Some(scale),
                dq,
                dk,
                dv,
                seq_len_q: None,
                seq_len_kv: Some(n),
                score: None,
            })));
        }
    };
    good(backward(99, F16, vec![]));
    check(vec![
        case("sdpa_backward(", "k t1 is i32, not a float", backward(1, I32, vec![2, 2, 7, 8])),
        case("sdpa_backward(", "d_o t4 is [2,4,5,7], not [2,4,5,8]", backward(4, F16, vec![2, 4, 5, 7])),
        case("sdpa_backward(", "o t3 is [2,4,4,8], not [2,4,5,8]", backward(3, F16, vec![2, 4, 4, 8])),
        case("sdpa_backward(", "dq t6 is [2,4,5,4], not [2,4,5,8]", backward(6, F16, vec![2, 4, 5, 4])),
        case("sdpa_backward(", "dk t7 is [2,4,7,8], not [2,2,7,8]", backward(7, F16, vec![2, 4, 7, 8])),
        case("sdpa_backward(", "dv t8 is [2,4,7,8], not [2,2,7,8]", backward(8, F16, vec![2, 4, 7, 8])),
        case("sdpa_backward(", "stats t5 is f16, not f32", backward(5, F16, vec![2, 4, 5, 1])),
        case("sdpa_backward(", "attn_scale t9 is f64, not f32", backward(9, F64, vec![1])),
        case("sdpa_backward(", "seq_len_kv t10 is [1,1,1,1], not [2,1,1,1]", backward(10, I32, vec![1, 1, 1, 1])),
    ]);
}

#[test]
fn several_mistakes_are_all_reported_once() {
    let mut g = Graph::new();
    let x = g.tensor(Tensor::device("x", F32, [2, 0]));
    let a = g.tensor(Tensor::device("a", F32, [2, 3]).alignment(3));
    g.input("idle", F32, [1]);
    // Over a tensor without a shape: not checked further.
    let shapeless = g.pointwise(Mode::Exp, &[x]);
    g.output(shapeless, "y0", F32);
    let lost = g.pointwise(Mode::Add, &[a, stranger()]);
    g.output(lost, "y1", F32);
    let wrong = g.pointwise_as(Mode::Exp, &[a], I32, F32, Params { axis: Some(0), ..Params::default() });
    g.output(wrong, "y2", F32);
    let errors = g.verify().unwrap_err();
    let messages: Vec<&str> = errors.0.iter().map(|e| e.message.as_str()).collect();
    assert_eq!(messages, [
        "extent 0 is not in 1..=2147483647",
        "alignment 3 is not a power of two",
        "no op uses it",
        "does not exist: b t99",
        "axis is no constant of exp",
        "computes in i32, not in f32, f64, f16 or bf16",
    ]);
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
