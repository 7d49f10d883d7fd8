//! Tensor maps: a tensor in global memory, and the box that one TMA operation copies.

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

/// A tensor of four axes with two-byte elements, for TMA loads into shared memory in rows of 128 bytes with the swizzle that the tensor cores read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiled {
    /// Elements along each axis, the dense one first.
    pub extents: [u64; RANK],
    /// Bytes between elements along each axis except the first: multiples of 16, below 2⁴⁰.
    pub strides: [u64; RANK - 1],
    /// Elements of a box along each axis: at most 64 along the first, 256 along the others.
    pub tile: [u32; RANK],
}

impl Submission<'_> {
    /// Encodes the tensor map of a tensor at an address that is a multiple of 16. Parts of a box past the extents read as zero and are not written.
    ///
    /// # Errors
    /// A driver error: an address, strides or a box that TMA does not support.
    pub fn tensor_map(&self, address: u64, tiled: &Tiled) -> Result<TensorMap, Error> {
        let mut map = TensorMap::default();
        let ones = [1u32; RANK];
        // SAFETY: the map is 128 bytes, aligned to 64, and every array has the length of the rank.
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
