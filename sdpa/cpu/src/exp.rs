//! Vectorised `2^x`.

use super::isa::mul_add;
use pulp::Simd;
use std::f32::consts::LN_2;

/// Minimax coefficients of `2^f` on [-1/2, 1/2], highest power first. The relative error is below 2e-9, and `2^0` is exactly 1.
const COEFFICIENTS: [f32; 7] = [0.000_153_533_44, 0.001_339_887_4, 0.009_618_438, 0.055_503_324, 0.240_226_48, LN_2, 1.0];

/// `1.5 * 2^23 + 127`: adding it rounds to an integer, and leaves that integer with the exponent bias in the low bits.
const ROUND: f32 = 12_583_039.0;

/// Returns `2^x` for `x <= 0`, within 1.5 ulp (2 without fused multiply-add).
///
/// If `2^x` is below `2^-126.5` (also for -inf), the result is exactly 0: there are no subnormal results. NaN gives NaN. Above 127 the result is undefined.
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let floor = simd.splat_f32s(-127.0);
    // Compare and select instead of `max`, whose result for NaN differs between instruction sets.
    let x = simd.select_f32s(simd.less_than_f32s(x, floor), floor, x);
    let rounded = simd.add_f32s(x, simd.splat_f32s(ROUND));
    let f = simd.sub_f32s(x, simd.sub_f32s(rounded, simd.splat_f32s(ROUND)));
    let mut p = simd.splat_f32s(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        p = mul_add(simd, p, f, simd.splat_f32s(*c));
    }
    // The shift removes everything except the biased exponent. An exponent of -127 gives the factor 0.
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(rounded), simd.splat_u32s(23));
    simd.mul_f32s(p, simd.transmute_f32s_u32s(power))
}

#[cfg(test)]
mod tests {
    use super::exp2;
    use crate::isa::Isa;
    use pulp::{Simd, WithSimd};

    struct Map<'a>(&'a mut [f32]);

    impl WithSimd for Map<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for x in S::as_mut_simd_f32s(self.0).0 {
                *x = exp2(simd, *x);
            }
        }
    }

    fn map(isa: Isa, x: f32) -> f32 {
        let mut lanes = [x; 16];
        isa.run(Map(&mut lanes));
        assert!(lanes.iter().all(|y| y.to_bits() == lanes[0].to_bits()), "{isa:?}: lanes differ at {x}");
        lanes[0]
    }

    #[test]
    fn exp2_over_its_range_is_within_its_bound() {
        for isa in Isa::all() {
            let bound = if matches!(isa, Isa::Portable) { 2.0 } else { 1.5 };
            let mut worst = 0.0f64;
            let mut xs: Vec<f32> = (0..1_000_000).map(|i| -126.5 * (i as f32 / 1_000_000.0)).collect();
            xs.extend((0..200_000).map(|i| -(i as f32 / 200_000.0).powi(8)));
            let mut ys = xs.clone();
            ys.resize(xs.len().next_multiple_of(16), 0.0);
            isa.run(Map(&mut ys));
            for (&x, &y) in xs.iter().zip(&ys) {
                let exact = f64::from(x).exp2();
                // One ulp is the spacing of f32 numbers between the two powers of two around the exact value.
                let ulp = exact.log2().floor().max(-126.0).exp2() * f64::from(f32::EPSILON);
                let error = (f64::from(y) - exact).abs() / ulp;
                assert!(error <= bound, "{isa:?}: 2^{x} is {exact:e}, got {y:e}: {error} ulp");
                worst = worst.max(error);
            }
            println!("{isa:?}: {worst} ulp");
            assert!(worst > 0.3, "{isa:?}: an error of {worst} ulp is too good to be measured");
        }
    }

    #[test]
    fn exp2_at_its_ends_is_exact() {
        for isa in Isa::all() {
            assert_eq!(map(isa, 0.0), 1.0, "{isa:?}");
            assert_eq!(map(isa, -1.0), 0.5, "{isa:?}");
            assert_eq!(map(isa, -126.0), f32::MIN_POSITIVE, "{isa:?}");
            for tiny in [-126.6, -127.0, -128.0, -150.0, -1e9, f32::MIN, f32::NEG_INFINITY] {
                assert_eq!(map(isa, tiny).to_bits(), 0, "{isa:?} at {tiny}");
            }
            assert!(map(isa, f32::NAN).is_nan(), "{isa:?}");
            assert!(map(isa, -f32::NAN).is_nan(), "{isa:?}");
        }
    }
}
