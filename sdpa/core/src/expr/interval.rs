//! Interval arithmetic: the range of an expression over a box of indices.
//!
//! Rounding is monotone, so rounding the ends of an interval is sound. Functions that devices approximate have an unknown range.

use super::eval::{self, Precision};
use super::node::{Binary, Node, Type, Unary};
use super::trace::Trace;

/// A closed interval; booleans are 0 and 1. An unordered interval means any value, including NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Interval {
    low: f64,
    high: f64,
}

const ANYTHING: Interval = Interval { low: f64::NAN, high: f64::NAN };
const EITHER: Interval = Interval { low: 0.0, high: 1.0 };

impl Interval {
    fn is_known(self) -> bool {
        self.low.is_finite() && self.high.is_finite()
    }

    fn hull(of: impl IntoIterator<Item = f64>) -> Interval {
        let mut hull = Interval { low: f64::INFINITY, high: f64::NEG_INFINITY };
        for x in of {
            if !x.is_finite() {
                return ANYTHING;
            }
            hull = Interval { low: hull.low.min(x), high: hull.high.max(x) };
        }
        hull
    }

    fn truth(sometimes: bool, always: bool) -> Interval {
        Interval { low: f64::from(u8::from(always)), high: f64::from(u8::from(sometimes)) }
    }
}

/// The result of judging a mask over a box, which has a range of indices for each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// The mask attends to no pair of the box.
    Never,
    /// The mask attends to every pair of the box.
    Always,
    /// The intervals do not decide it: the mask may attend to some pairs and not to others.
    Unknown,
}

/// All values of i32.
const WHOLE: Interval = Interval { low: i32::MIN as f64, high: i32::MAX as f64 };

impl Trace {
    /// Returns the range of each value.
    fn intervals(&self, places: [[i64; 2]; 4], extents: [i64; 4]) -> Vec<Interval> {
        let mut values: Vec<Interval> = Vec::with_capacity(self.nodes().len());
        for id in self.ids() {
            let value = match self.node(id) {
                Node::Score | Node::Upstream | Node::Param(_) | Node::Read(..) => ANYTHING,
                Node::Index(axis) => Interval::hull(places[axis.place()].map(|x| x as f64)),
                Node::Extent(axis) => Interval::hull([extents[axis.place()] as f64]),
                Node::Const(c) => Interval::hull([c.to_f64()]),
                Node::Unary(f, x) => unary(f, self.ty(x), self.ty(id), values[x.index()]),
                Node::Binary(f, x, y) => binary(f, self.ty(x), values[x.index()], values[y.index()]),
                Node::Select(c, x, y) => select(values[c.index()], values[x.index()], values[y.index()]),
            };
            // If the range of a value is unknown, its type still bounds it: a boolean is 0 or 1, and an integer fits in an i32.
            values.push(match self.ty(id) {
                Type::Bool if !value.is_known() => EITHER,
                Type::I32 if !value.is_known() => WHOLE,
                Type::Bool | Type::I32 | Type::F32 => value,
            });
        }
        values
    }

    /// Returns the range `[least, greatest]` of each value of the trace, for indices (batch, head, q, k) within the inclusive bounds
    /// `places`.
    ///
    /// Booleans are 0 and 1. Parameters may have any value. Floats that depend on parameters, on the score or on functions that devices approximate
    /// have the range `None`.
    ///
    /// ```
    /// use sdpa_core::expr::Trace;
    ///
    /// let trace: Trace = "score + 0.5 * f32(max(k - q, -5))".parse()?;
    /// let ranges = trace.ranges([[0, 0], [0, 7], [0, 99], [0, 49]], [1, 8, 100, 50]);
    /// assert!(ranges.contains(&Some([-99.0, 49.0])) && ranges.contains(&Some([-2.5, 24.5])) && ranges.contains(&None));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ranges(&self, places: [[i64; 2]; 4], extents: [i64; 4]) -> Vec<Option<[f64; 2]>> {
        let values = self.intervals(places, extents).into_iter();
        values.map(|x| x.is_known().then_some([x.low, x.high])).collect()
    }

    /// Returns whether the first root (output), a boolean, is true always, never or possibly, for indices (batch, head, q, k) within the
    /// inclusive bounds `places`. Parameters may have any value.
    pub fn judge(&self, places: [[i64; 2]; 4], extents: [i64; 4]) -> Judged {
        let values = self.intervals(places, extents);
        match self.roots().first().map(|root| values[root.index()]) {
            Some(Interval { low: 1.0, .. }) => Judged::Always,
            Some(Interval { high: 0.0, .. }) => Judged::Never,
            Some(_) | None => Judged::Unknown,
        }
    }
}

