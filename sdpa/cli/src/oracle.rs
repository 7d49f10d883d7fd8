//! Converts a problem for the oracle: operands in place, masks, and expressions as functions of one score.

pub(crate) mod rules;

use crate::data::{Data, Element};
use crate::params::Bound;
use rules::{Function, Gradient};
use sdpa::expr::ParamKind;
use sdpa::{
    AttentionSpec, BackwardProblem, BackwardSpec, DROPOUT_OFFSET, DROPOUT_SEED, Documents, Pages, Param, Problem, SINK, Side, StatsBase,
    TensorSpec,
};
use sdpa_oracle::{Distance, Given, GradientDistance, Mask, Modify, Numbers, Statistics, Tensor};
use std::f64::consts::LN_2;
use std::ops::Range;

impl Numbers for Data {
    fn get(&self, at: usize) -> f64 {
        Data::get(self, at)
    }

    fn row(&self, at: usize, to: &mut [f64]) {
        Data::row(self, at, to);
    }
}

impl Numbers for Bound {
    fn get(&self, at: usize) -> f64 {
        self.param().value.get(at)
    }
}

impl From<Element> for sdpa_oracle::Element {
    fn from(element: Element) -> sdpa_oracle::Element {
        match element {
            Element::F32 => sdpa_oracle::Element::F32,
            Element::F16 => sdpa_oracle::Element::F16,
            Element::BF16 => sdpa_oracle::Element::BF16,
            Element::F8E4M3 => sdpa_oracle::Element::E4M3,
            Element::F8E5M2 => sdpa_oracle::Element::E5M2,
        }
    }
}

/// A forward pass for the oracle: its operands, and the results to check.
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
    pub(crate) row_max: Option<&'a [f32]>,
    pub(crate) sum_exp: Option<&'a [f32]>,
    pub(crate) scale: f64,
    /// Scales and types of a pass with 8-bit floats.
    pub(crate) narrow: Option<sdpa_oracle::Narrow>,
    /// The largest P, if the forward pass reported it.
    pub(crate) amax_s: Option<f64>,
}

/// A backward pass for the oracle: its forward problem, the gradient of the output, and the gradients to check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardCall<'a> {
    pub(crate) forward: Call<'a>,
    pub(crate) problem: &'a BackwardProblem,
    pub(crate) spec: &'a BackwardSpec,
    pub(crate) d_o: &'a Data,
    /// The executor's `dq`, `dk` and `dv`.
    pub(crate) got: [&'a Data; 3],
    pub(crate) wrt: &'a [(String, Data)],
    /// The largest magnitude of dS times the scale, if the backward pass reported it.
    pub(crate) amax_dp: Option<f64>,
    /// Whether the executor computed `o` and stats in this run.
    pub(crate) chained: bool,
}

/// The memory layout of batch entries.
#[derive(Clone, Copy)]
enum Entries<'a> {
    /// Batch entries are at a constant stride.
    Apart,
    /// Batch entries are packed sequences. The field has their token ranges.
    Documents(&'a [Range<usize>]),
    /// Keys are paged. The fields are the pages and the number of pages.
    Pages(Pages<'a>, usize),
}

impl<'a> Entries<'a> {
    fn of(side: Side, documents: Option<&'a Documents>) -> Entries<'a> {
        documents.map_or(Entries::Apart, |documents| Entries::Documents(documents.of(side)))
    }
}

/// Packed sequences and paged keys in the oracle's form: batch entries of the maximum length, in row-major order, with one constant after the end of each.
struct Padded<'a> {
    data: &'a dyn Numbers,
    dims: [usize; 4],
    strides: [usize; 4],
    entries: Entries<'a>,
    /// The constant after the end.
    rest: f64,
}

impl Padded<'_> {
    /// Returns the offset of an element, if it exists.
    fn place(&self, at: usize) -> Option<usize> {
        let [_, heads, seq, dim] = self.dims;
        let (batch, head, row, element) = (at / dim / seq / heads, at / dim / seq % heads, at / dim % seq, at % dim);
        let entry = match self.entries {
            Entries::Apart => batch * self.strides[0] + row * self.strides[2],
            Entries::Documents(documents) => {
                let tokens = documents.get(batch).filter(|tokens| row < tokens.len())?;
                (tokens.start + row) * self.strides[2]
            }
            // Page-table entries past the existing keys may be invalid, so skip pages that are not in the pool.
            Entries::Pages(pages, count) => {
                let [page, token] = pages.place(batch, row).filter(|[page, _]| *page < count)?;
                page * self.strides[0] + token * self.strides[2]
            }
        };
        Some(entry + head * self.strides[1] + element * self.strides[3])
    }
}

impl Numbers for Padded<'_> {
    fn get(&self, at: usize) -> f64 {
        self.place(at).map_or(self.rest, |at| self.data.get(at))
    }

    fn row(&self, at: usize, to: &mut [f64]) {
        match self.place(at) {
            Some(at) => self.data.row(at, to),
            None => to.fill(self.rest),
        }
    }
}

fn n(n: i64) -> usize {
    usize::try_from(n).unwrap_or(0)
}

