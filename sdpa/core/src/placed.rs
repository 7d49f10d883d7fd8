//! Placed specifications: the part of an attention problem that covers some of its queries, keys and heads.
//!
//! Context parallelism splits one problem over ranks. Each rank computes attention for chunks of the tokens, but masks and score_mods must still see the
//! positions and extents of the whole problem. [`AttentionSpec::placed`] rewrites them: in every trace, `q` becomes `stride · q + start` of the chunk
//! of queries, `k` that of the chunk of keys, and `head` becomes `head + first head`; the extents become constants of the whole problem.
//!
//! ```
//! use sdpa_core::{AttentionSpec, Chunk, DType, Layout, Mask, Placement, Shape};
//!
//! let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 4096, seq_kv: 4096, dim_qk: 64, dim_v: 64 };
//! let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::window(Some(1500), Some(0), sdpa_core::Align::TopLeft));
//! let placed = |q: i64, k: i64| {
//!     let (q, k) = (Chunk::new(1024 * q, 1, 1024), Chunk::new(1024 * k, 1, 1024));
//!     spec.placed(&Placement::of(&spec).with_q(q).with_k(k))
//! };
//! // The band moves with the chunks, and stays a band.
//! let part = placed(3, 2)?.map(|placed| placed.spec.validate()).transpose()?;
//! assert_eq!(part.map(|problem| problem.kept().to_string()).as_deref(), Some("k - q > -476"));
//! // No query of the last chunk attends to a key of the first one.
//! assert!(placed(3, 0)?.is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Plans
//!
//! Starts of chunks are scalar parameters of a call ([`CHUNK_NUMBERS`]), so traces of different chunks are equal and share a plan. A scalar is an f32, which
//! is exact up to 2²⁴ only. Each start is therefore passed as two numbers, and `i32(high) · 65536 + i32(low)` is exact for every i32. Bounds of bands,
//! strides and first heads are constants.

use crate::error::{Error, ExecutorName, Reason, SpecError, SpecErrors, Unsupported};
use crate::expr::{Axis, Binary, Builder, Const, Declared, ExprErrors, Inputs, NodeId, Trace, Unary};
use crate::mask::{Corner, Ends, Kept, Mask, Region, Rule, SEQ_LEN_KV, SEQ_LEN_Q, length_of, window};
use crate::problem::Problem;
use crate::spec::{AttentionSpec, TensorSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Names of the scalar parameters with the starts of a placed specification's chunks: of queries, in units of 65536 and the remainder, then of keys.
pub const CHUNK_NUMBERS: [&str; 4] = ["chunk_q_high", "chunk_q_low", "chunk_k_high", "chunk_k_low"];

/// Numbers of consecutive starts that share the high number.
const LOW: i64 = 1 << 16;

/// The name under which placement reports what it does not support.
pub const PLACEMENT: ExecutorName = ExecutorName::new("parallel");

/// A run of positions: `start + stride · i` for `i` in `0..len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Chunk {
    /// The first position.
    pub start: i64,
    /// The distance between neighbours, at least 1.
    pub stride: i64,
    /// The number of positions.
    pub len: i64,
}

impl Chunk {
    /// Creates a run of `len` positions.
    pub const fn new(start: i64, stride: i64, len: i64) -> Chunk {
        Chunk { start, stride, len }
    }

    /// Returns the position of element `i`.
    pub const fn at(&self, i: i64) -> i64 {
        self.start + self.stride * i
    }

    /// Returns the element that is at `position`, if the chunk has it.
    pub fn find(&self, position: i64) -> Option<i64> {
        let i = (position - self.start).div_euclid(self.stride);
        (position >= self.start && i < self.len && self.at(i) == position).then_some(i)
    }

    /// Returns elements `range` as a chunk.
    #[must_use]
    pub fn part(&self, range: Range<i64>) -> Chunk {
        Chunk { start: self.at(range.start), stride: self.stride, len: range.end - range.start }
    }

    /// Returns one chunk with the elements of this one and then of `next`, if that is a run too.
    pub fn joined(&self, next: &Chunk) -> Option<Chunk> {
        let stride = match (self.len, next.len) {
            (0, _) => return Some(*next),
            (_, 0) => return Some(*self),
            (1, 1) => next.start - self.start,
            (1, _) => next.stride,
            (_, _) => self.stride,
        };
        let fits = stride >= 1 && (next.len == 1 || next.stride == stride) && self.start + stride * self.len == next.start;
        fits.then_some(Chunk { start: self.start, stride, len: self.len + next.len })
    }

