//! Every instruction set of this machine against the textbook gradient in f64.
//!
//! The executor is given `o` and `stats` as the forward pass rounds them, and so is the oracle: what is judged is the
//! backward pass alone. Bounds, with `u = 2^-24`, `D = dim_qk`, `E = dim_v`, `a` the score's `scale · Σ|q||k|`, `l` its
//! row's statistic:
//!
//! - a score is off by `(D + 3)ua` (its sum, the scaled query and the scale), the statistic by `u|l|` (its units), their
//!   difference by `u(a + |l|)`, and `exp2` by 4u: together the relative error of a weight, which is 0 below `2^-126`;
//! - `dP` and `delta` are off by `(E + 2)u` of the sums of their magnitudes, and `dS` by what follows from all that
//!   and two roundings;
//! - sums over `n` rows or keys add `(n + 8)u` of each term: a rounding a term, and parts that are merged.

use crate::exec::cpu::CpuExecutor;
use crate::exec::cpu::element::Element;
use crate::exec::cpu::isa::Isa;
use crate::exec::cpu::tests::{DIMS, LENGTHS, Random, Tensor, U, close, indices, masks, narrowed, rounding, widened, with_gaps};
use crate::exec::{Executor, Report};
use crate::tensor::HostBackward;
use crate::{Align, AttentionSpec, BackwardProblem, BackwardSpec, DType, Elements, ElementsMut, Layout, Mask, Shape, TensorSpec};
use half::{bf16, f16};

/// What a call reads.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    stats: Vec<f32>,
    scale: Option<f32>,
}

/// A tensor's elements in f64, in row-major order, each with what it may be off by.
type Wanted = Vec<(f64, f64)>;

/// Place of a row of `dim` elements in row-major order.
fn place(spec: &TensorSpec, [batch, head, seq]: [usize; 3]) -> usize {
    let [_, heads, rows, dim] = spec.dims.map(|n| n as usize);
    ((batch * heads + head) * rows + seq) * dim
}

fn row(tensor: &Tensor, [batch, head, seq]: [usize; 3]) -> Vec<f64> {
    (0..tensor.spec.dims[3] as usize).map(|c| tensor.get([batch, head, seq, c])).collect()
}

/// The sum of the products, and of their magnitudes.
fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    x.iter().zip(y).fold((0.0, 0.0), |(sum, size), (x, y)| (sum + x * y, size + (x * y).abs()))
}

/// One query of one head, and each key that it attends to with its score and the size of that.
struct Row {
    at: [usize; 3],
    keys: Vec<(usize, f64, f64)>,
}

fn rows(problem: &BackwardProblem, q: &Tensor, k: &Tensor, scale: f64) -> Vec<Row> {
    let problem = problem.forward();
    let (heads, seq) = (problem.heads_q() as usize, problem.seq_q() as usize);
    let score = |at: [usize; 3]| {
        let q = row(q, at);
        let keys = (0..problem.seq_kv() as usize).filter(|&key| problem.region().keeps(at[2] as i64, key as i64));
        let keys = keys.map(|key| {
            let (score, size) = dot(&q, &row(k, [at[0], at[1] / problem.group() as usize, key]));
            (key, scale * score, (scale * size).abs())
        });
        Row { at, keys: keys.collect() }
    };
    (0..problem.stats_elements() as usize).map(|i| score([i / seq / heads, i / seq % heads, i % seq])).collect()
}

/// `o` and the statistics, by the book.
fn forward(problem: &BackwardProblem, [q, k, v]: [&Tensor; 3], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let group = problem.forward().group() as usize;
    let dim_v = problem.forward().dim_v() as usize;
    let (mut o, mut stats) = (Vec::new(), Vec::new());
    for Row { at, keys } in rows(problem, q, k, scale) {
        let max = keys.iter().fold(f64::NEG_INFINITY, |max, key| max.max(key.1));
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let sum: f64 = keys.iter().map(|key| (key.1 - shift).exp()).sum();
        let mut out = vec![0.0; dim_v];
        for &(key, score, _) in keys.iter().filter(|_| sum != 0.0) {
            let weight = (score - shift).exp() / sum;
            out.iter_mut().zip(row(v, [at[0], at[1] / group, key])).for_each(|(o, v)| *o += weight * v);
        }
        o.extend(out);
        stats.push(shift + sum.ln());
    }
    (o, stats)
}

