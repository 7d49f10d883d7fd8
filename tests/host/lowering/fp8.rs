//! 8-bit floats: what the CPU executor computes is what the graphs say that cuDNN is sent, rounding by rounding.

use super::Graph;
use conformance::inputs::{self, Operand as Memory};
use conformance::random::Random;
use cudnn_graph::Version;
use cudnn_graph::ir::TensorId;
use cudnn_graph::ir::interp::{self, Precision, Value};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::lower::{self, Form, Job, Lowered, Operand, Supply};
use sdpa::{
    Amax, AttentionSpec, BackwardProblem, BackwardSpec, DType, Direction, Executor, Fp8Scale, HostAmax, HostBackward, HostForward, Layout,
    Param, Shape,
};
use std::collections::BTreeMap;

/// Before and after the softmax and bands are ops.
const RUNTIMES: [Version; 2] = [Version::new(9, 19, 0), Version::new(9, 27, 0)];

/// How many elements may be off, as sums in another order may be rounded to the neighbour.
const NEIGHBOURS: f64 = 0.02;

struct Run {
    memory: Vec<(Operand, Memory)>,
    stats: Vec<f32>,
    scales: Vec<(&'static str, [f32; 1])>,
    attn_scale: f32,
}

/// Numbers of every operand, and scales of every size that they may have.
fn draw(job: &Job, random: &mut Random) -> Run {
    let mut memory = Vec::new();
    for (operand, tensor) in job.tensors() {
        memory.push((operand, inputs::random(&tensor, job.dtype_of(operand), 1.5, random)));
    }
    let mut scale = |scale: &Fp8Scale| {
        // Pairs whose product is one, and numbers of any size.
        let pairs =
            [(Fp8Scale::ScaleS, 200.0), (Fp8Scale::DescaleS, 1.0 / 200.0), (Fp8Scale::ScaleDP, 16.0), (Fp8Scale::DescaleDP, 1.0 / 16.0)];
        let drawn = random.pick(&[0.3, 0.7, 1.0, 1.6]);
        let value = pairs.iter().find(|(own, _)| own == scale).map_or(drawn, |(_, value)| *value);
        (scale.name(), [value])
    };
    let scales = Fp8Scale::of(job.direction()).iter().map(&mut scale).collect();
    Run { memory, stats: Vec::new(), scales, attn_scale: 0.25 }
}

impl Run {
    fn numbers(&self, job: &Job, operand: Operand) -> Vec<f64> {
        let (_, memory) = self.memory.iter().find(|(own, _)| *own == operand).unwrap();
        inputs::gather(job.tensor(operand).unwrap(), memory)
    }

    fn params(&self) -> Vec<Param<'_>> {
        self.scales.iter().map(|(name, value)| Param::new(name, value)).collect()
    }

    /// What the graph computes, every rounding as it says.
    fn interpreted(&self, job: &Job, lowered: &Lowered) -> BTreeMap<TensorId, Value> {
        let mut graph = Graph { lowered, inputs: BTreeMap::from([(lowered.attn_scale, Value::scalar(self.attn_scale.into()))]) };
        for (operand, tensor) in job.tensors().filter(|(operand, _)| !job.writes(*operand)) {
            graph.operand(operand, tensor.dims, &self.numbers(job, operand));
        }
        if let (Some(stats), Job::Backward(_)) = (lowered.stats, job) {
            graph.set(stats, self.stats.iter().map(|x| f64::from(*x)).collect());
        }
        let mut numbers: Vec<(String, Vec<f64>)> =
            self.scales.iter().map(|(name, [x])| ((*name).to_owned(), vec![f64::from(*x)])).collect();
        numbers.push(("cap".to_owned(), vec![4.0]));
        graph.supply(&numbers);
        interp::run(&lowered.graph, &graph.inputs, Precision::F32).unwrap()
    }
}

