//! The ops of a graph. Operands are fields, so a missing one does not compile.

mod convolution;
mod experts;
mod norm;
mod resample;

pub use convolution::{ConvBackwardData, ConvBackwardFilter, ConvForward, ConvGeometry};
pub use experts::{Concat, MoeMatmul, MoeMatmulBackward, Rope, RopeBackward, Routing};
pub use norm::{BnBackwardWeights, BnFinalize, GenStats, NormBackward, NormForward, NormMode, RunningStats};
pub use resample::{ResampleBackward, ResampleForward, ResampleMode, Upsample, Window};

use super::pointwise::{Mode, Params};
use super::tensor::TensorId;
use super::ty::DType;
use serde::{Deserialize, Serialize};

/// One op. Different ops with the same result are different to cuDNN: engines match exact ops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub enum Op {
    /// A pointwise function, `y = f(x, b, t)`.
    Pointwise(Pointwise),
    /// A matrix product, `c = a · b`.
    Matmul(Matmul),
    /// Reduces each axis of `x` to its extent in `y`.
    Reduction(Reduction),
    /// Reads the elements of `x` with other extents or strides.
    Reshape(Reshape),
    /// Reorders the axes of `x` (from cuDNN 9.22 on).
    Transpose(Transpose),
    /// Takes a part of `x` along each axis (from cuDNN 9.22 on).
    Slice(Slice),
    /// Joins tensors along an axis.
    Concat(Concat),
    /// A convolution over one to three spatial axes.
    ConvForward(ConvForward),
    /// The gradient of a convolution with respect to its images.
    ConvBackwardData(ConvBackwardData),
    /// The gradient of a convolution with respect to its filters.
    ConvBackwardFilter(ConvBackwardFilter),
    /// A layer, instance, batch or RMS norm.
    NormForward(NormForward),
    /// The gradients of a norm.
    NormBackward(NormBackward),
    /// The sums of elements and squares of each channel.
    GenStats(GenStats),
    /// The statistics of batch norm, from such sums.
    BnFinalize(BnFinalize),
    /// The gradients of the scale and bias of batch norm, and the factors that give the gradient of its input.
    BnBackwardWeights(BnBackwardWeights),
    /// Pooling: the maximum or mean of windows.
    ResampleForward(ResampleForward),
    /// The gradient of pooling.
    ResampleBackward(ResampleBackward),
    /// Bilinear interpolation to twice the spatial extents.
    Upsample(Upsample),
    /// A matrix product with weights per expert (from cuDNN 9.15 on).
    MoeMatmul(MoeMatmul),
    /// The gradient of such a product with respect to the weights (from cuDNN 9.22 on).
    MoeMatmulBackward(MoeMatmulBackward),
    /// A rotary position embedding (from cuDNN 9.24 on).
    Rope(Rope),
    /// The gradient of a rotary position embedding (from cuDNN 9.25 on).
    RopeBackward(RopeBackward),
    /// Generates random numbers.
    Rng(Rng),
    /// Softmax over the last axis (from cuDNN 9.20 on).
    Softmax(Softmax),
    /// Masks out scores on one side of a diagonal (from cuDNN 9.20 on).
    BandMask(BandMask),
    /// Gathers the pages of a key or value cache (from cuDNN 9.4 on).
    PagedLoad(PagedLoad),
    /// Quantizes elements with a scale per block (from cuDNN 9.7 on).
    BlockScaleQuantize(BlockScaleQuantize),
    /// Dequantizes elements by the scale of their block (from cuDNN 9.7 on).
    BlockScaleDequantize(BlockScaleDequantize),
    /// Attention in one op, the unified form (from cuDNN 9.13 on).
    SdpaForward(Box<SdpaForward>),
    /// The gradient of attention in one op (from cuDNN 9.17 on).
    SdpaBackward(Box<SdpaBackward>),
}

