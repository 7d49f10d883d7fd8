//! Reverse-mode differentiation: one rule per function.
//!
//! | at | the derivative is |
//! |---|---|
//! | `\|x\|`, x = 0 | 0 |
//! | `min`, `max`, equal operands | all of it the first operand's |
//! | `min`, `max`, a number and NaN | all of it the number's |
//! | `floor`, `ceil`, `i32(x)`, comparisons | 0 everywhere |
//! | `sqrt(0)`, `log(0)`, `rsqrt(0)` | infinite, as the formula says |
//! | `pow(0, y)` along y ≥ 0 | 0 |
//! | `pow(x, 0)` along x | 0, also at x = 0 |
//! | `select` | that of the selected branch; 0 for the other, whatever its value |
//! | an element of a table | 0 along its position |
//! | `x % y` | 1 along x, −trunc(x / y) along y |
//!
//! The derivative of tanh is `g − g·t²`, which every engine can compute. In f32 it has no digit left at |x| = 9. An executor that computes it in
//! another way recognises it with [`tanh_slope`].

use super::build::Builder;
use super::node::{Binary, Const, Node, NodeId, Type, Unary};
use super::trace::Trace;
use std::collections::HashMap;
use std::f32::consts::FRAC_2_SQRT_PI;

/// Gradients so far, by value.
struct Adjoints<'b> {
    b: &'b mut Builder,
    of: HashMap<NodeId, NodeId>,
    /// Values through which a requested gradient flows.
    active: Vec<bool>,
    /// Whether one of them is a select, so that a gradient may be 0 where a derivative is infinite.
    chooses: bool,
}

/// Returns whether the derivative may be infinite or NaN.
fn may_be_infinite(node: Node) -> bool {
    match node {
        Node::Unary(f, _) => matches!(f, Unary::Sqrt | Unary::Rsqrt | Unary::Log | Unary::Exp),
        Node::Binary(f, _, _) => matches!(f, Binary::Div | Binary::Pow | Binary::Mod),
        Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => false,
        Node::Read(..) | Node::Select(..) => false,
    }
}