/// All are near, and nearly all are the same.
pub(super) fn same(what: &str, got: &[f64], want: &[f64], step: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let mut off = 0;
    for (n, (got, want)) in got.iter().zip(want).enumerate() {
        // A row without a key is no number in the ops that spell a softmax, and zeros in every executor.
        if want.is_nan() && *got == 0.0 {
            continue;
        }
        // A neighbour, or what a neighbour among weights moves.
        let near = step * want.abs().max(got.abs()) + step * 0.5;
        assert!((got - want).abs() <= near || got == want, "{what} {n}: {got}, not {want}");
        off += usize::from(got != want);
    }
    assert!((off as f64) <= NEIGHBOURS * got.len() as f64 + 1.0, "{what}: {off} of {} are off", got.len());
}

/// Largest magnitudes are those of f32 numbers that are computed in another order.
pub(super) fn same_amax(got: &[(Amax, f32)], lowered: &Lowered, want: &BTreeMap<TensorId, Value>) {
    for (amax, got) in got {
        let (tensor, _) = lowered.supplies.iter().find(|(_, supply)| *supply == Supply::Amax(*amax)).unwrap();
        let want = want[tensor].data[0];
        let near = if matches!(amax, Amax::S) { 1e-5 } else { 0.02 };
        assert!((f64::from(*got) - want).abs() <= near * want, "{amax}: {got}, not {want}");
    }
}

pub(super) fn step(dtype: DType) -> f64 {
    match dtype {
        DType::F8E4M3 => 1.0 / 8.0,
        DType::F8E5M2 => 1.0 / 4.0,
        DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64 | DType::Bool | DType::F8E8M0 => 1.0 / 64.0,
    }
}

fn room(told: &mut [(Amax, f32)]) -> Vec<HostAmax<'_>> {
    told.iter_mut().map(|(of, value)| HostAmax::new(*of, value)).collect()
}

fn amax(direction: Direction) -> Vec<(Amax, f32)> {
    Amax::of(direction).iter().map(|amax| (*amax, f32::NAN)).collect()
}

fn spec(seed: u64, random: &mut Random) -> AttentionSpec {
    let (heads_kv, group) = (random.between(1, 2), random.between(1, 3));
    let [dim_qk, dim_v] = [(); 2].map(|()| 16 * random.between(1, 3));
    let shape = Shape {
        batch: random.between(1, 2),
        heads_q: heads_kv * group,
        heads_kv,
        seq_q: random.between(2, 40),
        // As many keys as dims would not show whether they are turned.
        seq_kv: 2 * random.between(1, 25) + 1,
        dim_qk,
        dim_v,
    };
    let dtype = [DType::F8E4M3, DType::F8E5M2][seed as usize % 2];
    let spec = AttentionSpec::dense(dtype, shape, random.pick(&[Layout::Bhsd, Layout::Bshd])).with_stats();
    match seed % 4 {
        0 => spec,
        1 => spec.mask(sdpa::Mask::causal()),
        2 => spec.mask(sdpa::Mask::window(Some(7), Some(3), sdpa::Align::TopLeft)),
        _ => spec.mask(sdpa::Mask::prefix_lm(9)),
    }
}

/// Those of the forward pass over the same operands.
fn stats(problem: &BackwardProblem, run: &Run) -> Vec<f32> {
    let forward = problem.forward();
    let mut stats = vec![f32::NAN; forward.stats_elements() as usize];
    let (mut o, mut told) = (inputs::poisoned(forward.o(), forward.dtype_of(Operand::O)), amax(Direction::Forward));
    let of = |operand: Operand| run.memory.iter().find(|(own, _)| *own == operand).unwrap().1.elements();
    let one = [1.0];
    let mut params = run.params();
    params.retain(|p| forward.params().iter().any(|declared| declared.name == p.name));
    params.push(Param::new(Fp8Scale::ScaleO.name(), &one));
    let (q, k, v) = (of(Operand::Q), of(Operand::K), of(Operand::V));
    let call =
        HostForward::new(q, k, v, o.elements_mut()).stats(&mut stats).attn_scale(run.attn_scale).params(&params).amax(room(&mut told));
    CpuExecutor::new().prepare(forward).unwrap().forward(call).unwrap();
    stats
}

