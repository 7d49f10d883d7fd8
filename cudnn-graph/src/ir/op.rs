//! The ops of a graph. Operands are fields, so a missing one does not compile.

use super::pointwise::{Mode, Params};
use super::tensor::TensorId;
use super::ty::DType;
use serde::{Deserialize, Serialize};

/// One op. Different ops with the same result are different to cuDNN: engines match exact ops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub enum Op {
    /// `y = f(x, b, t)`, element by element.
    Pointwise(Pointwise),
    /// `c = a · b`.
    Matmul(Matmul),
    /// Reduces axes of `x` to their extents in `y`.
    Reduction(Reduction),
    /// The elements of `x` with other extents or strides.
    Reshape(Reshape),
    /// The axes of `x` in another order (9.22).
    Transpose(Transpose),
    /// Part of `x` (9.22).
    Slice(Slice),
    /// Random numbers.
    Rng(Rng),
    /// Softmax over the last axis (9.20).
    Softmax(Softmax),
    /// Masks out scores on one side of a diagonal (9.20).
    BandMask(BandMask),
    /// Gathers the pages of a key or value cache (9.4).
    PagedLoad(PagedLoad),
    /// Quantizes elements with a scale per block (9.7).
    BlockScaleQuantize(BlockScaleQuantize),
    /// Dequantizes elements by the scale of their block (9.7).
    BlockScaleDequantize(BlockScaleDequantize),
    /// Attention in one op, the unified form (9.13).
    SdpaForward(Box<SdpaForward>),
    /// The gradient of attention in one op (9.17).
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
            Op::Pointwise(_)
            | Op::Reduction(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Slice(_)
            | Op::Rng(_)
            | Op::Softmax(_)
            | Op::BlockScaleQuantize(_)
            | Op::BlockScaleDequantize(_) => Vec::new(),
        };
        all.into_iter().flatten().collect()
    }
}

/// `y = f(x, b, t)`, broadcasting axes of extent 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pointwise {
    /// The function that is applied.
    pub mode: Mode,
    /// First operand; the forward input of backward modes.
    pub x: TensorId,
    /// Second operand.
    pub b: Option<TensorId>,
    /// The condition of a select.
    pub t: Option<TensorId>,
    /// The incoming gradient of backward modes.
    pub dy: Option<TensorId>,
    /// Result; the outgoing gradient of backward modes.
    pub y: TensorId,
    /// Compute type.
    pub compute: DType,
    /// Constants of the mode.
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
    /// Valid rows per batch entry.
    pub m_override: Option<TensorId>,
    /// Valid columns per batch entry.
    pub n_override: Option<TensorId>,
    /// Valid inner elements per batch entry.
    pub k_override: Option<TensorId>,
    /// The value of invalid rows and columns.
    #[serde(default, with = "super::float::optional")]
    pub padding: Option<f64>,
    /// Type of the accumulation.
    pub compute: DType,
}

/// The operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReductionMode {
    /// Sum.
    Add,
    /// Product.
    Mul,
    /// Smallest.
    Min,
    /// Largest.
    Max,
    /// Largest magnitude.
    Amax,
    /// Mean.
    Avg,
    /// Sum of magnitudes.
    Norm1,
    /// Root of the sum of squares.
    Norm2,
    /// Product of all that are not zero.
    MulNoZeros,
}

impl ReductionMode {
    /// Every mode.
    pub const ALL: [ReductionMode; 9] = [
        ReductionMode::Add,
        ReductionMode::Mul,
        ReductionMode::Min,
        ReductionMode::Max,
        ReductionMode::Amax,
        ReductionMode::Avg,
        ReductionMode::Norm1,
        ReductionMode::Norm2,
        ReductionMode::MulNoZeros,
    ];

    /// Returns the name in printed graphs.
    pub fn name(self) -> &'static str {
        match self {
            ReductionMode::Add => "add",
            ReductionMode::Mul => "mul",
            ReductionMode::Min => "min",
            ReductionMode::Max => "max",
            ReductionMode::Amax => "amax",
            ReductionMode::Avg => "avg",
            ReductionMode::Norm1 => "norm1",
            ReductionMode::Norm2 => "norm2",
            ReductionMode::MulNoZeros => "mul_no_zeros",
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
    /// Type of the accumulation.
    pub compute: DType,
    /// Whether to require deterministic results (9.11).
    pub deterministic: bool,
}

/// How a reshape reads its input (9.22; older runtimes support only the view).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReshapeMode {
    /// Reads the same memory with other extents and strides: element `n` of memory is unchanged.
    ViewOnly,
    /// Reads the elements in row-major order of the extents.
    Logical,
}

