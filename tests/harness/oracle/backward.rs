//! The gradient of textbook attention in f64, and how far rounding may move each of its elements.
//!
//! With `P` the weights of a row, `dP = d_o·vᵀ` and `δ = Σ d_o·o`: `dS = P ∘ (dP − δ)` times the slope of a modified score,
//! `dq = scale·dS·k`, `dk = scale·dSᵀ·q`, `dv = Pᵀ·d_o`, the last two summed over the query heads that share a key head.

use super::{Closures, Kept, Problem};

/// Errors of an executor's steps, which are carried through to the gradients to first order. All 0: no error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Of a weight, relative.
    pub weight: f64,
    /// Of a weight as well, for each unit of its row's score magnitude; of a score, relative to its magnitude.
    pub score: f64,
    /// Of a modified score, for each unit of its own roundings.
    pub own: f64,
    /// Of `dP` and `δ`, relative to `Σ |d_o·v|` and `Σ |d_o·o|`.
    pub product: f64,
    /// Of `o`, relative to itself.
    pub output: f64,
    /// Of `o`, relative to `Σ p·|v|`.
    pub computed_output: f64,
    /// The same, for each unit of its row's score magnitude.
    pub computed_output_score: f64,
    /// The same, for each unit of its row's roundings of modified scores.
    pub computed_output_own: f64,
    /// Of `P` and `dS` in front of the second products, relative.
    pub round: f64,
    /// Of the slope of a modified score, besides what its score's error makes of it.
    pub slope: f64,
    /// Of a sum over keys and its result, relative to the sum of magnitudes.
    pub over_keys: f64,
    /// The same of a sum over queries.
    pub over_queries: f64,
    /// The same of a sum over scores, without the rounding of its result.
    pub over_scores: f64,
    /// A weight in f32 that is smaller than this may be 0.
    pub tiny: f64,
    /// Of a rounded number, however small it is.
    pub small: f64,
}

/// One gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradient {
    /// In row-major order.
    pub value: Vec<f64>,
    /// How far rounding may move each; 0 where no query meets a key.
    pub error: Vec<f64>,
}

impl Gradient {
    fn zeros(len: usize) -> Gradient {
        Gradient { value: vec![0.0; len], error: vec![0.0; len] }
    }

    /// Adds `factor` times `row`, where `factor` may be off by `error` and the sum by `sum` of its terms.
    fn add(&mut self, from: usize, row: &[f64], factor: f64, error: f64, sum: f64) {
        let error = error + sum * factor.abs();
        let (value, errors) = (&mut self.value[from..][..row.len()], &mut self.error[from..][..row.len()]);
        for ((value, errors), x) in value.iter_mut().zip(errors).zip(row) {
            *value += factor * x;
            *errors += error * x.abs();
        }
    }

    fn may_be_small(&mut self, from: usize, dim: usize, small: f64) {
        self.error[from..][..dim].iter_mut().for_each(|error| *error += small);
    }
}

/// The gradients by `q`, `k` and `v`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// (batch, heads_q, seq_q, dim_qk).
    pub dq: Gradient,
    /// (batch, heads_kv, seq_kv, dim_qk).
    pub dk: Gradient,
    /// (batch, heads_kv, seq_kv, dim_v).
    pub dv: Gradient,
    /// Of the parameters that are asked for.
    pub along: Vec<Gradient>,
}

/// What a slope may be off by where its score is.
fn slope_error(slope: &dyn Fn(f64, [i64; 4]) -> f64, closures: &Closures<'_>, rates: &Rates, kept: &Kept, place: [i64; 4]) -> f64 {
    let own = closures.rounding.map_or(0.0, |rounding| rounding(kept.raw, place));
    let off = rates.score * kept.size + rates.own * own;
    let here = slope(kept.raw, place);
    let bend = [kept.raw - off, kept.raw + off].map(|score| (slope(score, place) - here).abs());
    bend[0].max(bend[1]) + rates.slope * (1.0 + here.abs())
}

