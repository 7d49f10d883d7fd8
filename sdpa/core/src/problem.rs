//! Validated attention problems in normal form.

use crate::block_scale;
use crate::check::Check;
use crate::dropout::{self, Dropout};
use crate::dtype::DType;
use crate::error::SpecErrors;
use crate::expr::{Declared, Node, Trace};
use crate::fp8::Fp8Scale;
use crate::mask::{Ends, Kept, Mask, Region};
use crate::operand::{Direction, Operand, Side};
use crate::packed::Packed;
use crate::paged::Paged;
use crate::score_mod;
use crate::sink;
use crate::spec::{AttentionSpec, Layout, TensorSpec};
use crate::statistic::StatsBase;
use serde::Serialize;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A valid attention problem. Only [`AttentionSpec::validate`] makes one.
///
/// Equal problems share a plan: masks, and strides of axes of extent 1, are in normal form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub(crate) dtype: DType,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) o_dtype: Option<DType>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) block_scaled: bool,
    pub(crate) batch: i64,
    pub(crate) heads_q: i64,
    pub(crate) heads_kv: i64,
    pub(crate) seq_q: i64,
    pub(crate) seq_kv: i64,
    pub(crate) dim_qk: i64,
    pub(crate) dim_v: i64,
    pub(crate) tensors: [TensorSpec; 4],
    pub(crate) packed: Option<Packed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) paged: Option<Paged>,
    pub(crate) score_mod: Option<Arc<Trace>>,
    pub(crate) kept: Kept,
    pub(crate) sink: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dropout: Option<Dropout>,
    #[serde(skip)]
    pub(crate) params: Vec<Declared>,
    pub(crate) stats: bool,
    #[serde(skip_serializing_if = "StatsBase::is_natural")]
    pub(crate) stats_base: StatsBase,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) row_max: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) sum_exp: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) batch_invariant: bool,
}

impl Hash for Problem {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Deliberately without `..`: a new field must be hashed, or be shown to follow from others.
        let Problem {
            dtype,
            o_dtype,
            block_scaled,
            // The extents follow from the tensors.
            batch: _,
            heads_q: _,
            heads_kv: _,
            seq_q: _,
            seq_kv: _,
            dim_qk: _,
            dim_v: _,
            tensors,
            packed,
            paged,
            score_mod,
            kept,
            sink,
            dropout,
            // Parameters follow from the traces and options that declare them.
            params: _,
            stats,
            stats_base,
            row_max,
            sum_exp,
            batch_invariant,
        } = self;
        (dtype, tensors, packed, paged, score_mod, kept, sink, dropout).hash(state);
        (o_dtype, stats_base, [*stats, *row_max, *sum_exp, *block_scaled, *batch_invariant]).hash(state);
    }
}