/// The gradients by `q`, `k` and `v`.
fn oracle(problem: &BackwardProblem, [q, k, v, o, d_o]: [&Tensor; 5], stats: &[f64], scale: f64) -> [Wanted; 3] {
    let forward = problem.forward();
    let (group, dim_qk, dim_v) = (forward.group() as usize, forward.dim_qk() as f64, forward.dim_v() as f64);
    let specs = [problem.dq(), problem.dk(), problem.dv()];
    let mut sums = specs.map(|spec| vec![(0.0, 0.0); spec.dims.iter().product::<i64>() as usize]);
    let n_keys = forward.seq_kv() as f64;
    let n_rows = (forward.seq_q() * forward.group()) as f64;
    for (Row { at, keys }, &stat) in rows(problem, q, k, scale).into_iter().zip(stats) {
        if stat == f64::NEG_INFINITY {
            continue;
        }
        let (q_row, d_o_row) = (row(q, at), row(d_o, at));
        let (delta, delta_size) = dot(&d_o_row, &row(o, at));
        for (key, score, size) in keys {
            let of_key = [at[0], at[1] / group, key];
            let (k_row, v_row) = (row(k, of_key), row(v, of_key));
            let (d_p, d_p_size) = dot(&d_o_row, &v_row);
            let dropped = score == f64::NEG_INFINITY;
            let p = if dropped { 0.0 } else { (score - stat).exp() };
            let d_s = if dropped { 0.0 } else { p * (d_p - delta) };
            // An infinite score is exact.
            let size = Some(size).filter(|size| size.is_finite()).unwrap_or(0.0);
            let mut p_error = p * (U * ((dim_qk + 4.0) * size + 2.0 * stat.abs() + 8.0)).exp_m1() + f64::from(f32::MIN_POSITIVE);
            let mut d_s_error = (p + p_error) * U * (dim_v + 5.0) * (d_p_size + delta_size) + p_error * (d_p - delta).abs();
            if dropped {
                (p_error, d_s_error) = (0.0, 0.0);
            }
            let mut add = |to: usize, from: usize, row: &[f64], factor: f64, error: f64, n: f64| {
                for (sum, x) in sums[to][from..].iter_mut().zip(row) {
                    sum.0 += factor * x;
                    sum.1 += (error + U * (n + 8.0) * (factor.abs() + error)) * x.abs();
                }
            };
            add(0, place(specs[0], at), &k_row, scale * d_s, scale.abs() * d_s_error, n_keys);
            add(1, place(specs[1], of_key), &q_row, scale * d_s, scale.abs() * d_s_error, n_rows);
            add(2, place(specs[2], of_key), &d_o_row, p, p_error, n_rows);
        }
    }
    let (relative, smallest) = rounding(forward.dtype());
    for (x, error) in sums.iter_mut().flatten() {
        // What nothing was added to is 0.
        if *error > 0.0 {
            *error += relative * (x.abs() + *error) + smallest;
        }
    }
    sums
}

/// Random operands, and what a forward pass makes of them.
fn inputs(problem: &BackwardProblem, scale: Option<f32>, random: &mut Random, spoil: impl FnOnce(&mut [Tensor; 4])) -> Inputs {
    let forward_problem = problem.forward();
    let dtype = forward_problem.dtype();
    let mut given =
        [forward_problem.q(), forward_problem.k(), forward_problem.v(), problem.d_o()].map(|spec| Tensor::random(spec, dtype, random));
    spoil(&mut given);
    let [q, k, v, d_o] = given;
    let factor = f64::from(scale.unwrap_or(forward_problem.default_scale()));
    let (out, stats) = forward(problem, [&q, &k, &v], factor);
    let mut o = Tensor::new(forward_problem.o());
    for (index, x) in indices(forward_problem.o()).zip(out) {
        o.set(index, x as f32);
    }
    let stored = |data: &[f32]| match () {
        () if dtype == DType::F16 => widened(&narrowed::<f16>(data)),
        () if dtype == DType::BF16 => widened(&narrowed::<bf16>(data)),
        () => data.to_vec(),
    };
    o.data = stored(&o.data);
    Inputs { q, k, v, o, d_o, stats: stats.into_iter().map(|x| x as f32).collect(), scale }
}

