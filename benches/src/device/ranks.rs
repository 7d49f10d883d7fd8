//! One attention over all GPUs of one process, a thread each, on the native CUDA kernels with NCCL: results against the CPU executor, bits of repeated calls, and
//! times beside one GPU.
#![allow(unsafe_code)]

use crate::setup::Result;
use conformance::random::Random;
use half::{bf16, f16};
use sdpa::cpu::CpuExecutor;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::device::{DeviceBackward, DeviceCall, DeviceForward, DeviceParam, DeviceValue};
use sdpa::distributed::{Chunk, DeviceContextParallel, ParallelProblem, ParallelSpec, Partials, Planner, Sharding, Strategy, Tensor};
use sdpa::{AttentionSpec, DType, Executor, HostBackward, HostForward, Layout, Param, Shape, TensorSpec};
use sdpa_driver::{Buffer, Communicator, Device, DeviceSlice, Driver, Nccl, Rank, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);
/// The launches of each problem whose bits are compared.
const LAUNCHES: usize = 20;
/// The operands of both passes, then the results.
const TENSORS: [Tensor; 9] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DO, Tensor::O, Tensor::Stats, Tensor::DQ, Tensor::DK, Tensor::DV];
/// The tensors among [`TENSORS`] that the call passes.
const GIVEN: usize = 4;

type Outcome<T> = std::result::Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The GPUs of the process, with NCCL.
struct Group {
    nccl: Arc<Nccl>,
    devices: Vec<&'static Device>,
    executors: Vec<CudaExecutor>,
}

impl Group {
    fn new() -> Result<Group> {
        if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
            // Multicast over NVLink stays off.
            // SAFETY: no other thread runs yet.
            unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
        }
        let driver = Driver::load(None)?;
        let count = driver.device_count()?;
        let devices = (0..count).map(|ordinal| driver.device(ordinal)).collect::<std::result::Result<Vec<_>, _>>()?;
        let executor = |ordinal| CudaExecutor::new(CudaOptions::default().with_ordinal(ordinal));
        let executors = (0..count).map(executor).collect::<std::result::Result<Vec<_>, _>>()?;
        let nccl = Arc::new(Nccl::load(None)?);
        println!("NCCL {} on {count} devices of the kind {}", nccl.version().map(|n| n.to_string()).join("."), devices[0].name());
        Ok(Group { nccl, devices, executors })
    }

    fn ranks(&self) -> usize {
        self.devices.len()
    }

    /// Runs a function on each rank, and returns the results in the order of the ranks.
    fn each<T: Send>(
        &self,
        problem: &Arc<ParallelProblem>,
        partials: Partials,
        run: impl Fn(&mut DeviceContextParallel, &Stream) -> Outcome<T> + Sync,
    ) -> Outcome<Vec<T>> {
        let id = self.nccl.unique_id().map_err(text)?;
        std::thread::scope(|scope| {
            let start = |rank: usize| {
                let (run, id, size) = (&run, &id, self.ranks());
                scope.spawn(move || {
                    let place = Rank { rank, size, local: rank };
                    let communicator = Communicator::new(&self.nccl, self.devices[rank], id, place, DEADLINE).map_err(text)?;
                    let planner: &dyn Planner = &self.executors[rank];
                    let mut own = DeviceContextParallel::new(planner, problem.clone(), communicator, partials).map_err(text)?;
                    let stream = self.devices[rank].stream().map_err(text)?;
                    run(&mut own, &stream).map_err(|error| format!("rank {rank}: {error}"))
                })
            };
            let threads: Vec<_> = (0..self.ranks()).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
        })
    }
}

/// A buffer with numbers in a type.
fn upload(device: &'static Device, stream: &Stream, numbers: &[f32], dtype: DType) -> Outcome<Buffer> {
    let mut buffer = Buffer::new(device, numbers.len() * dtype.bits() as usize / 8).map_err(text)?;
    match dtype {
        DType::F16 => buffer.upload(stream, 0, &numbers.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>()),
        DType::BF16 => buffer.upload(stream, 0, &numbers.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>()),
        DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => {
            buffer.upload(stream, 0, numbers)
        }
    }
    .map_err(text)?;
    Ok(buffer)
}

