//! Reads the text form of a trace.

use super::build::Builder;
use super::made::Made;
use super::near::nearest;
use super::node::{Axis, Binary, Const, Kind, NodeId, ParamId, Spelling, Type, Unary};
use super::params::{Axes, Declared, ParamKind};
use super::text::PREFIX;
use super::trace::{ExprError, ExprErrors, Trace};
use crate::dtype::DType;
use std::collections::HashMap;
use std::str::FromStr;

/// Limits on the depth of parentheses and on the length of a text.
const DEPTH: usize = 200;
const LENGTH: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Int(i64),
    Float(f32),
    Sign(&'static str),
    End,
}

impl Token {
    fn said(&self) -> String {
        match self {
            Token::Word(w) => format!("{w:?}"),
            Token::Int(n) => n.to_string(),
            Token::Float(x) => format!("{x:?}"),
            Token::Sign(s) => format!("{s:?}"),
            Token::End => "the end".to_owned(),
        }
    }
}

/// Longer signs first, so that the longest one matches.
const SIGNS: [&str; 22] =
    ["==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "&", "|", "!", "(", ")", "[", "]", ",", ";", ":", "="];

struct Reader {
    tokens: Vec<(Token, usize)>,
    at: usize,
    builder: Builder,
    names: HashMap<String, NodeId>,
    tables: HashMap<String, ParamId>,
    depth: usize,
    lines: Vec<usize>,
}

type Read<T> = Result<T, ExprError>;

fn place(lines: &[usize], offset: usize) -> (usize, usize) {
    let line = lines.partition_point(|&start| start <= offset);
    (line, offset - lines[line - 1] + 1)
}

fn tokens(text: &str, lines: &[usize]) -> Read<Vec<(Token, usize)>> {
    let fail = |offset: usize, rule: String| {
        let (line, column) = place(lines, offset);
        Err(ExprError::Syntax { line, column, rule })
    };
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let c = bytes[at];
        let run = |keep: fn(u8) -> bool| rest.bytes().take_while(|&b| keep(b)).count();
        if c.is_ascii_whitespace() {
            at += 1;
        } else if c == b'#' {
            at += run(|b| b != b'\n');
        } else if c.is_ascii_alphabetic() || c == b'_' {
            let n = run(|b| b.is_ascii_alphanumeric() || b == b'_');
            tokens.push((Token::Word(rest[..n].to_owned()), at));
            at += n;
        } else if c.is_ascii_digit() || c == b'.' {
            let mut n = run(|b| b.is_ascii_digit() || b == b'.');
            if matches!(rest.as_bytes().get(n), Some(b'e' | b'E')) {
                n += 1;
                n += usize::from(matches!(rest.as_bytes().get(n), Some(b'+' | b'-')));
                n += rest[n..].bytes().take_while(u8::is_ascii_digit).count();
            }
            let number = &rest[..n];
            let token = if number.bytes().all(|b| b.is_ascii_digit()) {
                number.parse().ok().filter(|&x: &i64| x <= 1 << 31).map(Token::Int)
            } else {
                number.parse().ok().filter(|x: &f32| x.is_finite()).map(Token::Float)
            };
            let Some(token) = token else { return fail(at, format!("got {number:?}, expected a number that fits 32 bits")) };
            tokens.push((token, at));
            at += n;
        } else if let Some(sign) = SIGNS.iter().find(|s| rest.starts_with(**s)) {
            tokens.push((Token::Sign(sign), at));
            at += sign.len();
        } else {
            return fail(at, format!("unexpected character {:?}", rest.chars().next().unwrap_or(' ')));
        }
    }
    tokens.push((Token::End, text.len()));
    Ok(tokens)
}

