//! Decomposes masks into disjoint pieces, each a band over a block of queries and keys.
//!
//! A prefix next to a causal mask is a rectangle and a band; global tokens next to a window are two bands. Executors skip tiles of a band, but not of
//! such a union. Results over disjoint keys can be merged by their statistics.

use super::linear::{self, Linear};
use super::{Kept, Region};
use crate::expr::{Binary, Const, Node, NodeId, Trace, Unary};
use std::fmt;
use std::ops::Range;

/// A part of a decomposed mask: a band within a block of queries and keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The queries of the block.
    pub queries: Range<i64>,
    /// The keys of the block.
    pub keys: Range<i64>,
    /// The band, in indices relative to the block.
    pub region: Region,
}

impl Piece {
    /// Returns a band over a block, both diagonals included, without empty rows and columns; `None` if it is empty.
    fn of(queries: Range<i64>, keys: Range<i64>, [first, last]: [i64; 2]) -> Option<Piece> {
        let first = first.max(keys.start - (queries.end - 1));
        let last = last.min(keys.end - 1 - queries.start);
        if queries.is_empty() || keys.is_empty() || first > last {
            return None;
        }
        let queries = queries.start.max(keys.start - last)..queries.end.min(keys.end - first);
        let keys = keys.start.max(queries.start + first)..keys.end.min(queries.end + last);
        let shift = keys.start - queries.start;
        let region = Region { lower: Some(first - 1 - shift), upper: Some(last - shift), prefix: None };
        let region = region.normalise(queries.end - queries.start, keys.end - keys.start);
        Some(Piece { queries, keys, region })
    }

    /// Returns the part of the piece within these queries and keys, or `None` if there is none.
    pub fn within(&self, queries: &Range<i64>, keys: &Range<i64>) -> Option<Piece> {
        let both = |a: &Range<i64>, b: &Range<i64>| a.start.max(b.start)..a.end.min(b.end);
        let shift = self.keys.start - self.queries.start;
        let first = self.region.lower.map_or(-FAR, |lower| lower + 1 + shift);
        let last = self.region.upper.map_or(FAR, |upper| upper + shift);
        Piece::of(both(&self.queries, queries), both(&self.keys, keys), [first, last])
    }

    /// Returns the number of query-key pairs in the band.
    pub fn pairs(&self) -> i64 {
        let rows = self.queries.end - self.queries.start;
        let keys = self.keys.end - self.keys.start;
        (0..rows).map(|q| self.region.key_range(q, keys)).map(|range| range.end - range.start).sum()
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Piece { queries, keys, region } = self;
        write!(f, "{} <= q < {}, {} <= k < {}", queries.start, queries.end, keys.start, keys.end)?;
        let shift = keys.start - queries.start;
        if let Some(lower) = region.lower {
            write!(f, ", k - q > {}", lower + shift)?;
        }
        if let Some(upper) = region.upper {
            write!(f, ", k - q <= {}", upper + shift)?;
        }
        Ok(())
    }
}

/// A diagonal past every other.
const FAR: i64 = 1 << 40;
/// The most blocks along one axis. With more of them the decomposition gains nothing.
const MOST: usize = 6;

