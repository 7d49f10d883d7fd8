//! 8-bit floats: E4M3 and E5M2 of OCP's specification with CUDA's saturating conversions, and E8M0, their block scales.

use crate::block_scale::BlockScales;
use crate::dtype::DType;
use crate::error::SpecErrors;

/// Fields of a format after the sign bit.
#[derive(Clone, Copy)]
struct Format {
    /// Mantissa bits.
    fraction: u32,
    /// Exponent of the smallest normal number.
    least: i32,
    largest: f32,
    /// The bits of the largest number.
    top: u8,
}

const E4M3: Format = Format { fraction: 3, least: -6, largest: 448.0, top: 0x7e };
const E5M2: Format = Format { fraction: 2, least: -14, largest: 57344.0, top: 0x7b };
/// NaN in both formats.
const NAN: u8 = 0x7f;
const SIGN: u8 = 0x80;

impl Format {
    /// Exponent of the smallest positive number, which is also the distance between the smallest numbers.
    const fn finest(self) -> i32 {
        self.least - self.fraction as i32
    }

    /// Rounds to the nearest number, ties to even. Too large values become the largest number; NaN stays NaN.
    #[inline(always)]
    fn round(self, x: f32) -> f32 {
        let (bits, dropped) = (x.abs().to_bits(), 23 - self.fraction);
        let half = (1 << (dropped - 1)) - 1;
        let normal = f32::from_bits((bits + half + (bits >> dropped & 1)) >> dropped << dropped);
        // The last mantissa bit of the addend is worth the spacing of subnormal numbers, so adding and subtracting it rounds to that
        // spacing.
        let addend = 1.5 * power(23 + self.finest());
        let small = (x.abs() + addend) - addend;
        let rounded = if x.abs() < power(self.least) { small } else { normal };
        let saturated = if rounded > self.largest { self.largest } else { rounded };
        if x.is_nan() { x } else { saturated.copysign(x) }
    }

    /// Returns the bits of a number.
    fn encode(self, x: f32) -> u8 {
        let sign = if x.is_sign_negative() { SIGN } else { 0 };
        let rounded = self.round(x).abs();
        let bits = if rounded.is_nan() {
            NAN
        } else if rounded == self.largest {
            self.top
        } else {
            let exponent = ((rounded.to_bits() >> 23) as i32 - 127).max(self.least);
            let steps = (rounded / power(exponent - self.fraction as i32)) as u32;
            ((exponent - self.least).unsigned_abs() << self.fraction) as u8 + steps as u8
        };
        sign | bits
    }
}

/// Returns two to a power, for the exponents of normal f32 numbers.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Every number of E4M3.
static OF_E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        let (field, fraction) = ((bits >> 3 & 15) as i32, (bits & 7) as f32);
        let size = if bits & 0x7f == NAN as usize {
            f32::NAN
        } else if field == 0 {
            fraction * power(-9)
        } else {
            (8.0 + fraction) * power(field - 10)
        };
        table[bits] = if bits & SIGN as usize == 0 { size } else { -size };
        bits += 1;
    }
    table
};

macro_rules! float8 {
    ($(#[$doc:meta])* $name:ident, $format:ident, $dtype:expr, |$bits:ident| $widen:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The [`DType`] of this type.
            pub const DTYPE: DType = $dtype;

            /// The largest finite number of the type.
            pub const MAX: $name = $name($format.top);

            /// Returns the number with these bits.
            pub const fn from_bits(bits: u8) -> $name {
                $name(bits)
            }

            /// Returns the bits of the number.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Returns the nearest number, ties to even. Too large values, including infinities, become the largest number; NaN stays NaN.
            pub fn from_f32(x: f32) -> $name {
                $name($format.encode(x))
            }

            /// Returns the number, exactly.
            #[inline]
            pub fn to_f32(self) -> f32 {
                let $bits = self.0;
                $widen
            }

            /// Rounds a number as [`from_f32`]($name::from_f32) does, and returns it as f32.
            #[inline(always)]
            pub fn round(x: f32) -> f32 {
                $format.round(x)
            }

            /// Quantises an operand with block scales. Returns its elements in the layout of `numbers` (0 in gaps), and its
            /// [scales](BlockScales::of_numbers). Each element is the nearest to its number divided by the block's scale. Too large values become the
            /// largest number, which changes them by at most an eighth.
            ///
            /// # Errors
            /// There are fewer numbers than the operand has elements.
            pub fn narrow(numbers: &[f32], scales: &BlockScales) -> Result<(Vec<$name>, Vec<F8E8M0>), SpecErrors> {
                let of_blocks = scales.of_numbers(numbers, $dtype)?;
                let mut elements = vec![$name::default(); numbers.len()];
                for [element, scale] in scales.places() {
                    elements[element] = $name::from_f32(numbers[element] / of_blocks[scale].to_f32());
                }
                Ok((elements, of_blocks))
            }

        }
    };
}

