//! Every function of expressions: compares its value with plain Rust, and its derivative with differences.

use sdpa_core::DType;
use sdpa_core::expr::{Axes, Binary, Builder, Const, Declared, Kind, NodeId, ParamKind, Place, Precision, Trace, Type, Unary, tanh_slope};

/// Zeros of both signs, infinities, NaN, subnormals, ties, large and small numbers.
const FLOATS: [f32; 25] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    0.3,
    -7.25,
    3.0,
    88.8,
    -104.0,
    1e-45,
    -1e-40,
    f32::MIN_POSITIVE,
    16_777_217.0,
    2_147_483_648.0,
    -3e9,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

const WHOLE: [i32; 12] = [0, 1, -1, 2, -2, 7, -7, 46341, 16_777_217, i32::MAX, i32::MIN, i32::MIN + 1];

/// A number of one of the three types.
#[derive(Clone, Copy, Debug)]
enum Number {
    F32(f32),
    I32(i32),
    Bool(bool),
}

impl Number {
    fn all(ty: Type) -> Vec<Number> {
        match ty {
            Type::F32 => FLOATS.map(Number::F32).to_vec(),
            Type::I32 => WHOLE.map(Number::I32).to_vec(),
            Type::Bool => vec![Number::Bool(false), Number::Bool(true)],
        }
    }

    fn widened(self) -> f64 {
        match self {
            Number::F32(x) => f64::from(x),
            Number::I32(x) => f64::from(x),
            Number::Bool(x) => f64::from(u8::from(x)),
        }
    }

    fn constant(self) -> Const {
        match self {
            Number::F32(x) => Const::f32(x),
            Number::I32(x) => Const::I32(x),
            Number::Bool(x) => Const::Bool(x),
        }
    }

    fn ty(self) -> Type {
        self.constant().ty()
    }

    /// Compares bits, all NaNs being equal, within `ulps` neighbouring numbers.
    fn is(self, got: f64, ulps: u32) -> bool {
        match self {
            Number::F32(want) => {
                let near = |a: f32, b: f32| a.is_sign_negative() == b.is_sign_negative() && a.to_bits().abs_diff(b.to_bits()) <= ulps;
                (want.is_nan() && got.is_nan()) || (f64::from(got as f32) == got && near(got as f32, want))
            }
            Number::I32(_) | Number::Bool(_) => got == self.widened(),
        }
    }
}

/// ∫ 2/√π e^(−t²), by Simpson's rule.
fn erf(x: f64) -> f64 {
    let end = x.clamp(-7.0, 7.0);
    let (n, f) = (4000, |t: f64| (-t * t).exp());
    let h = end / f64::from(n);
    let sum: f64 = (0..n).map(|i| f(h * f64::from(i)) + 4.0 * f(h * (f64::from(i) + 0.5)) + f(h * f64::from(i + 1))).sum();
    if x == 0.0 { x } else { sum * h / 6.0 * std::f64::consts::FRAC_2_SQRT_PI }
}

