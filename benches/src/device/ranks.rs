//! One attention over all GPUs of one process, a thread each, on the native CUDA kernels with NCCL: results against the CPU executor, bits of repeated calls, and
//! times beside one GPU.
#![allow(unsafe_code)]

pub(crate) mod times;

use crate::setup::Result;
use conformance::random::Random;
use half::{bf16, f16};
use sdpa::cpu::CpuExecutor;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::device::{DeviceBackward, DeviceForward, DeviceParam, DeviceValue};
use sdpa::distributed::{Chunk, DeviceContextParallel, ParallelProblem, ParallelSpec, Partials, Planner, Sharding, Strategy, Tensor};
use sdpa::{AttentionSpec, DType, Executor, HostBackward, HostForward, Layout, Param, Problem, SINK, Shape, TensorSpec};
use sdpa_driver::{Buffer, Captured, Communicator, Device, DeviceSlice, Driver, Nccl, Rank, Stream};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(120);
/// The launches of each problem whose bits are compared.
const LAUNCHES: usize = 20;
/// The operands of both passes, then the results.
const TENSORS: [Tensor; 9] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DO, Tensor::O, Tensor::Stats, Tensor::DQ, Tensor::DK, Tensor::DV];
/// The tensors among [`TENSORS`] that the call passes.
const GIVEN: usize = 4;
/// The tensors of the mask `document`, and the number of documents.
const DOCUMENTS: [&str; 2] = ["doc_q", "doc_k"];
const EVERY: i64 = 8;
/// The launches of a captured graph whose bits are compared.
const REPLAYS: usize = 3;

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

/// The tensors of both passes in the memory of one device, by [`TENSORS`], and the parameters that the problem declares.
struct Memory {
    tensors: Vec<(Buffer, DType)>,
    params: Vec<(&'static str, DType, Buffer)>,
}

impl Memory {
    /// Allocates results of NaNs and uploads operands. `extent` has the number of elements of each tensor.
    fn new(stream: &Stream, problem: &Problem, operands: [&[f32]; GIVEN], extent: impl Fn(Tensor) -> usize) -> Outcome<Memory> {
        let device = stream.device();
        let one = |(n, tensor): (usize, &Tensor)| {
            let own = if tensor.is_statistic() { DType::F32 } else { problem.dtype() };
            let Some(numbers) = operands.get(n) else {
                let mut buffer = Buffer::new(device, extent(*tensor) * own.bits() as usize / 8).map_err(text)?;
                buffer.fill(stream, 0xff).map_err(text)?;
                return Ok((buffer, own));
            };
            Ok((upload(device, stream, numbers, own)?, own))
        };
        let tensors = TENSORS.iter().enumerate().map(one).collect::<Outcome<_>>()?;
        let mut params = Vec::new();
        if problem.sink() {
            let sinks: Vec<f32> = (0..problem.heads_q()).map(sink).collect();
            params.push((SINK, DType::F32, upload(device, stream, &sinks, DType::F32)?));
        }
        for name in DOCUMENTS.into_iter().filter(|name| problem.params().iter().any(|p| p.name == *name)) {
            let numbers: Vec<i32> = (0..problem.seq_q()).map(|n| (n * EVERY / problem.seq_q()) as i32).collect();
            let mut buffer = Buffer::new(device, size_of_val(&numbers[..])).map_err(text)?;
            buffer.upload(stream, 0, &numbers).map_err(text)?;
            params.push((name, DType::I32, buffer));
        }
        Ok(Memory { tensors, params })
    }

    /// Overwrites the results with NaNs.
    fn poison(&mut self, stream: &Stream) -> Outcome<()> {
        self.tensors[GIVEN..].iter_mut().try_for_each(|(buffer, _)| buffer.fill(stream, 0xff)).map_err(text)
    }

    fn slices(&self) -> [DeviceSlice; TENSORS.len()] {
        std::array::from_fn(|n| slice(&self.tensors[n].0))
    }

    fn params(&self) -> Vec<DeviceParam<'static, DeviceSlice>> {
        self.params.iter().map(|(name, dtype, buffer)| DeviceParam::new(name, DeviceValue::Tensor(*dtype, slice(buffer)))).collect()
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
    let params = memory.params();
    // SAFETY: the buffers outlive the calls, and their device is the stream's.
    unsafe { own.forward(stream, &DeviceForward::new(q, k, v, o).stats(stats).params(&params)) }.map_err(text)?;
    if both {
        let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params);
        // SAFETY: as above.
        unsafe { own.backward(stream, &call) }.map_err(text)?;
    }
    Ok(())
}

/// Captures the passes of a rank as a CUDA graph. Both must have run before, because a first call waits for the other ranks.
fn capture(own: &mut DeviceContextParallel, stream: &Stream, memory: &Memory, both: bool) -> Outcome<Captured> {
    let aside = stream.device().stream().map_err(text)?;
    let mut error = None;
    let captured = aside.capture(|| {
        submit(own, &aside, memory, both).map_err(|why| {
            error = Some(why);
            sdpa_driver::Error::Timeout { what: "a capture", after: Duration::ZERO }
        })
    });
    captured.map_err(|why| error.unwrap_or_else(|| text(why)))
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

/// One random problem: results against the CPU, and the bits of repeated calls, and of launches of a captured graph if `captures`.
fn case(group: &Group, seed: u64, captures: bool) -> Outcome<String> {
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
        let mut memory = Memory::new(stream, problem.problem(), std::array::from_fn(|n| &parts[n][..]), extent)?;
        let mut first: Option<Vec<Vec<f32>>> = None;
        let bits = |all: &[Vec<f32>]| all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>();
        for launch in 0..LAUNCHES {
            submit(own, stream, &memory, true)?;
            own.wait(stream).map_err(text)?;
            let results = memory.results(stream)?;
            match &first {
                Some(first) if bits(first) != bits(&results) => return Err(format!("launch {launch} has other bits")),
                Some(_) => {}
                None => first = Some(results),
            }
        }
        let first = first.unwrap_or_default();
        if captures {
            let graph = capture(own, stream, &memory, true)?;
            for launch in 0..REPLAYS {
                memory.poison(stream)?;
                // SAFETY: the memory of the captured calls is live, and only this stream uses it.
                unsafe { graph.launch(stream) }.map_err(text)?;
                own.wait(stream).map_err(text)?;
                if bits(&first) != bits(&memory.results(stream)?) {
                    return Err(format!("launch {launch} of the captured graph has other bits than calls"));
                }
            }
        }
        Ok(first)
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
pub(crate) fn right(problems: u64, first: u64, captures: bool) -> Result<()> {
    let group = Group::new()?;
    let (mut passed, mut refused, mut failed) = (0, 0, 0);
    for seed in first..first + problems {
        match case(&group, seed, captures) {
            Ok(told) => {
                passed += 1;
                println!("passed {told}");
            }
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
    let graphs = if captures { format!(" and {REPLAYS} of a captured graph") } else { String::new() };
    println!("ranks: {passed} right with {LAUNCHES} launches of equal bits each{graphs}, {refused} refused, {failed} failed");
    if failed == 0 { Ok(()) } else { Err(format!("{failed} problems over ranks failed").into()) }
}
