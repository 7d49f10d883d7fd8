//! Specifications of attention: plain data, `Eq + Hash`, no pointers.

use crate::dropout::Dropout;
use crate::dtype::DType;
use crate::error::SpecErrors;
use crate::mask::Mask;
use crate::operand::Side;
use crate::packed::Packed;
use crate::paged::Paged;
use crate::problem::Problem;
use crate::score_mod::ScoreMod;
use crate::statistic::StatsBase;
use serde::{Deserialize, Serialize};

/// Order of the axes in memory, outermost first. Logical extents are always (batch, head, seq, dim).
///
/// Exhaustive: a new order of axes must stop code that reads memory from compiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Batch, head, sequence, dim.
    Bhsd,
    /// Batch, sequence, head, dim.
    Bshd,
    /// Sequence, batch, head, dim.
    Sbhd,
}

impl Layout {
    /// Every order of the axes in memory.
    pub const ALL: [Layout; 3] = [Layout::Bhsd, Layout::Bshd, Layout::Sbhd];

    /// Returns the name used in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Bhsd => "bhsd",
            Layout::Bshd => "bshd",
            Layout::Sbhd => "sbhd",
        }
    }

    /// Returns dense strides, in elements, for a tensor of logical extents (batch, head, seq, dim) in this order. Strides saturate if a
    /// product does not fit; [`AttentionSpec::validate`] reports that.
    pub fn strides(self, dims: [i64; 4]) -> [i64; 4] {
        let order = match self {
            Layout::Bhsd => [0, 1, 2, 3],
            Layout::Bshd => [0, 2, 1, 3],
            Layout::Sbhd => [2, 0, 1, 3],
        };
        let mut strides = [1i64; 4];
        let mut next = 1i64;
        for &axis in order.iter().rev() {
            strides[axis] = next;
            next = next.saturating_mul(dims[axis].max(1));
        }
        strides
    }
}

/// Logical extents and memory strides of one operand.
///
/// A plain value: extents, strides and alignment describe a strided tensor completely, so it is written as a literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Extents of the axes batch, head, seq and dim, in elements.
    pub dims: [i64; 4],
    /// Distance between neighbours along each axis, in elements. The last stride must be 1, except that `d_o` of a backward pass may have
    /// 0.
    pub strides: [i64; 4],
    /// Alignment of the base address in bytes; a power of two. 16 is a safe default: every allocator gives that, and the fused kernels read such
    /// operands in place.
    pub alignment: u32,
}

impl TensorSpec {
    /// Creates a dense tensor in the given order with a 16-byte aligned base.
    ///
    /// ```
    /// use sdpa_core::{Layout, TensorSpec};
    /// assert_eq!(TensorSpec::dense([2, 8, 16, 64], Layout::Bshd).strides, [16 * 8 * 64, 64, 8 * 64, 1]);
    /// ```
    pub fn dense(dims: [i64; 4], layout: Layout) -> TensorSpec {
        TensorSpec { dims, strides: layout.strides(dims), alignment: 16 }
    }

    /// Returns a dense tensor of the same extents with a 16-byte aligned base. The axes keep their order in memory.
    #[must_use]
    pub fn densely(&self) -> TensorSpec {
        let mut order = [0usize, 1, 2];
        // A stride of 0 gives an axis no place in the order, so such axes become outermost.
        order.sort_by_key(|&a| std::cmp::Reverse(if self.strides[a] == 0 { i64::MAX } else { self.strides[a] }));
        let mut strides = [1i64; 4];
        let mut next = self.dims[3];
        for &axis in order.iter().rev() {
            strides[axis] = next;
            next = next.saturating_mul(self.dims[axis].max(1));
        }
        TensorSpec { dims: self.dims, strides, alignment: 16 }
    }

    /// Returns the strides of batch entries, heads and rows, in elements.
    pub fn outer(&self) -> [i64; 3] {
        [self.strides[0], self.strides[1], self.strides[2]]
    }

    /// Returns whether an extent is 0: there are no elements, and no address is read or written.
    pub fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// Returns the number of elements that a buffer must hold: the index of the last one plus one, or 0 if there are no elements. `None`
    /// if it does not fit an `i64`.
    pub fn extent(&self) -> Option<i64> {
        if self.is_empty() {
            return Some(0);
        }
        self.dims.iter().zip(self.strides).try_fold(1i64, |n, (&d, s)| n.checked_add(s.checked_mul(d.checked_sub(1)?)?))
    }
}

