//! Traces are equal exactly if they compute the same from their parameters.

use sdpa_core::DType;
use sdpa_core::expr::{
    At, Axes, Axis, BF16, Binary, Bool, Builder, Declared, Expr, ExprError, F16, F32, I32, Inputs, ParamKind, Params, Trace, Unary,
};
use std::hash::{DefaultHasher, Hash, Hasher};

fn hash(trace: &Trace) -> u64 {
    let mut hasher = DefaultHasher::new();
    trace.hash(&mut hasher);
    hasher.finish()
}

fn alike(a: &Trace, b: &Trace) {
    assert_eq!(a, b);
    assert_eq!(hash(a), hash(b), "{a}");
}

macro_rules! score {
    ($f:expr) => {
        Trace::of_score($f).unwrap()
    };
}

#[test]
fn what_is_written_alike_is_alike() {
    alike(&score!(|s, _, _| s * 2.0 + 1.0), &score!(|s, _, _| s * 2.0 + 1.0));
    // Unused values and the order of construction do not matter.
    let plain = score!(|s, at, p| (s / p.scalar("a", 1.0)).tanh() * p.scalar("b", 2.0) + (at.k - at.q).to_f32());
    let other = score!(|s, at, p| {
        let b = p.scalar("b", 2.0);
        let _ = (at.batch * 3 + at.head).to_f32().exp();
        let _ = p.scalar("never", 5.0);
        let distance = (at.k - at.q).to_f32();
        let a = p.scalar("a", 1.0);
        (s / a).tanh() * b + distance
    });
    alike(&plain, &other);
    assert_eq!(other.params().iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    // Equal values become one node.
    let twice = score!(|s, at, _| (s + (at.q - at.k).to_f32()) * (s + (at.q - at.k).to_f32()));
    let once = score!(|s, at, _| {
        let x = s + (at.q - at.k).to_f32();
        x * x
    });
    alike(&twice, &once);
    // The seven values are score, q, k, q − k, its conversion to f32, the sum and the product.
    assert_eq!(once.nodes().len(), 7);
}

#[test]
fn what_computes_otherwise_is_not() {
    let all = [
        score!(|s, _, _| s),
        score!(|s, _, _| s * 2.0),
        score!(|s, _, _| 2.0 * s),
        score!(|s, _, _| s * 3.0),
        score!(|s, _, _| s + 0.0),
        score!(|s, _, _| s + -0.0),
        score!(|s, at, _| s + at.q.to_f32()),
        score!(|s, at, _| s + at.k.to_f32()),
        score!(|s, at, _| s + at.seq_q.to_f32()),
        score!(|s, _, p| s + p.scalar("a", 0.0)),
        score!(|s, _, p| s + p.scalar("b", 0.0)),
        score!(|s, _, p| s + p.tensor("a", Axes::NONE, F32)),
        score!(|s, _, p| s + p.tensor("a", [Axis::Head], F32)),
        score!(|s, _, p| s + p.tensor("a", [Axis::Batch, Axis::Head], F32)),
        score!(|s, _, p| s + p.tensor("a", [Axis::Head], F16)),
        score!(|s, _, p| s + p.tensor("a", [Axis::Head], BF16)),
        score!(|s, _, p| s + p.tensor("a", [Axis::Head], I32).to_f32()),
        score!(|s, at, _| at.q.lt(at.k).select(s, 0.0)),
        score!(|s, at, _| at.q.le(at.k).select(s, 0.0)),
    ];
    for (n, a) in all.iter().enumerate() {
        for b in &all[..n] {
            assert_ne!(a, b);
            assert_ne!(hash(a), hash(b), "{a} and {b}");
        }
    }
}

#[test]
fn there_is_one_not_a_number() {
    let other = f32::from_bits(0x7fc0_1234);
    assert!(other.is_nan() && other.to_bits() != f32::NAN.to_bits());
    alike(&score!(|s, _, _| s + other), &score!(|s, _, _| s + -f32::NAN));
}

#[test]
fn what_is_made_of_constants_is_a_constant() {
    alike(&score!(|s, _, p| s + (p.constant(2.0) * 3.0 - 1.0).sqrt()), &score!(|s, _, _| s + 5f32.sqrt()));
    alike(&score!(|s, _, p| p.constant(2.0).lt(3.0).select(s, s * 9.0)), &score!(|s, _, _| s));
    alike(&score!(|s, _, p| p.constant(2.0).gt(3.0).select(s, s * 9.0)), &score!(|s, _, _| s * 9.0));
    alike(&score!(|s, at, _| at.q.lt(at.k).select(s, s)), &score!(|s, _, _| s));
    let mask = |f: fn(Expr<'_, Bool>) -> Expr<'_, Bool>| Trace::of_mask(|at, _| f(at.q.lt(at.k))).unwrap();
    let plain = mask(|c| c);
    for same in [mask(|c| c & true), mask(|c| true & c), mask(|c| c | false), mask(|c| false | c)] {
        alike(&same, &plain);
    }
    for (never, always) in [(mask(|c| c & false), mask(|c| c | true)), (mask(|c| false & c), mask(|c| true | c))] {
        assert_eq!((never.to_string(), always.to_string()), ("false".to_owned(), "true".to_owned()));
    }
}

/// The default of a scalar is a value of a call: traces that differ only in it are one program with two texts.
#[test]
fn the_default_of_a_scalar_is_no_identity() {
    let [a, b] = [30.0, 50.0].map(|cap| score!(|s, _, p| s / p.scalar("cap", cap)));
    alike(&a, &b);
    assert_eq!(a.to_string(), "scalar cap = 30.0; score / cap");
    assert_eq!(b.to_string(), "scalar cap = 50.0; score / cap");
}

fn scaled(by: f32) -> impl for<'t> Fn(Expr<'t, F32>, At<'t>, Params<'t>) -> Expr<'t, F32> {
    move |s, _, _| s * by
}

