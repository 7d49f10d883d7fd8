//! The form of a forward problem that the native CUDA kernels use.

use crate::index_range::captured;
use crate::unsupported::{checked, unsupported};
use sdpa_core::error::Unsupported;
use sdpa_core::expr::{Axis, Binary, Node, ParamKind, Trace, Unary};
use sdpa_core::mask::{Ends, Region};
use sdpa_core::spec::TensorSpec;
use sdpa_core::{DType, Dropout, Paged, Problem, Side, Statistic, StatsBase};
use sdpa_emit::Captured;
use sdpa_nvidia::JobQuery;
use std::sync::Arc;

/// The forward problem in the form that the kernels use.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The element type of operands: f16 or bf16, or also f32 for the `mma.sync` kernels.
    pub dtype: DType,
    /// Extents, strides and alignment of `q`, `k`, `v` and `o`.
    pub tensors: [TensorSpec; 4],
    /// The mask's diagonal band (bounds on `k - q`) and its prefix, for prefix-LM masks.
    pub region: Region,
    /// The mask's band that is bottom-right aligned per sequence.
    pub ends: Ends,
    /// Whether the problem has a query length for each batch entry.
    pub seq_len_q: bool,
    /// Whether the problem has a key length for each batch entry.
    pub seq_len_kv: bool,
    /// The part of the mask that is neither a band nor a length: keys are masked out where it is false.
    pub keep: Option<Arc<Trace>>,
    /// The function that modifies the scaled score.
    pub score_mod: Option<Arc<Trace>>,
    /// The declared parameters (tensors and scalars of the caller) that `keep` and `score_mod` read.
    pub captured: Captured,
    /// Whether each query head has an attention sink.
    pub sink: bool,
    /// Dropout of P, if any.
    pub dropout: Option<Dropout>,
    /// True for each row statistic that is computed, in the order of [`Statistic::ALL`]. Each is an f32 tensor (batch, heads_q, seq_q).
    pub statistics: [bool; 3],
    /// The base of the logarithms in `stats`.
    pub stats_base: StatsBase,
    /// The extents (batch, heads_q, seq_q, seq_kv).
    pub extents: [i64; 4],
    /// Query heads per KV head.
    pub group: i64,
    /// The layout of packed sequences; `None` if the batch is not packed.
    pub packed: Option<Packs>,
    /// The paging of keys and values; `None` if they are not paged.
    pub paged: Option<Paged>,
    /// Whether the bits of a sequence's results must depend on this sequence alone.
    pub batch_invariant: bool,
}

/// The layout of packed sequences, without `cu_seqlens`, which belong to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packs {
    /// Whether keys are packed too, not only queries.
    pub keys: bool,
    /// Whether `cu_seqlens` are i64, not i32.
    pub wide: bool,
    /// The largest number of query tokens and the largest number of key tokens in a call.
    pub totals: [i64; 2],
}

/// The time at which the block-sparse index lists of a mask are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lists {
    /// Never: the mask consists of bands and lengths.
    None,
    /// When the plan is built: the mask depends on indices only.
    AtPlan,
    /// In each call, on the device: the mask reads tensors or scalars of the call.
    AtCall,
}

impl Forward {
    /// Creates the kernels' form of a forward problem.
    ///
    /// # Errors
    /// Returns every limit of the kernels that the problem breaks.
    pub fn of(problem: &Problem) -> Result<Forward, Unsupported> {
        let check = checked(JobQuery::Forward(problem));
        if check.0.is_empty() { Ok(Forward::of_supported(problem)) } else { Err(unsupported(check.0)) }
    }

    /// Creates the kernels' form of a forward problem without support checks.
    pub(crate) fn of_supported(problem: &Problem) -> Forward {
        let kept = problem.kept();
        let traces = [problem.score_mod().map(|trace| &**trace), kept.rest.as_deref()];
        Forward {
            dtype: problem.dtype(),
            tensors: *problem.tensors(),
            region: kept.region,
            ends: kept.ends,
            seq_len_q: kept.seq_len_q,
            seq_len_kv: kept.seq_len_kv,
            keep: kept.rest.clone(),
            score_mod: problem.score_mod().cloned(),
            captured: captured(traces.into_iter().flatten(), problem.extents()),
            sink: problem.sink(),
            dropout: problem.dropout(),
            statistics: Statistic::ALL.map(|statistic| problem.computes(statistic)),
            stats_base: problem.stats_base(),
            extents: problem.extents(),
            group: problem.group(),
            paged: problem.paged().copied(),
            batch_invariant: problem.batch_invariant(),
            packed: problem.packed().map(|packed| Packs {
                keys: problem.packs(Side::Keys),
                wide: packed.wide,
                totals: Side::ALL.map(|side| problem.total(side)),
            }),
        }
    }

