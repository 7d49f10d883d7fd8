//! The text form of traces: printed texts parse, and other texts give errors with a position.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sdpa_core::DType;
use sdpa_core::expr::{
    Axes, Axis, Binary, Builder, Const, Declared, ExprError, F16, F32, Kind, NodeId, ParamKind, Place, Precision, Trace, Type, Unary,
};

fn read(text: &str) -> Trace {
    text.parse().unwrap_or_else(|e| panic!("{text:?}: {e}"))
}

/// Returns the position and the message of a syntax error.
fn place(text: &str) -> (usize, usize, String) {
    match text.parse::<Trace>() {
        Ok(trace) => panic!("{text:?} was read as {trace}"),
        Err(errors) => match &errors.0[..] {
            [ExprError::Syntax { line, column, rule }] => (*line, *column, rule.clone()),
            other => panic!("{text:?}: {other:?}"),
        },
    }
}

#[test]
fn spellings_of_one_thing() {
    let spellings = [
        "scalar cap = 30.0; tensor slopes[head]: f32; tanh(score / cap) * cap + slopes * f32(k - q)",
        "scalar cap = 30;\ntensor slopes [ head ] : f32 ;\n(tanh((score)/cap)*cap)+(slopes*f32(k-q));\n",
        "# a comment ( [ ; at the end\ntensor slopes[head,]: f32; let d = f32(k - q); scalar cap = 3e1; # more\n let x = tanh(score / cap); x * cap + slopes * d",
    ];
    for text in spellings {
        assert_eq!(read(text), read(spellings[0]), "{text}");
    }
    assert_eq!(read(spellings[1]).to_string(), spellings[0]);
    for (text, same) in [
        ("score + 2", "score + 2.0"),
        ("2 * score", "2.0 * score"),
        ("pow(score, 2)", "pow(score, 2.0)"),
        ("exp(1) * score", "exp(1.0) * score"),
        ("select(q < k, score, 0)", "select(q < k, score, 0.0)"),
        ("-2147483648 + q", "(-2147483647 - 1) + q"),
        ("score - -1.5", "score - (-1.5)"),
        ("1 - 2 - 3 + q", "-4 + q"),
        ("q - k - 3", "(q - k) - 3"),
        ("q < k & k < 3 | q == 1", "((q < k) & (k < 3)) | (q == 1)"),
    ] {
        assert_eq!(read(text), read(same), "{text}");
    }
    assert!(place("!q < k").2.contains("! does not take i32"), "a prefix binds tighter than a comparison");
    let two = read("let t = score * 2.0; t, upstream * 2.0");
    assert_eq!((two.roots().len(), two.to_string()), (2, "score * 2.0, upstream * 2.0".to_owned()));
}

