//! The normal form of a problem's masks: a band, lengths, and the rest.
//!
//! The conjunction of all masks is one trace. Terms that compare linear functions of the two indices become bounds of a [`Region`], however they are
//! written. Terms that compare an index with a declared length become lengths. The rest stays a trace.

use super::band::Corner;
use super::ends::{self, Ends};
use super::linear::{self, Linear};
use super::{Align, Mask, Region, text};
use crate::dtype::DType;
use crate::expr::{Axes, Axis, Binary, Builder, Const, Declared, ExprErrors, Inputs, Node, NodeId, ParamKind, Trace, Unary};
use crate::packed::Packed;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// The name of the declared parameter of query lengths: i32 `[batch]`.
pub const SEQ_LEN_Q: &str = "seq_len_q";
/// The name of the declared parameter of key lengths: i32 `[batch]`.
pub const SEQ_LEN_KV: &str = "seq_len_kv";

/// Declares the parameter of this name as per-sequence lengths.
pub(crate) fn length_of(name: &str) -> Declared {
    Declared { name: name.to_owned(), kind: ParamKind::Tensor { axes: Axes::from([Axis::Batch]), dtype: DType::I32 }, default: None }
}

/// The normal form of all masks of a problem: bands, lengths, and the rest as a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Kept {
    /// A band, with an optional prefix.
    pub region: Region,
    /// A bottom-right aligned band, in addition to the region: only if batch entries have lengths.
    #[serde(skip_serializing_if = "Ends::is_full")]
    pub ends: Ends,
    /// Queries at and past the `seq_len_q` of their batch entry attend to no key.
    pub seq_len_q: bool,
    /// Keys at and past the `seq_len_kv` of their batch entry are masked out.
    pub seq_len_kv: bool,
    /// The part of the masks that is neither a band nor a length, evaluated element by element: keys are masked out where it is false. It
    /// contains extents as constants.
    pub rest: Option<Arc<Trace>>,
}

impl fmt::Display for Kept {
    /// Writes a text that parses to a mask with the same normal form, in a problem of the same extents; `everything` if no key is masked out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_full() {
            return f.write_str("everything");
        }
        let Region { lower, upper, prefix } = self.region;
        let is_declared = |name: &str| self.rest.as_ref().is_some_and(|rest| rest.find(name).is_some());
        let causal = Mask::causal().to_string();
        let mut terms: Vec<String> = Vec::new();
        terms.extend(lower.map(|lower| format!("k - q > {lower}")));
        terms.extend(upper.map(|upper| if upper == 0 && !is_declared(&causal) { causal } else { format!("k - q <= {upper}") }));
        terms.extend(prefix.map(|prefix| format!("(k <= q | k < {prefix})")));
        if !self.ends.is_full() {
            let Ends { lower, upper } = self.ends;
            terms.push(Mask::window(lower.map(i64::saturating_neg), upper, Align::Ends).to_string());
        }
        let mut b = Builder::new();
        let mut values = Vec::new();
        for (is_padded, axis, name) in [(self.seq_len_q, Axis::Q, SEQ_LEN_Q), (self.seq_len_kv, Axis::K, SEQ_LEN_KV)] {
            if is_padded {
                let (index, length) = (b.index(axis), b.param(length_of(name)));
                values.push(b.binary(Binary::Lt, index, length));
            }
        }
        values.extend(self.rest.iter().flat_map(|rest| b.inline(rest, Inputs::default())));
        f.write_str(&text::conjunction(&terms, b, &values))
    }
}

/// A term of the conjunction, and whether it must be true or false.
type Term = (NodeId, bool);

/// Splits a conjunction into terms.
fn terms(trace: &Trace, root: NodeId) -> Vec<Term> {
    let mut terms = Vec::new();
    let mut stack = vec![(root, true)];
    while let Some((id, holds)) = stack.pop() {
        match (trace.node(id), holds) {
            (Node::Binary(Binary::And, x, y), true) | (Node::Binary(Binary::Or, x, y), false) => stack.extend([(y, holds), (x, holds)]),
            (Node::Unary(Unary::Not, x), _) => stack.push((x, !holds)),
            (
                Node::Score
                | Node::Upstream
                | Node::Index(_)
                | Node::Extent(_)
                | Node::Const(_)
                | Node::Param(_)
                | Node::Read(..)
                | Node::Unary(..)
                | Node::Binary(..)
                | Node::Select(..),
                _,
            ) => terms.push((id, holds)),
        }
    }
    terms
}