fn download(buffer: &Buffer, stream: &Stream, dtype: DType) -> Outcome<Vec<f32>> {
    let mut bytes = vec![0u8; buffer.bytes()];
    buffer.download(stream, 0, &mut bytes).map_err(text)?;
    let pairs = || bytes.as_chunks::<2>().0.iter();
    Ok(match dtype {
        DType::F16 => pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DType::BF16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::F32 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 | DType::I32 | DType::I64 | DType::Bool => {
            bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        }
    })
}

fn slice(buffer: &Buffer) -> DeviceSlice {
    DeviceSlice { address: buffer.address(), bytes: buffer.bytes() as u64 }
}

/// The tensors of both passes in the memory of one device, by [`TENSORS`], and the sinks.
struct Memory {
    tensors: Vec<(Buffer, DType)>,
    sinks: Buffer,
}

impl Memory {
    /// Allocates results of NaNs and uploads operands. `extent` has the number of elements of each tensor.
    fn new(stream: &Stream, dtype: DType, operands: [&[f32]; GIVEN], extent: impl Fn(Tensor) -> usize, heads: i64) -> Outcome<Memory> {
        let device = stream.device();
        let one = |(n, tensor): (usize, &Tensor)| {
            let own = if tensor.is_statistic() { DType::F32 } else { dtype };
            let Some(numbers) = operands.get(n) else {
                let mut buffer = Buffer::new(device, extent(*tensor) * own.bits() as usize / 8).map_err(text)?;
                buffer.fill(stream, 0xff).map_err(text)?;
                return Ok((buffer, own));
            };
            Ok((upload(device, stream, numbers, own)?, own))
        };
        let tensors = TENSORS.iter().enumerate().map(one).collect::<Outcome<_>>()?;
        let sinks: Vec<f32> = (0..heads).map(sink).collect();
        Ok(Memory { tensors, sinks: upload(device, stream, &sinks, DType::F32)? })
    }

    fn slices(&self) -> [DeviceSlice; TENSORS.len()] {
        std::array::from_fn(|n| slice(&self.tensors[n].0))
    }

    fn params(&self, has_sink: bool) -> Vec<DeviceParam<'static, DeviceSlice>> {
        let sinks = DeviceParam::new("sink", DeviceValue::Tensor(DType::F32, slice(&self.sinks)));
        if has_sink { vec![sinks] } else { Vec::new() }
    }

    fn results(&self, stream: &Stream) -> Outcome<Vec<Vec<f32>>> {
        self.tensors[GIVEN..].iter().map(|(buffer, dtype)| download(buffer, stream, *dtype)).collect()
    }
}

fn sink(head: i64) -> f32 {
    0.5 * head as f32 - 1.0
}

/// Submits the forward pass of a rank, and the backward pass if `both`.
fn submit(own: &mut DeviceContextParallel, stream: &Stream, memory: &Memory, both: bool) -> Outcome<()> {
    let [q, k, v, d_o, o, stats, dq, dk, dv] = memory.slices();
    let params = memory.params(own.problem().problem().sink());
    // SAFETY: the buffers outlive the calls, and their device is the stream's.
    unsafe { own.forward(stream, &DeviceForward::new(q, k, v, o).stats(stats).params(&params)) }.map_err(text)?;
    if both {
        let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params);
        // SAFETY: as above.
        unsafe { own.backward(stream, &call) }.map_err(text)?;
    }
    Ok(())
}

fn numbers(random: &mut Random, tensor: &TensorSpec, dtype: DType) -> Vec<f32> {
    let count = tensor.dims.iter().product::<i64>();
    let rounded = |x: f32| if dtype == DType::F16 { f16::from_f32(x).to_f32() } else { bf16::from_f32(x).to_f32() };
    (0..count).map(|_| rounded(random.between(-1000, 1000) as f32 / 1000.0)).collect()
}