/// The extents of an attention problem, for [`AttentionSpec::dense`].
///
/// A plain value, written as a literal with a name for each extent: seven positional numbers would be easy to confuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Number of batch entries; may be 0.
    pub batch: i64,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: i64,
    /// Key and value heads: equal to `heads_q` (MHA), a divisor (GQA) or 1 (MQA).
    pub heads_kv: i64,
    /// Queries per head; may be 0.
    pub seq_q: i64,
    /// Keys per head; may be 0.
    pub seq_kv: i64,
    /// Elements of a query and of a key.
    pub dim_qk: i64,
    /// Elements of a value and of an output row.
    pub dim_v: i64,
}

/// One attention problem: `o = softmax(mask(score_mods(q·kᵀ · attn_scale))) · v`.
///
/// The scale is a value of the call, not of the specification: a new value needs no new plan.
///
/// `batch`, `seq_q` and `seq_kv` may be 0, with the results of PyTorch's `scaled_dot_product_attention`: see [`empty`](crate::empty). Problems that
/// are packed, paged or block-scaled need at least 1 of each.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 129, seq_kv: 257, dim_qk: 64, dim_v: 64 };
/// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd)
///     .mask(Mask::causal_bottom_right())
///     .with_stats()
///     .validate()?;
/// assert_eq!(problem.group(), 4);
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AttentionSpec {
    /// Element type of `q`, `k`, `v` and `o`: f16, bf16, f32, or an 8-bit float ([`fp8`](crate::fp8)). Scores and stats are always f32.
    pub dtype: DType,
    /// Element type of `o` if it differs from that of `q`, `k` and `v`. Only passes of 8-bit floats may set it, to the other 8-bit float, f16 or
    /// bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub o_dtype: Option<DType>,
    /// Whether each 32 elements of `q`, `k` and `v` have a block scale, the declared parameters [`BlockScale`](crate::BlockScale), instead of a scale
    /// per tensor. Only for passes of 8-bit floats.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub block_scaled: bool,
    /// Queries, (batch, heads_q, seq_q, dim_qk).
    pub q: TensorSpec,
    /// Keys, (batch, heads_kv, seq_kv, dim_qk).
    pub k: TensorSpec,
    /// Values, (batch, heads_kv, seq_kv, dim_v).
    pub v: TensorSpec,
    /// Output, (batch, heads_q, seq_q, dim_v).
    pub o: TensorSpec,
    /// Functions of the scaled scores, applied in order before the masks.
    #[serde(default)]
    pub score_mods: Vec<ScoreMod>,
    /// The packing, if batch entries are packed sequences: contiguous, without padding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// The paging, if keys and values are paged. The strides of `k` and `v` are then those of the page pools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paged: Option<Paged>,
    /// The masks. A query attends to a key if all of them attend to it; without masks it attends to every key.
    pub masks: Vec<Mask>,
    /// Whether each query head has an attention sink: the declared parameter [`SINK`](crate::SINK).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sink: bool,
    /// Dropout of P, by the declared parameters [`DROPOUT_SEED`](crate::DROPOUT_SEED) and [`DROPOUT_OFFSET`](crate::DROPOUT_OFFSET).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<Dropout>,
    /// Whether to compute `stats`, the log-sum-exp of each row: f32, (batch, heads_q, seq_q), dense, or (total, heads_q) for a packed batch. A row
    /// without keys has −inf, or the sink if there is one.
    pub stats: bool,
    /// The base of the logarithms in `stats`. Backward passes read natural logarithms.
    #[serde(default, skip_serializing_if = "StatsBase::is_natural")]
    pub stats_base: StatsBase,
    /// Whether to compute `row_max`, in the layout of `stats`: for each row, the largest score that is not masked out, after `attn_scale` and
    /// the score_mods. It is not converted to base 2, even if `stats` are. −inf if a row has no key. With a sink, the larger of the maximum
    /// and the sink.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_max: bool,
    /// Whether to compute `sum_exp`, with the layout of stats: `Σ exp(score − row_max)` over the unmasked keys; 0 if a row has no key. With a sink it
    /// includes `exp(sink − row_max)`; without a key it is then 1, or 0 if `row_max` is −inf.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sum_exp: bool,
    /// Whether the bits of a sequence's results depend on this sequence alone: see [`AttentionSpec::batch_invariant`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub batch_invariant: bool,
}

