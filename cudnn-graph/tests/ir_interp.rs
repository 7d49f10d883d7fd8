//! Compares every op of the interpreter with a small loop, and checks its errors for inputs that do not fit.

use cudnn_graph::DType::{self, *};
use cudnn_graph::ir::interp::{BindingError, InterpError, Precision, Value, run, run_all};
use cudnn_graph::ir::op::*;
use cudnn_graph::ir::pointwise::Params;
use cudnn_graph::ir::{Graph, Mode, Op, Ragged, Scalar, Storage, Tensor, TensorId};
use std::collections::BTreeMap;

const INF: f64 = f64::INFINITY;

/// Returns distinct numbers that are not integers.
fn numbers(dims: &[i64]) -> Value {
    let n: i64 = dims.iter().product();
    Value::new(dims, (0..n).map(|i| ((i * 37 % 29) as f64 - 11.0) / 8.0).collect::<Vec<_>>())
}

fn eval(g: Graph, inputs: &[(TensorId, Value)], precision: Precision) -> BTreeMap<TensorId, Value> {
    let g = g.verify().unwrap_or_else(|e| panic!("{e}"));
    run(&g, &inputs.iter().cloned().collect(), precision).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs one op with one input and one output.
fn one(x: &Value, y: &[i64], types: [DType; 2], precision: Precision, op: impl FnOnce(TensorId, TensorId) -> Op) -> Vec<f64> {
    let mut g = Graph::new();
    let (a, b) = (g.input("x", types[0], x.dims.clone()), g.input("y", types[1], y));
    g.push(op(a, b));
    eval(g, &[(a, x.clone())], precision)[&b].data.clone()
}

fn place(dims: &[i64], index: &[i64]) -> usize {
    dims.iter().zip(index).fold(0, |at, (d, i)| at * d + i) as usize
}

#[test]
fn pointwise_broadcasts_single_axes() {
    let mut g = Graph::new();
    let x = g.input("x", F32, [2, 3, 4]);
    let row = g.input("row", F32, [1, 1, 4]);
    let col = g.input("col", F32, [1, 3, 1]);
    let two = g.tensor(Tensor::by_value("two", F32, None, 3));
    let sum = g.pointwise(Mode::Add, &[x, row]);
    let sum = g.pointwise(Mode::Sub, &[sum, col]);
    let y = g.pointwise(Mode::Mul, &[sum, two]);
    g.output(y, "y", F32);
    let (vx, vrow, vcol) = (numbers(&[2, 3, 4]), numbers(&[1, 1, 4]), numbers(&[1, 3, 1]));
    let inputs = [(x, vx.clone()), (row, vrow.clone()), (col, vcol.clone()), (two, Value::new([1, 1, 1], [2.0]))];
    let out = eval(g, &inputs, Precision::F64);
    for b in 0..2 {
        for i in 0..3 {
            for j in 0..4 {
                let want = 2.0 * (vx.data[place(&[2, 3, 4], &[b, i, j])] + vrow.data[j as usize] - vcol.data[i as usize]);
                assert_eq!(out[&y].data[place(&[2, 3, 4], &[b, i, j])], want);
            }
        }
    }
}

#[test]
fn gen_index_counts_along_its_axis() {
    for axis in 0..3 {
        let mut g = Graph::new();
        let x = g.input("x", F32, [2, 3, 4]);
        let y = g.gen_index(x, axis);
        g.output(y, "y", I32);
        let y = &eval(g, &[(x, numbers(&[2, 3, 4]))], Precision::F64)[&y].data;
        for (at, got) in y.iter().enumerate() {
            assert_eq!(*got, [at / 12, at / 4 % 3, at % 4][axis as usize] as f64);
        }
    }
}

#[test]
fn results_are_rounded_to_their_element_type_in_f32_precision_only() {
    let x = Value::new([3], [1.0 + 1.0 / 1024.0, 300.4, -1e6]);
    let of = |dtype, precision| {
        one(&x, &[3], [F64, dtype], precision, |x, y| {
            Op::Pointwise(Pointwise { mode: Mode::Identity, x, b: None, t: None, dy: None, y, compute: F64, params: Params::default() })
        })
    };
    assert_eq!(of(BF16, Precision::F32), [1.0, 300.0, -999_424.0]);
    assert_eq!(of(F8E4M3, Precision::F32), [1.0, 288.0, -448.0]);
    assert_eq!(of(F16, Precision::F32), [1.0 + 1.0 / 1024.0, 300.5, -INF]);
    assert_eq!(of(F8E4M3, Precision::F64), x.data);
    assert_eq!(of(I8, Precision::F64), [1.0, 127.0, -128.0]);
}

#[test]
fn matmul_shares_heads_among_neighbours() {
    let (da, db, dc) = ([2, 6, 3, 5], [1, 2, 5, 4], [2, 6, 3, 4]);
    let mut g = Graph::new();
    let (a, b) = (g.input("a", F32, da), g.input("b", F32, db));
    let c = g.matmul(a, b);
    g.output(c, "c", F32);
    let (va, vb) = (numbers(&da), numbers(&db));
    let out = &eval(g, &[(a, va.clone()), (b, vb.clone())], Precision::F64)[&c];
    assert_eq!(out.dims, dc);
    for n in 0..2 {
        for h in 0..6 {
            for i in 0..3 {
                for j in 0..4 {
                    let want: f64 = (0..5).map(|k| va.data[place(&da, &[n, h, i, k])] * vb.data[place(&db, &[0, h / 3, k, j])]).sum();
                    assert_eq!(out.data[place(&dc, &[n, h, i, j])], want);
                }
            }
        }
    }
}

#[test]
fn matmul_overrides_cut_rows_columns_and_inner_elements() {
    for padding in [None, Some(-7.5)] {
        let mut g = Graph::new();
        let (a, b) = (g.input("a", F32, [2, 3, 4]), g.input("b", F32, [2, 4, 5]));
        let c = g.input("c", F32, [2, 3, 5]);
        let [m, n, k] = ["m", "n", "k"].map(|name| g.input(name, I32, [2, 1, 1]));
        let [m_override, n_override, k_override] = [m, n, k].map(Some);
        g.push(Op::Matmul(Matmul { a, b, c, m_override, n_override, k_override, padding, compute: F32 }));
        let (va, vb) = (numbers(&[2, 3, 4]), numbers(&[2, 4, 5]));
        let (rows, columns, inner) = ([2.0, 9.0], [5.0, 1.0], [0.0, 3.0]);
        let lengths = |n: [f64; 2]| Value::new([2, 1, 1], n);
        let inputs = [(a, va.clone()), (b, vb.clone()), (m, lengths(rows)), (n, lengths(columns)), (k, lengths(inner))];
        let out = &eval(g, &inputs, Precision::F64)[&c].data;
        for at in 0..2 {
            for i in 0..3 {
                for j in 0..5 {
                    let mut want = padding.unwrap_or(0.0);
                    if (i as f64) < rows[at] && (j as f64) < columns[at] {
                        want = (0..inner[at] as usize).map(|k| va.data[(at * 3 + i) * 4 + k] * vb.data[(at * 4 + k) * 5 + j]).sum();
                    }
                    assert_eq!(out[(at * 3 + i) * 5 + j], want, "{at} {i} {j}");
                }
            }
        }
    }
}

#[test]
fn matmul_in_f32_adds_in_order() {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", F32, [1, 3]), g.input("b", F32, [3, 1]));
    let c = g.matmul(a, b);
    g.output(c, "c", F32);
    let inputs = [(a, Value::new([1, 3], [1e8, 1.0, -1e8])), (b, Value::new([3, 1], [1.0; 3]))];
    assert_eq!(eval(g.clone(), &inputs, Precision::F32)[&c].data, [0.0]);
    assert_eq!(eval(g, &inputs, Precision::F64)[&c].data, [1.0]);
}

#[test]
fn reductions_fold_neighbours() {
    let dims = [2, 6, 3];
    let x = numbers(&dims);
    for mode in ReductionMode::ALL {
        let got = one(&x, &[1, 2, 3], [F32, F32], Precision::F64, |x, y| {
            Op::Reduction(Reduction { mode, x, y, compute: F32, deterministic: false })
        });
        for head in 0..2 {
            for j in 0..3 {
                let group: Vec<f64> =
                    (0..2).flat_map(|b| (head * 3..(head + 1) * 3).map(move |h| [b, h, j])).map(|at| x.data[place(&dims, &at)]).collect();
                let want: f64 = match mode {
                    ReductionMode::Add => group.iter().sum(),
                    ReductionMode::Mul => group.iter().product(),
                    ReductionMode::Min => group.iter().copied().fold(INF, f64::min),
                    ReductionMode::Max => group.iter().copied().fold(-INF, f64::max),
                    ReductionMode::Amax => group.iter().fold(0.0, |m, x| m.max(x.abs())),
                };
                let got = got[(head * 3 + j) as usize];
                assert!((got - want).abs() < 1e-12, "{mode:?}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn reductions_of_awkward_numbers() {
    let of = |mode, x: &[f64]| {
        one(&Value::new([x.len() as i64], x), &[1], [F32, F32], Precision::F64, |x, y| {
            Op::Reduction(Reduction { mode, x, y, compute: F32, deterministic: false })
        })[0]
    };
    assert_eq!(of(ReductionMode::Max, &[-INF, f64::NAN, -3.0]), -3.0, "a number wins");
    assert!(of(ReductionMode::Max, &[f64::NAN, f64::NAN]).is_nan());
    assert_eq!(of(ReductionMode::Max, &[-INF, -INF]), -INF);
    assert!(of(ReductionMode::Max, &[-0.0, 0.0]).is_sign_positive());
    assert!(of(ReductionMode::Min, &[0.0, -0.0]).is_sign_negative());
    assert_eq!(of(ReductionMode::Amax, &[-5.0, 2.0]), 5.0);
    assert!(of(ReductionMode::Add, &[INF, -INF]).is_nan());
}

#[test]
fn a_view_keeps_elements_where_they_are_in_memory() {
    let x = numbers(&[2, 3, 4]);
    let view = |strides_x: [i64; 3], dims: [i64; 3], strides: [i64; 3], mode| {
        let mut g = Graph::new();
        let a = g.tensor(Tensor::device("x", F32, [2, 3, 4]).strides(strides_x));
        let y = g.reshape(a, dims, strides, mode);
        g.output(y, "y", F32);
        let g = g.verify().unwrap();
        run(&g, &[(a, x.clone())].into(), Precision::F64).map(|out| out[&y].data.clone())
    };
    for mode in [None, Some(ReshapeMode::ViewOnly)] {
        // Transpose as cuDNN's frontend does, by swapping the extents and strides of two axes.
        for strides in [[12, 4, 1], [4, 8, 1], [100, 20, 3]] {
            let got = view(strides, [2, 4, 3], [strides[0], strides[2], strides[1]], mode).unwrap();
            for b in 0..2 {
                for i in 0..3 {
                    for j in 0..4 {
                        assert_eq!(got[place(&[2, 4, 3], &[b, j, i])], x.data[place(&[2, 3, 4], &[b, i, j])]);
                    }
                }
            }
        }
        // Between two dense shapes, the row-major elements stay the same.
        assert_eq!(view([12, 4, 1], [4, 3, 2], [6, 2, 1], mode).unwrap(), x.data);
        // These views read memory outside x: past its end, or in a gap.
        let Err(InterpError::View { at, offset }) = view([12, 4, 1], [2, 3, 4], [16, 4, 1], mode) else { panic!() };
        assert!(at.contains("= reshape(x t0)") && offset == 24, "{at} {offset}");
        assert!(matches!(view([100, 20, 3], [2, 3, 4], [12, 4, 1], mode), Err(InterpError::View { offset: 1, .. })));
    }
    assert_eq!(view([4, 8, 1], [4, 3, 2], [6, 2, 1], Some(ReshapeMode::Logical)).unwrap(), x.data);
}

#[test]
fn transpose_and_slice_move_elements() {
    let x = numbers(&[2, 3, 4]);
    let got = one(&x, &[4, 2, 3], [F32, F32], Precision::F64, |x, y| Op::Transpose(Transpose { x, y, permutation: vec![2, 0, 1] }));
    for b in 0..2 {
        for i in 0..3 {
            for j in 0..4 {
                assert_eq!(got[place(&[4, 2, 3], &[j, b, i])], x.data[place(&[2, 3, 4], &[b, i, j])]);
            }
        }
    }
    let x = numbers(&[9, 4]);
    let got = one(&x, &[3, 2], [F32, F32], Precision::F64, |x, y| {
        Op::Slice(Slice { x, y, start: vec![1, 2], limit: vec![8, 4], step: vec![3, 1] })
    });
    let want: Vec<f64> = [1, 4, 7].iter().flat_map(|i| [2, 3].map(|j| x.data[i * 4 + j])).collect();
    assert_eq!(got, want);
}

/// Returns the results of a softmax over (1, 2, 2, 3) scores: y, stats, max, sum_exp.
fn softmax(scores: &[f64], sink: Option<[f64; 2]>, stats_log2: bool, precision: Precision) -> [Vec<f64>; 4] {
    let mut g = Graph::new();
    let (x, y) = (g.input("x", F32, [1, 2, 2, 3]), g.input("y", F32, [1, 2, 2, 3]));
    let [stats, max, sum_exp] = ["stats", "max", "sum_exp"].map(|name| g.input(name, F32, [1, 2, 2, 1]));
    let mut inputs = vec![(x, Value::new([1, 2, 2, 3], scores))];
    let sink = sink.map(|values| {
        let sink = g.input("sink", F32, [1, 2, 1, 1]);
        inputs.push((sink, Value::new([1, 2, 1, 1], values)));
        sink
    });
    g.push(Op::Softmax(Softmax { x, y, stats: Some(stats), max: Some(max), sum_exp: Some(sum_exp), sink, stats_log2 }));
    let out = eval(g, &inputs, precision);
    [y, stats, max, sum_exp].map(|id| out[&id].data.clone())
}

#[test]
fn softmax_of_rows_with_and_without_a_sink() {
    let scores = [0.5, -1.0, 2.0, 700.0, 710.0, -INF, -INF, -INF, -INF, 3.0, -INF, -2.0];
    for sink in [None, Some([0.25, -INF]), Some([-3.0, 1.0])] {
        for log2 in [false, true] {
            let [y, stats, max, sum] = softmax(&scores, sink, log2, Precision::F64);
            for (row, s) in scores.chunks(3).enumerate() {
                let extra = sink.map_or(-INF, |sink| sink[row / 2]);
                let m = s.iter().copied().fold(extra, f64::max);
                assert_eq!(max[row], m);
                if m == -INF {
                    assert_eq!((&y[row * 3..][..3], stats[row], sum[row]), (&[0.0; 3][..], -INF, 0.0), "fully masked");
                    continue;
                }
                let z = s.iter().map(|s| (s - m).exp()).sum::<f64>() + (extra - m).exp();
                let lse = (m + z.ln()) / if log2 { 2f64.ln() } else { 1.0 };
                assert!((sum[row] - z).abs() < 1e-14 && (stats[row] - lse).abs() <= 1e-13 * lse.abs());
                for (j, s) in s.iter().enumerate() {
                    assert!((y[row * 3 + j] - (s - m).exp() / z).abs() < 1e-15);
                }
            }
        }
    }
    let [y, ..] = softmax(&[f64::NAN, -INF, 0.0, INF, 0.0, 0.0, -INF, -INF, -INF, 0.0, 0.0, 0.0], None, false, Precision::F32);
    assert!(y[..3].iter().all(|y| y.is_nan()), "not-a-number spreads over its row");
    assert!(y[3].is_nan(), "∞ − ∞");
    assert_eq!(y[6..9], [0.0; 3]);
    assert_eq!(y[9..], [f64::from(1.0f32 / 3.0); 3]);
}

#[test]
fn band_masks_keep_what_the_inequalities_say() {
    let (b, h, rows, cols) = (2, 1, 5, 7);
    let x = numbers(&[b, h, rows, cols]);
    for side in [BandSide::Right, BandSide::Left] {
        for bound in [-2i32, 0, 1, 3] {
            for lengths in [None, Some([[5.0, 3.0], [7.0, 2.0]]), Some([[4.0, 4.0], [6.0, 6.0]])] {
                let mut g = Graph::new();
                let score = g.input("x", F32, [b, h, rows, cols]);
                let fill = g.scalar(Scalar::F32(f32::NEG_INFINITY));
                let ids = lengths.map(|_| (g.input("n_q", I32, [b, 1, 1, 1]), g.input("n_kv", I64, [b, 1, 1, 1])));
                let y = match side {
                    BandSide::Right => {
                        let shift = g.scalar(Scalar::I32(bound));
                        g.band_mask_right(score, fill, Some(shift), ids)
                    }
                    BandSide::Left => {
                        let left = g.scalar(Scalar::F32(bound as f32));
                        g.band_mask_left(score, fill, left, ids)
                    }
                };
                g.output(y, "y", F32);
                let mut inputs = vec![(score, x.clone())];
                if let (Some((q, kv)), Some([n_q, n_kv])) = (ids, lengths) {
                    inputs.extend([(q, Value::new([b, 1, 1, 1], n_q)), (kv, Value::new([b, 1, 1, 1], n_kv))]);
                }
                let got = &eval(g, &inputs, Precision::F32)[&y].data;
                for n in 0..b {
                    for row in 0..rows {
                        for col in 0..cols {
                            let align = lengths.map_or(0, |[q, kv]| kv[n as usize] as i64 - q[n as usize] as i64);
                            let keep = match side {
                                BandSide::Right => row + i64::from(bound) + align >= col,
                                BandSide::Left => col + i64::from(bound) - align > row,
                            };
                            let at = place(&[b, h, rows, cols], &[n, 0, row, col]);
                            assert_eq!(got[at], if keep { x.data[at] } else { -INF }, "{side:?} {bound} {lengths:?} {n} {row} {col}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_window_of_one_keeps_the_diagonal() {
    let mut g = Graph::new();
    let x = g.input("x", F32, [1, 1, 4, 4]);
    let fill = g.scalar(Scalar::F32(0.0));
    let one = g.scalar(Scalar::I32(1));
    let right = g.band_mask_right(x, fill, None, None);
    let y = g.band_mask_left(right, fill, one, None);
    g.output(y, "y", F32);
    let out = &eval(g, &[(x, Value::new([1, 1, 4, 4], [1.0; 16]))], Precision::F64)[&y].data;
    assert_eq!(out.iter().enumerate().filter(|(_, y)| **y == 1.0).map(|(at, _)| at).collect::<Vec<_>>(), [0, 5, 10, 15]);
}

#[test]
fn paged_load_gathers_rows_or_columns() {
    let container = numbers(&[5, 2, 4, 3]);
    let (lengths, pages) = ([10.0, 3.0], [4.0, 0.0, 2.0, 1.0, 99.0, -1.0]);
    let load = |transposed: bool, pages: [f64; 6]| {
        let mut g = Graph::new();
        let c = g.input("c", F32, [5, 2, 4, 3]);
        let n = g.input("n", I32, [2, 1, 1, 1]);
        let table = g.input("table", I32, [2, 1, 3, 1]);
        let y = match transposed {
            false => g.tensor(Tensor::device("y", F32, [2, 2, 10, 3])),
            true => g.tensor(Tensor::device("y", F32, [2, 2, 3, 10]).strides([60, 30, 1, 3])),
        };
        g.push(Op::PagedLoad(PagedLoad { container: c, seq_len: n, page_table: table, y }));
        let inputs = [(c, container.clone()), (n, Value::new([2, 1, 1, 1], lengths)), (table, Value::new([2, 1, 3, 1], pages))];
        run(&g.verify().unwrap(), &inputs.into(), Precision::F64).map(|out| out[&y].data.clone())
    };
    // The last two pages of the second entry are past its length and are not read.
    let (rows, columns) = (load(false, pages).unwrap(), load(true, pages).unwrap());
    for b in 0..2i64 {
        for h in 0..2 {
            for s in 0..10 {
                for d in 0..3 {
                    let want = if (s as f64) < lengths[b as usize] {
                        let page = pages[(b * 3 + s / 4) as usize] as i64;
                        container.data[place(&[5, 2, 4, 3], &[page, h, s % 4, d])]
                    } else {
                        0.0
                    };
                    assert_eq!(rows[place(&[2, 2, 10, 3], &[b, h, s, d])], want);
                    assert_eq!(columns[place(&[2, 2, 3, 10], &[b, h, d, s])], want);
                }
            }
        }
    }
    let wrong = load(false, [4.0, 5.0, 2.0, 1.0, 0.0, 0.0]);
    assert!(matches!(wrong, Err(InterpError::Page { batch: 0, page: 1, block: 5, blocks: 5, .. })), "{wrong:?}");
}

#[test]
fn block_scales_quantize_and_come_back() {
    let x = Value::new([2, 6], [0.0, 0.0, 0.0, 1.0, -12.0, 3.0, 448.0, 100.0, 1.0, 5.0, 2.5, -0.3]);
    let of = |scale_type, precision| {
        let mut g = Graph::new();
        let input = g.input("x", F32, [2, 6]);
        let (y, scale) = (g.input("y", F8E4M3, [2, 6]), g.input("scale", scale_type, [2, 2]));
        g.push(Op::BlockScaleQuantize(BlockScaleQuantize { x: input, y, scale, block: vec![3], compute: F32 }));
        let back = g.input("back", F32, [2, 6]);
        g.push(Op::BlockScaleDequantize(BlockScaleDequantize { x: y, scale, y: back, block: vec![1, 3], compute: F32 }));
        let out = eval(g, &[(input, x.clone())], precision);
        [y, scale, back].map(|id| out[&id].data.clone())
    };
    let [y, scale, back] = of(F32, Precision::F64);
    assert_eq!(scale, [0.0, 12.0 / 448.0, 1.0, 5.0 / 448.0]);
    for (at, y) in y.iter().enumerate() {
        let s = scale[at / 6 * 2 + at % 6 / 3];
        assert_eq!(*y, if s == 0.0 { 0.0 } else { x.data[at] / s });
        assert!((back[at] - x.data[at]).abs() < 1e-12);
    }
    // Scales round up to powers of two, so no element exceeds the largest number.
    let [y, scale, back] = of(F8E8M0, Precision::F32);
    assert_eq!(scale, [2f64.powi(-127), 1.0 / 32.0, 1.0, 1.0 / 64.0]);
    assert_eq!(y[6..9], [448.0, 96.0, 1.0], "100 rounds to a neighbour of 8 steps");
    assert_eq!((y[4], back[4]), (-384.0, -12.0));
}

#[test]
fn scales_lie_along_the_axis_that_has_blocks() {
    let mut g = Graph::new();
    let (x, scale, y) = (g.input("x", F8E4M3, [4, 3]), g.input("scale", F32, [2, 3]), g.input("y", F32, [4, 3]));
    g.push(Op::BlockScaleDequantize(BlockScaleDequantize { x, scale, y, block: vec![1, 2], compute: F32 }));
    let factors = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let out = &eval(g, &[(x, Value::new([4, 3], [1.0; 12])), (scale, Value::new([2, 3], factors))], Precision::F64)[&y].data;
    assert_eq!(*out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 4.0, 5.0, 6.0]);
}

#[test]
fn random_numbers_come_from_the_caller() {
    let mut g = Graph::new();
    let y = g.tensor(Tensor::virtual_("bits", F32, [2, 2]));
    g.push(Op::Rng(Rng { y, distribution: Distribution::Bernoulli(0.5), seed: Seed::Value(7), offset: None }));
    let x = g.input("x", F32, [2, 2]);
    let z = g.pointwise(Mode::Mul, &[x, y]);
    g.output(z, "z", F32);
    let g = g.verify().unwrap();
    let mut inputs = BTreeMap::from([(x, Value::new([2, 2], [1.0, 2.0, 3.0, 4.0]))]);
    let Err(InterpError::Bindings(errors)) = run(&g, &inputs, Precision::F64) else { panic!() };
    assert!(matches!(&errors[..], [BindingError::RandomBits { tensor, at, .. }] if *tensor == y && at.contains("= rng()")), "{errors:?}");
    inputs.insert(y, Value::new([2, 2], [1.0, 0.0, 0.0, 1.0]));
    assert_eq!(run(&g, &inputs, Precision::F64).unwrap()[&z].data, [1.0, 0.0, 0.0, 4.0]);
}

#[test]
fn everything_wrong_with_inputs_is_reported_at_once() {
    let mut g = Graph::new();
    let ids = [
        g.input("fine", F32, [2]),
        g.input("missing", F32, [2]),
        g.input("flat", F32, [2]),
        g.input("short", F32, [2]),
        g.input("half", I32, [2]),
        g.input("true", Bool, [2]),
        g.parameter("parameter", F32),
        g.scalar(Scalar::F32(1.0)),
        g.tensor(Tensor::virtual_("result", F32, [2])),
    ];
    let [fine, missing, flat, short, half, truth, parameter, scalar, result] = ids;
    let add = |g: &mut Graph, x, b| g.pointwise(Mode::Add, &[x, b]);
    g.push(Op::Pointwise(Pointwise {
        mode: Mode::Exp,
        x: fine,
        b: None,
        t: None,
        dy: None,
        y: result,
        compute: F32,
        params: Params::default(),
    }));
    let sum = [missing, flat, short, half].into_iter().fold(result, |sum, x| add(&mut g, sum, x));
    let sum = g.pointwise(Mode::BinarySelect, &[sum, fine, truth]);
    let rank_one = |g: &mut Graph, x| g.reshape(x, [1], [1], None);
    let (parameter_1, scalar_1) = (rank_one(&mut g, parameter), rank_one(&mut g, scalar));
    let sum = add(&mut g, sum, parameter_1);
    let sum = add(&mut g, sum, scalar_1);
    g.output(sum, "sum", F32);
    let stranger = {
        let mut other = Graph::new();
        (0..100).map(|_| other.input("x", F32, [1])).last().unwrap()
    };
    let g = g.verify().unwrap();
    let given = |n: &[f64]| Value::new([n.len() as i64], n);
    let inputs = BTreeMap::from([
        (fine, given(&[1.0, 2.0])),
        (flat, Value::new([1, 2], [1.0, 2.0])),
        (short, Value::new([2], [1.0])),
        (half, given(&[1.0, 0.5])),
        (truth, given(&[2.0, 0.0])),
        (scalar, given(&[1.0])),
        (result, given(&[1.0, 2.0])),
        (sum, given(&[1.0, 2.0])),
        (stranger, given(&[1.0])),
    ]);
    let error = run(&g, &inputs, Precision::F64).unwrap_err();
    let InterpError::Bindings(errors) = &error else { panic!("{error}") };
    let name = |s: &str| s.to_owned();
    assert_eq!(
        *errors,
        [
            BindingError::Unknown { tensor: stranger },
            BindingError::Missing { tensor: missing, name: name("missing") },
            BindingError::Extents { tensor: flat, name: name("flat"), want: vec![2], got: vec![1, 2] },
            BindingError::Elements { tensor: short, name: name("short"), want: 2, got: 1 },
            BindingError::Element { tensor: half, name: name("half"), index: 1, value: 0.5 },
            BindingError::Element { tensor: truth, name: name("true"), index: 0, value: 2.0 },
            BindingError::Missing { tensor: parameter, name: name("parameter") },
            BindingError::NotAnInput { tensor: scalar, name: name("scalar7") },
            BindingError::NotAnInput { tensor: result, name: name("result") },
            BindingError::NotAnInput { tensor: sum, name: name("sum") },
        ]
    );
    assert_eq!(error.to_string().lines().count(), errors.len());
}

#[test]
fn a_result_too_large_is_refused_before_anything_is_computed() {
    let mut g = Graph::new();
    let (a, b) = (g.input("a", F32, [1 << 20, 1]), g.input("b", F32, [1, 1 << 20]));
    let c = g.pointwise(Mode::Add, &[a, b]);
    g.output(c, "c", F32);
    let ones = |dims: [i64; 2]| Value::new(dims, vec![1.0; 1 << 20]);
    let inputs = BTreeMap::from([(a, ones([1 << 20, 1])), (b, ones([1, 1 << 20]))]);
    let error = run(&g.verify().unwrap(), &inputs, Precision::F64).unwrap_err();
    assert!(
        matches!(&error, InterpError::Bindings(e) if matches!(e[..], [BindingError::TooLarge { tensor, .. }] if tensor == c)),
        "{error}"
    );
}

#[test]
fn run_returns_device_results_and_run_all_everything() {
    let mut g = Graph::new();
    let offsets = g.input("offsets", I32, [3, 1, 1, 1]);
    let x = g.tensor(Tensor::device("x", F32, [2, 1, 1, 1]).ragged(Ragged { offsets, multiplier: None }));
    let two = g.tensor(Tensor { storage: Storage::Constant(Scalar::F32(2.0)), ..Tensor::by_value("two", F32, None, 1) });
    let m = g.pointwise(Mode::Mul, &[x, two]);
    // The tensor y is in device memory and is also the input of another op.
    let y = g.pointwise(Mode::Add, &[m, m]);
    g.output(y, "y", F16);
    let z = g.pointwise(Mode::Neg, &[y]);
    g.output(z, "z", F32);
    let g = g.verify().unwrap();
    // Offsets of ragged tensors have no effect here.
    let inputs = BTreeMap::from([(x, Value::new([2, 1, 1, 1], [1.0, 2.0]))]);
    let out = run(&g, &inputs, Precision::F32).unwrap();
    assert_eq!(out.keys().copied().collect::<Vec<_>>(), [y, z]);
    assert_eq!(out[&z].data, [-4.0, -8.0]);
    let all = run_all(&g, &inputs, Precision::F32).unwrap();
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), [x, two, m, y, z]);
    assert_eq!((&all[&m].data[..], &all[&two].data[..]), (&[2.0, 4.0][..], &[2.0][..]));
}