/// Evaluates the function in plain Rust. Also returns by how many units in the last place a correctly rounded other formula may differ.
fn unary(f: Unary, x: Number) -> (Number, u32) {
    let real = |f: fn(f64) -> f64| match x {
        Number::F32(x) => (Number::F32(f(f64::from(x)) as f32), 1),
        Number::I32(_) | Number::Bool(_) => unreachable!("of floats only"),
    };
    match (f, x) {
        (Unary::Neg, Number::F32(x)) => (Number::F32(-x), 0),
        (Unary::Neg, Number::I32(x)) => (Number::I32(x.wrapping_neg()), 0),
        (Unary::Abs, Number::F32(x)) => (Number::F32(x.abs()), 0),
        (Unary::Abs, Number::I32(x)) => (Number::I32(x.wrapping_abs()), 0),
        (Unary::Sqrt, Number::F32(x)) => (Number::F32(x.sqrt()), 0),
        (Unary::Floor, Number::F32(x)) => (Number::F32(x.floor()), 0),
        (Unary::Ceil, Number::F32(x)) => (Number::F32(x.ceil()), 0),
        (Unary::Not, Number::Bool(x)) => (Number::Bool(!x), 0),
        (Unary::ToF32, Number::I32(x)) => (Number::F32(x as f32), 0),
        (Unary::ToI32, Number::F32(x)) => (Number::I32(x as i32), 0),
        (Unary::Rsqrt, _) => real(|x| 1.0 / x.sqrt()),
        (Unary::Exp, _) => real(f64::exp),
        (Unary::Log, _) => real(f64::ln),
        (Unary::Sin, _) => real(f64::sin),
        (Unary::Cos, _) => real(f64::cos),
        (Unary::Tanh, _) => real(f64::tanh),
        (Unary::Erf, _) => real(erf),
        (Unary::Neg | Unary::Abs | Unary::Sqrt | Unary::Floor | Unary::Ceil | Unary::Not | Unary::ToF32 | Unary::ToI32, _) => {
            unreachable!("{f:?} does not take {x:?}")
        }
    }
}

/// Returns the smaller number; −0 is smaller than 0, and NaN loses.
fn least(x: f32, y: f32) -> f32 {
    match (x.is_nan(), y.is_nan()) {
        (true, _) => y,
        (_, true) => x,
        _ if x == y && (x.is_sign_negative() || y.is_sign_negative()) && x == 0.0 => -0.0,
        _ => {
            if x < y {
                x
            } else {
                y
            }
        }
    }
}

fn of_floats(f: Binary, x: f32, y: f32) -> (Number, u32) {
    let exact = |x: f32| (Number::F32(x), 0);
    let truth = |x: bool| (Number::Bool(x), 0);
    match f {
        Binary::Add => exact(x + y),
        Binary::Sub => exact(x - y),
        Binary::Mul => exact(x * y),
        Binary::Div => exact(x / y),
        Binary::Mod => exact(x % y),
        Binary::Pow => (Number::F32(f64::from(x).powf(f64::from(y)) as f32), 1),
        Binary::Min => exact(least(x, y)),
        Binary::Max => exact(-least(-x, -y)),
        Binary::Eq => truth(x == y),
        Binary::Ne => truth(x != y),
        Binary::Lt => truth(x < y),
        Binary::Le => truth(x <= y),
        Binary::Gt => truth(x > y),
        Binary::Ge => truth(x >= y),
        Binary::And | Binary::Or => unreachable!("of truth values"),
    }
}

fn of_whole(f: Binary, x: i32, y: i32) -> Number {
    match f {
        Binary::Add => Number::I32(x.wrapping_add(y)),
        Binary::Sub => Number::I32(x.wrapping_sub(y)),
        Binary::Mul => Number::I32(x.wrapping_mul(y)),
        Binary::Div => Number::I32(if y == 0 { 0 } else { x.wrapping_div(y) }),
        Binary::Mod => Number::I32(if y == 0 { 0 } else { x.wrapping_rem(y) }),
        Binary::Min => Number::I32(x.min(y)),
        Binary::Max => Number::I32(x.max(y)),
        Binary::Eq => Number::Bool(x == y),
        Binary::Ne => Number::Bool(x != y),
        Binary::Lt => Number::Bool(x < y),
        Binary::Le => Number::Bool(x <= y),
        Binary::Gt => Number::Bool(x > y),
        Binary::Ge => Number::Bool(x >= y),
        Binary::Pow | Binary::And | Binary::Or => unreachable!("not of whole numbers"),
    }
}