/// Runs the executor in a pool of `threads`; the gradients with gaps, everything else NaN as before.
fn backward(isa: Isa, threads: usize, problem: &BackwardProblem, inputs: &Inputs) -> ([Tensor; 3], Report) {
    fn call<T: Element + Default>(
        inputs: &Inputs,
        gradients: &mut [Tensor; 3],
        elements: impl Fn(&[T]) -> Elements<'_>,
        elements_mut: impl Fn(&mut [T]) -> ElementsMut<'_>,
        run: impl FnOnce(HostBackward<'_>) -> Report,
    ) -> Report {
        let read = [&inputs.q, &inputs.k, &inputs.v, &inputs.o, &inputs.d_o].map(|t| narrowed::<T>(&t.data));
        let mut written = gradients.each_ref().map(|t| narrowed::<T>(&t.data));
        let [q, k, v, o, d_o] = read.each_ref().map(|x| elements(x));
        let [dq, dk, dv] = written.each_mut().map(|x| elements_mut(x));
        let report = run(HostBackward {
            q,
            k,
            v,
            o,
            d_o,
            stats: &inputs.stats,
            dq,
            dk,
            dv,
            attn_scale: inputs.scale,
            params: &[],
            gradients: Vec::new(),
        });
        for (tensor, data) in gradients.iter_mut().zip(&written) {
            tensor.data = widened(data);
        }
        report
    }
    let mut gradients = [problem.dq(), problem.dk(), problem.dv()].map(Tensor::new);
    let prepared = CpuExecutor::with_isa(isa).prepare_backward(problem).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let run = |call: HostBackward<'_>| pool.install(|| prepared.backward(call)).unwrap();
    let dtype = problem.forward().dtype();
    let report = if dtype == DType::F16 {
        call::<f16>(inputs, &mut gradients, |x| Elements::F16(x), |x| ElementsMut::F16(x), run)
    } else if dtype == DType::BF16 {
        call::<bf16>(inputs, &mut gradients, |x| Elements::BF16(x), |x| ElementsMut::BF16(x), run)
    } else {
        call::<f32>(inputs, &mut gradients, |x| Elements::F32(x), |x| ElementsMut::F32(x), run)
    };
    (gradients, report)
}

/// Compares a run with the oracle, element by element.
fn verify(isa: Isa, threads: &[usize], problem: &BackwardProblem, inputs: &Inputs) {
    let scale = f64::from(inputs.scale.unwrap_or(problem.forward().default_scale()));
    let stats: Vec<f64> = inputs.stats.iter().map(|&x| f64::from(x)).collect();
    let Inputs { q, k, v, o, d_o, .. } = inputs;
    let wanted = oracle(problem, [q, k, v, o, d_o], &stats, scale);
    let mut first: Option<[Vec<u32>; 3]> = None;
    for &threads in threads {
        let (mut gradients, _) = backward(isa, threads, problem, inputs);
        let bits = gradients.each_ref().map(|t| t.data.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
        for ((name, gradient), wanted) in ["dq", "dk", "dv"].into_iter().zip(&mut gradients).zip(&wanted) {
            for (index, &want) in indices(&gradient.spec).zip(wanted) {
                let got = gradient.get(index);
                assert!(close(got, want), "{isa:?}, {threads} threads, {problem:?}: {name}{index:?} is {got}, want {want:?}");
                gradient.set(index, f32::NAN);
            }
            assert!(gradient.data.iter().all(|x| x.is_nan()), "{isa:?}, {problem:?}: something was written between rows of {name}");
        }
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{isa:?}, {problem:?}: {threads} threads give other bits");
    }
}

/// A tensor in any layout, with gaps or without.
fn any_layout(dims: [i64; 4], random: &mut Random) -> TensorSpec {
    let layout = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]);
    if random.below(2) == 0 { with_gaps(dims, layout, random) } else { TensorSpec::dense(dims, layout) }
}

