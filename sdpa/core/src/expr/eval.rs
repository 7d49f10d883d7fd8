//! Reference semantics of expressions, one score at a time.
//!
//! NaN propagates, with these exceptions:
//! - `min` and `max` return the operand that is not NaN.
//! - Comparisons are false, but ≠ is true.
//! - Logic treats it as true, because it is not 0.
//! - Selects ignore the branch that is not selected.
//! - Powers follow C: `x⁰ = 1ʸ = 1`.
//!
//! Functions come from `libm`, so every machine gets the same bits; each is computed in f64 and rounded once.

use super::node::{Binary, Kind, Node, ParamId, Type, Unary};
use super::trace::Trace;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The precision in which a trace is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// In f64: floats are never rounded to a narrower type.
    F64,
    /// In the types of the trace: the result of every function is rounded to its type.
    F32,
}

impl Precision {
    /// Converts a number to a value of a type. Integers drop the fraction and saturate, and NaN becomes 0, in both precisions. Floats are
    /// rounded to their type in [`Precision::F32`] only.
    fn value(self, x: f64, ty: Type) -> f64 {
        match (ty, self) {
            (Type::F32, Precision::F32) => f64::from(x as f32),
            (Type::F32, Precision::F64) => x,
            (Type::I32, _) => f64::from(x as i32),
            (Type::Bool, _) => truth(x != 0.0),
        }
    }

    /// Converts an argument of a function. Booleans are true if they differ from 0.
    fn operand(self, x: f64, ty: Type) -> f64 {
        match ty {
            Type::F32 | Type::I32 => self.value(x, ty),
            Type::Bool => x,
        }
    }
}

fn truth(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// Returns the smaller of two numbers. −0 is smaller than 0, and NaN loses to a number.
fn least(x: f64, y: f64) -> f64 {
    if x.is_nan() {
        return y;
    }
    if x < y || y.is_nan() || (x == y && x.is_sign_negative()) { x } else { y }
}

/// Returns `f(x)`, where `x` has type `from` and the result type `to`.
pub fn unary(f: Unary, from: Type, to: Type, x: f64, precision: Precision) -> f64 {
    let ty = match f.kind() {
        Kind::Number | Kind::Real | Kind::Compare | Kind::Logic => from,
        Kind::Cast(..) => to,
    };
    let x = precision.operand(x, ty);
    let y = match f {
        Unary::Neg if ty == Type::I32 => f64::from((x as i32).wrapping_neg()),
        Unary::Abs if ty == Type::I32 => f64::from((x as i32).wrapping_abs()),
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sqrt => libm::sqrt(x),
        Unary::Rsqrt => 1.0 / libm::sqrt(x),
        Unary::Exp => libm::exp(x),
        Unary::Log => libm::log(x),
        Unary::Sin => libm::sin(x),
        Unary::Cos => libm::cos(x),
        Unary::Tanh => libm::tanh(x),
        Unary::Erf => libm::erf(x),
        Unary::Floor => libm::floor(x),
        Unary::Ceil => libm::ceil(x),
        Unary::Not => truth(x == 0.0),
        Unary::ToF32 | Unary::ToI32 => x,
    };
    precision.value(y, ty)
}

/// Returns `f(x, y)`, where both have type `ty`.
pub fn binary(f: Binary, ty: Type, x: f64, y: f64, precision: Precision) -> f64 {
    let (x, y) = (precision.operand(x, ty), precision.operand(y, ty));
    if ty == Type::I32
        && let Some(z) = whole(f, x as i32, y as i32)
    {
        return f64::from(z);
    }
    let z = match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Mod => libm::fmod(x, y),
        Binary::Pow => libm::pow(x, y),
        Binary::Min => least(x, y),
        Binary::Max => -least(-x, -y),
        Binary::Eq => truth(x == y),
        Binary::Ne => truth(x != y),
        Binary::Lt => truth(x < y),
        Binary::Le => truth(x <= y),
        Binary::Gt => truth(x > y),
        Binary::Ge => truth(x >= y),
        Binary::And => truth(x != 0.0 && y != 0.0),
        Binary::Or => truth(x != 0.0 || y != 0.0),
    };
    precision.value(z, ty)
}

