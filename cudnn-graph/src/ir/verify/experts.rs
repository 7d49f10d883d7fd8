//! Rules of concatenations, grouped matrix products and rotary embeddings.

use super::{At, Class};
use crate::ir::op::{Concat, MoeMatmul, MoeMatmulBackward, Rope, RopeBackward, Routing};
use crate::ir::tensor::TensorId;
use crate::ir::ty::DType;

pub(super) fn concat(at: &mut At<'_>, op: &Concat) {
    if !at.rule(!op.inputs.is_empty(), || "got no inputs, expected at least one".to_owned()) {
        return;
    }
    let y = at.dims(op.y).to_vec();
    let axis = usize::try_from(op.axis).ok().filter(|&axis| axis < y.len());
    let Some(axis) = axis else { return at.fail(format!("axis is {}, but y has {} axes", op.axis, y.len())) };
    let mut joined = 0i64;
    for &id in &op.inputs {
        let (got, want) = (at.dtype(id), at.dtype(op.y));
        at.rule(got == want, || format!("x {id} is {got}, but y {} is {want}", op.y));
        let dims = at.tensor(id).dims.clone();
        let fits = dims.0.len() == y.len() && dims.0.iter().zip(&y).enumerate().all(|(n, (a, b))| n == axis || a == b);
        if !at.rule(fits, || format!("x {id} is {dims}, expected the extents of y except along axis {axis}")) {
            return;
        }
        joined = joined.saturating_add(dims.0[axis]);
    }
    at.rule(joined == y[axis], || format!("axis {axis} of y is {}, expected {joined}", y[axis]));
}

pub(super) fn moe_matmul(at: &mut At<'_>, op: &MoeMatmul) {
    for (field, id) in [("tokens", op.tokens), ("weights", op.weights), ("y", op.y)] {
        at.type_in(field, id, Class::Number);
    }
    at.compute_in(op.compute, Class::Number);
    let (tokens, weights) = (at.dims(op.tokens).to_vec(), at.dims(op.weights).to_vec());
    if !three(at, [("tokens", &tokens), ("weights", &weights)]) {
        return;
    }
    at.rule(tokens[2] == weights[1], || format!("tokens have {} inner elements, weights {}", tokens[2], weights[1]));
    first_token(at, op.first_token, weights[0]);
    let rows = match op.routing {
        Routing::None => tokens[1],
        Routing::Gather(index) => {
            let dims = at.dims(index).to_vec();
            let rows = dims.get(1).copied().unwrap_or(1);
            route(at, "index", index, rows);
            rows
        }
        Routing::Scatter { index, slot, top_k } => {
            route(at, "index", index, tokens[1]);
            route(at, "slot", slot, tokens[1]);
            at.rule(top_k >= 1 && tokens[1] % i64::from(top_k) == 0, || {
                format!("top_k is {top_k}, expected a number of at least 1 that divides the {} rows", tokens[1])
            });
            tokens[1]
        }
    };
    at.extents("y", op.y, &[1, rows, weights[2]]);
}

pub(super) fn moe_matmul_backward(at: &mut At<'_>, op: &MoeMatmulBackward) {
    for (field, id) in [("tokens", op.tokens), ("dy", op.dy), ("dweights", op.dweights)] {
        at.type_in(field, id, Class::Number);
    }
    at.compute_in(op.compute, Class::Number);
    let (tokens, weights) = (at.dims(op.tokens).to_vec(), at.dims(op.dweights).to_vec());
    if !three(at, [("tokens", &tokens), ("dweights", &weights)]) {
        return;
    }
    at.rule(tokens[2] == weights[1], || format!("tokens have {} inner elements, dweights {}", tokens[2], weights[1]));
    first_token(at, op.first_token, weights[0]);
    at.extents("dy", op.dy, &[1, tokens[1], weights[2]]);
}

fn three(at: &mut At<'_>, [tokens, weights]: [(&str, &[i64]); 2]) -> bool {
    let rows = at.rule(matches!(tokens.1, [1, _, _]), || format!("{} have extents {:?}, expected (1, rows, k)", tokens.0, tokens.1));
    let experts = at.rule(weights.1.len() == 3, || format!("{} have extents {:?}, expected (experts, k, n)", weights.0, weights.1));
    rows && experts
}

fn first_token(at: &mut At<'_>, id: TensorId, experts: i64) {
    at.extents("first_token", id, &[experts, 1, 1]);
    at.type_is("first_token", id, DType::I32);
}

fn route(at: &mut At<'_>, field: &str, id: TensorId, rows: i64) {
    at.extents(field, id, &[1, rows, 1]);
    at.type_is(field, id, DType::I32);
}

pub(super) fn rope(at: &mut At<'_>, op: &Rope) {
    rotation(at, ("x", op.x), ("y", op.y), op.angles, op.scale, op.width);
}

pub(super) fn rope_backward(at: &mut At<'_>, op: &RopeBackward) {
    rotation(at, ("dy", op.dy), ("dx", op.dx), op.angles, op.scale, op.width);
}

fn rotation(at: &mut At<'_>, from: (&str, TensorId), to: (&str, TensorId), angles: TensorId, scale: f32, width: Option<i64>) {
    for (field, id) in [from, to, ("angles", angles)] {
        at.type_in(field, id, Class::Float);
    }
    at.rule(scale.is_finite(), || format!("scale is {scale}, expected a finite number"));
    let x = at.dims(from.1).to_vec();
    if !at.rule(x.len() == 4, || format!("{} {} has {} axes, expected (b, h, s, d)", from.0, from.1, x.len())) {
        return;
    }
    at.extents(to.0, to.1, &x);
    at.type_like(to.0, to.1, from);
    let width = width.unwrap_or(x[3]);
    if at.rule(width >= 2 && width % 2 == 0 && width <= x[3], || {
        format!("width is {width}, expected an even number from 2 to the {} elements of a head", x[3])
    }) {
        at.extents("angles", angles, &[x[2], 1, 1, width]);
    }
}
