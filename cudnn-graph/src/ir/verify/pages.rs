//! Rules of paged caches and block scales.

use super::{At, Class};
use crate::ir::blocks::blocks_of;
use crate::ir::op::{BlockScaleDequantize, BlockScaleQuantize, PagedLoad};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn paged_load(at: &mut At<'_>, op: &PagedLoad) {
    at.same_kind(op.container, op.y);
    at.type_in("seq_len", op.seq_len, Class::Integer);
    at.type_is("page_table", op.page_table, DType::I32);
    let (container, y) = (at.dims(op.container).to_vec(), at.dims(op.y).to_vec());
    let both = container.len() == 4 && y.len() == 4;
    if !at.rule(both, || "container and y are not (blocks, h, block, d) and (b, h, s, d)".to_owned()) {
        return;
    }
    let (s, d) = if op.transposed(at.tensor(op.y)) { (y[3], y[2]) } else { (y[2], y[3]) };
    at.rule(y[1] == container[1], || format!("y has {} heads, the container {}", y[1], container[1]));
    at.rule(d == container[3], || format!("y has heads of {d} elements, the container of {}", container[3]));
    at.extents("seq_len", op.seq_len, &[y[0], 1, 1, 1]);
    let pages = (s - 1) / container[2] + 1;
    at.extents("page_table", op.page_table, &[y[0], 1, pages, 1]);
}

pub(super) fn quantize(at: &mut At<'_>, op: &BlockScaleQuantize) {
    at.compute_in(op.compute, Class::Float);
    scaled(at, op.x, op.y, op.scale, &op.block);
    at.rule(op.block.len() == 1, || format!("got {} block sizes, expected one, for the last axis", op.block.len()));
}

pub(super) fn dequantize(at: &mut At<'_>, op: &BlockScaleDequantize) {
    at.compute_in(op.compute, Class::Float);
    scaled(at, op.x, op.y, op.scale, &op.block);
}

fn scaled(at: &mut At<'_>, x: TensorId, y: TensorId, scale: TensorId, block: &[i32]) {
    for (field, id) in [("x", x), ("y", y), ("scale", scale)] {
        at.type_in(field, id, Class::Float);
    }
    let dims = at.dims(x).to_vec();
    at.extents("y", y, &dims);
    if let Err(message) = blocks_of(&dims, at.tensor(scale), block) {
        at.fail(message);
    }
}