fn select(condition: Interval, x: Interval, y: Interval) -> Interval {
    if condition.low == 1.0 {
        x
    } else if condition.high == 0.0 {
        y
    } else {
        Interval::hull([x.low, x.high, y.low, y.high])
    }
}

/// Integers wrap around, so an interval beyond i32 is unknown.
fn within(ty: Type, x: Interval) -> Interval {
    let fits = ty != Type::I32 || (x.low >= f64::from(i32::MIN) && x.high <= f64::from(i32::MAX));
    if x.is_known() && fits { x } else { ANYTHING }
}

fn unary(f: Unary, from: Type, to: Type, x: Interval) -> Interval {
    if !x.is_known() {
        return ANYTHING;
    }
    let at = |x: f64| eval::unary(f, from, to, x, Precision::F32);
    match f {
        Unary::Neg => within(from, Interval { low: -x.high, high: -x.low }),
        Unary::Abs if x.low <= 0.0 && x.high >= 0.0 => within(from, Interval { low: 0.0, high: x.high.max(-x.low) }),
        Unary::Abs => within(from, Interval::hull([x.low.abs(), x.high.abs()])),
        Unary::Floor | Unary::Ceil | Unary::ToF32 | Unary::ToI32 => Interval::hull([at(x.low), at(x.high)]),
        Unary::Not => Interval { low: 1.0 - x.high, high: 1.0 - x.low },
        Unary::Sqrt | Unary::Rsqrt | Unary::Exp | Unary::Log | Unary::Sin | Unary::Cos | Unary::Tanh | Unary::Erf => ANYTHING,
    }
}

fn binary(f: Binary, ty: Type, x: Interval, y: Interval) -> Interval {
    match f {
        // The bounds of a boolean are 0 or 1, so `&` takes the minimum of each bound, and `|` the maximum.
        Binary::And => return Interval { low: x.low.min(y.low), high: x.high.min(y.high) },
        Binary::Or => return Interval { low: x.low.max(y.low), high: x.high.max(y.high) },
        Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Mod | Binary::Pow | Binary::Min | Binary::Max => {}
        Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => {}
    }
    if !(x.is_known() && y.is_known()) {
        return ANYTHING;
    }
    let corners = |at: &dyn Fn(f64, f64) -> f64| {
        within(ty, Interval::hull([at(x.low, y.low), at(x.low, y.high), at(x.high, y.low), at(x.high, y.high)]))
    };
    let rounded = |x: f64, y: f64| eval::binary(f, ty, x, y, Precision::F32);
    let whole = ty == Type::I32;
    match f {
        Binary::Lt => Interval::truth(x.low < y.high, x.high < y.low),
        Binary::Le => Interval::truth(x.low <= y.high, x.high <= y.low),
        Binary::Gt => Interval::truth(x.high > y.low, x.low > y.high),
        Binary::Ge => Interval::truth(x.high >= y.low, x.low >= y.high),
        Binary::Eq => Interval::truth(x.low <= y.high && y.low <= x.high, x.low == x.high && x == y),
        Binary::Ne => Interval::truth(x.low != x.high || x != y, x.high < y.low || y.high < x.low),
        // Compute integers in f64, without rounding to f32. `within` handles results that wrap around.
        Binary::Add if whole => corners(&|x, y| x + y),
        Binary::Sub if whole => corners(&|x, y| x - y),
        Binary::Mul if whole => corners(&|x, y| x * y),
        Binary::Add | Binary::Sub | Binary::Mul | Binary::Min | Binary::Max => corners(&rounded),
        // A divisor range that contains 0 gives any quotient.
        Binary::Div if y.low <= 0.0 && y.high >= 0.0 => ANYTHING,
        // The least i32 divided by −1 wraps, which `within` handles.
        Binary::Div if whole => corners(&|x, y| (x / y).trunc()),
        Binary::Div => corners(&rounded),
        Binary::Mod => remainder(ty, x, y),
        Binary::Pow | Binary::And | Binary::Or => ANYTHING,
    }
}

