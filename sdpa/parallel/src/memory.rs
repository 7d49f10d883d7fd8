//! Slots in host memory.
//!
//! A slot's elements are kept as f32, rounded to the slot's type. They travel in the slot's type.

use crate::schedule::{Extents, Role, Slot, Tensor};
use sdpa_core::half::{bf16, f16};
use sdpa_core::{Chunk, DType, Elements, ElementsMut, TensorSpec};
use std::ops::Range;

/// The elements of one slot.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) elements: Vec<f32>,
}

pub(crate) fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => x,
    }
}

/// Returns element `n` of an operand.
pub(crate) fn element(elements: &Elements<'_>, n: usize) -> f32 {
    match elements {
        Elements::F32(x) => x[n],
        Elements::F16(x) => x[n].to_f32(),
        Elements::BF16(x) => x[n].to_f32(),
        // Validation refuses 8-bit floats.
        Elements::F8E4M3(_) | Elements::F8E5M2(_) => f32::NAN,
    }
}

pub(crate) fn set(elements: &mut ElementsMut<'_>, n: usize, value: f32) {
    match elements {
        ElementsMut::F32(x) => x[n] = value,
        ElementsMut::F16(x) => x[n] = f16::from_f32(value),
        ElementsMut::BF16(x) => x[n] = bf16::from_f32(value),
        ElementsMut::F8E4M3(_) | ElementsMut::F8E5M2(_) => {}
    }
}

/// Owned elements of an operand's type.
#[derive(Debug)]
pub(crate) enum Typed {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Typed {
    /// Converts elements. `dtype` is f32, f16 or bf16.
    pub(crate) fn of(elements: &[f32], dtype: DType) -> Typed {
        match dtype {
            DType::F16 => Typed::F16(elements.iter().map(|x| f16::from_f32(*x)).collect()),
            DType::BF16 => Typed::BF16(elements.iter().map(|x| bf16::from_f32(*x)).collect()),
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => {
                Typed::F32(elements.to_vec())
            }
        }
    }

    pub(crate) fn elements(&self) -> Elements<'_> {
        match self {
            Typed::F32(x) => x.into(),
            Typed::F16(x) => x.into(),
            Typed::BF16(x) => x.into(),
        }
    }

    pub(crate) fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Typed::F32(x) => x.into(),
            Typed::F16(x) => x.into(),
            Typed::BF16(x) => x.into(),
        }
    }
}

impl Memory {
    /// Creates the memory of a slot: NaN until it is written, or the result of no contribution for an accumulator.
    pub(crate) fn new(slot: &Slot, extents: &Extents) -> Memory {
        let value = match (slot.role, slot.tensor) {
            (Role::Input | Role::Output | Role::Buffer, _) => f32::NAN,
            // Adding −0 changes no number, not even +0 and −0.
            (Role::Accumulator, Tensor::DQ | Tensor::DK | Tensor::DV) => -0.0,
            (Role::Accumulator, Tensor::RowMax) => f32::NEG_INFINITY,
            (Role::Accumulator, Tensor::Q | Tensor::K | Tensor::V | Tensor::O | Tensor::DO | Tensor::Stats | Tensor::SumExp) => 0.0,
        };
        Memory { elements: vec![value; (slot.len() * extents.per_token(slot)).max(0).unsigned_abs() as usize] }
    }

    /// Encodes `tokens` tokens from place `first` on in the slot's type.
    pub(crate) fn encode(&self, slot: &Slot, extents: &Extents, first: i64, tokens: i64) -> Vec<u8> {
        let elements = &self.elements[range(slot, extents, first, tokens)];
        match slot.dtype {
            DType::F16 => elements.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            DType::BF16 => elements.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => {
                elements.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
        }
    }

    /// Stores what [`Memory::encode`] made.
    pub(crate) fn decode(&mut self, slot: &Slot, extents: &Extents, first: i64, tokens: i64, bytes: &[u8]) {
        let elements = self.elements[range(slot, extents, first, tokens)].iter_mut();
        match slot.dtype {
            DType::F16 => elements.zip(bytes.as_chunks::<2>().0).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32()),
            DType::BF16 => elements.zip(bytes.as_chunks::<2>().0).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32()),
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => {
                elements.zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
        }
    }
}

fn range(slot: &Slot, extents: &Extents, first: i64, tokens: i64) -> Range<usize> {
    let per_token = extents.per_token(slot);
    (first * per_token).unsigned_abs() as usize..((first + tokens) * per_token).unsigned_abs() as usize
}

/// Returns the extents and strides of some heads and tokens of a slot as a tensor (batch, head, seq, dim), and the index of its first element. `None` if the
/// tokens are not neighbours in memory.
pub(crate) fn view(slot: &Slot, extents: &Extents, heads: &Range<i64>, chunk: &Chunk) -> Option<(TensorSpec, usize)> {
    let first = slot.contiguous(chunk)?;
    let (dim, all) = (extents.dim(slot.tensor), slot.heads.end - slot.heads.start);
    let dims = [extents.batch, heads.end - heads.start, chunk.len, dim];
    let strides = [all * dim, dim, extents.batch * all * dim, 1];
    let offset = first * extents.batch * all * dim + (heads.start - slot.heads.start) * dim;
    Some((TensorSpec { dims, strides, alignment: slot.dtype.bits() / 8 }, offset.unsigned_abs() as usize))
}

/// Calls `f` with the index of each element of a view, in row-major order of (batch, head, seq, dim).
pub(crate) fn each((tensor, offset): (TensorSpec, usize), mut f: impl FnMut(usize)) {
    let [batch, heads, seq, dim] = tensor.dims;
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                let row = offset as i64 + b * tensor.strides[0] + h * tensor.strides[1] + s * tensor.strides[2];
                (0..dim).for_each(|d| f((row + d * tensor.strides[3]).unsigned_abs() as usize));
            }
        }
    }
}