impl Adjoints<'_> {
    /// Adds to the gradient of operand `to` of value `of`, whose own gradient is `g`. If `g` is 0, adds nothing whatever the derivative: the
    /// unselected branch has no gradient.
    fn flow(&mut self, of: NodeId, g: NodeId, to: NodeId, make: impl FnOnce(&mut Builder) -> NodeId) {
        let guarded = self.chooses && may_be_infinite(self.b.node(of));
        self.add(to, |b| {
            let more = make(b);
            if !guarded {
                return more;
            }
            let zero = b.f32(0.0);
            let none = b.binary(Binary::Eq, g, zero);
            b.select(none, zero, more)
        });
    }

    fn add(&mut self, to: NodeId, make: impl FnOnce(&mut Builder) -> NodeId) {
        if !self.active[to.index()] {
            return;
        }
        let more = make(self.b);
        let sum = match self.of.get(&to) {
            Some(&before) => self.b.binary(Binary::Add, before, more),
            None => more,
        };
        self.of.insert(to, sum);
    }

    fn unary(&mut self, f: Unary, x: NodeId, y: NodeId, g: NodeId) {
        self.flow(y, g, x, |b| match f {
            Unary::Neg => b.unary(Unary::Neg, g),
            Unary::Abs => {
                let zero = b.f32(0.0);
                let minus = b.unary(Unary::Neg, g);
                let below = b.binary(Binary::Lt, x, zero);
                let above = b.binary(Binary::Gt, x, zero);
                let rest = b.select(below, minus, zero);
                b.select(above, g, rest)
            }
            Unary::Sqrt => {
                let half = b.f32(0.5);
                let g = b.binary(Binary::Mul, g, half);
                b.binary(Binary::Div, g, y)
            }
            Unary::Rsqrt => {
                let half = b.f32(-0.5);
                let square = b.binary(Binary::Mul, y, y);
                let cube = b.binary(Binary::Mul, square, y);
                let g = b.binary(Binary::Mul, g, half);
                b.binary(Binary::Mul, g, cube)
            }
            Unary::Exp => b.binary(Binary::Mul, g, y),
            Unary::Log => b.binary(Binary::Div, g, x),
            Unary::Sin => {
                let cos = b.unary(Unary::Cos, x);
                b.binary(Binary::Mul, g, cos)
            }
            Unary::Cos => {
                let sin = b.unary(Unary::Sin, x);
                let minus = b.unary(Unary::Neg, g);
                b.binary(Binary::Mul, minus, sin)
            }
            Unary::Tanh => {
                let square = b.binary(Binary::Mul, y, y);
                let part = b.binary(Binary::Mul, g, square);
                b.binary(Binary::Sub, g, part)
            }
            Unary::Erf => {
                let square = b.binary(Binary::Mul, x, x);
                let minus = b.unary(Unary::Neg, square);
                let bell = b.unary(Unary::Exp, minus);
                let factor = b.f32(FRAC_2_SQRT_PI);
                let slope = b.binary(Binary::Mul, bell, factor);
                b.binary(Binary::Mul, g, slope)
            }
            // Unreachable: the result of a step function is `active` only if it is in `wrt`, and then the gradient stops at it.
            Unary::Floor | Unary::Ceil | Unary::Not | Unary::ToF32 | Unary::ToI32 => b.f32(0.0),
        });
    }

    fn binary(&mut self, f: Binary, [x, y]: [NodeId; 2], r: NodeId, g: NodeId) {
        match f {
            Binary::Add => {
                self.flow(r, g, x, |_| g);
                self.flow(r, g, y, |_| g);
            }
            Binary::Sub => {
                self.flow(r, g, x, |_| g);
                self.flow(r, g, y, |b| b.unary(Unary::Neg, g));
            }
            Binary::Mul => {
                self.flow(r, g, x, |b| b.binary(Binary::Mul, g, y));
                self.flow(r, g, y, |b| b.binary(Binary::Mul, g, x));
            }
            Binary::Div => {
                self.flow(r, g, x, |b| b.binary(Binary::Div, g, y));
                self.flow(r, g, y, |b| {
                    let part = b.binary(Binary::Mul, g, r);
                    let part = b.unary(Unary::Neg, part);
                    b.binary(Binary::Div, part, y)
                });
            }
            Binary::Mod => {
                self.flow(r, g, x, |_| g);
                self.flow(r, g, y, |b| {
                    let whole = b.binary(Binary::Sub, x, r);
                    let times = b.binary(Binary::Div, whole, y);
                    let part = b.binary(Binary::Mul, g, times);
                    b.unary(Unary::Neg, part)
                });
            }
            Binary::Pow => {
                self.flow(r, g, x, |b| {
                    let one = b.f32(1.0);
                    let less = b.binary(Binary::Sub, y, one);
                    let power = b.binary(Binary::Pow, x, less);
                    let slope = b.binary(Binary::Mul, y, power);
                    let part = b.binary(Binary::Mul, g, slope);
                    // For y = 0 the derivative is 0. At x = 0 the formula above would give 0 · 0⁻¹, which is NaN.
                    let zero = b.f32(0.0);
                    let flat = b.binary(Binary::Eq, y, zero);
                    b.select(flat, zero, part)
                });
                self.flow(r, g, y, |b| {
                    let zero = b.f32(0.0);
                    let log = b.unary(Unary::Log, x);
                    let slope = b.binary(Binary::Mul, r, log);
                    let part = b.binary(Binary::Mul, g, slope);
                    let of_zero = b.binary(Binary::Eq, x, zero);
                    let not_negative = b.binary(Binary::Ge, y, zero);
                    let flat = b.binary(Binary::And, of_zero, not_negative);
                    b.select(flat, zero, part)
                });
            }
            Binary::Min => self.extreme(Binary::Le, [x, y], r, g),
            Binary::Max => self.extreme(Binary::Ge, [x, y], r, g),
            // Booleans have no gradient.
            Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => {}
        }
    }

    /// Compares the first operand with the result, not with the second: if one operand is NaN, the other one is the result.
    fn extreme(&mut self, first_wins: Binary, [x, y]: [NodeId; 2], r: NodeId, g: NodeId) {
        let zero = self.b.f32(0.0);
        let first = self.b.binary(first_wins, x, r);
        self.add(x, |b| b.select(first, g, zero));
        self.add(y, |b| b.select(first, zero, g));
    }
}