impl Reader {
    fn new(text: &str) -> Read<Reader> {
        if text.len() > LENGTH {
            return Err(ExprError::Syntax { line: 1, column: 1, rule: format!("the text is too long, expected at most {LENGTH} bytes") });
        }
        let lines: Vec<usize> =
            std::iter::once(0).chain(text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1)).collect();
        let tokens = tokens(text, &lines)?;
        let mut builder = Builder::new();
        let mut names = HashMap::from([("score".to_owned(), builder.score()), ("upstream".to_owned(), builder.upstream())]);
        for axis in Axis::ALL {
            names.insert(axis.name().to_owned(), builder.index(axis));
            names.insert(axis.extent_name().to_owned(), builder.extent(axis));
        }
        for (name, value) in
            [("true", Const::Bool(true)), ("false", Const::Bool(false)), ("inf", Const::f32(f32::INFINITY)), ("nan", Const::f32(f32::NAN))]
        {
            names.insert(name.to_owned(), builder.konst(value));
        }
        Ok(Reader { tokens, at: 0, builder, names, tables: HashMap::new(), depth: 0, lines })
    }

    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        if token != Token::End {
            self.at += 1;
        }
        token
    }

    fn fail<T>(&self, rule: impl Into<String>) -> Read<T> {
        self.fail_at(self.at, rule)
    }

    fn fail_at<T>(&self, token: usize, rule: impl Into<String>) -> Read<T> {
        let (line, column) = place(&self.lines, self.tokens[token].1);
        Err(ExprError::Syntax { line, column, rule: rule.into() })
    }

    fn is(&self, sign: &str) -> bool {
        matches!(self.peek(), Token::Sign(s) if *s == sign)
    }

    fn expect(&mut self, sign: &str) -> Read<()> {
        if self.is(sign) {
            self.at += 1;
            return Ok(());
        }
        self.fail(format!("expected {sign:?}, found {}", self.peek().said()))
    }

    fn word(&mut self, what: &str) -> Read<String> {
        match self.next() {
            Token::Word(w) => Ok(w),
            other @ (Token::Int(_) | Token::Float(_) | Token::Sign(_) | Token::End) => {
                self.fail_at(self.at.saturating_sub(usize::from(other != Token::End)), format!("expected {what}, found {}", other.said()))
            }
        }
    }

    fn declare(&mut self, name: String, id: NodeId, token: usize) -> Read<()> {
        if self.tables.contains_key(&name) || self.names.insert(name.clone(), id).is_some() {
            return self.fail_at(token, format!("the name {name} is already declared or reserved; choose another name"));
        }
        Ok(())
    }

    fn scalar(&mut self) -> Read<()> {
        let token = self.at;
        let name = self.word("a name")?;
        self.expect("=")?;
        let value = self.at;
        let id = self.expression(0)?;
        let default = match (self.builder.constant(id), self.builder.ty(id)) {
            (Some(c), Type::F32 | Type::I32) => c.to_f64() as f32,
            (Some(_), Type::Bool) | (None, _) => return self.fail_at(value, "expected a constant number as the default of the scalar"),
        };
        let id = self.builder.param(Declared::scalar(&name, default));
        self.declare(name, id, token)
    }

    fn tensor(&mut self) -> Read<()> {
        let token = self.at;
        let name = self.word("a name")?;
        self.expect("[")?;
        let mut axes = Axes::NONE;
        while !self.is("]") {
            let at = self.at;
            let word = self.word("an axis")?;
            let Some(axis) = Axis::ALL.into_iter().find(|a| a.name() == word) else {
                return self.fail_at(at, format!("got {word:?}, expected an axis: batch, head, q or k"));
            };
            axes = axes.with(axis);
            if axis == Axis::Batch && self.is("+") {
                self.at += 1;
                if *self.peek() != Token::Int(1) {
                    return self.fail("expected 1 after batch +: the axis of cu_seqlens is batch + 1");
                }
                self.at += 1;
                axes = axes.union(Axes::BOUNDARIES);
            }
            if !self.is("]") {
                self.expect(",")?;
            }
        }
        self.expect("]")?;
        self.expect(":")?;
        let kind = ParamKind::Tensor { axes, dtype: self.element_type()? };
        let id = self.builder.param(Declared { name: name.clone(), kind, default: None });
        self.declare(name, id, token)
    }

    fn table(&mut self) -> Read<()> {
        let token = self.at;
        let name = self.word("a name")?;
        self.expect("[")?;
        let (at, mut extents) = (self.at, Vec::new());
        while !self.is("]") {
            match self.next() {
                Token::Int(extent) => extents.push(extent),
                other @ (Token::Word(_) | Token::Float(_) | Token::Sign(_) | Token::End) => {
                    return self.fail_at(self.at.saturating_sub(1), format!("expected an extent (an integer), found {}", other.said()));
                }
            }
            if !self.is("]") {
                self.expect(",")?;
            }
        }
        self.expect("]")?;
        if let Err(rule) = Axes::table(&extents) {
            return self.fail_at(at, rule);
        }
        self.expect(":")?;
        let dtype = self.element_type()?;
        let table = self.builder.table(&name, &extents, dtype);
        if self.names.contains_key(&name) || self.tables.insert(name.clone(), table).is_some() {
            return self.fail_at(token, format!("the name {name} is already declared or reserved; choose another name"));
        }
        Ok(())
    }

    fn element_type(&mut self) -> Read<DType> {
        let at = self.at;
        let word = self.word("an element type")?;
        match DType::ALL.into_iter().find(|d| d.name() == word && ![DType::I64, DType::F8E8M0].contains(d)) {
            Some(dtype) => Ok(dtype),
            None => self.fail_at(at, format!("got {word:?}, expected an element type: f32, f16, bf16, i32 or bool")),
        }
    }

    /// Parses an element of a table.
    fn element(&mut self, table: ParamId, token: usize) -> Read<NodeId> {
        self.expect("[")?;
        let mut indices = Vec::new();
        while !self.is("]") {
            indices.push(self.expression(0)?);
            if !self.is("]") {
                self.expect(",")?;
            }
        }
        self.expect("]")?;
        let Declared { name, kind, .. } = &self.builder.params()[table.index()];
        let rank = kind.extents().len();
        if indices.len() != 1 && indices.len() != rank {
            return self.fail_at(
                token,
                format!("{name}: got {} indices, expected one (a position in memory) or {rank} (one per extent)", indices.len()),
            );
        }
        if let Some(&other) = indices.iter().find(|&&index| self.builder.ty(index) != Type::I32) {
            return self.fail_at(token, format!("{name}: got an index of type {}, expected i32", self.builder.ty(other)));
        }
        Ok(self.builder.read_at(table, &indices))
    }

    fn statement(&mut self) -> Read<bool> {
        let Token::Word(word) = self.peek() else { return Ok(false) };
        let word = word.clone();
        match word.as_str() {
            "scalar" => {
                self.at += 1;
                self.scalar()?;
            }
            "tensor" => {
                self.at += 1;
                self.tensor()?;
            }
            "table" => {
                self.at += 1;
                self.table()?;
            }
            "let" => {
                self.at += 1;
                let token = self.at;
                let name = self.word("a name")?;
                self.expect("=")?;
                let id = self.expression(0)?;
                self.declare(name, id, token)?;
            }
            _ => return Ok(false),
        }
        self.expect(";")?;
        Ok(true)
    }

    /// Parses operators that bind at least as tightly as `least`.
    fn expression(&mut self, least: u8) -> Read<NodeId> {
        self.depth += 1;
        if self.depth > DEPTH {
            return self.fail(format!("expected at most {DEPTH} levels of nested parentheses and operators"));
        }
        let mut x = self.prefix()?;
        while let Token::Sign(sign) = *self.peek() {
            let found = Binary::ALL.iter().find_map(|f| match f.spelling() {
                Spelling::Infix(s, binds) if s == sign && binds >= least => Some((*f, binds)),
                Spelling::Infix(..) | Spelling::Call(_) | Spelling::Prefix(_) => None,
            });
            let Some((f, binds)) = found else { break };
            let token = self.at;
            self.at += 1;
            let y = self.expression(binds + 1)?;
            x = self.binary(f, x, y, token)?;
        }
        self.depth -= 1;
        Ok(x)
    }

    fn prefix(&mut self) -> Read<NodeId> {
        let token = self.at;
        let Token::Sign(sign) = *self.peek() else { return self.atom() };
        let found = Unary::ALL.iter().find(|f| matches!(f.spelling(), Spelling::Prefix(s) if s == sign));
        let Some(&f) = found else { return self.atom() };
        self.at += 1;
        // Read a sign together with its number: −2147483648 is an i32, but 2147483648 is not.
        if let (Unary::Neg, Token::Int(n)) = (f, self.peek().clone()) {
            self.at += 1;
            return Ok(self.builder.konst(Const::I32((-n) as i32)));
        }
        let x = self.expression(PREFIX)?;
        self.unary(f, x, token)
    }

    fn atom(&mut self) -> Read<NodeId> {
        let token = self.at;
        match self.next() {
            Token::Int(n) => match i32::try_from(n) {
                Ok(n) => Ok(self.builder.konst(Const::I32(n))),
                Err(_) => self.fail_at(token, format!("got {n}, expected an integer that fits 32 bits")),
            },
            Token::Float(x) => Ok(self.builder.f32(x)),
            Token::Sign("(") => {
                let x = self.expression(0)?;
                self.expect(")")?;
                Ok(x)
            }
            Token::Word(name) if self.is("(") => self.call(&name, token),
            Token::Word(name) if self.tables.contains_key(&name) => self.element(self.tables[&name], token),
            Token::Word(name) => match self.names.get(&name) {
                Some(&id) => Ok(id),
                None => {
                    let near = nearest(&name, self.names.keys().map(String::as_str));
                    let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
                    self.fail_at(token, format!("{name:?} is not declared{near}"))
                }
            },
            other @ (Token::Sign(_) | Token::End) => self.fail_at(token, format!("expected a value, found {}", other.said())),
        }
    }

    fn call(&mut self, name: &str, token: usize) -> Read<NodeId> {
        self.expect("(")?;
        let mut arguments = Vec::new();
        while !self.is(")") {
            arguments.push(self.expression(0)?);
            if !self.is(")") {
                self.expect(",")?;
            }
        }
        self.expect(")")?;
        let called = |spelling| matches!(spelling, Spelling::Call(n) if n == name);
        if name == "select" {
            let [c, x, y] = arguments[..] else { return self.fail_at(token, "select takes a condition and two values") };
            let (x, y) = self.alike(x, y);
            if self.builder.ty(c) != Type::Bool || self.builder.ty(x) != self.builder.ty(y) {
                let rule = format!(
                    "select takes a bool and two values of one type, not {}, {}, {}",
                    self.builder.ty(c),
                    self.builder.ty(x),
                    self.builder.ty(y)
                );
                return self.fail_at(token, rule);
            }
            return Ok(self.builder.select(c, x, y));
        }
        if let Some(&f) = Unary::ALL.iter().find(|f| called(f.spelling())) {
            let [x] = arguments[..] else { return self.fail_at(token, format!("{name} takes one value")) };
            return self.unary(f, x, token);
        }
        if let Some(&f) = Binary::ALL.iter().find(|f| called(f.spelling())) {
            let [x, y] = arguments[..] else { return self.fail_at(token, format!("{name} takes two values")) };
            return self.binary(f, x, y, token);
        }
        if let Some(&f) = Made::ALL.iter().find(|f| f.name() == name) {
            return self.made(f, arguments, token);
        }
        let names = Unary::ALL.iter().map(|f| f.spelling()).chain(Binary::ALL.iter().map(|f| f.spelling()));
        let names = names.filter_map(|s| if let Spelling::Call(name) = s { Some(name) } else { None });
        let names = names.chain(Made::ALL.iter().map(|f| f.name())).chain(["select"]);
        let near = nearest(name, names).map_or_else(String::new, |near| format!("; did you mean {near}?"));
        self.fail_at(token, format!("there is no function {name:?}{near}"))
    }

    /// Applies a composed function to values of one type.
    fn made(&mut self, f: Made, mut of: Vec<NodeId>, token: usize) -> Read<NodeId> {
        let name = f.name();
        if of.len() != f.arguments() {
            let values = if f.arguments() == 1 { "one value".to_owned() } else { format!("{} values", f.arguments()) };
            return self.fail_at(token, format!("{name} takes {values}"));
        }
        if f.kind() == Kind::Real || of.iter().any(|&x| self.builder.ty(x) == Type::F32) {
            of = of.into_iter().map(|x| self.as_f32(x)).collect();
        }
        let types: Vec<String> = of.iter().map(|&x| self.builder.ty(x).to_string()).collect();
        match f.make(&mut self.builder, &of) {
            Some(id) => Ok(id),
            None => self.fail_at(token, format!("{name} does not take {}", types.join(", "))),
        }
    }

    fn as_f32(&mut self, id: NodeId) -> NodeId {
        match self.builder.constant(id) {
            Some(Const::I32(n)) => self.builder.f32(n as f32),
            Some(Const::F32(_) | Const::Bool(_)) | None => id,
        }
    }

    /// Converts an integer constant next to an f32 to f32.
    fn alike(&mut self, x: NodeId, y: NodeId) -> (NodeId, NodeId) {
        match (self.builder.ty(x), self.builder.ty(y)) {
            (Type::F32, Type::I32) => (x, self.as_f32(y)),
            (Type::I32, Type::F32) => (self.as_f32(x), y),
            (Type::F32, Type::F32 | Type::Bool) | (Type::I32, Type::I32 | Type::Bool) | (Type::Bool, _) => (x, y),
        }
    }

    fn unary(&mut self, f: Unary, x: NodeId, token: usize) -> Read<NodeId> {
        let x = if f.kind() == Kind::Real { self.as_f32(x) } else { x };
        let ty = self.builder.ty(x);
        let fits = match f.kind() {
            Kind::Number | Kind::Compare => ty != Type::Bool,
            Kind::Real => ty == Type::F32,
            Kind::Logic => ty == Type::Bool,
            Kind::Cast(from, _) => ty == from,
        };
        if fits { Ok(self.builder.unary(f, x)) } else { self.fail_at(token, format!("{} does not take {ty}", name(f.spelling()))) }
    }

    fn binary(&mut self, f: Binary, x: NodeId, y: NodeId, token: usize) -> Read<NodeId> {
        let (mut x, mut y) = self.alike(x, y);
        if f.kind() == Kind::Real {
            (x, y) = (self.as_f32(x), self.as_f32(y));
        }
        let (a, b) = (self.builder.ty(x), self.builder.ty(y));
        let fits = a == b
            && match f.kind() {
                Kind::Number | Kind::Compare => a != Type::Bool,
                Kind::Real => a == Type::F32,
                Kind::Logic => a == Type::Bool,
                Kind::Cast(from, _) => a == from,
            };
        if fits {
            return Ok(self.builder.binary(f, x, y));
        }
        let hint = if a != b && a != Type::Bool && b != Type::Bool { "; f32(…) and i32(…) convert" } else { "" };
        self.fail_at(token, format!("{} does not take {a} and {b}{hint}", name(f.spelling())))
    }
}

