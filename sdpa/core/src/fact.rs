//! The facts of a problem: one for each property on which a result, a plan or a cache key depends.
//!
//! [`Problem::facts`] and [`BackwardProblem::facts`] destructure their problems and leave no field out. Executors and keys `match` on [`Fact`]
//! without a wildcard arm. A new option therefore needs two changes to compile: a field without a fact stops this crate, and a fact without an arm
//! stops every executor and every key.

use crate::backward::{BackwardProblem, GradientSpec};
use crate::dropout::Dropout;
use crate::dtype::DType;
use crate::error::Reason;
use crate::expr::{Declared, Trace};
use crate::mask::{Ends, Kept, Region};
use crate::operand::{Operand, Side};
use crate::packed::Packed;
use crate::paged::Paged;
use crate::problem::Problem;
use crate::score_mod::Gradient;
use crate::spec::TensorSpec;
use crate::statistic::{Statistic, StatsBase};

/// One property of a problem. Every problem has all of these facts, also for options that are off. Problems are equal if all of their
/// facts are.
///
/// An executor has one function with one arm per variant, and returns a [`Reason`] for each property that it does not support. In short:
///
/// ```
/// use sdpa_core::fact::{Fact, reasons};
/// use sdpa_core::{AttentionSpec, DType, Layout, Reason, Shape};
///
/// // An executor has a `match` without a wildcard arm instead, so that a new variant stops it.
/// fn supports_fact(fact: &Fact<'_>) -> Result<(), Reason> {
///     if *fact != Fact::Sink(true) {
///         return Ok(());
///     }
///     let (field, value, limit) = ("sink".to_owned(), "true".to_owned(), "the kernel adds none".to_owned());
///     Err(Reason::Limit { field, value, limit })
/// }
///
/// let shape = Shape { batch: 1, heads_q: 8, heads_kv: 2, seq_q: 129, seq_kv: 257, dim_qk: 64, dim_v: 64 };
/// let dense = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
/// assert!(reasons(dense.validate()?.facts(), supports_fact).is_empty());
/// assert_eq!(reasons(dense.with_sink().validate()?.facts(), supports_fact).len(), 1);
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
///
/// The enum is deliberately not `#[non_exhaustive]`. That attribute would force a wildcard arm on executors in other crates. Such an executor would
/// compute a problem with a new option as if the option were off.
///
/// The scale of the scores, seeds and lengths are values of a call, not facts. [`Amax`](crate::Amax) and [`Fp8Scale`](crate::Fp8Scale) follow from
/// the element types.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact<'a> {
    /// Element type of `q`, `k` and `v`.
    Dtype(DType),
    /// Element type of `o`.
    OutputDtype(DType),
    /// Whether `q`, `k` and `v` have a block scale for each 32 elements.
    BlockScaled(bool),
    /// Number of batch entries.
    Batch(i64),
    /// Number of query heads.
    HeadsQ(i64),
    /// Number of key and value heads.
    HeadsKv(i64),
    /// Queries per head.
    SeqQ(i64),
    /// Keys per head.
    SeqKv(i64),
    /// Elements of a query and of a key.
    DimQk(i64),
    /// Elements of a value and of an output row.
    DimV(i64),
    /// Strides of an operand, in elements. The extents of the operand are separate facts.
    Strides(Operand, [i64; 4]),
    /// Alignment of the base address of an operand, in bytes.
    Alignment(Operand, u32),
    /// Whether batch entries are packed sequences. Queries then always are, keys unless they are paged.
    Packed(bool),
    /// True if keys have different `cu_seqlens` than queries.
    CrossPacked(bool),
    /// Whether `cu_seqlens` are i64, not i32.
    WideBoundaries(bool),
    /// The largest number of query or key tokens in a packed call, over all sequences; `None` if the problem does not state it.
    MostTokens(Side, Option<i64>),
    /// Whether each query head has an attention sink.
    Sink(bool),
    /// Dropout of the attention probabilities P; `None` without dropout.
    Dropout(Option<Dropout>),
    /// Number of pages in the page pool; `None` if keys and values are not paged.
    Pages(Option<i64>),
    /// Number of tokens per page; `None` if keys and values are not paged.
    PageSize(Option<i64>),
    /// The trace of all score_mods; `None` without score_mods.
    ScoreMod(Option<&'a Trace>),
    /// The bounds `(lower, upper)` of the mask's band, `lower < k − q ≤ upper`; `None` for a direction without a bound.
    Band(Option<i64>, Option<i64>),
    /// The number of first keys to which every query attends, in addition to the band.
    Prefix(Option<i64>),
    /// The bounds `(lower, upper)` of a band around the diagonal through the last query and key of each batch entry:
    /// `lower < (k − q) − (len_kv − len_q) ≤ upper`. `None` for a direction without a bound.
    Ends(Option<i64>, Option<i64>),
    /// Whether each batch entry has a length on this side, queries or keys.
    Lengths(Side, bool),
    /// The part of the mask that is neither a band nor a length, as a trace that is true where the query attends to the key; `None` if
    /// there is no such part.
    Keep(Option<&'a Trace>),
    /// Every declared parameter of the problem: scalars and tensors of score_mods, masks and options.
    Parameters(&'a [Declared]),
    /// Whether the problem computes this row statistic.
    Statistic(Statistic, bool),
    /// The base of the logarithms in `stats`.
    StatsBase(StatsBase),
    /// Whether the bits of a sequence's results depend on this sequence alone.
    BatchInvariant(bool),
    /// Element type of `d_o` in a backward problem.
    UpstreamDtype(DType),
    /// Element type of `dq`, `dk` and `dv` in a backward problem.
    GradientDtype(DType),
    /// The score_mods and their derivative in a backward problem; `None` without score_mods.
    Gradient(Option<&'a Gradient>),
    /// The declared parameters whose gradients a backward problem computes.
    GradientsOf(&'a [GradientSpec]),
    /// Every declared parameter of a backward problem: those of the forward pass, and those of gradients and scales of this pass.
    BackwardParameters(&'a [Declared]),
    /// Whether a backward problem requires bitwise equal results on every run.
    Deterministic(bool),
}

/// Collects the reasons why an executor does not support some of the facts of a problem, in the order of the facts. `supports_fact`
/// returns the reason against one fact.
pub fn reasons<'a>(facts: impl Iterator<Item = Fact<'a>>, supports_fact: impl Fn(&Fact<'a>) -> Result<(), Reason>) -> Vec<Reason> {
    facts.filter_map(|fact| supports_fact(&fact).err()).collect()
}

/// Returns the facts of one operand.
fn of_operand<'a>(operand: Operand, tensor: &TensorSpec) -> [Fact<'a>; 2] {
    // The extents are no facts here: validation ties them to the extents of the problem.
    let TensorSpec { dims: _, strides, alignment } = *tensor;
    [Fact::Strides(operand, strides), Fact::Alignment(operand, alignment)]
}

impl Problem {
    /// Iterates over every fact of the problem, each once and always in the same order.
    pub fn facts(&self) -> impl Iterator<Item = Fact<'_>> {
        // Deliberately without `..`: a new field must become a fact here, or be shown to follow from others.
        let Problem {
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
            tensors: [q, k, v, o],
            packed,
            paged,
            score_mod,
            kept,
            sink,
            dropout,
            params,
            stats,
            stats_base,
            row_max,
            sum_exp,
            batch_invariant,
        } = self;
        let Kept { region, ends, seq_len_q, seq_len_kv, rest } = kept;
        let (Region { lower, upper, prefix }, Ends { lower: ends_lower, upper: ends_upper }) = (region, ends);
        let Packed { cross, wide, total_q, total_kv } = packed.unwrap_or_default();
        let (page_size, pages) = paged.map(|Paged { page_size, pages }| (page_size, pages)).unzip();
        let extents = [
            Fact::Dtype(*dtype),
            Fact::OutputDtype(o_dtype.unwrap_or(*dtype)),
            Fact::BlockScaled(*block_scaled),
            Fact::Batch(*batch),
            Fact::HeadsQ(*heads_q),
            Fact::HeadsKv(*heads_kv),
            Fact::SeqQ(*seq_q),
            Fact::SeqKv(*seq_kv),
            Fact::DimQk(*dim_qk),
            Fact::DimV(*dim_v),
        ];
        let options = [
            Fact::Packed(packed.is_some()),
            Fact::CrossPacked(cross),
            Fact::WideBoundaries(wide),
            Fact::MostTokens(Side::Queries, total_q),
            Fact::MostTokens(Side::Keys, total_kv),
            Fact::Sink(*sink),
            Fact::Dropout(*dropout),
            Fact::Pages(pages),
            Fact::PageSize(page_size),
            Fact::ScoreMod(score_mod.as_deref()),
            Fact::Band(*lower, *upper),
            Fact::Prefix(*prefix),
            Fact::Ends(*ends_lower, *ends_upper),
            Fact::Lengths(Side::Queries, *seq_len_q),
            Fact::Lengths(Side::Keys, *seq_len_kv),
            Fact::Keep(rest.as_deref()),
            Fact::Parameters(params),
            Fact::Statistic(Statistic::Stats, *stats),
            Fact::Statistic(Statistic::RowMax, *row_max),
            Fact::Statistic(Statistic::SumExp, *sum_exp),
            Fact::StatsBase(*stats_base),
            Fact::BatchInvariant(*batch_invariant),
        ];
        let operands = Operand::FORWARD.into_iter().zip([q, k, v, o]).flat_map(|(operand, tensor)| of_operand(operand, tensor));
        extents.into_iter().chain(operands).chain(options)
    }
}

impl BackwardProblem {
    /// Iterates over every fact of the problem, each once and always in the same order: the facts of the forward problem first.
    pub fn facts(&self) -> impl Iterator<Item = Fact<'_>> {
        // Deliberately without `..`: see `Problem::facts`.
        let BackwardProblem { forward, d_o, dq, dk, dv, gradient, wrt, params, deterministic, d_o_dtype, gradient_dtype } = self;
        let operands = [(Operand::DO, d_o), (Operand::DQ, dq), (Operand::DK, dk), (Operand::DV, dv)];
        let options = [
            Fact::UpstreamDtype(d_o_dtype.unwrap_or(forward.dtype())),
            Fact::GradientDtype(gradient_dtype.unwrap_or(forward.dtype())),
            Fact::Gradient(gradient.as_deref()),
            Fact::GradientsOf(wrt),
            Fact::BackwardParameters(params),
            Fact::Deterministic(*deterministic),
        ];
        let operands = operands.into_iter().flat_map(|(operand, tensor)| of_operand(operand, tensor));
        forward.facts().chain(operands).chain(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, BackwardSpec, Layout, Mask, Shape};

    fn dense() -> AttentionSpec {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 40, dim_qk: 64, dim_v: 64 };
        AttentionSpec::dense(DType::BF16, shape, Layout::Bshd)
    }

    fn narrow() -> AttentionSpec {
        dense().with_dtype(DType::F8E4M3)
    }

    fn forward() -> Vec<AttentionSpec> {
        let masked = |text: &str| dense().mask(text.parse().unwrap());
        let packed = |packed: Packed| dense().with_packed(packed);
        let in_pages = |page_size: i64, pages: i64| {
            let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 40, seq_kv: 40, dim_qk: 64, dim_v: 64 };
            AttentionSpec::paged(DType::BF16, shape, Paged::new(page_size, pages))
        };
        let mut aligned = dense();
        aligned.v.alignment = 2;
        let mut apart = dense();
        apart.o.strides[0] += 64;
        vec![
            dense(),
            dense().with_dtype(DType::F16),
            narrow(),
            narrow().with_output_in(DType::BF16),
            narrow().with_block_scales(),
            aligned,
            apart,
            packed(Packed::new()),
            packed(Packed::new().with_cross(true)),
            packed(Packed::new().with_wide(true)),
            packed(Packed::new().with_cross(true).with_totals(Some(50), None)),
            packed(Packed::new().with_cross(true).with_totals(None, Some(50))),
            in_pages(8, 30),
            in_pages(8, 31),
            in_pages(16, 30),
            in_pages(8, 30).with_packed_queries(70),
            dense().with_sink(),
            dense().with_dropout(0.5),
            dense().with_dropout(0.25),
            dense().score_mod("softcap:30".parse().unwrap()),
            dense().score_mod("alibi".parse().unwrap()),
            masked("causal"),
            masked("prefix-lm:7"),
            masked("padding"),
            masked("padding & causal-ends"),
            masked("document"),
            masked("tensor seq_len_kv[batch]: i32; k < seq_len_kv"),
            dense().with_stats(),
            dense().with_stats_in(StatsBase::Two),
            dense().with_row_max(),
            dense().with_sum_exp(),
            dense().batch_invariant(),
        ]
    }

    #[test]
    fn problems_are_equal_where_their_facts_are() {
        let problems: Vec<Problem> = forward().iter().map(|spec| spec.validate().unwrap()).collect();
        for (n, one) in problems.iter().enumerate() {
            for (m, other) in problems.iter().enumerate() {
                assert_eq!((n == m, one.facts().eq(other.facts())), (one == other, one == other), "{n} and {m}");
            }
        }
    }

    #[test]
    fn backward_problems_are_equal_where_their_facts_are() {
        let biased = || dense().score_mod("bias:hqk".parse().unwrap()).with_sink();
        let mut strided = dense().backward();
        strided.d_o.strides = [0; 4];
        let mut aligned = dense().backward();
        aligned.dk.alignment = 2;
        let specs: Vec<BackwardSpec> = vec![
            dense().backward(),
            dense().mask(Mask::causal()).backward(),
            dense().backward().deterministic(),
            strided,
            aligned,
            biased().backward(),
            biased().backward().wrt("bias", DType::F32),
            biased().backward().wrt("bias", DType::BF16),
            biased().backward().wrt("sink", DType::F32),
            narrow().backward(),
            narrow().backward().with_upstream_in(DType::F8E5M2),
            narrow().backward().with_gradients_in(DType::BF16),
        ];
        let problems: Vec<BackwardProblem> = specs.iter().map(|spec| spec.validate().unwrap()).collect();
        for (n, one) in problems.iter().enumerate() {
            for (m, other) in problems.iter().enumerate() {
                assert_eq!((n == m, one.facts().eq(other.facts())), (one == other, one == other), "{n} and {m}");
            }
        }
    }

    #[test]
    fn each_fact_is_there_once() {
        let problem = dense().backward().validate().unwrap();
        let facts: Vec<Fact<'_>> = problem.facts().collect();
        // Returns the variant of a fact with its operand, side or statistic, but without the value.
        let of = |fact: &Fact<'_>| format!("{fact:?}").split(['[', ',', '{']).next().unwrap_or_default().to_owned();
        for (n, fact) in facts.iter().enumerate() {
            assert!(facts[..n].iter().all(|before| of(before) != of(fact)), "{fact:?}");
        }
    }
}
