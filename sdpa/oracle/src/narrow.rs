//! 8-bit floats: which tensors are scaled before they are rounded, and the errors that this causes.
//!
//! Operands and results of such a problem are passed as the numbers that they stand for. Let `u` be half the distance from 1 to the next number (2⁻⁴ of E4M3,
//! 2⁻³ of E5M2), and `t` half the smallest number (2⁻¹⁰ and 2⁻¹⁷):
//!
//! - a number that is scaled and rounded is off by `u` of itself, or by `t` over the scale where it is tiny. That holds for P whether it is divided by the sum
//!   of its row before or after rounding: P is never above 1, and the sum is not below 1;
//! - tensor cores add products of 8-bit floats 32 at a time to sums that keep 13 bits after the binary point of the largest addend (Hopper; DeepSeek-V3,
//!   section 3.3.2). The error is `⌈n / 32⌉·2⁻¹³` of the sum of magnitudes, for scores, outputs and gradients;
//! - a number beyond the largest one of the type becomes the largest one.

use crate::tolerance::Element;

/// The scales and types of the tensors that an executor rounds to 8-bit floats (FP8).
#[derive(Clone, Copy, Debug)]
pub struct Narrow {
    /// The factor by which P is multiplied before it is rounded to 8 bits.
    pub weights: f64,
    /// The factor by which the output is multiplied before it is rounded. The output has the type [`stored`](crate::Problem::stored) of
    /// the problem.
    pub o: f64,
    /// The factor by which dS is multiplied before it is rounded to 8 bits; dS already includes the attention scale.
    pub slopes: f64,
    /// Type to which dS is rounded. It is the type of the gradient of the output.
    pub slope: Element,
    /// The factors by which `dq`, `dk` and `dv` are multiplied before they are rounded.
    pub gradients: [f64; 3],
    /// Type to which `dq`, `dk` and `dv` are rounded.
    pub gradient: Element,
}

impl Narrow {
    /// Creates the scales of a forward pass: `weights` is the factor of P, and `o` that of the output.
    #[must_use]
    pub fn forward(weights: f64, o: f64) -> Narrow {
        Narrow { weights, o, slopes: 1.0, slope: Element::E4M3, gradients: [1.0; 3], gradient: Element::E4M3 }
    }
}

/// Returns the error of a sum of `n` products of 8-bit floats on tensor cores, relative to the sum of their magnitudes.
#[must_use]
pub fn products_of(n: usize) -> f64 {
    n.div_ceil(32) as f64 / 8192.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Problem, Statistics, Tensor, attention, check};

    /// Two keys with P = 1/4 and 3/4: outputs 4 and 4 of values 1, 5 and −2, 6.
    #[test]
    fn weights_and_results_may_be_off_by_half_a_step() {
        let (query, keys, values) = (vec![1.0], vec![0.0, 3f64.ln()], vec![1.0, -2.0, 5.0, 6.0]);
        let problem = Problem {
            shape: [1, 1, 1, 1, 2, 1, 2],
            q: Tensor::dense(&query, [1; 4]),
            k: Tensor::dense(&keys, [1, 1, 2, 1]),
            v: Tensor::dense(&values, [1, 1, 2, 2]),
            element: Element::E4M3,
            stored: Element::E4M3,
            scale: 1.0,
            masks: &[],
            modify: None,
            sink: None,
            dropout: None,
            narrow: Some(Narrow::forward(256.0, 16.0)),
            fixed_point: None,
        };
        assert!((attention(&problem).o[0] - 4.0).abs() < 1e-12);
        let ratio = |narrow: Option<Narrow>, o: f64| {
            let o = vec![o, o];
            check(&Problem { narrow, ..problem }, Tensor::dense(&o, [1, 1, 1, 2]), Statistics::default(), &|_| ()).o.ratio
        };
        // Rounding may move the output by a sixteenth of 4, and P · V by a sixteenth of the sum of magnitudes. The limit is a little
        // more.
        let off = (4.0 + 4.0) / 16.0;
        assert!(ratio(problem.narrow, 4.0 + off) <= 1.0 && ratio(problem.narrow, 4.0 - 1.2 * off) > 1.0);
        assert!(ratio(problem.narrow, f64::NAN) > 1.0);
        // A number that the scale moves out of range saturates to the largest one.
        let far = Some(Narrow::forward(256.0, 1000.0));
        assert!(ratio(far, 0.448) <= 1.0 && ratio(far, 4.0) > 1.0 && ratio(far, 0.3) > 1.0);
    }

    #[test]
    fn weights_that_are_tiny_for_their_scale_may_be_lost() {
        // P of the second key is e⁻⁹ = 1.2e-4. Scaled by 1, it is below half of the smallest 8-bit number and may become 0. Scaled by
        // 256, it may not.
        let (query, keys, values) = (vec![1.0], vec![0.0, -9.0], vec![0.0, 1.0]);
        let problem = |weights: f64| Problem {
            shape: [1, 1, 1, 1, 2, 1, 1],
            q: Tensor::dense(&query, [1; 4]),
            k: Tensor::dense(&keys, [1, 1, 2, 1]),
            v: Tensor::dense(&values, [1, 1, 2, 1]),
            element: Element::E4M3,
            stored: Element::F32,
            scale: 1.0,
            masks: &[],
            modify: None,
            sink: None,
            dropout: None,
            narrow: Some(Narrow::forward(weights, 1.0)),
            fixed_point: None,
        };
        let nothing =
            |weights: f64| check(&problem(weights), Tensor::dense(&vec![0f64], [1; 4]), Statistics::default(), &|_| ()).o.ratio <= 1.0;
        assert!(nothing(1.0) && !nothing(256.0));
    }
}