    /// Returns whether a row statistic is computed.
    pub fn writes(&self, statistic: Statistic) -> bool {
        self.statistics[statistic as usize]
    }

    /// Returns whether each split of split-KV must store its row maxima. `row_max` and `sum_exp` need them, because their values combine
    /// all splits of a row.
    pub(crate) fn leaves_largest(&self) -> bool {
        self.writes(Statistic::RowMax) || self.writes(Statistic::SumExp)
    }

    /// Returns whether one side (queries or keys) is packed.
    pub fn packs(&self, side: Side) -> bool {
        self.packed.is_some_and(|packed| side == Side::Queries || packed.keys)
    }

    /// Returns the cost of evaluating the mask and the score_mod for one score, in units of an addition.
    pub(crate) fn weight(&self) -> u32 {
        [&self.score_mod, &self.keep].into_iter().map(|trace| trace.as_deref().map_or(0, |trace| self.weight_of(trace))).sum()
    }

    /// Returns the cost of evaluating a trace for one score, in units of an addition. It leaves out values that all scores of a head
    /// share.
    pub(crate) fn weight_of(&self, trace: &Trace) -> u32 {
        let nodes = trace.nodes().iter().zip(trace.depends()).filter(|(_, of)| of.varies());
        nodes.map(|(node, _)| node_weight(*node, self.dtype == DType::F32)).sum()
    }

    /// Returns when the block-sparse index lists of the mask are created.
    pub fn lists(&self) -> Lists {
        match &self.keep {
            None => Lists::None,
            Some(keep) if keep.params().is_empty() => Lists::AtPlan,
            Some(_) => Lists::AtCall,
        }
    }

    /// Returns the number of batch entries and the number of heads that have their own block lists. A number is 1 if the mask is the same
    /// for all of them.
    pub fn list_rows(&self) -> [i64; 2] {
        let [batch, heads, ..] = self.extents;
        [if self.keep_differs(Axis::Batch) { batch } else { 1 }, if self.keep_differs(Axis::Head) { heads } else { 1 }]
    }

    /// Returns whether the part of the mask that is neither a band nor a length may differ along an axis.
    fn keep_differs(&self, axis: Axis) -> bool {
        let spans = |kind| matches!(kind, ParamKind::Tensor { axes, .. } if axes.has(axis));
        let reads = |keep: &Trace| keep.params().iter().any(|declared| spans(declared.kind));
        self.keep.as_deref().is_some_and(|keep| keep.uses_index(axis) || reads(keep))
    }

    /// Returns whether that part is the same for all heads and queries, as a mask of padding is.
    pub(crate) fn keeps_by_key(&self) -> bool {
        self.keep.is_some() && !self.keep_differs(Axis::Head) && !self.keep_differs(Axis::Q)
    }
}