impl Op {
    /// Returns the tensors whose *contents* determine the addresses that the op accesses: lengths, offsets, pages. If such contents are out of range,
    /// an engine accesses memory outside of its operands.
    pub fn addressing(&self) -> Vec<TensorId> {
        let all = match self {
            Op::Matmul(m) => vec![m.m_override, m.n_override, m.k_override],
            Op::PagedLoad(p) => vec![Some(p.seq_len), Some(p.page_table)],
            Op::SdpaForward(s) => {
                vec![s.page_table_k, s.page_table_v, s.seq_len_q, s.seq_len_kv, s.cu_seq_len_q, s.cu_seq_len_kv]
            }
            Op::SdpaBackward(s) => vec![s.seq_len_q, s.seq_len_kv],
            Op::BandMask(b) => vec![b.seq_q, b.seq_kv],
            Op::ResampleBackward(r) => vec![r.index],
            Op::MoeMatmul(m) => {
                let (index, slot) = m.routing.operands();
                vec![Some(m.first_token), index, slot]
            }
            Op::MoeMatmulBackward(m) => vec![Some(m.first_token)],
            Op::Pointwise(_)
            | Op::Reduction(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Concat(_)
            | Op::ConvForward(_)
            | Op::ConvBackwardData(_)
            | Op::ConvBackwardFilter(_)
            | Op::NormForward(_)
            | Op::NormBackward(_)
            | Op::GenStats(_)
            | Op::BnFinalize(_)
            | Op::BnBackwardWeights(_)
            | Op::ResampleForward(_)
            | Op::Upsample(_)
            | Op::Rope(_)
            | Op::RopeBackward(_)
            | Op::Rng(_)
            | Op::Softmax(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_) => Vec::new(),
        };
        all.into_iter().flatten().collect()
    }
}

/// A pointwise function, `y = f(x, b, t)`. Axes of extent 1 are broadcast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pointwise {
    /// The function that is applied to each element.
    pub mode: Mode,
    /// First operand; the forward input of backward modes.
    pub x: TensorId,
    /// Second operand of the function; `None` if it has only one.
    pub b: Option<TensorId>,
    /// The condition of a select; `None` for any other mode.
    pub t: Option<TensorId>,
    /// The incoming gradient of backward modes.
    pub dy: Option<TensorId>,
    /// Result; the outgoing gradient of backward modes.
    pub y: TensorId,
    /// Element type of the arithmetic.
    pub compute: DType,
    /// Constants of the mode, such as the slope of a relu.
    pub params: Params,
}

/// `c = a · b` over the last two axes. Leading axes broadcast, and a leading axis of `a` may be a multiple of `b`'s (query heads of a GQA group).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matmul {
    /// Left operand, (…, m, k).
    pub a: TensorId,
    /// Right operand, (…, k, n).
    pub b: TensorId,
    /// Result, (…, m, n).
    pub c: TensorId,
    /// Number of valid rows of `a` and `c` in each batch entry; `None` if all are valid.
    pub m_override: Option<TensorId>,
    /// Number of valid columns of `b` and `c` in each batch entry; `None` if all are valid.
    pub n_override: Option<TensorId>,
    /// Number of valid terms of each sum, in each batch entry; `None` if all are valid.
    pub k_override: Option<TensorId>,
    /// The value that invalid rows and columns of the result receive.
    #[serde(default, with = "super::float::optional")]
    pub padding: Option<f64>,
    /// Element type of the accumulation.
    pub compute: DType,
}

/// The operation of a reduction. NVIDIA's header also has avg, norm1, norm2 and mul_no_zeros, but cuDNN 9.19 and 9.27 refuse their descriptors:
/// compose them of these modes and pointwise ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReductionMode {
    /// Sum of the elements.
    Add,
    /// Product of the elements.
    Mul,
    /// The smallest element.
    Min,
    /// The largest element.
    Max,
    /// The largest magnitude of an element.
    Amax,
}

impl ReductionMode {
    /// Every mode of a reduction.
    pub const ALL: [ReductionMode; 5] =
        [ReductionMode::Add, ReductionMode::Mul, ReductionMode::Min, ReductionMode::Max, ReductionMode::Amax];

    /// Returns the name of the mode in printed graphs.
    pub fn name(self) -> &'static str {
        match self {
            ReductionMode::Add => "add",
            ReductionMode::Mul => "mul",
            ReductionMode::Min => "min",
            ReductionMode::Max => "max",
            ReductionMode::Amax => "amax",
        }
    }
}

