//! Rules of single tensors.

use crate::*;
use cudnn_graph::ir::{Ragged, Scalar};

#[test]
fn tensor_rules() {
    check(vec![
        case("\"x\"", "rank 0 is not in", |g| exp_of(g, Tensor::device("x", F32, []))),
        case("\"x\"", "rank 9 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1; 9]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "extent 0 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [2, 0]));
            let y = g.tensor(Tensor::device("y", F32, [2, 3]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "extent 2147483648 is not in", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1 << 31]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "1 strides for 2 axes", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([1]))),
        case("\"x\"", "stride -1 is negative", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([3, -1]))),
        case("\"x\"", "does not fit in 64 bits", |g| exp_of(g, Tensor::device("x", F32, [2, 3]).strides([i64::MAX, 1]))),
        case("\"x\"", "does not fit in 64 bits", |g| {
            let x = g.tensor(Tensor::device("x", F32, [1 << 30, 1 << 30, 1 << 30]).strides([0, 0, 0]));
            let y = g.tensor(Tensor::device("y", F32, [1]));
            g.push(pointwise(Mode::Exp, x, y));
        }),
        case("\"x\"", "alignment 24 is not a power of two", |g| exp_of(g, Tensor::device("x", F32, [2]).alignment(24))),
        case("\"x\"", "alignment 0 is not a power of two", |g| exp_of(g, Tensor::device("x", F32, [2]).alignment(0))),
        case("\"value\"", "a value has one element, not [2]", |g| exp_of(g, value(F32, Storage::ByValue(None), &[2]))),
        case("\"value\"", "its value is i32, the tensor f32", |g| {
            exp_of(g, value(F32, Storage::ByValue(Some(Scalar::I32(1))), &[1]));
        }),
        case("\"value\"", "its value is f32, the tensor i64", |g| exp_of(g, value(I64, Storage::Constant(Scalar::F32(1.0)), &[1]))),
        case("t0 \"\"", "without a name", |g| exp_of(g, Tensor::device("", F32, [2]))),
        case("t1 \"y\"", "t0 has the name \"y\" already", |g| exp_of(g, Tensor::device("y", F32, [2]))),
    ]);
}

/// `exp` of a ragged tensor with these offsets.
fn ragged(offsets: Tensor, x: Storage, multiplier: Option<i64>) -> impl FnOnce(&mut Graph) {
    move |g| {
        let offsets = g.tensor(offsets);
        let x = Tensor { storage: x, ..Tensor::device("x", F32, [2, 1, 3, 4]) };
        exp_of(g, x.ragged(Ragged { offsets, multiplier }));
    }
}

#[test]
fn ragged_rules() {
    let offsets = |dtype, dims: [i64; 4]| Tensor::device("offsets", dtype, dims);
    let good = || offsets(I32, [3, 1, 1, 1]);
    check(vec![
        case("\"x\"", "offsets t99 do not exist", |g| {
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets: stranger(), multiplier: None }));
        }),
        case("\"x\"", "offsets t0 are f32", ragged(offsets(F32, [3, 1, 1, 1]), Storage::Device, None)),
        case("\"x\"", "offsets t0 are [2,1,1,1], not [3,1,1,1]", ragged(offsets(I64, [2, 1, 1, 1]), Storage::Device, None)),
        case("\"x\"", "offsets t1 are not in device memory", |g| {
            let seed = g.input("seed", I32, [3, 1, 1, 1]);
            let offsets = g.pointwise_as(Mode::Abs, &[seed], I32, I32, Params::default());
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"value\"", "a value cannot be ragged", |g| {
            let offsets = g.tensor(Tensor::device("offsets", I32, [2, 1, 1, 1]));
            exp_of(g, value(F32, Storage::ByValue(None), &[1, 1, 1, 1]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"x\"", "offsets t1 are the result of an op", |g| {
            let seed = g.input("seed", I32, [3, 1, 1, 1]);
            let offsets = g.pointwise_as(Mode::Abs, &[seed], I32, I32, Params::default());
            g.output(offsets, "offsets", I32);
            exp_of(g, Tensor::device("x", F32, [2, 1, 3, 4]).ragged(Ragged { offsets, multiplier: None }));
        }),
        case("\"x\"", "multiplier 0 is below 1", ragged(good(), Storage::Device, Some(0))),
    ]);
    let mut g = Graph::new();
    ragged(good(), Storage::Device, Some(4))(&mut g);
    g.verify().unwrap();
}
