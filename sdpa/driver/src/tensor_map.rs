//! Tensor maps: a tensor in global memory and the box of it that TMA copies at once.

use crate::error::Error;
use crate::submission::Submission;
use std::ffi::{c_int, c_uint};

/// A `CUtensorMap`, as the driver encodes it: opaque, passed to kernels by value. Made by [`Submission::tensor_map`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

const TWO_BYTES: c_int = 1;
const INTERLEAVE_NONE: c_int = 0;
const SWIZZLE_128: c_int = 3;
const PROMOTE_256: c_int = 3;
const FILL_ZEROS: c_int = 0;
const RANK: usize = 4;

/// A tensor of four axes with elements of two bytes, which TMA brings to shared memory box by box, in rows of 128 bytes,
/// swizzled as the tensor cores read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiled {
    /// Elements along each axis, the dense one first.
    pub extents: [u64; RANK],
    /// Bytes from one element to the next along each axis but the first: multiples of 16, below 2⁴⁰.
    pub strides: [u64; RANK - 1],
    /// Elements of a box along each axis: at most 64 along the first, 256 along the others.
    pub tile: [u32; RANK],
}

impl Submission<'_> {
    /// Encodes the map of a tensor at an address that is a multiple of 16. What a box reaches past the extents reads as zero, and is not written.
    ///
    /// # Errors
    /// A driver error: an address, strides or a box that TMA does not take.
    pub fn tensor_map(&self, address: u64, tiled: &Tiled) -> Result<TensorMap, Error> {
        let mut map = TensorMap::default();
        let ones = [1u32; RANK];
        // SAFETY: the map is 128 bytes, aligned to 64, and every array has as many elements as the rank says.
        let code = unsafe {
            (self.device().modules()?.encode)(
                (&raw mut map).cast(),
                TWO_BYTES,
                RANK as c_uint,
                address,
                tiled.extents.as_ptr(),
                tiled.strides.as_ptr(),
                tiled.tile.as_ptr(),
                ones.as_ptr(),
                INTERLEAVE_NONE,
                SWIZZLE_128,
                PROMOTE_256,
                FILL_ZEROS,
            )
        };
        self.device().check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}