/// Closures of one address, type and name with different captured values differ.
#[test]
fn a_closure_that_takes_the_place_of_another_is_another() {
    let mut closure = scaled(1.0);
    let place = std::ptr::from_ref(&closure).addr();
    let mut seen = vec![score!(&closure)];
    for n in 2..6 {
        closure = scaled(n as f32);
        assert_eq!(std::ptr::from_ref(&closure).addr(), place);
        let trace = score!(&closure);
        assert!(!seen.contains(&trace), "{trace}");
        seen.push(trace);
    }
    closure = scaled(3.0);
    alike(&score!(&closure), &seen[2]);
}

#[test]
fn two_closures_of_one_place_in_the_source_are_told_apart() {
    let made: Vec<Trace> = [1, 2, 1].iter().map(|&n| score!(|s, at, _| s + (at.k % n).to_f32())).collect();
    assert_ne!(made[0], made[1]);
    alike(&made[0], &made[2]);
    let (first, second) = (score!(|s, _, _| s.exp()), score!(|s, _, _| s.sin()));
    assert_ne!(first, second);
}

struct Cap {
    value: f32,
    calls: usize,
}

impl Cap {
    fn apply<'t>(&mut self, s: Expr<'t, F32>) -> Expr<'t, F32> {
        self.calls += 1;
        (s / self.value).tanh() * self.value
    }
}

#[test]
fn what_a_closure_holds_is_looked_at_when_it_is_traced() {
    let mut cap = Cap { value: 30.0, calls: 0 };
    let before = score!(|s, _, _| cap.apply(s));
    cap.value = 50.0;
    let after = score!(|s, _, _| cap.apply(s));
    cap.value = 30.0;
    let again = score!(|s, _, _| cap.apply(s));
    assert_ne!(before, after);
    alike(&before, &again);
    assert_eq!(cap.calls, 3, "a closure runs once for each trace");
}

#[test]
fn a_trace_inside_another_is_the_same_as_one() {
    let cap = score!(|s, _, p| (s / p.scalar("cap", 30.0)).tanh() * p.scalar("cap", 30.0));
    let decay = score!(|s, at, _| s - (at.q - at.k).to_f32());
    let mut b = Builder::new();
    let score = b.score();
    let first = b.inline(&cap, Inputs { score: Some(score), ..Inputs::default() })[0];
    let second = b.inline(&decay, Inputs { score: Some(first), ..Inputs::default() })[0];
    let both = b.finish(&[second]).unwrap();
    alike(&both, &score!(|s, at, p| (s / p.scalar("cap", 30.0)).tanh() * p.scalar("cap", 30.0) - (at.q - at.k).to_f32()));
    // With given extents, reads of extents become constants.
    let far = score!(|s, at, _| s + (at.seq_kv - at.seq_q - at.heads_q).to_f32());
    let mut b = Builder::new();
    let roots = b.inline(&far, Inputs { extents: Some([2, 3, 5, 11]), ..Inputs::default() });
    alike(&b.finish(&roots).unwrap(), &score!(|s, _, _| s + 3.0));
}

