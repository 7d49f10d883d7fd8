//! Rules of pointwise ops.

use super::{At, Class};
use crate::ir::op::Pointwise;
use crate::ir::pointwise::{Mode, Params, Signature};
use crate::ir::ty::DType;

pub(super) fn check(at: &mut At<'_>, op: &Pointwise) {
    params(at, op);
    if arity(at, op) {
        extents(at, op);
        types(at, op);
    }
}

fn arity(at: &mut At<'_>, op: &Pointwise) -> bool {
    let want = match op.mode.signature() {
        Signature::Unary | Signature::Identity | Signature::LogicalUnary | Signature::Index => (false, false, false),
        Signature::Binary | Signature::Compare | Signature::LogicalBinary => (true, false, false),
        Signature::Select => (true, true, false),
        Signature::Backward => (false, false, true),
    };
    let wrong: Vec<&str> = [
        ("b is missing", want.0 && op.b.is_none()),
        ("t is missing", want.1 && op.t.is_none()),
        ("dy is missing", want.2 && op.dy.is_none()),
        ("b is given but not used", !want.0 && op.b.is_some()),
        ("t is given but not used", !want.1 && op.t.is_some()),
        ("dy is given but not used", !want.2 && op.dy.is_some()),
    ]
    .into_iter()
    .filter_map(|(message, holds)| holds.then_some(message))
    .collect();
    at.rule(wrong.is_empty(), || format!("operands of {}: {}", op.mode, wrong.join(", ")))
}

fn extents(at: &mut At<'_>, op: &Pointwise) {
    let y = at.dims(op.y).to_vec();
    let mut reached = vec![1; y.len()];
    for (field, id) in [("x", Some(op.x)), ("b", op.b), ("t", op.t), ("dy", op.dy)] {
        let Some(id) = id else { continue };
        let dims = at.dims(id);
        if !at.rule(dims.len() == y.len(), || format!("{field} {id} has {} axes, expected {} as y {}", dims.len(), y.len(), op.y)) {
            return;
        }
        let fits = dims.iter().zip(&y).all(|(&d, &to)| d == 1 || d == to);
        if !at.rule(fits, || format!("{field} {id} does not broadcast to y {}", op.y)) {
            return;
        }
        for (have, &d) in reached.iter_mut().zip(dims) {
            *have = d.max(*have);
        }
    }
    at.rule(reached == y, || format!("y {} is larger than its operands", op.y));
}

fn types(at: &mut At<'_>, op: &Pointwise) {
    let operands = [("x", Some(op.x)), ("b", op.b), ("t", op.t), ("dy", op.dy)];
    let every = |at: &mut At<'_>, class: Class| {
        for (field, id) in operands {
            if let Some(id) = id {
                at.type_in(field, id, class);
            }
        }
    };
    match op.mode.signature() {
        Signature::Unary | Signature::Binary => {
            every(at, Class::Number);
            at.type_in("y", op.y, Class::Number);
            at.compute_in(op.compute, if works_on_integers(op.mode) { Class::Number } else { Class::Float });
        }
        Signature::Backward => {
            every(at, Class::Float);
            at.type_in("y", op.y, Class::Float);
            at.compute_in(op.compute, Class::Float);
        }
        Signature::Identity => {
            if op.compute != DType::Bool {
                at.compute_in(op.compute, Class::Number);
            }
        }
        Signature::Compare => {
            every(at, Class::Number);
            if op.compute != DType::Bool {
                at.compute_in(op.compute, Class::Number);
            }
        }
        Signature::LogicalBinary | Signature::LogicalUnary => {
            every(at, Class::Logic);
            at.type_in("y", op.y, Class::Logic);
            at.compute_in(op.compute, Class::Logic);
        }
        Signature::Index => {
            at.type_in("y", op.y, Class::Integer);
            at.compute_in(op.compute, Class::IntegerArithmetic);
            let rank = at.dims(op.y).len();
            if let Some(axis) = op.params.axis {
                at.rule(usize::try_from(axis).is_ok_and(|a| a < rank), || format!("axis is {axis}, but y has {rank} axes"));
            } else {
                at.fail("axis is missing");
            }
        }
        Signature::Select => {
            let bools = at.dtype(op.y) == DType::Bool;
            for (field, id) in [("x", Some(op.x)), ("b", op.b)] {
                if let Some(id) = id {
                    let is = at.dtype(id);
                    at.rule((is == DType::Bool) == bools, || {
                        format!("{field} {id} is {is}, but y {} is {}", op.y, if bools { "bool" } else { "a number" })
                    });
                }
            }
            if let Some(t) = op.t {
                at.type_in("t", t, Class::Logic);
            }
            if op.compute != DType::Bool || !bools {
                at.compute_in(op.compute, Class::Number);
            }
        }
    }
}

/// Returns whether [`crate::ir::interp`] defines the mode on integers too.
fn works_on_integers(mode: Mode) -> bool {
    [Mode::Add, Mode::Sub, Mode::Mul, Mode::Min, Mode::Max, Mode::Div, Mode::Mod, Mode::FloorMod, Mode::AddSquare, Mode::Abs, Mode::Neg]
        .contains(&mode)
}

fn params(at: &mut At<'_>, op: &Pointwise) {
    let Params { axis, relu_lower_clip, relu_upper_clip, relu_lower_slope, elu_alpha, softplus_beta, swish_beta } = op.params;
    let relu = [Mode::ReluFwd, Mode::ReluBwd].contains(&op.mode);
    let elu = [Mode::EluFwd, Mode::EluBwd].contains(&op.mode);
    let softplus = [Mode::SoftplusFwd, Mode::SoftplusBwd].contains(&op.mode);
    let swish = [Mode::SwishFwd, Mode::SwishBwd].contains(&op.mode);
    at.rule(axis.is_none() || op.mode == Mode::GenIndex, || format!("axis is not an attribute of {}", op.mode));
    let constants = [
        ("relu_lower_clip", relu_lower_clip, relu),
        ("relu_upper_clip", relu_upper_clip, relu),
        ("relu_lower_slope", relu_lower_slope, relu),
        ("elu_alpha", elu_alpha, elu),
        ("softplus_beta", softplus_beta, softplus),
        ("swish_beta", swish_beta, swish),
    ];
    for (name, value, belongs) in constants {
        if at.rule(value.is_none() || belongs, || format!("{name} is not an attribute of {}", op.mode)) {
            at.rule(!value.is_some_and(f64::is_nan), || format!("{name} is not a number"));
        }
    }
    at.rule(!(softplus && softplus_beta == Some(0.0)), || "softplus_beta is zero".to_owned());
    let (lower, upper) = (relu_lower_clip.unwrap_or(0.0), relu_upper_clip.unwrap_or(f64::INFINITY));
    at.rule(!relu || lower.is_nan() || upper.is_nan() || lower <= upper, || {
        format!("relu clips {lower} and {upper} are the wrong way round")
    });
}
