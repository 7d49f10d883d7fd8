//! One attention over slices in one call: prepares and computes.

use crate::{Choice, Dispatcher, Preference};
use sdpa_core::{
    BackwardProblem, Elements, ElementsMut, Error, ExecutorName, HostAmax, HostBackward, HostForward, HostGradient, Param, Problem, Report,
    Unproven, Unsupported,
};
use std::sync::{Arc, OnceLock};

/// The dispatcher of every [`attention`] call without one of its own.
static SHARED: OnceLock<Dispatcher> = OnceLock::new();

mod sealed {
    pub trait Sealed {}
    impl Sealed for sdpa_core::Problem {}
    impl Sealed for sdpa_core::BackwardProblem {}
}

/// A validated pass that [`attention`] computes: [`Problem`] or [`BackwardProblem`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a validated problem",
    label = "expected a `Problem` or a `BackwardProblem`",
    note = "`spec.validate()?` turns an `AttentionSpec` into a `Problem`; `spec.backward().validate()?` makes the `BackwardProblem`"
)]
pub trait Pass: sealed::Sealed {}

impl Pass for Problem {}
impl Pass for BackwardProblem {}

/// Starts a call that prepares a problem and computes it over slices: [`AttentionCall::forward`] of a [`Problem`], [`AttentionCall::backward`] of a
/// [`BackwardProblem`].
///
/// Every call prepares the pass through the plan cache of its dispatcher, one per process unless [`AttentionCall::with`] gives another. A hit costs a
/// hash of the problem and a lookup. A loop should keep the prepared pass instead: [`Dispatcher::prepare`].
///
/// # Examples
///
/// ```
/// use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
///
/// let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 5, seq_kv: 5, dim_qk: 8, dim_v: 8 };
/// let spec = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).mask(Mask::causal()).with_stats();
/// let (q, k, v) = (vec![0.5f32; 4 * 5 * 8], vec![0.25f32; 2 * 5 * 8], vec![2.0f32; 2 * 5 * 8]);
///
/// let (mut o, mut stats) = (vec![0f32; q.len()], vec![0f32; 4 * 5]);
/// let ran = sdpa::attention(&spec.validate()?).stats(&mut stats).forward(&q, &k, &v, &mut o)?;
/// println!("forward on {}", ran.executor);
/// assert!(o.iter().all(|x| (x - 2.0).abs() < 1e-6));
///
/// let (d_o, mut dq, mut dk, mut dv) = (vec![1f32; o.len()], q.clone(), k.clone(), v.clone());
/// let problem = spec.backward().validate()?;
/// sdpa::attention(&problem).backward((&q, &k, &v), (&o, &stats), &d_o, (&mut dq, &mut dk, &mut dv))?;
/// assert!(dq.iter().all(|x| x.abs() < 1e-5)); // all values are equal, so no score matters
/// # Ok::<(), sdpa::Error>(())
/// ```
pub fn attention<P: Pass>(problem: &P) -> AttentionCall<'_, P> {
    AttentionCall {
        problem,
        dispatcher: None,
        preference: Preference::Auto,
        statistics: [None, None, None],
        attn_scale: None,
        params: &[],
        gradients: Vec::new(),
        amax: Vec::new(),
    }
}

/// A call of [`attention`] under construction.
#[derive(Debug)]
#[must_use = "nothing is computed before `forward` or `backward`"]
pub struct AttentionCall<'a, P> {
    problem: &'a P,
    dispatcher: Option<&'a Dispatcher>,
    preference: Preference,
    statistics: [Option<&'a mut [f32]>; 3],
    attn_scale: Option<f32>,
    params: &'a [Param<'a>],
    gradients: Vec<HostGradient<'a>>,
    amax: Vec<HostAmax<'a>>,
}

/// The report of a call of [`attention`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Execution {
    /// The executor that computed the pass.
    pub executor: ExecutorName,
    /// Executors that were tried before and refused the problem, with their reasons.
    pub unsupported: Vec<Unsupported>,
    /// The features of the problem that the executor's ledger, a record of tested features, does not cover: see [`Choice::unproven`].
    pub unproven: Option<Arc<Unproven>>,
    /// The report of the executor: time, engine, copies and workspace.
    pub report: Report,
}

impl Execution {
    fn of<P: ?Sized>(choice: Choice<P>, run: impl FnOnce(&P) -> Result<Report, Error>) -> Result<Execution, Error> {
        let Choice { executor, prepared, unsupported, unproven } = choice;
        Ok(Execution { executor, unsupported, unproven, report: run(&prepared)? })
    }
}

impl<'a, P> AttentionCall<'a, P> {
    /// Sets the dispatcher that selects the executor and keeps the plans, instead of the process's own.
    pub fn with(mut self, dispatcher: &'a Dispatcher) -> Self {
        self.dispatcher = Some(dispatcher);
        self
    }

