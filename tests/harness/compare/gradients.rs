//! Tolerances of gradients.
//!
//! They are derived as those of the forward pass, from what executors do. `u` and `e` are the unit roundoffs of the operands' type
//! and of f32, `Σ(n) = 4·√n·e` the error of a sum of `n` terms in f32 relative to the sum of magnitudes, `M` the score magnitude
//! of a row (the largest `Σ |q·k|·|scale|`), `n` the number of keys. The oracle carries these errors through to each element of a
//! gradient, to first order and as sums of magnitudes, so that cancellation is not the executor's fault:
//!
//! - A weight is `exp(S − stats)`. `S` is off by `Σ(dim_qk)·M`; scaling it, its step to powers of two, that of `stats`, the
//!   rounding of `stats` to f32 and the difference are three roundings of `|S| ≤ M` and three of `|stats| ≤ M + ln n`; the
//!   exponential is good to `8·e`. Relative to the weight: `(Σ(dim_qk) + 6·e)·M + (8 + 3·ln n)·e`.
//! - `dP` and `δ` are sums of `dim_v` products, which are subtracted: `Σ(dim_v) + 2·e` of `Σ |d_o·v|` and of `Σ |d_o·o|`.
//! - `o` was rounded when it was stored, and `δ` is made of that: `u` of `Σ |d_o·o|`.
//! - `P` is rounded to the operands' type in front of its product with `d_o`, `dS` in front of those with `k` and `q`; the
//!   product with `dP − δ`, the scale and the difference are rounded in f32 besides: `u + 4·e` of `|dS|`, of `P` too.
//! - Sums over keys and over the queries of all heads of a group run in f32, and the result is rounded: `Σ(terms) + u`.
//!   Where a group has several heads, each head's part may be rounded to the operands' type before they are added: `u` more.
//! - A modified score is off by its own roundings besides (see `compare`), `e` for each; the slope is off by what that and the error
//!   of the score make of it, and by `8·e` of itself and of 1.
//! - The gradient of a parameter is a sum over up to all scores in f32, rounded to its own type.
//! - Small numbers have no relative errors. A weight below the smallest normal f32 may be 0 (`2⁻¹²⁶`); what is rounded to f16 is
//!   off by up to `2⁻²⁵`, what is rounded to another type by up to `2⁻¹²⁶`, however small it is.
//!
//! Where `o` and `stats` are the executor's own (a chained pass), `o` is off by what the forward pass may be off by, of `Σ p·|v|`,
//! in place of `u` of `|o|`; and so are `stats`, which the weights take over.
//!
//! The factor of 2 is there as in the forward pass. Where no query meets a key, all of it is 0: such a gradient is exactly 0.

use super::{F32_ROUNDOFF, Measured, least, roundoff, sum_of, worst};
use crate::oracle::{Gradients, Rates};
use sdpa::DType;

/// The errors that an executor may make, for extents (batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v).
///
/// With `chained`, `o` and `stats` are the executor's own.
pub fn rates(dtype: DType, shape: [usize; 7], chained: bool) -> Rates {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
    let (u, e) = (roundoff(dtype), F32_ROUNDOFF);
    let group = heads_q / heads_kv;
    let heads_part = if group > 1 { u } else { 0.0 };
    let ln_n = (seq_kv as f64).ln();
    let alone = Rates {
        weight: (8.0 + 3.0 * ln_n) * e,
        score: sum_of(dim_qk) + 6.0 * e,
        own: e,
        product: sum_of(dim_v) + 2.0 * e,
        output: u,
        computed_output: 0.0,
        computed_output_score: 0.0,
        computed_output_own: 0.0,
        round: u + 4.0 * e,
        slope: 8.0 * e,
        over_keys: sum_of(seq_kv) + u,
        over_queries: sum_of(group * seq_q) + u + heads_part,
        over_scores: sum_of(batch * heads_q * seq_q * seq_kv),
        tiny: f64::from(f32::MIN_POSITIVE),
        small: least(dtype),
    };
    if !chained {
        return alone;
    }
    // The same as `compare` allows of `o` and `stats`, less its factor of 2, which stands in front of everything here.
    Rates {
        weight: alone.weight + sum_of(seq_kv) + (16.0 + 2.0 * ln_n) * e,
        score: alone.score + sum_of(dim_qk) + 2.0 * e,
        output: 0.0,
        computed_output: 2.0 * u + 2.0 * sum_of(seq_kv) + 16.0 * e,
        own: 2.0 * alone.own,
        computed_output_score: 2.0 * sum_of(dim_qk),
        computed_output_own: 2.0 * e,
        ..alone
    }
}

