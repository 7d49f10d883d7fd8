//! Times of the strategies over all GPUs beside one GPU, in turns.

use super::{DEADLINE, GIVEN, Group, Memory, Outcome, TENSORS, capture, submit, text};
use crate::setup::Result;
use conformance::random::Random;
use sdpa::device::{DeviceBackward, DeviceCall, DeviceExecutor, DeviceForward, OnDevice};
use sdpa::distributed::{DeviceContextParallel, ParallelProblem, ParallelSpec, Partials, Sharding, Strategy, Tensor};
use sdpa::{AttentionSpec, DType, Layout, Shape};
use sdpa_driver::{Captured, Communicator, DeviceSlice, Rank, Stream, UniqueId};
use std::sync::{Arc, Barrier};
use std::time::Instant;

/// Calls that compile kernels, connect ranks and warm up, then calls that are timed.
const WARM: usize = 2;
const ROUNDS: usize = 7;
/// The distinct numbers of operands: a prime number, so that rows differ.
const FEW: usize = 1_000_003;

/// A problem: a name, query and KV heads, score_mods, masks, and whether there are sinks.
type Row = (&'static str, [i64; 2], &'static [&'static str], &'static [&'static str], bool);

const ROWS: [Row; 3] = [
    ("causal, GQA", [32, 8], &[], &["causal"], false),
    ("causal, MHA", [16, 16], &[], &["causal"], false),
    ("ALiBi, 8 documents, causal, sinks, GQA", [32, 8], &["alibi"], &["document", "causal"], true),
];

/// A way to compute the problem on one rank.
enum Way {
    /// One GPU computes all of it; the other ranks wait.
    Alone(Box<Alone>),
    /// All ranks compute it.
    Ranks { own: Box<DeviceContextParallel>, memory: Memory, graphs: Option<[Captured; 2]> },
    /// This rank waits for the rank that computes it.
    Idle,
}

struct Alone {
    passes: [OnDevice<DeviceSlice, Stream>; 2],
    memory: Memory,
}

impl Alone {
    fn new(group: &Group, spec: &AttentionSpec, stream: &Stream, operands: [&[f32]; GIVEN]) -> Outcome<Alone> {
        let (problem, backward) = (spec.validate().map_err(text)?, spec.backward().deterministic().validate().map_err(text)?);
        let extent = |tensor| match tensor {
            Tensor::Q | Tensor::DQ => operands[0].len(),
            Tensor::K | Tensor::DK => operands[1].len(),
            Tensor::V | Tensor::DV => operands[2].len(),
            Tensor::O | Tensor::DO => operands[3].len(),
            Tensor::Stats | Tensor::RowMax | Tensor::SumExp => problem.stats_elements() as usize,
        };
        let memory = Memory::new(stream, &problem, operands, extent)?;
        let executor = &group.executors[0];
        let passes = [executor.prepare_device(&problem).map_err(text)?, executor.prepare_device_backward(&backward).map_err(text)?];
        Ok(Alone { passes, memory })
    }

    fn submit(&self, stream: &Stream, both: bool) -> Outcome<()> {
        let [q, k, v, d_o, o, stats, dq, dk, dv] = self.memory.slices();
        let params = self.memory.params();
        let call = DeviceForward::new(q, k, v, o).stats(stats).params(&params);
        // SAFETY: the buffers outlive the wait, and their device is the stream's.
        unsafe { self.passes[0].submit(stream, &DeviceCall::from(&call)) }.map_err(text)?;
        if both {
            let call = DeviceBackward::new((q, k, v), (o, stats), d_o, (dq, dk, dv)).params(&params);
            // SAFETY: as above.
            unsafe { self.passes[1].submit(stream, &DeviceCall::from(&call)) }.map_err(text)?;
        }
        Ok(())
    }
}

impl Way {
    fn run(&mut self, stream: &Stream, both: bool) -> Outcome<()> {
        match self {
            Way::Idle => Ok(()),
            Way::Alone(alone) => {
                alone.submit(stream, both)?;
                stream.synchronize().map_err(text)
            }
            Way::Ranks { own, memory, graphs: None } => {
                submit(own, stream, memory, both)?;
                own.wait(stream).map_err(text)
            }
            Way::Ranks { own, graphs: Some(graphs), .. } => {
                // SAFETY: the memory of the captured calls is live, and only this stream uses it.
                unsafe { graphs[usize::from(both)].launch(stream) }.map_err(text)?;
                own.wait(stream).map_err(text)
            }
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// An approach of a table: a name, and a strategy with its sharding unless one GPU computes the problem; whether its calls are captured graphs.
struct Approach {
    name: String,
    problem: Option<Arc<ParallelProblem>>,
    captured: bool,
}

fn approaches(spec: &AttentionSpec, ranks: usize, captured: bool) -> Result<Vec<Approach>> {
    let mut all = vec![Approach { name: "one GPU".to_owned(), problem: None, captured: false }];
    let mut cases = vec![
        (Strategy::AllGather { head_groups: 1 }, Sharding::Zigzag),
        (Strategy::AllGather { head_groups: 4 }, Sharding::Zigzag),
        (Strategy::HeadExchange, Sharding::Contiguous),
        (Strategy::Ring, Sharding::Zigzag),
    ];
    if ranks > 2 && ranks.is_multiple_of(2) {
        cases.push((Strategy::Grid { heads: 2 }, Sharding::Zigzag));
    }
    for (strategy, sharding) in cases {
        let asked = ParallelSpec::new(spec.clone(), ranks).strategy(strategy).sharding(sharding.clone()).with_backward();
        let problem = Arc::new(asked.validate()?);
        all.push(Approach { name: format!("{strategy}, {sharding:?}"), problem: Some(problem.clone()), captured: false });
        if captured {
            all.push(Approach { name: format!("{strategy}, {sharding:?}, CUDA graph"), problem: Some(problem), captured: true });
        }
    }
    Ok(all)
}

/// Prepares every approach on a rank, and runs both of its passes.
fn prepared(
    group: &Group,
    spec: &AttentionSpec,
    all: &[Approach],
    (rank, stream, ids): (usize, &Stream, &[UniqueId]),
    whole: [&[f32]; GIVEN],
) -> Outcome<Vec<Way>> {
    let one = |(approach, id): (&Approach, &UniqueId)| {
        let Some(problem) = &approach.problem else {
            return Ok(if rank == 0 { Way::Alone(Box::new(Alone::new(group, spec, stream, whole)?)) } else { Way::Idle });
        };
        let place = Rank { rank, size: group.ranks(), local: rank };
        let communicator = Communicator::new(&group.nccl, group.devices[rank], id, place, DEADLINE).map_err(text)?;
        let own = DeviceContextParallel::new(&group.executors[rank], problem.clone(), communicator, Partials::Operands);
        let parts: [Vec<f32>; GIVEN] = std::array::from_fn(|n| problem.split(rank, TENSORS[n], whole[n]));
        let extent = |tensor| problem.local(rank, tensor).extent().unwrap_or(0).unsigned_abs() as usize;
        let memory = Memory::new(stream, problem.problem(), std::array::from_fn(|n| &parts[n][..]), extent)?;
        let mut own = Box::new(own.map_err(text)?);
        let mut graphs = None;
        if approach.captured {
            submit(&mut own, stream, &memory, true)?;
            own.wait(stream).map_err(text)?;
            graphs = Some([capture(&mut own, stream, &memory, false)?, capture(&mut own, stream, &memory, true)?]);
        }
        eprintln!("# rank {rank}: {} is ready", approach.name);
        Ok(Way::Ranks { own, memory, graphs })
    };
    all.iter().zip(ids).map(one).collect()
}

/// Times every approach in turns, with one GPU among them.
fn row(group: &Group, row: Row, tokens: i64, captured: bool) -> Result<()> {
    let (name, [heads_q, heads_kv], score_mods, masks, sink) = row;
    let ranks = group.ranks();
    let seq = tokens * ranks as i64;
    let shape = Shape { batch: 1, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: 128, dim_v: 128 };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd).with_stats();
    for text in score_mods {
        spec = spec.score_mod(text.parse()?);
    }
    for text in masks {
        spec = spec.mask(text.parse()?);
    }
    spec.sink = sink;
    let mut random = Random::new(1);
    // Times do not depend on the values, so a few are repeated.
    let few: Vec<f32> = (0..FEW).map(|_| random.between(-1000, 1000) as f32 / 1000.0).collect();
    let operands = [&spec.q, &spec.k, &spec.v, &spec.o].map(|tensor| {
        let elements = tensor.dims.iter().product::<i64>() as usize;
        few.iter().copied().cycle().take(elements).collect::<Vec<f32>>()
    });
    let whole = operands.each_ref().map(|x| &x[..]);
    let all = approaches(&spec, ranks, captured)?;
    let ids = all.iter().map(|_| group.nccl.unique_id()).collect::<std::result::Result<Vec<_>, _>>()?;
    let together = Barrier::new(ranks);
    let timed = |rank: usize| -> Outcome<Vec<[Vec<f64>; 2]>> {
        let stream = group.devices[rank].stream().map_err(text)?;
        let mut ways = prepared(group, &spec, &all, (rank, &stream, &ids), whole)?;
        let mut times = vec![[Vec::new(), Vec::new()]; ways.len()];
        for round in 0..WARM + ROUNDS {
            eprintln!("# rank {rank}: round {round}");
            for turn in 0..ways.len() {
                let n = (turn + round) % ways.len();
                for both in [false, true] {
                    together.wait();
                    let began = Instant::now();
                    ways[n].run(&stream, both)?;
                    if round >= WARM {
                        times[n][usize::from(both)].push(began.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
        }
        Ok(times)
    };
    let run = |rank: usize| {
        timed(rank).unwrap_or_else(|error| {
            // The other ranks wait for this one.
            eprintln!("FAILED: {name}, rank {rank}: {error}");
            std::process::exit(1)
        })
    };
    let found: Vec<Vec<[Vec<f64>; 2]>> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    if found.iter().any(|times| times.len() != all.len()) {
        return Err("a thread panicked".into());
    }
    // A call ends when the slowest rank ends.
    let slowest = |n: usize, pass: usize| -> f64 {
        median((0..ROUNDS).map(|round| found.iter().map(|times| times[n][pass][round]).fold(0.0, f64::max)).collect())
    };
    println!("{name}, heads {heads_q}/{heads_kv}, dim 128, bf16, {tokens} tokens per rank: ms forward, of ideal, ms both passes, of ideal");
    let one = [slowest(0, 0), slowest(0, 1)];
    for (n, approach) in all.iter().enumerate() {
        let own = [slowest(n, 0), slowest(n, 1)];
        let ideal: Vec<String> = if approach.problem.is_none() {
            vec!["1 rank".to_owned(); 2]
        } else {
            own.iter().zip(one).map(|(own, one)| format!("{:.3}", one / ranks as f64 / own)).collect()
        };
        println!("  {}: {:.3}, {}, {:.3}, {}", approach.name, own[0], ideal[0], own[1], ideal[1]);
    }
    Ok(())
}

/// Prints the times of each strategy, and their fraction of ideal: the time of one GPU for the whole problem, divided by the ranks.
pub(crate) fn run(tokens: i64, rows: &str, captured: bool) -> Result<()> {
    let group = Group::new()?;
    for case in ROWS.into_iter().filter(|(name, ..)| name.contains(rows)) {
        row(&group, case, tokens, captured)?;
    }
    Ok(())
}
