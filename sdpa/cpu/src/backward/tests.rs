//! Every instruction set of this machine against the textbook gradient in f64.
//!
//! The executor and the oracle receive the same `o` and `stats`, as the forward pass rounds them: only the backward pass is tested.

use crate::CpuExecutor;
use crate::element::Element;
use crate::isa::Isa;
use crate::tests::{DIMS, LENGTHS, Random, Tensor, indices, kept, masks, narrowed, round, told, widened, with_gaps};
use half::{bf16, f16};
use sdpa_core::HostBackward;
use sdpa_core::executor::{Executor, Report};
use sdpa_core::{Align, AttentionSpec, BackwardProblem, BackwardSpec, DType, Elements, ElementsMut, Layout, Mask, Shape, TensorSpec};
use sdpa_oracle::Given;

/// The inputs of a call.
pub(super) struct Inputs {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    o: Tensor,
    pub(super) d_o: Tensor,
    stats: Vec<f32>,
    scale: Option<f32>,
}

/// Returns random operands, and the results of a forward pass over them.
pub(super) fn inputs(problem: &BackwardProblem, scale: Option<f32>, random: &mut Random, spoil: impl FnOnce(&mut [Tensor; 4])) -> Inputs {
    let forward_problem = problem.forward();
    let dtype = forward_problem.dtype();
    let mut given =
        [forward_problem.q(), forward_problem.k(), forward_problem.v(), problem.d_o()].map(|spec| Tensor::random(spec, dtype, random));
    spoil(&mut given);
    let [q, k, v, d_o] = given;
    let factor = f64::from(scale.unwrap_or(forward_problem.default_scale()));
    let answer = told(forward_problem, [&q, &k, &v], factor, &kept(forward_problem), sdpa_oracle::attention);
    let mut o = Tensor::new(forward_problem.o());
    for (index, x) in indices(forward_problem.o()).zip(answer.o) {
        o.set(index, round(dtype, x as f32));
    }
    Inputs { q, k, v, o, d_o, stats: answer.stats.into_iter().map(|x| x as f32).collect(), scale }
}

/// Runs the executor in a pool of `threads`. Returns the gradients with their gaps.
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
        let report = run(HostBackward::new((q, k, v), (o, &inputs.stats), d_o, (dq, dk, dv)).attn_scale(inputs.scale));
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
    let Inputs { q, k, v, o, d_o, stats, .. } = inputs;
    let given = Given::These { o: o.told(), stats };
    let mut first: Option<[Vec<u32>; 3]> = None;
    for &threads in threads {
        let (mut gradients, _) = backward(isa, threads, problem, inputs);
        let bits = gradients.each_ref().map(|t| t.data.iter().map(|x| x.to_bits()).collect::<Vec<u32>>());
        // Only the first run is checked with the oracle: runs with other numbers of threads must have identical bits.
        if first.is_none() {
            let forward = problem.forward();
            let distance = told(forward, [q, k, v], scale, &kept(forward), |p| {
                sdpa_oracle::check_gradients(p, d_o.told(), given, &gradients.each_ref().map(Tensor::told), &[], &|_| ())
            });
            assert!(distance.passes(), "{isa:?}, {threads} threads, {problem:?}: {distance:?}");
        }
        for (name, gradient) in ["dq", "dk", "dv"].into_iter().zip(&mut gradients) {
            gradient.clear();
            assert!(gradient.data.iter().all(|x| x.is_nan()), "{isa:?}, {problem:?}: something was written between rows of {name}");
        }
        assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{isa:?}, {problem:?}: {threads} threads give other bits");
    }
}

/// Returns strides of any layout, with or without gaps.
fn any_layout(dims: [i64; 4], random: &mut Random) -> TensorSpec {
    let layout = random.pick(&[Layout::Bhsd, Layout::Bshd, Layout::Sbhd]);
    if random.below(2) == 0 { with_gaps(dims, layout, random) } else { TensorSpec::dense(dims, layout) }
}

/// Sets the strides of some axes to 0.
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
        for seed in 0..250 {
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

pub(super) fn dense(shape: [i64; 7], masks: &[Mask]) -> BackwardProblem {
    let [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v] = shape;
    let mut spec = AttentionSpec::dense(DType::F32, Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v }, Layout::Bhsd);
    spec.masks = masks.to_vec();
    spec.backward().validate().unwrap()
}

#[test]
fn sums_of_several_cells_agree_with_the_oracle_on_any_number_of_threads() {
    // The shapes split rows, keys or both. Some masks leave cells or strips empty.
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
        for (seq_q, seq_kv, masks) in [
            (130, 65, vec![Mask::causal_bottom_right()]),
            (20, 300, vec![Mask::causal()]),
            (300, 290, vec![Mask::window(Some(3), Some(0), Align::BottomRight)]),
            // The masks exclude every pair.
            (50, 90, vec![Mask::causal(), Mask::window(Some(5), None, Align::BottomRight)]),
        ] {
            let problem = dense([2, 4, 2, seq_q, seq_kv, 40, 24], &masks);
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
                    assert!(met || gradient.get(index) == 0.0, "{isa:?} {masks:?}: {i} {index:?}");
                    zeros += usize::from(!met);
                }
            }
            assert!(zeros > 0, "{masks:?}");
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
        for shape in [[1, 2, 1, 150, 203, 13, 10], [1, 1, 1, 2, 70, 24, 24], [1, 2, 2, 90, 90, 16, 32], [1, 1, 1, 150, 600, 8, 8]] {
            for masks in &masks {
                let problem = dense(shape, masks);
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    // Spoil one operand at a time: if all four were spoiled, few results would remain finite.
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
fn what_dropped_keys_and_queries_hold_does_not_matter() {
    let window = Mask::window(Some(10), Some(0), Align::BottomRight);
    // Each case has queries that attend to no key, or keys that no query attends to.
    let cases = [
        ([1, 4, 2, 130, 100, 20, 12], Mask::causal_bottom_right(), 0..30, 0..0),
        ([1, 4, 2, 90, 200, 20, 12], Mask::causal(), 0..0, 90..200),
        ([1, 4, 2, 60, 200, 20, 12], window, 0..0, 0..131),
    ];
    for isa in Isa::all() {
        for (shape, mask, queries, keys) in &cases {
            let problem = dense(*shape, std::slice::from_ref(mask));
            let clean = inputs(&problem, None, &mut Random(4), |_| {});
            for bad in [f32::NAN, f32::INFINITY] {
                let mut spoiled = inputs(&problem, None, &mut Random(4), |_| {});
                for (tensors, rows) in
                    [(vec![&mut spoiled.q, &mut spoiled.o, &mut spoiled.d_o], queries), (vec![&mut spoiled.k, &mut spoiled.v], keys)]
                {
                    for tensor in tensors {
                        let spec = tensor.spec;
                        indices(&spec).filter(|index| rows.contains(&index[2])).for_each(|index| tensor.set(index, bad));
                    }
                }
                let bits = |inputs: &Inputs| {
                    backward(isa, 2, &problem, inputs).0.map(|t| t.data.into_iter().map(f32::to_bits).collect::<Vec<_>>())
                };
                assert!(bits(&clean) == bits(&spoiled), "{isa:?} {mask} {bad}");
            }
        }
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