/// Sets some strides to 0.
fn repeat(tensor: &mut TensorSpec, axes: &[usize]) {
    axes.iter().for_each(|&axis| tensor.strides[axis] = 0);
}

fn random_spec(random: &mut Random) -> Option<BackwardSpec> {
    let heads_kv = random.pick(&[1, 1, 2, 3]);
    let shape = Shape {
        batch: random.pick(&[1, 1, 2]),
        heads_q: heads_kv * random.pick(&[1, 1, 2, 3, 8]),
        heads_kv,
        seq_q: random.pick(&LENGTHS),
        seq_kv: random.pick(&LENGTHS),
        dim_qk: random.pick(&DIMS),
        dim_v: random.pick(&DIMS),
    };
    if shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv * (shape.dim_qk + shape.dim_v) > 6_000_000 {
        return None;
    }
    let dtype = random.pick(&[DType::F32, DType::F32, DType::F16, DType::BF16]);
    let mut forward = AttentionSpec::dense(dtype, shape, Layout::Bhsd);
    forward.masks = masks(random, shape.seq_kv);
    for tensor in [&mut forward.q, &mut forward.k, &mut forward.v, &mut forward.o] {
        *tensor = any_layout(tensor.dims, random);
    }
    let mut spec = forward.backward();
    for tensor in [&mut spec.d_o, &mut spec.dq, &mut spec.dk, &mut spec.dv] {
        *tensor = any_layout(tensor.dims, random);
    }
    if random.below(8) == 0 {
        spec.forward.q.strides[2] = 0;
        spec.forward.k.strides[0] = 0;
        spec.forward.v.strides[1] = 0;
    }
    if random.below(3) == 0 {
        repeat(&mut spec.d_o, random.pick(&[&[0, 1, 2, 3][..], &[3], &[2], &[0, 1], &[1, 3]]));
    }
    Some(spec)
}

#[test]
fn backward_over_random_problems_agrees_with_the_oracle() {
    let mut done = 0;
    for isa in Isa::all() {
        for seed in 0..100 {
            let random = &mut Random(seed * 6_131 + 5);
            let Some(spec) = random_spec(random) else { continue };
            let problem = spec.validate().unwrap();
            let scale = random.pick(&[None, None, Some(0.25), Some(-0.7), Some(0.0), Some(2.0)]);
            let inputs = inputs(&problem, scale, random, |_| {});
            verify(isa, &[1, 3], &problem, &inputs);
            done += 1;
        }
    }
    assert!(done > 100, "{done} problems were small enough");
}

fn dense(shape: [i64; 7], masks: &[Mask]) -> BackwardProblem {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
    let mut spec = AttentionSpec::dense(DType::F32, Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v }, Layout::Bhsd);
    spec.masks = masks.to_vec();
    spec.backward().validate().unwrap()
}

#[test]
fn sums_of_several_cells_agree_with_the_oracle_on_any_number_of_threads() {
    // Rows cut, keys cut, both; masks that leave cells empty, and strips without any.
    let shapes = [[1, 1, 1, 390, 700, 9, 17], [1, 8, 1, 150, 40, 24, 8], [1, 1, 1, 70, 1100, 8, 8], [1, 2, 2, 800, 300, 8, 16]];
    let masks = [
        vec![],
        vec![Mask::causal()],
        vec![Mask::causal_bottom_right()],
        vec![Mask::window(Some(60), Some(0), Align::BottomRight)],
        vec![Mask::window(Some(20), Some(9), Align::TopLeft)],
        vec![Mask::prefix_lm(201)],
    ];
    for isa in Isa::all() {
        for shape in shapes {
            for masks in &masks {
                let problem = dense(shape, masks);
                verify(isa, &[1, 3, 7], &problem, &inputs(&problem, None, &mut Random(11), |_| {}));
            }
        }
    }
}

