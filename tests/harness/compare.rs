//! How near an executor is to the oracle. Tolerances are the oracle's: `sdpa/oracle/src/tolerance.rs`.

use crate::oracle::{Closures, Given, Problem, element};
use sdpa::DType;
pub use sdpa_oracle::{Distance, GradientDistance};
use sdpa_oracle::{Numbers, Statistics, Tally, Tensor};

/// What a tally needs to know of a distance.
pub trait Measured {
    /// The largest error over its tolerance: above 1 fails.
    fn worst(&self) -> f64;
    /// How many elements any result would be right in.
    fn undecided(&self) -> u64;
    /// How near it is, in words.
    fn told(&self) -> String;

    /// Within every tolerance, each of which decides something.
    fn holds(&self) -> bool {
        self.worst() <= 1.0 && self.undecided() == 0
    }
}

fn undecided(elements: u64) -> String {
    if elements > 0 { format!(", {elements} elements undecided") } else { String::new() }
}

impl Measured for Distance {
    fn worst(&self) -> f64 {
        self.statistics().iter().flatten().fold(self.o.ratio, |worst, of_rows| worst.max(of_rows.ratio))
    }

    fn undecided(&self) -> u64 {
        Distance::undecided(self)
    }

    fn told(&self) -> String {
        let [stats, row_max, sum_exp] = self.statistics();
        let more = [("row_max", row_max), ("sum_exp", sum_exp)].into_iter().filter_map(|(name, of_rows)| Some((name, of_rows?.ratio)));
        let more: String = more.map(|(name, ratio)| format!(", {name} {ratio:.2}")).collect();
        let named = [("o", Some(self.o)), ("stats", stats), ("row_max", row_max), ("sum_exp", sum_exp)];
        let wrong = named.into_iter().filter_map(|(name, worst)| Some((name, worst.filter(|worst| worst.ratio > 1.0)?)));
        let wrong: String = wrong.map(|(name, w)| format!("; {name} is {:e}, not {:e} to {:.1e}", w.got, w.want, w.tolerance)).collect();
        let stats = stats.map_or(0.0, |stats| stats.ratio);
        let undecided = undecided(Distance::undecided(self));
        format!("{:.1e} relative, {:.2} and {stats:.2} of the tolerance{more}{undecided}{wrong}", self.o_relative(), self.o.ratio)
    }
}

impl Measured for GradientDistance {
    fn worst(&self) -> f64 {
        self.all().map(|tally| tally.worst.ratio.max(tally.bound().unwrap_or(0.0))).fold(0.0, f64::max)
    }

    fn undecided(&self) -> u64 {
        GradientDistance::undecided(self)
    }

    fn told(&self) -> String {
        let [dq, dk, dv] = self.operands.map(|tally| tally.worst.ratio);
        let relative = self.operands.iter().map(Tally::relative).fold(0.0, f64::max);
        let along = self.along.iter().map(|tally| tally.worst.ratio).fold(0.0, f64::max);
        let along = if along > 0.0 { format!(", parameters {along:.2}") } else { String::new() };
        let bound = self.along.iter().filter_map(Tally::bound).fold(0.0, f64::max);
        let bound = if bound > 0.0 { format!(", their norms {bound:.2}") } else { String::new() };
        let names = ["dq", "dk", "dv"].into_iter().chain(std::iter::repeat("a parameter"));
        let first = names.zip(self.all()).find_map(|(name, tally)| {
            let first = tally.first?;
            Some(format!("; element {} of {name} is {:e}, not {:e} to {:.1e}", first.at, first.got, first.want, first.tolerance))
        });
        let undecided = undecided(GradientDistance::undecided(self));
        format!(
            "{relative:.1e} relative, dq {dq:.2}, dk {dk:.2}, dv {dv:.2}{along}{bound} of the tolerance{undecided}{}",
            first.unwrap_or_default()
        )
    }
}

/// The gradient of a parameter.
#[derive(Clone, Debug)]
pub struct GotAlong {
    /// The type in which it was asked for.
    pub dtype: DType,
    /// What came.
    pub value: Vec<f64>,
}

/// Operands are finite, and what they make is a number, also where the oracle says it is none.
fn numbers<'a>(all: impl IntoIterator<Item = &'a Vec<f64>>) -> Result<(), String> {
    let wrong = all.into_iter().flatten().filter(|x| x.is_nan()).count();
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} elements are no numbers")) }
}

/// Compares `o` and row statistics (in the order of `sdpa::Statistic::ALL`), in row-major order, with the oracle's.
///
/// # Errors
/// In words: what is not a number.
pub fn compare(p: &Problem<'_>, closures: &Closures<'_>, o: &Vec<f64>, of_rows: [Option<&Vec<f64>>; 3]) -> Result<Distance, String> {
    let [stats, row_max, sum_exp] = of_rows.map(|x| x.map(|x| x as &dyn Numbers));
    let told = Statistics { stats, row_max, sum_exp };
    let distance = p.with(closures, |problem| sdpa_oracle::check(problem, Tensor::dense(o, p.o_dims()), told, &|_| ()));
    if distance.holds() {
        numbers([o].into_iter().chain(of_rows.into_iter().flatten()))?
    }
    Ok(distance)
}

/// Compares `dq`, `dk` and `dv`, and the gradients of parameters, that of the sink last if there is one, all in row-major order, with the oracle's.
///
/// # Errors
/// In words: what is not a number, and gradients of parameters of another length than the oracle's.
pub fn compare_gradients(
    p: &Problem<'_>,
    closures: &Closures<'_>,
    d_o: &Vec<f64>,
    given: Given<'_>,
    got: &[Vec<f64>; 3],
    along: &[GotAlong],
) -> Result<GradientDistance, String> {
    let of_scores = closures.along.iter().map(|a| a.dims.iter().product());
    let lengths: Vec<usize> = of_scores.chain(p.sink.map(<[f64]>::len)).collect();
    let given_lengths = along.iter().map(|a| a.value.len());
    if !given_lengths.clone().eq(lengths.iter().copied()) && !given_lengths.eq(lengths[..closures.along.len()].iter().copied()) {
        return Err(format!("gradients of parameters have {lengths:?} elements"));
    }
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    let [dq, dk, dv] = got;
    let tensors = [
        Tensor::dense(dq, [batch, heads_q, seq_q, dim_qk]),
        Tensor::dense(dk, [batch, heads_kv, seq_kv, dim_qk]),
        Tensor::dense(dv, [batch, heads_kv, seq_kv, dim_v]),
    ];
    let parameters: Vec<_> = along.iter().map(|a| (Tensor::dense(&a.value, [1, 1, 1, a.value.len()]), element(a.dtype))).collect();
    let d_o = Tensor::dense(d_o, p.o_dims());
    let distance = p.with(closures, |told| sdpa_oracle::check_gradients(told, d_o, given, &tensors, &parameters, &|_| ()));
    if distance.holds() {
        numbers(got.iter().chain(along.iter().map(|a| &a.value)))?
    }
    Ok(distance)
}