impl Kept {
    /// Decomposes an index-only mask into disjoint pieces that together contain exactly the pairs it attends to. Pieces with more queries
    /// come first. Returns `None` if the mask is not a union of a few such pieces. `extents` are (batch, heads_q, seq_q, seq_kv).
    pub fn pieces(&self, extents: [i64; 4]) -> Option<Vec<Piece>> {
        let [_, _, seq_q, seq_kv] = extents;
        if !self.ends.is_full() || self.seq_len_q || self.seq_len_kv || seq_q < 2 || seq_kv < 2 {
            return None;
        }
        let mut rules = vec![of_region(&self.region)];
        if let Some(rest) = &self.rest {
            rules.push(Formula::of(rest, &Value::all(rest), *rest.roots().first()?, true)?);
        }
        let formula = Formula::All(rules);
        let mut cuts = Cuts::default();
        formula.cuts(&mut cuts)?;
        let [rows, keys] = [(cuts.q, seq_q), (cuts.k, seq_kv)].map(|(at, extent)| intervals(at, extent));
        let diagonals = diagonals(cuts.diagonal);
        if rows.len() > MOST || keys.len() > MOST {
            return None;
        }
        let mut blocks: Vec<Block> = Vec::new();
        for keys in &keys {
            let mut column: Vec<Block> = Vec::new();
            for queries in &rows {
                let kept: Vec<bool> =
                    diagonals.iter().map(|d| formula.holds(&At { q: queries.start, k: keys.start, diagonal: d.start })).collect();
                match column.last_mut().filter(|above| above.kept == kept) {
                    Some(above) => above.queries.end = queries.end,
                    None => column.push(Block { queries: queries.clone(), keys: keys.clone(), kept }),
                }
            }
            for block in column {
                let left = blocks.iter_mut().find(|b| b.keys.end == block.keys.start && b.queries == block.queries && b.kept == block.kept);
                match left {
                    Some(left) => left.keys.end = block.keys.end,
                    None => blocks.push(block),
                }
            }
        }
        let mut pieces = Vec::new();
        for block in blocks {
            pieces.extend(block.piece(&diagonals)?);
        }
        pieces.sort_by_key(|piece: &Piece| {
            (std::cmp::Reverse(piece.queries.end - piece.queries.start), piece.queries.start, piece.keys.start)
        });
        Some(pieces)
    }
}

/// A rectangle of pairs, and which of its diagonals are kept.
struct Block {
    queries: Range<i64>,
    keys: Range<i64>,
    kept: Vec<bool>,
}

impl Block {
    /// Returns its band without empty rows and columns. `Some(None)` if the block is empty, `None` if it is no band.
    fn piece(self, diagonals: &[Range<i64>]) -> Option<Option<Piece>> {
        let Block { queries, keys, kept } = self;
        // In this block, `k − q` is at least `least` and at most `most`.
        let [least, most] = [keys.start - (queries.end - 1), keys.end - 1 - queries.start];
        let there = diagonals.iter().zip(kept).filter(|(d, kept)| *kept && d.start <= most && d.end > least);
        let mut band: Option<Range<i64>> = None;
        for (d, _) in there {
            match &mut band {
                None => band = Some(d.clone()),
                Some(band) if band.end == d.start => band.end = d.end,
                Some(_) => return None,
            }
        }
        let Some(Range { start, end }) = band else { return Some(None) };
        Some(Piece::of(queries, keys, [start, end - 1]))
    }
}

/// A boolean formula over linear functions of the two indices.
#[derive(Debug)]
enum Formula {
    Const(bool),
    /// The function is not negative.
    Holds(Linear),
    All(Vec<Formula>),
    Any(Vec<Formula>),
}

/// Indices at which a formula may change.
#[derive(Default)]
struct Cuts {
    q: Vec<i64>,
    k: Vec<i64>,
    /// Values of `k − q`.
    diagonal: Vec<i64>,
}

/// A query, a key and a diagonal, each representing all up to the next cut.
struct At {
    q: i64,
    k: i64,
    diagonal: i64,
}

