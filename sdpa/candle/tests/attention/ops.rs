//! The ops that replace candle-nn's fused ones: values against formulas in f64, gradients against central differences of them.

use crate::errors::told;
use crate::textbook::{CPU, Random, close};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::rotary_emb;
use sdpa_candle::ops;

/// The step of central differences: their error is about its square.
const STEP: f64 = 1e-5;

type Formula<'a> = &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>;

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns the gradient of `Σ weights · formula` by argument `n`, by central differences.
fn differences(formula: Formula<'_>, at: &[Vec<f64>], n: usize, weights: &[f64]) -> Vec<f64> {
    let sum = |at: &[Vec<f64>]| formula(at).iter().zip(weights).map(|(y, w)| y * w).sum::<f64>();
    let mut moved = at.to_vec();
    (0..at[n].len())
        .map(|i| {
            let mut along = |step: f64| {
                moved[n][i] = at[n][i] + step;
                let sum = sum(&moved);
                moved[n][i] = at[n][i];
                sum
            };
            (along(STEP) - along(-STEP)) / (2. * STEP)
        })
        .collect()
}

/// Compares an op over variables with a formula over their numbers: the value, and the gradient of a weighted sum by every variable.
fn check(what: &str, op: &dyn Fn(&[&Tensor]) -> Result<Tensor>, formula: Formula<'_>, variables: &[Var], tolerance: f64) {
    let arguments: Vec<&Tensor> = variables.iter().map(|x| x.as_tensor()).collect();
    let at: Vec<Vec<f64>> = arguments.iter().map(|x| numbers(x)).collect();
    let y = op(&arguments).unwrap();
    let of = |numbers: Vec<f64>, like: &Tensor| Tensor::from_vec(numbers, like.dims(), &CPU).unwrap();
    close(what, &y, &of(formula(&at), &y), tolerance);
    let weights = Random::new(99).tensor(y.dims()).to_dtype(y.dtype()).unwrap();
    let gradients = (&y * &weights).unwrap().sum_all().unwrap().backward().unwrap();
    for (n, x) in variables.iter().enumerate() {
        let gradient = gradients.get(x).unwrap_or_else(|| panic!("{what}: argument {n} has no gradient"));
        assert_eq!(gradient.dtype(), x.dtype(), "{what}");
        let want = of(differences(formula, &at, n, &numbers(&weights)), x);
        close(&format!("{what}: gradient of argument {n}"), gradient, &want, tolerance);
    }
    let detached: Vec<Tensor> = arguments.iter().map(|x| x.detach()).collect();
    let plain = op(&detached.iter().collect::<Vec<_>>()).unwrap();
    assert!(y.track_op() && !plain.track_op(), "{what}");
    close(&format!("{what}, untracked"), &plain, &y, 0.);
}

fn var(random: &mut Random, dims: &[usize], dtype: DType) -> Var {
    Var::from_tensor(&random.tensor(dims).to_dtype(dtype).unwrap()).unwrap()
}

const TYPES: [(DType, f64); 4] = [(DType::F32, 1e-6), (DType::F64, 1e-9), (DType::F16, 4e-3), (DType::BF16, 3e-2)];

type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// Rotates a contiguous (batch, heads, seq, dim), or (batch, seq, heads, dim), by the angle of (batch, position, pair).
fn rotated(x: &[f64], dims: [usize; 4], seq: usize, adjacent: bool, angle: &dyn Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let dim = dims[3];
    let mut y = vec![0.; x.len()];
    for row in 0..x.len() / dim {
        let at = [row / (dims[1] * dims[2]), row / dims[2] % dims[1], row % dims[2]];
        for pair in 0..dim / 2 {
            let [a, b] = if adjacent { [2 * pair, 2 * pair + 1] } else { [pair, pair + dim / 2] }.map(|i| row * dim + i);
            let (sin, cos) = angle(at[0], at[seq], pair).sin_cos();
            (y[a], y[b]) = (x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos);
        }
    }
    y
}

const ROPES: [(&str, Rope, Rope, usize, bool); 3] = [
    ("rope", ops::rope, rotary_emb::rope, 2, false),
    ("rope_i", ops::rope_i, rotary_emb::rope_i, 2, true),
    ("rope_thd", ops::rope_thd, rotary_emb::rope_thd, 1, false),
];