/// The results of the CPU executor, in f32, over the operands that the GPUs have in a narrower type.
fn expected(spec: &AttentionSpec, operands: [&[f32]; GIVEN]) -> Outcome<Vec<Vec<f32>>> {
    let spec = spec.clone().with_dtype(DType::F32);
    let problem = spec.validate().map_err(text)?;
    let backward = spec.backward().validate().map_err(text)?;
    let sinks: Vec<f32> = (0..problem.heads_q()).map(sink).collect();
    let params = if problem.sink() { vec![Param::new("sink", &sinks)] } else { Vec::new() };
    let [q, k, v, d_o] = operands;
    let mut stats = vec![0.0f32; problem.stats_elements() as usize];
    let [mut o, mut dq, mut dk, mut dv] = [d_o, q, k, v].map(|x| vec![0.0f32; x.len()]);
    let executor = CpuExecutor::default();
    let forward = executor.prepare(&problem).map_err(text)?;
    forward.forward(HostForward::new(q, k, v, &mut o).stats(&mut stats).params(&params)).map_err(text)?;
    let call = HostBackward::new((q, k, v), (&o, &stats), d_o, (&mut dq, &mut dk, &mut dv)).params(&params);
    executor.prepare_backward(&backward).map_err(text)?.backward(call).map_err(text)?;
    Ok(vec![o, stats, dq, dk, dv])
}

