//! The output languages of emitted functions, and their names of element types.

use sdpa_core::DType;

/// A programming language of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// The Metal shading language.
    #[default]
    Msl,
    /// CUDA C++, which follows the prelude of `sdpa-cuda`'s kernels. The prelude defines the types that [`Dialect::element`] names; all
    /// convert to `float`.
    Cuda,
}

impl Dialect {
    /// Returns the name of an element type in this language.
    pub fn element(self, dtype: DType) -> &'static str {
        match (self, dtype) {
            (_, DType::F32) => "float",
            (Dialect::Msl, DType::F16) => "half",
            (Dialect::Msl, DType::BF16) => "bfloat",
            (Dialect::Cuda, DType::F16) => "Half",
            (Dialect::Cuda, DType::BF16) => "BFloat",
            (_, DType::I32) => "int",
            (_, DType::I64) => "long",
            (_, DType::Bool) => "bool",
            (Dialect::Msl, DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0) => "uchar",
            (Dialect::Cuda, DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0) => "unsigned char",
        }
    }
}