/// Integer arithmetic. It wraps, and division by zero is zero. `None` for functions that are not arithmetic.
fn whole(f: Binary, x: i32, y: i32) -> Option<i32> {
    match f {
        Binary::Add => Some(x.wrapping_add(y)),
        Binary::Sub => Some(x.wrapping_sub(y)),
        Binary::Mul => Some(x.wrapping_mul(y)),
        Binary::Div => Some(if y == 0 { 0 } else { x.wrapping_div(y) }),
        Binary::Mod => Some(if y == 0 { 0 } else { x.wrapping_rem(y) }),
        Binary::Min => Some(x.min(y)),
        Binary::Max => Some(x.max(y)),
        Binary::Pow | Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => None,
    }
}

/// The position at which a trace is evaluated, with the values of its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The score that is modified.
    pub score: f64,
    /// The upstream gradient.
    pub upstream: f64,
    /// The indices (batch, head, q, k).
    pub index: [i64; 4],
    /// The extents (batches, heads_q, seq_q, seq_kv).
    pub extents: [i64; 4],
    /// The value of each parameter at this position, in the order of [`Trace::params`].
    pub params: &'a [f64],
}

impl Trace {
    /// Evaluates the trace at one position, and returns its roots (outputs). Booleans are 0 and 1. Missing parameters are NaN.
    ///
    /// NaN propagates, except that `min` and `max` return the other operand, comparisons are false (≠ is true), and logic treats it as true. Selects
    /// ignore the branch that is not selected, and powers follow C (`x⁰ = 1ʸ = 1`).
    ///
    /// Elements of tables are NaN; [`Trace::eval_reading`] reads them.
    pub fn eval(&self, at: &Place<'_>, precision: Precision) -> Vec<f64> {
        self.eval_reading(at, precision, |_, _| f64::NAN)
    }

    /// Evaluates the trace at one position as [`Trace::eval`] does, but also reads tables: `read` returns the element of a parameter at a
    /// position in memory order.
    pub fn eval_reading(&self, at: &Place<'_>, precision: Precision, read: impl Fn(ParamId, usize) -> f64) -> Vec<f64> {
        let values = self.values(at, precision, read);
        self.roots().iter().map(|root| values[root.index()]).collect()
    }

    /// Evaluates the trace at one position, and returns its first root (output). Allocates nothing for traces of up to 32 values.
    pub fn eval_first(&self, at: &Place<'_>, precision: Precision) -> f64 {
        let values = self.values(at, precision, |_, _| f64::NAN);
        self.roots().first().map_or(f64::NAN, |root| values[root.index()])
    }

    fn values(&self, at: &Place<'_>, precision: Precision, read: impl Fn(ParamId, usize) -> f64) -> SmallVec<[f64; 32]> {
        let mut values: SmallVec<[f64; 32]> = SmallVec::with_capacity(self.nodes().len());
        for id in self.ids() {
            let value = match self.node(id) {
                Node::Score => at.score,
                Node::Upstream => at.upstream,
                Node::Index(axis) => at.index[axis.place()] as f64,
                Node::Extent(axis) => at.extents[axis.place()] as f64,
                Node::Const(c) => c.to_f64(),
                Node::Param(p) => at.params.get(p.index()).copied().unwrap_or(f64::NAN),
                Node::Read(p, x) => read(p, self.params()[p.index()].kind.within(values[x.index()] as i64)),
                Node::Unary(f, x) => unary(f, self.ty(x), self.ty(id), values[x.index()], precision),
                Node::Binary(f, x, y) => binary(f, self.ty(x), values[x.index()], values[y.index()], precision),
                Node::Select(c, x, y) => {
                    if values[c.index()] != 0.0 {
                        values[x.index()]
                    } else {
                        values[y.index()]
                    }
                }
            };
            values.push(value);
        }
        values
    }
}