#[test]
fn typed_functions_are_what_they_are_called() {
    let text = |t: Trace| t.to_string();
    for (got, want) in [
        (text(score!(|s, _, _| s.abs().sqrt().rsqrt().exp().log())), "log(exp(rsqrt(sqrt(abs(score)))))"),
        (text(score!(|s, _, _| s.sin().cos().tanh().erf().floor().ceil())), "ceil(floor(erf(tanh(cos(sin(score))))))"),
        (text(score!(|s, at, _| s.pow(at.q.to_f32()).min(1.0).max(2.0))), "max(min(pow(score, f32(q)), 1.0), 2.0)"),
        (text(score!(|s, _, _| s.clamp(-1.0, 1.0))), "min(max(score, -1.0), 1.0)"),
        (text(score!(|s, _, _| s.square() - s)), "score * score - score"),
        (text(score!(|s, _, _| s.sigmoid())), "tanh(score * 0.5) * 0.5 + 0.5"),
        (text(score!(|s, at, _| s.to_i32().abs().min(at.q).max(3).to_f32())), "f32(max(min(abs(i32(score)), q), 3))"),
        (text(score!(|s, _, _| 1.0 - (2.0 / (3.0 % (4.0 + -s))))), "1.0 - 2.0 / (3.0 % (4.0 + -score))"),
        (text(score!(|s, at, _| s + (1 - -at.k / 2 * 3 % 5).to_f32())), "score + f32(1 - -k / 2 * 3 % 5)"),
        (
            text(score!(|s, at, _| (s.eq(1.0) & !s.ne(at.q.to_f32())).select(s, 0.0))),
            "select(score == 1.0 & !(score != f32(q)), score, 0.0)",
        ),
        (
            text(score!(|s, _, _| ((s.lt(1.0) | s.le(2.0)) & s.gt(3.0) & s.ge(4.0)).select(1.0, s))),
            "select((score < 1.0 | score <= 2.0) & score > 3.0 & score >= 4.0, 1.0, score)",
        ),
        (text(score!(|s, at, _| (at.q.eq(1) | at.k.ne(2) | at.q.lt(3)).select(s, 0.0))), "select(q == 1 | k != 2 | q < 3, score, 0.0)"),
        (text(score!(|s, at, _| (at.q.le(1) & at.k.gt(2) & at.q.ge(3)).select(s, 0.0))), "select(q <= 1 & k > 2 & q >= 3, score, 0.0)"),
    ] {
        assert_eq!(got, want);
    }
    let mask = Trace::of_mask(|at, p| (true & p.tensor("m", [Axis::K], Bool)) | at.head.eq(at.batch)).unwrap();
    assert_eq!(mask.to_string(), "tensor m[k]: bool; m | head == batch");
    let gradient = Trace::of_gradient(|g, s, at, _| g * s * at.heads_q.to_f32()).unwrap();
    assert_eq!(gradient.to_string(), "upstream * score * f32(heads_q)");
}

fn tensor(dtype: DType) -> ParamKind {
    ParamKind::Tensor { axes: Axes::NONE, dtype }
}

fn declared(name: &str, kind: ParamKind, default: Option<f32>) -> Vec<ExprError> {
    let mut b = Builder::new();
    let x = b.param(Declared { name: name.to_owned(), kind, default });
    b.finish(&[x]).err().unwrap_or_default()
}

#[test]
fn names_are_words_that_mean_nothing_else() {
    let long = "a".repeat(65);
    let functions = ["abs", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "erf", "floor", "ceil", "f32", "i32", "pow", "min", "max"];
    let words = ["score", "upstream", "scalar", "tensor", "let", "true", "false", "inf", "nan", "select", "bool"];
    let places = ["batch", "head", "q", "k", "batches", "heads_q", "seq_q", "seq_kv"];
    let none = ["", " ", "1a", "a b", "a-b", "a.b", "ä", "a\n", "(", long.as_str()];
    for name in functions.iter().chain(&words).chain(&places).chain(&none) {
        assert_eq!(declared(name, tensor(DType::F32), None), [ExprError::Name { name: (*name).to_owned() }]);
    }
    for name in ["_", "a", "a1", "A_1", "scores", "Score", "qk", "t1", &long[1..]] {
        assert_eq!(declared(name, tensor(DType::F32), None), []);
    }
}

