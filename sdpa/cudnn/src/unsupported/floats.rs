//! Masks and score_mods with discontinuities decided by floats, and integers that engines compute as floats. Engines are compiled with fast math.
//! Their machine code contracts a product with the following sum or comparison and approximates inverses, roots and functions. It divides integers by
//! a float inverse, and computes remainders, minima and maxima in f32. So a discontinuity may move. Values that are exact under every evaluation are
//! supported, and so are values that depend on the score, which is rounded anyway.

use crate::lower::Job;
use sdpa_core::error::Reason;
use sdpa_core::expr::{Binary, Builder, Const, Node, NodeId, Trace, Type, Unary};

const RULE: &str = "integers or products with powers of two where a mask or score_mod compares, rounds or takes a remainder: cuDNN's engines evaluate other floats \
                    inexactly there, which moves the discontinuity";
const WHOLE_RULE: &str = "integers up to 2^24, or powers of two as divisors: cuDNN's engines divide integers by an approximate inverse, and compute their remainders, \
                          minima and maxima in f32";

/// The multiples of 2^`step` with magnitude at most `most`.
#[derive(Clone, Copy)]
struct Grid {
    step: i32,
    most: f64,
}

const WHOLE: Grid = Grid { step: 0, most: 2_147_483_648.0 };
/// Values of integer tensors are unknown before a call. They are assumed to be positions and document numbers.
const GIVEN: Grid = Grid { step: 0, most: 8_388_608.0 };
const TRUTH: Grid = Grid { step: 0, most: 1.0 };

impl Grid {
    fn of(x: f64) -> Option<Grid> {
        if !x.is_finite() {
            return None;
        }
        let mut step = 0;
        while step > -160 && (x * 2f64.powi(-step)).fract() != 0.0 {
            step -= 1;
        }
        Some(Grid { step, most: x.abs() })
    }

    /// Returns the grid if f32 represents all of its numbers.
    fn fitting(self) -> Option<Grid> {
        (self.most <= 2f64.powi(24 + self.step) && self.most < f64::from(f32::MAX)).then_some(self)
    }

    fn either(self, other: Grid) -> Grid {
        Grid { step: self.step.min(other.step), most: self.most.max(other.most) }
    }

    fn sum(self, other: Grid) -> Grid {
        Grid { step: self.step.min(other.step), most: self.most + other.most }
    }

    fn product(self, other: Grid) -> Grid {
        Grid { step: self.step + other.step, most: self.most * other.most }
    }
}

/// Returns the grid of each value; `None` if it is unknown.
fn grids(trace: &Trace, extents: [i64; 4]) -> Vec<Option<Grid>> {
    let mut all: Vec<Option<Grid>> = Vec::with_capacity(trace.nodes().len());
    for id in trace.ids() {
        let at = |x: NodeId| all[x.index()];
        let both = |x: NodeId, y: NodeId, f: fn(Grid, Grid) -> Grid| Some(f(at(x)?, at(y)?));
        let grid = match trace.node(id) {
            Node::Score | Node::Upstream => None,
            Node::Index(axis) | Node::Extent(axis) => Some(Grid { step: 0, most: extents[axis.place()] as f64 }),
            Node::Const(c) => Grid::of(c.to_f64()),
            Node::Param(p) => match trace.params()[p.index()].kind.ty() {
                Type::F32 => None,
                Type::I32 => Some(GIVEN),
                Type::Bool => Some(TRUTH),
            },
            Node::Read(..) => (trace.ty(id) == Type::I32).then_some(WHOLE),
            Node::Unary(f, x) => match f {
                Unary::Neg | Unary::Abs | Unary::ToF32 => at(x),
                Unary::Floor | Unary::Ceil | Unary::ToI32 => at(x).map(|x| Grid { step: x.step.max(0), most: x.most.ceil() }),
                Unary::Not => Some(TRUTH),
                Unary::Sqrt | Unary::Rsqrt | Unary::Exp | Unary::Log | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => None,
            },
            Node::Binary(f, x, y) => match f {
                Binary::Add | Binary::Sub => both(x, y, Grid::sum),
                Binary::Mul => both(x, y, Grid::product),
                Binary::Min | Binary::Max => both(x, y, Grid::either),
                Binary::Div if trace.ty(id) == Type::F32 => match (at(x), power(trace, y)) {
                    (Some(x), Some(power)) => Some(Grid { step: x.step - power, most: x.most * 2f64.powi(-power) }),
                    _ => None,
                },
                Binary::Div | Binary::Mod => at(x),
                Binary::Pow => None,
                Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or => Some(TRUTH),
            },
            Node::Select(_, x, y) => both(x, y, Grid::either),
        };
        all.push(match trace.ty(id) {
            Type::F32 => grid.and_then(Grid::fitting),
            // Integers wrap around on overflow, so a result that may overflow can be any i32.
            Type::I32 => Some(grid.filter(|grid| grid.most < WHOLE.most).unwrap_or(WHOLE)),
            Type::Bool => Some(TRUTH),
        });
    }
    all
}

/// Returns the exponent of a constant that is a power of two, of either sign.
fn power(trace: &Trace, id: NodeId) -> Option<i32> {
    let Node::Const(c @ (Const::F32(_) | Const::I32(_))) = trace.node(id) else { return None };
    let x = c.to_f64().abs();
    let exponent = x.log2();
    (x.is_normal() && exponent.fract() == 0.0 && 2f64.powi(exponent as i32) == x).then_some(exponent as i32)
}

