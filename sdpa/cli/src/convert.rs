//! Converts bytes of a file to elements of a tensor.

use crate::data::{Data, Element};
use half::{bf16, f16};
use safetensors::Dtype;
use sdpa::{F8E4M3, F8E5M2};

/// An element type of tensors in input files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileType {
    F16,
    BF16,
    F32,
    F64,
    F8E4M3,
    F8E5M2,
}

impl FileType {
    /// Returns the [`FileType`] of a safetensors element type; `None` if it is not supported.
    pub(crate) fn of(dtype: Dtype) -> Option<FileType> {
        let known = [
            (Dtype::F16, FileType::F16),
            (Dtype::BF16, FileType::BF16),
            (Dtype::F32, FileType::F32),
            (Dtype::F64, FileType::F64),
            (Dtype::F8_E4M3, FileType::F8E4M3),
            (Dtype::F8_E5M2, FileType::F8E5M2),
        ];
        known.into_iter().find(|(d, _)| *d == dtype).map(|(_, t)| t)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            FileType::F16 => "F16",
            FileType::BF16 => "BF16",
            FileType::F32 => "F32",
            FileType::F64 => "F64",
            FileType::F8E4M3 => "F8_E4M3",
            FileType::F8E5M2 => "F8_E5M2",
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            FileType::F16 | FileType::BF16 => 2,
            FileType::F32 => 4,
            FileType::F64 => 8,
            FileType::F8E4M3 | FileType::F8E5M2 => 1,
        }
    }

    /// Returns the corresponding 8-bit element type of attention; `None` for a wider type.
    pub(crate) fn narrow(self) -> Option<Element> {
        match self {
            FileType::F16 | FileType::BF16 | FileType::F32 | FileType::F64 => None,
            FileType::F8E4M3 => Some(Element::F8E4M3),
            FileType::F8E5M2 => Some(Element::F8E5M2),
        }
    }
}

/// Converts a block of a file's bytes to elements of `to`, from element `at` on, rounding once, to nearest. Returns the number of finite
/// numbers that became infinite.
pub(crate) fn convert(from: FileType, bytes: &[u8], to: &mut Data, at: usize) -> u64 {
    let end = at + bytes.len() / from.bytes();
    match to {
        Data::F32(x) => fill(from, bytes, &mut x[at..end]),
        Data::F16(x) => fill(from, bytes, &mut x[at..end]),
        Data::BF16(x) => fill(from, bytes, &mut x[at..end]),
        Data::F8E4M3(x, _) => fill(from, bytes, &mut x[at..end]),
        Data::F8E5M2(x, _) => fill(from, bytes, &mut x[at..end]),
    }
}

/// A type to round to.
trait Narrow: Copy {
    fn of_f32(x: f32) -> Self;
    fn of_f64(x: f64) -> Self;
    fn is_infinite(self) -> bool;
}

impl Narrow for f32 {
    fn of_f32(x: f32) -> f32 {
        x
    }
    fn of_f64(x: f64) -> f32 {
        x as f32
    }
    fn is_infinite(self) -> bool {
        f32::is_infinite(self)
    }
}

macro_rules! narrow {
    ($t:ident) => {
        impl Narrow for $t {
            fn of_f32(x: f32) -> $t {
                $t::from_f32(x)
            }
            fn of_f64(x: f64) -> $t {
                $t::from_f32(round_to_odd(x))
            }
            fn is_infinite(self) -> bool {
                $t::is_infinite(self)
            }
        }
    };
}
narrow!(f16);
narrow!(bf16);

macro_rules! narrow8 {
    ($t:ident) => {
        impl Narrow for $t {
            fn of_f32(x: f32) -> $t {
                $t::from_f32(x)
            }
            fn of_f64(x: f64) -> $t {
                $t::from_f32(round_to_odd(x))
            }
            fn is_infinite(self) -> bool {
                self.to_f32().is_infinite()
            }
        }
    };
}
narrow8!(F8E4M3);
narrow8!(F8E5M2);

fn fill<T: Narrow>(from: FileType, bytes: &[u8], to: &mut [T]) -> u64 {
    match from {
        FileType::F16 => each(bytes, to, |b| f16::from_le_bytes(b).to_f32(), T::of_f32, |x| x.is_finite()),
        FileType::BF16 => each(bytes, to, |b| bf16::from_le_bytes(b).to_f32(), T::of_f32, |x| x.is_finite()),
        FileType::F32 => each(bytes, to, f32::from_le_bytes, T::of_f32, |x| x.is_finite()),
        FileType::F64 => each(bytes, to, f64::from_le_bytes, T::of_f64, |x| x.is_finite()),
        FileType::F8E4M3 => each(bytes, to, |[b]| F8E4M3::from_bits(b).to_f32(), T::of_f32, |x| x.is_finite()),
        FileType::F8E5M2 => each(bytes, to, |[b]| F8E5M2::from_bits(b).to_f32(), T::of_f32, |x| x.is_finite()),
    }
}

