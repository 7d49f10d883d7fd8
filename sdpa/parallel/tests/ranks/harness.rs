//! Runs a problem over threads, and on one executor.

use crate::backend;
use crate::case::{params, values};
use sdpa_core::expr::Declared;
use sdpa_core::half::{bf16, f16};
use sdpa_core::{AttentionSpec, DType, Elements, ElementsMut, Executor, HostBackward, HostForward, Layout, Param, TensorSpec};
use sdpa_cpu::CpuExecutor;
use sdpa_parallel::{ContextParallel, Exchange, ParallelError, ParallelProblem, Pass, Tensor};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Numbers of the problem's type.
#[derive(Clone, Debug)]
pub(crate) enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Numbers {
    pub(crate) fn of(x: &[f32], dtype: DType) -> Numbers {
        match dtype {
            DType::F16 => Numbers::F16(x.iter().map(|x| f16::from_f32(*x)).collect()),
            DType::BF16 => Numbers::BF16(x.iter().map(|x| bf16::from_f32(*x)).collect()),
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => Numbers::F32(x.to_vec()),
        }
    }

    pub(crate) fn elements(&self) -> Elements<'_> {
        match self {
            Numbers::F32(x) => x.into(),
            Numbers::F16(x) => x.into(),
            Numbers::BF16(x) => x.into(),
        }
    }

    fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Numbers::F32(x) => x.into(),
            Numbers::F16(x) => x.into(),
            Numbers::BF16(x) => x.into(),
        }
    }

    pub(crate) fn f32(&self) -> Vec<f32> {
        match self {
            Numbers::F32(x) => x.clone(),
            Numbers::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Numbers::BF16(x) => x.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn numbers(&mut self, n: usize, dtype: DType) -> Vec<f32> {
        let all: Vec<f32> = (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect();
        Numbers::of(&all, dtype).f32()
    }
}

/// Whole operands, dense in the axis order of the problem, rounded to its type.
pub(crate) struct Data {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) d_o: Vec<f32>,
}

impl Data {
    pub(crate) fn new(spec: &AttentionSpec, seed: u64) -> Data {
        let mut random = Random(seed);
        let mut of = |t: &TensorSpec| random.numbers(t.dims.iter().product::<i64>() as usize, spec.dtype);
        let (mut q, mut k, v, d_o) = (of(&spec.q), of(&spec.k), of(&spec.v), of(&spec.o));
        // Larger scores, so that rows differ.
        q.iter_mut().chain(&mut k).for_each(|x| *x *= 2.0);
        Data { q, k, v, d_o }
    }
}

/// Whole results, dense in the axis order of the problem.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Results {
    pub(crate) o: Vec<f32>,
    pub(crate) stats: Vec<f32>,
    pub(crate) row_max: Vec<f32>,
    pub(crate) sum_exp: Vec<f32>,
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
}

impl Results {
    pub(crate) fn bits(&self) -> Vec<u32> {
        let all = [&self.o, &self.stats, &self.row_max, &self.sum_exp, &self.dq, &self.dk, &self.dv];
        all.into_iter().flatten().map(|x| x.to_bits()).collect()
    }
}

const TENSORS: [Tensor; 7] = [Tensor::O, Tensor::Stats, Tensor::RowMax, Tensor::SumExp, Tensor::DQ, Tensor::DK, Tensor::DV];