impl Problem {
    pub(crate) fn new(spec: &AttentionSpec) -> Result<Problem, SpecErrors> {
        // Deliberately without `..`: a new field of the specification must be read here.
        let &AttentionSpec {
            dtype,
            o_dtype,
            block_scaled,
            q,
            k,
            v,
            o,
            ref score_mods,
            packed,
            paged,
            ref masks,
            sink,
            dropout,
            stats,
            stats_base,
            row_max,
            sum_exp,
            batch_invariant,
        } = spec;
        let mut check = Check::default();
        if !dtype.is_float() {
            check.fail("dtype", dtype, "one of f32, f16, bf16, f8e4m3, f8e5m2");
        }
        let o_dtype = check.narrow("o_dtype", o_dtype, dtype, &[DType::F16, DType::BF16]);
        // Returns whether a side is packed. `cu_seqlens` locate the sequences of a packed side, so its batch stride has no effect.
        let packs = |side: Side| packed.is_some() && (side == Side::Queries || paged.is_none());
        let most = |operand: Operand| packed.filter(|_| packs(operand.side())).map(|packed| spec.most(&packed, operand.side()));
        let given = [q, k, v, o];
        let tensors = Operand::FORWARD.map(|operand| {
            let tensor = given[operand as usize];
            if packs(operand.side()) { unplaced(tensor) } else { tensor }
        });
        let clamped = paged.map(|paged| paged.clamped());
        for (operand, tensor) in Direction::Forward.operands().iter().zip(&tensors) {
            check.extents(operand.name(), tensor, spec.never_empty());
            let dtype = if *operand == Operand::O { o_dtype.unwrap_or(dtype) } else { dtype };
            check.memory(operand.name(), &lies(*operand, *tensor, clamped), dtype, false);
        }
        let [batch, heads_q, seq_q, dim_qk] = q.dims;
        let [_, heads_kv, seq_kv, _] = k.dims;
        let dim_v = v.dims[3];
        check.equal("k.dims[0] (batch)", k.dims[0], "q.dims[0]", batch);
        check.equal("k.dims[3] (dim_qk)", k.dims[3], "q.dims[3]", dim_qk);
        check.equal("v.dims[0] (batch)", v.dims[0], "q.dims[0]", batch);
        check.equal("v.dims[1] (heads_kv)", v.dims[1], "k.dims[1]", heads_kv);
        check.equal("v.dims[2] (seq_kv)", v.dims[2], "k.dims[2]", seq_kv);
        check.equal("o.dims[0] (batch)", o.dims[0], "q.dims[0]", batch);
        check.equal("o.dims[1] (heads_q)", o.dims[1], "q.dims[1]", heads_q);
        check.equal("o.dims[2] (seq_q)", o.dims[2], "q.dims[2]", seq_q);
        check.equal("o.dims[3] (dim_v)", o.dims[3], "v.dims[3]", dim_v);
        if heads_kv >= 1 && heads_q >= 1 && heads_q % heads_kv != 0 {
            check.fail("q.dims[1] (heads_q)", heads_q, format!("a multiple of heads_kv, which is {heads_kv}"));
        }
        check.output("o", &tensors[3], most(Operand::O));
        if let Some(packed) = &packed {
            check.packed(packed, spec);
        }
        if let Some(paged) = &paged {
            check.errors.extend(paged.mistakes());
        }
        check.dropout(dropout);
        if batch_invariant && dropout.is_some() {
            check.fail("batch_invariant", "true with dropout", "no dropout: its random numbers depend on the index of the batch entry");
        }
        if batch_invariant && dtype.is_fp8() {
            check.fail("batch_invariant", format!("true with {dtype}"), "f32, f16 or bf16: no executor promises it for 8-bit floats");
        }
        check.masks(masks, packed.is_some_and(|packed| packed.cross));
        // Invalid extents were reported above. Clamp them, so that the expressions can still be checked.
        let extents = [batch, heads_q, seq_q, seq_kv].map(|n| n.clamp(1, i64::from(i32::MAX)));
        let score_mod = check.expression("score_mods", score_mod::compose(score_mods, extents));
        let declared = check.expression("masks", Mask::All(masks.clone()).trace());
        let kept = packed.map_or_else(|| Kept::of(masks, extents), |p| Kept::of_documents(masks, extents, &p));
        let mut kept = check.expression("masks", kept);
        if let Some(kept) = kept.as_mut().filter(|_| packed.is_some() && paged.is_some()) {
            // A paged KV cache of packed queries always has lengths of keys, whether masks read them or not.
            kept.seq_len_kv = true;
        }
        let own_lengths = |kept: &Kept| kept.seq_len_q || kept.seq_len_kv && packs(Side::Keys);
        if packed.is_some() && kept.as_ref().is_some_and(own_lengths) {
            check.fail("masks", "per-sequence lengths", "none with packed sequences: cu_seqlens already give the lengths");
        }
        let mut params = Vec::new();
        let sides: Vec<Side> = Side::ALL.into_iter().filter(|side| packs(*side)).collect();
        let mut boundaries = packed.map_or_else(Vec::new, |packed| packed.declared(&sides));
        boundaries.extend(packed.and(paged).map(|_| Paged::lengths()));
        for (field, trace) in [("score_mods", &score_mod), ("masks", &declared)] {
            check.params(field, trace.as_ref().map_or(&[], |t| t.params()), &mut params);
        }
        check.params("packed", &boundaries, &mut params);
        let own = [paged.map(|paged| paged.declared()), sink.then(sink::declared)];
        let of_dropout = dropout.map(|_| dropout::declared()).into_iter().flatten();
        let of_blocks = block_scale::declare(&mut check, spec);
        let of_tensors = dtype.is_fp8() && !block_scaled;
        let scales = Fp8Scale::of(Direction::Forward).iter().filter(|_| of_tensors).map(|scale| scale.declared());
        own.into_iter().flatten().chain(of_dropout).chain(scales).chain(of_blocks).for_each(|own| check.own(own, &mut params));
        let (Some(score_mod), Some(kept), []) = (score_mod, kept, &check.errors[..]) else {
            check.errors.dedup();
            return Err(SpecErrors(check.errors));
        };
        Ok(Problem {
            dtype,
            o_dtype,
            block_scaled,
            batch,
            heads_q,
            heads_kv,
            seq_q,
            seq_kv,
            dim_qk,
            dim_v,
            tensors: Operand::FORWARD.map(|operand| {
                let tensor = tensors[operand as usize];
                TensorSpec { dims: tensor.dims, ..normalise(lies(operand, tensor, clamped), most(operand)) }
            }),
            packed,
            paged,
            score_mod: Some(score_mod).filter(|t| t.node(t.roots()[0]) != Node::Score).map(Arc::new),
            kept,
            sink,
            dropout,
            params,
            stats,
            stats_base: if stats { stats_base } else { StatsBase::Natural },
            row_max,
            sum_exp,
            batch_invariant,
        })
    }