/// The elements of `x` with other extents or strides. Without a mode, a view.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// The order in which elements are read. `None`: a view, the only mode before 9.22.
    pub mode: Option<ReshapeMode>,
}

/// `y` whose axis `i` is axis `permutation[i]` of `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transpose {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// For each axis of `y`, the axis of `x`.
    pub permutation: Vec<i64>,
}

/// `x[start..limit]` with a step, per axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    /// The tensor that is read.
    pub x: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// First index of each axis.
    pub start: Vec<i64>,
    /// One past the last index of each axis.
    pub limit: Vec<i64>,
    /// Step along each axis.
    pub step: Vec<i64>,
}

/// A distribution of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// 1 with this probability, else 0.
    Bernoulli(#[serde(with = "super::float::f64")] f64),
    /// Uniform between the first and the second.
    Uniform(#[serde(with = "super::float::f64")] f64, #[serde(with = "super::float::f64")] f64),
    /// Normal, with this mean and standard deviation.
    Normal(#[serde(with = "super::float::f64")] f64, #[serde(with = "super::float::f64")] f64),
}

/// The seed of an [`Rng`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seed {
    /// A seed that is compiled into the kernel.
    Value(i64),
    /// One i64 in device or host memory.
    Tensor(TensorId),
}

/// Random numbers. Their bits are specific to the library: [`crate::ir::interp`] receives them from the caller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rng {
    /// The tensor that is written.
    pub y: TensorId,
    /// The distribution.
    pub distribution: Distribution,
    /// The source of the seed.
    pub seed: Seed,
    /// The first position in the stream: one i64.
    pub offset: Option<TensorId>,
}

/// Softmax over the last axis: `y = exp(x − max) / sum_exp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Softmax {
    /// Scores, (…, seq_q, seq_kv).
    pub x: TensorId,
    /// Probabilities; zeros in a row whose scores are all −∞.
    pub y: TensorId,
    /// `max + ln(sum_exp)`, f32, last axis 1.
    pub stats: Option<TensorId>,
    /// Row maximum, f32.
    pub max: Option<TensorId>,
    /// Row sum of exponentials, f32.
    pub sum_exp: Option<TensorId>,
    /// An extra score per head that takes probability and has no value, f32 (1, h, 1, 1).
    pub sink: Option<TensorId>,
    /// Whether stats are in base 2 (9.27).
    pub stats_log2: bool,
}

/// The side of the diagonal that a band mask keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BandSide {
    /// Keeps `row + shift + align ≥ col`.
    Right,
    /// Keeps `col + left − align > row`. If lengths are fixed, the bound includes the alignment.
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
    /// The side that is masked out.
    pub side: BandSide,
    /// By-value i32: the number of columns right of the diagonal that a right mask keeps. Absent: 0.
    pub shift_right: Option<TensorId>,
    /// By-value i32 or f32: the number of columns up to the diagonal that a left mask keeps.
    pub left: Option<TensorId>,
    /// Query length, by value or (b, 1, 1, 1). Aligns the band to the bottom right.
    pub seq_q: Option<TensorId>,
    /// Key length, by value or (b, 1, 1, 1).
    pub seq_kv: Option<TensorId>,
}

/// Gathers pages: `y[b, h, s, d]` (or its transpose) from `container[page_table[b, 0, s / block, 0], h, s % block, d]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PagedLoad {
    /// The page pool, (blocks, h, block, d).
    pub container: TensorId,
    /// Lengths, (b, 1, 1, 1), i32 or i64.
    pub seq_len: TensorId,
    /// Page numbers, (b, 1, ⌈max / block⌉, 1), i32.
    pub page_table: TensorId,
    /// Result, (b, h, s, d), or (b, h, d, s) if its strides make the third axis innermost.
    pub y: TensorId,
}

/// `y = x / scale` with one scale per block of neighbours along the blocked axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockScaleQuantize {
    /// The tensor that is read.
    pub x: TensorId,
    /// The quantised elements, the output.
    pub y: TensorId,
    /// One scale per block, an output.
    pub scale: TensorId,
    /// Elements per block along the last axis.
    pub block: Vec<i32>,
    /// Compute type.
    pub compute: DType,
}

/// `y = x · scale`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockScaleDequantize {
    /// The quantised elements, the input.
    pub x: TensorId,
    /// One scale per block.
    pub scale: TensorId,
    /// The tensor that is written.
    pub y: TensorId,
    /// Elements per block along each blocked axis.
    pub block: Vec<i32>,
    /// Compute type.
    pub compute: DType,
}

