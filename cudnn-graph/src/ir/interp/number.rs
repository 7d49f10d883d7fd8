//! Numbers of each element type, as f64.

use crate::ir::ty::DType;
use serde::{Deserialize, Serialize};

/// The precision in which a graph is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// In f64, whatever the graph's types are: floats are never rounded to a narrower type.
    F64,
    /// In the graph's types: the result of every op is rounded to its compute type, and every tensor to its element type.
    F32,
}

impl Precision {
    /// Converts `x` to `dtype`, which is the type of a tensor's elements or of an arithmetic result.
    ///
    /// Integers drop the fraction and saturate, and NaN becomes 0. A boolean is true if `x` differs from 0. Both are the same in either
    /// precision. Floats are rounded to `dtype` in [`Precision::F32`], and unchanged in [`Precision::F64`].
    pub fn convert(self, x: f64, dtype: DType) -> f64 {
        match dtype {
            DType::I8 => f64::from(x as i8),
            DType::U8 => f64::from(x as u8),
            DType::I4 => f64::from((x as i8).clamp(-8, 7)),
            DType::U4 => f64::from((x as u8).min(15)),
            DType::I32 => f64::from(x as i32),
            DType::I64 => (x as i64) as f64,
            DType::Bool => f64::from(u8::from(x != 0.0)),
            DType::F64 => x,
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::F4E2M1 => match self {
                Precision::F64 => x,
                Precision::F32 => round(x, dtype),
            },
        }
    }

    /// Returns the result of f32 arithmetic.
    pub(super) fn f32(self, x: f64) -> f64 {
        self.convert(x, DType::F32)
    }
}

/// A narrow binary float.
struct Format {
    /// Mantissa bits.
    fraction: i32,
    /// Exponent of the smallest normal number.
    least: i32,
    largest: f64,
    /// Whether too large values become the largest number instead of infinity.
    saturates: bool,
    nan: f64,
}

/// Rounds to the nearest number, ties to even. The 16-bit types overflow to infinity. The 8- and 4-bit types saturate, infinities included, as
/// conversions in OCP's 8-bit and microscaling formats do. F4E2M1 has no NaN, which becomes its largest number. F8E8M0 rounds up to the next power of
/// two, so that dividing by a scale never overflows; zero becomes the smallest scale, and negative values become NaN.
fn round(x: f64, dtype: DType) -> f64 {
    let ieee = |fraction, least, largest| Format { fraction, least, largest, saturates: false, nan: f64::NAN };
    let ocp = |fraction, least, largest, nan| Format { fraction, least, largest, saturates: true, nan };
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => nearest(x, &ieee(10, -14, 65504.0)),
        DType::BF16 => nearest(x, &ieee(7, -126, 255.0 * 2f64.powi(120))),
        DType::F8E4M3 => nearest(x, &ocp(3, -6, 448.0, f64::NAN)),
        DType::F8E5M2 => nearest(x, &ocp(2, -14, 57344.0, f64::NAN)),
        DType::F4E2M1 => nearest(x, &ocp(1, 0, 6.0, 6.0)),
        DType::F8E8M0 => power_of_two_above(x),
        DType::F64 | DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::Bool | DType::I4 | DType::U4 => x,
    }
}

fn nearest(x: f64, to: &Format) -> f64 {
    if x.is_nan() {
        return to.nan;
    }
    let rounded = if x.is_infinite() {
        x
    } else {
        // The distance between neighbours is a power of two, so dividing by it is exact in the range of these formats.
        let step = 2f64.powi(exponent(x).max(to.least) - to.fraction);
        (x / step).round_ties_even() * step
    };
    if rounded.abs() <= to.largest {
        rounded
    } else if to.saturates {
        to.largest.copysign(x)
    } else {
        f64::INFINITY.copysign(x)
    }
}

/// Returns ⌊log2 |x|⌋ of a finite number; subnormals and zero count as tiny.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

fn power_of_two_above(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    let (least, largest) = (2f64.powi(-127), 2f64.powi(127));
    if x <= least {
        return least;
    }
    if x >= largest {
        return largest;
    }
    let below = 2f64.powi(exponent(x));
    if below == x { x } else { 2.0 * below }
}

