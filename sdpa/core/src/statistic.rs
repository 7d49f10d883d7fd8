//! Row statistics of a forward pass.

use crate::error::SpecError;
use crate::operand::Side;
use crate::problem::Problem;
use crate::spec::{Layout, TensorSpec};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A row statistic: one f32 per query and head, which a forward pass computes in addition to the output on request.
///
/// All have one layout: (batch, heads_q, seq_q), dense, or (total, heads_q) for a packed batch.
///
/// Exhaustive: tables of statistics must have an entry for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// The log-sum-exp of the row, which the backward pass reads: `row_max + ln(sum_exp)`.
    Stats,
    /// The largest unmasked score of the row, scaled and modified. A sink counts as a score; −∞ if the row has neither a key nor a sink.
    RowMax,
    /// The row's `Σ exp(score − row_max)`. A sink counts as a score; 0 if the row has neither a key nor a sink.
    SumExp,
}

impl Statistic {
    /// Every row statistic.
    pub const ALL: [Statistic; 3] = [Statistic::Stats, Statistic::RowMax, Statistic::SumExp];

    /// Returns the name used in calls, files and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Statistic::Stats => "stats",
            Statistic::RowMax => "row_max",
            Statistic::SumExp => "sum_exp",
        }
    }

    /// Checks that a call passes a buffer for this statistic (`given`) exactly if its problem computes the statistic (`asked`). Returns
    /// the error if not, and `None` if both agree.
    pub fn unlike(self, given: bool, asked: bool) -> Option<SpecError> {
        match (given, asked) {
            (true, true) | (false, false) => None,
            (false, true) => Some(SpecError::new(self.name(), "nothing", format!("a buffer: the problem computes {self}"))),
            (true, false) => Some(SpecError::new(self.name(), "a buffer", format!("none: the problem does not compute {self}"))),
        }
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The base of the logarithms in `stats`.
///
/// Exhaustive: a new base must stop executors from compiling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StatsBase {
    /// Natural logarithms, which backward passes read.
    #[default]
    Natural,
    /// Logarithms to base two: natural ones times log2(e).
    Two,
}

impl StatsBase {
    pub(crate) fn is_natural(&self) -> bool {
        *self == StatsBase::Natural
    }
}

impl fmt::Display for StatsBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StatsBase::Natural => "natural",
            StatsBase::Two => "two",
        })
    }
}

impl Problem {
    /// Returns whether `stats` is computed, the log-sum-exp of each row: f32, (batch, heads_q, seq_q), dense, or (total, heads_q) for a
    /// packed batch.
    #[inline]
    pub fn stats(&self) -> bool {
        self.stats
    }
    /// Returns the base of the logarithms in `stats`; natural if the problem does not compute `stats`.
    #[inline]
    pub fn stats_base(&self) -> StatsBase {
        self.stats_base
    }
    /// Returns whether `row_max` is computed, with the layout of stats: the largest score of each row.
    #[inline]
    pub fn row_max(&self) -> bool {
        self.row_max
    }
    /// Returns whether `sum_exp` is computed, with the layout of stats: the sum of exponentials relative to `row_max`.
    #[inline]
    pub fn sum_exp(&self) -> bool {
        self.sum_exp
    }
    /// Returns whether a row statistic is computed.
    #[inline]
    pub fn computes(&self, statistic: Statistic) -> bool {
        match statistic {
            Statistic::Stats => self.stats,
            Statistic::RowMax => self.row_max,
            Statistic::SumExp => self.sum_exp,
        }
    }
    /// Returns the number of elements of `stats`; for a packed batch, the largest possible number.
    #[inline]
    pub fn stats_elements(&self) -> i64 {
        let rows = if self.packed().is_some() { self.total(Side::Queries) } else { self.batch() * self.seq_q() };
        rows * self.heads_q()
    }
    /// Returns the extents and strides of `stats` as a tensor (batch, heads_q, seq_q, 1).
    pub fn stats_tensor(&self) -> TensorSpec {
        let dims = [self.batch(), self.heads_q(), self.seq_q(), 1];
        TensorSpec::dense(dims, if self.packed().is_some() { Layout::Bshd } else { Layout::Bhsd })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionSpec, DType, Elements, HostForward, Packed, Param, Shape};