#[test]
fn tables_are_read_at_places_within_them() {
    let flat = read("table t[3, 5]: f16; score + t[min(max(head, 0), 2) * 5 + min(max(k - q, 0), 4)]");
    assert_eq!(read("table t[3, 5]: f16; score + t[head, k - q]"), flat);
    let by_closure = Trace::of_score(|score, at, p| score + p.table("t", [3, 5], F16).at([at.head, at.k - at.q])).unwrap();
    assert_eq!((&by_closure, by_closure.to_string().parse().as_ref()), (&flat, Ok(&flat)));
    assert!(flat != read("table t[5, 3]: f16; score + t[min(max(head, 0), 2) * 5 + min(max(k - q, 0), 4)]"), "extents count");
    // Element n of each table is n.
    let at = |text: &str, [head, q, k]: [i64; 3]| {
        let place = Place { score: 0.0, upstream: 0.0, index: [0, head, q, k], extents: [1, 9, 9, 9], params: &[] };
        read(text).eval_reading(&place, Precision::F32, |_, n| n as f64)[0]
    };
    for (text, index, want) in [
        ("table t[3, 5]: f32; t[head, k - q]", [1, 2, 5], 8.0),
        ("table t[3, 5]: f32; t[head, k - q]", [7, 0, 8], 14.0),
        ("table t[3, 5]: f32; t[head - 4, k - q]", [1, 8, 0], 0.0),
        ("table t[3, 5]: f32; t[k - q]", [0, 0, 7], 7.0),
        ("table t[3, 5]: f32; t[k - q - 100]", [0, 0, 7], 0.0),
        ("table t[3, 5]: f32; t[k - q + 100]", [0, 0, 7], 14.0),
        ("table t[2, 3, 4, 5]: f32; t[1, head, q, k]", [2, 3, 4], 119.0),
        ("table t[4]: i32; table u[4]: f32; u[t[k] - 1]", [0, 0, 3], 2.0),
        ("table t[1]: bool; select(t[k], 2.0, 3.0)", [0, 0, 3], 3.0),
    ] {
        assert_eq!(at(text, index), want, "{text} at {index:?}");
    }
    for (text, rule) in [
        ("table t[]: f32; t[q]", "one to four extents"),
        ("table t[1, 1, 1, 1, 1]: f32; t[q]", "one to four extents"),
        ("table t[3, 0]: f32; t[q]", "at least 1"),
        ("table t[65536, 32768]: f32; t[q]", "2^31"),
        ("table t[q]: f32; t[q]", "expected an extent"),
        ("table t[3, 5]: f64; t[q]", "expected an element type"),
        ("table t[3, 5, 2]: f32; t[q, k]", "t: got 2 indices, expected one (a position in memory) or 3 (one per extent)"),
        ("table t[3]: f32; t[f32(q)]", "got an index of type f32, expected i32"),
        ("table t[3]: f32; score + t", "expected \"[\""),
        ("table t[3]: f32; tensor t[q]: f32; score", "already declared or reserved"),
        ("tensor t[q]: f32; table t[3]: f32; score", "already declared or reserved"),
        ("table score[3]: f32; score", "already declared or reserved"),
    ] {
        assert!(place(text).2.contains(rule), "{text}: {:?}", place(text));
    }
    let wrong = Trace::of_score(|score, at, p| score + p.table("t", [0], F32).at([at.q]) + p.table("u", [2, 2, 2], F32).at([at.q, at.k]));
    let [extents, indices] = [
        ExprError::Extents { name: "t".to_owned(), rule: "expected extents of at least 1".to_owned() },
        ExprError::Indices { name: "u".to_owned(), given: 2, extents: 3 },
    ];
    assert_eq!(wrong.unwrap_err().0, [extents, indices]);
}

#[test]
fn numbers_are_read_back_to_the_bit() {
    for x in [
        0.0,
        -0.0,
        1.0,
        -1.5,
        0.1,
        1e-45,
        -1e-40,
        f32::MIN_POSITIVE,
        1e30,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        16_777_217.0,
    ] {
        let trace = Trace::of_score(|s, _, _| s * x - x).unwrap();
        assert_eq!(read(&trace.to_string()), trace, "{x:e}: {trace}");
    }
    for n in [0, 1, -1, i32::MAX, i32::MIN, i32::MIN + 1] {
        let trace = Trace::of_score(|s, at, _| s + (n - at.q * n).to_f32()).unwrap();
        assert_eq!(read(&trace.to_string()), trace, "{n}: {trace}");
    }
    for x in [0.1f32, 1e-45, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, -0.0] {
        let trace = Trace::of_score(|s, _, p| s * p.scalar("x", x)).unwrap();
        assert_eq!(read(&trace.to_string()).params()[0].default.map(f32::to_bits), Some(x.to_bits()));
    }
}

#[test]
fn shared_values_get_names_that_no_parameter_has() {
    let trace = Trace::of_score(|s, _, p| {
        let (a, b) = (s * p.scalar("t1", 1.0), s * p.scalar("t2", 1.0) + p.scalar("t1_", 1.0));
        a * a + b * b
    });
    let trace = trace.unwrap();
    assert_eq!(read(&trace.to_string()), trace, "{trace}");
    assert_eq!(trace.to_string().matches("let ").count(), 2);
}

/// Printed texts parse, however deep they are.
#[test]
fn long_chains_are_read_back() {
    for n in [10, 150, 199, 200, 201, 1000] {
        let calls = Trace::of_score(|s, _, _| (0..n).fold(s, |x, _| x.sin())).unwrap();
        let left = Trace::of_score(|s, _, _| (0..n).fold(s, |x, i| x - i as f32)).unwrap();
        let right = Trace::of_score(|s, _, _| (0..n).fold(s, |x, i| i as f32 - x)).unwrap();
        let signs = Trace::of_score(|s, _, _| (0..n).fold(s, |x, _| -x)).unwrap();
        for trace in [calls, left, right, signs] {
            assert_eq!(read(&trace.to_string()), trace, "{n}");
        }
    }
}

