//! Passes of problems without a batch entry, a query or a key. Their results are known without computing.
//!
//! Without batch entries or queries, `o`, row statistics and `dq` have no elements. Without keys, `o` and `dq` are zeros, as in PyTorch's
//! `scaled_dot_product_attention`, `stats` and `row_max` are −∞, and `sum_exp` is 0. With a sink, which is then the only term of the denominator,
//! `stats` and `row_max` are the sink and `sum_exp` is 1. All other gradients are zeros, including those of declared parameters.

use crate::backward::BackwardProblem;
use crate::error::{Error, Reason};
use crate::executor::{Prepared, PreparedBackward, Report};
use crate::host::{HostBackward, HostForward};
use crate::problem::Problem;
use crate::spec::{Layout, TensorSpec};
use crate::statistic::{Statistic, StatsBase};
use crate::tensor::ElementsMut;
use std::f64::consts::LOG2_E;
use std::sync::Arc;
use std::time::Instant;

/// The engine name in reports of a problem without batch entries, queries or keys. Its pass computes nothing and only fills the results.
pub const ENGINE: &str = "fill: no batch entry, query or key";

/// A pass that fills results and computes nothing.
#[derive(Debug)]
struct Empty<P>(P);

/// Returns the forward pass of a problem without batch entries, queries or keys, which only fills the results; `None` for any other
/// problem. [`Executor::prepare`](crate::Executor::prepare) tries it first, because no kernel supports an extent of 0.
///
/// ```
/// use sdpa_core::{AttentionSpec, DType, Layout, Shape, empty};
/// let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 0, dim_qk: 8, dim_v: 8 };
/// assert!(empty::forward(&AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate()?).is_some());
/// # Ok::<(), sdpa_core::SpecErrors>(())
/// ```
pub fn forward(problem: &Problem) -> Option<Arc<dyn Prepared>> {
    problem.is_empty().then(|| Arc::new(Empty(problem.clone())) as Arc<dyn Prepared>)
}

/// Returns the backward pass of a problem without batch entries, queries or keys; `None` for any other problem: see [`forward`].
pub fn backward(problem: &BackwardProblem) -> Option<Arc<dyn PreparedBackward>> {
    problem.forward().is_empty().then(|| Arc::new(Empty(problem.clone())) as Arc<dyn PreparedBackward>)
}

/// Returns why kernels do not support a problem without batch entries, queries or keys; `None` for any other problem. This is for code
/// that compiles or lowers a problem without preparing it.
pub fn unsupported(problem: &Problem) -> Option<Reason> {
    let [batch, _, seq_q, seq_kv] = problem.extents();
    problem.is_empty().then(|| Reason::Limit {
        field: "(batch, seq_q, seq_kv)".to_owned(),
        value: format!("{:?}", (batch, seq_q, seq_kv)),
        limit: "at least 1 each: an empty problem has nothing to compile; prepare it through an executor or the dispatcher, which fill its outputs"
            .to_owned(),
    })
}

/// Returns the value of a row statistic in a row without keys. `base` is the base of the logarithms in `stats`, and `sink` the row's
/// attention sink, if there is one.
pub fn row_statistic(statistic: Statistic, base: StatsBase, sink: Option<f32>) -> f32 {
    // A sink of −∞ has no effect, so the sum is 0. A sink of +∞ makes the sum NaN, as a score of +∞ does.
    let sink = f64::from(sink.unwrap_or(f32::NEG_INFINITY));
    let sum = match sink {
        f64::NEG_INFINITY => 0.0,
        sink if sink.is_finite() => 1.0,
        _ => f64::NAN,
    };
    let value = match (statistic, base) {
        (Statistic::Stats, StatsBase::Natural) => sink + sum.ln(),
        (Statistic::Stats, StatsBase::Two) => (sink + sum.ln()) * LOG2_E,
        (Statistic::RowMax, StatsBase::Natural | StatsBase::Two) => sink,
        (Statistic::SumExp, StatsBase::Natural | StatsBase::Two) => sum,
    };
    value as f32
}

