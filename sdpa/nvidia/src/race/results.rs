//! Compares results of two contenders, up to rounding.

use super::memory::Results;

/// Tolerances relative to an element's magnitude, and to the root mean square of its tensor: four times the observed difference of f16 and bf16
/// engines.
const TOLERANCE: [f32; 2] = [0.03, 0.05];

/// Returns whether the results of two contenders are close.
pub(super) fn close(want: &Results, got: &Results) -> bool {
    want.iter().all(|(name, want)| got.iter().any(|(other, got)| other == name && near(want, got)))
}

fn near(want: &[f32], got: &[f32]) -> bool {
    let finite = want.iter().filter(|x| x.is_finite());
    let squares: f64 = finite.clone().map(|x| f64::from(*x).powi(2)).sum();
    let typical = (squares / finite.count().max(1) as f64).sqrt() as f32;
    let same = |(want, got): (&f32, &f32)| {
        // The gaps between rows are NaN in both, because results are filled with NaN first and no pass writes the gaps.
        let both_nan = want.is_nan() && got.is_nan();
        let near = want.is_finite() && (want - got).abs() <= TOLERANCE[0] * want.abs() + TOLERANCE[1] * typical;
        both_nan || want == got || near
    };
    want.len() == got.len() && want.iter().zip(got).all(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_close_and_nothing_else() {
        let tensor = |x: &[f32]| vec![("o".to_owned(), x.to_vec())];
        let want = tensor(&[1.0, -2.0, 0.0, f32::NEG_INFINITY, f32::NAN]);
        assert!(close(&want, &tensor(&[1.01, -1.98, 0.02, f32::NEG_INFINITY, f32::NAN])));
        for wrong in [
            [1.2, -2.0, 0.0, f32::NEG_INFINITY, f32::NAN],
            [f32::NAN, -2.0, 0.0, f32::NEG_INFINITY, f32::NAN],
            [1.0, 2.0, 0.0, f32::NEG_INFINITY, f32::NAN],
            [1.0, -2.0, 0.2, f32::NEG_INFINITY, f32::NAN],
            [1.0, -2.0, 0.0, -1e30, f32::NAN],
            [1.0, -2.0, 0.0, f32::NEG_INFINITY, 0.0],
        ] {
            assert!(!close(&want, &tensor(&wrong)), "{wrong:?}");
        }
        assert!(!close(&want, &tensor(&[1.0])) && !close(&want, &Vec::new()));
    }
}
