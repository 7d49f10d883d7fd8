//! Growing sequences without new plans: lengths are rounded up to buckets, and the kernel receives the true lengths as data.
//!
//! A specification becomes one with the lengths of its bucket, over the same buffers, with the true lengths as padding. All lengths of a bucket share
//! a plan.
//!
//! ```
//! use sdpa_core::seq::{Buckets, SeqPolicy};
//! use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
//!
//! let policy = SeqPolicy::new(None, Buckets::doubling(128, 4096)?);
//! let mut problems = std::collections::HashSet::new();
//! for seq_kv in 1..=4096 {
//!     // One query over a buffer of 4096 keys.
//!     let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 1, seq_kv, dim_qk: 64, dim_v: 64 };
//!     let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal_bottom_right());
//!     spec.k.strides[0] = 4096 * 2 * 64;
//!     spec.v.strides[0] = 4096 * 2 * 64;
//!     let bucketed = policy.bucket(&spec)?;
//!     assert!(bucketed.cost <= 128.0 && (seq_kv < 128 || bucketed.cost <= 2.0));
//!     problems.insert(bucketed.spec.validate()?);
//! }
//! assert_eq!(problems.len(), 6);
//! # Ok::<(), sdpa_core::SpecErrors>(())
//! ```
//!
//! # Requirements
//!
//! - **Strides do not depend on the length**: rows of a batch entry have the same strides for every length, as in a buffer of fixed capacity, or in
//!   batch-seq-head-dim with one batch entry. [`SeqPolicy::bucket`] refuses strides for which rows of the bucket would overlap.
//! - **Buffers have the bucket's length**, also those of `o` and stats: rows past the length are written, with zeros and −∞. A call with shorter
//!   buffers is refused before anything runs.
//! - **Keys and values past the length are finite** within the last tile of 128: 0 times NaN is NaN. This is not checked.
//! - Stats have the bucket's length; the backward pass uses the same bucket.

use crate::error::{SpecError, SpecErrors};
use crate::expr::{Axis, Node, Trace};
use crate::mask::{Align, Kept, Mask, SEQ_LEN_KV, SEQ_LEN_Q, ends};
use crate::spec::{AttentionSpec, TensorSpec};
use crate::tensor::Param;
use serde::{Deserialize, Serialize};

/// The name of the declared scalar that holds `seq_kv − seq_q` of the exact lengths. A bottom-right aligned mask reads it to place its
/// diagonal, because the bucket's extents have another difference.
pub const SEQ_SHIFT: &str = "seq_shift";

/// The lengths to which sequence lengths are rounded up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Buckets(Vec<i64>);

impl Buckets {
    /// Creates buckets of these lengths.
    ///
    /// # Errors
    /// Fails if there is no length, if a length is below 1, or if a length is not greater than the one before.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::seq::Buckets;
    /// assert_eq!(Buckets::new([128, 512, 4096])?.up(200), Some(512));
    /// assert!(Buckets::new([128, 64]).is_err());
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn new(lengths: impl Into<Vec<i64>>) -> Result<Buckets, SpecErrors> {
        let lengths = lengths.into();
        let rising = lengths.windows(2).all(|pair| pair[0] < pair[1]);
        if lengths.first().is_none_or(|&first| first < 1) || !rising {
            return Err(one("buckets", format!("{lengths:?}"), "lengths in increasing order, the first at least 1"));
        }
        Ok(Buckets(lengths))
    }