/// Returns the largest number of a float type.
pub(super) fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::MAX),
        DType::F64 => f64::MAX,
        DType::F16 => 65504.0,
        DType::BF16 => 255.0 * 2f64.powi(120),
        DType::F8E4M3 => 448.0,
        DType::F8E5M2 => 57344.0,
        DType::F8E8M0 => 2f64.powi(127),
        DType::F4E2M1 => 6.0,
        DType::I8 => f64::from(i8::MAX),
        DType::U8 => f64::from(u8::MAX),
        DType::I4 => 7.0,
        DType::U4 => 15.0,
        DType::I32 => f64::from(i32::MAX),
        DType::I64 => i64::MAX as f64,
        DType::Bool => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn same(a: f64, b: f64) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    /// Every 16-bit number, its neighbours in f64, and the ties between adjacent numbers.
    #[test]
    fn sixteen_bits_round_as_half_does() {
        for bits in 0..=u16::MAX {
            for (dtype, here, next) in [
                (DType::F16, f16::from_bits(bits).to_f32(), f16::from_bits(bits.wrapping_add(1)).to_f32()),
                (DType::BF16, bf16::from_bits(bits).to_f32(), bf16::from_bits(bits.wrapping_add(1)).to_f32()),
            ] {
                let tie = here / 2.0 + next / 2.0;
                for x in [here, tie, tie.next_up(), tie.next_down()] {
                    let want = if dtype == DType::F16 { f16::from_f32(x).to_f64() } else { bf16::from_f32(x).to_f64() };
                    let got = Precision::F32.convert(f64::from(x), dtype);
                    assert!(same(got, want), "{dtype} {x:e}: {got:e}, not {want:e}");
                }
            }
        }
    }

    /// A tie in the first 24 bits that further bits decide: rounding through f32 would go to the even neighbour.
    #[test]
    fn f64_rounds_once() {
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(Precision::F32.convert(x, DType::F16), 1.0 + 2f64.powi(-10));
    }

    /// Returns all numbers of a format, from its fields.
    fn members(exponent_bits: u32, fraction_bits: u32, bias: i32) -> Vec<f64> {
        let mut all = Vec::new();
        for e in 0..1i32 << exponent_bits {
            for m in 0..1i32 << fraction_bits {
                let scale = 2f64.powi(-(fraction_bits as i32));
                all.push(if e == 0 {
                    f64::from(m) * scale * 2f64.powi(1 - bias)
                } else {
                    (1.0 + f64::from(m) * scale) * 2f64.powi(e - bias)
                });
            }
        }
        all
    }

    #[test]
    fn narrow_floats_round_to_the_nearest_member_and_saturate() {
        let formats = [
            // The pattern S.1111.111 is NaN, so 448 is the largest number.
            (DType::F8E4M3, members(4, 3, 7).into_iter().filter(|&x| x <= 448.0).collect::<Vec<_>>(), f64::NAN),
            // The last exponent is for infinity and NaN, so 57344 is the largest number.
            (DType::F8E5M2, members(5, 2, 15).into_iter().filter(|&x| x <= 57344.0).collect(), f64::NAN),
            (DType::F4E2M1, members(2, 1, 1), 6.0),
        ];
        for (dtype, members, nan) in formats {
            let convert = |x| Precision::F32.convert(x, dtype);
            for (i, pair) in members.windows(2).enumerate() {
                let (low, high) = (pair[0], pair[1]);
                let tie = (low + high) / 2.0;
                for sign in [1.0, -1.0] {
                    assert!(same(convert(sign * low), sign * low), "{dtype} {low}");
                    assert!(same(convert(sign * tie.next_down()), sign * low), "{dtype} below {tie}");
                    assert!(same(convert(sign * tie.next_up()), sign * high), "{dtype} above {tie}");
                    let even = if i % 2 == 0 { low } else { high };
                    assert!(same(convert(sign * tie), sign * even), "{dtype} at {tie}");
                }
            }
            let top = members[members.len() - 1];
            for x in [top, top * 1.01, 1e300, f64::INFINITY] {
                assert_eq!((convert(x), convert(-x)), (top, -top), "{dtype}");
            }
            assert!(same(convert(f64::NAN), nan), "{dtype}");
            assert!(same(convert(-1e-300), -0.0) && same(convert(0.0), 0.0), "{dtype}");
        }
    }

    #[test]
    fn scales_of_powers_of_two_go_up() {
        let convert = |x| Precision::F32.convert(x, DType::F8E8M0);
        assert_eq!([convert(1.0), convert(1.0001), convert(3.0), convert(0.5)], [1.0, 2.0, 4.0, 0.5]);
        assert_eq!([convert(0.0), convert(1e-300)], [2f64.powi(-127); 2]);
        assert_eq!([convert(f64::INFINITY), convert(1e300)], [2f64.powi(127); 2]);
        assert!(convert(-1.0).is_nan() && convert(f64::NAN).is_nan());
    }

    #[test]
    fn integers_truncate_and_saturate_in_both_precisions() {
        for precision in [Precision::F64, Precision::F32] {
            assert_eq!(precision.convert(-1.9, DType::I32), -1.0);
            assert_eq!(precision.convert(1e300, DType::I32), f64::from(i32::MAX));
            assert_eq!(precision.convert(-1.0, DType::U8), 0.0);
            assert_eq!(precision.convert(-300.0, DType::I8), -128.0);
            let all = |dtype| [-9.5, -1.9, 7.9, 8.0, 300.0].map(|x| precision.convert(x, dtype));
            assert_eq!(all(DType::I4), [-8.0, -1.0, 7.0, 7.0, 7.0]);
            assert_eq!(all(DType::U4), [0.0, 0.0, 7.0, 8.0, 15.0]);
            assert_eq!(precision.convert(f64::NAN, DType::I64), 0.0);
            assert_eq!(precision.convert(f64::NAN, DType::Bool), 1.0);
            assert_eq!(precision.convert(-0.0, DType::Bool), 0.0);
        }
    }

    #[test]
    fn f64_precision_rounds_no_float() {
        for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
            assert_eq!(Precision::F64.convert(0.1, dtype), 0.1);
        }
    }
}
