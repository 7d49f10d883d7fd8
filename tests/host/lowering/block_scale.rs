//! 8-bit floats whose blocks have scales: what the CPU executor computes is what the graph says, and scales lie where engines read them.

use super::fp8::{same, same_amax, step};
use super::{Graph, NEW, transposed};
use conformance::inputs;
use conformance::random::Random;
use cudnn_graph::ir::interp::{self, Precision, Value};
use cudnn_graph::ir::op::Op;
use cudnn_graph::ir::{Reordering, TensorId};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::lower::{self, Form, Job, Lowered, Operand, Supply};
use sdpa::{Amax, AttentionSpec, BlockScale, DType, Executor, F8E8M0, HostAmax, HostForward, Layout, Mask, Param, Problem, Shape};
use std::collections::BTreeMap;

/// The scales of an operand: as (batch, head, line, block), and as they lie in memory.
struct Scales {
    which: BlockScale,
    extents: [i64; 4],
    numbers: Vec<f64>,
    memory: Vec<F8E8M0>,
}

impl Scales {
    fn draw(problem: &Problem, which: BlockScale, random: &mut Random) -> Scales {
        let scales = problem.block_scales(which.operand()).unwrap();
        let extents = scales.extents();
        let [_, _, seq, dim] = problem.tensor(which.operand()).unwrap().dims;
        let mut memory = vec![F8E8M0::default(); scales.elements()];
        let mut numbers = Vec::new();
        for n in 0..extents.iter().product::<i64>() {
            let at = |axis: usize| n / extents[axis + 1..].iter().product::<i64>() % extents[axis];
            let (line, first) = (at(2), at(3) * 32);
            let [s, d] = if which == BlockScale::V { [first, line] } else { [line, first] };
            let bits = random.pick(&[124, 125, 126, 127, 128]);
            if s < seq && d < dim {
                memory[scales.place([at(0), at(1), s, d])] = F8E8M0::from_bits(bits);
            }
            // What is padding is read by nobody.
            numbers.push(if s < seq && d < dim { 2f64.powi(i32::from(bits) - 127) } else { f64::NAN });
        }
        Scales { which, extents, numbers, memory }
    }

    fn param(&self) -> Param<'_> {
        Param::new(self.which.name(), &self.memory)
    }

    /// As the graph reads them: those of keys and values turned.
    fn of_graph(&self) -> (String, Vec<f64>) {
        let numbers = if self.which == BlockScale::Q { self.numbers.clone() } else { transposed(&self.numbers, self.extents) };
        (self.which.name().to_owned(), numbers)
    }
}

fn spec(seed: u64, random: &mut Random) -> AttentionSpec {
    let (heads_kv, group) = (random.between(1, 2), random.between(1, 3));
    let shape = Shape {
        batch: random.between(1, 2),
        heads_q: heads_kv * group,
        heads_kv,
        seq_q: random.between(2, 40),
        seq_kv: random.between(5, 150),
        dim_qk: 32 * random.between(1, 3),
        dim_v: 16 * random.between(1, 9),
    };
    let dtype = [DType::F8E4M3, DType::F8E5M2][seed as usize % 2];
    let mut spec = AttentionSpec::dense(dtype, shape, random.pick(&[Layout::Bhsd, Layout::Bshd])).with_stats().with_block_scales();
    spec.o_dtype = random.pick(&[None, Some(DType::F16), Some(DType::BF16), Some(DType::BF16)]);
    match seed % 4 {
        0 => spec,
        1 => spec.mask(Mask::causal()),
        2 => spec.score_mod("softcap:4".parse().unwrap()),
        _ => spec.mask(Mask::prefix_lm(9)),
    }
}