/// One rank, whose calls have host memory.
pub(crate) trait Rank {
    fn rank(&self) -> usize;
    fn forward(&mut self, call: HostForward<'_>) -> Result<(), ParallelError>;
    fn backward(&mut self, call: HostBackward<'_>) -> Result<(), ParallelError>;
}

impl<E: Exchange> Rank for ContextParallel<E> {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn forward(&mut self, call: HostForward<'_>) -> Result<(), ParallelError> {
        self.forward(call)
    }

    fn backward(&mut self, call: HostBackward<'_>) -> Result<(), ParallelError> {
        self.backward(call)
    }
}

/// Makes a rank of this process's backend.
pub(crate) fn joined(problem: &Arc<ParallelProblem>, link: backend::Link) -> Result<impl Rank, ParallelError> {
    backend::join(problem, link, None)
}

/// Runs both passes on one rank, and returns its shards of the results.
pub(crate) fn run_rank(problem: &Arc<ParallelProblem>, data: &Data, mut rank: impl Rank) -> Result<[Vec<f32>; 7], ParallelError> {
    let (n, dtype) = (rank.rank(), problem.problem().dtype());
    let split = |tensor: Tensor, whole: &[f32]| Numbers::of(&problem.split(n, tensor, whole), dtype);
    let [q, k, v] = [(Tensor::Q, &data.q), (Tensor::K, &data.k), (Tensor::V, &data.v)].map(|(tensor, whole)| split(tensor, whole));
    let d_o = split(Tensor::DO, &data.d_o);
    let len = |tensor: Tensor| problem.local(n, tensor).extent().unwrap() as usize;
    let [mut o, mut dq, mut dk, mut dv] =
        [Tensor::O, Tensor::DQ, Tensor::DK, Tensor::DV].map(|t| Numbers::of(&vec![f32::NAN; len(t)], dtype));
    let [mut stats, mut row_max, mut sum_exp] = [Tensor::Stats, Tensor::RowMax, Tensor::SumExp].map(|t| vec![f32::NAN; len(t)]);
    let extents = problem.problem().extents();
    let whole = values(problem.declared(Pass::Backward), extents);
    let given = params(&whole);
    let statistics = [Some(&mut stats[..]), Some(&mut row_max[..]), Some(&mut sum_exp[..])];
    rank.forward(HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut()).statistics(statistics).params(&given))?;
    let gradients = (dq.elements_mut(), dk.elements_mut(), dv.elements_mut());
    let call = HostBackward::new((q.elements(), k.elements(), v.elements()), (o.elements(), &stats), d_o.elements(), gradients);
    rank.backward(call.params(&given))?;
    Ok([o.f32(), stats, row_max, sum_exp, dq.f32(), dk.f32(), dv.f32()])
}

/// Runs both passes on all ranks, and joins their results.
pub(crate) fn run(problem: &Arc<ParallelProblem>, data: &Data, delays: Option<u64>) -> Results {
    let links = backend::group(problem.ranks()).into_iter().enumerate();
    let parts: Vec<[Vec<f32>; 7]> = std::thread::scope(|scope| {
        let run = |(rank, link)| run_rank(problem, data, backend::join(problem, link, delays.map(|seed| seed + rank as u64))?);
        let threads: Vec<_> = links.map(|link| scope.spawn(move || run(link))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap_or_else(|e| panic!("{e}"))).collect()
    });
    let mut whole = TENSORS.map(|t| vec![f32::NAN; problem.whole(t).extent().unwrap() as usize]);
    for (rank, part) in parts.iter().enumerate() {
        for ((tensor, part), whole) in TENSORS.into_iter().zip(part).zip(&mut whole) {
            problem.join(rank, tensor, part, whole);
        }
    }
    let [o, stats, row_max, sum_exp, dq, dk, dv] = whole;
    Results { o, stats, row_max, sum_exp, dq, dk, dv }
}

/// Runs the forward pass on all ranks, and returns `o` and the statistics.
pub(crate) fn run_forward(problem: &Arc<ParallelProblem>, data: &Data) -> [Vec<f32>; 4] {
    let tensors = [Tensor::O, Tensor::Stats, Tensor::RowMax, Tensor::SumExp];
    let run = |link| {
        let mut rank = joined(problem, link).unwrap();
        let split = |tensor: Tensor, whole: &[f32]| problem.split(rank.rank(), tensor, whole);
        let [q, k, v] = [(Tensor::Q, &data.q), (Tensor::K, &data.k), (Tensor::V, &data.v)].map(|(tensor, whole)| split(tensor, whole));
        let mut results = tensors.map(|t| vec![f32::NAN; problem.local(rank.rank(), t).extent().unwrap() as usize]);
        let [o, stats, row_max, sum_exp] = &mut results;
        let whole = values(problem.declared(Pass::Forward), problem.problem().extents());
        let given = params(&whole);
        rank.forward(HostForward::new(&q, &k, &v, o).statistics([Some(stats), Some(row_max), Some(sum_exp)]).params(&given)).unwrap();
        results
    };
    let mut whole = tensors.map(|t| vec![f32::NAN; problem.whole(t).extent().unwrap() as usize]);
    std::thread::scope(|scope| {
        let threads: Vec<_> = backend::group(problem.ranks()).into_iter().map(|link| scope.spawn(|| run(link))).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            for ((tensor, part), whole) in tensors.into_iter().zip(thread.join().unwrap()).zip(&mut whole) {
                problem.join(rank, tensor, &part, whole);
            }
        }
    });
    whole
}

