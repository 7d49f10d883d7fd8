//! What the oracle is told of a problem: operands where they lie, masks as they are written, expressions as functions of one score.

pub(crate) mod rules;

use crate::data::{Data, Element};
use crate::params::Bound;
use rules::{Function, Gradient};
use sdpa::expr::ParamKind;
use sdpa::{AttentionSpec, BackwardProblem, BackwardSpec, Problem, TensorSpec};
use sdpa_oracle::{Distance, Given, GradientDistance, Mask, Modify, Numbers, Tensor};

impl Numbers for Data {
    fn get(&self, at: usize) -> f64 {
        Data::get(self, at)
    }

    fn row(&self, at: usize, to: &mut [f64]) {
        Data::row(self, at, to);
    }
}

impl From<Element> for sdpa_oracle::Element {
    fn from(element: Element) -> sdpa_oracle::Element {
        match element {
            Element::F32 => sdpa_oracle::Element::F32,
            Element::F16 => sdpa_oracle::Element::F16,
            Element::BF16 => sdpa_oracle::Element::BF16,
        }
    }
}

/// Operands and the results to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) problem: &'a Problem,
    pub(crate) params: &'a [Bound],
    pub(crate) q: &'a Data,
    pub(crate) k: &'a Data,
    pub(crate) v: &'a Data,
    pub(crate) o: &'a Data,
    pub(crate) stats: Option<&'a [f32]>,
    pub(crate) scale: f64,
}

/// A backward pass and the gradients to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardCall<'a> {
    pub(crate) forward: Call<'a>,
    pub(crate) problem: &'a BackwardProblem,
    pub(crate) spec: &'a BackwardSpec,
    pub(crate) d_o: &'a Data,
    /// `dq`, `dk`, `dv`.
    pub(crate) got: [&'a Data; 3],
    pub(crate) wrt: &'a [(String, Data)],
    /// `o` and stats were computed in the same run.
    pub(crate) chained: bool,
}

fn tensor<'a>(data: &'a Data, spec: &TensorSpec) -> Tensor<'a> {
    Tensor { numbers: data, strides: spec.strides.map(|n| usize::try_from(n).unwrap_or(0)) }
}

fn shape(spec: &AttentionSpec) -> [usize; 7] {
    let n = |n: i64| usize::try_from(n).unwrap_or(0);
    let ([batch, heads_q, seq_q, dim_qk], [_, heads_kv, seq_kv, dim_v]) = (spec.q.dims.map(n), spec.v.dims.map(n));
    [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v]
}

/// The extents of the gradient of each parameter.
fn wrt_dims(problem: &BackwardProblem) -> Vec<[usize; 4]> {
    let dims = |name: &str| match problem.params().iter().find(|p| p.name == name).map(|p| p.kind) {
        Some(ParamKind::Tensor { axes, dtype: _ }) => axes.dims(problem.forward().extents()).map(|n| usize::try_from(n).unwrap_or(1)),
        Some(ParamKind::Scalar) | None => [1; 4],
    };
    problem.wrt().iter().map(|g| dims(&g.name)).collect()
}

/// Bytes of memory that a check takes.
pub(crate) fn bytes(spec: &AttentionSpec) -> u128 {
    sdpa_oracle::bytes(shape(spec))
}

/// The same for a backward pass.
pub(crate) fn gradient_bytes(problem: &BackwardProblem, spec: &AttentionSpec) -> u128 {
    sdpa_oracle::gradient_bytes(shape(spec), &wrt_dims(problem))
}

impl Call<'_> {
    fn told<T>(&self, modify: Option<&dyn Modify>, call: impl FnOnce(&sdpa_oracle::Problem<'_>) -> T) -> T {
        let spec = self.spec;
        let masks: Vec<Mask<'_>> = spec.masks.iter().map(|m| rules::mask(m, self.params, self.problem.extents())).collect();
        call(&sdpa_oracle::Problem {
            shape: shape(spec),
            q: tensor(self.q, &spec.q),
            k: tensor(self.k, &spec.k),
            v: tensor(self.v, &spec.v),
            element: self.o.element().into(),
            stored: self.o.element().into(),
            scale: self.scale,
            masks: &masks,
            modify,
        })
    }
}

/// Computes every row and compares it; `done` is told how many rows are.
pub(crate) fn check(call: &Call<'_>, done: &(dyn Fn(u64) + Sync)) -> Distance {
    let function = call.problem.score_mod().map(|trace| Function::new(trace, call.params, call.problem.extents()));
    let modify = function.as_ref().map(|function| function as &dyn Modify);
    let stats = call.stats.as_ref().map(|stats| stats as &dyn Numbers);
    call.told(modify, |p| sdpa_oracle::check(p, tensor(call.o, &call.spec.o), stats, done))
}

/// Computes the gradients of `Σ o∘d_o` and compares them.
pub(crate) fn check_gradients(call: &BackwardCall<'_>, done: &(dyn Fn(u64) + Sync)) -> GradientDistance {
    let BackwardCall { forward, problem, spec, d_o, got: [dq, dk, dv], wrt, chained } = call;
    let gradient = problem
        .gradient()
        .map(|g| Gradient { function: Function::new(&g.trace, forward.params, problem.forward().extents()), along: wrt_dims(problem) });
    let modify = gradient.as_ref().map(|gradient| gradient as &dyn Modify);
    let got = [tensor(dq, &spec.dq), tensor(dk, &spec.dk), tensor(dv, &spec.dv)];
    // In row-major order, which is one row.
    let along: Vec<_> = wrt.iter().map(|(_, data)| (Tensor { numbers: data, strides: [0, 0, 0, 1] }, data.element().into())).collect();
    forward.told(modify, |p| {
        sdpa_oracle::check_gradients(p, tensor(d_o, &spec.d_o), if *chained { Given::Own } else { Given::Rounded }, &got, &along, done)
    })
}