#[test]
fn a_gradient_of_the_output_may_repeat_along_any_axis() {
    for isa in Isa::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for axes in 0..16u8 {
                let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 21, seq_kv: 15, dim_qk: 12, dim_v: 20 };
                let mut spec = AttentionSpec::dense(dtype, shape, Layout::Bshd).mask(Mask::causal()).backward();
                let axes: Vec<usize> = (0..4).filter(|axis| axes & 1 << axis != 0).collect();
                repeat(&mut spec.d_o, &axes);
                let problem = spec.validate().unwrap();
                verify(isa, &[1], &problem, &inputs(&problem, None, &mut Random(7), |_| {}));
            }
        }
    }
}

#[test]
fn rows_without_keys_and_keys_without_rows_have_gradients_of_zero() {
    for isa in Isa::all() {
        for (seq_q, seq_kv, mask) in [
            (130, 65, Mask::causal_bottom_right()),
            (20, 300, Mask::causal()),
            (300, 290, Mask::window(Some(3), Some(0), Align::BottomRight)),
        ] {
            let problem = dense([2, 4, 2, seq_q, seq_kv, 40, 24], &[mask.clone()]);
            let inputs = inputs(&problem, None, &mut Random(2), |_| {});
            verify(isa, &[2], &problem, &inputs);
            let (gradients, _) = backward(isa, 2, &problem, &inputs);
            let keeps = |q: usize, k: usize| problem.forward().region().keeps(q as i64, k as i64);
            let mut zeros = 0;
            for (i, gradient) in gradients.iter().enumerate() {
                for index in indices(&gradient.spec) {
                    let met = if i == 0 {
                        (0..seq_kv as usize).any(|k| keeps(index[2], k))
                    } else {
                        (0..seq_q as usize).any(|q| keeps(q, index[2]))
                    };
                    assert!(met || gradient.get(index) == 0.0, "{isa:?} {mask}: {i} {index:?}");
                    zeros += usize::from(!met);
                }
            }
            assert!(zeros > 0, "{mask}");
        }
    }
}

