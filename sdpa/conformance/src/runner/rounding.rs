//! Tests that 16-bit results are rounded to nearest. Tolerances cannot detect truncation: its error is less than two roundings.
//!
//! The inputs are such that the computation is exact, or nearly, in f32, but the 16-bit result is not. All scores are 0, all keys have equal P, and the
//! averaged values are small integers.

use crate::random::Random;
use half::{bf16, f16};
use sdpa::{AttentionSpec, DType, Elements, ElementsMut, Executor, HostBackward, HostForward, Layout, Shape};

/// Number of keys, and of queries that a gradient sums over.
const FOUR: i64 = 4;

/// A 16-bit type.
trait Short: Copy + PartialEq {
    const DTYPE: DType;
    /// Number of steps from 1 to 2.
    const STEPS: f64;
    fn nearest(x: f64) -> Self;
    fn value(self) -> f64;
    fn elements(all: &[Self]) -> Elements<'_>;
    fn elements_mut(all: &mut [Self]) -> ElementsMut<'_>;
}

macro_rules! short {
    ($ty:ident, $variant:ident, $steps:literal) => {
        impl Short for $ty {
            const DTYPE: DType = DType::$variant;
            const STEPS: f64 = $steps;
            fn nearest(x: f64) -> Self {
                $ty::from_f64(x)
            }
            fn value(self) -> f64 {
                self.to_f64()
            }
            fn elements(all: &[Self]) -> Elements<'_> {
                Elements::$variant(all)
            }
            fn elements_mut(all: &mut [Self]) -> ElementsMut<'_> {
                ElementsMut::$variant(all)
            }
        }
    };
}
short!(f16, F16, 1024.0);
short!(bf16, BF16, 128.0);

/// Draws numbers from 1 to 2, in steps of the type.
fn draw<T: Short>(random: &mut Random, n: usize) -> Vec<T> {
    (0..n).map(|_| T::nearest(1.0 + random.between(0, T::STEPS as i64 - 1) as f64 / T::STEPS)).collect()
}

/// Checks that each result is the nearest number to the expected one. If two are about equally near, either passes.
fn judge<T: Short>(what: &str, got: &[T], want: &[f64]) -> Result<usize, String> {
    let mut rounded = 0;
    for (at, (got, &want)) in got.iter().zip(want).enumerate() {
        let nearest = T::nearest(want);
        // The slack is larger than the f32 error of intermediate results.
        let slack = want.abs() / f64::from(1 << 18);
        let clear = T::nearest(want - slack) == nearest && T::nearest(want + slack) == nearest;
        rounded += usize::from(clear && nearest.value() > want);
        if clear && *got != nearest {
            return Err(format!("{what}[{at}] of {:?} is {}, and {} is the nearest to {want}", T::DTYPE, got.value(), nearest.value()));
        }
    }
    Ok(rounded)
}

fn of<T: Short>(executor: &dyn Executor, seq_q: i64, dim: i64) -> Result<(), String> {
    let shape = Shape { batch: 1, heads_q: FOUR / seq_q, heads_kv: 1, seq_q, seq_kv: FOUR, dim_qk: dim, dim_v: dim };
    let spec = AttentionSpec::dense(T::DTYPE, shape, Layout::Bhsd).with_stats();
    let problem = spec.backward().validate().map_err(|e| e.to_string())?;
    let mut random = Random::new(11);
    let n = (FOUR * dim) as usize;
    let (zeros, k, v, d_o) = (vec![T::nearest(0.0); n], draw::<T>(&mut random, n), draw::<T>(&mut random, n), draw::<T>(&mut random, n));
    let poison = || vec![T::nearest(f64::NAN); n];
    let (mut o, mut stats) = (poison(), vec![f32::NAN; FOUR as usize]);
    let call = HostForward::new(T::elements(&zeros), T::elements(&k), T::elements(&v), T::elements_mut(&mut o)).stats(&mut stats);
    executor.prepare(problem.forward()).and_then(|made| made.forward(call)).map_err(|e| e.to_string())?;
    // Q is zero, so all P are equal: every row of O is the average of V's rows, and every row of dV that of dO's rows.
    let dim = dim as usize;
    let average =
        |of: &[T]| -> Vec<f64> { (0..n).map(|at| (0..4).map(|row| of[row * dim + at % dim].value()).sum::<f64>() / 4.0).collect() };
    let mut rounded = judge("o", &o, &average(&v))?;

    let [mut dq, mut dk, mut dv] = [poison(), poison(), poison()];
    let call = HostBackward::new(
        (T::elements(&zeros), T::elements(&k), T::elements(&v)),
        (T::elements(&o), &stats),
        T::elements(&d_o),
        (T::elements_mut(&mut dq), T::elements_mut(&mut dk), T::elements_mut(&mut dv)),
    );
    executor.prepare_backward(&problem).and_then(|made| made.backward(call)).map_err(|e| e.to_string())?;
    rounded += judge("dv", &dv, &average(&d_o))?;
    // dS is computed from the rounded output here, as the executor does.
    let scale = 1.0 / (dim as f64).sqrt();
    let dot = |a: &[T], b: &[T]| a.iter().zip(b).map(|(a, b)| a.value() * b.value()).sum::<f64>();
    let row = |of: &[T], n: usize| of[n * dim..][..dim].to_vec();
    let mut want = Vec::new();
    let mut sizes = Vec::new();
    for query in 0..4 {
        let delta = dot(&row(&d_o, query), &row(&o, query));
        let slope = |key: usize| (dot(&row(&d_o, query), &row(&v, key)) - delta) / 4.0;
        want.extend((0..dim).map(|d| (0..4).map(|key| slope(key) * k[key * dim + d].value()).sum::<f64>() * scale));
        sizes.push(delta.abs());
    }
    // dS is a difference, so its f32 error is relative to the terms of the difference.
    let largest = sizes.into_iter().fold(0.0, f64::max);
    let far = want.iter().zip(&dq).filter(|(want, got)| {
        let step = |x: f64| x.abs().log2().floor().exp2() / T::STEPS;
        (got.value() - **want).abs() > 0.5 * step(**want) + largest / f64::from(1 << 18)
    });
    if let Some((want, got)) = far.last() {
        return Err(format!("dq of {:?} is {}, which is not the nearest to {want}", T::DTYPE, got.value()));
    }
    // About half of the inexact results should round up. If few of them do, the test shows nothing.
    if rounded < n / 4 { Err(format!("only {rounded} of {n} results show anything")) } else { Ok(()) }
}

/// Tests that an executor rounds 16-bit results to nearest, for one query of four heads, and for four queries of one head.
///
/// # Errors
/// Returns a message about the first result that is not the nearest number.
pub fn rounding(executor: &dyn Executor) -> Result<(), String> {
    for seq_q in [1, 4] {
        for dim in [32, 40] {
            of::<f16>(executor, seq_q, dim)?;
            of::<bf16>(executor, seq_q, dim)?;
        }
    }
    Ok(())
}