    /// Returns whether the chunk is all of an axis of this extent.
    fn is_whole(&self, extent: i64) -> bool {
        (self.start, self.len) == (0, extent) && (self.stride == 1 || extent == 1)
    }

    fn mistakes(&self, field: &str, extent: i64) -> Vec<SpecError> {
        let last = self.len.checked_sub(1).and_then(|n| n.checked_mul(self.stride)).and_then(|n| n.checked_add(self.start));
        let right = self.start >= 0 && self.stride >= 1 && self.len >= 1 && last.is_some_and(|last| last < extent);
        let rule = format!("positions below {extent} with a start of at least 0, a stride and a length of at least 1");
        if right { Vec::new() } else { vec![SpecError::new(field, self, rule)] }
    }
}

impl fmt::Display for Chunk {
    /// Writes `start..end`, with `:stride` if that is not 1.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.at(self.len - 1) + 1)?;
        if self.stride == 1 { Ok(()) } else { write!(f, ":{}", self.stride) }
    }
}

impl Region {
    /// Returns whether a query of the chunk `q` attends to a key of the chunk `k`, both in positions of the whole problem. Exact for chunks with equal
    /// strides; for others, `false` only if no pair is attended.
    ///
    /// ```
    /// use sdpa_core::{Chunk, Region};
    /// let causal = Region { upper: Some(0), ..Region::default() };
    /// assert!(causal.attends(&Chunk::new(4, 1, 4), &Chunk::new(7, 1, 4)));
    /// assert!(!causal.attends(&Chunk::new(4, 1, 4), &Chunk::new(8, 1, 4)));
    /// ```
    pub fn attends(&self, q: &Chunk, k: &Chunk) -> bool {
        let Region { lower, upper, prefix } = *self;
        let band = |upper: Option<i64>, keys: i64| {
            if keys < 1 || q.len < 1 {
                return false;
            }
            let (stride, distance) = (k.stride, k.start - q.start);
            if q.stride != k.stride {
                let (first, last) = (k.start - q.at(q.len - 1), k.at(keys - 1) - q.start);
                return lower.is_none_or(|lower| last > lower) && upper.is_none_or(|upper| first <= upper);
            }
            let bound = |bound: i64| (bound - distance).div_euclid(stride);
            !Region { lower: lower.map(bound), upper: upper.map(bound), prefix: None }.is_empty(q.len, keys)
        };
        let Some(prefix) = prefix else { return band(upper, k.len) };
        let early = (-(k.start - prefix).div_euclid(k.stride)).clamp(0, k.len);
        band(upper, early) || band(Some(upper.map_or(0, |upper| upper.min(0))), k.len)
    }
}

/// The part of a problem that a placed specification covers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Placement {
    /// Positions of the queries.
    pub q: Chunk,
    /// Positions of the keys.
    pub k: Chunk,
    /// Query heads.
    pub heads_q: Range<i64>,
    /// KV heads: those of `heads_q`.
    pub heads_kv: Range<i64>,
}

impl Placement {
    /// Creates the placement of the whole problem.
    pub fn of(spec: &AttentionSpec) -> Placement {
        let chunk = |tensor: &TensorSpec| Chunk::new(0, 1, tensor.dims[2]);
        Placement { q: chunk(&spec.q), k: chunk(&spec.k), heads_q: 0..spec.q.dims[1], heads_kv: 0..spec.k.dims[1] }
    }

    /// Sets the positions of the queries.
    #[must_use]
    pub fn with_q(mut self, q: Chunk) -> Self {
        self.q = q;
        self
    }

    /// Sets the positions of the keys.
    #[must_use]
    pub fn with_k(mut self, k: Chunk) -> Self {
        self.k = k;
        self
    }

    /// Sets the query heads and the KV heads that they attend with.
    #[must_use]
    pub fn with_heads(mut self, heads_q: Range<i64>, heads_kv: Range<i64>) -> Self {
        (self.heads_q, self.heads_kv) = (heads_q, heads_kv);
        self
    }