/// Reduces each axis of `x` to its extent in `y`, which divides it: to 1, or in groups of neighbours (head folding).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reduction {
    /// The operation that combines elements.
    pub mode: ReductionMode,
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// Element type of the accumulation.
    pub compute: DType,
    /// If true, results must be deterministic (from cuDNN 9.11 on).
    pub deterministic: bool,
}

/// The way in which a reshape reads its input. Versions before cuDNN 9.22 support only views.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReshapeMode {
    /// Reads the same memory with other extents and strides: element `n` of memory is unchanged.
    ViewOnly,
    /// Reads the elements in row-major order of the extents.
    Logical,
}

/// A reshape: `y` has the elements of `x` with other extents or strides. Without a mode, it is a view.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// The order in which elements are read. `None` means a view, the only mode before cuDNN 9.22.
    pub mode: Option<ReshapeMode>,
}

/// A transpose: axis `i` of `y` is axis `permutation[i]` of `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transpose {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// For each axis of `y`, the index of the axis of `x`.
    pub permutation: Vec<i64>,
}

/// A slice: `y = x[start..limit]` with a step, along each axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// First index of the slice along each axis of `x`.
    pub start: Vec<i64>,
    /// End of the slice along each axis of `x`, which is not part of the slice.
    pub limit: Vec<i64>,
    /// Step between the indices of the slice along each axis of `x`.
    pub step: Vec<i64>,
}

/// A distribution of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Each number is 1 with this probability, and 0 otherwise.
    Bernoulli(#[serde(with = "super::float::f64")] f64),
    /// Uniformly distributed between the first number and the second.
    Uniform(#[serde(with = "super::float::f64")] f64, #[serde(with = "super::float::f64")] f64),
    /// Normally distributed, with the first number as mean and the second as standard deviation.
    Normal(#[serde(with = "super::float::f64")] f64, #[serde(with = "super::float::f64")] f64),
}

/// The seed of an [`Rng`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seed {
    /// A seed that is compiled into the kernel.
    Value(i64),
    /// A seed in this tensor: one i64 in device or host memory.
    Tensor(TensorId),
}

/// Random numbers. Their bits are specific to the library: [`crate::ir::interp`] receives them from the caller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rng {
    /// The tensor that is written.
    pub y: TensorId,
    /// The distribution of the random numbers.
    pub distribution: Distribution,
    /// The source of the seed: a constant or a tensor.
    pub seed: Seed,
    /// The tensor with the position of the first random number in the generator's sequence: one i64.
    pub offset: Option<TensorId>,
}

/// Softmax over the last axis: `y = exp(x − max) / sum_exp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Softmax {
    /// Scores, (…, seq_q, seq_kv).
    pub x: TensorId,
    /// Probabilities; zeros in a row whose scores are all −∞.
    pub y: TensorId,
    /// `max + ln(sum_exp)` of each row, f32; the last axis has extent 1.
    pub stats: Option<TensorId>,
    /// The maximum of each row, f32; the last axis has extent 1.
    pub max: Option<TensorId>,
    /// The sum of `exp(x − max)` of each row, f32; the last axis has extent 1.
    pub sum_exp: Option<TensorId>,
    /// An extra score per head that takes probability and has no value, f32 (1, h, 1, 1).
    pub sink: Option<TensorId>,
    /// True if `stats` is in base 2 (from cuDNN 9.27 on).
    pub stats_log2: bool,
}

/// The side of the diagonal on which a band mask masks out scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BandSide {
    /// Masks out scores right of the diagonal: keeps those with `row + shift_right + align ≥ col`, where `align` is `seq_kv − seq_q` if
    /// both lengths are given, and 0 otherwise.
    Right,
    /// Masks out scores left of the diagonal: keeps those with `col + left − align > row`, where `align` is `seq_kv − seq_q` if both
    /// lengths are given, and 0 otherwise. Without lengths, `left` must include any alignment.
    Left,
}

/// Replaces scores on one side of a diagonal by `fill`. `align` is `seq_kv − seq_q` if both lengths are given, else 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BandMask {
    /// Scores, (…, seq_q, seq_kv).
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// The value of masked-out scores: one f32 by value.
    pub fill: TensorId,
    /// The side of the diagonal that is masked out.
    pub side: BandSide,
    /// The number of columns right of the diagonal that a right mask keeps: one i32 by value. `None` means 0.
    pub shift_right: Option<TensorId>,
    /// The number of columns up to the diagonal that a left mask keeps: one i32 or f32 by value.
    pub left: Option<TensorId>,
    /// Query length, by value or (b, 1, 1, 1). With both lengths, the band is bottom-right aligned.
    pub seq_q: Option<TensorId>,
    /// Key length, by value or (b, 1, 1, 1). With both lengths, the band is bottom-right aligned.
    pub seq_kv: Option<TensorId>,
}

