//! Random graphs of pointwise ops, ops that move elements, matrix products, scores, scales and pages.

use super::dice::Dice;
use super::input;
use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::{Params, Signature};
use cudnn_graph::ir::{Graph, Mode, Scalar, Tensor, TensorId};

const NUMBERS: [DType; 9] = [F32, F16, BF16, I8, U8, I32, I64, I4, U4];
const FLOATS: [DType; 3] = [F32, F16, BF16];

/// An operand that broadcasts to `dims`: some of its axes have extent 1, or it is a scalar.
fn operand(g: &mut Graph, dice: &mut Dice, dtype: DType, dims: &[i64]) -> TensorId {
    match dice.roll(5) {
        0 if dtype == F32 => g.scalar(Scalar::F32(0.5)),
        1 => {
            let dims = dims.iter().map(|&n| if dice.coin() { n } else { 1 }).collect();
            input(g, dice, dtype, dims)
        }
        _ => input(g, dice, dtype, dims.to_vec()),
    }
}

/// A few pointwise ops one after another, of any mode and type.
pub(super) fn elementwise(g: &mut Graph, dice: &mut Dice) {
    let rank = dice.from(1, 6) as usize;
    let dims = dice.list(rank, 1, 4);
    let first = dice.pick(&NUMBERS);
    let mut x = input(g, dice, first, dims.clone());
    for _ in 0..dice.from(1, 3) {
        let mode = dice.pick(Mode::ALL);
        let other = dice.pick(&NUMBERS);
        let (mut compute, mut result) = (dice.pick(&[F32, F32, F64, F16, BF16]), dice.pick(&NUMBERS));
        let mut params = Params::default();
        let inputs = match mode.signature() {
            Signature::Unary | Signature::Identity => vec![x],
            Signature::Binary => vec![x, operand(g, dice, other, &dims)],
            Signature::Compare => {
                result = if dice.coin() { Bool } else { F32 };
                vec![x, operand(g, dice, other, &dims)]
            }
            Signature::LogicalBinary => {
                (compute, result) = (Bool, Bool);
                let other = operand(g, dice, F32, &dims);
                let [a, b] = [0, 1].map(|_| g.pointwise(Mode::CmpLt, &[x, other]));
                vec![a, b]
            }
            Signature::LogicalUnary => {
                (compute, result) = (Bool, Bool);
                let other = operand(g, dice, F32, &dims);
                vec![g.pointwise(Mode::CmpGe, &[x, other])]
            }
            Signature::Index => {
                (compute, result) = (I32, I32);
                params.axis = Some(dice.roll(rank as u64) as i64);
                vec![x]
            }
            Signature::Select => {
                let b = operand(g, dice, other, &dims);
                let t = g.pointwise(Mode::CmpGt, &[x, b]);
                vec![x, b, t]
            }
            Signature::Backward => {
                result = dice.pick(&FLOATS);
                let dy = input(g, dice, F16, dims.clone());
                if !g.get(x).unwrap().dtype.is_float() {
                    x = g.pointwise_as(Mode::Identity, &[x], F32, BF16, Params::default());
                }
                vec![dy, x]
            }
        };
        let y = g.pointwise_as(mode, &inputs, compute, result, params);
        // A boolean is no operand of most modes.
        if result == Bool {
            let [yes, no] = [1.0, 0.0].map(|x| g.scalar(Scalar::F32(x)));
            x = g.pointwise(Mode::BinarySelect, &[yes, no, y]);
        } else {
            x = y;
        }
    }
    let dtype = g.get(x).unwrap().dtype;
    g.output(x, "y", dtype);
}

/// Slices with steps, transposes, reshapes and conversions.
pub(super) fn moves(g: &mut Graph, dice: &mut Dice) {
    let rank = dice.from(1, 5) as usize;
    let dtype = dice.pick(&NUMBERS);
    let dims = dice.list(rank, 1, 6);
    let mut x = g.input("x", dtype, dims);
    for _ in 0..dice.from(1, 3) {
        let dims = g.get(x).unwrap().dims.0.clone();
        x = match dice.roll(4) {
            0 => {
                let start: Vec<i64> = dims.iter().map(|&n| dice.from(0, n - 1)).collect();
                let limit: Vec<i64> = dims.iter().zip(&start).map(|(&n, &s)| dice.from(s + 1, n)).collect();
                let step = dice.list(dims.len(), 1, 3);
                let taken = start.iter().zip(&limit).zip(&step).map(|((s, l), n)| (l - s - 1) / n + 1).collect::<Vec<_>>();
                let dtype = g.get(x).unwrap().dtype;
                let y = g.result("slice", dtype, taken.into());
                g.push(Op::Slice(Slice { x, y, start, limit, step }));
                y
            }
            1 => {
                let mut permutation: Vec<i64> = (0..dims.len() as i64).collect();
                let n = dims.len() as u64;
                permutation.swap(dice.roll(n) as usize, dice.roll(n) as usize);
                g.transpose(x, &permutation)
            }
            2 => {
                let elements: i64 = dims.iter().product();
                let mode = dice.pick(&[None, Some(ReshapeMode::ViewOnly), Some(ReshapeMode::Logical)]);
                let to = if dims.len() > 5 || dice.coin() { vec![elements] } else { [&[1], &dims[..], &[1]].concat() };
                let strides = cudnn_graph::ir::ty::Dims(to.clone()).packed();
                g.reshape(x, to, strides, mode)
            }
            _ => {
                let other = input(g, dice, dtype, dims.clone());
                g.concat(&[x, other], dice.roll(dims.len() as u64) as i64)
            }
        };
    }
    let dtype = g.get(x).unwrap().dtype;
    g.output(x, "y", dtype);
}

