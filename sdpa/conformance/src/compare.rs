//! Compares results of executors with the oracle's. The tolerances are the oracle's: `sdpa/oracle/src/tolerance.rs`.

use crate::oracle::{Closures, Given, Problem, element};
use sdpa::DType;
pub use sdpa_oracle::{Distance, GradientDistance, Verdict};
use sdpa_oracle::{Norms, Numbers, Results, Statistics, Tally, Tensor, Worst};

/// The distance of an executor's results from the oracle's, as test summaries count and print it.
pub trait Measured {
    /// Returns the largest ratio of the error of a result and its tolerance; above 1 the results fail.
    fn worst(&self) -> f64;
    /// Returns the verdict that `--check` reports: passed, failed or undecided.
    fn verdict(&self) -> Verdict;
    /// Returns a description of the distance.
    fn told(&self) -> String;

    /// Returns the number of elements of the results whose tolerance accepts any value.
    fn undecided(&self) -> u64;

    /// Returns whether all results are within their tolerances and no element is undecided. Norms may be undecided: the tests
    /// `cpu::replaced` list these cases.
    fn holds(&self) -> bool {
        self.verdict() != Verdict::Failed && self.undecided() == 0
    }
}

/// Names the elements and the tensors that a distance does not decide.
fn undecided<'a>(elements: u64, tensors: impl Iterator<Item = &'a str>) -> String {
    let elements = if elements > 0 { format!(", {elements} elements undecided") } else { String::new() };
    elements + &tensors.map(|name| format!(", the norm of {name} undecided")).collect::<String>()
}

/// Names a largest magnitude that the check does not decide.
fn magnitude(name: &str, amax: Option<&Worst>) -> String {
    amax.filter(|amax| amax.undecided > 0).map_or_else(String::new, |_| format!(", {name} undecided"))
}

impl<D: Measured + ?Sized> Measured for Box<D> {
    fn worst(&self) -> f64 {
        (**self).worst()
    }

    fn verdict(&self) -> Verdict {
        (**self).verdict()
    }

    fn told(&self) -> String {
        (**self).told()
    }

    fn undecided(&self) -> u64 {
        (**self).undecided()
    }
}

impl Measured for Distance {
    fn worst(&self) -> f64 {
        let worst = self.statistics().iter().chain([&self.amax_s]).flatten().fold(self.o.ratio, |worst, of_rows| worst.max(of_rows.ratio));
        self.norms().iter().map(Norms::bound).fold(worst, f64::max)
    }

    fn verdict(&self) -> Verdict {
        Distance::verdict(self)
    }

    fn undecided(&self) -> u64 {
        Distance::undecided(self)
    }

    fn told(&self) -> String {
        let [stats, row_max, sum_exp] = self.statistics();
        let more = [("row_max", row_max), ("sum_exp", sum_exp), ("amax_s", self.amax_s)]
            .into_iter()
            .filter_map(|(name, of_rows)| Some((name, of_rows?.ratio)));
        let more: String = more.map(|(name, ratio)| format!(", {name} {ratio:.2}")).collect();
        let named = [("o", Some(self.o)), ("stats", stats), ("row_max", row_max), ("sum_exp", sum_exp), ("amax_s", self.amax_s)];
        let wrong = named.into_iter().filter_map(|(name, worst)| Some((name, worst.filter(|worst| worst.ratio > 1.0)?)));
        let wrong: String = wrong.map(|(name, w)| format!("; {name} is {:e}, not {:e} to {:.1e}", w.got, w.want, w.tolerance)).collect();
        let stats = stats.map_or(0.0, |stats| stats.ratio);
        let norms = ["o", "stats", "row_max", "sum_exp"].into_iter().zip(self.norms());
        let undecided = undecided(Distance::undecided(self), norms.filter(|(_, norms)| norms.undecided() > 0).map(|(name, _)| name));
        let undecided = undecided + &magnitude("amax_s", self.amax_s.as_ref());
        let norm = self.norms().iter().map(Norms::bound).fold(0.0, f64::max);
        format!(
            "{:.1e} relative, {:.2} and {stats:.2} of the tolerance{more}, norms {norm:.2}{undecided}{wrong}",
            self.o_relative(),
            self.o.ratio
        )
    }
}