#[test]
fn element_types_and_defaults_have_rules() {
    for dtype in DType::ALL {
        assert_eq!(declared("x", tensor(dtype), None), []);
    }
    let wrong = [ExprError::Default { name: "x".to_owned() }];
    assert_eq!(declared("x", ParamKind::Scalar, Some(f32::NAN)), wrong);
    assert_eq!(declared("x", ParamKind::Scalar, None), wrong);
    for fine in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-45] {
        assert_eq!(declared("x", ParamKind::Scalar, Some(fine)), []);
    }
}

#[test]
fn every_declaration_against_the_rules_is_told_of() {
    let errors = Trace::of_score(|s, _, p| {
        let twice = p.scalar("x", 1.0) + p.scalar("x", 1.0);
        let kinds = p.tensor("y", [Axis::Q], F32) + p.tensor("y", [Axis::K], F32) + p.scalar("y", 0.0) + p.tensor("y", [Axis::Q], F16);
        s + twice + kinds + p.scalar("1", 0.0) + p.scalar("z", f32::NAN) + p.scalar("d", 1.0) + p.scalar("d", 2.0)
    })
    .unwrap_err();
    let redeclared = |name: &str| ExprError::Redeclared { name: name.to_owned() };
    let want = [
        redeclared("y"),
        redeclared("y"),
        redeclared("y"),
        ExprError::Name { name: "1".to_owned() },
        ExprError::Default { name: "z".to_owned() },
        redeclared("d"),
    ];
    assert_eq!(errors.0, want);
    assert_eq!(errors.to_string().lines().count(), 6);
}

#[test]
fn a_parameter_gets_another_name_if_it_is_free() {
    let trace = score!(|s, _, p| s / p.scalar("cap", 30.0) + p.tensor("bias", [Axis::K], F32));
    let renamed = trace.rename("cap", "limit").unwrap();
    alike(&renamed, &score!(|s, _, p| s / p.scalar("limit", 30.0) + p.tensor("bias", [Axis::K], F32)));
    alike(&renamed.rename("limit", "cap").unwrap(), &trace);
    alike(&trace.rename("cap", "cap").unwrap(), &trace);
    alike(&trace.rename("nobody", "limit").unwrap(), &trace);
    assert_eq!(trace.rename("cap", "bias").unwrap_err().0, [ExprError::Redeclared { name: "bias".to_owned() }]);
    for bad in ["score", "2", ""] {
        assert_eq!(trace.rename("cap", bad).unwrap_err().0, [ExprError::Name { name: bad.to_owned() }]);
    }
}

#[test]
fn what_values_depend_on() {
    let trace = score!(|s, at, p| {
        let table = p.tensor("t", [Axis::Batch, Axis::Head], F32);
        s * p.scalar("a", 1.0) + table * (at.k - at.seq_q).to_f32()
    });
    let all = trace.depends();
    let last = all[trace.roots()[0].index()];
    assert!(last.score && last.scalar && last.tensor && !last.is_uniform());
    assert_eq!(last.axes, Axes::from([Axis::Batch, Axis::Head, Axis::K]));
    let uniform: Vec<String> = trace.ids().filter(|id| all[id.index()].is_uniform()).map(|id| format!("{:?}", trace.node(id))).collect();
    assert_eq!(uniform.len(), 2, "the scalar and the extent: {uniform:?}");
    assert!(trace.uses_index(Axis::K) && !trace.uses_index(Axis::Q));
}

#[test]
fn functions_have_the_types_that_they_say() {
    let mut b = Builder::new();
    let (s, q) = (b.score(), b.index(Axis::Q));
    let (lt, whole, float) = (b.binary(Binary::Lt, s, s), b.unary(Unary::ToI32, s), b.unary(Unary::ToF32, q));
    let not = b.unary(Unary::Not, lt);
    let types = [s, q, lt, whole, float, not].map(|id| b.ty(id).to_string());
    assert_eq!(types, ["f32", "i32", "bool", "i32", "f32", "bool"]);
}