    /// Creates buckets of `first`, twice that, and so on, and `last`. Rounding up to a bucket at most doubles the number of rows, except
    /// below `first`.
    ///
    /// # Errors
    /// Fails as [`Buckets::new`] does.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::seq::Buckets;
    /// assert_eq!(Buckets::doubling(128, 1000)?.lengths(), [128, 256, 512, 1000]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn doubling(first: i64, last: i64) -> Result<Buckets, SpecErrors> {
        let mut lengths: Vec<i64> = std::iter::successors(Some(first.max(1)), |n| n.checked_mul(2)).take_while(|n| *n < last).collect();
        lengths.push(last);
        Buckets::new(if first < 1 { vec![first] } else { lengths })
    }

    /// Creates buckets at multiples of `step` up to `last`, and at `last`.
    ///
    /// # Errors
    /// Fails as [`Buckets::new`] does.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::seq::Buckets;
    /// assert_eq!(Buckets::multiples(64, 200)?.lengths(), [64, 128, 192, 200]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn multiples(step: i64, last: i64) -> Result<Buckets, SpecErrors> {
        if step < 1 {
            return Err(one("buckets", step, "a step of at least 1"));
        }
        let mut lengths: Vec<i64> = (1..).map(|n| n * step).take_while(|n| *n < last).collect();
        lengths.push(last);
        Buckets::new(lengths)
    }

    /// Returns the lengths of the buckets, ascending.
    pub fn lengths(&self) -> &[i64] {
        &self.0
    }

    /// Returns the smallest bucket that is not below a length; `None` if the length is above the last bucket.
    pub fn up(&self, length: i64) -> Option<i64> {
        self.0.get(self.0.partition_point(|&bucket| bucket < length)).copied()
    }
}

/// A policy that rounds sequence lengths up to buckets, so that several lengths share a plan. The default rounds none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SeqPolicy {
    /// Buckets of `seq_q`; with `None`, `seq_q` is not rounded.
    pub q: Option<Buckets>,
    /// Buckets of `seq_kv`; with `None`, `seq_kv` is not rounded.
    pub kv: Option<Buckets>,
}

/// A specification whose sequence lengths are rounded up to buckets.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Bucketed {
    /// The specification to validate and prepare instead of the exact one.
    pub spec: AttentionSpec,
    /// Ratio of the bucket's query-key pairs to those of the exact lengths: an upper bound of the extra cost for a kernel that skips no
    /// tile. Passing lengths as data adds 3 to 10 µs per pass on an H200 with cuDNN 9.27, and 14 µs with 9.19.
    pub cost: f64,
    seq_len_q: Vec<i32>,
    seq_len_kv: Vec<i32>,
    /// Whether the specification's lengths are parameters from here, not the caller's own.
    padded: bool,
    shift: Option<f32>,
}

impl Bucketed {
    /// Returns the parameters to pass in addition to the caller's own: the exact lengths of each batch entry, and [`SEQ_SHIFT`] if a mask
    /// is bottom-right aligned. For device calls the caller fills device memory with the lengths: i32, one per batch entry.
    pub fn params(&self) -> Vec<Param<'_>> {
        let lengths = [(SEQ_LEN_Q, &self.seq_len_q), (SEQ_LEN_KV, &self.seq_len_kv)];
        let lengths = lengths.into_iter().filter(|_| self.padded).map(|(name, values)| Param::new(name, values));
        lengths.chain(self.shift.map(|shift| Param::new(SEQ_SHIFT, shift))).collect()
    }
}

impl SeqPolicy {
    /// Creates a policy that rounds `seq_q` and `seq_kv` up to these buckets; `None` does not round.
    ///
    /// ```
    /// use sdpa_core::seq::{Buckets, SeqPolicy};
    /// let decode = SeqPolicy::new(None, Buckets::doubling(128, 4096)?);
    /// assert!(decode.q.is_none());
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn new(q: impl Into<Option<Buckets>>, kv: impl Into<Option<Buckets>>) -> SeqPolicy {
        SeqPolicy { q: q.into(), kv: kv.into() }
    }