    /// Returns the element type of `q`, `k`, `v`, and by default of `o`: f32, f16, bf16 or an 8-bit float.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Returns the element type of an operand of the forward pass. For gradients see [`BackwardProblem::dtype_of`](crate::BackwardProblem::dtype_of).
    #[inline]
    pub fn dtype_of(&self, operand: Operand) -> DType {
        self.o_dtype.filter(|_| operand == Operand::O).unwrap_or(self.dtype)
    }
    /// Returns whether `q`, `k` and `v` have block scales ([`BlockScale`](crate::BlockScale)) instead of scales of whole tensors.
    #[inline]
    pub fn block_scaled(&self) -> bool {
        self.block_scaled
    }
    /// Returns whether the bits of a sequence's results depend on this sequence alone: see [`AttentionSpec::batch_invariant`].
    #[inline]
    pub fn batch_invariant(&self) -> bool {
        self.batch_invariant
    }
    /// Returns the number of batch entries.
    #[inline]
    pub fn batch(&self) -> i64 {
        self.batch
    }
    /// Returns the number of query heads.
    #[inline]
    pub fn heads_q(&self) -> i64 {
        self.heads_q
    }
    /// Returns the number of key and value heads.
    #[inline]
    pub fn heads_kv(&self) -> i64 {
        self.heads_kv
    }
    /// Returns the number of query heads per KV head.
    #[inline]
    pub fn group(&self) -> i64 {
        self.heads_q / self.heads_kv
    }
    /// Returns the queries per head.
    #[inline]
    pub fn seq_q(&self) -> i64 {
        self.seq_q
    }
    /// Returns the keys per head.
    #[inline]
    pub fn seq_kv(&self) -> i64 {
        self.seq_kv
    }
    /// Returns the elements of a query and of a key.
    #[inline]
    pub fn dim_qk(&self) -> i64 {
        self.dim_qk
    }
    /// Returns the elements of a value and of an output row.
    #[inline]
    pub fn dim_v(&self) -> i64 {
        self.dim_v
    }
    /// Returns the queries, (batch, heads_q, seq_q, dim_qk): extents, strides, alignment.
    #[inline]
    pub fn q(&self) -> &TensorSpec {
        &self.tensors[0]
    }
    /// Returns the keys, (batch, heads_kv, seq_kv, dim_qk): extents, strides, alignment.
    #[inline]
    pub fn k(&self) -> &TensorSpec {
        &self.tensors[1]
    }
    /// Returns the values, (batch, heads_kv, seq_kv, dim_v): extents, strides, alignment.
    #[inline]
    pub fn v(&self) -> &TensorSpec {
        &self.tensors[2]
    }
    /// Returns the output, (batch, heads_q, seq_q, dim_v): extents, strides, alignment.
    #[inline]
    pub fn o(&self) -> &TensorSpec {
        &self.tensors[3]
    }
    /// Returns `q`, `k`, `v`, `o`, in the order of [`Direction::operands`].
    #[inline]
    pub fn tensors(&self) -> &[TensorSpec; 4] {
        &self.tensors
    }
    /// Returns an operand: extents, strides, alignment. `None` for gradients, which belong to [`BackwardProblem`](crate::BackwardProblem).
    #[inline]
    pub fn tensor(&self, operand: Operand) -> Option<&TensorSpec> {
        self.tensors.get(operand as usize)
    }
    /// Returns the layout of packed sequences; `None` if the batch is not packed.
    #[inline]
    pub fn packed(&self) -> Option<&Packed> {
        self.packed.as_ref()
    }
    /// Returns the paging of keys and values, if any.
    #[inline]
    pub fn paged(&self) -> Option<&Paged> {
        self.paged.as_ref()
    }
    /// Returns the queries or keys per head; for a packed batch, those of the longest possible sequence.
    #[inline]
    pub fn seq(&self, side: Side) -> i64 {
        match side {
            Side::Queries => self.seq_q,
            Side::Keys => self.seq_kv,
        }
    }
    /// Returns whether a batch entry may have fewer queries or keys than the extent, because of a mask or as a packed sequence.
    pub fn has_lengths(&self, side: Side) -> bool {
        let masked = match side {
            Side::Queries => self.kept.seq_len_q,
            Side::Keys => self.kept.seq_len_kv,
        };
        masked || self.packs(side)
    }
    /// Returns the largest number of query or key tokens in a packed call, over all sequences.
    pub fn total(&self, side: Side) -> i64 {
        let all = || self.batch.saturating_mul(self.seq(side));
        self.packed.and_then(|packed| packed.total(side)).unwrap_or_else(all)
    }
    /// Returns all score_mods as one trace, or `None` without score_mods. The root of the trace is the modified score, f32; extents are
    /// constants in it.
    #[inline]
    pub fn score_mod(&self) -> Option<&Arc<Trace>> {
        self.score_mod.as_ref()
    }
    /// Returns the normal form of all masks: bands, lengths, and the rest as a trace.
    #[inline]
    pub fn kept(&self) -> &Kept {
        &self.kept
    }
    /// Returns the band of the masks: bounds of `k − q`, and a prefix. Other masks may mask out more keys ([`Problem::kept`]).
    #[inline]
    pub fn region(&self) -> &Region {
        &self.kept.region
    }
    /// Returns the band around the diagonal through the last query and key of each batch entry; `None` if the masks have no such band
    /// beyond [`Problem::region`].
    #[inline]
    pub fn ends(&self) -> Option<&Ends> {
        Some(&self.kept.ends).filter(|ends| !ends.is_full())
    }
    /// Returns whether there is no batch entry, no query or no key. Results are then known without computing, see [`empty`](crate::empty).
    #[inline]
    pub fn is_empty(&self) -> bool {
        [self.batch, self.seq_q, self.seq_kv].contains(&0)
    }
    /// Returns whether each query head has an attention sink: the parameter [`SINK`](crate::SINK).
    #[inline]
    pub fn sink(&self) -> bool {
        self.sink
    }
    /// Returns the dropout; `None` for a problem without one.
    #[inline]
    pub fn dropout(&self) -> Option<Dropout> {
        self.dropout
    }
    /// Returns the extents (batch, heads_q, seq_q, seq_kv) of the axes that declared tensors may span.
    #[inline]
    pub fn extents(&self) -> [i64; 4] {
        [self.batch, self.heads_q, self.seq_q, self.seq_kv]
    }
    /// Returns every declared parameter: of score_mods and masks, `cu_seqlens`, the page table, the sink, seed and offset of dropout, and the scales
    /// of 8-bit floats.
    #[inline]
    pub fn params(&self) -> &[Declared] {
        &self.params
    }
    /// Returns the scale of a call that sets none: `1 / √dim_qk`.
    #[inline]
    pub fn default_scale(&self) -> f32 {
        (1.0 / (self.dim_qk as f64).sqrt()) as f32
    }
    /// Returns the number of floating-point operations of the forward pass, for throughput. It counts a multiplication and an addition
    /// for each product of the two GEMMs, over the query-key pairs in the masks' bands. Each batch entry counts with all queries and
    /// keys.
    pub fn flops(&self) -> f64 {
        let pairs: u64 = (0..self.seq_q).map(|q| self.kept.key_range(q, [self.seq_q, self.seq_kv]).count() as u64).sum();
        2.0 * pairs as f64 * (self.dim_qk + self.dim_v) as f64 * (self.batch * self.heads_q) as f64
    }