/// A matrix product with broadcast batches, and a reduction of groups.
pub(super) fn products(g: &mut Graph, dice: &mut Dice) {
    let batches = dice.from(0, 3) as usize;
    let (m, k, n) = (dice.from(1, 4), dice.from(1, 4), dice.from(1, 4));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..batches {
        let (small, factor) = (dice.from(1, 3), dice.from(1, 2));
        let (x, y) = dice.pick(&[(small, small), (small * factor, small), (1, small)]);
        a.push(x);
        b.push(y);
    }
    a.extend([m, k]);
    b.extend([k, n]);
    let dtype = dice.pick(&FLOATS);
    let (a, b) = (g.input("a", dtype, a), g.input("b", dtype, b));
    let y = g.matmul(a, b);
    let dims = g.get(y).unwrap().dims.0.clone();
    let reduced = dims
        .iter()
        .map(|&n| {
            if dice.coin() {
                n
            } else if n % 2 == 0 && dice.coin() {
                2
            } else {
                1
            }
        })
        .collect::<Vec<_>>();
    let y = if dice.coin() { g.reduce(dice.pick(&ReductionMode::ALL), y, reduced) } else { y };
    g.output(y, "y", F32);
}

/// Scores with band masks, dropout and softmax.
pub(super) fn scores(g: &mut Graph, dice: &mut Dice) {
    let (b, h, s, t) = (dice.from(1, 2), dice.from(1, 2), dice.from(1, 4), dice.from(1, 4));
    let dtype = dice.pick(&FLOATS);
    let mut x = g.input("x", dtype, [b, h, s, t]);
    let fill = g.scalar(Scalar::F32(-100.0));
    let lengths = dice.coin().then(|| (g.input("seq_q", I32, [b, 1, 1, 1]), g.input("seq_kv", I32, [b, 1, 1, 1])));
    if dice.coin() {
        let shift = dice.coin().then(|| g.scalar(Scalar::I32(1)));
        x = g.band_mask_right(x, fill, shift, lengths);
    }
    let left = g.scalar(Scalar::I32(2));
    x = g.band_mask_left(x, fill, left, lengths);
    let [stats, max, sum] = ["stats", "max", "sum"].map(|name| dice.coin().then(|| g.input(name, F32, [b, h, s, 1])));
    let sink = dice.coin().then(|| g.input("sink", F32, [1, h, 1, 1]));
    let y = g.result("softmax", F32, [b, h, s, t].into());
    let stats_log2 = stats.is_some() && dice.coin();
    g.push(Op::Softmax(Softmax { x, y, stats, max, sum_exp: sum, sink, stats_log2 }));
    let (seed, offset) = (g.input("seed", I64, [1, 1, 1, 1]), g.input("offset", I64, [1, 1, 1, 1]));
    let seed = if dice.coin() { Seed::Value(7) } else { Seed::Tensor(seed) };
    let distribution = dice.pick(&[Distribution::Bernoulli(0.5), Distribution::Uniform(0.0, 1.0), Distribution::Normal(0.0, 1.0)]);
    let keep = g.rng(distribution, seed, Some(offset), [b, h, s, t]);
    let y = g.pointwise(Mode::Mul, &[y, keep]);
    g.output(y, "y", dtype);
    use_all(g);
}

/// Copies every tensor that no op uses, which would be a mistake.
fn use_all(g: &mut Graph) {
    let operands: Vec<TensorId> =
        g.ops().iter().map(Op::operands).flat_map(|o| o.inputs.into_iter().chain(o.outputs)).map(|o| o.tensor).collect();
    for id in g.ids().filter(|id| !operands.contains(id)).collect::<Vec<_>>() {
        let y = g.pointwise_as(Mode::Identity, &[id], F32, F32, Params::default());
        g.output(y, &format!("copy{}", id.index()), F32);
    }
}

/// Block scales of either direction, and the pages of a cache.
pub(super) fn scales_and_pages(g: &mut Graph, dice: &mut Dice) {
    if dice.coin() {
        let (b, h, d, page) = (dice.from(1, 3), dice.from(1, 2), dice.from(2, 5), dice.pick(&[1, 2, 4]));
        let tokens = dice.from(1, 6);
        let dtype = dice.pick(&FLOATS);
        let container = g.input("container", dtype, [3, h, page, d]);
        let lengths = g.input("lengths", I32, [b, 1, 1, 1]);
        let table = g.input("table", I32, [b, 1, (tokens - 1) / page + 1, 1]);
        let y = g.paged_load(container, lengths, table, tokens);
        let y = g.pointwise(Mode::Identity, &[y]);
        g.output(y, "y", F32);
        return;
    }
    let (rows, blocks) = (dice.from(1, 3), dice.from(1, 2));
    let block = dice.pick(&[16, 32]);
    let dims = [1, rows, blocks * i64::from(block)];
    if dice.coin() {
        let dtype = dice.pick(&FLOATS);
        let x = g.input("x", dtype, dims);
        let (y, scale) = if block == 16 {
            g.block_scale_quantize(x, block, F4E2M1, F8E4M3)
        } else {
            g.block_scale_quantize(x, block, dice.pick(&[F8E4M3, F8E5M2]), F8E8M0)
        };
        for (id, name) in [(y, "y"), (scale, "scale")] {
            let dtype = g.get(id).unwrap().dtype;
            g.output(id, name, dtype);
        }
        return;
    }
    let (dtype, scale) = dice.pick(&[(F4E2M1, F8E4M3), (F8E4M3, F8E8M0), (I4, F16), (U4, BF16), (I8, F32)]);
    let x = g.tensor(Tensor::device("x", dtype, dims));
    let scale = g.input("scale", scale, [1, rows, blocks]);
    let y = g.block_scale_dequantize(x, scale, &[1, block]);
    g.output(y, "y", F32);
}