/// How far gradients are from the oracle's.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct GradientDistance {
    /// The largest of ‖got − want‖ / ‖want‖ of the three, less those that are no larger than their tolerance.
    pub relative: f64,
    /// The largest error of `dq` over its tolerance: above 1 fails.
    pub dq: f64,
    /// The same of `dk`.
    pub dk: f64,
    /// The same of `dv`.
    pub dv: f64,
    /// The largest of those of parameters.
    pub along: f64,
    /// The first element past its tolerance, in words.
    pub first: Option<Box<str>>,
}

impl GradientDistance {
    /// Within every tolerance; NaN is not.
    pub fn passes(&self) -> bool {
        self.worst() <= 1.0
    }
}

impl Measured for GradientDistance {
    fn worst(&self) -> f64 {
        self.dq.max(self.dk).max(self.dv).max(self.along)
    }

    fn told(&self) -> String {
        let GradientDistance { relative, dq, dk, dv, along, first } = self;
        let first = first.as_ref().map_or_else(String::new, |first| format!("; {first}"));
        let along = if *along > 0.0 { format!(", parameters {along:.2}") } else { String::new() };
        format!("{relative:.1e} relative, dq {dq:.2}, dk {dk:.2}, dv {dv:.2}{along} of the tolerance{first}")
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

/// Compares `dq`, `dk` and `dv`, in the oracle's order, and the gradients of parameters with the oracle's.
pub fn compare_gradients(want: &Gradients, got: [&[f64]; 3], along: &[GotAlong]) -> GradientDistance {
    let mut distance = GradientDistance::default();
    let GradientDistance { relative, dq, dk, dv, along: parameters, first } = &mut distance;
    let mut all = vec![("dq", &want.dq, got[0], dq, None), ("dk", &want.dk, got[1], dk, None), ("dv", &want.dv, got[2], dv, None)];
    let mut ratios = vec![if along.len() == want.along.len() { 0.0 } else { f64::INFINITY }; along.len().max(1)];
    for ((want, got), ratio) in want.along.iter().zip(along).zip(&mut ratios) {
        all.push(("a parameter", want, &got.value, ratio, Some(got.dtype)));
    }
    for (name, want, got, ratio, stored) in all {
        if got.len() != want.value.len() {
            *ratio = f64::INFINITY;
            continue;
        }
        let (mut squares, mut norm, mut errors) = (0f64, 0f64, 0f64);
        for (n, ((&got, &expected), &error)) in got.iter().zip(&want.value).zip(&want.error).enumerate() {
            // An error of 0 is that of a gradient which is exactly 0.
            let stored = stored.filter(|_| error > 0.0).map_or(0.0, |dtype| least(dtype).max(roundoff(dtype) * expected.abs()));
            let error = error + stored;
            *ratio = worst(*ratio, got - expected, 2.0 * error);
            if *ratio > 1.0 && first.is_none() {
                *first = Some(format!("element {n} of {name} is {got:e}, not {expected:e} to {:.1e}", 2.0 * error).into());
            }
            squares += (got - expected).powi(2);
            norm += expected * expected;
            errors += error * error;
        }
        if norm > errors {
            *relative = relative.max((squares / norm).sqrt());
        }
    }
    *parameters = ratios.into_iter().fold(0.0, f64::max);
    distance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{Closures, Problem, gradients};
    use sdpa::Mask;

    /// Query 1 has weights 1/4 and 3/4, and nobody sees key 2.
    const SHAPE: [usize; 7] = [1, 1, 1, 2, 3, 1, 1];

    fn want(dtype: DType, chained: bool) -> Gradients {
        let p = Problem {
            shape: SHAPE,
            q: &[2.0, 2.0],
            k: &[1.0, 1.0 + 3f64.ln(), 1.0],
            v: &[1.0, 5.0, 3.0],
            scale: 0.5,
            masks: &[Mask::causal()],
        };
        gradients(&p, &Closures::default(), &[1.0, 1.0], &rates(dtype, SHAPE, chained))
    }

    #[test]
    fn errors_of_either_sign_nan_and_gradients_of_nothing_fail() {
        let want = want(DType::BF16, false);
        let right = [want.dq.value.clone(), want.dk.value.clone(), want.dv.value.clone()];
        let passes = |got: &[Vec<f64>; 3]| compare_gradients(&want, [&got[0], &got[1], &got[2]], &[]).passes();
        assert!(passes(&right));
        for (gradient, at) in [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
            for sign in [-1.0, 1.0] {
                let off_by = |units: f64| {
                    let mut got = right.clone();
                    got[gradient][at] += sign * units / 256.0;
                    passes(&got)
                };
                assert!(off_by(2.0) && !off_by(12.0), "element {at} of {gradient}");
            }
            let mut got = right.clone();
            got[gradient][at] = f64::NAN;
            assert!(!passes(&got));
        }
        for gradient in [1, 2] {
            for wrong in [1e-30, -1e-45, f64::NAN] {
                let mut got = right.clone();
                got[gradient][2] = wrong;
                assert!(!passes(&got), "{wrong} where no query meets a key");
            }
            let mut got = right.clone();
            got[gradient][2] = -0.0;
            assert!(passes(&got));
        }
        assert!(!compare_gradients(&want, [&right[0][..1], &right[1], &right[2]], &[]).passes());
    }

    #[test]
    fn a_gradient_that_is_stored_in_a_small_type_is_rounded_as_that_type_rounds() {
        let mut want = want(DType::F32, false);
        let of = |value: [f64; 2], error: f64| crate::oracle::Gradient { value: value.to_vec(), error: vec![error, 0.0] };
        let zeros = want.dq.value.clone();
        let right = [zeros, want.dk.value.clone(), want.dv.value.clone()];
        // Between two numbers of f16, whose distance there is 2⁻²⁴; 0 is exact.
        let (value, half) = (1.5 / f64::from(1u32 << 24), 0.5 / f64::from(1u32 << 24));
        want.along = vec![of([value, 0.0], 1e-12)];
        let passes = |dtype, got: [f64; 2]| {
            let along = [GotAlong { dtype, value: got.to_vec() }];
            compare_gradients(&want, [&right[0], &right[1], &right[2]], &along).passes()
        };
        assert!(passes(DType::F16, [value + half, 0.0]) && passes(DType::F16, [value - half, 0.0]));
        assert!(!passes(DType::F16, [value + 3.0 * half, 0.0]));
        assert!(!passes(DType::F32, [value + half, 0.0]) && !passes(DType::F16, [value, half]));
    }

    #[test]
    fn a_narrower_type_and_a_chained_pass_are_allowed_more() {
        let all = |g: Gradients| [g.dq.error, g.dk.error, g.dv.error].concat();
        let bf16 = all(want(DType::BF16, false));
        for (less, more, factor) in [
            (all(want(DType::F32, false)), all(want(DType::F16, false)), 50.0),
            (all(want(DType::F16, false)), bf16.clone(), 6.0),
            (bf16.clone(), all(want(DType::BF16, true)), 1.0),
        ] {
            for (less, more) in less.iter().zip(&more) {
                assert!((*less == 0.0 && *more == 0.0) || factor * less <= *more, "{less} {more}");
            }
        }
    }
}
