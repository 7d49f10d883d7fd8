//! Tensor maps: a tensor in global memory, and the box that one TMA operation copies.

use crate::error::Error;
use crate::submission::Submission;
use std::ffi::{c_int, c_uint};

/// A `CUtensorMap`, as the driver encodes it. It is opaque, and is passed to kernels by value. [`Submission::tensor_map`] creates it.
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
    /// Number of elements along each axis, the dense axis first.
    pub extents: [u64; RANK],
    /// Distance in bytes between elements along each axis except the first. Each is a multiple of 16 and below 2⁴⁰.
    pub strides: [u64; RANK - 1],
    /// Number of elements of a box along each axis: at most 64 along the first axis, and at most 256 along the others.
    pub tile: [u32; RANK],
}

impl Submission<'_> {
    /// Encodes the tensor map of a tensor at an address that is a multiple of 16. TMA reads parts of a box past the extents as zero, and
    /// does not write them.
    ///
    /// # Errors
    /// Returns a driver error if TMA does not support the address, the strides or the box.
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
