//! What the caller asks for: plain data, `Eq + Hash`, no pointers.

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
/// Exhaustive: a new order of axes must stop whatever reads memory from compiling.
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
    /// Every order.
    pub const ALL: [Layout; 3] = [Layout::Bhsd, Layout::Bshd, Layout::Sbhd];

    /// The name used in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Bhsd => "bhsd",
            Layout::Bshd => "bshd",
            Layout::Sbhd => "sbhd",
        }
    }

    /// Dense strides, in elements, of a tensor of logical extents (batch, head, seq, dim) kept in this order.
    /// Saturates where a product does not fit; [`AttentionSpec::validate`] reports that.
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
/// A plain value: extents, strides and alignment are all that a strided tensor has, so it is written as a literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// (batch, head, seq, dim), in elements.
    pub dims: [i64; 4],
    /// Distance between neighbours along each axis, in elements. The last must be 1.
    pub strides: [i64; 4],
    /// Bytes that the base address is a multiple of; a power of two. 16 where nothing else is known:
    /// that is what every allocator gives and what the fused kernels read in place.
    pub alignment: u32,
}

impl TensorSpec {
    /// A dense tensor in the given order, its base 16-byte aligned.
    ///
    /// ```
    /// use sdpa_core::{Layout, TensorSpec};
    /// assert_eq!(TensorSpec::dense([2, 8, 16, 64], Layout::Bshd).strides, [16 * 8 * 64, 64, 8 * 64, 1]);
    /// ```
    pub fn dense(dims: [i64; 4], layout: Layout) -> TensorSpec {
        TensorSpec { dims, strides: layout.strides(dims), alignment: 16 }
    }

    /// A dense tensor of the same extents, its base 16-byte aligned, its axes in the same order in memory.
    #[must_use]
    pub fn densely(&self) -> TensorSpec {
        let mut order = [0usize, 1, 2];
        // Axes that repeat one element go outwards, where they merge with one another.
        order.sort_by_key(|&a| std::cmp::Reverse(if self.strides[a] == 0 { i64::MAX } else { self.strides[a] }));
        let mut strides = [1i64; 4];
        let mut next = self.dims[3];
        for &axis in order.iter().rev() {
            strides[axis] = next;
            next = next.saturating_mul(self.dims[axis].max(1));
        }
        TensorSpec { dims: self.dims, strides, alignment: 16 }
    }

    /// Strides of batch entries, heads and rows, in elements.
    pub fn outer(&self) -> [i64; 3] {
        [self.strides[0], self.strides[1], self.strides[2]]
    }

    /// True where an extent is 0: there are no elements, and no address is read or written.
    pub fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// Returns the number of elements that a buffer must hold: the index of the last one plus one, 0 without elements. `None` past `i64`.
    pub fn extent(&self) -> Option<i64> {
        if self.is_empty() {
            return Some(0);
        }
        self.dims.iter().zip(self.strides).try_fold(1i64, |n, (&d, s)| n.checked_add(s.checked_mul(d.checked_sub(1)?)?))
    }
}

/// The extents of an attention problem, for [`AttentionSpec::dense`].
///
/// A plain value with a name for each extent, written as a literal: seven numbers in a row would be confused.
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
/// The scale is a value of the call, not of the specification: changing it rebuilds nothing.
///
/// `batch`, `seq_q` and `seq_kv` may be 0, with the results that PyTorch's `scaled_dot_product_attention` has: see [`empty`](crate::empty). Problems that
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
    /// Element type of `o` where it is not that of `q`, `k` and `v`: of a pass of 8-bit floats alone, the other 8-bit float, f16 or bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub o_dtype: Option<DType>,
    /// Whether each 32 elements of `q`, `k` and `v` have a scale of their own, the declared parameters [`BlockScale`](crate::BlockScale), and no tensor has
    /// one: of a pass of 8-bit floats alone.
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
    /// Applied to the scaled scores, one after the other, before the masks.
    #[serde(default)]
    pub score_mods: Vec<ScoreMod>,
    /// Batch entries are documents that lie one behind the other, without padding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
    /// Keys and values lie in pages of containers: strides of `k` and `v` are those of containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paged: Option<Paged>,
    /// A key is kept where every mask keeps it; none keeps all.
    pub masks: Vec<Mask>,
    /// Whether each query head has a number in the softmax's denominator that belongs to no key: the declared parameter
    /// [`SINK`](crate::SINK).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sink: bool,
    /// Which part of the weights is dropped at random, by the declared parameters [`DROPOUT_SEED`](crate::DROPOUT_SEED) and
    /// [`DROPOUT_OFFSET`](crate::DROPOUT_OFFSET).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<Dropout>,
    /// Whether `stats` is wanted: f32, (batch, heads_q, seq_q), dense, or (total, heads_q) of a packed batch: the natural logarithm of each
    /// row's sum of exponentials; −inf where a row has no key. Beside a sink that is the sink or −inf.
    pub stats: bool,
    /// The base of `stats`, where they are wanted. Backward passes read natural ones.
    #[serde(default, skip_serializing_if = "StatsBase::is_natural")]
    pub stats_base: StatsBase,
    /// Whether `row_max` is wanted, laid out as stats: the largest kept score of each row, scaled and modified, in natural units; −inf where a row has no
    /// key. Beside a sink, the larger of that and the sink; without a key, the sink or −inf.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_max: bool,
    /// Whether `sum_exp` is wanted, laid out as stats: `Σ exp(score − row_max)` over the kept keys; 0 where a row has no key. Beside a sink, with
    /// `exp(sink − row_max)` in it; without a key, 1 or 0, as `row_max` is the sink or −inf.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sum_exp: bool,
}