/// Runs the forward pass of the whole problem on one executor.
pub(crate) fn single_forward(spec: &AttentionSpec, data: &Data) -> [Vec<f32>; 4] {
    let problem = spec.validate().unwrap();
    let whole = values(problem.params(), problem.extents());
    let given = params(&whole);
    let rows = problem.stats_elements() as usize;
    let mut results = [vec![f32::NAN; data.d_o.len()], vec![f32::NAN; rows], vec![f32::NAN; rows], vec![f32::NAN; rows]];
    let [o, stats, row_max, sum_exp] = &mut results;
    let call = HostForward::new(&data.q, &data.k, &data.v, o).statistics([Some(stats), Some(row_max), Some(sum_exp)]).params(&given);
    CpuExecutor::default().prepare(&problem).unwrap().forward(call).unwrap();
    results
}

/// Runs both passes of the whole problem on one executor.
pub(crate) fn single(spec: &AttentionSpec, data: &Data) -> Results {
    let executor = CpuExecutor::default();
    let (problem, backward) = (spec.validate().unwrap(), spec.backward().deterministic().validate().unwrap());
    let whole = values(problem.params(), problem.extents());
    let given = params(&whole);
    let [q, k, v, d_o] = [&data.q, &data.k, &data.v, &data.d_o].map(|x| Numbers::of(x, spec.dtype));
    let [mut o, mut dq, mut dk, mut dv] = [&data.d_o, &data.q, &data.k, &data.v].map(|x| Numbers::of(&vec![f32::NAN; x.len()], spec.dtype));
    let mut rows = [0; 3].map(|_| vec![f32::NAN; problem.stats_elements() as usize]);
    let statistics = rows.each_mut().map(|x| Some(&mut x[..]));
    let call = HostForward::new(q.elements(), k.elements(), v.elements(), o.elements_mut()).statistics(statistics).params(&given);
    executor.prepare(&problem).unwrap().forward(call).unwrap();
    let [stats, row_max, sum_exp] = rows;
    let gradients = (dq.elements_mut(), dk.elements_mut(), dv.elements_mut());
    let call = HostBackward::new((q.elements(), k.elements(), v.elements()), (o.elements(), &stats), d_o.elements(), gradients);
    executor.prepare_backward(&backward).unwrap().backward(call.params(&given)).unwrap();
    Results { o: o.f32(), stats, row_max, sum_exp, dq: dq.f32(), dk: dk.f32(), dv: dv.f32() }
}

/// Returns a specification with all statistics.
pub(crate) fn spec(dtype: DType, heads: [i64; 2], [seq_q, seq_kv]: [i64; 2], layout: Layout) -> AttentionSpec {
    let shape = sdpa_core::Shape { batch: 2, heads_q: heads[0], heads_kv: heads[1], seq_q, seq_kv, dim_qk: 8, dim_v: 4 };
    AttentionSpec::dense(dtype, shape, layout).with_stats().with_row_max().with_sum_exp()
}

