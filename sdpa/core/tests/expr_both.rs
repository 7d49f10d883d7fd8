//! Closures and texts have the same functions: checks every function of each table, for every type that it supports.

use sdpa_core::expr::{Axis, Binary, Kind, Made, Spelling, Trace, Unary};

fn of_score(text: &str) -> Trace {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn written(spelling: Spelling, operands: &[&str]) -> String {
    match (spelling, operands) {
        (Spelling::Call(name), _) => format!("{name}({})", operands.join(", ")),
        (Spelling::Prefix(sign), [x]) => format!("{sign}({x})"),
        (Spelling::Infix(sign, _), [x, y]) => format!("{x} {sign} {y}"),
        (Spelling::Prefix(_) | Spelling::Infix(..), _) => panic!("{spelling:?} of {operands:?}"),
    }
}

/// Traces a function of a score, of an integer as f32, and of a boolean.
macro_rules! real {
    ($score:ident => $value:expr) => {
        Trace::of_score(|$score, _, _| $value).unwrap()
    };
}
macro_rules! whole {
    ($at:ident => $value:expr) => {
        Trace::of_score(|_, $at, _| $value.to_f32()).unwrap()
    };
}
macro_rules! truth {
    ($at:ident => $value:expr) => {
        Trace::of_mask(|$at, _| $value).unwrap()
    };
}

#[test]
fn functions_of_one_value() {
    for &f in Unary::ALL {
        let (closures, operand): (Vec<Trace>, &str) = match f {
            Unary::Neg => (vec![real!(s => -s), whole!(at => (-at.q))], "score"),
            Unary::Abs => (vec![real!(s => s.abs()), whole!(at => at.q.abs())], "score"),
            Unary::Sqrt => (vec![real!(s => s.sqrt())], "score"),
            Unary::Rsqrt => (vec![real!(s => s.rsqrt())], "score"),
            Unary::Exp => (vec![real!(s => s.exp())], "score"),
            Unary::Log => (vec![real!(s => s.log())], "score"),
            Unary::Sin => (vec![real!(s => s.sin())], "score"),
            Unary::Cos => (vec![real!(s => s.cos())], "score"),
            Unary::Tanh => (vec![real!(s => s.tanh())], "score"),
            Unary::Erf => (vec![real!(s => s.erf())], "score"),
            Unary::Floor => (vec![real!(s => s.floor())], "score"),
            Unary::Ceil => (vec![real!(s => s.ceil())], "score"),
            Unary::Not => (vec![truth!(at => !at.q.lt(at.k))], "q < k"),
            Unary::ToF32 => (vec![whole!(at => at.q)], "q"),
            Unary::ToI32 => (vec![real!(s => s.to_i32().to_f32())], "score"),
        };
        let own = written(f.spelling(), &[operand]);
        let texts = match f.kind() {
            Kind::Number | Kind::Compare => vec![own, format!("f32({})", written(f.spelling(), &["q"]))],
            Kind::Real | Kind::Logic => vec![own],
            Kind::Cast(..) => vec![if f == Unary::ToI32 { format!("f32({own})") } else { own }],
        };
        assert_eq!(closures, texts.iter().map(|text| of_score(text)).collect::<Vec<_>>(), "{f:?}: {texts:?}");
        assert!(f.about().ends_with('.'), "{f:?}");
    }
}

#[test]
fn functions_of_two_values() {
    for &f in Binary::ALL {
        let closures: Vec<Trace> = match f {
            Binary::Add => vec![real!(s => s + 2.5), whole!(at => (at.q + at.k))],
            Binary::Sub => vec![real!(s => s - 2.5), whole!(at => (at.q - at.k))],
            Binary::Mul => vec![real!(s => s * 2.5), whole!(at => (at.q * at.k))],
            Binary::Div => vec![real!(s => s / 2.5), whole!(at => (at.q / at.k))],
            Binary::Mod => vec![real!(s => s % 2.5), whole!(at => (at.q % at.k))],
            Binary::Pow => vec![real!(s => s.pow(2.5))],
            Binary::Min => vec![real!(s => s.min(2.5)), whole!(at => at.q.min(at.k))],
            Binary::Max => vec![real!(s => s.max(2.5)), whole!(at => at.q.max(at.k))],
            Binary::Eq => vec![truth!(at => at.q.eq(at.k)), truth!(at => at.q.to_f32().eq(2.5))],
            Binary::Ne => vec![truth!(at => at.q.ne(at.k)), truth!(at => at.q.to_f32().ne(2.5))],
            Binary::Lt => vec![truth!(at => at.q.lt(at.k)), truth!(at => at.q.to_f32().lt(2.5))],
            Binary::Le => vec![truth!(at => at.q.le(at.k)), truth!(at => at.q.to_f32().le(2.5))],
            Binary::Gt => vec![truth!(at => at.q.gt(at.k)), truth!(at => at.q.to_f32().gt(2.5))],
            Binary::Ge => vec![truth!(at => at.q.ge(at.k)), truth!(at => at.q.to_f32().ge(2.5))],
            Binary::And => vec![truth!(at => at.q.lt(3) & at.k.lt(2))],
            Binary::Or => vec![truth!(at => at.q.lt(3) | at.k.lt(2))],
        };
        let of = |operands: [&str; 2]| written(f.spelling(), &operands);
        let texts = match f.kind() {
            Kind::Number => vec![of(["score", "2.5"]), format!("f32({})", of(["q", "k"]))],
            Kind::Real => vec![of(["score", "2.5"])],
            Kind::Compare => vec![of(["q", "k"]), of(["f32(q)", "2.5"])],
            Kind::Logic => vec![of(["q < 3", "k < 2"])],
            Kind::Cast(..) => Vec::new(),
        };
        assert_eq!(closures, texts.iter().map(|text| of_score(text)).collect::<Vec<_>>(), "{f:?}: {texts:?}");
        assert!(f.about().ends_with('.'), "{f:?}");
    }
}

#[test]
fn functions_that_are_made_of_others() {
    for &f in Made::ALL {
        let (closures, texts): (Vec<Trace>, [&str; 2]) = match f {
            Made::Clamp => {
                (vec![real!(s => s.clamp(-1.5, 2.0)), whole!(at => at.q.clamp(1, at.k))], ["clamp(score, -1.5, 2)", "f32(clamp(q, 1, k))"])
            }
            Made::Square => (vec![real!(s => s.square()), whole!(at => at.q.square())], ["square(score)", "f32(square(q))"]),
            Made::Sigmoid => (vec![real!(s => s.sigmoid()), real!(s => (s * 2.0).sigmoid())], ["sigmoid(score)", "sigmoid(score * 2)"]),
        };
        assert_eq!(closures, texts.map(of_score), "{f:?}");
        let few = vec!["score"; f.arguments() + 1].join(", ");
        let said = format!("{}({few})", f.name()).parse::<Trace>().unwrap_err().to_string();
        assert!(said.contains(&format!("{} takes", f.name())), "{said}");
        let truths = vec!["q < k"; f.arguments()].join(", ");
        let said = format!("select({}({truths}), score, score)", f.name()).parse::<Trace>().unwrap_err().to_string();
        assert!(said.contains("does not take bool"), "{said}");
        // The name of a function is reserved: no parameter may have it.
        assert!(Trace::of_score(|s, _, p| s + p.scalar(f.name(), 1.0)).is_err(), "{f:?}");
    }
    assert_eq!(of_score("clamp(q, 0, 2) * 1"), of_score("min(max(q, 0), 2) * 1"));
    assert!("clamp(score, q, 2)".parse::<Trace>().is_err());
}

#[test]
fn places_and_extents() {
    let closures = [
        whole!(at => at.batch),
        whole!(at => at.head),
        whole!(at => at.q),
        whole!(at => at.k),
        whole!(at => at.batches),
        whole!(at => at.heads_q),
        whole!(at => at.seq_q),
        whole!(at => at.seq_kv),
    ];
    let names = Axis::ALL.iter().map(|axis| axis.name()).chain(Axis::ALL.iter().map(|axis| axis.extent_name()));
    assert_eq!(closures.to_vec(), names.map(|name| of_score(&format!("f32({name})"))).collect::<Vec<_>>());
}

#[test]
fn names_that_are_nearly_right_are_told() {
    for (text, want) in [
        ("tahn(score)", "there is no function \"tahn\"; did you mean tanh?"),
        ("sigmoind(score)", "did you mean sigmoid?"),
        ("clam(score, 0, 1)", "did you mean clamp?"),
        ("scroe * 2.0", "\"scroe\" is not declared; did you mean score?"),
        ("scalar slope = 1.0; score * slop", "did you mean slope?"),
    ] {
        let said = text.parse::<Trace>().unwrap_err().to_string();
        assert!(said.contains(want), "{said}");
    }
    assert!(!"gelu(score)".parse::<Trace>().unwrap_err().to_string().contains("did you mean"));
}