/// Ops on a score inside a unified attention op. They share the tensors of the outer graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoreGraph {
    /// The scaled score, virtual f32 (b, h_q, s_q, s_kv).
    pub input: TensorId,
    /// The modified score, which the softmax reads.
    pub output: TensorId,
    /// The ops, in topological order.
    pub ops: Vec<Op>,
}

/// Dropout of a unified attention op (9.21).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The probability that an element of P is dropped, in [0, 1).
    #[serde(with = "super::float::f32")]
    pub probability: f32,
    /// Seed of the random numbers: one i64.
    pub seed: TensorId,
    /// Number of random numbers to skip: one i64.
    pub offset: TensorId,
    /// The random numbers, an output, for tests.
    pub rng_dump: Option<TensorId>,
}

/// Scales of 8-bit attention (9.25).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fp8Scales {
    /// Descale of `q`: one f32.
    pub descale_q: TensorId,
    /// Descale of `k`: one f32.
    pub descale_k: TensorId,
    /// Descale of `v`: one f32.
    pub descale_v: TensorId,
    /// Descale of P.
    pub descale_s: TensorId,
    /// Scale of P before it is rounded.
    pub scale_s: TensorId,
    /// Scale of the output before it is rounded.
    pub scale_o: TensorId,
    /// Amax of P, an output.
    pub amax_s: TensorId,
    /// Amax of the output, an output.
    pub amax_o: TensorId,
}

/// `o = softmax(score(q·kᵀ · scale)) · v` in one op.
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
    /// Factor of the scores: one f32; absent: 1.
    pub attn_scale: Option<TensorId>,
    /// Ops on the scaled score (9.21).
    pub score: Option<ScoreGraph>,
    /// Natural-log sum of exponentials, f32 (b, h_q, s_q, 1).
    pub stats: Option<TensorId>,
    /// Row maximum, f32 (b, h_q, s_q, 1) (9.21).
    pub max: Option<TensorId>,
    /// Row sum of exponentials, f32 (b, h_q, s_q, 1) (9.21).
    pub sum_exp: Option<TensorId>,
    /// An extra score per head that has no value: f32 (1, h_q, 1, 1) (9.21).
    pub sink: Option<TensorId>,
    /// One bit per 128 × 128 tile, u8 (b, h_q, ⌈s_q/128⌉, ⌈⌈s_kv/128⌉/8⌉) (9.14).
    pub block_mask: Option<TensorId>,
    /// Page table of `k`, (b, 1, pages, 1), i32 (9.15).
    pub page_table_k: Option<TensorId>,
    /// Page table of `v`, (b, 1, pages, 1), i32 (9.15).
    pub page_table_v: Option<TensorId>,
    /// Query lengths, (b, 1, 1, 1) (9.15).
    pub seq_len_q: Option<TensorId>,
    /// Key lengths, (b, 1, 1, 1) (9.15).
    pub seq_len_kv: Option<TensorId>,
    /// Prefix sums of query lengths, (b + 1, 1, 1, 1) (9.24).
    pub cu_seq_len_q: Option<TensorId>,
    /// Prefix sums of key lengths, (b + 1, 1, 1, 1) (9.24).
    pub cu_seq_len_kv: Option<TensorId>,
    /// Dropout of P (9.21).
    pub dropout: Option<Dropout>,
    /// Scales of attention over 8-bit floats (9.25).
    pub fp8: Option<Fp8Scales>,
}

impl SdpaForward {
    /// Creates plain attention, without optional operands.
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

/// Gradients of [`SdpaForward`] in one op.
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
    /// Gradient of the output.
    pub d_o: TensorId,
    /// Natural-log sum of exponentials, f32 (b, h_q, s_q, 1).
    pub stats: TensorId,
    /// Factor of the scores: one f32; absent: 1.
    pub attn_scale: Option<TensorId>,
    /// Gradient of `q`.
    pub dq: TensorId,
    /// Gradient of `k`.
    pub dk: TensorId,
    /// Gradient of `v`.
    pub dv: TensorId,
    /// Lengths of the queries, i32, (batch, 1, 1, 1).
    pub seq_len_q: Option<TensorId>,
    /// Lengths of the keys, i32, (batch, 1, 1, 1).
    pub seq_len_kv: Option<TensorId>,
    /// The forward score ops, which the library differentiates (unpublished before 9.28).
    pub score: Option<ScoreGraph>,
}
