//! Specifications of the steps that compute.

use crate::problem::ParallelProblem;
use crate::schedule::{Attend, Pass};
use sdpa_core::{DType, Error, Placed, Placement, StatsBase};

impl ParallelProblem {
    /// Returns the part of the problem that a step computes.
    pub fn placement(&self, attend: &Attend) -> Placement {
        let (heads_q, heads_kv) = (attend.heads_q.clone(), attend.heads_kv.clone());
        Placement::of(&self.spec().attention).with_q(attend.q).with_k(attend.k).with_heads(heads_q, heads_kv)
    }

    /// Returns the specification of a step, over dense tensors. `None` if no pair of the step is attended. A partial result of the forward pass is f32, has
    /// `row_max` and `sum_exp`, and leaves the sink out: it counts once, after the merge. Gradients read `stats` as natural logarithms.
    ///
    /// # Errors
    /// Fails as [`AttentionSpec::placed`](sdpa_core::AttentionSpec::placed) does.
    ///
    /// ```
    /// use sdpa_core::{AttentionSpec, DType, Layout, Mask, Shape};
    /// use sdpa_parallel::{ParallelSpec, Pass, Sharding, Strategy};
    ///
    /// let shape = Shape { batch: 1, heads_q: 2, heads_kv: 2, seq_q: 8, seq_kv: 8, dim_qk: 8, dim_v: 8 };
    /// let attention = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal());
    /// let problem = ParallelSpec::new(attention, 2).strategy(Strategy::Ring).validate()?;
    /// for attend in problem.schedule(1, Pass::Forward).attends() {
    ///     let placed = problem.placed(Pass::Forward, attend)?.ok_or("no pair")?;
    ///     assert!(attend.partial && placed.spec.row_max && placed.spec.dtype == DType::F32);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn placed(&self, pass: Pass, attend: &Attend) -> Result<Option<Placed>, Error> {
        let Some(mut placed) = self.spec().attention.placed(&self.placement(attend))? else { return Ok(None) };
        let spec = &mut placed.spec;
        if attend.partial {
            (spec.dtype, spec.sink, spec.stats, spec.stats_base) = (DType::F32, false, false, StatsBase::Natural);
            (spec.row_max, spec.sum_exp) = (true, true);
        }
        if pass == Pass::Backward {
            spec.stats_base = StatsBase::Natural;
        }
        Ok(Some(placed))
    }
}
