//! Tensors of a graph: cuDNN's tensor descriptors.

use super::ty::{DType, Dims, Strides};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The id of a tensor in one graph, printed as `t7`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Returns cuDNN's unique id of the tensor: its index plus one, because 0 is not a valid id.
    pub fn uid(self) -> i64 {
        i64::from(self.0) + 1
    }

    /// Returns the index of the tensor in [`crate::ir::Graph::tensors`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

impl fmt::Debug for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A number in one of the graph's element types, for by-value operands and constants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scalar {
    /// A number for a tensor of type f32.
    F32(#[serde(with = "super::float::f32")] f32),
    /// A number for a tensor of type i32.
    I32(i32),
    /// A number for a tensor of type i64.
    I64(i64),
}

impl Scalar {
    /// Returns the element type of a tensor that holds this number.
    pub fn dtype(self) -> DType {
        match self {
            Scalar::F32(_) => DType::F32,
            Scalar::I32(_) => DType::I32,
            Scalar::I64(_) => DType::I64,
        }
    }

    /// Returns the number as f64.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::F32(x) => f64::from(x),
            Scalar::I32(x) => f64::from(x),
            Scalar::I64(x) => x as f64,
        }
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::F32(x) => write!(f, "{x:?}"),
            Scalar::I32(x) => write!(f, "{x}"),
            Scalar::I64(x) => write!(f, "{x}"),
        }
    }
}

/// The place where a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// The elements are in device memory, which the caller binds at execution.
    Device,
    /// The elements have no memory: a virtual tensor exists only inside the fused kernel.
    Virtual,
    /// The element is a scalar in host memory, read at every execution. The graph supplies its value, or with `None` the caller does.
    ByValue(Option<Scalar>),
    /// The element is a scalar that is compiled into the kernel (from cuDNN 9.22 on).
    Constant(Scalar),
}

/// The order of a tensor's elements in memory, in addition to its strides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reordering {
    /// The strides alone determine the order of the elements.
    #[default]
    None,
    /// The interleaving of block scales for 8-bit tensor cores (cuDNN 9.7).
    F8x128x4,
}

/// Ragged offsets: they pack batch entries of different lengths contiguously.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ragged {
    /// The tensor with the index of the first element of each batch entry, and the end of the last entry: (batch + 1, 1, 1, 1), i32 or
    /// i64.
    pub offsets: TensorId,
    /// Number of elements per unit of `offsets` (from cuDNN 9.24 on, unified form only). With `None`, offsets count elements.
    pub multiplier: Option<i64>,
}

/// A tensor: type, extents, strides and storage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// A name for messages and bindings; unique among the tensors that a caller binds.
    pub name: String,
    /// Element type of the tensor.
    pub dtype: DType,
    /// Extents of the axes, outermost first.
    pub dims: Dims,
    /// Strides of the axes, in elements.
    pub strides: Strides,
    /// The place where the tensor's elements are stored.
    pub storage: Storage,
    /// Alignment of the base address, in bytes.
    pub alignment: u32,
    /// The order of elements in memory, in addition to the strides.
    pub reordering: Reordering,
    /// The ragged offsets, if batch entries of different lengths are packed.
    pub ragged: Option<Ragged>,
}

impl Tensor {
    /// Creates a dense tensor in device memory.
    pub fn device(name: impl Into<String>, dtype: DType, dims: impl Into<Dims>) -> Tensor {
        Tensor::new(name, dtype, dims, Storage::Device)
    }

    /// Creates a virtual tensor, which exists only inside the fused kernel. Its strides describe no memory, but engines need them to know
    /// which axis is innermost.
    pub fn virtual_(name: impl Into<String>, dtype: DType, dims: impl Into<Dims>) -> Tensor {
        Tensor::new(name, dtype, dims, Storage::Virtual)
    }

    /// Creates a scalar in host memory with `rank` axes of extent 1. With `None`, the caller supplies the value at each execution.
    pub fn by_value(name: impl Into<String>, dtype: DType, value: Option<Scalar>, rank: usize) -> Tensor {
        Tensor::new(name, dtype, vec![1; rank], Storage::ByValue(value))
    }

    fn new(name: impl Into<String>, dtype: DType, dims: impl Into<Dims>, storage: Storage) -> Tensor {
        let dims = dims.into();
        let strides = dims.packed();
        Tensor { name: name.into(), dtype, dims, strides, storage, alignment: 16, reordering: Reordering::None, ragged: None }
    }

    /// Sets the strides of the tensor, in elements.
    #[must_use]
    pub fn strides(mut self, strides: impl Into<Strides>) -> Tensor {
        self.strides = strides.into();
        self
    }

    /// Sets the strides of a dense tensor whose channels, the second axis, are innermost (NHWC).
    #[must_use]
    pub fn channels_last(mut self) -> Tensor {
        self.strides = self.dims.channels_last();
        self
    }

    /// Sets the alignment of the base address, in bytes.
    #[must_use]
    pub fn alignment(mut self, bytes: u32) -> Tensor {
        self.alignment = bytes;
        self
    }

    /// Sets ragged offsets, which pack batch entries of different lengths contiguously.
    #[must_use]
    pub fn ragged(mut self, ragged: Ragged) -> Tensor {
        self.ragged = Some(ragged);
        self
    }

    /// Returns whether the tensor is dense and its channels, the second of at least three axes, are innermost. A tensor whose elements have
    /// the same order with the last axis innermost is not.
    pub fn is_channels_last(&self) -> bool {
        self.dims.rank() >= 3 && self.strides == self.dims.channels_last() && self.strides != self.dims.packed()
    }

    /// Returns whether the tensor is virtual: it has no memory.
    pub fn is_virtual(&self) -> bool {
        self.storage == Storage::Virtual
    }

    /// Returns whether the tensor is in device memory, at an address that the caller passes.
    pub fn is_device(&self) -> bool {
        self.storage == Storage::Device
    }

    /// Returns whether the tensor is a scalar in host memory or a compiled constant.
    pub fn is_scalar_value(&self) -> bool {
        match self.storage {
            Storage::ByValue(_) | Storage::Constant(_) => true,
            Storage::Device | Storage::Virtual => false,
        }
    }

    /// Returns the size that the tensor's buffer must have, in bytes; `None` if it does not fit an `i64`.
    pub fn bytes(&self) -> Option<u64> {
        let elements = u64::try_from(self.strides.extent(&self.dims)?).ok()?;
        elements.checked_mul(u64::from(self.dtype.bits())).map(|bits| bits.div_ceil(8))
    }
}