#[test]
fn rotations_and_their_gradients() {
    for (name, op, theirs, seq, adjacent) in ROPES {
        for (dtype, tolerance) in TYPES {
            for batched in [false, true] {
                let what = format!("{name} {dtype:?} {batched}");
                let mut random = Random::new(21);
                let dims = [2, 3, 4, 6];
                let rows = dims[seq] + 2;
                // The tables have two more positions than `x`.
                let angles = random.tensor(&[2, rows, 3]);
                let angles = if batched { angles } else { angles.narrow(0, 0, 1).unwrap().squeeze(0).unwrap() };
                let table = |x: Tensor| x.to_dtype(dtype).unwrap();
                let (cos, sin) = (table(angles.cos().unwrap()), table(angles.sin().unwrap()));
                let angles = numbers(&angles);
                let angle = |b: usize, row: usize, pair: usize| angles[(if batched { b } else { 0 } * rows + row) * 3 + pair];
                let formula = |x: &[Vec<f64>]| rotated(&x[0], dims, seq, adjacent, &angle);
                let x = var(&mut random, &dims, dtype);
                // Angles are rounded to f32 before their sines are.
                check(&what, &|x| op(x[0], &cos, &sin), &formula, std::slice::from_ref(&x), tolerance.max(1e-6));
                if !batched {
                    close(&what, &op(&x, &cos, &sin).unwrap(), &theirs(&x, &cos, &sin).unwrap(), 0.);
                }
                // The gradient of a sum is one number in memory, repeated by strides of 0.
                let sum = op(&x, &cos, &sin).unwrap().sum_all().unwrap().backward().unwrap();
                let ones = (x.as_tensor().ones_like().unwrap() * 1.).unwrap();
                let weighted = (op(&x, &cos, &sin).unwrap() * ones).unwrap().sum_all().unwrap().backward().unwrap();
                close(&what, sum.get(&x).unwrap(), weighted.get(&x).unwrap(), 0.);
            }
        }
    }
}

#[test]
fn views_are_rotated_and_normalised() {
    let mut random = Random::new(22);
    // (batch, seq, 3, heads, dim), from which the heads of the second part are read.
    let qkv = random.var(&[2, 4, 3, 2, 6]);
    let view = |x: &Tensor| x.narrow(2, 1, 1).unwrap().squeeze(2).unwrap().transpose(1, 2).unwrap();
    let angles = random.tensor(&[4, 3]);
    let (cos, sin, weight) = (angles.cos().unwrap(), angles.sin().unwrap(), random.var(&[6]));
    assert!(!view(&qkv).is_contiguous() && view(&qkv).layout().start_offset() > 0);
    let got = ops::rope(&ops::rms_norm(&view(&qkv), &weight, 1e-5).unwrap(), &cos, &sin).unwrap();
    let wide = |x: &Tensor| Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap();
    let (wq, ww) = (wide(&qkv), wide(&weight));
    let [cos, sin] = [cos, sin].map(|x| x.to_dtype(DType::F64).unwrap());
    let normed = candle_nn::ops::rms_norm_slow(&view(&wq).contiguous().unwrap(), &ww, 1e-5).unwrap();
    let want = rotary_emb::rope_slow(&normed, &cos, &sin).unwrap();
    let pairs: [(&str, &Tensor, &Tensor); 2] = [("qkv", &qkv, &wq), ("weight", &weight, &ww)];
    crate::textbook::compare("views", (&got, &want), &random.tensor(&[2, 2, 4, 6]), &pairs);
}

const EPS: f32 = 0.125;

fn rows(x: &[f64], dim: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    x.chunks(dim).flat_map(f).collect()
}

fn mean(x: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = x.len() as f64;
    x.sum::<f64>() / count
}

#[test]
fn norms_and_their_gradients() {
    for (dtype, tolerance) in TYPES {
        let mut random = Random::new(23);
        // More than 32 rows, after which candle divides the rows among threads.
        let [x, weight, bias] = [&[3, 13, 5][..], &[5], &[5]].map(|dims| var(&mut random, dims, dtype));
        let rms = |at: &[Vec<f64>]| {
            rows(&at[0], 5, |x| {
                let root = (mean(x.iter().map(|x| x * x)) + f64::from(EPS)).sqrt();
                x.iter().zip(&at[1]).map(|(x, w)| x / root * w).collect()
            })
        };
        let op = |x: &[&Tensor]| ops::rms_norm(x[0], x[1], EPS);
        check(&format!("rms {dtype:?}"), &op, &rms, &[x.clone(), weight.clone()], tolerance);
        let layer = |at: &[Vec<f64>]| {
            rows(&at[0], 5, |x| {
                let middle = mean(x.iter().copied());
                let root = (mean(x.iter().map(|x| (x - middle).powi(2))) + f64::from(EPS)).sqrt();
                x.iter().zip(at[1].iter().zip(&at[2])).map(|(x, (w, b))| (x - middle) / root * w + b).collect()
            })
        };
        let op = |x: &[&Tensor]| ops::layer_norm(x[0], x[1], x[2], EPS);
        check(&format!("layer {dtype:?}"), &op, &layer, &[x.clone(), weight.clone(), bias.clone()], tolerance);
        if dtype != DType::F64 {
            close("rms", &ops::rms_norm(&x, &weight, EPS).unwrap(), &candle_nn::ops::rms_norm(&x, &weight, EPS).unwrap(), 0.);
            let theirs = candle_nn::ops::layer_norm(&x, &weight, &bias, EPS).unwrap();
            close("layer", &ops::layer_norm(&x, &weight, &bias, EPS).unwrap(), &theirs, 0.);
        }
    }
}

