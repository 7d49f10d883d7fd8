//! Tensors in device memory, and the places of a pass's memory.

use crate::memory::view;
use crate::schedule::{Extents, Slot};
use sdpa_core::{Chunk, DType, TensorSpec};
use sdpa_driver::DeviceSlice;
use std::ops::Range;

/// The boundary at which places begin, in bytes.
const BOUNDARY: u64 = 256;

/// A tensor in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
}

impl View {
    pub(crate) fn new(address: u64, dtype: DType, tensor: &TensorSpec) -> View {
        View { address, dtype, dims: tensor.dims, strides: tensor.strides }
    }

    /// Returns a dense tensor, row-major.
    pub(crate) fn dense(address: u64, dtype: DType, dims: [i64; 4]) -> View {
        View { address, dtype, dims, strides: row_major(dims) }
    }

    /// Returns the part of a slot's memory with these heads and tokens, as (batch, head, seq, dim). `None` if the tokens are not neighbours in memory.
    pub(crate) fn of(address: u64, slot: &Slot, extents: &Extents, heads: &Range<i64>, chunk: &Chunk) -> Option<View> {
        let (tensor, offset) = view(slot, extents, heads, chunk)?;
        Some(View::new(address + bytes(slot.dtype, offset as i64), slot.dtype, &tensor))
    }

    /// Returns some heads of a slot with all of its tokens, in memory order.
    pub(crate) fn tokens_of(address: u64, slot: &Slot, extents: &Extents, heads: &Range<i64>) -> View {
        let (dim, own) = (extents.dim(slot.tensor), slot.heads.end - slot.heads.start);
        let address = address + bytes(slot.dtype, (heads.start - slot.heads.start) * dim);
        let dims = [extents.batch, heads.end - heads.start, slot.len(), dim];
        View { address, dtype: slot.dtype, dims, strides: [own * dim, dim, extents.batch * own * dim, 1] }
    }

    /// Returns elements `run` of the third axis.
    pub(crate) fn tokens(&self, run: &Chunk) -> View {
        let [batch, heads, _, dim] = self.dims;
        let strides = [self.strides[0], self.strides[1], self.strides[2] * run.stride, self.strides[3]];
        let address = self.address + bytes(self.dtype, run.start * self.strides[2]);
        View { address, dims: [batch, heads, run.len, dim], strides, ..*self }
    }

    /// Returns the memory from the first element to the last one. Strides are not negative.
    pub(crate) fn slice(&self) -> DeviceSlice {
        let last: i64 = self.dims.iter().zip(self.strides).map(|(dim, stride)| (dim - 1) * stride).sum();
        let elements = if self.dims.contains(&0) { 0 } else { last + 1 };
        DeviceSlice { address: self.address, bytes: bytes(self.dtype, elements) }
    }
}

pub(crate) fn row_major([_, b, c, d]: [i64; 4]) -> [i64; 4] {
    [b * c * d, c * d, d, 1]
}

/// Returns the bytes of this many elements of a type with whole bytes.
pub(crate) fn bytes(dtype: DType, elements: i64) -> u64 {
    elements.unsigned_abs() * u64::from(dtype.bits() / 8)
}

/// Returns the largest power of two up to 16 that divides the address of a tensor's first element, relative to a place on a boundary.
pub(crate) fn alignment(offset: u64) -> u32 {
    1 << offset.trailing_zeros().min(4)
}

/// Memory that is given out in order of use. Pieces whose uses do not overlap share memory.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// The first byte, the bytes, and the first and last step of each piece.
    given: Vec<(u64, u64, [usize; 2])>,
    end: u64,
}

impl Places {
    /// Returns the place of a piece that is in use from one step to another. Call it in the order of first steps.
    pub(crate) fn place(&mut self, bytes: u64, life: [usize; 2]) -> u64 {
        let overlapping = |(_, _, [first, last]): &&(u64, u64, [usize; 2])| *first <= life[1] && life[0] <= *last;
        let mut taken: Vec<(u64, u64)> = self.given.iter().filter(overlapping).map(|(at, bytes, _)| (*at, at + bytes)).collect();
        taken.sort_unstable();
        let mut at = 0;
        for (first, end) in taken {
            if at + bytes <= first {
                break;
            }
            at = at.max(end.next_multiple_of(BOUNDARY));
        }
        self.given.push((at, bytes, life));
        self.end = self.end.max(at + bytes);
        at
    }

    /// Returns the bytes of all places.
    pub(crate) fn bytes(&self) -> u64 {
        self.end.next_multiple_of(BOUNDARY)
    }
}

/// Pieces that are in use together, one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    end: u64,
}

impl Scratch {
    pub(crate) fn piece(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(BOUNDARY);
        at
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_share_memory_if_their_uses_do_not_overlap() {
        let mut places = Places::default();
        let at: Vec<u64> = [(1000, [0, 3]), (10, [0, 1]), (300, [2, 4]), (700, [4, 5])].map(|(n, life)| places.place(n, life)).into();
        assert_eq!(at, [0, 1024, 1024, 0]);
        assert_eq!(places.bytes(), 1536);
        // A gap that is too small is left.
        assert_eq!(places.place(2000, [4, 4]), 1536);
    }

    #[test]
    fn alignments_are_those_of_the_first_byte() {
        assert_eq!([0, 2, 4, 24, 48, 256].map(alignment), [16, 2, 4, 8, 16, 16]);
    }
}