#[test]
fn files_hold_the_text() {
    let trace = Trace::of_score(|s, at, p| s + p.tensor("slopes", [Axis::Head], sdpa_core::expr::F32) * (at.k - at.q).to_f32()).unwrap();
    let json = serde_json::to_string(&trace).unwrap();
    assert_eq!(json, "\"tensor slopes[head]: f32; score + slopes * f32(k - q)\"");
    assert_eq!(serde_json::from_str::<Trace>(&json).unwrap(), trace);
    assert!(serde_json::from_str::<Trace>("\"score +\"").is_err_and(|e| e.to_string().contains("1:8")));
}

#[test]
fn errors_say_where() {
    for (text, line, column, said) in [
        ("", 1, 1, "expected a value, found the end"),
        ("score +", 1, 8, "expected a value, found the end"),
        ("score score", 1, 7, "expected an operator or the end"),
        ("score\n  + nope", 2, 5, "\"nope\" is not declared"),
        ("nope(1)", 1, 1, "there is no function \"nope\""),
        ("score $ 2", 1, 7, "unexpected character '$'"),
        ("score + é", 1, 9, "unexpected character 'é'"),
        ("score ≤ 2", 1, 7, "unexpected character '≤'"),
        ("(score", 1, 7, "expected \")\""),
        ("score)", 1, 6, "expected an operator or the end"),
        ("q + 1.5", 1, 3, "+ does not take i32 and f32; f32(…) and i32(…) convert"),
        ("q + score", 1, 3, "+ does not take i32 and f32"),
        ("score & score", 1, 7, "& does not take f32 and f32"),
        ("true + true", 1, 6, "+ does not take bool and bool"),
        ("true < false", 1, 6, "< does not take bool and bool"),
        ("!score", 1, 1, "! does not take f32"),
        ("-true", 1, 1, "- does not take bool"),
        ("sqrt(q)", 1, 1, "sqrt does not take i32"),
        ("f32(score)", 1, 1, "f32 does not take f32"),
        ("i32(q)", 1, 1, "i32 does not take i32"),
        ("pow(q, k)", 1, 1, "pow does not take i32 and i32"),
        ("exp(score, 2)", 1, 1, "exp takes one value"),
        ("1 + pow(score)", 1, 5, "pow takes two values"),
        ("select(q < k, 1)", 1, 1, "select takes a condition and two values"),
        ("select(q, 1, 2)", 1, 1, "select takes a bool and two values of one type, not i32, i32, i32"),
        ("select(true, q, score)", 1, 1, "not bool, i32, f32"),
        ("99999999999999999999", 1, 1, "that fits 32 bits"),
        ("score + 2147483648", 1, 9, "that fits 32 bits"),
        ("q - 2147483649", 1, 5, "that fits 32 bits"),
        ("1e39 * score", 1, 1, "that fits 32 bits"),
        ("1.2.3", 1, 1, "that fits 32 bits"),
        (".", 1, 1, "that fits 32 bits"),
        ("2e", 1, 1, "that fits 32 bits"),
        ("tensor a[x]: f32; a", 1, 10, "got \"x\", expected an axis"),
        ("tensor a[q]: f64; a", 1, 14, "got \"f64\", expected an element type"),
        ("tensor a[q]; a", 1, 12, "expected \":\""),
        ("tensor a: f32; a", 1, 9, "expected \"[\""),
        ("tensor a[q k]: f32; a", 1, 12, "expected \",\""),
        ("tensor [q]: f32; 1", 1, 8, "expected a name"),
        ("scalar = 2; 1", 1, 8, "expected a name"),
        ("scalar", 1, 7, "expected a name, found the end"),
        ("scalar a = score; a", 1, 12, "expected a constant number as the default of the scalar"),
        ("scalar a = true; a", 1, 12, "expected a constant number as the default of the scalar"),
        ("scalar a = 1\nscore", 2, 1, "expected \";\""),
        ("scalar a = 1; scalar a = 1; a", 1, 22, "the name a is already declared or reserved"),
        ("scalar a = 1; tensor a[q]: f32; a", 1, 22, "the name a is already declared or reserved"),
        ("let score = 1; q", 1, 5, "the name score is already declared or reserved"),
        ("let x = 1; let x = 2; x", 1, 16, "the name x is already declared or reserved"),
        ("let x 1; x", 1, 7, "expected \"=\""),
        ("score, ", 1, 8, "expected a value"),
        ("score;;", 1, 7, "expected an operator or the end"),
        ("q = k", 1, 3, "expected an operator or the end"),
        ("exp(", 1, 5, "expected a value"),
        ("exp(score", 1, 10, "expected \",\""),
    ] {
        let (l, c, rule) = place(text);
        assert_eq!((l, c), (line, column), "{text:?}: {rule}");
        assert!(rule.contains(said), "{text:?}: {rule:?} does not say {said:?}");
    }
}