/// Computes the gradients of `Σ o∘d_o` one row at a time; `d_o` in row-major (batch, heads_q, seq_q, dim_v).
pub fn gradients(p: &Problem<'_>, closures: &Closures<'_>, d_o: &[f64], rates: &Rates) -> Gradients {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
    let mut dq = Gradient::zeros(batch * heads_q * seq_q * dim_qk);
    let mut dk = Gradient::zeros(batch * heads_kv * seq_kv * dim_qk);
    let mut dv = Gradient::zeros(batch * heads_kv * seq_kv * dim_v);
    let mut along: Vec<Gradient> = closures.along.iter().map(|a| Gradient::zeros(a.elements)).collect();
    let mut used = vec![false; batch * heads_kv * seq_kv];
    for at in p.rows() {
        let [b, h, i] = at;
        let row = p.row(closures, at);
        let (o, o_magnitude) = p.output(at, &row.kept);
        let q_from = p.query(at, dim_qk);
        let (q, d_o) = (&p.q[q_from..][..dim_qk], &d_o[p.query(at, dim_v)..][..dim_v]);
        let (mut delta, mut size, mut computed) = (0f64, 0f64, 0f64);
        for c in 0..dim_v {
            delta += d_o[c] * o[c];
            size += (d_o[c] * o[c]).abs();
            computed += d_o[c].abs() * o_magnitude[c];
        }
        let of_scores = rates.computed_output_score * row.magnitude + rates.computed_output_own * row.rounding;
        let delta_error = (rates.product + rates.output) * size + (rates.computed_output + of_scores) * computed;
        for kept in &row.kept {
            let (k_from, v_from) = (p.key([b, h], kept.key, dim_qk), p.key([b, h], kept.key, dim_v));
            let (k, v) = (&p.k[k_from..][..dim_qk], &p.v[v_from..][..dim_v]);
            let (mut d_p, mut d_p_size) = (0f64, 0f64);
            for (x, y) in d_o.iter().zip(v) {
                d_p += x * y;
                d_p_size += (x * y).abs();
            }
            let weight = kept.weight;
            let weight_error = weight * (rates.weight + rates.score * row.magnitude + rates.own * row.rounding) + rates.tiny;
            dv.add(v_from, d_o, weight, weight_error + rates.round * weight + rates.small, rates.over_queries);

            let d_modified = weight * (d_p - delta);
            let modified_error = weight_error * (d_p - delta).abs() + weight * (rates.product * d_p_size + delta_error);
            let place = [b, h, i, kept.key].map(|n| n as i64);
            let d_score = d_modified * kept.slope;
            let off = closures.slope.map_or(0.0, |slope| slope_error(slope, closures, rates, kept, place));
            let score_error = modified_error * kept.slope.abs() + d_modified.abs() * off + rates.round * d_score.abs();
            // Whether dS is rounded before it is scaled or after is the executor's choice.
            let factor = p.scale * d_score;
            let error = p.scale.abs() * score_error + rates.small * p.scale.abs().max(1.0);
            dq.add(q_from, k, factor, error, rates.over_keys);
            dk.add(k_from, q, factor, error, rates.over_queries);

            for (gradient, a) in along.iter_mut().zip(closures.along) {
                let slope = (a.slope)(kept.raw, place);
                let off = d_modified.abs() * slope_error(a.slope, closures, rates, kept, place);
                let error = modified_error * slope.abs() + off + rates.round * (d_modified * slope).abs() + rates.small;
                gradient.add((a.place)(place), &[1.0], d_modified * slope, error, rates.over_scores);
            }

            let key = p.key([b, h], kept.key, 1);
            if !std::mem::replace(&mut used[key], true) {
                dk.may_be_small(k_from, dim_qk, rates.small);
                dv.may_be_small(v_from, dim_v, rates.small);
            }
        }
        if !row.kept.is_empty() {
            dq.may_be_small(q_from, dim_qk, rates.small);
        }
    }
    Gradients { dq, dk, dv, along }
}

#[cfg(test)]
mod tests {
    use super::super::{Align, Along, Mask, attention_with};
    use super::*;
    use crate::random::Random;

    const PLAIN: Closures<'static> = Closures { modify: None, slope: None, keep: None, rounding: None, along: &[] };

