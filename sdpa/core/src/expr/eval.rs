//! What expressions mean, one score at a time.
//!
//! Not-a-number in, not-a-number out, but for min and max (the number wins), comparisons (false, but ≠ is true), logic (true: it is not 0),
//! selects (the choice that is not taken does not matter), and powers (`x⁰ = 1ʸ = 1`, as in C). Functions come from `libm`, so that the same
//! bits come out on every machine; each is computed in f64 and rounded once.

use super::node::{Binary, Kind, Node, ParamId, Type, Unary};
use super::trace::Trace;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// The precision in which a trace is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// In f64: no float is ever rounded to a narrower type.
    F64,
    /// The result of every function is rounded to its type.
    F32,
}

impl Precision {
    /// A number as a value of a type. Whole numbers drop the fraction and saturate, not-a-number becomes 0: that is a conversion and no
    /// rounding, and the same in either precision.
    fn value(self, x: f64, ty: Type) -> f64 {
        match (ty, self) {
            (Type::F32, Precision::F32) => f64::from(x as f32),
            (Type::F32, Precision::F64) => x,
            (Type::I32, _) => f64::from(x as i32),
            (Type::Bool, _) => truth(x != 0.0),
        }
    }

    /// What goes into a function: a truth value is whatever differs from 0.
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

/// The smaller of two numbers; −0 is smaller than 0, and a number wins over not-a-number.
fn least(x: f64, y: f64) -> f64 {
    if x.is_nan() {
        return y;
    }
    if x < y || y.is_nan() || (x == y && x.is_sign_negative()) { x } else { y }
}

/// `f(x)`, where `x` is of type `from` and the result of type `to`.
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

/// `f(x, y)`, where both are of type `ty`.
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

/// Arithmetic on whole numbers: it wraps, and what is divided by zero is zero. `None` for what is no arithmetic.
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

/// The position at which a trace is evaluated, and the values of its inputs.
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
    /// The value of each parameter here, in the order of [`Trace::params`].
    pub params: &'a [f64],
}

impl Trace {
    /// Evaluates every value at one place, and gives the roots. Truth values are 0 and 1. Missing parameters are not-a-number.
    ///
    /// Not-a-number in, not-a-number out, but for `min` and `max` (the number wins), comparisons (false, but ≠ is true), logic (it counts as true),
    /// selects (the choice that is not taken does not matter), and powers (`x⁰ = 1ʸ = 1`, as in C).
    ///
    /// Elements of tables are not-a-number: [`Trace::eval_reading`] has them.
    pub fn eval(&self, at: &Place<'_>, precision: Precision) -> Vec<f64> {
        self.eval_reading(at, precision, |_, _| f64::NAN)
    }

    /// As [`Trace::eval`], with the elements of tables: `read` gives that of a parameter at a place within it, as elements lie in memory.
    pub fn eval_reading(&self, at: &Place<'_>, precision: Precision, read: impl Fn(ParamId, usize) -> f64) -> Vec<f64> {
        let values = self.values(at, precision, read);
        self.roots().iter().map(|root| values[root.index()]).collect()
    }

    /// Evaluates at one place, and gives the first root alone. Allocates nothing for up to 32 values.
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