/// Gathers the pages of keys or values: `y[b, h, s, d]` (or its transpose) from
/// `container[page_table[b, 0, s / block, 0], h, s % block, d]`, where `block` is the number of tokens per page.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PagedLoad {
    /// The page pool, (pages, h, block, d), where `block` is the number of tokens per page.
    pub container: TensorId,
    /// Number of tokens of each batch entry, (b, 1, 1, 1), i32 or i64.
    pub seq_len: TensorId,
    /// Page number of each page of a batch entry, (b, 1, ⌈max / block⌉, 1), i32: `max` is the largest number of tokens of an entry, and
    /// `block` the number per page.
    pub page_table: TensorId,
    /// Result, (b, h, s, d), or (b, h, d, s) if its strides make the third axis innermost.
    pub y: TensorId,
}

/// A block quantization: `y = x / scale`, with one scale per block of neighbours along the blocked axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockScaleQuantize {
    /// The tensor that is read.
    pub x: TensorId,
    /// The quantised elements, the output.
    pub y: TensorId,
    /// The scales, one per block of elements, an output.
    pub scale: TensorId,
    /// Elements per block along the last axis.
    pub block: Vec<i32>,
    /// Element type of the arithmetic.
    pub compute: DType,
}

/// A block dequantization: `y = x · scale`, with one scale per block of neighbours along each blocked axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockScaleDequantize {
    /// The quantised elements, the input.
    pub x: TensorId,
    /// The scales, one per block of elements.
    pub scale: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// Elements per block along each blocked axis.
    pub block: Vec<i32>,
    /// Element type of the arithmetic.
    pub compute: DType,
}

/// The ops that modify the scores inside a unified attention op. They share the tensors of the outer graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreGraph {
    /// The scaled score, virtual f32 (b, h_q, s_q, s_kv).
    pub input: TensorId,
    /// The modified score, which the softmax reads.
    pub output: TensorId,
    /// The ops that compute `output` from `input`, in topological order.
    pub ops: Vec<Op>,
}

/// Dropout of a unified attention op (from cuDNN 9.21 on).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The probability that an element of P is dropped, in [0, 1).
    #[serde(with = "super::float::f32")]
    pub probability: f32,
    /// Seed of the random numbers: one i64.
    pub seed: TensorId,
    /// Number of random numbers to skip: one i64.
    pub offset: TensorId,
    /// The tensor that receives the random numbers, for tests; `None` if they are not an output.
    pub rng_dump: Option<TensorId>,
}

/// Scales and amax values of attention over 8-bit floats (from cuDNN 9.25 on).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fp8Scales {
    /// Descale of `q`: one f32.
    pub descale_q: TensorId,
    /// Descale of `k`: one f32.
    pub descale_k: TensorId,
    /// Descale of `v`: one f32.
    pub descale_v: TensorId,
    /// Descale of P: one f32.
    pub descale_s: TensorId,
    /// Scale of P before it is rounded: one f32.
    pub scale_s: TensorId,
    /// Scale of the output before it is rounded: one f32.
    pub scale_o: TensorId,
    /// The largest magnitude of P, an output: one f32.
    pub amax_s: TensorId,
    /// The largest magnitude of the attention output, an output: one f32.
    pub amax_o: TensorId,
}