    fn spec() -> AttentionSpec {
        let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 3, seq_kv: 4, dim_qk: 2, dim_v: 2 };
        AttentionSpec::dense(DType::F32, shape, Layout::Bhsd)
    }

    /// Returns the fields for which a call with statistics of these lengths is refused.
    fn refused(problem: &Problem, lengths: [Option<usize>; 3], params: &[Param<'_>]) -> Vec<String> {
        let mut memory = lengths.map(|len| len.map(|len| vec![0f32; len]));
        let [stats, row_max, sum_exp] = memory.each_mut().map(Option::as_deref_mut);
        let (q, k, v) = (Elements::F32(&[0.0; 12]), Elements::F32(&[0.0; 12]), Elements::F32(&[0.0; 12]));
        let mut o = [0.0; 12];
        let call = HostForward::new(q, k, v, &mut o).statistics([stats, row_max, sum_exp]).params(params);
        call.check(problem).map_or_else(|errors| errors.0.into_iter().map(|e| e.field).collect(), |_| Vec::new())
    }

    #[test]
    fn calls_have_what_is_asked_for_and_nothing_else() {
        let problem = spec().with_row_max().validate().unwrap();
        assert!(refused(&problem, [None, Some(6), None], &[]).is_empty());
        assert_eq!(refused(&problem, [None, None, None], &[]), ["row_max"]);
        assert_eq!(refused(&problem, [Some(6), Some(5), Some(6)], &[]), ["stats", "row_max length", "sum_exp"]);
        let all = spec().with_stats().with_row_max().with_sum_exp().validate().unwrap();
        assert!(refused(&all, [Some(6); 3], &[]).is_empty());
        assert_eq!(refused(&all, [Some(6), Some(7), None], &[]), ["row_max length", "sum_exp"]);
    }

    #[test]
    fn packed_calls_have_room_for_their_tokens() {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 2, seq_q: 3, seq_kv: 3, dim_qk: 2, dim_v: 2 };
        let problem = AttentionSpec::packed(DType::F32, shape, Packed::of(3)).with_row_max().with_sum_exp().validate().unwrap();
        let params = [Param::new("cu_seqlens", &[0, 1, 3])];
        assert!(refused(&problem, [None, Some(6), Some(9)], &params).is_empty());
        assert_eq!(refused(&problem, [None, Some(5), Some(6)], &params), ["row_max length"]);
    }

    #[test]
    fn problems_differ_in_what_they_tell_of_rows() {
        let made = |spec: AttentionSpec| spec.validate().unwrap();
        let all = [
            spec(),
            spec().with_stats(),
            spec().with_row_max(),
            spec().with_sum_exp(),
            spec().with_stats_in(StatsBase::Two),
            spec().with_row_max().with_sum_exp(),
        ]
        .map(made);
        for (n, one) in all.iter().enumerate() {
            assert!(all.iter().enumerate().all(|(m, other)| (n == m) == (one == other)), "{n}");
        }
        // If no stats are requested, `stats_base` has no effect.
        let mut unasked = spec();
        unasked.stats_base = StatsBase::Two;
        assert_eq!(made(unasked), all[0]);
    }

    #[test]
    fn backward_problems_read_natural_stats_and_nothing_else() {
        let plain = spec().backward().validate().unwrap();
        assert_eq!(spec().with_row_max().with_sum_exp().backward().validate().unwrap(), plain);
        let told = spec().with_stats_in(StatsBase::Two).backward().validate().unwrap_err();
        assert_eq!(told.0.into_iter().map(|e| e.field).collect::<Vec<_>>(), ["forward.stats_base"]);
    }

    #[test]
    fn specifications_are_read_that_know_nothing_of_them() {
        let text = serde_json::to_string(&spec()).unwrap();
        assert!(!["row_max", "sum_exp", "stats_base"].iter().any(|field| text.contains(field)), "{text}");
        for spec in [spec(), spec().with_row_max().with_sum_exp().with_stats_in(StatsBase::Two)] {
            assert_eq!(serde_json::from_str::<AttentionSpec>(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
        }
    }
}