/// Returns the cost of a node. With `exact`, functions are those of CUDA's library.
fn node_weight(node: Node, exact: bool) -> u32 {
    match node {
        Node::Score | Node::Upstream | Node::Index(_) | Node::Extent(_) | Node::Const(_) | Node::Param(_) => 0,
        Node::Read(..) => 3,
        Node::Unary(Unary::Sin | Unary::Cos, _) if exact => 40,
        Node::Unary(Unary::Sin | Unary::Cos, _) => 12,
        Node::Unary(Unary::Erf, _) | Node::Binary(Binary::Pow | Binary::Mod, ..) => 20,
        Node::Unary(Unary::Exp | Unary::Log | Unary::Tanh | Unary::Sqrt | Unary::Rsqrt, _) | Node::Binary(Binary::Div, ..) => 6,
        Node::Unary(Unary::Neg | Unary::Abs | Unary::Floor | Unary::Ceil | Unary::Not | Unary::ToF32 | Unary::ToI32, _) => 1,
        Node::Binary(Binary::Add | Binary::Sub | Binary::Mul | Binary::Min | Binary::Max, ..) => 1,
        Node::Binary(Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::And | Binary::Or, ..) => 1,
        Node::Select(..) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdpa_core::error::Reason;
    use sdpa_core::{AttentionSpec, Layout, Mask, Packed, Shape};

    const SHAPE: Shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 9, seq_kv: 9, dim_qk: 64, dim_v: 64 };

    fn fields(spec: &AttentionSpec) -> Vec<String> {
        let refused = Forward::of(&spec.validate().unwrap()).err();
        let field = |reason: Reason| match reason {
            Reason::Limit { field, .. } => field,
            Reason::KnownBad { .. } | Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) | _ => format!("{reason:?}"),
        };
        refused.map_or_else(Vec::new, |refused| refused.reasons.into_iter().map(field).collect())
    }

    #[test]
    fn reasons_name_the_field() {
        let dense = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bshd);
        assert_eq!(fields(&dense.clone().mask(Mask::padding()).with_sink().with_stats()), [""; 0]);
        assert_eq!(fields(&dense.clone().with_dropout(0.5)), [""; 0]);
        assert_eq!(fields(&dense.clone().with_stats_in(StatsBase::Two).with_row_max().with_sum_exp()), [""; 0]);
        assert_eq!(fields(&AttentionSpec::dense(DType::F32, SHAPE, Layout::Bshd)), ["dtype"]);
        let narrow = AttentionSpec::dense(DType::F8E4M3, Shape { dim_qk: 64, ..SHAPE }, Layout::Bshd);
        assert_eq!(fields(&narrow.with_block_scales())[..2], ["dtype", "block_scaled"]);
        assert_eq!(fields(&AttentionSpec::packed(DType::F16, SHAPE, Packed::new())), [""; 0]);
        let mut apart = AttentionSpec::packed(DType::F16, SHAPE, Packed::new());
        apart.o.strides[2] += 4;
        assert_eq!(fields(&apart), ["o strides (seq)"]);
        assert_eq!(fields(&AttentionSpec::packed(DType::F16, SHAPE, Packed::of(1 << 30))), ["total_q", "total_kv"]);
        assert_eq!(fields(&AttentionSpec::paged(DType::F16, SHAPE, Paged::new(48, 6))), [""; 0]);
        assert_eq!(fields(&AttentionSpec::paged(DType::F16, SHAPE, Paged::new(16, 6)).with_packed_queries(9)), [""; 0]);
        assert_eq!(fields(&AttentionSpec::paged(DType::F16, SHAPE, Paged::new(4, 6))), ["paged.page_size"]);
        let mut apart = AttentionSpec::paged(DType::F16, SHAPE, Paged::new(8, 6));
        (apart.k.strides[0], apart.v.strides[2]) = (apart.k.strides[0] + 4, apart.v.strides[2] + 2);
        assert_eq!(fields(&apart), ["k strides (batch)", "v strides (seq)"]);
        let odd = Shape { dim_qk: 20, dim_v: 264, ..SHAPE };
        let told = fields(&AttentionSpec::dense(DType::F16, odd, Layout::Bhsd));
        assert_eq!(told, ["dim_v", "q strides (head)", "q strides (seq)", "k strides (head)", "k strides (seq)"]);
        let mut broadcast = dense;
        broadcast.k.strides[0] = 0;
        broadcast.v.alignment = 4;
        assert_eq!(fields(&broadcast), ["k strides (batch)", "v alignment"]);
    }

    #[test]
    fn rules_have_lists_and_those_of_places_alone_before_a_call() {
        let dense = AttentionSpec::dense(DType::BF16, SHAPE, Layout::Bhsd);
        let of = |mask: Mask| Forward::of(&dense.clone().mask(mask).validate().unwrap()).unwrap();
        assert_eq!([of(Mask::causal()), of(Mask::prefix_lm(3))].map(|of| of.lists()), [Lists::None; 2]);
        let places = of(Mask::new("", |at, _| ((at.q + at.head) % 2).eq(at.k % 2)).unwrap());
        assert_eq!((places.lists(), places.list_rows()), (Lists::AtPlan, [1, 4]));
        let document = of(Mask::document());
        assert_eq!((document.lists(), document.list_rows()), (Lists::AtCall, [2, 1]));
    }
}
