//! `language`: prints everything that a score_mod or a mask may contain.

use crate::exit::{Answer, Failure, Outcome};
use crate::table::Table;
use sdpa::expr::{Axis, Binary, Kind, Made, Spelling, Type, Unary};
use sdpa::library::{MASKS, Named, SCORE_MODS};
use serde::Serialize;

/// A word or sign, and its meaning.
#[derive(Serialize)]
struct Word {
    written: String,
    about: String,
}

impl Word {
    fn new(written: impl Into<String>, about: impl Into<String>) -> Word {
        Word { written: written.into(), about: about.into() }
    }
}

/// Only on the command line, because a trace cannot contain the table's values.
const T5: &str = "t5:BUCKETS,FAR[,both]";

#[derive(Serialize)]
struct Language {
    statements: Vec<Word>,
    values: Vec<Word>,
    /// From the lowest to the highest precedence.
    operators: Vec<Word>,
    functions: Vec<Word>,
    score_mods: Vec<Word>,
    masks: Vec<Word>,
}

fn takes(kind: Kind) -> &'static str {
    match kind {
        Kind::Number => "Takes f32 or i32.",
        Kind::Real => "Takes f32.",
        Kind::Compare => "Takes f32 or i32; the result is a bool.",
        Kind::Logic => "Takes bools.",
        Kind::Cast(Type::I32, _) => "Takes i32.",
        Kind::Cast(Type::F32 | Type::Bool, _) => "Takes f32.",
    }
}

fn words(about: &str, kind: Kind) -> String {
    format!("{} {}", about, takes(kind))
}

fn functions() -> Vec<Word> {
    let call = |spelling, of: &str, about: &str, kind| match spelling {
        Spelling::Call(name) => Some(Word::new(format!("{name}({of})"), words(about, kind))),
        Spelling::Infix(..) | Spelling::Prefix(_) => None,
    };
    let unary = Unary::ALL.iter().filter_map(|f| call(f.spelling(), "x", f.about(), f.kind()));
    let binary = Binary::ALL.iter().filter_map(|f| call(f.spelling(), "x, y", f.about(), f.kind()));
    let made = Made::ALL.iter().map(|f| {
        let of = if f.arguments() == 3 { "x, low, high" } else { "x" };
        Word::new(format!("{}({of})", f.name()), words(f.about(), f.kind()))
    });
    let select = Word::new("select(c, x, y)", "`x` if `c` is true, else `y`. Takes a bool and two values of the same type.");
    unary.chain(binary).chain(made).chain([select]).collect()
}

fn operators() -> Vec<Word> {
    let mut infix: Vec<(u8, &str, String)> = Vec::new();
    for f in Binary::ALL {
        if let Spelling::Infix(sign, binds) = f.spelling() {
            infix.push((binds, sign, words(f.about(), f.kind())));
        }
    }
    infix.sort_by_key(|(binds, ..)| *binds);
    let prefix = Unary::ALL.iter().filter_map(|f| match f.spelling() {
        Spelling::Prefix(sign) => Some(Word::new(format!("{sign}x"), words(f.about(), f.kind()))),
        Spelling::Call(_) | Spelling::Infix(..) => None,
    });
    infix.into_iter().map(|(_, sign, about)| Word::new(format!("x {sign} y"), about)).chain(prefix).collect()
}

fn named<T>(names: &[Named<T>]) -> Vec<Word> {
    names.iter().map(|n| Word::new(n.spelling, n.about)).collect()
}

impl Language {
    fn new() -> Language {
        let index = |name: &str| Word::new(name, format!("the position of the score along the {name} axis, from 0; i32"));
        let indices = Axis::ALL.iter().map(|a| index(a.name()));
        let extents = Axis::ALL.iter().map(|a| Word::new(a.extent_name(), format!("the extent of the {} axis; i32", a.name())));
        let score = Word::new("score", "q·kᵀ * scale, or the result of the previous score_mod; f32; only in score_mods");
        let constants = [("true, false", "bool"), ("inf, nan", "f32")];
        let constants = constants.into_iter().map(|(text, about)| Word::new(text, about));
        let numbers = [Word::new("3", "i32; converted to f32 in an operation with an f32"), Word::new("3.0, 1e-3", "f32")];
        Language {
            statements: vec![
                Word::new("scalar NAME = NUMBER;", "declares an f32 that each call may set (--param NAME=VALUE); NUMBER is its default"),
                Word::new(
                    "tensor NAME[AXES]: TYPE;",
                    "declares a tensor, read at the position of the score; AXES are some of batch, head, q, k; \
                     TYPE is f32, f16, bf16, i32 or bool",
                ),
                Word::new("let NAME = VALUE;", "names a value"),
                Word::new("# ...", "a comment that ends with the line"),
                Word::new(
                    "VALUE",
                    "the result, at the end: an f32 for a score_mod, a bool for a mask; a score_mod may end with VALUE, VALUE: \
                     the second is its gradient, which may read upstream, the derivative of the loss by the modified score",
                ),
            ],
            values: [score].into_iter().chain(indices).chain(extents).chain(constants).chain(numbers).collect(),
            operators: operators(),
            functions: functions(),
            score_mods: named(SCORE_MODS)
                .into_iter()
                .chain([Word::new(T5, "score + T5's bias by relative position, from the tensor t5 (query heads, BUCKETS)")])
                .collect(),
            masks: named(MASKS),
        }
    }

    fn text(&self) -> String {
        let mut table = Table::default();
        let parts = [
            ("statements", &self.statements),
            ("values", &self.values),
            ("operators, from the lowest to the highest precedence", &self.operators),
            ("functions", &self.functions),
            ("named score_mods; NAME[OLD=NEW] renames the parameter OLD to NEW", &self.score_mods),
            ("named masks; |, & and ! combine them with each other and with expressions", &self.masks),
        ];
        for (n, (title, words)) in parts.into_iter().enumerate() {
            table.title(if n > 0 { format!("\n{title}") } else { title.to_owned() });
            words.iter().for_each(|word| table.row(format!("  {}", word.written), word.about.clone()));
        }
        table.render()
    }
}

pub(crate) const SCORE_MOD_HELP: &str = "Apply this function to the scaled scores; repeatable, in order";
pub(crate) const MASK_HELP: &str = "Mask out keys; repeatable: a query attends to a key if every mask allows it";

/// Returns the long help of `--score-mod`.
pub(crate) fn score_mod_help() -> String {
    format!(
        "{SCORE_MOD_HELP}\n\nA name, an expression, or @FILE with an expression; `cargo sdpa language` prints the grammar. \
         Names: {}, {T5}.",
        spellings(SCORE_MODS)
    )
}

/// Returns the long help of `--mask`.
pub(crate) fn mask_help() -> String {
    format!(
        "{MASK_HELP}\n\nNames and expressions, combined with |, & and !, or @FILE with an expression; `cargo sdpa language` prints the \
         grammar. `array` without axes reads the tensor mask of the input file along the axes that it has there. Names: none, {}.",
        spellings(MASKS)
    )
}

fn spellings<T>(names: &[Named<T>]) -> String {
    names.iter().map(|named| named.spelling).collect::<Vec<_>>().join(", ")
}

/// Runs the command `language` and returns its output.
pub(crate) fn run(json: bool) -> Result<Answer, Failure> {
    let language = Language::new();
    Answer::new(json, &language, || language.text(), Outcome::Good)
}