#[test]
fn forward_passes_are_what_graphs_say() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let mut spec = spec(seed, &mut random);
        spec.o_dtype = random.pick(&[None, Some(DType::F8E4M3), Some(DType::F8E5M2), Some(DType::BF16)]);
        if seed % 5 == 0 {
            spec = spec.score_mod("softcap:4".parse().unwrap());
        }
        let problem = spec.validate().unwrap();
        let job = Job::from(problem.clone());
        let mut run = draw(&job, &mut random);
        let dtype = problem.dtype_of(Operand::O);
        let mut o = inputs::poisoned(&spec.o, dtype);
        let mut stats = vec![f32::NAN; problem.stats_elements() as usize];
        let mut told = amax(Direction::Forward);
        let of = |operand: Operand| run.memory.iter().find(|(own, _)| *own == operand).unwrap().1.elements();
        let params = run.params();
        let call = HostForward::new(of(Operand::Q), of(Operand::K), of(Operand::V), o.elements_mut())
            .stats(&mut stats)
            .attn_scale(run.attn_scale)
            .params(&params)
            .amax(room(&mut told));
        CpuExecutor::new().prepare(&problem).unwrap().forward(call).unwrap();
        run.stats = stats;
        for runtime in RUNTIMES {
            let lowered = lower::lower(&job, Form::Composite, runtime).unwrap();
            let want = run.interpreted(&job, &lowered);
            let o_of_graph = &want[&lowered.operand(Operand::O).unwrap()].data;
            same(&format!("o of {seed}"), &inputs::gather(&spec.o, &o), o_of_graph, step(dtype));
            same_amax(&told, &lowered, &want);
        }
    }
}

#[test]
fn backward_passes_are_what_graphs_say() {
    let mut compared = 0;
    for seed in 0..24 {
        let mut random = Random::new(seed + 1000);
        let forward = spec(seed, &mut random);
        let mut spec: BackwardSpec = forward.backward();
        spec.d_o_dtype = random.pick(&[None, Some(DType::F8E5M2), Some(DType::F8E4M3)]);
        spec.gradient_dtype = random.pick(&[None, Some(DType::F8E5M2), Some(DType::BF16)]);
        let problem = spec.validate().unwrap();
        let job = Job::from(problem.clone());
        let mut run = draw(&job, &mut random);
        run.stats = stats(&problem, &run);
        // Rows without keys are unsupported: see `unsupported.rs`.
        if run.stats.contains(&f32::NEG_INFINITY) {
            continue;
        }
        compared += 1;
        let mut results =
            [Operand::DQ, Operand::DK, Operand::DV].map(|operand| inputs::poisoned(problem.tensor(operand), problem.dtype_of(operand)));
        let mut told = amax(Direction::Backward);
        let of = |operand: Operand| run.memory.iter().find(|(own, _)| *own == operand).unwrap().1.elements();
        let [dq, dk, dv] = &mut results;
        let params = run.params();
        let call = HostBackward::new(
            (of(Operand::Q), of(Operand::K), of(Operand::V)),
            (of(Operand::O), &run.stats),
            of(Operand::DO),
            (dq.elements_mut(), dk.elements_mut(), dv.elements_mut()),
        )
        .attn_scale(run.attn_scale)
        .params(&params)
        .amax(room(&mut told));
        CpuExecutor::new().prepare_backward(&problem).unwrap().backward(call).unwrap();
        for runtime in RUNTIMES {
            let lowered = lower::lower(&job, Form::Composite, runtime).unwrap();
            let want = run.interpreted(&job, &lowered);
            for (operand, got) in [Operand::DV, Operand::DK, Operand::DQ].into_iter().zip(results.iter().rev()) {
                let of_graph = &want[&lowered.operand(operand).unwrap()].data;
                same(
                    &format!("{operand} of {seed}"),
                    &inputs::gather(problem.tensor(operand), got),
                    of_graph,
                    step(problem.dtype_of(operand)),
                );
            }
            same_amax(&told, &lowered, &want);
        }
    }
    assert!(compared > 15, "only {compared} passes");
}