fn each<const N: usize, W: Copy, T: Narrow>(
    bytes: &[u8],
    to: &mut [T],
    read: impl Fn([u8; N]) -> W,
    narrow: impl Fn(W) -> T,
    finite: impl Fn(W) -> bool,
) -> u64 {
    let mut overflows = 0;
    for (to, bytes) in to.iter_mut().zip(bytes.as_chunks::<N>().0) {
        let wide = read(*bytes);
        *to = narrow(wide);
        overflows += u64::from(to.is_infinite() && finite(wide));
    }
    overflows
}

/// Rounds to f32, with the last bit set if the result is inexact (round to odd). Rounding it again to a type with two bits less equals rounding the f64 once.
/// `half` drops the lower bits of an f64 first, and can miss a tie.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let bits = near.to_bits();
    if !near.is_finite() || f64::from(near) == x || bits & 1 == 1 {
        return near;
    }
    f32::from_bits(if x.abs() > f64::from(near).abs() { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Element;

    #[test]
    fn f64_is_rounded_once() {
        let half_ulp = 2f64.powi(-11);
        assert_eq!(f16::of_f64(1.0 + half_ulp), f16::from_f32(1.0));
        for tiny in [2f64.powi(-30), 2f64.powi(-50)] {
            assert_eq!(f16::of_f64(1.0 + half_ulp + tiny).to_bits(), f16::from_f32(1.0).to_bits() + 1, "{tiny}");
            assert_eq!(f16::of_f64(-1.0 - 3.0 * half_ulp + tiny).to_bits(), f16::from_f32(-1.0).to_bits() + 1, "{tiny}");
            assert_eq!(bf16::of_f64(1.0 + 2f64.powi(-8) + tiny).to_bits(), bf16::from_f32(1.0).to_bits() + 1, "{tiny}");
        }
        assert_eq!(round_to_odd(1e-300).to_bits(), 1);
        assert_eq!(round_to_odd(-1e-300).to_bits(), 0x8000_0001);
        assert!(round_to_odd(f64::NAN).is_nan() && round_to_odd(1e300) == f32::INFINITY);
        assert_eq!(f16::of_f64(65_519.999_999), f16::MAX);
        assert_eq!(f16::of_f64(65520.0), f16::INFINITY);
    }

    #[test]
    fn every_type_converts_to_every_element_and_overflows_are_counted() {
        for element in [Element::F32, Element::F16, Element::BF16] {
            for from in [FileType::F16, FileType::BF16, FileType::F32, FileType::F64] {
                let numbers = [1.5f64, -2.0, 65280.0, f64::INFINITY];
                let bytes: Vec<u8> = numbers
                    .iter()
                    .flat_map(|&x| match from {
                        FileType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
                        FileType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
                        FileType::F32 => (x as f32).to_le_bytes().to_vec(),
                        FileType::F64 => x.to_le_bytes().to_vec(),
                        FileType::F8E4M3 | FileType::F8E5M2 => Vec::new(),
                    })
                    .collect();
                let mut data = Data::zeros(element, 5).unwrap();
                assert_eq!(convert(from, &bytes, &mut data, 1), 0);
                let mut got = [0f64; 5];
                data.row(0, &mut got);
                assert_eq!(got, [0.0, 1.5, -2.0, 65280.0, f64::INFINITY], "{from:?} {element:?}");
            }
        }
        for (from, element, bits, want) in [
            (FileType::F8E4M3, Element::F8E4M3, [0x3c, 0x7e], [1.5, 448.0]),
            (FileType::F8E5M2, Element::F8E5M2, [0x3e, 0x7b], [1.5, 57344.0]),
            (FileType::F8E4M3, Element::F32, [0x3c, 0xfe], [1.5, -448.0]),
        ] {
            let mut data = Data::zeros(element, 2).unwrap();
            assert_eq!(convert(from, &bits, &mut data, 0), 0);
            assert_eq!([data.get(0), data.get(1)], want, "{from:?} {element:?}");
        }
        let mut data = Data::zeros(Element::F16, 2).unwrap();
        assert_eq!(convert(FileType::F32, &[1e6f32.to_le_bytes(), f32::INFINITY.to_le_bytes()].concat(), &mut data, 0), 1);
    }
}