struct Splitter<'t> {
    trace: &'t Trace,
    linear: Vec<Option<Linear>>,
    kept: Kept,
    extents: [i64; 4],
}

impl Splitter<'_> {
    fn bounds_of(&self, (id, holds): Term) -> Option<Vec<Linear>> {
        match self.trace.node(id) {
            Node::Binary(f, x, y) => linear::bounds(f, holds, self.linear[x.index()]?, self.linear[y.index()]?),
            Node::Unary(Unary::Not, x) => self.bounds_of((x, !holds)),
            Node::Score
            | Node::Upstream
            | Node::Index(_)
            | Node::Extent(_)
            | Node::Const(_)
            | Node::Param(_)
            | Node::Read(..)
            | Node::Unary(..)
            | Node::Select(..) => None,
        }
    }

    /// On an axis of one element the index is 0 and does not appear. Adds it, so that the function depends on both indices.
    fn with_only_index(&self, l: Linear) -> Linear {
        let [_, _, seq_q, seq_kv] = self.extents;
        match (l.q, l.k) {
            (0, k @ (1 | -1)) if seq_q == 1 => Linear { q: -k, ..l },
            (q @ (1 | -1), 0) if seq_kv == 1 => Linear { k: -q, ..l },
            _ => l,
        }
    }

    /// Adds a term to the band; returns false if it is not a bound.
    fn band(&mut self, term: Term) -> bool {
        let Some(bounds) = self.bounds_of(term) else { return false };
        let bounds: Vec<Linear> = bounds.into_iter().map(|l| self.with_only_index(l)).collect();
        let fits = |l: &Linear| matches!((l.q, l.k), (1, -1) | (-1, 1) | (0, 0));
        if !bounds.iter().all(fits) {
            return false;
        }
        for l in bounds {
            match (l.q, l.k) {
                (1, -1) => self.kept.region.drop_past(Some(l.constant)),
                (-1, 1) => self.kept.region.drop_through(Some(-l.constant - 1)),
                _ if l.constant < 0 => self.kept.region.drop_all(self.extents[2]),
                _ => {}
            }
        }
        true
    }

    /// Recognises `k ≤ q` or `k < len`.
    fn prefix(&mut self, (id, holds): Term) -> bool {
        let (x, y) = match (self.trace.node(id), holds) {
            (Node::Binary(Binary::Or, x, y), true) | (Node::Binary(Binary::And, x, y), false) => (x, y),
            _ => return false,
        };
        let one = |id: NodeId| match self.bounds_of((id, holds)).as_deref() {
            Some(&[l]) => Some(l),
            Some(_) | None => None,
        };
        let (Some(a), Some(b)) = (one(x), one(y)) else { return false };
        let causal = |l: Linear| {
            let l = self.with_only_index(l);
            (l.q, l.k, l.constant) == (1, -1, 0)
        };
        let len = |l: Linear| ((l.q, l.k) == (0, -1)).then_some(l.constant + 1);
        let found = if causal(a) { len(b) } else { None }.or(if causal(b) { len(a) } else { None });
        if let Some(len) = found {
            self.kept.region.prefix_at_most(len);
        }
        found.is_some()
    }

    /// Recognises an index below the length of its batch entry.
    fn padding(&mut self, (id, holds): Term) -> bool {
        let (index, length) = match (self.trace.node(id), holds) {
            (Node::Binary(Binary::Lt, x, y), true) | (Node::Binary(Binary::Ge, x, y), false) => (x, y),
            (Node::Binary(Binary::Gt, x, y), true) | (Node::Binary(Binary::Le, x, y), false) => (y, x),
            _ => return false,
        };
        let Node::Param(p) = self.trace.node(length) else { return false };
        let p = &self.trace.params()[p.index()];
        if p.kind != length_of(&p.name).kind {
            return false;
        }
        let [_, _, seq_q, seq_kv] = self.extents;
        let index = self.trace.node(index);
        let is = |axis: Axis, extent: i64| index == Node::Index(axis) || (extent == 1 && index == Node::Const(Const::I32(0)));
        match p.name.as_str() {
            SEQ_LEN_Q if is(Axis::Q, seq_q) => self.kept.seq_len_q = true,
            SEQ_LEN_KV if is(Axis::K, seq_kv) => self.kept.seq_len_kv = true,
            _ => return false,
        }
        true
    }
}