impl Measured for GradientDistance {
    fn worst(&self) -> f64 {
        let amax = self.amax_dp.as_ref().map_or(0.0, |amax| amax.ratio);
        self.all().map(|tally| tally.worst.ratio.max(tally.bound())).fold(amax, f64::max)
    }

    fn verdict(&self) -> Verdict {
        GradientDistance::verdict(self)
    }

    fn undecided(&self) -> u64 {
        GradientDistance::undecided(self)
    }

    fn told(&self) -> String {
        let [dq, dk, dv] = self.operands.map(|tally| tally.worst.ratio);
        let relative = self.operands.iter().map(Tally::relative).fold(0.0, f64::max);
        let along = self.along.iter().map(|tally| tally.worst.ratio).fold(0.0, f64::max);
        let along = if along > 0.0 { format!(", parameters {along:.2}") } else { String::new() };
        let bound = self.all().map(Tally::bound).fold(0.0, f64::max);
        let names = || ["dq", "dk", "dv"].into_iter().chain(std::iter::repeat("a parameter"));
        let first = names().zip(self.all()).find_map(|(name, tally)| {
            let first = tally.first?;
            Some(format!("; element {} of {name} is {:e}, not {:e} to {:.1e}", first.at, first.got, first.want, first.tolerance))
        });
        let amax = self.amax_dp.as_ref().map_or_else(String::new, |amax| format!(", amax_dp {:.2}", amax.ratio));
        let wrong = self.amax_dp.as_ref().filter(|amax| amax.ratio > 1.0);
        let wrong = wrong.map_or_else(String::new, |w| format!("; amax_dp is {:e}, not {:e} to {:.1e}", w.got, w.want, w.tolerance));
        let unknown = names().zip(self.all()).filter(|(_, tally)| !tally.is_decided()).map(|(name, _)| name);
        let undecided = undecided(GradientDistance::undecided(self), unknown) + &magnitude("amax_dp", self.amax_dp.as_deref());
        format!(
            "{relative:.1e} relative, dq {dq:.2}, dk {dk:.2}, dv {dv:.2}{along}{amax} of the tolerance, norms {bound:.2}{undecided}{}{wrong}",
            first.unwrap_or_default()
        )
    }
}

/// An executor's gradient of a parameter of the score_mod, or of the sinks.
#[derive(Clone, Debug)]
pub struct GotAlong {
    /// The element type that was requested for the gradient.
    pub dtype: DType,
    /// The elements of the gradient.
    pub value: Vec<f64>,
}

/// Operands are finite, so results must not be NaN, even where the oracle's are.
fn numbers<'a>(all: impl IntoIterator<Item = &'a Vec<f64>>) -> Result<(), String> {
    let wrong = all.into_iter().flatten().filter(|x| x.is_nan()).count();
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} elements are no numbers")) }
}

/// An executor's output and row statistics, in row-major order.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// The output.
    pub o: Vec<f64>,
    /// The row statistics that were requested, in the order of `sdpa::Statistic::ALL`; `None` for others.
    pub of_rows: [Option<Vec<f64>>; 3],
    /// The largest P that the executor reported, for a problem with 8-bit floats.
    pub amax_s: Option<f64>,
}

/// An executor's gradients, in row-major order.
#[derive(Clone, Debug)]
pub struct GotGradients {
    /// The gradients `dq`, `dk` and `dv`.
    pub operands: [Vec<f64>; 3],
    /// The gradients of parameters. If the problem has a sink, the gradient of the sink comes last.
    pub along: Vec<GotAlong>,
    /// The largest gradient of a score that the executor reported, for a problem with 8-bit floats.
    pub slopes: Option<Slopes>,
}

/// The largest magnitude of dS, times the scale, that a backward pass reported, and the inputs of that pass.
#[derive(Clone, Debug)]
pub struct Slopes {
    /// The magnitude that the backward pass reported.
    pub amax_dp: f64,
    /// The inputs `o`, descaled, and `stats`, in row-major order.
    pub given: [Vec<f64>; 2],
}