    /// Sets the executor that must run the problem: a name, or a [`Preference`].
    ///
    /// ```
    /// use sdpa::{AttentionSpec, DType, ExecutorName, Layout, Shape};
    /// let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 2, seq_kv: 2, dim_qk: 8, dim_v: 8 };
    /// let problem = AttentionSpec::dense(DType::F32, shape, Layout::Bhsd).validate()?;
    /// let (x, mut o) = (vec![1f32; 16], vec![0f32; 16]);
    /// let ran = sdpa::attention(&problem).on(ExecutorName::CPU).forward(&x, &x, &x, &mut o)?;
    /// assert_eq!(ran.executor, ExecutorName::CPU);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    pub fn on(mut self, preference: impl Into<Preference>) -> Self {
        self.preference = preference.into();
        self
    }

    /// Sets the factor of the scores; `None` for `1 / √dim_qk`.
    pub fn attn_scale(mut self, attn_scale: impl Into<Option<f32>>) -> Self {
        self.attn_scale = attn_scale.into();
        self
    }

    /// Sets the values of declared parameters. A scalar that is not named keeps its default.
    pub fn params(mut self, params: &'a [Param<'a>]) -> Self {
        self.params = params;
        self
    }

    /// Adds destinations of amax values, for a pass of 8-bit floats.
    pub fn amax(mut self, amax: impl IntoIterator<Item = HostAmax<'a>>) -> Self {
        self.amax.extend(amax);
        self
    }

    fn dispatcher(&self) -> &'a Dispatcher {
        self.dispatcher.unwrap_or_else(|| SHARED.get_or_init(Dispatcher::default))
    }
}

impl<'a> AttentionCall<'a, Problem> {
    /// Sets the destination of `stats`, for a problem that [computes them](crate::AttentionSpec::with_stats).
    pub fn stats(mut self, stats: &'a mut [f32]) -> Self {
        self.statistics[0] = Some(stats);
        self
    }

    /// Sets the destination of the largest score of each row, for a problem that [computes it](crate::AttentionSpec::with_row_max).
    pub fn row_max(mut self, row_max: &'a mut [f32]) -> Self {
        self.statistics[1] = Some(row_max);
        self
    }

    /// Sets the destination of the sum of exponentials of each row, for a problem that [computes it](crate::AttentionSpec::with_sum_exp).
    pub fn sum_exp(mut self, sum_exp: &'a mut [f32]) -> Self {
        self.statistics[2] = Some(sum_exp);
        self
    }

    /// Prepares the forward pass, computes it, and waits for it.
    ///
    /// # Errors
    /// Fails as [`Dispatcher::prepare`] does. Returns [`Error::Spec`] with every mistake of the call before anything runs: slices that
    /// are too short or of the wrong element type; statistics that are missing or superfluous; parameters that are missing, unknown or
    /// unlike their declaration.
    pub fn forward(
        self,
        q: impl Into<Elements<'a>>,
        k: impl Into<Elements<'a>>,
        v: impl Into<Elements<'a>>,
        o: impl Into<ElementsMut<'a>>,
    ) -> Result<Execution, Error> {
        let choice = self.dispatcher().prepare(self.problem, self.preference)?;
        let call = HostForward::new(q, k, v, o).statistics(self.statistics).attn_scale(self.attn_scale).params(self.params).amax(self.amax);
        Execution::of(choice, |prepared| prepared.forward(call))
    }
}

impl<'a> AttentionCall<'a, BackwardProblem> {
    /// Adds destinations of gradients of declared parameters, one for each gradient that the problem computes.
    pub fn gradients(mut self, gradients: impl IntoIterator<Item = HostGradient<'a>>) -> Self {
        self.gradients.extend(gradients);
        self
    }

    /// Prepares the backward pass, computes it, and waits for it. Reads the forward pass's operands, output and `stats`, and the output's gradient
    /// `d_o`; writes the gradients of `q`, `k` and `v`.
    ///
    /// # Errors
    /// Fails as [`AttentionCall::forward`] does.
    pub fn backward(
        self,
        operands: (impl Into<Elements<'a>>, impl Into<Elements<'a>>, impl Into<Elements<'a>>),
        results: (impl Into<Elements<'a>>, &'a [f32]),
        d_o: impl Into<Elements<'a>>,
        gradients: (impl Into<ElementsMut<'a>>, impl Into<ElementsMut<'a>>, impl Into<ElementsMut<'a>>),
    ) -> Result<Execution, Error> {
        let choice = self.dispatcher().prepare_backward(self.problem, self.preference)?;
        let call = HostBackward::new(operands, results, d_o, gradients)
            .attn_scale(self.attn_scale)
            .params(self.params)
            .gradients(self.gradients)
            .amax(self.amax);
        Execution::of(choice, |prepared| prepared.backward(call))
    }
}