/// Remainder by a single number, with the sign of the dividend. A dividend range within one period gives a range.
fn remainder(ty: Type, x: Interval, y: Interval) -> Interval {
    let by = y.low.abs();
    if ty != Type::I32 || y.low != y.high || by == 0.0 {
        return ANYTHING;
    }
    let period = |x: f64| (x / by).trunc();
    let one_sign = x.low >= 0.0 || x.high <= 0.0;
    if one_sign && period(x.low) == period(x.high) {
        return Interval::hull([x.low % by, x.high % by]);
    }
    Interval { low: if x.low < 0.0 { 1.0 - by } else { 0.0 }, high: if x.high > 0.0 { by - 1.0 } else { 0.0 } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::eval::Place;
    use crate::mask::{Kept, Mask};

    const EXTENTS: [i64; 4] = [2, 3, 40, 50];

    /// Checks every position of every box against the mask itself.
    #[test]
    fn what_is_said_of_a_box_holds_at_every_place_of_it() {
        let texts = [
            "q % 7 < k % 5",
            "q % 7 >= k % 5",
            "q % 7 <= k % 9",
            "q % 9 > k % 7",
            "(q - 20) % 6 < 2",
            "(q - 20) / 3 == (k - 25) / 4",
            "abs(q - 20) * abs(k - 25) > 30",
            "f32(q - 10) / f32(k + 1) < 0.5",
            "i32(f32(q) * 0.3) != k / 3",
            "floor(f32(q - k) * 0.25) >= -2.0",
            "min(q, k) * max(q, 3) == 12 | q == k",
            "select(q < k, q - k, k + head) > -9",
            "q * 100000000 > k",
            "7 / (q - 4) < k / (k - 60)",
            "!(q < 5 & k > 6) & batch == 1",
            "exp(f32(q)) < 100.0 | k > 20",
            "q % (k - 25) == 1",
            "-(q * 3 - k) < 3",
            "max(min(q * 100000000, 30), -7) > k - 20",
            "i32(exp(f32(q))) / -1 < k",
        ];
        let (mut decided, mut boxes) = (0, 0);
        for text in texts {
            let mask: Mask = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let Some(trace) = Kept::of(&[mask], EXTENTS).unwrap().rest else { panic!("{text}: nothing is left of it") };
            for (first_q, first_k) in (0..40).step_by(3).flat_map(|q| (0..50).step_by(4).map(move |k| (q, k))) {
                for size in [0, 1, 3, 9] {
                    let (last_q, last_k) = ((first_q + size).min(39), (first_k + size).min(49));
                    let judged = trace.judge([[1, 1], [2, 2], [first_q, last_q], [first_k, last_k]], EXTENTS);
                    boxes += 1;
                    decided += usize::from(judged != Judged::Unknown);
                    for (q, k) in (first_q..=last_q).flat_map(|q| (first_k..=last_k).map(move |k| (q, k))) {
                        let place = Place { score: 0.0, upstream: 0.0, index: [1, 2, q, k], extents: EXTENTS, params: &[] };
                        let holds = trace.eval_first(&place, Precision::F32) != 0.0;
                        let said = match judged {
                            Judged::Never => !holds,
                            Judged::Always => holds,
                            Judged::Unknown => true,
                        };
                        assert!(said, "{text}: {judged:?} of q {first_q} to {last_q}, k {first_k} to {last_k}; not at {q}, {k}");
                    }
                }
            }
        }
        assert!(decided * 2 > boxes, "{decided} of {boxes} boxes are decided");
    }

    /// Checks the range of the integer in `score + f32(...)` against its value at every position.
    #[test]
    fn ranges_hold_whatever_whole_numbers_come_to() {
        let bounded = [
            "k - q",
            "abs(k - q) * 3 + head",
            "(q + 7) % 5 - k / 3",
            "min(max(i32(score), -5), q)",
            "max(min(q * 100000000, 9), -9)",
            "select(k < q, k - q, batch)",
            "i32(f32(q) * 1.5)",
            "max(-9, min(9, q / (k - 25)))",
        ];
        let unbounded = ["q * 100000000", "i32(score)", "i32(exp(f32(q)))", "i32(score) / -1", "-i32(score)", "abs(i32(score) - q)"];
        for (text, known) in bounded.map(|text| (text, true)).into_iter().chain(unbounded.map(|text| (text, false))) {
            let trace: Trace = format!("score + f32({text})").parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let ranges = trace.ranges([[0, 1], [0, 2], [0, 39], [0, 49]], EXTENTS);
            let whole = |node: &Node| if let Node::Unary(Unary::ToF32, x) = node { ranges[x.index()] } else { None };
            let [low, high] = trace.nodes().iter().filter_map(whole).next_back().unwrap();
            assert_eq!(low > -1e6 && high < 1e6, known, "{text}: {low} to {high}");
            for (q, k) in (0..40).flat_map(|q| (0..50).map(move |k| (q, k))) {
                for score in [0.0, -3e9, 3e9, 7.5] {
                    let place = Place { score, upstream: 0.0, index: [1, 2, q, k], extents: EXTENTS, params: &[] };
                    let x = trace.eval_first(&place, Precision::F64) - score;
                    assert!(x >= low && x <= high, "{text}: {x} is not from {low} to {high}");
                }
            }
        }
    }
}
