//! Analyses of a trace (an expression graph) before it is emitted as source code.

use sdpa_core::expr::{Axis, Binary, Const, Depends, Node, NodeId, Trace, Type, Unary};

/// Integers below this magnitude convert to float without a conversion instruction: added to the bits of 1.5 · 2^23 they count in the last place.
const SMALL: f64 = 4_194_304.0;

/// Analysis results for each value of a trace.
pub(crate) struct Known {
    /// The inputs on which each value depends.
    pub(crate) depends: Vec<Depends>,
    /// Whether each value decides a discontinuity, such as the outcome of a comparison.
    pub(crate) decisive: Vec<bool>,
    /// Its least and greatest possible value.
    ranges: Vec<Option<[f64; 2]>>,
    /// Its derivatives along query and key, if it is an integer that is linear in these and otherwise constant along both.
    slopes: Vec<Option<[i64; 2]>>,
}

impl Known {
    /// Analyses a trace for a problem of extents (batch, heads_q, seq_q, seq_kv). `places`, if known, is an exclusive upper bound of the
    /// indices.
    pub(crate) fn of(trace: &Trace, extents: [i64; 4], places: Option<i64>) -> Known {
        let ranges = places.map(|below| trace.ranges([[0, below - 1]; 4], extents)).unwrap_or_else(|| vec![None; trace.nodes().len()]);
        let depends = trace.depends();
        let slopes = slopes(trace, &depends);
        Known { depends, decisive: trace.decisive(), ranges, slopes }
    }

    /// Returns the derivatives of a value along query and key (0 if unknown). Returns `None` unless the value is an integer so small that
    /// it becomes a float without a conversion instruction.
    pub(crate) fn small(&self, id: NodeId) -> Option<[i64; 2]> {
        let [least, most] = self.ranges[id.index()]?;
        (least >= -SMALL && most < SMALL).then(|| self.slopes[id.index()].unwrap_or([0; 2]))
    }

    /// Returns whether a value varies between scores and decides no discontinuity, so that an error in its last digits affects only one
    /// score.
    pub(crate) fn varies_smoothly(&self, id: NodeId) -> bool {
        !self.decisive[id.index()] && self.depends[id.index()].varies()
    }

    /// Returns whether the magnitude of a value is certainly at most `most`.
    pub(crate) fn within(&self, id: NodeId, most: f64) -> bool {
        self.ranges[id.index()].is_some_and(|range| range.into_iter().all(|x| x.abs() <= most))
    }
}

fn slopes(trace: &Trace, depends: &[Depends]) -> Vec<Option<[i64; 2]>> {
    let mut slopes: Vec<Option<[i64; 2]>> = Vec::with_capacity(depends.len());
    for (id, of) in trace.ids().zip(depends) {
        let each = |x: NodeId, y: NodeId, f: fn(i64, i64) -> Option<i64>| {
            let ([q, k], [other_q, other_k]) = (slopes[x.index()]?, slopes[y.index()]?);
            Some([f(q, other_q)?, f(k, other_k)?])
        };
        let times = |x: NodeId, by: i32| slopes[x.index()].and_then(|[q, k]| Some([q.checked_mul(by.into())?, k.checked_mul(by.into())?]));
        let constant = |x: NodeId| if let Node::Const(Const::I32(by)) = trace.node(x) { Some(by) } else { None };
        let slope = match trace.node(id) {
            Node::Index(Axis::Q) => Some([1, 0]),
            Node::Index(Axis::K) => Some([0, 1]),
            Node::Unary(Unary::Neg, x) => times(x, -1),
            Node::Binary(Binary::Add, x, y) => each(x, y, i64::checked_add),
            Node::Binary(Binary::Sub, x, y) => each(x, y, i64::checked_sub),
            Node::Binary(Binary::Mul, x, y) => {
                constant(y).map(|by| (x, by)).or(constant(x).map(|by| (y, by))).and_then(|(x, by)| times(x, by))
            }
            Node::Index(Axis::Batch | Axis::Head) | Node::Unary(..) | Node::Binary(..) | Node::Select(..) => None,
            Node::Score | Node::Upstream | Node::Extent(_) | Node::Const(_) | Node::Param(_) | Node::Read(..) => None,
        };
        let slope = slope.or((!of.varies()).then_some([0; 2])).filter(|_| trace.ty(id) == Type::I32);
        slopes.push(slope);
    }
    slopes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `small` of the last integer that is converted to a float, for fewer than 2^21 indices on each axis.
    fn of(text: &str) -> Option<[i64; 2]> {
        let trace: Trace = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        let known = Known::of(&trace, [1, 2, 30, 40], Some(1 << 21));
        let whole = |node: &Node| if let Node::Unary(Unary::ToF32, x) = node { Some(*x) } else { None };
        known.small(trace.nodes().iter().filter_map(whole).next_back().unwrap())
    }

    #[test]
    fn whole_numbers_are_small_where_their_ranges_say_so() {
        for (text, slopes) in [
            ("f32(k - q)", [-1, 1]),
            ("f32(q)", [1, 0]),
            ("f32(seq_kv - 1 - k)", [0, -1]),
            ("f32(3 - (q - k) - head)", [-1, 1]),
            ("f32(min(k, 1000) * 4 - 2 * min(q, 9))", [0, 0]),
            ("f32(-(k - q) + k)", [1, 0]),
            ("f32(abs(k - q))", [0, 0]),
            ("f32(k % 100 * 100)", [0, 0]),
            ("f32(k / 7)", [0, 0]),
            ("f32(head * 2)", [0, 0]),
            ("f32(k + q + 1)", [1, 1]),
            ("tensor n[q]: i32; f32(max(min(n, 9), 0) - k)", [0, 0]),
            ("tensor n[head]: i32; f32(max(min(n, 9), 0) - k)", [0, -1]),
            ("f32(max(min(i32(score), 9), 0))", [0, 0]),
        ] {
            let text = if text.contains(';') { text.replace("; ", "; score + ") } else { format!("score + {text}") };
            assert_eq!(of(&text), Some(slopes), "{text}");
        }
        for text in ["f32(3 * (k - q))", "f32(k * q)", "f32(i32(score))", "f32(k + q + 2)", "f32(4000000 * 3 / k)"] {
            assert_eq!(of(&format!("score + {text}")), None, "{text}");
        }
        assert_eq!(of("tensor n[head]: i32; score + f32(n)"), None);
    }
}