    /// Two keys with weights 1/4 and 3/4: dP is (1, 5), δ is 4, and dS is (−3/4, 3/4).
    #[test]
    fn a_row_that_can_be_done_by_hand() {
        let ln3 = 3f64.ln();
        let p = Problem { shape: [1, 1, 1, 1, 2, 1, 2], q: &[2.0], k: &[0.0, ln3], v: &[1.0, -2.0, 5.0, 6.0], scale: 0.5, masks: &[] };
        let got = gradients(&p, &PLAIN, &[1.0, 0.0], &Rates::default());
        for (gradient, want) in [(&got.dq, vec![0.375 * ln3]), (&got.dk, vec![-0.75, 0.75]), (&got.dv, vec![0.25, 0.0, 0.75, 0.0])] {
            assert!(gradient.value.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-14), "{got:?}");
            assert!(gradient.error.iter().all(|e| *e == 0.0));
        }
    }

    /// Each kind of error, alone, in the gradients of the same row.
    #[test]
    fn errors_are_carried_through() {
        let p = Problem { shape: [1, 1, 1, 1, 2, 1, 1], q: &[2.0], k: &[0.0, 3f64.ln()], v: &[1.0, 5.0], scale: 0.5, masks: &[] };
        let errors = |rates: Rates| {
            let got = gradients(&p, &PLAIN, &[1.0], &rates);
            [got.dq.error[0], got.dk.error[0], got.dk.error[1], got.dv.error[0], got.dv.error[1]]
        };
        let half_ln3 = 0.5 * 3f64.ln();
        let none = Rates::default();
        for (rates, want) in [
            (Rates { weight: 1.0, ..none }, [0.75 * half_ln3, 0.75, 0.75, 0.25, 0.75]),
            (Rates { score: 1.0, ..none }, [1.5 * half_ln3 * half_ln3, 1.5 * half_ln3, 1.5 * half_ln3, 0.5 * half_ln3, 1.5 * half_ln3]),
            // |dP| and |δ| are (1, 5) and 4.
            (Rates { product: 1.0, ..none }, [6.75 * half_ln3, 1.25, 6.75, 0.0, 0.0]),
            (Rates { output: 1.0, ..none }, [3.0 * half_ln3, 1.0, 3.0, 0.0, 0.0]),
            (Rates { computed_output: 1.0, ..none }, [3.0 * half_ln3, 1.0, 3.0, 0.0, 0.0]),
            (Rates { round: 1.0, ..none }, [0.75 * half_ln3, 0.75, 0.75, 0.25, 0.75]),
            (Rates { over_keys: 1.0, ..none }, [0.75 * half_ln3, 0.0, 0.0, 0.0, 0.0]),
            (Rates { over_queries: 1.0, ..none }, [0.0, 0.75, 0.75, 0.25, 0.75]),
            (Rates { tiny: 1.0, ..none }, [half_ln3, 3.0, 1.0, 1.0, 1.0]),
            (Rates { small: 1.0, ..none }, [2.0 * half_ln3 + 1.0, 3.0, 3.0, 2.0, 2.0]),
        ] {
            let got = errors(rates);
            assert!(got.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-13), "{rates:?}: {got:?}, not {want:?}");
        }
    }

    /// The derivative of `Σ o∘d_o` by one element of an operand.
    fn difference(p: &Problem<'_>, closures: &Closures<'_>, d_o: &[f64], operand: usize, at: usize) -> f64 {
        const STEP: f64 = 1e-6;
        let mut sums = [-STEP, STEP].map(|step| {
            let mut operands = [p.q.to_vec(), p.k.to_vec(), p.v.to_vec()];
            operands[operand][at] += step;
            let [q, k, v] = &operands;
            let o = attention_with(&Problem { q, k, v, ..p.clone() }, closures).o;
            o.iter().zip(d_o).map(|(x, y)| x * y).sum::<f64>() / (2.0 * STEP)
        });
        sums[0] = -sums[0];
        sums[0] + sums[1]
    }

    fn agrees_with_differences(shape: [usize; 7], masks: &[Mask], closures: &Closures<'_>, seed: u64) -> Gradients {
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
        let mut random = Random::new(seed);
        let mut draw = |n: usize| (0..n).map(|_| random.normal()).collect::<Vec<f64>>();
        let q = draw(batch * heads_q * seq_q * dim_qk);
        let (k, v) = (draw(batch * heads_kv * seq_kv * dim_qk), draw(batch * heads_kv * seq_kv * dim_v));
        let d_o = draw(batch * heads_q * seq_q * dim_v);
        let p = Problem { shape, q: &q, k: &k, v: &v, scale: 0.7, masks };
        let got = gradients(&p, closures, &d_o, &Rates::default());
        for (operand, gradient) in [&got.dq, &got.dk, &got.dv].into_iter().enumerate() {
            assert_eq!(gradient.value.len(), [q.len(), k.len(), v.len()][operand]);
            for (at, &value) in gradient.value.iter().enumerate() {
                let want = difference(&p, closures, &d_o, operand, at);
                assert!((value - want).abs() < 1e-7, "{shape:?} {masks:?}: element {at} of operand {operand} is {value}, not {want}");
            }
        }
        got
    }

    #[test]
    fn gradients_are_limits_of_differences() {
        agrees_with_differences([1, 1, 1, 1, 1, 1, 1], &[], &PLAIN, 1);
        agrees_with_differences([2, 2, 2, 3, 5, 4, 3], &[], &PLAIN, 2);
        agrees_with_differences([1, 6, 2, 3, 4, 3, 5], &[], &PLAIN, 3);
        agrees_with_differences([1, 4, 1, 5, 5, 3, 2], &[Mask::causal()], &PLAIN, 4);
        agrees_with_differences([1, 2, 1, 4, 7, 3, 2], &[Mask::causal_bottom_right(), Mask::prefix_lm(2)], &PLAIN, 5);
        agrees_with_differences([1, 2, 2, 7, 6, 2, 3], &[Mask::window(Some(2), Some(1), Align::BottomRight)], &PLAIN, 6);
    }

    #[test]
    fn rows_without_keys_and_keys_without_queries_have_gradients_of_zero() {
        // Queries 0 and 1 see nothing.
        let got = agrees_with_differences([1, 2, 1, 5, 3, 2, 2], &[Mask::causal_bottom_right()], &PLAIN, 7);
        assert!(got.dq.value[..4].iter().all(|x| *x == 0.0) && got.dq.value[4..10].iter().any(|x| *x != 0.0));
        // Keys 2 and later are not seen.
        let rates = Rates { weight: 1.0, small: 1.0, tiny: 1.0, ..Rates::default() };
        let p = Problem { shape: [1, 1, 1, 2, 4, 1, 1], q: &[1.0; 2], k: &[1.0; 4], v: &[1.0; 4], scale: 1.0, masks: &[Mask::causal()] };
        let got = gradients(&p, &PLAIN, &[1.0; 2], &rates);
        for gradient in [&got.dk, &got.dv] {
            assert_eq!((&gradient.value[2..], &gradient.error[2..]), (&[0.0; 2][..], &[0.0; 2][..]));
            assert!(gradient.error[..2].iter().all(|e| *e > 0.0));
        }
    }

    #[test]
    fn modified_scores_have_the_slope_of_their_function() {
        // A cap, and something that depends on every index.
        let cap = |score: f64, _: [i64; 4]| 1.5 * (score / 1.5).tanh();
        let cap_slope = |score: f64, _: [i64; 4]| 1.0 - (score / 1.5).tanh().powi(2);
        let bias = |score: f64, [b, h, q, k]: [i64; 4]| score * score * 0.1 * (h + 1) as f64 + (b + q - k) as f64 * 0.3;
        let bias_slope = |score: f64, [_, h, ..]: [i64; 4]| 0.2 * score * (h + 1) as f64;
        let keep = |[b, h, q, k]: [i64; 4]| (b + h + q + 2 * k) % 3 != 0;
        let capped = Closures { modify: Some(&cap), slope: Some(&cap_slope), ..PLAIN };
        agrees_with_differences([2, 4, 2, 3, 4, 3, 2], &[], &capped, 8);
        agrees_with_differences([1, 2, 1, 4, 4, 3, 2], &[Mask::causal()], &Closures { keep: Some(&keep), ..capped }, 9);
        agrees_with_differences(
            [2, 2, 1, 3, 4, 3, 2],
            &[],
            &Closures { modify: Some(&bias), slope: Some(&bias_slope), keep: Some(&keep), ..PLAIN },
            10,
        );
    }

    /// A factor for each head and an addend for each pair of a query and a key.
    #[test]
    fn gradients_of_parameters_are_limits_of_differences() {
        let shape = [2, 4, 2, 3, 4, 3, 2];
        let mut random = Random::new(11);
        let mut draw = |n: usize| (0..n).map(|_| random.normal()).collect::<Vec<f64>>();
        let (q, k, v, d_o) = (draw(2 * 4 * 3 * 3), draw(2 * 2 * 4 * 3), draw(2 * 2 * 4 * 2), draw(2 * 4 * 3 * 2));
        let (factors, addends) = (draw(4), draw(3 * 4));
        let p = Problem { shape, q: &q, k: &k, v: &v, scale: 0.7, masks: &[Mask::causal()] };
        let place = |[_, _, q, k]: [i64; 4]| (q * 4 + k) as usize;
        let head = |at: [i64; 4]| at[1] as usize;
        let sum = |factors: &[f64], addends: &[f64]| {
            let modify = |score: f64, at: [i64; 4]| score * factors[head(at)] + addends[place(at)];
            let o = attention_with(&p, &Closures { modify: Some(&modify), ..PLAIN }).o;
            o.iter().zip(&d_o).map(|(x, y)| x * y).sum::<f64>()
        };
        let modify = |score: f64, at: [i64; 4]| score * factors[head(at)] + addends[place(at)];
        let along =
            [Along { slope: &|score, _| score, place: &head, elements: 4 }, Along { slope: &|_, _| 1.0, place: &place, elements: 12 }];
        let closures = Closures { modify: Some(&modify), slope: Some(&|_, at| factors[head(at)]), along: &along, ..PLAIN };
        let rates = Rates { weight: 1.0, ..Rates::default() };
        let got = gradients(&p, &closures, &d_o, &rates);
        const STEP: f64 = 1e-6;
        for (which, n) in [(0, 4), (1, 12)] {
            assert_eq!(got.along[which].value.len(), n);
            for at in 0..n {
                let moved = |step: f64| {
                    let mut all = [factors.clone(), addends.clone()];
                    all[which][at] += step;
                    sum(&all[0], &all[1])
                };
                let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                let value = got.along[which].value[at];
                assert!((value - want).abs() < 1e-7, "element {at} of parameter {which} is {value}, not {want}");
                // Where no query meets a key there is nothing, and nothing that it may be off by.
                if which == 1 && at % 4 > at / 4 {
                    assert_eq!((value, got.along[which].error[at]), (0.0, 0.0));
                }
            }
        }
    }

    #[test]
    fn a_slope_may_be_off_where_its_score_is() {
        let p = Problem { shape: [1, 1, 1, 1, 2, 1, 1], q: &[2.0], k: &[0.0, 1.0], v: &[1.0, 5.0], scale: 0.5, masks: &[] };
        let closures = Closures { modify: Some(&|s, _| s * s), slope: Some(&|s, _| 2.0 * s), ..PLAIN };
        let only = Rates { score: 1e-3, ..Rates::default() };
        let got = gradients(&p, &closures, &[1.0], &only);
        // Key 1 has score 1 and slope 2, which may be 2e-3 away; its weight may be off by 3e-3 of itself (2·1 + 1).
        let d_s = got.dk.value[1] / (0.5 * 2.0) / 2.0;
        let want = d_s * (2e-3 + 2.0 * 3e-3);
        assert!((got.dk.error[1] - want).abs() < 1e-12, "{} {want}", got.dk.error[1]);
        assert_eq!(gradients(&p, &closures, &[1.0], &Rates { slope: 1.0, ..Rates::default() }).dk.error[1], 3.0 * d_s);
    }
}
