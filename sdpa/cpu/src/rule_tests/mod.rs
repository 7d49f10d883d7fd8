//! Score_mods and masks on every instruction set of this machine, against closures in f64.

mod case;
mod dropped;

use super::CpuExecutor;
use super::element::Element;
use super::isa::Isa;
use super::tests::{LENGTHS, Random, Tensor, indices, narrowed, round, stored, told, widened};
use case::{MASKS, MODS, Masked, Modified, Values, mask, score_mod};
use half::{bf16, f16};
use sdpa_core::executor::Executor;
use sdpa_core::{AttentionSpec, BackwardProblem, DType, Elements, ElementsMut, HostForward, Layout, Param, Shape};
use sdpa_core::{HostBackward, HostGradient};
use sdpa_oracle::{Along, Closures};

/// Converts elements of the three types to the enums of a call.
trait Bound: Element + Default {
    fn elements(x: &[Self]) -> Elements<'_>;
    fn elements_mut(x: &mut [Self]) -> ElementsMut<'_>;
}

macro_rules! bound {
    ($($ty:ty: $variant:ident),*) => {
        $(impl Bound for $ty {
            fn elements(x: &[Self]) -> Elements<'_> {
                Elements::$variant(x)
            }
            fn elements_mut(x: &mut [Self]) -> ElementsMut<'_> {
                ElementsMut::$variant(x)
            }
        })*
    };
}
bound!(f32: F32, f16: F16, bf16: BF16);

/// The inputs of a call.
struct Given {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

/// The configuration of a run.
#[derive(Clone, Copy, Debug)]
struct How {
    isa: Isa,
    threads: usize,
}

impl How {
    fn run<R: Send>(self, run: impl FnOnce() -> R + Send) -> R {
        rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().unwrap().install(run)
    }