fn interpreted(job: &Job, lowered: &Lowered, memory: &[(Operand, inputs::Operand)], scales: &[Scales]) -> BTreeMap<TensorId, Value> {
    let mut graph = Graph { lowered, inputs: BTreeMap::from([(lowered.attn_scale, Value::scalar(0.25))]) };
    for (operand, tensor) in job.tensors().filter(|(operand, _)| !job.writes(*operand)) {
        let (_, own) = memory.iter().find(|(own, _)| *own == operand).unwrap();
        graph.operand(operand, tensor.dims, &inputs::gather(&tensor, own));
    }
    let mut numbers: Vec<(String, Vec<f64>)> = scales.iter().map(Scales::of_graph).collect();
    numbers.push(("cap".to_owned(), vec![4.0]));
    graph.supply(&numbers);
    interp::run(&lowered.graph, &graph.inputs, Precision::F32).unwrap()
}

#[test]
fn forward_passes_are_what_graphs_say() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let spec = spec(seed, &mut random);
        let problem = spec.validate().unwrap();
        let job = Job::from(problem.clone());
        let memory: Vec<(Operand, inputs::Operand)> =
            job.tensors().map(|(operand, tensor)| (operand, inputs::random(&tensor, job.dtype_of(operand), 1.5, &mut random))).collect();
        let scales = BlockScale::ALL.map(|which| Scales::draw(&problem, which, &mut random));
        let dtype = problem.dtype_of(Operand::O);
        let mut o = inputs::poisoned(&spec.o, dtype);
        let (mut stats, mut told) = (vec![f32::NAN; problem.stats_elements() as usize], f32::NAN);
        let of = |operand: Operand| memory.iter().find(|(own, _)| *own == operand).unwrap().1.elements();
        let params = scales.each_ref().map(Scales::param);
        let call = HostForward::new(of(Operand::Q), of(Operand::K), of(Operand::V), o.elements_mut())
            .stats(&mut stats)
            .attn_scale(0.25)
            .params(&params)
            .amax([HostAmax::new(Amax::O, &mut told)]);
        CpuExecutor::new().prepare(&problem).unwrap().forward(call).unwrap();
        let lowered = lower::lower(&job, Form::Composite, NEW).unwrap();
        let want = interpreted(&job, &lowered, &memory, &scales);
        let of_graph = &want[&lowered.operand(Operand::O).unwrap()].data;
        same(&format!("o of {seed}"), &inputs::gather(&spec.o, &o), of_graph, step(dtype));
        same_amax(&[(Amax::O, told)], &lowered, &want);
        let largest = of_graph.iter().fold(0f64, |most, x| most.max(x.abs()));
        assert!((f64::from(told) - largest).abs() <= step(dtype) * largest, "{seed}: {told}, not {largest}");
    }
}

/// As NVIDIA's frontend declares them: (batch, heads, lines, blocks) of queries, and turned of keys and values.
#[test]
fn scales_are_interleaved_and_their_blocks_innermost() {
    let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 200, seq_kv: 300, dim_qk: 64, dim_v: 96 };
    let problem = AttentionSpec::dense(DType::F8E4M3, shape, Layout::Bshd).with_block_scales().validate().unwrap();
    let lowered = lower::lower(&problem.into(), Form::Composite, NEW).unwrap();
    for (name, dims, strides) in [
        ("block_scale_q", [2, 4, 256, 4], [4096, 1024, 4, 1]),
        ("block_scale_k", [2, 2, 4, 384], [3072, 1536, 1, 4]),
        ("block_scale_v", [2, 2, 12, 128], [3072, 1536, 1, 12]),
    ] {
        let (id, _) = lowered.supplies.iter().find(|(_, supply)| *supply == Supply::Param(name.to_owned())).unwrap();
        let tensor = lowered.graph.get(*id).unwrap();
        assert_eq!((&tensor.dims.0[..], &tensor.strides.0[..]), (&dims[..], &strides[..]), "{name}");
        assert_eq!(tensor.reordering, Reordering::F8x128x4, "{name}");
    }
    let widened = lowered.graph.graph().ops().iter().filter(|op| matches!(op, Op::BlockScaleDequantize(_))).count();
    assert_eq!(widened, 3);
}