impl AttentionSpec {
    /// Returns why this specification needs a batch entry, a query and a key; `None` if each of the extents may be 0.
    pub(crate) fn never_empty(&self) -> Option<&'static str> {
        if self.packed.is_some() {
            Some("equal offsets in cu_seqlens describe packed sequences without tokens")
        } else if self.paged.is_some() {
            Some("seq_len_kv = 0 describes batch entries without keys in a paged KV cache")
        } else if self.block_scaled {
            Some("block scales come in whole tiles")
        } else {
            None
        }
    }

    /// Returns the largest number of query or key tokens in a call with this packing.
    pub(crate) fn most(&self, packed: &Packed, side: Side) -> i64 {
        let seq = match side {
            Side::Queries => self.q.dims[2],
            Side::Keys => self.k.dims[2],
        };
        packed.most(side, self.q.dims[0], seq)
    }

    /// Creates a specification over dense tensors in one order, without masks and stats.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 2, heads_q: 8, heads_kv: 2, seq_q: 16, seq_kv: 32, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// assert_eq!(spec.k.strides, [32 * 2 * 64, 64, 2 * 64, 1]);
    /// ```
    pub fn dense(dtype: DType, shape: Shape, layout: Layout) -> AttentionSpec {
        let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = shape;
        let q = TensorSpec::dense([batch, heads_q, seq_q, dim_qk], layout);
        let k = TensorSpec::dense([batch, heads_kv, seq_kv, dim_qk], layout);
        let v = TensorSpec::dense([batch, heads_kv, seq_kv, dim_v], layout);
        let o = TensorSpec::dense([batch, heads_q, seq_q, dim_v], layout);
        AttentionSpec::strided(dtype, [q, k, v], o)
    }

    /// Creates a specification over tensors of any strides, without masks and stats.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, TensorSpec};
    /// // Queries, keys and values are slices of one projection, (batch, seq, 3, heads, dim).
    /// let dims = [2, 8, 512, 64];
    /// let slice = TensorSpec { dims, strides: [512 * 3 * 512, 64, 3 * 512, 1], alignment: 16 };
    /// let spec = AttentionSpec::strided(DType::F16, [slice; 3], TensorSpec::dense(dims, Layout::Bshd));
    /// assert_eq!(spec.validate()?.heads_q(), 8);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn strided(dtype: DType, [q, k, v]: [TensorSpec; 3], o: TensorSpec) -> AttentionSpec {
        AttentionSpec {
            dtype,
            o_dtype: None,
            block_scaled: false,
            q,
            k,
            v,
            o,
            score_mods: Vec::new(),
            packed: None,
            paged: None,
            masks: Vec::new(),
            sink: false,
            dropout: None,
            stats: false,
            stats_base: StatsBase::Natural,
            row_max: false,
            sum_exp: false,
            batch_invariant: false,
        }
    }

    /// Creates a specification over packed tensors, (total, heads, dim): `shape.batch` sequences of at most `shape.seq_q` queries and `shape.seq_kv`
    /// keys.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Mask, Packed, Shape};
    /// // Eight documents of 2,048 tokens at most, 9,000 together.
    /// let shape = Shape { batch: 8, heads_q: 32, heads_kv: 8, seq_q: 2048, seq_kv: 2048, dim_qk: 128, dim_v: 128 };
    /// let problem = AttentionSpec::packed(DType::BF16, shape, Packed::of(9000)).mask(Mask::causal()).validate()?;
    /// assert_eq!(problem.params()[0].name, "cu_seqlens");
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn packed(dtype: DType, shape: Shape, packed: Packed) -> AttentionSpec {
        AttentionSpec { packed: Some(packed), ..AttentionSpec::dense(dtype, shape, Layout::Bshd) }
    }

    /// Adds a score_mod, applied after the existing ones.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, ScoreMod, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let capped = ScoreMod::new("capped", |score, _, _| (score / 30.0).tanh() * 30.0)?;
    /// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).score_mod(capped).validate()?;
    /// assert!(problem.score_mod().is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn score_mod(mut self, score_mod: ScoreMod) -> Self {
        self.score_mods.push(score_mod);
        self
    }

    /// Adds a mask. A query attends to a key only if all masks attend to it.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::causal()).mask(Mask::document());
    /// let names: Vec<String> = spec.validate()?.params().iter().map(|p| p.name.clone()).collect();
    /// assert_eq!(names, ["doc_q", "doc_k"]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Self {
        self.masks.push(mask);
        self
    }

    /// Adds an attention sink, as in gpt-oss: a term per query head in the softmax's denominator, to which no key and no value belong.
    ///
    /// The declared parameter [`SINK`](crate::SINK) holds the sinks. `o = Σ exp(sᵢ)·vᵢ / (Σ exp(sᵢ) + exp(sink))`, and `stats` is the logarithm of
    /// that denominator. Scale, score_mods and masks do not apply to the sink.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 1, heads_q: 64, heads_kv: 8, seq_q: 4096, seq_kv: 4096, dim_qk: 64, dim_v: 64 };
    /// let window = Mask::window(Some(128), Some(0), sdpa_core::Align::TopLeft);
    /// let forward = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(window).with_sink();
    /// let problem = forward.backward().wrt("sink", DType::F32).validate()?;
    /// assert_eq!(problem.gradient_elements("sink"), 64);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_sink(mut self) -> Self {
        self.sink = true;
        self
    }

    /// Drops elements of P with this probability, more than 0 and less than 1, and multiplies the others by `1 / (1 − p)`.
    ///
    /// The declared parameters [`DROPOUT_SEED`](crate::DROPOUT_SEED) and [`DROPOUT_OFFSET`](crate::DROPOUT_OFFSET) select the elements. Each is one
    /// i64, in device memory for a device call, so every replay of a captured graph may use new ones. All executors drop the same elements
    /// ([`DropoutMask`](crate::DropoutMask)). A backward pass needs the numbers of its forward pass. The probability is part of the problem, as it is
    /// of cuDNN's plans. Omit dropout in evaluation.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    /// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_dropout(0.1).validate()?;
    /// let names: Vec<&str> = problem.params().iter().map(|p| p.name.as_str()).collect();
    /// assert_eq!(names, ["dropout_seed", "dropout_offset"]);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_dropout(mut self, p: f32) -> Self {
        self.dropout = Some(Dropout::new(p));
        self
    }

    /// Sets the element type of the output of a pass of 8-bit floats. The problem declares the output's [scale](crate::Fp8Scale) if it needs one.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Operand, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    /// let problem = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd).with_output_in(DType::BF16).validate()?;
    /// assert_eq!(problem.dtype_of(Operand::O), DType::BF16);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_output_in(mut self, dtype: DType) -> Self {
        self.o_dtype = Some(dtype);
        self
    }

    /// Uses block scales for `q`, `k` and `v`, one per 32 elements (MXFP8), instead of one scale per tensor.
    ///
    /// The scales are the declared parameters [`BlockScale`](crate::BlockScale), one byte each, in the layout of [`BlockScales`](crate::BlockScales).
    /// P and `o` are rounded without a scale, and the only amax is [`Amax::O`](crate::Amax::O). `dim_qk` must be a multiple of 32. There is no
    /// backward pass, and no packing or paging.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, F8E4M3, Layout, Operand, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 128, seq_kv: 128, dim_qk: 64, dim_v: 64 };
    /// let forward = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd).with_output_in(DType::BF16).with_block_scales();
    /// let problem = forward.validate()?;
    /// let numbers = vec![0.5; 8 * 128 * 64];
    /// let (q, block_scale_q) = F8E4M3::narrow(&numbers, &problem.block_scales(Operand::Q).unwrap())?;
    /// assert_eq!((q[0].to_f32(), block_scale_q[0].to_f32()), (256.0, 1.0 / 512.0));
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_block_scales(mut self) -> Self {
        self.block_scaled = true;
        self
    }

    /// Sets the element type of `q`, `k`, `v` and `o`.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the extents and strides of the queries.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape, TensorSpec};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// // Rows of 80 elements, of which 64 are queries.
    /// let q = TensorSpec { strides: [16 * 8 * 80, 80, 8 * 80, 1], ..spec.q };
    /// assert!(spec.with_q(q).validate().is_ok());
    /// ```
    #[must_use]
    pub fn with_q(mut self, q: TensorSpec) -> Self {
        self.q = q;
        self
    }

    /// Sets the extents and strides of the keys.
    #[must_use]
    pub fn with_k(mut self, k: TensorSpec) -> Self {
        self.k = k;
        self
    }

    /// Sets the extents and strides of the values.
    #[must_use]
    pub fn with_v(mut self, v: TensorSpec) -> Self {
        self.v = v;
        self
    }

    /// Sets the extents and strides of the output.
    #[must_use]
    pub fn with_o(mut self, o: TensorSpec) -> Self {
        self.o = o;
        self
    }

    /// Replaces the score_mods; [`AttentionSpec::score_mod`] adds one.
    #[must_use]
    pub fn with_score_mods(mut self, score_mods: Vec<ScoreMod>) -> Self {
        self.score_mods = score_mods;
        self
    }

    /// Replaces the masks; [`AttentionSpec::mask`] adds one.
    #[must_use]
    pub fn with_masks(mut self, masks: Vec<Mask>) -> Self {
        self.masks = masks;
        self
    }

    /// Sets the packing of batch entries; `None` for a dense batch. [`AttentionSpec::packed`] also sets the tensors' layouts.
    #[must_use]
    pub fn with_packed(mut self, packed: impl Into<Option<Packed>>) -> Self {
        self.packed = packed.into();
        self
    }

    /// Sets the paging of keys and values; `None` without pages. [`AttentionSpec::paged`] also sets the tensors' layouts.
    #[must_use]
    pub fn with_paged(mut self, paged: impl Into<Option<Paged>>) -> Self {
        self.paged = paged.into();
        self
    }

    /// Requests `stats`, which training needs and inference does not.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats().validate()?;
    /// assert_eq!(problem.stats_elements(), 8 * 16);
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_stats(mut self) -> Self {
        self.stats = true;
        self
    }

    /// Requests `stats` as logarithms to this base.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape, StatsBase};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// assert_eq!(spec.with_stats_in(StatsBase::Two).stats_base, StatsBase::Two);
    /// ```
    #[must_use]
    pub fn with_stats_in(mut self, base: StatsBase) -> Self {
        (self.stats, self.stats_base) = (true, base);
        self
    }

    /// Requests [`row_max`](AttentionSpec::row_max), the largest score of each row. Merging results over different keys needs it together with
    /// [`sum_exp`](AttentionSpec::with_sum_exp); `stats` is `row_max + ln(sum_exp)`.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape, Statistic};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// let problem = spec.with_row_max().with_sum_exp().validate()?;
    /// assert!(problem.computes(Statistic::RowMax) && !problem.computes(Statistic::Stats));
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn with_row_max(mut self) -> Self {
        self.row_max = true;
        self
    }

    /// Requests [`sum_exp`](AttentionSpec::sum_exp), the sum of exponentials of each row, relative to its largest score.
    #[must_use]
    pub fn with_sum_exp(mut self) -> Self {
        self.sum_exp = true;
        self
    }

    /// Requires that the bits of a sequence's results depend on this sequence alone, whatever else is in the call.
    ///
    /// Without this option, an executor divides the work as is fastest for the shape of a call, so sums round differently in different calls. With
    /// it, the `o`, row statistics, `dq`, `dk` and `dv` of a sequence have the same bits alone and in any batch, padded and packed, from contiguous
    /// and from paged keys, on any number of SMs or threads. The results of a query have the same bits for any number of queries in the call, so
    /// prefill, chunked prefill and decode agree.
    ///
    /// The promise holds for one executor, kernel family, release and type of device. Score_mods and masks must not read the index of the batch entry,
    /// and must give the same values for the same query and key; chunks therefore need masks that count from the last key, such as
    /// [`Mask::causal_bottom_right`]. Gradients of declared parameters sum over the batch, so they are only deterministic.
    ///
    /// Dropout is an error, because its random numbers depend on the index of the batch entry. So are 8-bit floats.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// let shape = Shape { batch: 4, heads_q: 8, heads_kv: 2, seq_q: 1, seq_kv: 900, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask(Mask::padding()).batch_invariant();
    /// assert!(spec.validate()?.batch_invariant());
    /// assert!(spec.with_dropout(0.1).validate().is_err());
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    #[must_use]
    pub fn batch_invariant(mut self) -> Self {
        self.batch_invariant = true;
        self
    }

    /// Normalises the specification, or returns every mistake in it.
    ///
    /// # Errors
    /// Returns every rule that a field breaks, each with the field, its value and the rule.
    ///
    /// # Examples
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 8, seq_q: 16, seq_kv: 16, dim_qk: 64, dim_v: 64 };
    /// let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
    /// assert!(spec.validate().is_ok());
    /// // Every mistake at once.
    /// let wrong = AttentionSpec::dense(DType::I32, Shape { heads_kv: 3, ..shape }, Layout::Bshd).validate().unwrap_err();
    /// assert!(wrong.0.len() > 1, "{wrong}");
    /// # Ok::<(), sdpa_core::SpecErrors>(())
    /// ```
    pub fn validate(&self) -> Result<Problem, SpecErrors> {
        Problem::new(self)
    }
}