impl Kept {
    /// Normalises the conjunction of `masks` in a problem of these extents, (batch, heads_q, seq_q, seq_kv), whose batch entries are not packed.
    ///
    /// # Errors
    /// Fails if two masks declare a parameter of the same name differently.
    pub fn of(masks: &[Mask], extents: [i64; 4]) -> Result<Kept, ExprErrors> {
        let kept = Kept::conjunction(masks, extents, Corner::Extents)?;
        let lengths = [kept.seq_len_q, kept.seq_len_kv];
        if lengths == [false; 2] || !masks.iter().any(ends::reads) {
            return Ok(kept);
        }
        let (ends, others) = ends::split(masks, [extents[2], extents[3]]);
        Ok(Kept { ends, ..Kept::conjunction(&others, extents, Corner::Lengths(lengths))? })
    }

    /// Normalises the conjunction of `masks` for packed sequences. If keys share `cu_seqlens` with queries, bottom-right and top-left
    /// alignment are the same. If keys have `cu_seqlens` of their own, bottom-right aligned windows must be terms of the conjunction.
    pub(crate) fn of_documents(masks: &[Mask], extents: [i64; 4], packed: &Packed) -> Result<Kept, ExprErrors> {
        if !packed.cross || !masks.iter().any(ends::reads) {
            return Kept::conjunction(masks, extents, Corner::Origin);
        }
        let (ends, others) = ends::split(masks, [extents[2], extents[3]]);
        Ok(Kept { ends, ..Kept::conjunction(&others, extents, Corner::Origin)? })
    }

    /// Normalises a conjunction. Bottom-right aligned windows go through this corner.
    fn conjunction(masks: &[Mask], extents: [i64; 4], corner: Corner) -> Result<Kept, ExprErrors> {
        let mut b = Builder::new();
        let root = Mask::All(masks.to_vec()).build(&mut b, corner);
        let all = b.finish(&[root]).map_err(ExprErrors)?;
        let mut b = Builder::new();
        let roots = b.inline(&all, Inputs { extents: Some(extents), ..Inputs::default() });
        let trace = b.finish(&roots).map_err(ExprErrors)?;
        let root = trace.roots()[0];
        let linear = linear::all(&trace);
        let mut splitter = Splitter { trace: &trace, linear, kept: Kept::default(), extents };
        let mut rest = Vec::new();
        for (id, holds) in terms(&trace, root) {
            let term = (id, holds);
            if let Node::Const(c) = trace.node(id) {
                if (c.to_f64() != 0.0) != holds {
                    splitter.kept.region.drop_all(extents[2]);
                }
            } else if !(splitter.band(term) || splitter.prefix(term) || splitter.padding(term)) {
                rest.push(term);
            }
        }
        let mut kept = splitter.kept;
        kept.region = kept.region.normalise(extents[2], extents[3]);
        if !rest.is_empty() {
            kept.rest = Some(Arc::new(remaining(&trace, &rest)?));
        }
        Ok(kept)
    }

    /// Returns the range of keys that the masks' bands allow for query `q`, in a batch entry with these lengths (queries, keys). Other
    /// masks may mask out more keys. Neither end of the range decreases from one query to the next.
    pub fn key_range(&self, q: i64, lengths: [i64; 2]) -> std::ops::Range<i64> {
        let (band, ends) = (self.region.key_range(q, lengths[1]), self.ends.key_range(q, lengths));
        let start = band.start.max(ends.start);
        start..band.end.min(ends.end).max(start)
    }

    /// Returns the masks with the defaults of all declared scalars set to 0, so that equal masks have equal texts.
    #[must_use]
    pub fn without_defaults(&self) -> Kept {
        Kept { rest: self.rest.as_ref().map(|rest| Arc::new(rest.without_defaults())), ..self.clone() }
    }

    /// Returns whether no key is masked out.
    pub fn is_full(&self) -> bool {
        self.region.is_full() && self.ends.is_full() && !self.seq_len_q && !self.seq_len_kv && self.rest.is_none()
    }
}