impl Formula {
    /// Returns the formula of a value, or of its negation.
    fn of(trace: &Trace, values: &[Option<Value>], id: NodeId, holds: bool) -> Option<Formula> {
        let both = |x: NodeId, y: NodeId| Some(vec![Formula::of(trace, values, x, holds)?, Formula::of(trace, values, y, holds)?]);
        match (trace.node(id), holds) {
            (Node::Const(c), _) => Some(Formula::Const(c == Const::Bool(holds))),
            (Node::Unary(Unary::Not, x), _) => Formula::of(trace, values, x, !holds),
            (Node::Binary(Binary::And, x, y), true) | (Node::Binary(Binary::Or, x, y), false) => Some(Formula::All(both(x, y)?)),
            (Node::Binary(Binary::And, x, y), false) | (Node::Binary(Binary::Or, x, y), true) => Some(Formula::Any(both(x, y)?)),
            (Node::Binary(f, x, y), _) => {
                let (x, y) = (values[x.index()].as_ref()?, values[y.index()].as_ref()?);
                let at_least = |x: &Value, y: &Value, more: i64| Some(x.plus(&y.negated())?.plus(&Value::constant(-more))?.not_negative());
                match (f, holds) {
                    (Binary::Ge, true) | (Binary::Lt, false) => at_least(x, y, 0),
                    (Binary::Gt, true) | (Binary::Le, false) => at_least(x, y, 1),
                    (Binary::Le, true) | (Binary::Gt, false) => at_least(y, x, 0),
                    (Binary::Lt, true) | (Binary::Ge, false) => at_least(y, x, 1),
                    (Binary::Eq, true) | (Binary::Ne, false) => Some(Formula::All(vec![at_least(x, y, 0)?, at_least(y, x, 0)?])),
                    (Binary::Ne, true) | (Binary::Eq, false) => Some(Formula::Any(vec![at_least(x, y, 1)?, at_least(y, x, 1)?])),
                    (
                        Binary::Add
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
            (Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Param(_) | Node::Read(..), _) => None,
            (Node::Unary(..) | Node::Select(..), _) => None,
        }
    }

    /// Adds the indices at which it may change; `None` for functions that are no row, column or diagonal.
    fn cuts(&self, cuts: &mut Cuts) -> Option<()> {
        match self {
            Formula::Const(_) => Some(()),
            Formula::Holds(l) => {
                // Cut at the first index where `l` is non-negative or, if `l` decreases, at the first index where `l` is negative.
                match (l.q, l.k) {
                    (0, 0) => {}
                    (1, 0) => cuts.q.push(-l.constant),
                    (-1, 0) => cuts.q.push(l.constant + 1),
                    (0, 1) => cuts.k.push(-l.constant),
                    (0, -1) => cuts.k.push(l.constant + 1),
                    (-1, 1) => cuts.diagonal.push(-l.constant),
                    (1, -1) => cuts.diagonal.push(l.constant + 1),
                    _ => return None,
                }
                Some(())
            }
            Formula::All(all) | Formula::Any(all) => all.iter().try_for_each(|part| part.cuts(cuts)),
        }
    }

    fn holds(&self, at: &At) -> bool {
        match self {
            Formula::Const(c) => *c,
            Formula::Holds(Linear { q, k, constant }) => match (q, k) {
                (-1, 1) => at.diagonal + constant >= 0,
                (1, -1) => constant - at.diagonal >= 0,
                _ => q * at.q + k * at.k + constant >= 0,
            },
            Formula::All(all) => all.iter().all(|part| part.holds(at)),
            Formula::Any(any) => any.iter().any(|part| part.holds(at)),
        }
    }
}

/// An integer that is the minimum or the maximum of linear functions.
#[derive(Clone, Debug)]
enum Value {
    Linear(Linear),
    Least(Box<[Value; 2]>),
    Greatest(Box<[Value; 2]>),
}

/// The most functions within a value.
const TERMS: usize = 16;

impl Value {
    /// Returns each value of a trace that is such an integer.
    fn all(trace: &Trace) -> Vec<Option<Value>> {
        let linear = linear::all(trace);
        let mut all: Vec<Option<Value>> = Vec::with_capacity(linear.len());
        for (node, linear) in trace.nodes().iter().zip(linear) {
            let two = |x: NodeId, y: NodeId| Some(Box::new([all[x.index()].clone()?, all[y.index()].clone()?]));
            let value = match *node {
                Node::Unary(Unary::Neg, x) => all[x.index()].as_ref().map(Value::negated),
                Node::Unary(Unary::Abs, x) => all[x.index()].clone().map(|x| Value::Greatest(Box::new([x.negated(), x]))),
                Node::Binary(Binary::Min, x, y) => two(x, y).map(Value::Least),
                Node::Binary(Binary::Max, x, y) => two(x, y).map(Value::Greatest),
                Node::Binary(Binary::Add, x, y) => two(x, y).and_then(|two| two[0].plus(&two[1])),
                Node::Binary(Binary::Sub, x, y) => two(x, y).and_then(|two| two[0].plus(&two[1].negated())),
                Node::Score
                | Node::Upstream
                | Node::Index(_)
                | Node::Extent(_)
                | Node::Const(_)
                | Node::Param(_)
                | Node::Read(..)
                | Node::Unary(..)
                | Node::Binary(..)
                | Node::Select(..) => None,
            };
            all.push(linear.map(Value::Linear).or(value).filter(|value| value.terms() <= TERMS));
        }
        all
    }

    fn constant(constant: i64) -> Value {
        Value::Linear(Linear { q: 0, k: 0, constant })
    }

    fn terms(&self) -> usize {
        match self {
            Value::Linear(_) => 1,
            Value::Least(two) | Value::Greatest(two) => two.iter().map(Value::terms).sum(),
        }
    }

    fn negated(&self) -> Value {
        let each = |two: &[Value; 2]| Box::new([two[0].negated(), two[1].negated()]);
        match self {
            Value::Linear(l) => Value::Linear(Linear { q: -l.q, k: -l.k, constant: -l.constant }),
            Value::Least(two) => Value::Greatest(each(two)),
            Value::Greatest(two) => Value::Least(each(two)),
        }
    }

    /// Returns the sum; `None` if 32-bit arithmetic might wrap.
    fn plus(&self, other: &Value) -> Option<Value> {
        let each = |two: &[Value; 2], other: &Value| Some(Box::new([two[0].plus(other)?, two[1].plus(other)?]));
        match (self, other) {
            (Value::Linear(x), Value::Linear(y)) => x.combine(*y, 1).exact().map(Value::Linear),
            (Value::Least(two), x) | (x, Value::Least(two)) => each(two, x).map(Value::Least),
            (Value::Greatest(two), x) | (x, Value::Greatest(two)) => each(two, x).map(Value::Greatest),
        }
    }

    fn not_negative(self) -> Formula {
        match self {
            Value::Linear(l) => Formula::Holds(l),
            Value::Least(two) => Formula::All((*two).map(Value::not_negative).into()),
            Value::Greatest(two) => Formula::Any((*two).map(Value::not_negative).into()),
        }
    }
}

fn of_region(region: &Region) -> Formula {
    let Region { lower, upper, prefix } = *region;
    let holds = |q, k, constant| Formula::Holds(Linear { q, k, constant });
    let mut all = Vec::new();
    all.extend(lower.map(|lower| holds(-1, 1, -lower - 1)));
    all.extend(upper.map(|upper| holds(1, -1, upper)));
    all.extend(prefix.map(|prefix| Formula::Any(vec![holds(1, -1, 0), holds(0, -1, prefix - 1)])));
    Formula::All(all)
}

/// Returns the intervals between cuts of an axis.
fn intervals(mut cuts: Vec<i64>, extent: i64) -> Vec<Range<i64>> {
    cuts.retain(|&at| 0 < at && at < extent);
    cuts.extend([0, extent]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Returns the intervals of diagonals between cuts.
fn diagonals(mut cuts: Vec<i64>) -> Vec<Range<i64>> {
    cuts.extend([-FAR, FAR]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;

    fn pieces(mask: &str, seq_q: i64, seq_kv: i64) -> Option<Vec<Piece>> {
        Kept::of(&[mask.parse().unwrap()], [2, 3, seq_q, seq_kv]).unwrap().pieces([2, 3, seq_q, seq_kv])
    }

    /// Compares pieces with the mask, pair by pair.
    fn check(mask: &str, seq_q: i64, seq_kv: i64) -> usize {
        let rule: Mask = mask.parse().unwrap();
        let trace = rule.trace().unwrap();
        let all = pieces(mask, seq_q, seq_kv).unwrap_or_else(|| panic!("{mask} has no pieces"));
        for q in 0..seq_q {
            for k in 0..seq_kv {
                let place =
                    crate::expr::Place { score: 0.0, upstream: 0.0, index: [0, 0, q, k], extents: [2, 3, seq_q, seq_kv], params: &[] };
                let want = trace.eval_first(&place, crate::expr::Precision::F64) != 0.0;
                let inside =
                    |p: &&Piece| p.queries.contains(&q) && p.keys.contains(&k) && p.region.keeps(q - p.queries.start, k - p.keys.start);
                let times = all.iter().filter(inside).count();
                assert_eq!(times, usize::from(want), "{mask} over {seq_q} and {seq_kv}: {q} {k}: {all:?}");
            }
        }
        let pairs: i64 = all.iter().map(Piece::pairs).sum();
        let kept = (0..seq_q * seq_kv).filter(|n| {
            all.iter().any(|p| {
                let (q, k) = (n / seq_kv, n % seq_kv);
                p.queries.contains(&q) && p.keys.contains(&k) && p.region.keeps(q - p.queries.start, k - p.keys.start)
            })
        });
        assert_eq!(pairs, kept.count() as i64, "{mask}");
        all.len()
    }

    const MASKS: [(&str, usize); 14] = [
        ("causal", 1),
        ("prefix-lm:5", 2),
        ("prefix-lm:5 & k - q > -4", 2),
        ("k < 3 | k - q <= 0 & k - q > -4", 2),
        ("(k < 3 | k - q > -4) & k <= q", 2),
        ("k < 3 | q < 2 | k - q <= 2 & q - k <= 2", 3),
        ("k <= q & !(k < 7 & q >= 9)", 2),
        ("k >= 4 & k < 9", 1),
        ("q < 6 & k < 6 | q >= 6 & k >= 6", 2),
        ("k != 4", 2),
        ("abs(q - k) < 3 | k < 2 | q < 2", 3),
        ("k >= max(min(q - 2, 12), 0) & k < max(min(q - 2, 12), 0) + 5", 3),
        ("min(q, 9) >= k", 1),
        ("abs(q - k) >= 14 | k < 3", 2),
    ];

    #[test]
    fn pieces_are_disjoint_and_keep_what_the_mask_keeps() {
        for (mask, count) in MASKS {
            assert_eq!(check(mask, 17, 17), count, "{mask}");
            for (seq_q, seq_kv) in [(17, 13), (13, 17), (2, 40), (40, 2), (5, 5), (6, 30)] {
                check(mask, seq_q, seq_kv);
            }
        }
    }

    #[test]
    fn a_piece_within_a_block_is_what_it_keeps_there() {
        let all = pieces("prefix-lm:5 & k - q > -6", 16, 16).unwrap();
        for (queries, keys) in [(0..7, 0..16), (6..16, 3..9), (12..16, 0..5), (3..4, 3..4)] {
            for piece in &all {
                let part = piece.within(&queries, &keys);
                let keeps = |p: &Piece, q: i64, k: i64| {
                    p.queries.contains(&q) && p.keys.contains(&k) && p.region.keeps(q - p.queries.start, k - p.keys.start)
                };
                for (q, k) in (0..16).flat_map(|q| (0..16).map(move |k| (q, k))) {
                    let want = keeps(piece, q, k) && queries.contains(&q) && keys.contains(&k);
                    assert_eq!(part.as_ref().is_some_and(|part| keeps(part, q, k)), want, "{piece} in {queries:?} and {keys:?}: {q} {k}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_union_of_a_few_bands_has_no_pieces() {
        for mask in ["k % 4 == 0", "(q + k) < 9", "k - q <= -3 | k - q >= 3", "k == q | k == q - 5", "padding"] {
            assert_eq!(pieces(mask, 17, 17), None, "{mask}");
        }
        assert_eq!(pieces("prefix-lm:5", 1, 17), None);
    }

    #[test]
    fn a_prefix_is_a_rectangle_and_a_band() {
        let all = pieces("prefix-lm:5", 16, 16).unwrap();
        let causal = Region { upper: Some(0), ..Region::default() };
        let band = Piece { queries: 5..16, keys: 5..16, region: causal };
        assert_eq!(all, [Piece { queries: 0..16, keys: 0..5, region: Region::default() }, band]);
    }
}
