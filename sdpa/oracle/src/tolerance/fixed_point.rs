//! The error of `dq` in fixed point.
//!
//! An executor may round the part of `dq` from each 128 keys to an integer, since integers have the same sum in any order. The unit is a power of two, at most
//! 2⁻²⁹ times a bound of the complete sum. So each part rounds by at most 2⁻³⁰ times the bound: an absolute error, which elements much smaller than the
//! others of their row notice. The bound here is that of the whole problem, from `|dP| ≤ max |d_o| · max ‖v‖₁` and `|δ| ≤ max |dP|`.

use super::gradients::Rates;
use crate::{Problem, Tensor};

/// Keys of a part.
const KEYS: usize = 128;

/// Returns the largest number of `measure` over the rows of a tensor, without infinities and NaN.
fn largest(tensor: &Tensor<'_>, [batch, heads, rows, dim]: [usize; 4], measure: fn(&[f64]) -> f64) -> f64 {
    let mut row = vec![0.0; dim];
    let mut most = 0.0f64;
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..rows {
                tensor.read([b, h, i], &mut row);
                row.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
                most = most.max(measure(&row));
            }
        }
    }
    most
}

fn most(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |most, x| most.max(x.abs()))
}

fn sum(row: &[f64]) -> f64 {
    row.iter().map(|x| x.abs()).sum()
}

impl Rates {
    /// Adds the error of `dq` in fixed point, if the executor may sum so.
    pub(crate) fn in_fixed_point(mut self, p: &Problem<'_>, d_o: &Tensor<'_>) -> Rates {
        let Some(gain) = p.fixed_point else { return self };
        let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = p.shape;
        let d_p = largest(d_o, [batch, heads_q, seq_q, dim_v], most) * largest(&p.v, [batch, heads_kv, seq_kv, dim_v], sum);
        let kept = p.dropout.map_or(1.0, |dropout| 1.0 - dropout.p);
        let bound = 2.0 * d_p / kept * largest(&p.k, [batch, heads_kv, seq_kv, dim_qk], most) * gain;
        // All tolerances are doubled.
        self.small_results[0] += seq_kv.div_ceil(KEYS) as f64 * bound * p.scale.abs() * 0.5f64.powi(31);
        self
    }
}

#[cfg(test)]
mod tests {
    use crate::backward::check_gradients;
    use crate::{Element, Given, Problem, Tensor};

    /// An element of `dq` whose keys are small, beside one whose keys are large.
    #[test]
    fn a_small_element_may_have_the_error_of_its_row_and_no_more() {
        let (q, k, v, d_o) = (vec![0.0; 2], vec![1e-5, 2.0, 0.0, 0.0], vec![3.0, -1.0], vec![4.0]);
        let problem = Problem {
            shape: [1, 1, 1, 1, 2, 2, 1],
            q: Tensor::dense(&q, [1, 1, 1, 2]),
            k: Tensor::dense(&k, [1, 1, 2, 2]),
            v: Tensor::dense(&v, [1, 1, 2, 1]),
            element: Element::F32,
            stored: Element::F32,
            scale: 1.0,
            masks: &[],
            modify: None,
            sink: None,
            dropout: None,
            narrow: None,
            fixed_point: None,
        };
        let d_o = Tensor::dense(&d_o, [1, 1, 1, 1]);
        let want = crate::backward::gradients(&problem, d_o, Given::Rounded);
        // P is one half, dP 12 and -4, δ 4.
        assert!((want.dq.value[0] - 4e-5).abs() < 1e-12);
        let ratio = |fixed_point: Option<f64>, off: f64| {
            let dq = vec![want.dq.value[0] + off, want.dq.value[1]];
            let rest = [(&want.dk.value, 2), (&want.dv.value, 1)].map(|(values, dim)| Tensor::dense(values, [1, 1, 2, dim]));
            let got = [Tensor::dense(&dq, [1, 1, 1, 2]), rest[0], rest[1]];
            check_gradients(&Problem { fixed_point, ..problem }, d_o, Given::Rounded, &got, &[], &|_| ()).operands[0].worst.ratio
        };
        // The bound is 2 · 4 · 3 · 2 = 48.
        let unit = 48.0 * 0.5f64.powi(30);
        assert!(ratio(None, 0.9 * unit) > 1.0 && ratio(Some(1.0), 0.9 * unit) <= 1.0);
        assert!(ratio(Some(1.0), 1.2 * unit) > 1.0 && ratio(Some(2.0), 1.2 * unit) <= 1.0);
        assert!(ratio(Some(1.0), f64::NAN) > 1.0 && ratio(Some(1.0), -want.dq.value[0]) > 1.0);
    }
}