/// Returns the conjunction of these terms as a trace.
fn remaining(trace: &Trace, terms: &[Term]) -> Result<Trace, ExprErrors> {
    let mut b = Builder::new();
    let here = b.copy(trace);
    let parts: Vec<NodeId> = terms
        .iter()
        .map(|&(id, holds)| {
            let part = here[id.index()];
            if holds { part } else { b.unary(Unary::Not, part) }
        })
        .collect();
    let root = parts.into_iter().reduce(|x, y| b.binary(Binary::And, x, y));
    b.finish(root.as_slice()).map_err(ExprErrors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(mask: &str, seq_q: i64, seq_kv: i64) -> Kept {
        Kept::of(&[mask.parse().unwrap()], [2, 3, seq_q, seq_kv]).unwrap()
    }

    #[test]
    fn an_index_below_the_length_of_its_axis_is_padding_and_nothing_else_is() {
        let lengths = |mask: &str, seq_q, seq_kv| {
            let kept = kept(mask, seq_q, seq_kv);
            assert_eq!(kept.rest.is_none(), kept.seq_len_q || kept.seq_len_kv, "{mask}");
            [kept.seq_len_q, kept.seq_len_kv]
        };
        let of = |declared: &str, rule: &str| format!("tensor {declared}: i32; {rule}");
        for rule in ["q < seq_len_q", "seq_len_q > q", "!(q >= seq_len_q)", "!(seq_len_q <= q)"] {
            assert_eq!(lengths(&of("seq_len_q[batch]", rule), 5, 7), [true, false], "{rule}");
            // With one query, `q` is the constant 0. The mask is still recognised as padding.
            assert_eq!(lengths(&of("seq_len_q[batch]", rule), 1, 7), [true, false], "{rule}");
        }
        for rule in ["k < seq_len_kv", "seq_len_kv > k"] {
            assert_eq!(lengths(&of("seq_len_kv[batch]", rule), 5, 7), [false, true], "{rule}");
            assert_eq!(lengths(&of("seq_len_kv[batch]", rule), 5, 1), [false, true], "{rule}");
        }
        for (declared, rule) in [
            ("seq_len_q[batch]", "k < seq_len_q"),
            ("seq_len_kv[batch]", "q < seq_len_kv"),
            ("seq_len_q[batch]", "0 < seq_len_q"),
            ("seq_len_kv[batch]", "0 < seq_len_kv"),
            ("seq_len_q[batch]", "1 < seq_len_q"),
            ("seq_len_q[head]", "q < seq_len_q"),
            ("length[batch]", "q < length"),
            ("seq_len_q[batch]", "q <= seq_len_q"),
        ] {
            assert_eq!(lengths(&of(declared, rule), 5, 7), [false, false], "{declared} {rule}");
        }
        // With one query, its index is 0, not 1, so this is no padding mask.
        assert_eq!(lengths(&of("seq_len_q[batch]", "1 < seq_len_q"), 1, 7), [false, false]);
    }

    #[test]
    fn what_drops_anything_is_not_full() {
        assert!(Kept::of(&[], [2, 3, 5, 7]).unwrap().is_full());
        assert!(kept("window:5,6", 5, 7).is_full());
        for mask in [
            "causal",
            "tensor seq_len_q[batch]: i32; q < seq_len_q",
            "tensor seq_len_kv[batch]: i32; k < seq_len_kv",
            "padding",
            "k % 2 == 0",
        ] {
            assert!(!kept(mask, 5, 7).is_full(), "{mask}");
        }
    }

    #[test]
    fn a_term_that_never_holds_drops_every_key() {
        for mask in ["1 > 2", "q < q", "q - k < q - k - 1"] {
            for (seq_q, seq_kv) in [(1, 1), (5, 7), (7, 5)] {
                let kept = kept(mask, seq_q, seq_kv);
                assert_eq!(kept.rest, None, "{mask}");
                let pairs = (0..seq_q).flat_map(|q| (0..seq_kv).map(move |k| (q, k)));
                assert!(pairs.clone().all(|(q, k)| !kept.region.keeps(q, k)), "{mask} {seq_q} x {seq_kv}: {:?}", kept.region);
            }
        }
    }
}