float8!(
    /// An 8-bit float with 3 mantissa bits (OCP E4M3): up to 448, no infinities. For activations, P and, in many recipes, all tensors.
    ///
    /// ```
    /// use sdpa_core::F8E4M3;
    /// assert_eq!(F8E4M3::from_f32(1.1).to_f32(), 1.125);
    /// assert_eq!(F8E4M3::from_f32(-1e9).to_f32(), -448.0);
    /// ```
    F8E4M3, E4M3, DType::F8E4M3, |bits| OF_E4M3[bits as usize]
);
float8!(
    /// An 8-bit float with 2 mantissa bits (OCP E5M2): up to 57,344; the upper byte of an f16. For gradients, whose range is wider.
    ///
    /// ```
    /// use sdpa_core::F8E5M2;
    /// assert_eq!(F8E5M2::from_f32(1.1).to_f32(), 1.0);
    /// assert_eq!(F8E5M2::from_f32(1e9).to_f32(), 57344.0);
    /// ```
    F8E5M2, E5M2, DType::F8E5M2, |bits| half::f16::from_bits(u16::from(bits) << 8).to_f32()
);

/// A power of two in a byte (OCP E8M0): its exponent plus 127, from 2⁻¹²⁷ to 2¹²⁷; 255 is NaN. The [scale of a block](crate::BlockScales) of 8-bit
/// floats.
///
/// ```
/// use sdpa_core::{DType, F8E8M0};
/// assert_eq!(F8E8M0::from_bits(130).to_f32(), 8.0);
/// assert_eq!(F8E8M0::of_block(3.0, DType::F8E4M3).to_f32(), 1.0 / 128.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E8M0(u8);

impl F8E8M0 {
    /// The element type as a value.
    pub const DTYPE: DType = DType::F8E8M0;

    /// Returns the number with these bits.
    pub const fn from_bits(bits: u8) -> F8E8M0 {
        F8E8M0(bits)
    }

    /// Returns the bits of the number.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Returns the number, exactly.
    #[inline]
    pub fn to_f32(self) -> f32 {
        match self.0 {
            // The byte 0 means 2⁻¹²⁷. As an f32 this is subnormal: only the highest mantissa bit is set.
            0 => f32::from_bits(1 << 22),
            u8::MAX => f32::NAN,
            bits => f32::from_bits(u32::from(bits) << 23),
        }
    }