#[test]
fn softmax_and_its_gradient() {
    for (dtype, tolerance) in TYPES {
        let mut random = Random::new(24);
        let x = var(&mut random, &[2, 3, 7], dtype);
        let formula = |at: &[Vec<f64>]| {
            rows(&at[0], 7, |x| {
                let sum: f64 = x.iter().map(|x| x.exp()).sum();
                x.iter().map(|x| x.exp() / sum).collect()
            })
        };
        check(&format!("softmax {dtype:?}"), &|x| ops::softmax_last_dim(x[0]), &formula, std::slice::from_ref(&x), tolerance);
        close("softmax", &ops::softmax_last_dim(&x).unwrap(), &candle_nn::ops::softmax_last_dim(&x).unwrap(), 0.);
    }
}

#[test]
fn a_gradient_is_computed_for_tracked_arguments_only() {
    let mut random = Random::new(25);
    let [x, weight] = [&[4, 5][..], &[5]].map(|dims| random.var(dims));
    for (tracked, other, y) in
        [(&x, &weight, ops::rms_norm(&x, &weight.detach(), EPS).unwrap()), (&weight, &x, ops::rms_norm(&x.detach(), &weight, EPS).unwrap())]
    {
        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(gradients.get(tracked).is_some() && gradients.get(other).is_none());
    }
}

#[test]
fn rows_may_be_missing() {
    let x = Var::zeros((0, 5), DType::F32, &CPU).unwrap();
    let weight = Var::ones(5, DType::F32, &CPU).unwrap();
    for y in [ops::rms_norm(&x, &weight, EPS), ops::layer_norm(&x, &weight, &weight, EPS), ops::softmax_last_dim(&x)] {
        let y = y.unwrap();
        assert_eq!(y.dims(), [0, 5]);
        y.sum_all().unwrap().backward().unwrap();
    }
    let x = Tensor::zeros((2, 3, 0, 4), DType::F32, &CPU).unwrap();
    let table = Tensor::zeros((0, 2), DType::F32, &CPU).unwrap();
    assert_eq!(ops::rope(&x, &table, &table).unwrap().dims(), [2, 3, 0, 4]);
}

#[test]
fn wrong_arguments_are_named_at_once() {
    let x = Random::new(26).tensor(&[2, 3, 4, 6]);
    let table = Random::new(27).tensor(&[4, 3]);
    told(
        ops::rope(&x, &table.narrow(0, 0, 3).unwrap(), &table.to_dtype(DType::F16).unwrap()),
        &["cos shape: got [3, 3], expected [4 or more, 3]", "sin dtype: got f16, expected f32, the type of x"],
    );
    told(ops::rope_i(&x.flatten_to(1).unwrap(), &table, &table), &["x shape: got [6, 4, 6], expected (batch, heads, seq, dim)"]);
    told(ops::rope_thd(&x, &table.narrow(1, 0, 2).unwrap(), &table), &["cos shape: got [4, 2], expected [3 or more, 3]"]);
    let learned = Var::from_tensor(&table).unwrap();
    told(ops::rope(&x, &table, &learned), &["sin: got a tensor that requires a gradient, expected none"]);
    told(
        ops::rms_norm(&x.to_dtype(DType::U32).unwrap(), &table, f32::NAN),
        &["x dtype: got u32", "weight dtype: got f32, expected u32", "weight shape: got [4, 3], expected [6]", "eps: got NaN"],
    );
    told(ops::layer_norm(&x.narrow(3, 0, 0).unwrap(), &table, &table, 0.), &["x shape: got [2, 3, 4, 0]", "bias shape: got [4, 3]"]);
    told(ops::softmax_last_dim(&Tensor::new(1f32, &CPU).unwrap()), &["x shape: got [], expected a last axis"]);
}