fn apart(a: &[f32], b: &[f32]) -> f64 {
    let pairs = || a.iter().zip(b).filter(|(x, y)| x.is_finite() || y.is_finite());
    let error: f64 = pairs().map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
    let norm: f64 = pairs().map(|(_, y)| f64::from(*y).powi(2)).sum();
    (error / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// Chunks that leave a gap between neighbours, so that one rank has several parts too.
fn apart_chunks(ranks: usize, seq: i64) -> Sharding {
    let block = (seq / (3 * ranks as i64)).max(1);
    let mut lists = vec![Vec::new(); ranks];
    let mut start = 0;
    for n in 0.. {
        let len = block.min(seq - start);
        if len <= 0 {
            break;
        }
        // The later block first.
        lists[n % ranks].insert(0, Chunk::new(start, 1, len));
        start += len;
    }
    Sharding::Chunks(lists)
}

/// One random problem: results against the CPU, and the bits of repeated calls.
fn case(group: &Group, seed: u64) -> Outcome<String> {
    let mut random = Random::new(seed);
    let dtype = random.pick(&[DType::BF16, DType::F16]);
    let dim = random.pick(&[64, 128]);
    let (heads_q, heads_kv) = random.pick(&[(8, 8), (8, 2), (4, 1)]);
    let seq = random.between(96, 700);
    let shape = Shape { batch: random.between(1, 2), heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
    let mask = random.pick(&["", "causal", "window:70,0", "prefix-lm:33", "(q * 5 + k * 3) % 4 != 1"]);
    let score_mod = random.pick(&["", "softcap:3", "alibi"]);
    let mut spec = AttentionSpec::dense(dtype, shape, random.pick(&[Layout::Bshd, Layout::Bhsd])).with_stats();
    spec.masks.extend((!mask.is_empty()).then(|| mask.parse()).transpose().map_err(text)?);
    spec.score_mods.extend((!score_mod.is_empty()).then(|| score_mod.parse()).transpose().map_err(text)?);
    spec.sink = random.between(0, 2) == 1;
    let all = [Strategy::Ring, Strategy::AllGather { head_groups: 1 }, Strategy::HeadExchange];
    let strategy = if mask.starts_with("window") && random.between(0, 1) == 1 { Strategy::Halo } else { random.pick(&all) };
    let (named, sharding) = match random.between(0, 3) {
        0 => ("contiguous", Sharding::Contiguous),
        1 => ("zigzag", Sharding::Zigzag),
        2 => ("striped", Sharding::Striped),
        _ => ("chunks", apart_chunks(group.ranks(), seq)),
    };
    let partials = if random.between(0, 3) == 1 { Partials::F32 } else { Partials::Operands };
    let told = format!("{seed}: {strategy}, {named}, {dtype} {shape:?}, mask {mask:?}, {score_mod:?}, sink {}, {partials:?}", spec.sink);
    let wrong = |error: String| format!("{told}: {error}");
    let asked = ParallelSpec::new(spec.clone(), group.ranks()).strategy(strategy).sharding(sharding).with_backward();
    let problem = Arc::new(asked.validate().map_err(text).map_err(wrong)?);
    let [q, k, v, d_o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| numbers(&mut random, tensor, dtype));
    let whole = [&q[..], &k, &v, &d_o];
    let expected = expected(&spec, whole).map_err(wrong)?;
    let run = |own: &mut DeviceContextParallel, stream: &Stream| {
        let rank = own.rank();
        let parts: [Vec<f32>; GIVEN] = std::array::from_fn(|n| problem.split(rank, TENSORS[n], whole[n]));
        let extent = |tensor| problem.local(rank, tensor).extent().unwrap_or(0).unsigned_abs() as usize;
        let memory = Memory::new(stream, dtype, std::array::from_fn(|n| &parts[n][..]), extent, heads_q)?;
        let mut first: Option<Vec<Vec<f32>>> = None;
        for launch in 0..LAUNCHES {
            submit(own, stream, &memory, true)?;
            own.wait(stream).map_err(text)?;
            let results = memory.results(stream)?;
            let bits = |all: &[Vec<f32>]| all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>();
            match &first {
                Some(first) if bits(first) != bits(&results) => return Err(format!("launch {launch} has other bits")),
                Some(_) => {}
                None => first = Some(results),
            }
        }
        Ok(first.unwrap_or_default())
    };
    let parts = group.each(&problem, partials, run).map_err(wrong)?;
    let limit = if dtype == DType::F16 { 2e-3 } else { 1.2e-2 };
    for (n, (tensor, expected)) in TENSORS[GIVEN..].iter().zip(&expected).enumerate() {
        let mut got = vec![f32::NAN; expected.len()];
        for (rank, part) in parts.iter().enumerate() {
            problem.join(rank, *tensor, &part[n], &mut got);
        }
        let distance = apart(&got, expected);
        if distance.is_nan() || distance > limit {
            return Err(wrong(format!("{} is {distance:e} of its norm from the CPU's, at most {limit:e}", tensor.name())));
        }
    }
    Ok(told)
}

/// Runs random problems over all GPUs.
pub(crate) fn right(problems: u64, first: u64) -> Result<()> {
    let group = Group::new()?;
    let (mut passed, mut refused, mut failed) = (0, 0, 0);
    for seed in first..first + problems {
        match case(&group, seed) {
            Ok(_) => passed += 1,
            Err(error) if error.contains("unsupported") || error.contains("does not support") => {
                refused += 1;
                println!("refused: {error}");
            }
            Err(error) => {
                failed += 1;
                println!("FAILED: {error}");
            }
        }
    }
    println!("ranks: {passed} right with {LAUNCHES} launches of equal bits each, {refused} refused, {failed} failed");
    if failed == 0 { Ok(()) } else { Err(format!("{failed} problems over ranks failed").into()) }
}

/// Returns the median of times in ms.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(rounds: usize, mut call: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mut times = Vec::new();
    for round in 0..rounds + 2 {
        let began = Instant::now();
        call()?;
        // The first calls compile and compare.
        if round >= 2 {
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(median(times))
}

/// Times of one GPU for the whole problem, forward and both passes.
fn alone(group: &Group, spec: &AttentionSpec, operands: [&[f32]; GIVEN], rounds: usize) -> Outcome<[f64; 2]> {
    use sdpa::device::DeviceExecutor;
    let (problem, backward) = (spec.validate().map_err(text)?, spec.backward().deterministic().validate().map_err(text)?);
    let stream = group.devices[0].stream().map_err(text)?;
    let of = |tensor| match tensor {
        Tensor::Q | Tensor::DQ => operands[0].len(),
        Tensor::K | Tensor::DK => operands[1].len(),
        Tensor::V | Tensor::DV => operands[2].len(),
        Tensor::O | Tensor::DO => operands[3].len(),
        Tensor::Stats | Tensor::RowMax | Tensor::SumExp => problem.stats_elements() as usize,
    };
    let memory = Memory::new(&stream, spec.dtype, operands, of, problem.heads_q())?;
    let executor = &group.executors[0];
    let (forward, backward) =
        (executor.prepare_device(&problem).map_err(text)?, executor.prepare_device_backward(&backward).map_err(text)?);
    let [q, k, v, d_o, o, stats, dq, dk, dv] = memory.slices();
    let params = memory.params(problem.sink());
    let run = |both: bool| {
        let call = DeviceForward::new(q, k, v, o).stats(stats).params(&params);
        // SAFETY: the buffers outlive the wait, and their device is the stream's.
        unsafe { forward.submit(&stream, &DeviceCall::from(&call)) }.map_err(text)?;
        if both {
            let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params);
            // SAFETY: as above.
            unsafe { backward.submit(&stream, &DeviceCall::from(&call)) }.map_err(text)?;
        }
        stream.synchronize().map_err(text)
    };
    Ok([timed(rounds, || run(false))?, timed(rounds, || run(true))?])
}

/// Prints the times of each strategy, and their fraction of ideal: the time of one GPU for the whole problem, divided by the ranks.
pub(crate) fn times(tokens: i64) -> Result<()> {
    const ROUNDS: usize = 7;
    let group = Group::new()?;
    let ranks = group.ranks();
    let seq = tokens * ranks as i64;
    let shape = Shape { batch: 1, heads_q: 32, heads_kv: 8, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
    let spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).mask("causal".parse()?).with_stats();
    let mut random = Random::new(1);
    let [q, k, v, d_o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| numbers(&mut random, tensor, spec.dtype));
    let whole = [&q[..], &k, &v, &d_o];
    println!("causal, heads 32 and 8, dim 128, bf16, {tokens} tokens per rank: ms forward, of ideal, ms both passes, of ideal");
    let one = alone(&group, &spec, whole, ROUNDS)?;
    println!("one GPU: {:.3}, {:.3}", one[0], one[1]);
    let cases = [
        (Strategy::AllGather { head_groups: 1 }, Sharding::Zigzag),
        (Strategy::AllGather { head_groups: 4 }, Sharding::Zigzag),
        (Strategy::HeadExchange, Sharding::Contiguous),
        (Strategy::Ring, Sharding::Zigzag),
    ];
    for (strategy, sharding) in cases {
        let asked = ParallelSpec::new(spec.clone(), ranks).strategy(strategy).sharding(sharding).with_backward();
        let problem = Arc::new(asked.validate()?);
        let run = |own: &mut DeviceContextParallel, stream: &Stream| {
            let rank = own.rank();
            let parts: [Vec<f32>; GIVEN] = std::array::from_fn(|n| problem.split(rank, TENSORS[n], whole[n]));
            let extent = |tensor| problem.local(rank, tensor).extent().unwrap_or(0).unsigned_abs() as usize;
            let memory = Memory::new(stream, spec.dtype, std::array::from_fn(|n| &parts[n][..]), extent, shape.heads_q)?;
            let mut call = |both: bool| {
                submit(own, stream, &memory, both)?;
                own.wait(stream).map_err(text)
            };
            Ok([timed(ROUNDS, || call(false))?, timed(ROUNDS, || call(true))?])
        };
        let all = group.each(&problem, Partials::Operands, run)?;
        let slowest = |n: usize| all.iter().map(|times| times[n]).fold(0.0, f64::max);
        let ideal = |n: usize| one[n] / ranks as f64 / slowest(n);
        println!("{strategy}: {:.3}, {:.3}, {:.3}, {:.3}", slowest(0), ideal(0), slowest(1), ideal(1));
    }
    Ok(())
}