/// Compares the outputs of several executors or runs with the oracle's outputs, which are computed once.
pub fn compare_each(p: &Problem<'_>, closures: &Closures<'_>, all: &[Outputs]) -> Vec<Distance> {
    let mut results = Vec::new();
    for got in all {
        let [stats, row_max, sum_exp] = got.of_rows.each_ref().map(|x| x.as_ref().map(|x| x as &dyn Numbers));
        results.push((Tensor::dense(&got.o, p.o_dims()), Statistics { stats, row_max, sum_exp, amax_s: got.amax_s }));
    }
    p.with(closures, |problem| sdpa_oracle::check_each(problem, &results, &|_| ()))
}

/// Compares an executor's `o` and row statistics with the oracle's.
///
/// # Errors
/// Returns a message that names the results that are NaN.
pub fn compare(p: &Problem<'_>, closures: &Closures<'_>, got: &Outputs) -> Result<Distance, String> {
    let distance = compare_each(p, closures, std::slice::from_ref(got)).pop().unwrap_or_default();
    if distance.holds() {
        numbers([&got.o].into_iter().chain(got.of_rows.iter().flatten()))?
    }
    Ok(distance)
}

/// Compares the gradients of several executors or runs with the oracle's gradients, which are computed once.
///
/// # Errors
/// Returns a message if a gradient of a parameter does not have the length of the oracle's gradient.
pub fn compare_each_gradients(
    p: &Problem<'_>,
    closures: &Closures<'_>,
    d_o: &Vec<f64>,
    given: Given<'_>,
    all: &[GotGradients],
) -> Result<Vec<GradientDistance>, String> {
    let of_scores = closures.along.iter().map(|a| a.dims.iter().product());
    let lengths: Vec<usize> = of_scores.chain(p.sink.map(<[f64]>::len)).collect();
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    let (mut operands, mut parameters) = (Vec::new(), Vec::new());
    for GotGradients { operands: [dq, dk, dv], along, slopes: _ } in all {
        let given_lengths = along.iter().map(|a| a.value.len());
        if !given_lengths.clone().eq(lengths.iter().copied()) && !given_lengths.eq(lengths[..closures.along.len()].iter().copied()) {
            return Err(format!("gradients of parameters have {lengths:?} elements"));
        }
        operands.push([
            Tensor::dense(dq, [batch, heads_q, seq_q, dim_qk]),
            Tensor::dense(dk, [batch, heads_kv, seq_kv, dim_qk]),
            Tensor::dense(dv, [batch, heads_kv, seq_kv, dim_v]),
        ]);
        let of_parameters = along.iter().map(|a| (Tensor::dense(&a.value, [1, 1, 1, a.value.len()]), element(a.dtype)));
        parameters.push(of_parameters.collect::<Vec<_>>());
    }
    let results: Vec<Results<'_>> = operands.iter().zip(&parameters).map(|(&operands, along)| Results { operands, along }).collect();
    let d_o = Tensor::dense(d_o, p.o_dims());
    let given_slopes = all.iter().find_map(|got| got.slopes.as_ref());
    let (mut distances, largest) = p.with(closures, |told| {
        let largest = given_slopes
            .map(|Slopes { given: [o, stats], .. }| sdpa_oracle::largest_slope(told, d_o, (Tensor::dense(o, p.o_dims()), stats)));
        (sdpa_oracle::check_each_gradients(told, d_o, given, &results, &|_| ()), largest)
    });
    for (distance, got) in distances.iter_mut().zip(all) {
        distance.amax_dp = largest.zip(got.slopes.as_ref()).map(|(largest, slopes)| Box::new(largest.compare(slopes.amax_dp)));
    }
    Ok(distances)
}

/// Compares an executor's gradients with the oracle's.
///
/// # Errors
/// Returns a message if a result is NaN, or if a gradient of a parameter does not have the length of the oracle's gradient.
pub fn compare_gradients(
    p: &Problem<'_>,
    closures: &Closures<'_>,
    d_o: &Vec<f64>,
    given: Given<'_>,
    got: &GotGradients,
) -> Result<GradientDistance, String> {
    let distance = compare_each_gradients(p, closures, d_o, given, std::slice::from_ref(got))?.pop().unwrap_or_default();
    if distance.holds() {
        numbers(got.operands.iter().chain(got.along.iter().map(|a| &a.value)))?
    }
    Ok(distance)
}