fn name(spelling: Spelling) -> &'static str {
    match spelling {
        Spelling::Call(name) | Spelling::Infix(name, _) | Spelling::Prefix(name) => name,
    }
}

impl FromStr for Trace {
    type Err = ExprErrors;

    fn from_str(text: &str) -> Result<Trace, ExprErrors> {
        let one = |e: ExprError| ExprErrors(vec![e]);
        let mut reader = Reader::new(text).map_err(one)?;
        let mut read = || {
            while reader.statement()? {}
            let mut roots = vec![reader.expression(0)?];
            while reader.is(",") {
                reader.at += 1;
                roots.push(reader.expression(0)?);
            }
            // A newline or a semicolon may end the text.
            if reader.is(";") {
                reader.at += 1;
            }
            match reader.peek() {
                Token::End => Ok(roots),
                other @ (Token::Word(_) | Token::Int(_) | Token::Float(_) | Token::Sign(_)) => {
                    let rule = format!("expected an operator or the end, found {}", other.said());
                    reader.fail(rule)
                }
            }
        };
        let roots = read().map_err(one)?;
        reader.builder.finish(&roots).map_err(ExprErrors)
    }
}

impl TryFrom<String> for Trace {
    type Error = ExprErrors;

    fn try_from(text: String) -> Result<Trace, ExprErrors> {
        text.parse()
    }
}