#[test]
fn infinities_and_nan_stay_where_they_are_attended_to() {
    let masks = [
        vec![],
        vec![Mask::causal()],
        vec![Mask::window(Some(9), Some(4), Align::BottomRight)],
        vec![Mask::prefix_lm(20), Mask::window(Some(30), None, Align::TopLeft)],
    ];
    for isa in Isa::all() {
        for shape in [[1, 2, 1, 150, 203, 33, 40], [1, 1, 1, 2, 70, 64, 64], [1, 2, 2, 90, 90, 16, 32], [1, 1, 1, 400, 600, 8, 8]] {
            for masks in &masks {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let problem = dense(shape, masks);
                    // Each operand by itself: together they would leave little that is finite.
                    for operand in 0..4 {
                        let inputs = inputs(&problem, None, &mut Random(3), |given| match operand {
                            0 => given[0].set([0, 0, 1, 2], bad),
                            1 => {
                                given[1].set([0, 0, 61, 3], bad);
                                given[1].set([0, 0, 12, 0], bad);
                            }
                            2 => given[2].set([0, 0, 45, 7], bad),
                            _ => given[3].set([0, 0, shape[3] as usize - 1, 5], bad),
                        });
                        verify(isa, &[2], &problem, &inputs);
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_in_dropped_keys_and_queries_does_not_matter() {
    for isa in Isa::all() {
        // Queries 0 to 69 keep no key, keys 60 and up are dropped by all.
        let problem =
            dense([1, 2, 1, 130, 300, 20, 12], &[Mask::window(None, Some(-70 + 0).map(|x: i64| x.max(0)), Align::TopLeft), Mask::causal()]);
        let clean = inputs(&problem, None, &mut Random(4), |_| {});
        let mut spoiled = inputs(&problem, None, &mut Random(4), |_| {});
        for key in 130..300 {
            for c in 0..20 {
                spoiled.k.set([0, 0, key, c], f32::NAN);
            }
            for c in 0..12 {
                spoiled.v.set([0, 0, key, c], f32::INFINITY);
            }
        }
        let bits = |inputs: &Inputs| backward(isa, 2, &problem, inputs).0.map(|t| t.data.into_iter().map(f32::to_bits).collect::<Vec<_>>());
        assert!(bits(&clean) == bits(&spoiled), "{isa:?}");
    }
}

#[test]
fn rows_whose_scores_are_all_minus_infinity_have_gradients_of_zero() {
    for isa in Isa::all() {
        for masks in [vec![], vec![Mask::causal_bottom_right()]] {
            let problem = dense([1, 2, 2, 70, 90, 8, 8], &masks);
            let inputs = inputs(&problem, None, &mut Random(5), |[q, k, _, d_o]| {
                for key in 0..90 {
                    k.set([0, 0, key, 1], f32::NEG_INFINITY);
                }
                for s in 0..70 {
                    q.set([0, 0, s, 1], if s % 3 == 0 { 1.0 } else { 0.0 });
                }
                d_o.set([0, 0, 3, 3], f32::NAN);
            });
            assert!(inputs.stats[0] == f32::NEG_INFINITY && inputs.stats[1].is_nan());
            verify(isa, &[2], &problem, &inputs);
            let (gradients, _) = backward(isa, 2, &problem, &inputs);
            for s in (0..70).step_by(3) {
                assert!((0..8).all(|c| gradients[0].get([0, 0, s, c]) == 0.0), "{isa:?}: query {s}");
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_heads() {
    let bytes = |heads: i64| {
        let problem = dense([1, heads, heads, 300, 500, 32, 32], &[]);
        backward(Isa::detect(), 1, &problem, &inputs(&problem, None, &mut Random(1), |_| {})).1.workspace_bytes
    };
    let few = bytes(20);
    assert_eq!(few, bytes(24));
    assert!(few > 0 && few < 3 << 20, "{few}");
}

/// The derivative of `Σ o · d_o` by one element of `q`, `k` or `v`, as a difference.
fn difference(problem: &BackwardProblem, given: [&Tensor; 3], d_o: &Tensor, scale: f64, operand: usize, index: [usize; 4]) -> f64 {
    // Elements are whole multiples of 2^-18, so both steps are exact in f32.
    const STEP: f32 = 1.0 / (1 << 14) as f32;
    let value = |step: f32| -> f64 {
        let mut moved = given.map(|t| Tensor { spec: t.spec, data: t.data.clone() });
        let x = moved[operand].get(index) as f32;
        moved[operand].set(index, x + step);
        let (o, _) = forward(problem, moved.each_ref(), scale);
        o.iter().zip(indices(&d_o.spec)).map(|(o, at)| o * d_o.get(at)).sum()
    };
    (value(STEP) - value(-STEP)) / (2.0 * f64::from(STEP))
}

#[test]
fn the_oracle_is_the_limit_of_differences() {
    for masks in [vec![], vec![Mask::causal()], vec![Mask::window(Some(2), Some(1), Align::BottomRight)], vec![Mask::prefix_lm(3)]] {
        let problem = dense([2, 4, 2, 5, 6, 3, 2], &masks);
        let Inputs { q, k, v, d_o, .. } = inputs(&problem, None, &mut Random(8), |_| {});
        let scale = 0.6;
        let (out, stats) = forward(&problem, [&q, &k, &v], scale);
        // The gradient moves with o; f32 is enough of it here, as the difference is coarser.
        let mut o = Tensor::new(problem.forward().o());
        indices(problem.forward().o()).zip(out).for_each(|(index, x)| o.set(index, x as f32));
        let got = oracle(&problem, [&q, &k, &v, &o, &d_o], &stats, scale);
        for (operand, (got, tensor)) in got.iter().zip([&q, &k, &v]).enumerate() {
            for (&(got, _), index) in got.iter().zip(indices(&tensor.spec)) {
                let want = difference(&problem, [&q, &k, &v], &d_o, scale, operand, index);
                assert!((got - want).abs() < 1e-5, "{masks:?}: {got} by operand {operand} at {index:?}, the difference is {want}");
            }
        }
    }
}