    /// Returns `spec` with its sequence lengths rounded up to buckets.
    ///
    /// # Errors
    /// Returns every length above the last bucket, strides for which rows of the bucket would overlap, and every mask or score_mod that
    /// reads the lengths as extents.
    pub fn bucket(&self, spec: &AttentionSpec) -> Result<Bucketed, SpecErrors> {
        let mut errors = Vec::new();
        let [batch, _, seq_q, _] = spec.q.dims;
        let seq_kv = spec.k.dims[2];
        let mut up = |buckets: &Option<Buckets>, name: &str, length: i64| match buckets {
            None => length,
            Some(buckets) => buckets.up(length).unwrap_or_else(|| {
                let last = buckets.lengths().last().copied().unwrap_or(0);
                errors.push(SpecError::new(name, length, format!("at most {last}, the last bucket")));
                length
            }),
        };
        let (q, kv) = (up(&self.q, "seq_q", seq_q), up(&self.kv, "seq_kv", seq_kv));
        let own_lengths = spec.masks.iter().any(reads_lengths);
        // A sequence whose length is exactly the bucket's also gets per-entry lengths, so that it shares the bucket's plan.
        let padded = (self.q.is_some() || self.kv.is_some()) && !own_lengths;
        let mut out = spec.clone();
        for (name, tensor, length) in [("q", &mut out.q, q), ("k", &mut out.k, kv), ("v", &mut out.v, kv), ("o", &mut out.o, q)] {
            lengthen(tensor, length)
                .unwrap_or_else(|rule| errors.push(SpecError::new(format!("{name}.strides"), format!("{:?}", tensor.strides), rule)));
        }
        if spec.block_scaled && (self.q.is_some() || self.kv.is_some()) {
            let rule = "false with buckets: the layout of block scales depends on the lengths";
            errors.push(SpecError::new("block_scaled", true, rule));
        }
        let mut shifts = false;
        if padded || own_lengths {
            for (n, mask) in out.masks.iter_mut().enumerate() {
                match moved(mask, q == 1 && seq_q == 1, &mut shifts) {
                    Ok(moved) => *mask = moved,
                    Err(rule) => errors.push(SpecError::new(format!("masks[{n}]"), mask.to_string(), rule)),
                }
            }
            if own_lengths && shifts {
                let rule =
                    "no per-sequence lengths from the caller with a bottom-right aligned mask; remove them, because buckets add their own";
                errors.push(SpecError::new("masks", SEQ_LEN_KV, rule));
            }
            if own_lengths && spec.masks.iter().any(ends::reads) && !has_both_lengths(spec) {
                let rule =
                    "seq_len_q and seq_len_kv, joined by &, with a mask that is aligned to the sequence ends; use padding, or no lengths";
                errors.push(SpecError::new("masks", Mask::All(spec.masks.clone()), rule));
            }
            for (n, score_mod) in spec.score_mods.iter().enumerate() {
                if score_mod.stages().iter().any(|stage| reads_extents(stage)) {
                    errors.push(SpecError::new(format!("score_mods[{n}]"), score_mod.name(), EXTENTS));
                }
            }
        }
        if padded {
            out.masks.push(Mask::padding());
        }
        if !errors.is_empty() {
            return Err(SpecErrors(errors));
        }
        let entries = |length: i64| vec![i32::try_from(length).unwrap_or(i32::MAX); usize::try_from(batch).unwrap_or(0)];
        let cost = (q as f64 * kv as f64) / (seq_q.max(1) as f64 * seq_kv.max(1) as f64);
        let shift = shifts.then_some((seq_kv - seq_q) as f32);
        Ok(Bucketed { spec: out, cost, seq_len_q: entries(seq_q), seq_len_kv: entries(seq_kv), padded, shift })
    }
}

const EXTENTS: &str =
    "no use of the number of queries or keys: with buckets, these numbers are the lengths of the bucket, not the true lengths";