fn padded<'a>(data: &'a dyn Numbers, spec: &TensorSpec, entries: Entries<'a>, rest: f64) -> Padded<'a> {
    Padded { data, dims: spec.dims.map(n), strides: spec.strides.map(n), entries, rest }
}

/// Returns an operand in the oracle's form: packed, paged, or neither.
fn told<'a>(data: &'a Data, spec: &TensorSpec, padded: &'a Padded<'_>) -> Tensor<'a> {
    match padded.entries {
        Entries::Apart => tensor(data, spec),
        Entries::Documents(_) | Entries::Pages(..) => Tensor::dense(padded, padded.dims),
    }
}

fn tensor<'a>(data: &'a Data, spec: &TensorSpec) -> Tensor<'a> {
    Tensor { numbers: data, strides: spec.strides.map(n) }
}

fn shape(spec: &AttentionSpec) -> [usize; 7] {
    let ([batch, heads_q, seq_q, dim_qk], [_, heads_kv, seq_kv, dim_v]) = (spec.q.dims.map(n), spec.v.dims.map(n));
    [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v]
}

/// Returns the kind of a parameter.
fn kind(problem: &BackwardProblem, name: &str) -> ParamKind {
    problem.params().iter().find(|p| p.name == name).map_or(ParamKind::Scalar, |p| p.kind)
}

/// Returns the extents of the gradient of each parameter that score_mods declare.
fn wrt_dims(problem: &BackwardProblem) -> Vec<[usize; 4]> {
    let dims = |name: &str| match kind(problem, name) {
        ParamKind::Tensor { axes, dtype: _ } => axes.dims(problem.forward().extents()).map(|n| usize::try_from(n).unwrap_or(1)),
        ParamKind::Scalar => [1; 4],
    };
    problem.wrt_scores().map(|g| dims(&g.name)).collect()
}

/// Returns the number of bytes that the check of a forward pass needs.
pub(crate) fn bytes(spec: &AttentionSpec) -> u128 {
    sdpa_oracle::bytes(shape(spec))
}

/// Returns the number of bytes that the check of a backward pass needs.
pub(crate) fn gradient_bytes(problem: &BackwardProblem, spec: &AttentionSpec) -> u128 {
    sdpa_oracle::gradient_bytes(shape(spec), &wrt_dims(problem))
}

impl Call<'_> {
    /// Returns the packed sequences of a call, whose `cu_seqlens` were validated before.
    fn documents(&self) -> Option<Documents> {
        let params: Vec<Param<'_>> = self.params.iter().map(Bound::param).collect();
        self.problem.documents(&params).ok().flatten()
    }

    /// Converts stats of another base to natural logarithms.
    fn natural_stats(&self) -> Option<Vec<f32>> {
        match self.problem.stats_base() {
            StatsBase::Natural => None,
            StatsBase::Two => self.stats.map(|stats| stats.iter().map(|x| (f64::from(*x) * LN_2) as f32).collect()),
        }
    }

    fn told<T>(&self, documents: Option<&Documents>, modify: Option<&dyn Modify>, call: impl FnOnce(&sdpa_oracle::Problem<'_>) -> T) -> T {
        let (spec, counted) = (self.spec, has_lengths(self.problem));
        let mut masks: Vec<Mask<'_>> = spec.masks.iter().map(|m| rules::mask(m, self.params, self.problem.extents(), counted)).collect();
        if documents.is_some() {
            let entries: Vec<[i64; 2]> =
                (0..self.problem.batch()).map(|b| rules::entry(self.params, b, self.problem.extents(), counted)).collect();
            let there = move |b: i64, q: i64, k: i64| entries.get(n(b)).is_some_and(|[queries, keys]| q < *queries && k < *keys);
            masks.push(Mask::Rule(Box::new(move |[b, _, q, k]| there(b, q, k))));
        }
        let params: Vec<Param<'_>> = self.params.iter().map(Bound::param).collect();
        // The page table was validated before, so this does not fail.
        let pages = self.problem.pages(&params).ok().flatten().zip(spec.paged).map(|(pages, paged)| Entries::Pages(pages, n(paged.pages)));
        let keys = pages.unwrap_or_else(|| Entries::of(Side::Keys, documents));
        let q = padded(self.q, &spec.q, Entries::of(Side::Queries, documents), 0.0);
        let [k, v] = [(self.k, &spec.k), (self.v, &spec.v)].map(|(data, spec)| padded(data, spec, keys, 0.0));
        let sink = self.params.iter().find(|bound| self.problem.sink() && bound.param().name == SINK);
        let number = |name: &str| self.params.iter().find_map(|bound| bound.number(name));
        let dropout = spec.dropout.zip(number(DROPOUT_SEED).zip(number(DROPOUT_OFFSET)));
        call(&sdpa_oracle::Problem {
            shape: shape(spec),
            q: told(self.q, &spec.q, &q),
            k: told(self.k, &spec.k, &k),
            v: told(self.v, &spec.v, &v),
            element: self.q.element().into(),
            stored: self.o.element().into(),
            scale: self.scale,
            masks: &masks,
            modify,
            sink: sink.map(|sink| sink as &dyn Numbers),
            dropout: dropout.map(|(dropout, (seed, offset))| sdpa_oracle::Dropout { p: dropout.p().into(), seed, offset }),
            narrow: self.narrow,
            fixed_point: None,
        })
    }
}