fn binary(f: Binary, x: Number, y: Number) -> (Number, u32) {
    match (x, y) {
        (Number::F32(x), Number::F32(y)) => of_floats(f, x, y),
        (Number::I32(x), Number::I32(y)) => (of_whole(f, x, y), 0),
        (Number::Bool(x), Number::Bool(y)) if f == Binary::And => (Number::Bool(x && y), 0),
        (Number::Bool(x), Number::Bool(y)) if f == Binary::Or => (Number::Bool(x || y), 0),
        _ => unreachable!("{f:?} does not take {x:?} and {y:?}"),
    }
}

fn takes(kind: Kind) -> &'static [Type] {
    match kind {
        Kind::Number | Kind::Compare => &[Type::F32, Type::I32],
        Kind::Real => &[Type::F32],
        Kind::Logic => &[Type::Bool],
        Kind::Cast(Type::F32, _) => &[Type::F32],
        Kind::Cast(Type::I32, _) => &[Type::I32],
        Kind::Cast(Type::Bool, _) => &[Type::Bool],
    }
}

/// Declares a tensor of one element.
fn tensor(b: &mut Builder, name: &str, ty: Type) -> NodeId {
    let kind = ParamKind::Tensor { axes: Axes::NONE, dtype: ty.dtype() };
    b.param(Declared { name: name.to_owned(), kind, default: None })
}

fn eval(trace: &Trace, values: &[(&str, f64)], precision: Precision) -> Vec<f64> {
    let params: Vec<f64> = trace.params().iter().map(|p| values.iter().find(|(n, _)| *n == p.name).unwrap().1).collect();
    trace.eval(&Place { score: 0.0, upstream: 1.0, index: [0; 4], extents: [1; 4], params: &params }, precision)
}

/// Returns the result of a function of bound values, and of the same values as constants.
fn computed(operands: &[Number], make: impl Fn(&mut Builder, &[NodeId]) -> NodeId) -> [f64; 2] {
    let mut b = Builder::new();
    let names = ["x", "y", "z"];
    let bound: Vec<NodeId> = operands.iter().zip(names).map(|(n, name)| tensor(&mut b, name, n.ty())).collect();
    let root = make(&mut b, &bound);
    let values: Vec<(&str, f64)> = operands.iter().zip(names).map(|(n, name)| (name, n.widened())).collect();
    let evaluated = eval(&b.finish(&[root]).unwrap(), &values, Precision::F32)[0];
    let mut b = Builder::new();
    let constants: Vec<NodeId> = operands.iter().map(|n| b.konst(n.constant())).collect();
    let root = make(&mut b, &constants);
    [evaluated, b.constant(root).expect("constants fold").to_f64()]
}

#[test]
fn functions_of_one_value_are_those_of_rust() {
    for &f in Unary::ALL {
        for x in takes(f.kind()).iter().flat_map(|&ty| Number::all(ty)) {
            // Skip angles above 1e9, for which f64 does not determine the position within the period.
            if matches!(f, Unary::Sin | Unary::Cos) && x.widened().abs() > 1e9 && x.widened().is_finite() {
                continue;
            }
            let (want, ulps) = unary(f, x);
            for got in computed(&[x], |b, x| b.unary(f, x[0])) {
                assert!(want.is(got, ulps), "{f:?} of {x:?} is {got:e}, not {want:?}");
            }
        }
    }
}