/// A derivative of tanh in a trace: `g − g·tanh²(x)`, or `1 − tanh²(x)`, where `g` is an upstream gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TanhSlope {
    /// The upstream gradient `g`, or the constant 1.
    pub upstream: NodeId,
    /// The argument `x` of the tanh.
    pub of: NodeId,
}

/// Recognises a derivative of tanh in a trace. In f32 the difference `1 − tanh²(x)` has no digit left from `|x|` = 9 on; an executor can compute
/// `sech²(x)` instead.
pub fn tanh_slope(trace: &Trace, id: NodeId) -> Option<TanhSlope> {
    let product = |id: NodeId| if let Node::Binary(Binary::Mul, x, y) = trace.node(id) { Some((x, y)) } else { None };
    let square_of_tanh = |id: NodeId| {
        let (t, _) = product(id).filter(|(x, y)| x == y)?;
        if let Node::Unary(Unary::Tanh, x) = trace.node(t) { Some(x) } else { None }
    };
    let Node::Binary(Binary::Sub, upstream, taken) = trace.node(id) else { return None };
    let of = if trace.node(upstream) == Node::Const(Const::f32(1.0)) {
        square_of_tanh(taken)
    } else {
        let (x, y) = product(taken)?;
        [(x, y), (y, x)].into_iter().filter(|(g, _)| *g == upstream).find_map(|(_, square)| square_of_tanh(square))
    };
    of.map(|of| TanhSlope { upstream, of })
}

/// Returns whether the value is differentiable in its operands; step functions and booleans are not.
fn is_smooth(b: &Builder, node: Node, id: NodeId) -> bool {
    b.ty(id) == Type::F32
        && match node {
            Node::Unary(f, _) => match f {
                Unary::Floor | Unary::Ceil | Unary::Not | Unary::ToF32 | Unary::ToI32 => false,
                Unary::Neg
                | Unary::Abs
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Exp
                | Unary::Log
                | Unary::Sin
                | Unary::Cos
                | Unary::Tanh
                | Unary::Erf => true,
            },
            Node::Binary(..) | Node::Select(..) => true,
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) | Node::Read(..) => false,
        }
}

impl Builder {
    /// Returns the gradient of `root` along each value of `wrt`, times `upstream`; `None` for a value that `root` does not depend on.
    /// Each value of `wrt` counts as an input: differentiation does not continue into its operands.
    ///
    /// The derivative of `|x|` at 0 is 0, and that of `floor`, `ceil`, `to_i32` and comparisons is 0 everywhere. `min` and `max` of equal
    /// values pass the whole gradient to the first operand. The derivatives of `sqrt`, `rsqrt` and `log` are infinite at 0. The gradient
    /// of the branch that a select does not select is 0.
    pub fn gradient(&mut self, root: NodeId, upstream: NodeId, wrt: &[NodeId]) -> Vec<Option<NodeId>> {
        let mut active = vec![false; root.index() + 1];
        for index in 0..=root.index() {
            let id = NodeId(index as u32);
            let node = self.node(id);
            active[index] = wrt.contains(&id) || (is_smooth(self, node, id) && node.operands().any(|x| active[x.index()]));
        }
        let choice = |node: Node| matches!(node, Node::Select(..) | Node::Binary(Binary::Min | Binary::Max, ..));
        let chooses = (0..=root.index()).any(|n| active[n] && choice(self.nodes()[n]));
        let mut adjoints = Adjoints { b: self, of: HashMap::new(), active, chooses };
        adjoints.add(root, |_| upstream);
        for index in (0..=root.index()).rev() {
            let id = NodeId(index as u32);
            let Some(&g) = adjoints.of.get(&id).filter(|_| !wrt.contains(&id)) else { continue };
            match adjoints.b.node(id) {
                Node::Unary(f, x) => adjoints.unary(f, x, id, g),
                Node::Binary(f, x, y) => adjoints.binary(f, [x, y], id, g),
                Node::Select(c, x, y) => {
                    let zero = adjoints.b.f32(0.0);
                    adjoints.add(x, |b| b.select(c, g, zero));
                    adjoints.add(y, |b| b.select(c, zero, g));
                }
                Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) | Node::Read(..) => {}
            }
        }
        wrt.iter().map(|id| adjoints.of.get(id).copied()).collect()
    }
}
