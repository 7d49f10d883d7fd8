//! Rules of pointwise ops.

use crate::*;

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
    /// Returns valid operands of a mode.
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
        bad("= exp(", "operands of exp: b is given but not used", Mode::Exp, |p| p.b = Some((F32, vec![2, 3]))),
        bad("= select(", "t is missing", Mode::BinarySelect, |p| p.t = None),
        bad("= add(", "t is given but not used", Mode::Add, |p| p.t = Some((Bool, vec![2, 3]))),
        bad("= relu_bwd(", "dy is missing", Mode::ReluBwd, |p| p.dy = None),
        bad("= exp(", "dy is given but not used", Mode::Exp, |p| p.dy = Some((F32, vec![2, 3]))),
        bad("= add(", "b t1 does not broadcast to y t2", Mode::Add, |p| p.b = Some((F32, vec![2, 2]))),
        bad("= add(", "b t1 has 3 axes, expected 2 as y t2", Mode::Add, |p| p.b = Some((F32, vec![1, 2, 3]))),
        bad("= add(", "b t1 has 1 axes, expected 2 as y t2", Mode::Add, |p| p.b = Some((F32, vec![3]))),
        bad("= exp(", "x t0 has 1 axes, expected 2 as y t1", Mode::Exp, |p| p.x.1 = vec![3]),
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
        bad("= gen_index(", "axis is 2, but y has 2 axes", Mode::GenIndex, |p| p.params.axis = Some(2)),
        bad("= gen_index(", "axis is -1, but y has 2 axes", Mode::GenIndex, |p| p.params.axis = Some(-1)),
        bad("= gen_index(", "y t1 is f32, not an integer", Mode::GenIndex, |p| p.y.0 = F32),
        bad("= gen_index(", "computes in f32, not in i32 or i64", Mode::GenIndex, |p| p.compute = F32),
        bad("= select(", "t t2 is f32, not a bool or an integer", Mode::BinarySelect, |p| p.t = Some((F32, vec![2, 3]))),
        bad("= select(", "b t1 is bool, but y t3 is a number", Mode::BinarySelect, |p| p.b = Some((Bool, vec![2, 3]))),
        bad("= select(", "computes in bool", Mode::BinarySelect, |p| p.compute = Bool),
        bad("= exp(", "axis is not an attribute of exp", Mode::Exp, |p| p.params.axis = Some(0)),
        bad("= exp(", "relu_lower_clip is not an attribute of exp", Mode::Exp, |p| p.params.relu_lower_clip = Some(0.0)),
        bad("= exp(", "relu_upper_clip is not an attribute of exp", Mode::Exp, |p| p.params.relu_upper_clip = Some(0.0)),
        bad("= exp(", "relu_lower_slope is not an attribute of exp", Mode::Exp, |p| p.params.relu_lower_slope = Some(0.0)),
        bad("= relu(", "elu_alpha is not an attribute of relu", Mode::ReluFwd, |p| p.params.elu_alpha = Some(0.0)),
        bad("= elu(", "softplus_beta is not an attribute of elu", Mode::EluFwd, |p| p.params.softplus_beta = Some(1.0)),
        bad("= elu(", "swish_beta is not an attribute of elu", Mode::EluFwd, |p| p.params.swish_beta = Some(1.0)),
        bad("= swish(", "swish_beta is not a number", Mode::SwishFwd, |p| p.params.swish_beta = Some(f64::NAN)),
        bad("= softplus(", "softplus_beta is zero", Mode::SoftplusFwd, |p| p.params.softplus_beta = Some(0.0)),
        bad("= relu(", "relu clips 0 and -1 are the wrong way round", Mode::ReluFwd, |p| p.params.relu_upper_clip = Some(-1.0)),
    ]);
}