#[test]
fn functions_of_two_values_are_those_of_rust() {
    for &f in Binary::ALL {
        for &ty in takes(f.kind()) {
            for x in Number::all(ty) {
                for y in Number::all(ty) {
                    let (want, ulps) = binary(f, x, y);
                    for got in computed(&[x, y], |b, x| b.binary(f, x[0], x[1])) {
                        assert!(want.is(got, ulps), "{f:?} of {x:?} and {y:?} is {got:e}, not {want:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_select_is_what_is_taken() {
    for ty in [Type::F32, Type::I32, Type::Bool] {
        for x in Number::all(ty) {
            for y in Number::all(ty) {
                for c in [false, true] {
                    let want = if c { x } else { y };
                    for got in computed(&[Number::Bool(c), x, y], |b, n| b.select(n[0], n[1], n[2])) {
                        assert!(want.is(got, 0), "select of {c}, {x:?}, {y:?} is {got:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn parameters_of_sixteen_bits_are_f32_in_expressions() {
    for (dtype, ty) in [(DType::F16, Type::F32), (DType::BF16, Type::F32), (DType::I32, Type::I32), (DType::Bool, Type::Bool)] {
        let mut b = Builder::new();
        let kind = ParamKind::Tensor { axes: Axes::NONE, dtype };
        let x = b.param(Declared { name: "x".to_owned(), kind, default: None });
        assert_eq!(b.ty(x), ty);
    }
}

/// Returns `f(x, y)` with its derivatives along both; false if there is none.
fn derived(make: impl Fn(&mut Builder, NodeId, NodeId) -> NodeId) -> (Trace, [bool; 2]) {
    let mut b = Builder::new();
    let (x, y) = (tensor(&mut b, "x", Type::F32), tensor(&mut b, "y", Type::F32));
    let root = make(&mut b, x, y);
    let upstream = b.upstream();
    let gradients = b.gradient(root, upstream, &[x, y]);
    let there = [gradients[0].is_some(), gradients[1].is_some()];
    let zero = b.f32(0.0);
    let roots = [root, gradients[0].unwrap_or(zero), gradients[1].unwrap_or(zero)];
    (b.finish(&roots).unwrap(), there)
}

fn at(trace: &Trace, x: f64, y: f64) -> Vec<f64> {
    eval(trace, &[("x", x), ("y", y)], Precision::F64)
}

/// SplitMix64.
fn unit(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

const STEP: f64 = 1e-6;

/// Compares both derivatives with differences at random points that `fits` accepts.
fn agrees(name: &str, make: impl Fn(&mut Builder, NodeId, NodeId) -> NodeId, fits: impl Fn(f64, f64) -> bool) {
    let (trace, _) = derived(make);
    // Constants are f32 even if the trace is evaluated in f64. The derivative of erf contains one, so allow for its rounding error.
    let constants = if name == "Erf" { f64::from(f32::EPSILON) / 2.0 } else { 0.0 };
    let (mut seed, mut points) = (7, 0);
    while points < 40 {
        let (x, y) = (unit(&mut seed) * 6.0 - 3.0, unit(&mut seed) * 6.0 - 3.0);
        if !fits(x, y) {
            continue;
        }
        points += 1;
        let got = at(&trace, x, y);
        for (along, [dx, dy]) in [[STEP, 0.0], [0.0, STEP]].into_iter().enumerate() {
            let want = (at(&trace, x + dx, y + dy)[0] - at(&trace, x - dx, y - dy)[0]) / (2.0 * STEP);
            let close = (got[1 + along] - want).abs() <= 2e-8 * (1.0 + want.abs() + got[0].abs()) + constants * want.abs();
            assert!(close, "{name} at ({x}, {y}) along {along}: {}, not {want}", got[1 + along]);
        }
    }
}

#[test]
fn derivatives_of_one_value_are_limits_of_differences() {
    for &f in Unary::ALL.iter().filter(|f| takes(f.kind()).contains(&Type::F32)) {
        match f {
            Unary::Sqrt | Unary::Rsqrt | Unary::Log => agrees(&format!("{f:?}"), |b, x, _| b.unary(f, x), |x, _| x > 0.2),
            Unary::Neg | Unary::Abs | Unary::Exp | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => {
                agrees(&format!("{f:?}"), |b, x, _| b.unary(f, x), |x, _| x.abs() > 0.01);
            }
            // The derivative of a step function is 0, so no gradient is computed.
            Unary::Floor | Unary::Ceil | Unary::ToI32 => assert_eq!(derived(|b, x, _| b.unary(f, x)).1, [false; 2], "{f:?}"),
            Unary::Not | Unary::ToF32 => unreachable!("not of floats"),
        }
    }
}

#[test]
fn derivatives_of_two_values_are_limits_of_differences() {
    for &f in Binary::ALL {
        let make = |b: &mut Builder, x, y| b.binary(f, x, y);
        let name = format!("{f:?}");
        let whole = |x: f64, y: f64| (x / y - (x / y).round()).abs() < 0.01;
        match f {
            Binary::Add | Binary::Sub | Binary::Mul => agrees(&name, make, |_, _| true),
            Binary::Div => agrees(&name, make, |_, y| y.abs() > 0.3),
            Binary::Mod => agrees(&name, make, |x, y| y.abs() > 0.3 && !whole(x, y)),
            Binary::Pow => agrees(&name, make, |x, _| x > 0.3),
            Binary::Min | Binary::Max => agrees(&name, make, |x, y| (x - y).abs() > 0.01),
            Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => {
                assert_eq!(derived(make).1, [false; 2], "{name}")
            }
            // Booleans have no derivative.
            Binary::And | Binary::Or => {}
        }
    }
    // Integer powers are tested at negative numbers too.
    for power in [2.0, 3.0, -1.0] {
        let make = |b: &mut Builder, x, _| {
            let power = b.f32(power);
            b.binary(Binary::Pow, x, power)
        };
        agrees(&format!("power {power}"), make, |x, _| x.abs() > 0.3);
    }
}

#[test]
fn derivatives_of_what_is_made_of_several() {
    let make = |b: &mut Builder, x: NodeId, y: NodeId| {
        // t is used three times, and x directly too: select(x < y, t·x, t) + exp(−t²).
        let product = b.binary(Binary::Mul, x, y);
        let t = b.unary(Unary::Tanh, product);
        let c = b.binary(Binary::Lt, x, y);
        let more = b.binary(Binary::Mul, t, x);
        let chosen = b.select(c, more, t);
        let square = b.binary(Binary::Mul, t, t);
        let minus = b.unary(Unary::Neg, square);
        let bell = b.unary(Unary::Exp, minus);
        b.binary(Binary::Add, chosen, bell)
    };
    agrees("several", make, |x, y| (x - y).abs() > 0.01);
}

#[test]
fn paths_end_at_what_a_gradient_is_asked_along() {
    let mut b = Builder::new();
    let x = b.score();
    let square = b.binary(Binary::Mul, x, x);
    let cube = b.binary(Binary::Mul, square, x);
    let upstream = b.upstream();
    let both = b.gradient(cube, upstream, &[x, square]);
    // The gradient along x stops at `square`: only the direct path counts, so the derivative of square · x is square.
    let trace = b.finish(&[both[0].unwrap(), both[1].unwrap()]).unwrap();
    let place = Place { score: 3.0, upstream: 2.0, index: [0; 4], extents: [1; 4], params: &[] };
    assert_eq!(trace.eval(&place, Precision::F64), [2.0 * 9.0, 2.0 * 3.0]);
    let mut b = Builder::new();
    let x = b.score();
    let upstream = b.upstream();
    assert_eq!(b.gradient(x, upstream, &[x]), [Some(upstream)]);
    let one = b.f32(1.0);
    assert_eq!(b.gradient(one, upstream, &[x]), [None]);
}

/// Checks each row of the table in `grad.rs`.
#[test]
fn derivatives_at_ties_and_infinities() {
    let inf = f64::INFINITY;
    let one = |f: Unary, x: f64| at(&derived(|b, x, _| b.unary(f, x)).0, x, 0.0)[1];
    let two = |f: Binary, x: f64, y: f64| {
        let all = at(&derived(|b, x, y| b.binary(f, x, y)).0, x, y);
        (all[1], all[2])
    };
    assert_eq!((one(Unary::Abs, 0.0), one(Unary::Abs, -0.0)), (0.0, 0.0));
    assert_eq!((one(Unary::Abs, inf), one(Unary::Abs, -inf)), (1.0, -1.0));
    for x in [0.0, 2.5, inf, -inf] {
        assert_eq!((two(Binary::Min, x, x), two(Binary::Max, x, x)), ((1.0, 0.0), (1.0, 0.0)));
    }
    assert_eq!((two(Binary::Min, 1.0, -inf), two(Binary::Max, 1.0, -inf)), ((0.0, 1.0), (1.0, 0.0)));
    for f in [Binary::Min, Binary::Max] {
        for x in [0.0, -3.0, inf, -inf] {
            assert_eq!((two(f, f64::NAN, x), two(f, x, f64::NAN)), ((0.0, 1.0), (1.0, 0.0)), "{f:?} of {x} and not-a-number");
        }
    }
    for x in [0.0, 1.0, 1.5, inf] {
        assert_eq!([one(Unary::Floor, x), one(Unary::Ceil, x), one(Unary::ToI32, x)], [0.0; 3]);
        assert_eq!(two(Binary::Lt, x, x), (0.0, 0.0));
    }
    assert_eq!((one(Unary::Sqrt, 0.0), one(Unary::Log, 0.0), one(Unary::Rsqrt, 0.0)), (inf, inf, -inf));
    for y in [0.0, 0.5, 3.0] {
        assert_eq!(two(Binary::Pow, 0.0, y).1, 0.0, "0 to the power of {y}, along the power");
    }
    for x in [0.0, -2.0, 3.0, inf] {
        assert_eq!(two(Binary::Pow, x, 0.0).0, 0.0, "{x} to the power of 0");
    }
    for (x, y) in [(7.5, 2.0), (-7.5, 2.0), (7.5, -2.0), (6.0, 2.0), (1.0, 3.0)] {
        assert_eq!(two(Binary::Mod, x, y), (1.0, -f64::trunc(x / y)), "{x} % {y}");
    }
    assert_eq!((one(Unary::Tanh, inf), one(Unary::Tanh, -inf)), (0.0, 0.0));
    assert_eq!((one(Unary::Erf, inf), one(Unary::Exp, -inf)), (0.0, 0.0));
}

/// The unselected branch of a select has a gradient of 0, whatever its value.
#[test]
fn what_a_select_does_not_take_has_no_gradient() {
    let (trace, _) = derived(|b, x, y| {
        let zero = b.f32(0.0);
        let c = b.binary(Binary::Ge, x, zero);
        b.select(c, x, y)
    });
    for other in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(at(&trace, 1.0, other), [1.0, 1.0, 0.0]);
    }
    let taken = at(&trace, -1.0, f64::NAN);
    assert_eq!(&taken[1..], [0.0, 1.0]);
}

/// The other operand of a minimum or maximum has a gradient of 0, even if its derivative is infinite.
#[test]
fn what_is_not_the_extreme_has_no_gradient() {
    for (f, bound, at_zero) in [(Unary::Log, -10.0, -10.0), (Unary::Sqrt, 0.5, 0.5)] {
        let (trace, _) = derived(|b, x, y| {
            let steep = b.unary(f, x);
            b.binary(Binary::Max, steep, y)
        });
        assert_eq!(at(&trace, 0.0, bound), [at_zero, 0.0, 1.0], "{f:?}");
    }
}

/// `tanh_slope` recognises the derivative of tanh, both from `gradient` and written by hand.
#[test]
fn slopes_of_tanh_are_found() {
    let found = |text: &str| {
        let trace: Trace = text.parse().unwrap();
        let all: Vec<_> = trace.ids().filter_map(|id| tanh_slope(&trace, id)).collect();
        let text = |id: NodeId| format!("{:?}", trace.node(id));
        all.iter().map(|s| (text(s.upstream), text(s.of))).collect::<Vec<_>>()
    };
    let score = "Score".to_owned();
    assert_eq!(found("let t = tanh(score); upstream - upstream * (t * t)"), [("Upstream".to_owned(), score.clone())]);
    assert_eq!(found("let t = tanh(score); upstream - t * t * upstream"), [("Upstream".to_owned(), score.clone())]);
    assert_eq!(found("let t = tanh(score); upstream * (1.0 - t * t)").len(), 1);
    for other in ["let t = tanh(score); upstream - score * (t * t)", "let t = tanh(score); 2.0 - t * t", "1.0 - score * score"] {
        assert_eq!(found(other), [], "{other}");
    }
    let product = "let t = tanh(score); upstream - upstream * (t * tanh(score * 2.0))";
    assert_eq!(found(product), [], "{product}");
}

/// The gradient is 0 even if the derivative is infinite: 0 times that would be NaN.
#[test]
fn what_a_select_does_not_take_may_have_an_infinite_slope() {
    type Make = fn(&mut Builder, NodeId) -> NodeId;
    let steep: [(&str, f64, Make); 7] = [
        ("sqrt", 0.0, |b, x| b.unary(Unary::Sqrt, x)),
        ("rsqrt", 0.0, |b, x| b.unary(Unary::Rsqrt, x)),
        ("log", 0.0, |b, x| b.unary(Unary::Log, x)),
        ("exp", 1e5, |b, x| b.unary(Unary::Exp, x)),
        ("division", 0.0, |b, x| {
            let one = b.f32(1.0);
            b.binary(Binary::Div, one, x)
        }),
        ("power", 0.0, |b, x| {
            let half = b.f32(0.5);
            b.binary(Binary::Pow, x, half)
        }),
        ("remainder", 0.0, |b, x| {
            let one = b.f32(1.0);
            b.binary(Binary::Mod, one, x)
        }),
    ];
    for (name, x, make) in steep {
        let (alone, _) = derived(|b, x, _| make(b, x));
        assert!(!at(&alone, x, 0.0)[1].is_finite(), "the slope of {name} is to be infinite here");
        let (chosen, _) = derived(|b, x, y| {
            let zero = b.f32(0.0);
            let there = b.binary(Binary::Gt, y, zero);
            let steep = make(b, x);
            b.select(there, steep, x)
        });
        assert_eq!(at(&chosen, x, -1.0)[1], 1.0, "{name} is not taken");
        assert!(!at(&chosen, x, 1.0)[1].is_finite(), "{name} is taken");
    }
}

/// Selects cost time in a kernel, so only derivatives that may be infinite get one.
#[test]
fn finite_slopes_are_not_guarded() {
    let text = |f: Unary| {
        let mut b = Builder::new();
        let x = b.score();
        let zero = b.f32(0.0);
        let below = b.binary(Binary::Lt, x, zero);
        let y = b.unary(f, x);
        let root = b.select(below, y, x);
        let upstream = b.upstream();
        let g = b.gradient(root, upstream, &[x])[0].unwrap();
        b.finish(&[g]).unwrap().to_string()
    };
    let guards = |f: Unary| text(f).matches("== 0.0").count();
    assert_eq!([Unary::Tanh, Unary::Sin, Unary::Cos, Unary::Erf, Unary::Neg].map(guards), [0; 5]);
    assert_eq!([Unary::Sqrt, Unary::Rsqrt, Unary::Log, Unary::Exp].map(guards), [1; 4]);
}

#[test]
fn the_derivative_of_tanh_is_spelled_as_engines_take_it() {
    let mut b = Builder::new();
    let x = b.score();
    let t = b.unary(Unary::Tanh, x);
    let upstream = b.upstream();
    let g = b.gradient(t, upstream, &[x])[0].unwrap();
    assert_eq!(b.finish(&[g]).unwrap().to_string(), "let t1 = tanh(score); upstream - upstream * (t1 * t1)");
}
