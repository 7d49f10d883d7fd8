//! Tensors in host memory.

use crate::dtype::DType;
use crate::float8::{F8E4M3, F8E5M2, F8E8M0};
use half::{bf16, f16};

/// Read-only elements of an operand in host memory. Strides come from the problem.
///
/// Slices, vectors and arrays of each element type convert into it, so calls accept them directly. Exhaustive: executors match every element type, so
/// a new one stops them from compiling.
///
/// ```
/// use half::bf16;
/// use sdpa_core::{DType, Elements};
///
/// let q = vec![bf16::ONE; 64];
/// assert_eq!(Elements::from(&q).dtype(), DType::BF16);
/// assert_eq!(Elements::from(&q[..32]).len(), 32);
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// binary32.
    F32(&'a [f32]),
    /// binary16.
    F16(&'a [f16]),
    /// bfloat16.
    BF16(&'a [bf16]),
    /// 8-bit floats with 4 exponent bits.
    F8E4M3(&'a [F8E4M3]),
    /// 8-bit floats with 5 exponent bits.
    F8E5M2(&'a [F8E5M2]),
}

/// Writable elements of an operand in host memory. Strides come from the problem.
///
/// Mutable slices, vectors and arrays of each element type convert into it. It is exhaustive, like [`Elements`].
///
/// ```
/// use sdpa_core::{DType, ElementsMut};
///
/// let mut o = vec![0f32; 64];
/// assert_eq!(ElementsMut::from(&mut o).dtype(), DType::F32);
/// ```
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// binary32.
    F32(&'a mut [f32]),
    /// binary16.
    F16(&'a mut [f16]),
    /// bfloat16.
    BF16(&'a mut [bf16]),
    /// 8-bit floats with 4 exponent bits.
    F8E4M3(&'a mut [F8E4M3]),
    /// 8-bit floats with 5 exponent bits.
    F8E5M2(&'a mut [F8E5M2]),
}

macro_rules! facts {
    ($t:ident) => {
        impl $t<'_> {
            /// Returns the element type of the memory.
            pub fn dtype(&self) -> DType {
                match self {
                    $t::F32(_) => DType::F32,
                    $t::F16(_) => DType::F16,
                    $t::BF16(_) => DType::BF16,
                    $t::F8E4M3(_) => DType::F8E4M3,
                    $t::F8E5M2(_) => DType::F8E5M2,
                }
            }

            /// Returns the number of elements, including gaps between rows.
            pub fn len(&self) -> usize {
                match self {
                    $t::F32(x) => x.len(),
                    $t::F16(x) => x.len(),
                    $t::BF16(x) => x.len(),
                    $t::F8E4M3(x) => x.len(),
                    $t::F8E5M2(x) => x.len(),
                }
            }

            /// Returns whether there is no element.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }
    };
}
facts!(Elements);
facts!(ElementsMut);

macro_rules! conversions {
    ($of:ident: $($variant:ident($t:ty)),*) => {$(
        impl<'a> From<&'a [$t]> for $of<'a> {
            fn from(elements: &'a [$t]) -> $of<'a> {
                $of::$variant(elements)
            }
        }

        impl<'a> From<&'a Vec<$t>> for $of<'a> {
            fn from(elements: &'a Vec<$t>) -> $of<'a> {
                $of::$variant(elements)
            }
        }

        impl<'a, const N: usize> From<&'a [$t; N]> for $of<'a> {
            fn from(elements: &'a [$t; N]) -> $of<'a> {
                $of::$variant(elements)
            }
        }
    )*};
    (mut $of:ident: $($variant:ident($t:ty)),*) => {$(
        impl<'a> From<&'a mut [$t]> for $of<'a> {
            fn from(elements: &'a mut [$t]) -> $of<'a> {
                $of::$variant(elements)
            }
        }

        impl<'a> From<&'a mut Vec<$t>> for $of<'a> {
            fn from(elements: &'a mut Vec<$t>) -> $of<'a> {
                $of::$variant(elements)
            }
        }

        impl<'a, const N: usize> From<&'a mut [$t; N]> for $of<'a> {
            fn from(elements: &'a mut [$t; N]) -> $of<'a> {
                $of::$variant(elements)
            }
        }
    )*};
}
conversions!(Elements: F32(f32), F16(f16), BF16(bf16), F8E4M3(F8E4M3), F8E5M2(F8E5M2));
conversions!(mut ElementsMut: F32(f32), F16(f16), BF16(bf16), F8E4M3(F8E4M3), F8E5M2(F8E5M2));
conversions!(ParamValue: F32(f32), F16(f16), BF16(bf16), I32(i32), I64(i64), Bool(bool), F8E8M0(F8E8M0));

impl From<f32> for ParamValue<'_> {
    fn from(scalar: f32) -> Self {
        ParamValue::Scalar(scalar)
    }
}

/// A value for a declared parameter of a score_mod or mask. Numbers, and slices, vectors and arrays of each element type, convert into it.
/// Exhaustive: executors match every kind of value, so a new one stops them from compiling.
#[derive(Clone, Copy, Debug)]
pub enum ParamValue<'a> {
    /// The value of a scalar parameter.
    Scalar(f32),
    /// The elements of a tensor of f32.
    F32(&'a [f32]),
    /// The elements of a tensor of f16.
    F16(&'a [f16]),
    /// The elements of a tensor of bf16.
    BF16(&'a [bf16]),
    /// The elements of a tensor of i32.
    I32(&'a [i32]),
    /// The elements of a tensor of i64: `cu_seqlens`, and the seed and offset of dropout.
    I64(&'a [i64]),
    /// The elements of a tensor of booleans.
    Bool(&'a [bool]),
    /// The block scales of an operand.
    F8E8M0(&'a [F8E8M0]),
}

/// A declared parameter and its value in one call.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Param<'a> {
    /// The name under which the parameter was declared.
    pub name: &'a str,
    /// The value of the parameter in this call.
    pub value: ParamValue<'a>,
}

impl<'a> Param<'a> {
    /// Binds a value, a number or the elements of a tensor, to the declared parameter `name`.
    ///
    /// ```
    /// use sdpa_core::Param;
    ///
    /// let slopes = [0.5f32, 0.25];
    /// let params = [Param::new("slope", &slopes), Param::new("cap", 30.0)];
    /// assert_eq!(params[0].name, "slope");
    /// ```
    pub fn new(name: &'a str, value: impl Into<ParamValue<'a>>) -> Param<'a> {
        Param { name, value: value.into() }
    }
}