impl AttentionSpec {
    /// Why this specification needs a batch entry, a query and a key; `None` where each of the extents may be 0.
    pub(crate) fn never_empty(&self) -> Option<&'static str> {
        if self.packed.is_some() {
            Some("boundaries say which packed documents have no tokens")
        } else if self.paged.is_some() {
            Some("seq_len_kv says which batch entries of a paged cache have no keys")
        } else if self.block_scaled {
            Some("block scales come in whole tiles")
        } else {
            None
        }
    }

    /// Tokens of a side that packed documents have at most.
    pub(crate) fn most(&self, packed: &Packed, side: Side) -> i64 {
        let seq = match side {
            Side::Queries => self.q.dims[2],
            Side::Keys => self.k.dims[2],
        };
        packed.most(side, self.q.dims[0], seq)
    }

    /// A specification over dense tensors, all in one order, with no mask and no stats.
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

    /// A specification over tensors of any strides, with no mask and no stats.
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
        }
    }

    /// A specification over packed tensors, (total, heads, dim): `shape.batch` documents, the longest of `shape.seq_q` queries and
    /// `shape.seq_kv` keys.
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

    /// Adds a score_mod, applied after those that are there.
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

    /// Adds a mask. Masks combine: a key is kept where every one of them keeps it.
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

    /// Adds a sink: a score of each query head that stands in the softmax's denominator and has no value, as in gpt-oss.
    ///
    /// Its numbers are the declared parameter [`SINK`](crate::SINK). `o = Σ exp(sᵢ)·vᵢ / (Σ exp(sᵢ) + exp(sink))`, and `stats` is the logarithm
    /// of that denominator. What scale, score_mods and masks do to scores they do not do to it.
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

    /// Drops weights at random with this probability, more than 0 and less than 1, and multiplies the others by `1 / (1 − p)`.
    ///
    /// Which ones is said by the declared parameters [`DROPOUT_SEED`](crate::DROPOUT_SEED) and [`DROPOUT_OFFSET`](crate::DROPOUT_OFFSET), one i64
    /// each, in device memory for a device call: a captured graph takes new ones at every replay. They are the same on every executor
    /// ([`DropoutMask`](crate::DropoutMask)). A backward pass is given those of its forward pass. The probability is part of the problem, as it is of
    /// cuDNN's plans; without dropout (in evaluation) leave it out.
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

    /// Asks for an output of this type: of a pass of 8-bit floats, which declares what [scales](crate::Fp8Scale) it.
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

    /// Takes `q`, `k` and `v` as elements and scales of blocks of 32 (MXFP8), in place of one scale for each tensor.
    ///
    /// The scales are the declared parameters [`BlockScale`](crate::BlockScale), one byte each, where [`BlockScales`](crate::BlockScales) says. Weights and
    /// `o` are rounded as they are; of what a call tells there is [`Amax::O`](crate::Amax::O) alone. `dim_qk` is a multiple of 32. There is no
    /// backward pass, and no packed documents or pages.
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

    /// Sets the score_mods, in place of those that are there; [`AttentionSpec::score_mod`] adds one.
    #[must_use]
    pub fn with_score_mods(mut self, score_mods: Vec<ScoreMod>) -> Self {
        self.score_mods = score_mods;
        self
    }

    /// Sets the masks, in place of those that are there; [`AttentionSpec::mask`] adds one.
    #[must_use]
    pub fn with_masks(mut self, masks: Vec<Mask>) -> Self {
        self.masks = masks;
        self
    }

    /// Sets how batch entries are packed; `None` where each has memory of its own. [`AttentionSpec::packed`] lays the tensors out too.
    #[must_use]
    pub fn with_packed(mut self, packed: impl Into<Option<Packed>>) -> Self {
        self.packed = packed.into();
        self
    }

    /// Sets how keys and values lie in pages; `None` where they do not. [`AttentionSpec::paged`] lays the tensors out too.
    #[must_use]
    pub fn with_paged(mut self, paged: impl Into<Option<Paged>>) -> Self {
        self.paged = paged.into();
        self
    }

    /// Asks for `stats`, which training needs and inference does not.
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

    /// Asks for `stats` as logarithms to this base.
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

    /// Asks for [`row_max`](AttentionSpec::row_max), the largest score of each row. With [`sum_exp`](AttentionSpec::with_sum_exp) it is what merging
    /// results over different keys needs, and `stats` is `row_max + ln(sum_exp)`.
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

    /// Asks for [`sum_exp`](AttentionSpec::sum_exp), the sum of exponentials of each row, relative to its largest score.
    #[must_use]
    pub fn with_sum_exp(mut self) -> Self {
        self.sum_exp = true;
        self
    }

    /// Normalises the specification, or says everything that is wrong with it.
    ///
    /// # Errors
    /// Every rule that a field breaks, each with the field, its value and the rule.
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
