//! The text form of a trace: declarations, named values that are used more than once, and roots.
//!
//! ```text
//! scalar cap = 30.0; tensor slopes[head]: f32; let t1 = score / cap; tanh(t1) * cap + slopes * f32(k - q)
//! ```
//!
//! A text has one line or several; `#` begins a comment. Integers are i32, numbers with a point or an exponent f32; an integer constant next to an
//! f32 becomes f32. Binding strength, from loosest to tightest: `|`, `&`, comparisons, `+ -`, `* / %`, `- !`.

use super::made::Made;
use super::node::{Axis, Binary, Const, Node, Spelling, Unary};
use super::params::ParamKind;
use super::trace::Trace;
use std::fmt;

/// Binding strengths of a prefix, and of a text that never needs parentheses.
pub(super) const PREFIX: u8 = 6;
const ATOM: u8 = 7;

/// A value nested this deep gets a name, so that every printed text can be parsed.
const NESTED: usize = 40;

/// Returns whether a word is reserved: no parameter or value may have it as its name.
pub(super) fn reserved(word: &str) -> bool {
    const WORDS: [&str; 12] = ["score", "upstream", "scalar", "tensor", "table", "let", "true", "false", "inf", "nan", "select", "bool"];
    let called = |spelling| match spelling {
        Spelling::Call(name) => name == word,
        Spelling::Infix(..) | Spelling::Prefix(_) => false,
    };
    WORDS.contains(&word)
        || Axis::ALL.iter().any(|a| a.name() == word || a.extent_name() == word)
        || Unary::ALL.iter().any(|f| called(f.spelling()))
        || Binary::ALL.iter().any(|f| called(f.spelling()))
        || Made::ALL.iter().any(|f| f.name() == word)
}

/// Prints a float so that parsing returns the same one.
fn float(x: f32) -> String {
    if x.is_nan() {
        "nan".to_owned()
    } else if x.is_infinite() {
        if x > 0.0 { "inf".to_owned() } else { "-inf".to_owned() }
    } else {
        format!("{x:?}")
    }
}

fn constant(c: Const) -> String {
    match c {
        Const::F32(bits) => float(f32::from_bits(bits)),
        Const::I32(x) => x.to_string(),
        Const::Bool(x) => x.to_string(),
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for p in self.params() {
            match p.kind {
                ParamKind::Scalar => write!(f, "scalar {} = {}; ", p.name, float(p.default.unwrap_or(f32::NAN)))?,
                ParamKind::Tensor { axes, dtype } => {
                    let what = if axes.is_table() { "table" } else { "tensor" };
                    write!(f, "{what} {}[{axes}]: {dtype}; ", p.name)?;
                }
            }
        }
        let mut uses = vec![0usize; self.nodes().len()];
        for x in self.nodes().iter().flat_map(|n| n.operands()).chain(self.roots().iter().copied()) {
            uses[x.index()] += 1;
        }
        // For each value: its text, and the binding strength of the outermost operator in it.
        let mut texts: Vec<(String, u8)> = Vec::with_capacity(uses.len());
        let mut depths: Vec<usize> = Vec::with_capacity(uses.len());
        let mut lets = 0;
        for id in self.ids() {
            let depth = self.depth(id, &texts, &depths);
            // Move a text that is used once: copies would make a chain of operators quadratic.
            let mut within = |x: super::NodeId, least: u8| {
                let (text, binds) = &mut texts[x.index()];
                let text = if uses[x.index()] > 1 { text.clone() } else { std::mem::take(text) };
                if *binds < least { format!("({text})") } else { text }
            };
            let (text, binds) = match self.node(id) {
                Node::Score => ("score".to_owned(), ATOM),
                Node::Upstream => ("upstream".to_owned(), ATOM),
                Node::Index(axis) => (axis.name().to_owned(), ATOM),
                Node::Extent(axis) => (axis.extent_name().to_owned(), ATOM),
                Node::Param(p) => (self.params()[p.index()].name.clone(), ATOM),
                Node::Read(p, x) => (format!("{}[{}]", self.params()[p.index()].name, within(x, 0)), ATOM),
                Node::Const(c) => {
                    let text = constant(c);
                    let binds = if text.starts_with('-') { PREFIX } else { ATOM };
                    (text, binds)
                }
                Node::Unary(g, x) => match g.spelling() {
                    Spelling::Call(name) => (format!("{name}({})", within(x, 0)), ATOM),
                    // An operand that is a negative constant gets parentheses: the parser reads a sign directly before a number as part of the number.
                    Spelling::Prefix(sign) => (format!("{sign}{}", within(x, ATOM)), PREFIX),
                    Spelling::Infix(sign, binds) => (format!("{sign}{}", within(x, binds)), binds),
                },
                Node::Binary(g, x, y) => match g.spelling() {
                    Spelling::Infix(sign, binds) => {
                        let mut text = within(x, binds);
                        text.extend([" ", sign, " ", &within(y, binds + 1)]);
                        (text, binds)
                    }
                    Spelling::Call(name) | Spelling::Prefix(name) => (format!("{name}({}, {})", within(x, 0), within(y, 0)), ATOM),
                },
                Node::Select(c, x, y) => (format!("select({}, {}, {})", within(c, 0), within(x, 0), within(y, 0)), ATOM),
            };
            let made = self.node(id).operands().next().is_some();
            if made && (uses[id.index()] > 1 || depth > NESTED) {
                lets += 1;
                let name = self.fresh(lets);
                write!(f, "let {name} = {text}; ")?;
                texts.push((name, ATOM));
                depths.push(0);
            } else {
                texts.push((text, binds));
                depths.push(depth);
            }
        }
        let roots: Vec<&str> = self.roots().iter().map(|root| texts[root.index()].0.as_str()).collect();
        f.write_str(&roots.join(", "))
    }
}

impl Trace {
    /// Returns the nesting depth of a text. The first operand in a chain of operators does not add depth.
    fn depth(&self, id: super::NodeId, texts: &[(String, u8)], depths: &[usize]) -> usize {
        let (first, binds) = match self.node(id) {
            Node::Binary(g, x, _) => match g.spelling() {
                Spelling::Infix(_, binds) => (Some(x), binds),
                Spelling::Call(_) | Spelling::Prefix(_) => (None, 0),
            },
            Node::Score
            | Node::Upstream
            | Node::Index(_)
            | Node::Extent(_)
            | Node::Const(_)
            | Node::Param(_)
            | Node::Read(..)
            | Node::Unary(..)
            | Node::Select(..) => (None, 0),
        };
        let of = |x: super::NodeId| depths[x.index()] + usize::from(Some(x) != first || texts[x.index()].1 < binds);
        self.node(id).operands().map(of).max().unwrap_or(0)
    }

    /// Returns a name for the `n`th shared value that no parameter has.
    fn fresh(&self, n: usize) -> String {
        let mut name = format!("t{n}");
        while self.find(&name).is_some() {
            name.push('_');
        }
        name
    }
}

impl From<Trace> for String {
    fn from(trace: Trace) -> String {
        trace.to_string()
    }
}