/// Extends a tensor to more rows with the same strides.
fn lengthen(tensor: &mut TensorSpec, length: i64) -> Result<(), String> {
    let exact = tensor.dims[2];
    tensor.dims[2] = length;
    if length == exact {
        return Ok(());
    }
    if exact == 1 && tensor.strides[2] < tensor.dims[3] {
        return Err(format!("a row stride of at least {}: otherwise the {length} rows of the bucket overlap", tensor.dims[3]));
    }
    let reach = tensor.strides[2].saturating_mul(length);
    for (axis, name) in [(0, "batch entries"), (1, "heads")] {
        let stride = tensor.strides[axis];
        // This axis steps over all rows, so its stride must leave space for `length` of them.
        if tensor.dims[axis] > 1 && stride > tensor.strides[2] && stride < reach {
            return Err(format!(
                "{name} at least {reach} elements apart, so that the {length} rows of the bucket fit; allocate a buffer of fixed capacity"
            ));
        }
    }
    Ok(())
}

fn reads_lengths(mask: &Mask) -> bool {
    let declares = |trace: &Trace| trace.find(SEQ_LEN_Q).is_some() || trace.find(SEQ_LEN_KV).is_some();
    match mask {
        Mask::Window { .. } | Mask::PrefixLm { .. } => false,
        Mask::Traced(rule) => declares(rule.trace()),
        Mask::All(all) | Mask::Any(all) => all.iter().any(reads_lengths),
        Mask::Not(mask) => reads_lengths(mask),
    }
}

/// Returns whether lengths bound every batch entry on both sides, whatever the extents.
fn has_both_lengths(spec: &AttentionSpec) -> bool {
    let [batch, heads_q, seq_q, _] = spec.q.dims;
    Kept::of(&spec.masks, [batch, heads_q, seq_q, spec.k.dims[2]]).is_ok_and(|kept| kept.seq_len_q && kept.seq_len_kv)
}

fn reads_extents(trace: &Trace) -> bool {
    trace.nodes().iter().any(|node| matches!(node, Node::Extent(Axis::Q | Axis::K)))
}

/// Returns the mask with its bottom-right corner at the true lengths. Windows aligned to the ends are unchanged: they use the lengths.
fn moved(mask: &Mask, one_query: bool, shifts: &mut bool) -> Result<Mask, String> {
    let all =
        |masks: &[Mask], shifts: &mut bool| masks.iter().map(|mask| moved(mask, one_query, shifts)).collect::<Result<Vec<Mask>, String>>();
    Ok(match mask {
        // The single query attends to all keys up to the last one, and the lengths already bound the keys, so no window is needed.
        Mask::Window { left: None, right: Some(_), align: Align::BottomRight } if one_query => Mask::All(Vec::new()),
        Mask::Window { left, right, align: Align::BottomRight } => {
            *shifts = true;
            let (left, right) = (*left, *right);
            let narrow = |n: i64| i32::try_from(n).unwrap_or(i32::MAX);
            let rule = Mask::new("window, moved", move |at, p| {
                let distance = at.k - at.q - p.scalar(SEQ_SHIFT, 0.0).to_i32();
                let after = left.map(|left| distance.gt(-narrow(left)));
                let before = right.map(|right| distance.le(narrow(right)));
                match (after, before) {
                    (Some(after), Some(before)) => after & before,
                    (Some(one), None) | (None, Some(one)) => one,
                    (None, None) => at.k.ge(0),
                }
            });
            rule.map_err(|e| e.to_string())?
        }
        Mask::Traced(rule) if reads_extents(rule.trace()) => return Err(EXTENTS.to_owned()),
        Mask::Window { left: _, right: _, align: Align::TopLeft | Align::Ends } | Mask::PrefixLm { .. } | Mask::Traced(_) => mask.clone(),
        Mask::All(masks) => Mask::All(all(masks, shifts)?),
        Mask::Any(masks) => Mask::Any(all(masks, shifts)?),
        Mask::Not(mask) => Mask::Not(Box::new(moved(mask, one_query, shifts)?)),
    })
}

fn one(field: &str, value: impl std::fmt::Display, rule: &str) -> SpecErrors {
    SpecErrors(vec![SpecError::new(field, value, rule)])
}