fn report(started: Instant) -> Report {
    Report { compute: started.elapsed(), engine: ENGINE.to_owned(), ..Report::default() }
}

impl Prepared for Empty<Problem> {
    fn forward(&self, mut call: HostForward<'_>) -> Result<Report, Error> {
        let Empty(problem) = self;
        call.check(problem)?;
        let started = Instant::now();
        // Deliberately without `..`: a new field either changes the results of rows without keys, or is listed among those that do not.
        let Problem {
            dtype: _,
            o_dtype: _,
            block_scaled: _,
            batch: _,
            heads_q: _,
            heads_kv: _,
            seq_q,
            seq_kv: _,
            dim_qk: _,
            dim_v: _,
            tensors: [_, _, _, o],
            packed: _,
            paged: _,
            score_mod: _,
            kept: _,
            // The call of `problem.sinks` below reads this flag.
            sink: _,
            dropout: _,
            params,
            // `call.check` above accepts memory only for requested statistics, so these flags need no test.
            stats: _,
            stats_base,
            row_max: _,
            sum_exp: _,
            // Nothing is summed.
            batch_invariant: _,
        } = problem;
        let values = problem.bind(call.params)?;
        let sinks = problem.sinks(params, &values);
        call.o.zero(o);
        for which in Statistic::ALL {
            let rows = match which {
                Statistic::Stats => call.stats.as_deref_mut(),
                Statistic::RowMax => call.row_max.as_deref_mut(),
                Statistic::SumExp => call.sum_exp.as_deref_mut(),
            };
            let of_head = (*seq_q).max(1) as usize;
            for (n, rows) in rows.into_iter().flat_map(|rows| rows.chunks_mut(of_head)).enumerate() {
                let sink = sinks.and_then(|sinks| sinks.get(n % sinks.len().max(1)).copied());
                rows.fill(row_statistic(which, *stats_base, sink));
            }
        }
        call.amax.iter_mut().for_each(|amax| *amax.value = 0.0);
        Ok(report(started))
    }
}

impl PreparedBackward for Empty<BackwardProblem> {
    fn backward(&self, mut call: HostBackward<'_>) -> Result<Report, Error> {
        let Empty(problem) = self;
        call.check(problem)?;
        let started = Instant::now();
        // Deliberately without `..`, as in the forward pass.
        let BackwardProblem {
            forward: _,
            d_o: _,
            dq,
            dk,
            dv,
            gradient: _,
            wrt: _,
            params: _,
            deterministic: _,
            d_o_dtype: _,
            gradient_dtype: _,
        } = problem;
        call.dq.zero(dq);
        call.dk.zero(dk);
        call.dv.zero(dv);
        for gradient in &mut call.gradients {
            let elements = i64::try_from(gradient.data.len()).unwrap_or(i64::MAX);
            gradient.data.zero(&TensorSpec::dense([1, 1, 1, elements], Layout::Bhsd));
        }
        call.amax.iter_mut().for_each(|amax| *amax.value = 0.0);
        Ok(report(started))
    }
}

impl ElementsMut<'_> {
    /// Sets the elements of a tensor to zero and leaves gaps between its rows unchanged.
    fn zero(&mut self, tensor: &TensorSpec) {
        match self {
            ElementsMut::F32(x) => zero(x, tensor),
            ElementsMut::F16(x) => zero(x, tensor),
            ElementsMut::BF16(x) => zero(x, tensor),
            ElementsMut::F8E4M3(x) => zero(x, tensor),
            ElementsMut::F8E5M2(x) => zero(x, tensor),
        }
    }
}

fn zero<T: Copy + Default>(to: &mut [T], tensor: &TensorSpec) {
    let ([batch, heads, seq, dim], [between, head, row, _]) = (tensor.dims, tensor.strides);
    for (b, h, s) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq).map(move |s| (b, h, s)))) {
        let at = (b * between + h * head + s * row) as usize;
        to[at..at + dim as usize].fill(T::default());
    }
}
