//! Element types.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The element type of a tensor that attention reads or writes.
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
    /// Signed 64-bit integer: boundaries of packed documents, and the numbers of dropout, alone.
    I64,
    /// A truth value: a byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::I64, DType::Bool];

    /// The name used in reports, files and options.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
        }
    }

    /// Bits of one element in memory.
    pub fn bits(self) -> u32 {
        match self {
            DType::I64 => 64,
            DType::F32 | DType::I32 => 32,
            DType::F16 | DType::BF16 => 16,
            DType::Bool => 8,
        }
    }

    /// Bytes that so many elements take.
    pub fn bytes(self, elements: u64) -> u64 {
        elements * u64::from(self.bits() / 8)
    }

    /// Whether its elements are floating point numbers.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => true,
            DType::I32 | DType::I64 | DType::Bool => false,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
