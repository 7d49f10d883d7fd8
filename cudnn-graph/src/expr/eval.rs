//! What expressions mean, one score at a time. Each function is the pointwise mode that [`crate::ir::interp`] defines.

use super::node::{Binary, Kind, Node, Type, Unary};
use super::trace::Trace;
use crate::ir::interp::{Operand, pointwise};
use crate::ir::pointwise::Params;
use smallvec::SmallVec;

pub use crate::ir::interp::Precision;

/// `f(x)`, where `x` is of type `from` and the result of type `to`.
pub fn unary(f: Unary, from: Type, to: Type, x: f64, precision: Precision) -> f64 {
    let compute = match f.kind() {
        Kind::Number | Kind::Real | Kind::Compare | Kind::Logic => from,
        Kind::Cast(..) => to,
    };
    pointwise(f.mode(), &Params::default(), compute.dtype(), precision, Operand { x, ..Operand::default() })
}

/// `f(x, y)`, where both are of type `ty`.
pub fn binary(f: Binary, ty: Type, x: f64, y: f64, precision: Precision) -> f64 {
    pointwise(f.mode(), &Params::default(), ty.dtype(), precision, Operand { x, b: y, ..Operand::default() })
}

/// Where and of what a trace is evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The score.
    pub score: f64,
    /// The gradient from behind.
    pub upstream: f64,
    /// (batch, head, q, k).
    pub index: [i64; 4],
    /// (batches, heads_q, seq_q, seq_kv).
    pub extents: [i64; 4],
    /// The value of each parameter here, in the order of [`Trace::params`].
    pub params: &'a [f64],
}

impl Trace {
    /// Evaluates every value at one place, and gives the roots. Truth values are 0 and 1. Missing parameters are not-a-number.
    pub fn eval(&self, at: &Place<'_>, precision: Precision) -> Vec<f64> {
        let values = self.values(at, precision);
        self.roots().iter().map(|root| values[root.index()]).collect()
    }

    /// The first root alone. Allocates nothing for up to 32 values.
    pub fn eval_first(&self, at: &Place<'_>, precision: Precision) -> f64 {
        let values = self.values(at, precision);
        self.roots().first().map_or(f64::NAN, |root| values[root.index()])
    }

    fn values(&self, at: &Place<'_>, precision: Precision) -> SmallVec<[f64; 32]> {
        let mut values: SmallVec<[f64; 32]> = SmallVec::with_capacity(self.nodes().len());
        for id in self.ids() {
            let value = match self.node(id) {
                Node::Score => at.score,
                Node::Upstream => at.upstream,
                Node::Index(axis) => at.index[axis.place()] as f64,
                Node::Extent(axis) => at.extents[axis.place()] as f64,
                Node::Const(c) => c.to_f64(),
                Node::Param(p) => at.params.get(p.index()).copied().unwrap_or(f64::NAN),
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