/// Returns whether the masks declare query lengths, and whether they declare key lengths.
pub(crate) fn has_lengths(problem: &Problem) -> [bool; 2] {
    [problem.kept().seq_len_q, problem.kept().seq_len_kv]
}

/// Computes every row of a forward pass and compares the executor's results with it. `done` receives the number of rows that each step
/// completed.
pub(crate) fn check(call: &Call<'_>, done: &(dyn Fn(u64) + Sync)) -> Distance {
    let function = call.problem.score_mod().map(|trace| Function::new(trace, call.params, call.problem.extents()));
    let modify = function.as_ref().map(|function| function as &dyn Modify);
    let documents = call.documents();
    let documents = documents.as_ref();
    let queries = Entries::of(Side::Queries, documents);
    let o = padded(call.o, &call.spec.o, queries, 0.0);
    let rows = call.problem.stats_tensor();
    let natural = call.natural_stats();
    // Pair each statistic with the value that it has in a row that attends to no key.
    let given = [(natural.as_deref().or(call.stats), f64::NEG_INFINITY), (call.row_max, f64::NEG_INFINITY), (call.sum_exp, 0.0)];
    let given = given.map(|(given, none)| (given.is_some(), given.unwrap_or_default(), none));
    let of_documents = given.each_ref().map(|(_, given, none)| padded(given, &rows, queries, *none));
    let statistic = |n: usize| {
        let (there, given, _) = &given[n];
        let numbers: &dyn Numbers = if documents.is_some() { &of_documents[n] } else { given };
        there.then_some(numbers)
    };
    let statistics = Statistics { stats: statistic(0), row_max: statistic(1), sum_exp: statistic(2), amax_s: call.amax_s };
    call.told(documents, modify, |p| sdpa_oracle::check(p, told(call.o, &call.spec.o, &o), statistics, done))
}

/// Computes the gradients of `Σ o∘d_o` and compares the executor's gradients with them. `done` receives the number of rows that each step
/// completed.
pub(crate) fn check_gradients(call: &BackwardCall<'_>, done: &(dyn Fn(u64) + Sync)) -> GradientDistance {
    let BackwardCall { forward, problem, spec, d_o, got: [dq, dk, dv], wrt, amax_dp, chained } = call;
    let gradient = problem.gradient().map(|g| Gradient {
        function: Function::new(&g.trace, forward.params, problem.forward().extents()),
        along: wrt_dims(problem),
        kinds: problem.wrt_scores().map(|wanted| kind(problem, &wanted.name)).collect(),
        reads: &g.reads,
    });
    let modify = gradient.as_ref().map(|gradient| gradient as &dyn Modify);
    let documents = forward.documents();
    let documents = documents.as_ref();
    let results = [(*dq, &spec.dq, Side::Queries), (*dk, &spec.dk, Side::Keys), (*dv, &spec.dv, Side::Keys)];
    let of_results = results.map(|(data, spec, side)| padded(data, spec, Entries::of(side, documents), 0.0));
    let of_d_o = padded(*d_o, &spec.d_o, Entries::of(Side::Queries, documents), 0.0);
    let got = std::array::from_fn(|n| told(results[n].0, results[n].1, &of_results[n]));
    // Gradients of parameters are dense and row-major, so each one is passed as a single row.
    let along: Vec<_> = wrt.iter().map(|(_, data)| (Tensor { numbers: data, strides: [0, 0, 0, 1] }, data.element().into())).collect();
    let given = if *chained { Given::Own } else { Given::Rounded };
    let queries = Entries::of(Side::Queries, documents);
    let (o, natural) = (padded(forward.o, &forward.spec.o, queries, 0.0), forward.natural_stats());
    let rows = forward.problem.stats_tensor();
    let stats = natural.as_deref().or(forward.stats);
    let stats = stats.as_ref().map(|stats| padded(stats, &rows, queries, f64::NEG_INFINITY));
    // An executor that sums in a fixed order may do so in fixed point. The derivative is the second root of a gradient's trace.
    let gain = || problem.gradient().map_or(Some(1.0), |g| g.trace.gain(1, problem.forward().extents()));
    let is_ordered = problem.deterministic() || problem.forward().batch_invariant();
    forward.told(documents, modify, |p| {
        let p = &sdpa_oracle::Problem { fixed_point: is_ordered.then(gain).flatten(), ..*p };
        let d_o = told(d_o, &spec.d_o, &of_d_o);
        let mut distance = sdpa_oracle::check_gradients(p, d_o, given, &got, &along, done);
        distance.amax_dp = amax_dp.zip(stats.as_ref()).map(|(amax_dp, stats)| {
            let o = told(forward.o, &forward.spec.o, &o);
            Box::new(sdpa_oracle::largest_slope(p, d_o, (o, stats)).compare(amax_dp))
        });
        distance
    })
}
