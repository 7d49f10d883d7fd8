//! Element types.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor that attention reads or writes.
///
/// Exhaustive: a new element type must stop executors, which match on it, from compiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer; used only for `cu_seqlens` and for the seed and offset of dropout.
    I64,
    /// A boolean: a byte, 0 or 1.
    Bool,
    /// 8-bit float, 4 exponent bits, no infinities (OCP E4M3).
    F8E4M3,
    /// 8-bit float, 5 exponent bits (OCP E5M2).
    F8E5M2,
    /// A power of two in one byte (OCP E8M0); used only for block scales of 8-bit floats.
    F8E8M0,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 9] =
        [DType::F32, DType::F16, DType::BF16, DType::I32, DType::I64, DType::Bool, DType::F8E4M3, DType::F8E5M2, DType::F8E8M0];

    /// Returns the name used in reports, files and options.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E8M0 => "f8e8m0",
        }
    }

    /// Returns the number of bits of one element in memory.
    pub fn bits(self) -> u32 {
        match self {
            DType::I64 => 64,
            DType::F32 | DType::I32 => 32,
            DType::F16 | DType::BF16 => 16,
            DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 8,
        }
    }

    /// Returns the number of bytes that this many elements take.
    pub fn bytes(self, elements: u64) -> u64 {
        elements * u64::from(self.bits() / 8)
    }

    /// Returns whether elements of this type are floating-point numbers with a sign and a mantissa.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => true,
            DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => false,
        }
    }

    /// Returns whether elements of this type are 8-bit floats, which have [scales](crate::fp8).
    pub fn is_fp8(self) -> bool {
        match self {
            DType::F8E4M3 | DType::F8E5M2 => true,
            DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => false,
        }
    }

    /// Returns the largest finite number of a floating-point type, or 0 for any other type.
    pub fn largest(self) -> f32 {
        match self {
            DType::F32 => f32::MAX,
            DType::F16 => 65504.0,
            DType::BF16 => half::bf16::MAX.to_f32(),
            DType::F8E4M3 => 448.0,
            DType::F8E5M2 => 57344.0,
            DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => 0.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