    fn mistakes(&self, problem: &Problem) -> Vec<SpecError> {
        let Placement { q, k, heads_q, heads_kv } = self;
        let mut errors = q.mistakes("placement.q", problem.seq_q());
        errors.extend(k.mistakes("placement.k", problem.seq_kv()));
        let within = |heads: &Range<i64>, all: i64| heads.start >= 0 && heads.start < heads.end && heads.end <= all;
        if !within(heads_q, problem.heads_q()) || !within(heads_kv, problem.heads_kv()) {
            let rule = format!("heads below {} and {}", problem.heads_q(), problem.heads_kv());
            errors.push(SpecError::new("placement.heads", format!("{heads_q:?} with {heads_kv:?}"), rule));
            return errors;
        }
        let (queries, keys) = (heads_q.end - heads_q.start, heads_kv.end - heads_kv.start);
        let own = |n: i64| (heads_q.start + n) / problem.group() == heads_kv.start + n / (queries / keys);
        if queries % keys != 0 || !(0..queries).all(own) {
            let rule = format!("the KV heads of these query heads, each with equally many ({} query heads share one)", problem.group());
            errors.push(SpecError::new("placement.heads", format!("{heads_q:?} with {heads_kv:?}"), rule));
        }
        errors
    }
}

/// A specification that computes one part of a problem.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Placed {
    /// The specification of the part, over dense tensors in the axis order of the whole problem's.
    pub spec: AttentionSpec,
    /// The number to add to [`DROPOUT_OFFSET`](crate::DROPOUT_OFFSET), so that the part drops the same elements as the whole problem.
    pub dropout_offset: i64,
    starts: [i64; 2],
}

impl Placed {
    /// Returns the values of those of [`CHUNK_NUMBERS`] that are among the declared parameters of a problem of this specification. A call must pass
    /// them.
    pub fn numbers(&self, declared: &[Declared]) -> Vec<(&'static str, f32)> {
        let [q, k] = self.starts;
        let values = [q / LOW, q % LOW, k / LOW, k % LOW].map(|n| n as f32);
        CHUNK_NUMBERS.into_iter().zip(values).filter(|(name, _)| declared.iter().any(|p| p.name == *name)).collect()
    }
}

impl AttentionSpec {
    /// Rewrites the specification for the part `at` of its queries, keys and heads: see [`placed`](crate::placed). Returns `None` if the bands of the
    /// masks attend to no pair of the part.
    ///
    /// A call of the result passes the part's elements of `q`, `k`, `v` and `o`, and of every declared tensor: rows of the queries, columns of the keys
    /// and the heads. Tables are passed whole.
    ///
    /// # Errors
    /// Returns every mistake in this specification and in `at`. Returns [`Error::Unsupported`] for 8-bit floats and for packed, paged, block-scaled and
    /// batch-invariant problems. Dropout is unsupported for a part of the queries or keys, and for a part of the heads of more than one batch entry: executors count
    /// random numbers by positions in the call.
    pub fn placed(&self, at: &Placement) -> Result<Option<Placed>, Error> {
        let problem = self.validate()?;
        let mut errors = at.mistakes(&problem);
        let reserved = problem.params().iter().filter(|p| CHUNK_NUMBERS.contains(&p.name.as_str()));
        errors.extend(
            reserved.map(|p| SpecError::new(format!("parameter {}", p.name), "a reserved name", "another name: placement declares it")),
        );
        if !errors.is_empty() {
            return Err(SpecErrors(errors).into());
        }
        let whole = [at.q.is_whole(problem.seq_q()), at.k.is_whole(problem.seq_kv())];
        self.unplaceable(at, whole)?;
        let all_heads = at.heads_q == (0..problem.heads_q());
        if whole == [true; 2] && all_heads {
            return Ok(Some(Placed { spec: self.clone(), dropout_offset: 0, starts: [0; 2] }));
        }
        if !problem.region().attends(&at.q, &at.k) {
            return Ok(None);
        }
        let mut spec = self.clone();
        let (queries, keys) = (at.heads_q.end - at.heads_q.start, at.heads_kv.end - at.heads_kv.start);
        for (tensor, heads, len) in [
            (&mut spec.q, queries, at.q.len),
            (&mut spec.k, keys, at.k.len),
            (&mut spec.v, keys, at.k.len),
            (&mut spec.o, queries, at.q.len),
        ] {
            tensor.dims = [tensor.dims[0], heads, len, tensor.dims[3]];
            *tensor = tensor.densely();
        }
        let rewrite = Rewrite { at, whole, extents: problem.extents() };
        let place = |trace: &Trace| rewrite.trace(trace);
        let failed = |errors: ExprErrors| Error::Bug(format!("a placed trace: {errors}"));
        spec.score_mods = self.score_mods.iter().map(|score_mod| score_mod.map_stages(place)).collect::<Result<_, _>>().map_err(failed)?;
        spec.masks = vec![Mask::Traced(Rule::new("placed", rewrite.masks(problem.kept()).map_err(failed)?))];
        spec.validate()?;
        // Heads of one batch entry are 32 numbers apart: see `DropoutMask::square`.
        let dropout_offset = self.dropout.map_or(0, |_| 32 * at.heads_q.start);
        Ok(Some(Placed { spec, dropout_offset, starts: [at.q.start, at.k.start] }))
    }