#[test]
fn declarations_keep_their_rules_in_texts() {
    let name = |name: &str| vec![ExprError::Name { name: name.to_owned() }];
    assert_eq!("scalar exp = 1; exp".parse::<Trace>().unwrap_err().0, name("exp"));
    let long = "a".repeat(65);
    assert_eq!(format!("scalar {long} = 1; {long}").parse::<Trace>().unwrap_err().0, name(&long));
    assert_eq!("scalar x = nan; x".parse::<Trace>().unwrap_err().0, [ExprError::Default { name: "x".to_owned() }]);
}

#[test]
fn what_is_too_deep_or_too_long_is_an_error() {
    let deep = |open: &str, close: &str, n: usize| format!("{}score{}", open.repeat(n), close.repeat(n));
    for (open, close) in [("(", ")"), ("exp(", ")"), ("-", ""), ("1.0 - (", ")"), ("select(q < k, 1.0, ", ")"), ("1.0 + -(", ")")] {
        assert!(deep(open, close, 20).parse::<Trace>().is_ok(), "{open}");
        for n in [1000, 20_000] {
            assert!(place(&deep(open, close, n)).2.contains("nested parentheses"), "{open}");
        }
        assert!(deep(open, "", 20_000).parse::<Trace>().is_err(), "{open}");
    }
    assert!(place(&format!("select({}q < k, score, 1.0)", "!".repeat(20_000))).2.contains("nested parentheses"));
    // A long chain of operators is accepted, because only nesting counts as depth.
    assert!(format!("score{}", " + 1.0 * score".repeat(20_000)).parse::<Trace>().is_ok());
    assert!(place(&format!("score{}", " ".repeat(1 << 20))).2.contains("bytes"));
}

/// One node of a random tree: the function, and numbers that choose operands.
type Step = (u8, u16, u16, u16, u32);

fn leaf(b: &mut Builder, kind: u8, bits: u32) -> NodeId {
    const NAMES: [&str; 6] = ["a", "b_2", "t1", "t2", "t1_", "Slopes"];
    const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::Bool];
    // The kind of a parameter follows from its name, so that a name always has the same declaration.
    let name = NAMES[bits as usize % NAMES.len()];
    match kind % 8 {
        0 => b.score(),
        1 => b.upstream(),
        2 => b.index(Axis::ALL[bits as usize % 4]),
        3 => b.extent(Axis::ALL[bits as usize % 4]),
        4 => b.konst(Const::f32(f32::from_bits(bits))),
        5 => b.konst(if bits.is_multiple_of(5) { Const::Bool(bits.is_multiple_of(2)) } else { Const::I32(bits as i32) }),
        6 if name.len() == 1 => b.param(Declared::scalar(name, 0.1)),
        6 | 7 => {
            let at = name.len() + usize::from(name.as_bytes()[name.len() - 1]);
            let axes: Axes = Axis::ALL.into_iter().filter(|a| (at >> a.place()) & 1 == 1).collect();
            let kind = ParamKind::Tensor { axes, dtype: TYPES[at % 5] };
            let declared = Declared { name: if name.len() == 1 { "c".to_owned() } else { name.to_owned() }, kind, default: None };
            b.param(declared)
        }
        _ => unreachable!("below 8"),
    }
}

/// Returns an existing value of this type, or a new constant if there is none.
fn pick(b: &mut Builder, all: &[NodeId], ty: Type, which: u16) -> NodeId {
    let fit: Vec<NodeId> = all.iter().copied().filter(|&id| b.ty(id) == ty).collect();
    match fit.len() {
        0 => b.konst(match ty {
            Type::F32 => Const::f32(-0.5),
            Type::I32 => Const::I32(-3),
            Type::Bool => Const::Bool(true),
        }),
        n => fit[which as usize % n],
    }
}

