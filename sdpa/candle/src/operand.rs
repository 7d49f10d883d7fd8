//! Tensors as operands: their axes and strides.

use candle_core::{D, Layout, Result, Tensor};
use sdpa::{DType, SpecError, TensorSpec};
use std::ops::Range;
use std::sync::Once;

/// Element types of attention, with candle's names.
const TYPES: [(candle_core::DType, DType); 3] =
    [(candle_core::DType::F32, DType::F32), (candle_core::DType::F16, DType::F16), (candle_core::DType::BF16, DType::BF16)];

/// The order of the axes in a tensor's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Batch, head, sequence, dim.
    Bhsd,
    /// Batch, sequence, head, dim.
    Bshd,
    /// Token, head, dim: packed sequences.
    Packed,
    /// Page, token, head, dim: the pool of a paged KV cache.
    Pool,
}

impl Order {
    pub(crate) fn rank(self) -> usize {
        self.names().len()
    }

    fn names(self) -> &'static [&'static str] {
        match self {
            Order::Bhsd => &["batch", "head", "seq", "dim"],
            Order::Bshd => &["batch", "seq", "head", "dim"],
            Order::Packed => &["token", "head", "dim"],
            Order::Pool => &["page", "token", "head", "dim"],
        }
    }

    /// Returns the positions of the head, sequence and dim axes in a tensor's shape.
    pub(crate) fn places(self) -> [usize; 3] {
        match self {
            Order::Bhsd => [1, 2, 3],
            Order::Bshd | Order::Pool => [2, 1, 3],
            Order::Packed => [1, 0, 2],
        }
    }

    /// Describes a tensor with this layout and order of axes as an operand. For packed sequences, `documents` has the number of
    /// sequences and the maximum length of one.
    pub(crate) fn operand(self, layout: &Layout, documents: Option<(usize, usize)>, alignment: u32) -> TensorSpec {
        let (dims, strides) = (layout.dims(), layout.stride());
        let [head, seq, dim] = self.places();
        let (batch, longest, between) = documents.map_or((dims[0], dims[seq], strides[0]), |(batch, longest)| (batch, longest, 0));
        TensorSpec {
            dims: [batch, dims[head], longest, dims[dim]].map(signed),
            strides: [between, strides[head], strides[seq], strides[dim]].map(signed),
            alignment,
        }
    }

    /// Returns the shape, in this order of axes, of a tensor with the extents [batch, heads, seq, dim]. For packed sequences, `seq` is
    /// the number of tokens.
    pub(crate) fn shape(self, [batch, heads, seq, dim]: [usize; 4]) -> Vec<usize> {
        match self {
            Order::Bhsd => vec![batch, heads, seq, dim],
            Order::Bshd | Order::Pool => vec![batch, seq, heads, dim],
            Order::Packed => vec![seq, heads, dim],
        }
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Converts candle's element type to this library's; `None` if it is not a type of attention operands.
pub(crate) fn dtype(of: candle_core::DType) -> Option<DType> {
    TYPES.iter().find(|(theirs, _)| *theirs == of).map(|(_, ours)| *ours)
}

/// Converts this library's element type to the one in which candle stores such elements. Booleans are bytes.
pub(crate) fn theirs(of: DType) -> candle_core::DType {
    match of {
        DType::F32 => candle_core::DType::F32,
        DType::F16 => candle_core::DType::F16,
        DType::BF16 => candle_core::DType::BF16,
        DType::I32 => candle_core::DType::I32,
        DType::I64 => candle_core::DType::I64,
        // Tensors of 8-bit floats are unsupported: candle's graph has no argument for their scales.
        DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => candle_core::DType::U8,
    }
}

/// Returns the part of a tensor's storage that it uses: the range of indices from its first to its last element.
pub(crate) fn span(layout: &Layout) -> Range<usize> {
    let start = layout.start_offset();
    if layout.shape().elem_count() == 0 {
        return start..start;
    }
    let last: usize = layout.dims().iter().zip(layout.stride()).map(|(dim, stride)| (dim - 1) * stride).sum();
    start..start + last + 1
}

/// Returns the mistakes of the operand `name`: a wrong rank or element type, or another type or device than `q`.
pub(crate) fn mistakes(name: &str, order: Order, tensor: &Tensor, q: &Tensor) -> Vec<SpecError> {
    let mut errors = Vec::new();
    if tensor.rank() != order.rank() {
        errors.push(SpecError::new(format!("{name} shape"), format!("{:?}", tensor.dims()), format!("({})", order.names().join(", "))));
    }
    if dtype(tensor.dtype()).is_none() {
        errors.push(SpecError::new(format!("{name} dtype"), tensor.dtype().as_str(), "one of f32, f16, bf16"));
    } else if tensor.dtype() != q.dtype() {
        errors.push(SpecError::new(format!("{name} dtype"), tensor.dtype().as_str(), format!("{}, the type of q", q.dtype().as_str())));
    }
    errors.extend(elsewhere(name, tensor, q));
    errors
}

/// Returns an error if a tensor is on another device than `q`.
pub(crate) fn elsewhere(name: &str, tensor: &Tensor, q: &Tensor) -> Option<SpecError> {
    let (there, here) = (tensor.device().location(), q.device().location());
    let rule = || format!("{here:?}, the device of q");
    (!tensor.device().same_device(q.device())).then(|| SpecError::new(format!("{name} device"), format!("{there:?}"), rule()))
}

/// Returns the tensor detached from candle's autograd graph, contiguous and aligned to 16 bytes, as ranks send it. It copies the tensor if necessary.
pub(crate) fn compact(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.detach();
    if crate::pass::alignment(&tensor) < 16 { tensor.force_contiguous() } else { tensor.contiguous() }
}

/// Returns the tensor detached from candle's autograd graph and with a dense last axis. It copies the tensor if necessary, and prints a
/// note about the first copy. If `spread` is true, a last axis of stride 0 is not copied.
pub(crate) fn dense(name: &str, tensor: &Tensor, spread: bool) -> Result<Tensor> {
    static SAID: Once = Once::new();
    let tensor = tensor.detach();
    let stride = tensor.stride().last().copied().unwrap_or(1);
    if stride == 1 || (spread && stride == 0) || tensor.dim(D::Minus1)? <= 1 {
        return Ok(tensor);
    }
    SAID.call_once(|| {
        tracing::warn!(operand = name, strides = ?tensor.stride(), "copied, as the last axis is not dense; said once");
    });
    tensor.contiguous()
}