    fn forward<T: Bound>(self, problem: &BackwardProblem, given: &Given, params: &[Param<'_>], scale: f32) -> (Tensor, Vec<f32>) {
        let problem = problem.forward();
        let mut o = Tensor::new(problem.o());
        let mut stats = vec![f32::NAN; problem.stats_elements() as usize];
        let [q, k, v] = [&given.q, &given.k, &given.v].map(|t| narrowed::<T>(&t.data));
        let mut out = narrowed::<T>(&o.data);
        let prepared = CpuExecutor::with_isa(self.isa).prepare(problem).unwrap();
        let call = HostForward::new(T::elements(&q), T::elements(&k), T::elements(&v), T::elements_mut(&mut out))
            .stats(&mut stats)
            .attn_scale(scale)
            .params(params);
        self.run(|| prepared.forward(call)).unwrap();
        o.data = widened(&out);
        (o, stats)
    }

    /// Returns the gradients in row-major order: of `q`, `k`, `v` and parameters.
    fn backward<T: Bound>(
        self,
        problem: &BackwardProblem,
        given: &Given,
        (o, stats): (&Tensor, &[f32]),
        params: &[Param<'_>],
        scale: f32,
    ) -> Vec<Vec<f64>> {
        let [q, k, v, o, d_o] = [&given.q, &given.k, &given.v, o, &given.d_o].map(|t| narrowed::<T>(&t.data));
        let mut tensors = [problem.dq(), problem.dk(), problem.dv()].map(Tensor::new);
        let mut written = tensors.each_ref().map(|t| narrowed::<T>(&t.data));
        let sized = |name: &str| vec![T::default(); problem.gradient_elements(name) as usize];
        let mut of_params: Vec<Vec<T>> = problem.wrt().iter().map(|wanted| sized(&wanted.name)).collect();
        let prepared = CpuExecutor::with_isa(self.isa).prepare_backward(problem).unwrap();
        let [dq, dk, dv] = written.each_mut().map(|x| T::elements_mut(x));
        let named = problem.wrt().iter().zip(&mut of_params);
        let gradients = named.map(|(wanted, data)| HostGradient::new(&wanted.name, T::elements_mut(data)));
        let [q, k, v, o, d_o] = [&q, &k, &v, &o, &d_o].map(|x| T::elements(x));
        let call = HostBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).attn_scale(scale).params(params).gradients(gradients);
        self.run(|| prepared.backward(call)).unwrap();
        for (tensor, data) in tensors.iter_mut().zip(&written) {
            tensor.data = widened(data);
        }
        let all = |t: &Tensor| indices(&t.spec).map(|index| t.get(index)).collect::<Vec<f64>>();
        let of_params = of_params.iter().map(|x| widened(x).into_iter().map(f64::from).collect());
        tensors.iter().map(all).chain(of_params).collect()
    }
}

/// A bound on the rounding errors of a call's functions, in units of roundoff of their inputs and outputs.
const ROUNDINGS: f64 = 16.0;

/// Calls `call` with everything as closures.
fn closures<T>(modified: &Modified, masked: &Masked, values: &Values, call: impl FnOnce(&Closures<'_>) -> T) -> T {
    let at = |place: [i64; 4]| place.map(|n| n as usize);
    let modify = |score, place| (modified.value)(score, at(place), values);
    let slope = |score, place| (modified.slope)(score, at(place), values);
    let rounding = |score: f64, place| ROUNDINGS * (score.abs() + modify(score, place).abs());
    let keep = |place| (masked.keep)(at(place), values);
    let partials: Vec<_> = modified.along.iter().map(|(_, slope)| move |score, place| slope(score, at(place), values)).collect();
    let dims = modified.along.iter().map(|(name, _)| values.dims(name));
    let along: Vec<Along<'_>> = partials.iter().zip(dims).map(|(slope, dims)| Along { slope, dims, read: None }).collect();
    call(&Closures { modify: Some(&modify), slope: Some(&slope), rounding: Some(&rounding), keep: Some(&keep), along: &along })
}

/// Tests one problem, forward and backward.
fn verify<T: Bound>(isas: &[Isa], dtype: DType, shape: Shape, rules: (Modified, Masked), random: &mut Random, spoil: bool) {
    let (modified, masked) = rules;
    let layout = random.pick(&[Layout::Bhsd, Layout::Bshd]);
    let mut spec = AttentionSpec::dense(dtype, shape, layout).with_stats();
    spec.score_mods = modified.stages.clone();
    spec.masks = masked.masks.clone();
    let mut backward = spec.backward().deterministic();
    for (name, _) in &modified.along {
        backward = backward.wrt(name, dtype);
    }
    let problem = &backward.validate().unwrap();
    let values = Values::random(problem.forward(), random);
    let scale = random.pick(&[0.3, 0.11, -0.2]);
    let tensor = |spec: &sdpa_core::TensorSpec, random: &mut Random| Tensor::random(spec, dtype, random);
    let mut given = Given {
        q: tensor(problem.forward().q(), random),
        k: tensor(problem.forward().k(), random),
        v: tensor(problem.forward().v(), random),
        d_o: tensor(problem.d_o(), random),
    };
    if spoil {
        // Spoil one key or value. Rows that attend to it become NaN or infinite; the others must not.
        let key = random.below(shape.seq_kv as usize);
        let bad = random.pick(&[f32::NAN, f32::INFINITY]);
        if random.below(2) == 0 { given.k.set([0, 0, key, 0], bad) } else { given.v.set([0, 0, key, 0], bad) }
    }
    // Calls `call` with the oracle's form of the problem.
    fn judge<T>(
        (problem, given, scale): (&BackwardProblem, &Given, f32),
        closures: &Closures<'_>,
        call: impl FnOnce(&sdpa_oracle::Problem<'_>) -> T,
    ) -> T {
        let Given { q, k, v, .. } = given;
        told(problem.forward(), [q, k, v], scale.into(), &[], |p| closures.with(p, call))
    }
    let asked = (problem, &given, scale);
    let answer = closures(&modified, &masked, &values, |closures| judge(asked, closures, sdpa_oracle::attention));
    let mut o = Tensor::new(problem.forward().o());
    indices(problem.forward().o()).zip(&answer.o).for_each(|(index, x)| o.set(index, round(dtype, *x as f32)));
    let stats: Vec<f32> = answer.stats.iter().map(|x| *x as f32).collect();
    let params = values.bound();
    let tensors = [problem.dq(), problem.dk(), problem.dv()].map(|t| t.dims.map(|n| n as usize));
    for &isa in isas {
        let (mut first_forward, mut first): (Option<Vec<u32>>, Option<Vec<Vec<u64>>>) = (None, None);
        for threads in [1, 3] {
            let how = How { isa, threads };
            let what = |name: &str| format!("{how:?} {dtype} {shape:?} {:?} {:?}: {name}", modified.stages, masked.masks);
            let (out, lse) = how.forward::<T>(problem, &given, &params, scale);
            let forward: Vec<u32> = out.data.iter().chain(&lse).map(|x| x.to_bits()).collect();
            // The oracle takes most of the time, so identical bits are not checked again.
            if first_forward.as_ref() != Some(&forward) {
                let distance = closures(&modified, &masked, &values, |closures| {
                    judge(asked, closures, |p| sdpa_oracle::check(p, out.told(), sdpa_oracle::Statistics::of(Some(&lse)), &|_| ()))
                });
                assert!(distance.passes(), "{}: {distance:?}", what("forward"));
            }
            first_forward.get_or_insert(forward);
            let got = how.backward::<T>(problem, &given, (&o, &stats), &params, scale);
            let bits: Vec<Vec<u64>> = got.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect();
            if let Some(first) = &first {
                assert!(*first == bits, "{}: {threads} threads give other bits", what(""));
                continue;
            }
            let dense = |n: usize| sdpa_oracle::Tensor::dense(&got[n], tensors[n]);
            let along: Vec<_> =
                (3..got.len()).map(|n| (sdpa_oracle::Tensor::dense(&got[n], [1, 1, 1, got[n].len()]), stored(dtype))).collect();
            let whose = sdpa_oracle::Given::These { o: o.told(), stats: &stats };
            let distance = closures(&modified, &masked, &values, |closures| {
                judge(asked, closures, |p| {
                    sdpa_oracle::check_gradients(p, given.d_o.told(), whose, &[dense(0), dense(1), dense(2)], &along, &|_| ())
                })
            });
            assert!(distance.passes(), "{}: {distance:?}", what("backward"));
            first = Some(bits);
        }
    }
}

fn any(isas: &[Isa], dtype: DType, shape: Shape, rules: (Modified, Masked), random: &mut Random, spoil: bool) {
    if dtype == DType::F16 {
        verify::<f16>(isas, dtype, shape, rules, random, spoil);
    } else if dtype == DType::BF16 {
        verify::<bf16>(isas, dtype, shape, rules, random, spoil);
    } else {
        verify::<f32>(isas, dtype, shape, rules, random, spoil);
    }
}

fn random_shape(random: &mut Random) -> Shape {
    loop {
        let heads_kv = random.pick(&[1, 1, 2]);
        let shape = Shape {
            batch: random.pick(&[1, 2, 3]),
            heads_q: heads_kv * random.pick(&[1, 2, 3]),
            heads_kv,
            seq_q: random.pick(&LENGTHS),
            seq_kv: random.pick(&LENGTHS).max(5),
            dim_qk: random.pick(&[1, 5, 16, 40]),
            dim_v: random.pick(&[3, 8, 33]),
        };
        if shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv <= 60_000 {
            return shape;
        }
    }
}

fn extents(shape: &Shape) -> [usize; 4] {
    [shape.batch, shape.heads_q, shape.seq_q, shape.seq_kv].map(|n| n as usize)
}

#[test]
fn every_score_mod_and_every_mask_agrees_with_its_closure() {
    let random = &mut Random(17);
    for n in 0..MODS.max(MASKS) * 2 {
        let shape = random_shape(random);
        let rules = (score_mod(n % MODS, shape.heads_q as usize), mask(n % MASKS, extents(&shape)));
        any(&Isa::all(), DType::F32, shape, rules, random, false);
        let shape = random_shape(random);
        let plain = (score_mod(n % MODS, shape.heads_q as usize), mask(16, extents(&shape)));
        any(&Isa::all(), DType::F32, shape, plain, random, false);
    }
}

#[test]
fn random_combinations_agree_with_their_closures() {
    let random = &mut Random(99);
    for n in 0..150 {
        let shape = random_shape(random);
        let dtype = random.pick(&[DType::F32, DType::F16, DType::BF16]);
        let rules = (score_mod(random.below(MODS), shape.heads_q as usize), mask(random.below(MASKS), extents(&shape)));
        any(&Isa::all(), dtype, shape, rules, random, n % 3 == 0);
    }
}

#[test]
fn sums_of_several_cells_agree_with_the_closures() {
    let random = &mut Random(5);
    for n in [3, 5, 11, 15, 16, 18, 20, 23] {
        for m in [16, 17, 19, 20] {
            let shape = Shape { batch: 2, heads_q: 2, heads_kv: 1, seq_q: 301, seq_kv: 390, dim_qk: 8, dim_v: 5 };
            any(&[Isa::detect()], DType::F32, shape, (score_mod(n, 2), mask(m, extents(&shape))), random, false);
            // Use few rows, so that keys are split over the threads.
            let shape = Shape { seq_q: 3, seq_kv: 1203, ..shape };
            any(&[Isa::detect()], DType::F32, shape, (score_mod(n, 2), mask(m, extents(&shape))), random, false);
        }
    }
}