fn random_trace(steps: &[Step], roots: u16) -> Trace {
    let mut b = Builder::new();
    let mut all: Vec<NodeId> = Vec::new();
    for &(kind, x, y, c, bits) in steps {
        let types = [Type::F32, Type::I32, Type::Bool];
        let functions = Unary::ALL.len() + Binary::ALL.len();
        let which = kind as usize % (functions + 12);
        let number = |real: bool| if real || x % 3 != 0 { Type::F32 } else { Type::I32 };
        let of = |kind: Kind| match kind {
            Kind::Number | Kind::Compare => number(false),
            Kind::Real => Type::F32,
            Kind::Logic => Type::Bool,
            Kind::Cast(from, _) => from,
        };
        let made = if let Some(&f) = Unary::ALL.get(which) {
            let x = pick(&mut b, &all, of(f.kind()), x);
            b.unary(f, x)
        } else if let Some(&f) = which.checked_sub(Unary::ALL.len()).and_then(|n| Binary::ALL.get(n)) {
            let ty = of(f.kind());
            let (x, y) = (pick(&mut b, &all, ty, x), pick(&mut b, &all, ty, y));
            b.binary(f, x, y)
        } else if which < functions + 4 {
            let ty = types[bits as usize % 3];
            let (c, x, y) = (pick(&mut b, &all, Type::Bool, c), pick(&mut b, &all, ty, x), pick(&mut b, &all, ty, y));
            b.select(c, x, y)
        } else {
            leaf(&mut b, kind, bits)
        };
        all.push(made);
    }
    let roots: Vec<NodeId> = (0..1 + roots as usize % 3).filter_map(|n| all.len().checked_sub(1 + n)).map(|n| all[n]).collect();
    b.finish(&roots).unwrap()
}

fn steps(n: usize) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(any::<Step>(), 1..n)
}

/// The words of the language, and some others.
fn soup() -> impl Strategy<Value = String> {
    let words = [
        "score",
        "upstream",
        "q",
        "k",
        "head",
        "heads_q",
        "scalar",
        "tensor",
        "let",
        "select",
        "exp",
        "f32",
        "i32",
        "min",
        "true",
        "inf",
        "nan",
        "x",
        "t1",
        "bf16",
        "bool",
        "(",
        ")",
        "[",
        "]",
        ",",
        ";",
        ":",
        "=",
        "==",
        "<",
        "<=",
        "&",
        "|",
        "!",
        "+",
        "-",
        "*",
        "/",
        "%",
        "0",
        "1",
        "2.5",
        "1e9",
        "2147483648",
        "#",
        "\n",
        "é",
        ".",
        "\"",
    ];
    proptest::collection::vec(proptest::sample::select(words.to_vec()), 0..24).prop_map(|w| w.join(" "))
}

/// Parses a text that may be wrong: it must not panic, and an error must be inside the text.
fn survives(text: &str) -> Result<(), TestCaseError> {
    match text.parse::<Trace>() {
        Ok(trace) => {
            let printed = trace.to_string();
            prop_assert_eq!(printed.parse::<Trace>(), Ok(trace), "{}", printed);
        }
        Err(errors) => {
            prop_assert!(!errors.0.is_empty() && !errors.to_string().is_empty());
            for error in &errors.0 {
                if let ExprError::Syntax { line, column, rule } = error {
                    let there = text.split('\n').nth(line - 1);
                    prop_assert!(there.is_some_and(|l| (1..=l.len() + 1).contains(column)) && !rule.is_empty(), "{:?}: {}", text, error);
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn what_is_printed_is_read_back(steps in steps(24), roots: u16) {
        let trace = random_trace(&steps, roots);
        let text = trace.to_string();
        let back = text.parse::<Trace>();
        prop_assert_eq!(back.as_ref(), Ok(&trace), "{}", text);
        let back = back.unwrap();
        prop_assert_eq!(back.to_string(), text);
        for (a, b) in back.params().iter().zip(trace.params()) {
            prop_assert_eq!(a.default.map(f32::to_bits), b.default.map(f32::to_bits));
        }
    }

    #[test]
    fn garbage_is_an_error(text in "\\PC{0,40}") {
        survives(&text)?;
    }

    #[test]
    fn words_in_any_order_are_read_or_refused(text in soup()) {
        survives(&text)?;
    }

    #[test]
    fn texts_that_were_good_are_read_or_refused(steps in steps(16), edits in proptest::collection::vec((any::<prop::sample::Index>(), 0..3u8, any::<char>()), 1..4)) {
        let mut text: Vec<char> = random_trace(&steps, 0).to_string().chars().collect();
        for (at, edit, c) in edits {
            let at = at.index(text.len().max(1));
            match edit {
                0 if at < text.len() => { text.remove(at); }
                1 if at < text.len() => text[at] = if c.is_ascii() { c } else { '(' },
                _ => text.insert(at.min(text.len()), if c.is_ascii() { c } else { '-' }),
            }
        }
        survives(&text.into_iter().collect::<String>())?;
    }
}
