//! Linear functions of the two indices, and their comparisons.

use crate::expr::{Axis, Binary, Const, Node, Trace, Unary};

/// `q_part · q + k_part · k + constant ≥ 0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Linear {
    pub(super) q: i64,
    pub(super) k: i64,
    pub(super) constant: i64,
}

/// Above this, 32-bit arithmetic might wrap where 64-bit arithmetic does not.
const EXACT: i64 = 1 << 29;

impl Linear {
    pub(super) fn combine(self, other: Linear, sign: i64) -> Linear {
        Linear { q: self.q + sign * other.q, k: self.k + sign * other.k, constant: self.constant + sign * other.constant }
    }

    pub(super) fn exact(self) -> Option<Linear> {
        (self.q.abs() <= 1 && self.k.abs() <= 1 && self.constant.abs() <= EXACT).then_some(self)
    }
}

/// Returns the linear function of the indices that each i32 value computes, if it is one.
pub(super) fn all(trace: &Trace) -> Vec<Option<Linear>> {
    let mut all: Vec<Option<Linear>> = Vec::with_capacity(trace.nodes().len());
    for node in trace.nodes() {
        let none = Linear { q: 0, k: 0, constant: 0 };
        let value = match *node {
            Node::Index(Axis::Q) => Some(Linear { q: 1, ..none }),
            Node::Index(Axis::K) => Some(Linear { k: 1, ..none }),
            Node::Const(Const::I32(n)) => Some(Linear { constant: i64::from(n), ..none }),
            Node::Unary(Unary::Neg, x) => all[x.index()].map(|x| none.combine(x, -1)),
            Node::Binary(Binary::Add, x, y) => all[x.index()].zip(all[y.index()]).map(|(x, y)| x.combine(y, 1)),
            Node::Binary(Binary::Sub, x, y) => all[x.index()].zip(all[y.index()]).map(|(x, y)| x.combine(y, -1)),
            Node::Score
            | Node::Upstream
            | Node::Index(Axis::Batch | Axis::Head)
            | Node::Extent(_)
            | Node::Const(Const::F32(_) | Const::Bool(_))
            | Node::Param(_)
            | Node::Read(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => None,
        };
        // A constant is exact at any size; computed values must stay in the range that `Linear::exact` checks.
        all.push(if let Node::Const(_) = node { value } else { value.and_then(Linear::exact) });
    }
    all
}

/// Returns the comparison `x f y` as functions that must not be negative; `None` if it is no conjunction of such.
pub(super) fn bounds(f: Binary, holds: bool, x: Linear, y: Linear) -> Option<Vec<Linear>> {
    let at_least = |x: Linear, y: Linear, more: i64| {
        let mut d = x.combine(y, -1);
        d.constant -= more;
        d
    };
    match (f, holds) {
        (Binary::Ge, true) | (Binary::Lt, false) => Some(vec![at_least(x, y, 0)]),
        (Binary::Gt, true) | (Binary::Le, false) => Some(vec![at_least(x, y, 1)]),
        (Binary::Le, true) | (Binary::Gt, false) => Some(vec![at_least(y, x, 0)]),
        (Binary::Lt, true) | (Binary::Ge, false) => Some(vec![at_least(y, x, 1)]),
        (Binary::Eq, true) | (Binary::Ne, false) => Some(vec![at_least(x, y, 0), at_least(y, x, 0)]),
        (
            Binary::Eq
            | Binary::Ne
            | Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::Div
            | Binary::Mod
            | Binary::Pow
            | Binary::Min
            | Binary::Max
            | Binary::And
            | Binary::Or,
            _,
        ) => None,
    }
}
