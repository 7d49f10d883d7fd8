//! Rules of paged caches and block scales.

use super::{At, Class};
use crate::ir::blocks::blocks_of;
use crate::ir::op::{BlockScaleDequantize, BlockScaleQuantize, PagedLoad};
use crate::ir::tensor::{Reordering, TensorId};
use crate::ir::ty::{DType, Dims};

pub(super) fn paged_load(at: &mut At<'_>, op: &PagedLoad) {
    at.type_like("y", op.y, ("container", op.container));
    at.type_in("seq_len", op.seq_len, Class::IntegerArithmetic);
    at.type_is("page_table", op.page_table, DType::I32);
    let (container, y) = (at.dims(op.container).to_vec(), at.dims(op.y).to_vec());
    let both = container.len() == 4 && y.len() == 4;
    if !at.rule(both, || "container and y are not (blocks, h, block, d) and (b, h, s, d)".to_owned()) {
        return;
    }
    at.rule(container[2].count_ones() == 1, || format!("pages have {} tokens, expected a power of two", container[2]));
    let strides = at.tensor(op.y).strides.clone();
    let ordered = (strides.0[2] == 1) != (strides.0[3] == 1);
    if !at.rule(ordered, || format!("y {} has strides {strides}, expected 1 along exactly one of the last two axes", op.y)) {
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
    scaled(at, (op.x, Class::Float), op.y, op.scale, &op.block);
    at.rule(op.block.len() == 1, || format!("got {} block sizes, expected one, for the last axis", op.block.len()));
    let y = at.tensor(op.y);
    let contiguous = y.strides.0.iter().rev().take(2).any(|&s| s == 1);
    at.rule(contiguous, || format!("y {} has strides {}, expected 1 along one of the last two axes", op.y, y.strides));
    let narrow = [DType::F8E4M3, DType::F8E5M2, DType::F4E2M1];
    let got = at.dtype(op.y);
    at.rule(narrow.contains(&got), || format!("y {} is {got}, expected f8e4m3, f8e5m2 or f4e2m1", op.y));
    let (rank, scale) = (at.dims(op.x).len(), at.tensor(op.scale));
    let reordered = scale.reordering == Reordering::F8x128x4;
    at.rule(reordered == (rank == 3), || {
        format!(
            "the scale has {} reordering f8x128x4, which tensors of 3 axes need and others cannot have",
            if reordered { "the" } else { "no" }
        )
    });
    if let ([n, rows, last], &[block], true) = (at.dims(op.x), &op.block[..], reordered) {
        let blocks = (last - 1) / i64::from(block.max(1)) + 1;
        let want = Dims(vec![*n, (rows - 1) / 128 * 128 + 128, (blocks - 1) / 4 * 4 + 4]);
        let holds = scale.dims == want && scale.strides == want.packed();
        at.rule(holds, || format!("the scale is {} with strides {}, expected {want} with {}", scale.dims, scale.strides, want.packed()));
    }
}

pub(super) fn dequantize(at: &mut At<'_>, op: &BlockScaleDequantize) {
    at.compute_in(op.compute, Class::Float);
    scaled(at, (op.x, Class::Number), op.y, op.scale, &op.block);
    at.rule(op.block.len() <= 2, || format!("got {} block sizes, expected at most 2", op.block.len()));
}

fn scaled(at: &mut At<'_>, (x, class): (TensorId, Class), y: TensorId, scale: TensorId, block: &[i32]) {
    for (field, id, class) in [("x", x, class), ("y", y, Class::Float), ("scale", scale, Class::Float)] {
        at.type_in(field, id, class);
    }
    let dims = at.dims(x).to_vec();
    at.extents("y", y, &dims);
    if let Err(message) = blocks_of(&dims, at.tensor(scale), block) {
        at.fail(message);
    }
}