    fn unplaceable(&self, at: &Placement, whole: [bool; 2]) -> Result<(), Unsupported> {
        let limit = |field: &str, value: &str, limit: &str| Reason::Limit { field: field.into(), value: value.into(), limit: limit.into() };
        let mut reasons = Vec::new();
        if self.dtype.is_fp8() {
            reasons.push(limit("dtype", self.dtype.name(), "f32, f16 or bf16: scales and amax of 8-bit floats belong to whole tensors"));
        }
        if self.batch_invariant {
            reasons.push(limit("batch_invariant", "true", "false: sums over parts of the keys round by the chunks of the call"));
        }
        if self.packed.is_some() {
            reasons.push(limit("packed", "packed sequences", "a dense problem"));
        }
        if self.paged.is_some() {
            reasons.push(limit("paged", "a paged KV cache", "a dense problem"));
        }
        let part_of_heads = at.heads_q != (0..self.q.dims[1]);
        if self.dropout.is_some() && (whole != [true; 2] || (part_of_heads && self.q.dims[0] != 1)) {
            let why = "all queries and keys, and all heads unless batch is 1: executors count random numbers by positions in the call";
            reasons.push(limit("dropout", "a part of the problem", why));
        }
        if reasons.is_empty() { Ok(()) } else { Err(Unsupported::new(PLACEMENT, reasons)) }
    }
}

/// Rewrites traces for one part of a problem.
struct Rewrite<'a> {
    at: &'a Placement,
    /// Whether the part has all queries, and all keys.
    whole: [bool; 2],
    /// Extents of the whole problem.
    extents: [i64; 4],
}

fn integer(b: &mut Builder, value: i64) -> NodeId {
    let limit = i64::from(i32::MAX);
    b.konst(Const::I32(value.clamp(-limit, limit) as i32))
}