    /// Returns the scale of a block with this amax: `2^(⌊log₂ amax⌋ − e)`, where `e` is the exponent of the largest number of `dtype`, 8 or 15. At
    /// least 2⁻¹²⁷.
    pub fn of_block(amax: f32, dtype: DType) -> F8E8M0 {
        // Zero and subnormal f32 numbers get exponent 0. The clamp below then gives them the smallest scale.
        let exponent = |x: f32| (x.to_bits() >> 23 & 0xff) as i32;
        let bits = exponent(amax) - (exponent(dtype.largest()) - 127);
        F8E8M0(bits.clamp(0, 254) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_blocks_are_powers_of_two() {
        for bits in 0..u8::MAX {
            assert_eq!(f64::from(F8E8M0::from_bits(bits).to_f32()), 2f64.powi(i32::from(bits) - 127));
        }
        assert!(F8E8M0::from_bits(u8::MAX).to_f32().is_nan());
        for (amax, dtype, want) in [
            (1.0, DType::F8E4M3, -8),
            (1.999, DType::F8E4M3, -8),
            (448.0, DType::F8E4M3, 0),
            (2.0, DType::F8E5M2, -14),
            (f32::MAX, DType::F8E5M2, 112),
            (0.0, DType::F8E4M3, -127),
            (f32::MIN_POSITIVE, DType::F8E4M3, -127),
        ] {
            assert_eq!(f64::from(F8E8M0::of_block(amax, dtype).to_f32()), 2f64.powi(want), "{amax}");
        }
    }

    /// Returns all non-negative numbers of a format, from its fields.
    fn members(exponent_bits: u32, fraction_bits: i32, bias: i32, most: f64) -> Vec<f64> {
        let of = |e: i32, m: i32| {
            let m = f64::from(m) * 2f64.powi(-fraction_bits);
            if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) }
        };
        let all = (0..1 << exponent_bits).flat_map(|e| (0..1 << fraction_bits).map(move |m| of(e, m)));
        all.filter(|&x| x <= most).collect()
    }

    fn check(members: &[f64], round: impl Fn(f32) -> f32, encode: impl Fn(f32) -> u8, decode: impl Fn(u8) -> f32) {
        let both = |x: f32, want: f64| {
            for sign in [1.0, -1.0] {
                let (x, want) = (sign * x, sign * want as f32);
                assert_eq!(round(x).to_bits(), want.to_bits(), "{x:e}");
                assert_eq!(decode(encode(x)).to_bits(), want.to_bits(), "{x:e}");
            }
        };
        for (n, pair) in members.windows(2).enumerate() {
            let (low, high) = (pair[0], pair[1]);
            let tie = ((low + high) / 2.0) as f32;
            assert_eq!(encode(low as f32), n as u8);
            both(low as f32, low);
            both(tie.next_down(), low);
            both(tie, if n % 2 == 0 { low } else { high });
            both(tie.next_up(), high);
        }
        let top = members[members.len() - 1];
        for x in [top as f32, 1.001 * top as f32, 2.0 * top as f32, 1e30, f32::MAX, f32::INFINITY] {
            both(x, top);
        }
        both(f32::MIN_POSITIVE, 0.0);
        both(f32::from_bits(1), 0.0);
        assert!(round(f32::NAN).is_nan() && decode(encode(f32::NAN)).is_nan() && decode(encode(-f32::NAN)).is_nan());
    }

    #[test]
    fn numbers_round_to_the_nearest_member_and_saturate() {
        check(&members(4, 3, 7, 448.0), F8E4M3::round, |x| F8E4M3::from_f32(x).to_bits(), |bits| F8E4M3::from_bits(bits).to_f32());
        check(&members(5, 2, 15, 57344.0), F8E5M2::round, |x| F8E5M2::from_f32(x).to_bits(), |bits| F8E5M2::from_bits(bits).to_f32());
    }

    #[test]
    fn bits_go_to_numbers_and_back() {
        for bits in 0..=u8::MAX {
            let (four, five) = (F8E4M3::from_bits(bits).to_f32(), F8E5M2::from_bits(bits).to_f32());
            assert!(four.is_nan() == (bits & 0x7f == 0x7f) && (four.is_nan() || F8E4M3::from_f32(four).to_bits() == bits), "{bits:x}");
            assert!(!five.is_finite() || F8E5M2::from_f32(five).to_bits() == bits, "{bits:x}");
            assert_eq!(five.is_finite(), bits & 0x7c != 0x7c);
        }
        assert_eq!((F8E4M3::MAX.to_f32(), F8E5M2::MAX.to_f32()), (448.0, 57344.0));
        for dtype in [F8E4M3::DTYPE, F8E5M2::DTYPE] {
            assert!(dtype.is_fp8() && dtype.bytes(3) == 3);
        }
        assert_eq!((F8E4M3::DTYPE.largest(), F8E5M2::DTYPE.largest()), (448.0, 57344.0));
    }
}