    /// Returns the largest number of query or key tokens in a packed call; `None` if that side is not packed.
    pub(crate) fn most(&self, side: Side) -> Option<i64> {
        self.packed.filter(|_| self.packs(side)).map(|packed| packed.most(side, self.batch, self.seq(side)))
    }

    /// Returns the problem with one operand made [dense](TensorSpec::densely), for executors that copy this operand first.
    #[must_use]
    pub fn densely(mut self, operand: Operand) -> Problem {
        let (most, paged) = (self.most(operand.side()), self.paged);
        if let Some(tensor) = self.tensors.get_mut(operand as usize) {
            *tensor = TensorSpec { dims: tensor.dims, ..normalise(lies(operand, *tensor, paged).densely(), most) };
        }
        self
    }
}

/// Returns an operand as it is in memory.
fn lies(operand: Operand, tensor: TensorSpec, paged: Option<Paged>) -> TensorSpec {
    paged.filter(|_| operand.side() == Side::Keys).map_or(tensor, |paged| paged.container(&tensor))
}

/// Sets the batch stride of a packed tensor as if each sequence had the maximum length. The caller's batch stride has no effect, so
/// checks and cache keys use this form.
pub(crate) fn unplaced(mut tensor: TensorSpec) -> TensorSpec {
    let reach = |axis: usize| tensor.strides[axis].saturating_mul(tensor.dims[axis]);
    tensor.strides[0] = reach(1).max(reach(2)).max(tensor.dims[3]);
    tensor
}