impl Rewrite<'_> {
    /// Returns the position in the whole problem of the current index along `axis`.
    fn position(&self, b: &mut Builder, axis: Axis) -> Option<NodeId> {
        let (chunk, whole, numbers) = match axis {
            Axis::Batch => return None,
            Axis::Head => {
                let index = b.index(axis);
                let first = integer(b, self.at.heads_q.start);
                return (self.at.heads_q.start > 0).then(|| b.binary(Binary::Add, index, first));
            }
            Axis::Q => (self.at.q, self.whole[0], [CHUNK_NUMBERS[0], CHUNK_NUMBERS[1]]),
            Axis::K => (self.at.k, self.whole[1], [CHUNK_NUMBERS[2], CHUNK_NUMBERS[3]]),
        };
        if whole {
            return None;
        }
        let [high, low] = numbers.map(|name| {
            let number = b.param(Declared::scalar(name, 0.0));
            b.unary(Unary::ToI32, number)
        });
        let unit = integer(b, LOW);
        let high = b.binary(Binary::Mul, high, unit);
        let start = b.binary(Binary::Add, high, low);
        let index = b.index(axis);
        let index = if chunk.stride == 1 {
            index
        } else {
            let stride = integer(b, chunk.stride);
            b.binary(Binary::Mul, index, stride)
        };
        Some(b.binary(Binary::Add, index, start))
    }

    fn inline(&self, b: &mut Builder, trace: &Trace) -> Vec<NodeId> {
        let indices = Axis::ALL.map(|axis| self.position(b, axis));
        b.inline(trace, Inputs { extents: Some(self.extents), indices, ..Inputs::default() })
    }

    fn trace(&self, trace: &Trace) -> Result<Trace, ExprErrors> {
        let mut b = Builder::new();
        let roots = self.inline(&mut b, trace);
        b.finish(&roots).map_err(ExprErrors)
    }

    /// Returns the masks of the part as one trace. A band of chunks with equal strides becomes a band of their indices.
    fn masks(&self, kept: &Kept) -> Result<Trace, ExprErrors> {
        let Kept { region, ends, seq_len_q, seq_len_kv, rest } = kept;
        let mut global = Builder::new();
        let mut terms = Vec::new();
        let mut b = Builder::new();
        let mut local = Vec::new();
        if self.at.q.stride == self.at.k.stride {
            local.extend(self.shifted(&mut b, region));
        } else {
            terms.extend(unshifted(&mut global, region));
        }
        if !ends.is_full() {
            let Ends { lower, upper } = *ends;
            terms.push(window(&mut global, lower.map(i64::saturating_neg), upper, Corner::Lengths([*seq_len_q, *seq_len_kv])));
        }
        for (has, axis, name) in [(*seq_len_q, Axis::Q, SEQ_LEN_Q), (*seq_len_kv, Axis::K, SEQ_LEN_KV)] {
            if has {
                let (index, length) = (global.index(axis), global.param(length_of(name)));
                terms.push(global.binary(Binary::Lt, index, length));
            }
        }
        terms.extend(rest.iter().flat_map(|rest| global.inline(rest, Inputs::default())));
        let global = global.finish(&terms).map_err(ExprErrors)?;
        local.extend(self.inline(&mut b, &global));
        let root = local.into_iter().reduce(|x, y| b.binary(Binary::And, x, y)).unwrap_or_else(|| b.konst(Const::Bool(true)));
        b.finish(&[root]).map_err(ExprErrors)
    }

    /// Returns the terms of a region in indices of chunks with equal strides. With `d` the distance between the starts, `stride · (k − q) + d ≤ upper`
    /// holds exactly if `k − q ≤ ⌊(upper − d) / stride⌋`.
    fn shifted(&self, b: &mut Builder, region: &Region) -> Vec<NodeId> {
        let Region { lower, upper, prefix } = *region;
        let (stride, distance) = (self.at.q.stride, self.at.k.start - self.at.q.start);
        let bound = |bound: i64| (bound - distance).div_euclid(stride);
        let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
        let apart = b.binary(Binary::Sub, k, q);
        let mut terms = Vec::new();
        for (limit, f) in [(lower, Binary::Gt), (upper, Binary::Le)] {
            if let Some(limit) = limit {
                let limit = integer(b, bound(limit));
                terms.push(b.binary(f, apart, limit));
            }
        }
        if let Some(prefix) = prefix {
            // Keys below ⌈(prefix − start) / stride⌉ are in the prefix.
            let len = -(self.at.k.start - prefix).div_euclid(stride);
            let (limit, len) = (integer(b, bound(0)), integer(b, len));
            let (causal, early) =
                (if bound(0) == 0 { b.binary(Binary::Le, k, q) } else { b.binary(Binary::Le, apart, limit) }, b.binary(Binary::Lt, k, len));
            terms.push(b.binary(Binary::Or, causal, early));
        }
        terms
    }
}

/// Returns the terms of a region in positions of the whole problem.
fn unshifted(b: &mut Builder, region: &Region) -> Vec<NodeId> {
    let Region { lower, upper, prefix } = *region;
    let (q, k) = (b.index(Axis::Q), b.index(Axis::K));
    let apart = b.binary(Binary::Sub, k, q);
    let mut terms = Vec::new();
    for (limit, f) in [(lower, Binary::Gt), (upper, Binary::Le)] {
        if let Some(limit) = limit {
            let limit = integer(b, limit);
            terms.push(b.binary(f, apart, limit));
        }
    }
    if let Some(prefix) = prefix {
        let len = integer(b, prefix);
        let (causal, early) = (b.binary(Binary::Le, k, q), b.binary(Binary::Lt, k, len));
        terms.push(b.binary(Binary::Or, causal, early));
    }
    terms
}

#[cfg(test)]
#[path = "placed/tests.rs"]
mod tests;