/// The operands of a packed problem of 27 tokens with 8 and 2 heads of dims 8 and 4: q, k, v, d_o, and values of its parameters.
fn packed_operands() -> ([Vec<f32>; 4], Vec<f32>, Vec<f32>) {
    let mut random = Random(9);
    let operands = [8 * 8, 2 * 8, 2 * 4, 8 * 4].map(|row| random.numbers(27 * row, DType::F32));
    let of = |name: &str| (0..8).map(|head| crate::case::value(name, [0, head, 0, 0]) as f32).collect();
    (operands, of("slopes"), of("sink"))
}

fn packed_params<'a>(declared: &[Declared], cu: &'a [i32], slopes: &'a [f32], sink: &'a [f32]) -> Vec<Param<'a>> {
    let all = [Param::new("cu_seqlens", cu), Param::new("slopes", slopes), Param::new("sink", sink)];
    all.into_iter().filter(|p| p.name == "cu_seqlens" || declared.iter().any(|d| d.name == p.name)).collect()
}

/// Runs both passes of a packed problem on one executor, and returns o, stats, dq, dk and dv.
pub(crate) fn run_packed_on_one(spec: &AttentionSpec, cu: &[i32]) -> [Vec<f32>; 5] {
    let ([q, k, v, d_o], slopes, sink) = packed_operands();
    let (problem, backward) = (spec.validate().unwrap(), spec.backward().validate().unwrap());
    let given = packed_params(problem.params(), cu, &slopes, &sink);
    let mut results = [27 * 32, 27 * 8, 27 * 64, 27 * 16, 27 * 8].map(|n| vec![0.0f32; n]);
    let [o, stats, dq, dk, dv] = &mut results;
    let executor = CpuExecutor::default();
    executor.prepare(&problem).unwrap().forward(HostForward::new(&q, &k, &v, &mut *o).stats(stats).params(&given)).unwrap();
    let call = HostBackward::new((&q, &k, &v), (&*o, &*stats), &d_o, (dq, dk, dv));
    executor.prepare_backward(&backward).unwrap().backward(call.params(&given)).unwrap();
    results
}

/// Runs both passes of a packed problem on all ranks.
pub(crate) fn run_packed(problem: &Arc<ParallelProblem>, cu: &[i32]) -> [Vec<f32>; 5] {
    let ([q, k, v, d_o], slopes, sink) = packed_operands();
    let tensors = [Tensor::O, Tensor::Stats, Tensor::DQ, Tensor::DK, Tensor::DV];
    let run = |link| {
        let mut rank = joined(problem, link).unwrap();
        let n = rank.rank();
        let whole = [(Tensor::Q, &q), (Tensor::K, &k), (Tensor::V, &v), (Tensor::DO, &d_o)];
        let [q, k, v, d_o] = whole.map(|(tensor, whole)| problem.split(n, tensor, whole));
        let mut results = tensors.map(|t| vec![f32::NAN; problem.local(n, t).extent().unwrap() as usize]);
        let [o, stats, dq, dk, dv] = &mut results;
        let given = packed_params(problem.declared(Pass::Backward), cu, &slopes, &sink);
        rank.forward(HostForward::new(&q, &k, &v, &mut *o).stats(stats).params(&given)).unwrap();
        rank.backward(HostBackward::new((&q, &k, &v), (&*o, &*stats), &d_o, (dq, dk, dv)).params(&given)).unwrap();
        results
    };
    let mut whole = tensors.map(|t| vec![f32::NAN; problem.whole(t).extent().unwrap() as usize]);
    std::thread::scope(|scope| {
        let threads: Vec<_> = backend::group(problem.ranks()).into_iter().map(|link| scope.spawn(|| run(link))).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            for ((tensor, part), whole) in tensors.into_iter().zip(thread.join().unwrap()).zip(&mut whole) {
                problem.join(rank, tensor, &part, whole);
            }
        }
    });
    whole
}