/// Returns the extents `dims` with a sequence extent of at least 2, if a packed operand may have several tokens (at most `most`). A dense
/// operand has `most` `None` and is unchanged.
pub(crate) fn tokens_apart(mut dims: [i64; 4], most: Option<i64>) -> [i64; 4] {
    if let Some(most) = most {
        dims[2] = dims[2].max(2).min(most);
    }
    dims
}

/// Normalises the strides of a tensor, so that tensors with equal addresses are equal. The stride of an axis of extent 1 becomes the span
/// of the whole tensor. The token axis of packed sequences counts as longer if a call may have more than one token (`most`). A tensor
/// without elements becomes dense.
pub(crate) fn normalise(mut tensor: TensorSpec, most: Option<i64>) -> TensorSpec {
    if tensor.is_empty() {
        return TensorSpec::dense(tensor.dims, Layout::Bhsd);
    }
    let dims = tokens_apart(tensor.dims, most);
    let mut order: Vec<usize> = (0..4).filter(|&a| dims[a] > 1).collect();
    order.sort_by_key(|&a| tensor.strides[a]);
    let span = order.last().map_or(dims[3], |&a| tensor.strides[a].saturating_mul(dims[a]));
    for axis in 0..3 {
        if dims[axis] == 1 {
            tensor.strides[axis] = span.max(dims[3]);
        }
    }
    if dims[3] == 1 {
        tensor.strides[3] = 1;
    }
    tensor
}

#[cfg(test)]
mod tests {
    use crate::{AttentionSpec, DType, Layout, Mask, Shape};

    fn shape() -> Shape {
        Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 11, dim_qk: 8, dim_v: 16 }
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let mut spec = AttentionSpec::dense(DType::I32, shape(), Layout::Bhsd)
            .mask(Mask::window(Some(0), Some(-1), crate::Align::TopLeft))
            .mask(Mask::prefix_lm(-2));
        spec.k.dims = [3, 3, 11, 7];
        spec.v.strides[3] = 2;
        spec.o.strides[2] = 1;
        spec.q.alignment = 3;
        let fields: Vec<String> = spec.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
        assert_eq!(
            fields,
            [
                "dtype",
                "q.alignment",
                "v.strides[3]",
                "k.dims[0] (batch)",
                "k.dims[3] (dim_qk)",
                "v.dims[1] (heads_kv)",
                "q.dims[1] (heads_q)",
                "o.strides[2]",
                "masks[0].left",
                "masks[0].right",
                "masks[1].len",
            ]
        );
    }

    #[test]
    fn sizes_that_overflow_are_errors() {
        let big = i64::from(i32::MAX);
        let shape = Shape { batch: big, heads_q: big, heads_kv: big, seq_q: big, seq_kv: big, dim_qk: 8, dim_v: 8 };
        assert!(AttentionSpec::dense(DType::F32, shape, Layout::Sbhd).validate().is_err());
        for bad in [i64::MIN, -1, 0, i64::MAX] {
            assert!(AttentionSpec::dense(DType::F32, Shape { seq_q: bad, ..shape }, Layout::Bhsd).validate().is_err());
        }
    }

    #[test]
    fn strides_of_single_axes_do_not_tell_problems_apart() {
        let shape = Shape { batch: 1, seq_q: 1, ..shape() };
        let one = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).mask(Mask::window(None, Some(50), crate::Align::TopLeft));
        let mut two = AttentionSpec::dense(DType::F16, shape, Layout::Bhsd);
        two.q.strides[0] = 12345;
        two.q.strides[2] = 777;
        assert_eq!(one.validate().unwrap(), two.validate().unwrap());
    }
}