/// Attention in one op: `o = softmax(score(q·kᵀ · scale)) · v`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SdpaForward {
    /// Queries, (b, h_q, s_q, d_qk).
    pub q: TensorId,
    /// Keys, (b, h_k, s_kv, d_qk), or the pool of a paged cache.
    pub k: TensorId,
    /// Values, (b, h_v, s_kv, d_v), or the pool of a paged cache.
    pub v: TensorId,
    /// Output, (b, h_q, s_q, d_v).
    pub o: TensorId,
    /// Factor of the scores: one f32. `None` means 1.
    pub attn_scale: Option<TensorId>,
    /// Ops on the scaled score (from cuDNN 9.21 on).
    pub score: Option<ScoreGraph>,
    /// Natural logarithm of each row's sum of exponentials, f32 (b, h_q, s_q, 1).
    pub stats: Option<TensorId>,
    /// Row maximum, f32 (b, h_q, s_q, 1) (from cuDNN 9.21 on).
    pub max: Option<TensorId>,
    /// Row sum of exponentials, f32 (b, h_q, s_q, 1) (from cuDNN 9.21 on).
    pub sum_exp: Option<TensorId>,
    /// An extra score per head that has no value: f32 (1, h_q, 1, 1) (from cuDNN 9.21 on).
    pub sink: Option<TensorId>,
    /// Block mask with one bit per 128 × 128 tile of scores, u8 (b, h_q, ⌈s_q/128⌉, ⌈⌈s_kv/128⌉/8⌉) (from cuDNN 9.14 on).
    pub block_mask: Option<TensorId>,
    /// Page table of `k`, (b, 1, pages, 1), i32 (from cuDNN 9.15 on).
    pub page_table_k: Option<TensorId>,
    /// Page table of `v`, (b, 1, pages, 1), i32 (from cuDNN 9.15 on).
    pub page_table_v: Option<TensorId>,
    /// Query lengths, (b, 1, 1, 1) (from cuDNN 9.15 on).
    pub seq_len_q: Option<TensorId>,
    /// Key lengths, (b, 1, 1, 1) (from cuDNN 9.15 on).
    pub seq_len_kv: Option<TensorId>,
    /// Prefix sums of query lengths, (b + 1, 1, 1, 1) (from cuDNN 9.24 on).
    pub cu_seq_len_q: Option<TensorId>,
    /// Prefix sums of key lengths, (b + 1, 1, 1, 1) (from cuDNN 9.24 on).
    pub cu_seq_len_kv: Option<TensorId>,
    /// Dropout of P (from cuDNN 9.21 on).
    pub dropout: Option<Dropout>,
    /// Scales of attention over 8-bit floats (from cuDNN 9.25 on).
    pub fp8: Option<Fp8Scales>,
}

impl SdpaForward {
    /// Creates an attention op without optional operands.
    pub fn plain(q: TensorId, k: TensorId, v: TensorId, o: TensorId) -> SdpaForward {
        SdpaForward {
            q,
            k,
            v,
            o,
            attn_scale: None,
            score: None,
            stats: None,
            max: None,
            sum_exp: None,
            sink: None,
            block_mask: None,
            page_table_k: None,
            page_table_v: None,
            seq_len_q: None,
            seq_len_kv: None,
            cu_seq_len_q: None,
            cu_seq_len_kv: None,
            dropout: None,
            fp8: None,
        }
    }
}

/// The gradients of [`SdpaForward`], computed in one op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SdpaBackward {
    /// Queries, (b, h_q, s_q, d_qk).
    pub q: TensorId,
    /// Keys, (b, h_k, s_kv, d_qk).
    pub k: TensorId,
    /// Values, (b, h_v, s_kv, d_v).
    pub v: TensorId,
    /// Output of the forward op, (b, h_q, s_q, d_v).
    pub o: TensorId,
    /// Gradient of the output, (b, h_q, s_q, d_v).
    pub d_o: TensorId,
    /// Natural logarithm of each row's sum of exponentials, f32 (b, h_q, s_q, 1).
    pub stats: TensorId,
    /// Factor of the scores: one f32. `None` means 1.
    pub attn_scale: Option<TensorId>,
    /// Gradient of `q`, (b, h_q, s_q, d_qk).
    pub dq: TensorId,
    /// Gradient of `k`, (b, h_k, s_kv, d_qk).
    pub dk: TensorId,
    /// Gradient of `v`, (b, h_v, s_kv, d_v).
    pub dv: TensorId,
    /// Query lengths, i32, (b, 1, 1, 1).
    pub seq_len_q: Option<TensorId>,
    /// Key lengths, i32, (b, 1, 1, 1).
    pub seq_len_kv: Option<TensorId>,
    /// The score ops of the forward pass, which cuDNN differentiates (undocumented before cuDNN 9.28).
    pub score: Option<ScoreGraph>,
}
