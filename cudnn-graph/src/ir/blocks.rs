//! Layouts of block scales and pages, for verification and interpretation.

use super::op::PagedLoad;
use super::tensor::{Reordering, Tensor};

impl PagedLoad {
    /// Returns whether the result `y` of a paged load is (b, h, d, s): its third axis is the innermost.
    pub(crate) fn transposed(&self, y: &Tensor) -> bool {
        match y.strides.0[..] {
            [_, _, third, last] => third < last,
            _ => false,
        }
    }
}

/// Returns the elements per scale along each axis of a tensor of extents `dims`. An axis along which the scale has fewer elements has blocks; such
/// axes take the sizes above 1 in order. The list of sizes alone does not identify the axis. NVIDIA's frontend writes {1, 32} both for keys, with
/// blocks along the third axis, and for queries, with blocks along the fourth.
pub(crate) fn blocks_of(dims: &[i64], scale: &Tensor, block: &[i32]) -> Result<Vec<i64>, String> {
    let (scale_dims, mut sizes) = (&scale.dims.0, block.iter().filter(|&&size| size != 1));
    if let Some(size) = block.iter().find(|&&size| size < 1) {
        return Err(format!("block size {size} is below 1"));
    }
    if scale_dims.len() != dims.len() {
        return Err(format!("the scale has {} axes, expected {}, as the tensor has", scale_dims.len(), dims.len()));
    }
    let mut per_axis = Vec::with_capacity(dims.len());
    for (axis, (&n, &scales)) in dims.iter().zip(scale_dims).enumerate() {
        let size = if scales < n {
            i64::from(*sizes.next().ok_or_else(|| format!("axis {axis} has blocks, but the block sizes {block:?} have no entry for it"))?)
        } else {
            1
        };
        let need = (n - 1) / size + 1;
        let fits = match scale.reordering {
            Reordering::None => scales == need,
            Reordering::F8x128x4 => scales >= need,
        };
        if !fits {
            return Err(format!("the scale has extent {scales} along axis {axis}, expected {need}, or more with the reordering f8x128x4"));
        }
        per_axis.push(size);
    }
    if sizes.next().is_some() {
        return Err(format!("the block sizes {block:?} have more entries above 1 than there are axes with blocks"));
    }
    Ok(per_axis)
}