/// Returns the first value that decides a discontinuity, or has one, and that engines compute inexactly.
fn inexact(trace: &Trace, extents: [i64; 4]) -> Option<NodeId> {
    let (decisive, depends, grids) = (trace.decisive(), trace.depends(), grids(trace, extents));
    // Returns whether the value is exact as an f32.
    let fits = |x: NodeId| grids[x.index()].and_then(Grid::fitting).is_some();
    trace.ids().find(|&id| {
        let d = depends[id.index()];
        // The host computes scalars and tables over batch and heads, so engines only read them.
        let is_given = d.is_uniform() || d.is_of_heads();
        if d.score || is_given {
            return false;
        }
        if let (Type::I32, Node::Binary(f, x, y)) = (trace.ty(id), trace.node(id)) {
            return match f {
                Binary::Div => power(trace, y).is_none() || !fits(x),
                Binary::Mod | Binary::Min | Binary::Max => !fits(x) || !fits(y),
                Binary::Add | Binary::Sub | Binary::Mul | Binary::Pow | Binary::And | Binary::Or => false,
                Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => false,
            };
        }
        if !decisive[id.index()] {
            return false;
        }
        match trace.node(id) {
            Node::Unary(f, _) => match f {
                Unary::Sqrt | Unary::Rsqrt | Unary::Exp | Unary::Log | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => true,
                Unary::Neg | Unary::Abs | Unary::Floor | Unary::Ceil | Unary::Not | Unary::ToF32 | Unary::ToI32 => false,
            },
            Node::Binary(f, x, y) => match f {
                Binary::Mul => grids[id.index()].is_none() && power(trace, x).is_none() && power(trace, y).is_none(),
                Binary::Div => power(trace, y).is_none(),
                Binary::Pow => true,
                // Engines compute remainders exactly, so these functions add no error of their own.
                Binary::Mod | Binary::Add | Binary::Sub | Binary::Min | Binary::Max | Binary::And | Binary::Or => false,
                Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => false,
            },
            Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => false,
            Node::Read(..) | Node::Select(..) => false,
        }
    })
}

/// Returns the text of a value.
pub(super) fn text(trace: &Trace, id: NodeId) -> String {
    let mut b = Builder::new();
    let here = b.copy(trace);
    b.finish(&[here[id.index()]]).map_or_else(|_| trace.to_string(), |part| part.to_string())
}

pub(super) fn reasons(job: &Job) -> Vec<Reason> {
    let problem = job.problem();
    let kept = problem.kept();
    let traces = [("score_mod", problem.score_mod().map(AsRef::as_ref)), ("masks", kept.rest.as_deref())];
    let found = traces.into_iter().filter_map(|(field, trace)| {
        let trace = trace?;
        let id = inexact(trace, problem.extents())?;
        let limit = if trace.ty(id) == Type::I32 { WHOLE_RULE } else { RULE };
        Some(Reason::Limit { field: field.to_owned(), value: text(trace, id), limit: limit.to_owned() })
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(rule: &str) -> Option<String> {
        let trace: Trace = rule.parse().unwrap_or_else(|e| panic!("{rule}: {e}"));
        inexact(&trace, [2, 4, 1000, 3000]).map(|id| text(&trace, id))
    }

    #[test]
    fn what_engines_join_or_approximate_is_found() {
        for (rule, value) in [
            ("f32(k) / 49.0 < 1.0", "f32(k) / 49.0"),
            ("f32(q) * 0.3 + f32(k) < 50.0", "f32(q) * 0.3"),
            ("sqrt(f32(k)) <= 9.0", "sqrt(f32(k))"),
            ("k / 49 == q / 49", "k / 49"),
            ("(q * 3000 + k) * 3000 % 7 < 3", "(q * 3000 + k) * 3000 % 7"),
            ("max(q * 3000 * 3000, k) < 9", "max(q * 3000 * 3000, k)"),
            ("score + floor(f32(k) * 0.1)", "f32(k) * 0.1"),
            // f32 cannot represent every product of two indices.
            ("f32(q * 1000) * f32(k) < 7.0", "f32(q * 1000) * f32(k)"),
        ] {
            assert_eq!(found(rule).as_deref(), Some(value), "{rule}");
        }
    }

    #[test]
    fn what_is_exact_anyhow_or_hangs_on_the_score_is_taken() {
        for rule in [
            "k / 64 == q / 32",
            "(q - k) % 7 < 3",
            "f32(k) % 3.0 < 1.0",
            "clamp(k - q, -9, 9) != 3",
            "head / 3 == 1",
            "f32(k) * 0.5 < 3.0",
            "f32(k) / 64.0 < 1.5",
            "f32(q - k) * 3.0 + f32(k) >= 10.0",
            "f32(q) * f32(k) < 1000.0",
            "score * 0.3 + f32(k) * 0.1",
            "select(score * 0.3 < 1.0, score, score * 2.0)",
            "f32(head) / 3.0 < 1.0",
            "scalar far = 3.0; f32(k) < far / 3.0",
        ] {
            assert_eq!(found(rule), None, "{rule}");
        }
    }
}
