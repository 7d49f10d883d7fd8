//! Kernels of our own: every case and random problems against the oracle, and their times beside cuDNN's, in turns.
#![allow(unsafe_code)]

use crate::setup::{Result, Tensors, executor as cudnn, median};
use conformance::runner::{self, Outcome, Tally};
use conformance::{Case, random::Random};
use cudnn_graph::Stream;
use sdpa::cuda::tile::Tile;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::cudnn::{DeviceForward, DeviceParam, DeviceValue, PlanOptions};
use sdpa::device::{DevicePrepared, OnDevice};
use sdpa::{AttentionSpec, DType, Layout, Shape, TensorSpec};
use sdpa_driver::DeviceSlice;

type Pass = dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>;

fn executor(tile: Option<Tile>) -> Result<CudaExecutor> {
    let executor = CudaExecutor::new(CudaOptions { tile, ..CudaOptions::default() })?;
    let [major, minor] = executor.nvrtc().version();
    println!("{}, NVRTC {major}.{minor} from {}", executor.device().name(), executor.nvrtc().path().display());
    Ok(executor)
}

/// What is tried, in a process each where there are processors for it: a kernel takes a second to compile.
const PARTS: [&str; 5] = ["cases", "library", "random", "ends", "trees"];

/// Cases and random problems, those of one part or all; `first` is where random ones begin.
pub(crate) fn run(random: u64, part: Option<&str>, first: u64) -> Result<()> {
    let executor = &executor(None)?;
    let mut failed = 0;
    for part in PARTS.into_iter().filter(|name| part.is_none_or(|part| part == *name)) {
        let mut tally = Tally::default();
        let seeds = first..first + random;
        match part {
            "cases" => {
                for case in Case::all()?.into_iter().chain(Case::all_sinks()?).chain(Case::all_ends()?) {
                    tally.add("cuda", &case.name, &runner::run_case(&case, executor));
                }
            }
            "library" => {
                let all = Case::all_library()?;
                let count = all.len() as u64;
                let some = all.into_iter().skip(usize::try_from(first.min(count))?).take(usize::try_from(random)?);
                some.for_each(|case| tally.add("cuda", &case.name, &runner::run_case(&case, executor)));
            }
            "random" => seeds.for_each(|seed| drawn(&mut tally, part, seed, executor, |r| runner::random_spec(r, &NARROW))),
            "ends" => seeds.for_each(|seed| {
                drawn(&mut tally, part, seed, executor, |r| {
                    if seed % 2 == 0 { runner::random_ends(r, &NARROW) } else { runner::random_padded(r, &NARROW).with_sink() }
                });
            }),
            _ => {
                for seed in seeds {
                    let tree = runner::run_tree(seed, &NARROW, executor)?;
                    if matches!(tree.forward, Outcome::Fail(_)) {
                        println!("{}", tree.text);
                    }
                    tally.add("cuda", &format!("tree {seed}"), &tree.forward);
                }
            }
        }
        println!("{}", tally.summary(&format!("cuda, {part}")));
        failed += tally.failed;
    }
    println!("plans and kernels: {:?}", executor.snapshots().map(|snapshot| snapshot.stats));
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

fn drawn(tally: &mut Tally, part: &str, seed: u64, executor: &CudaExecutor, draw: impl Fn(&mut Random) -> AttentionSpec) {
    let spec = taken(draw(&mut Random::new(seed * 7919 + 41)));
    let outcome = runner::run(&spec, None, 1.0, seed, executor);
    if matches!(outcome, Outcome::Fail(_)) {
        println!("{spec:?}");
    }
    tally.add("cuda", &format!("{part} {seed}"), &outcome);
}

/// The same problem with head dims of whole 16 bytes, dense: what the copy engine asks for.
fn taken(mut spec: AttentionSpec) -> AttentionSpec {
    if spec.packed.is_some() {
        return spec;
    }
    for tensor in [&mut spec.q, &mut spec.k, &mut spec.v, &mut spec.o] {
        let [batch, heads, seq, dim] = tensor.dims;
        let layout = if tensor.strides[1] < tensor.strides[2] { Layout::Bshd } else { Layout::Bhsd };
        *tensor = TensorSpec::dense([batch, heads, seq, (dim + 7) / 8 * 8], layout);
    }
    spec
}

/// A problem of the table: batch, heads_q, heads_kv, seq, dim; score_mod; mask.
type Row = ([i64; 5], &'static str, &'static str);

const ROWS: [Row; 18] = [
    ([4, 32, 32, 4096, 128], "", ""),
    ([4, 32, 32, 4096, 128], "", "causal"),
    ([4, 32, 32, 4096, 128], "softcap:30", "causal"),
    ([2, 16, 16, 16384, 128], "", ""),
    ([2, 16, 16, 16384, 128], "", "causal"),
    ([1, 32, 8, 16384, 64], "", ""),
    ([1, 32, 8, 16384, 64], "", "causal"),
    ([1, 16, 16, 8192, 256], "", ""),
    ([1, 16, 16, 8192, 256], "", "causal"),
    ([4, 32, 32, 4096, 128], "", "sliding-window:512"),
    ([4, 32, 32, 4096, 128], "", "prefix-lm:512"),
    ([4, 32, 32, 4096, 128], "softcap:30", "prefix-lm:512"),
    ([4, 32, 32, 4096, 128], "", "dilated:4 & causal"),
    ([4, 32, 32, 4096, 128], "", "natten:257"),
    ([4, 32, 32, 4096, 128], "", "global-local:256,64"),
    ([4, 32, 32, 4096, 128], "", "k <= q & (k < 4 | q - k < 512)"),
    ([4, 32, 32, 4096, 128], "", "q / 512 == k / 512 & k <= q"),
    ([1, 32, 8, 2048, 128], "", "causal"),
];

fn spec(([batch, heads_q, heads_kv, seq, dim], score_mod, mask): Row) -> Result<AttentionSpec> {
    let shape = Shape { batch, heads_q, heads_kv, seq_q: seq, seq_kv: seq, dim_qk: dim, dim_v: dim };
    let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd);
    if !score_mod.is_empty() {
        spec = spec.score_mod(score_mod.parse()?);
    }
    if !mask.is_empty() {
        spec = spec.mask(mask.parse()?);
    }
    Ok(spec)
}

const WARM: usize = 3;
const RUNS: usize = 11;

/// Medians of passes of one problem, in turns, in milliseconds.
fn times(stream: &Stream, spec: &AttentionSpec, passes: &[&Pass]) -> Result<Vec<f64>> {
    let workspace = passes.iter().map(|pass| pass.workspace_bytes()).max().unwrap_or(0);
    let tensors = Tensors::new(stream, spec, workspace, 7)?;
    let cap = [DeviceParam { name: "cap", value: DeviceValue::Scalar(30.0) }];
    let params: &[DeviceParam<'_>] = if spec.score_mods.is_empty() { &[] } else { &cap };
    let mut times = vec![Vec::new(); passes.len()];
    for round in 0..WARM + RUNS {
        for (pass, times) in passes.iter().zip(&mut times) {
            let call = DeviceForward { params, ..tensors.call(None) };
            let start = stream.record(true)?;
            // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
            unsafe { pass.submit(stream, &(&call).into()) }?;
            let end = stream.record(true)?;
            end.synchronize()?;
            if round >= WARM {
                times.push(f64::from(end.since(&start)?));
            }
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// Times of the table beside cuDNN's, in turns: milliseconds, and TFLOP/s by the pairs that bands keep.
pub(crate) fn speed() -> Result<()> {
    let (ours, theirs) = (executor(None)?, cudnn(PlanOptions::default())?);
    let stream = ours.device().stream()?;
    for row in ROWS {
        let (spec, ([batch, heads_q, heads_kv, seq, dim], score_mod, mask)) = (spec(row)?, row);
        let problem = spec.validate()?;
        let (mine, _) = ours.attention(&problem)?;
        let other: Option<OnDevice<DeviceSlice, Stream>> = theirs.attention(&problem).ok().map(|(planned, _)| planned as _);
        let passes: Vec<&Pass> = std::iter::once(&*mine as &Pass).chain(other.as_deref()).collect();
        let ms = times(&stream, &spec, &passes)?;
        let told = |ms: f64| format!("{ms:.4} ms {:.0}", problem.flops() / ms / 1e9);
        let other = ms.get(1).map_or_else(|| "declined".to_owned(), |&theirs| format!("{}, ratio {:.3}", told(theirs), theirs / ms[0]));
        println!("({batch},{heads_q},{heads_kv},{seq},{dim}) {score_mod} {mask}: cuda {}; cudnn {other}", told(ms[0]));
    }
    Ok(())
}

/// Cuts beside the usual one of each head dim.
pub(crate) fn cuts() -> Result<()> {
    for dim in [64, 128, 256] {
        let usual = Tile::of(dim, dim).ok_or("no cut")?;
        let others = [Tile { turns: !usual.turns, ..usual }, Tile { keys: usual.keys - 16, ..usual }];
        let executors: Vec<CudaExecutor> = [usual].into_iter().chain(others).map(|tile| executor(Some(tile))).collect::<Result<_>>()?;
        let stream = executors[0].device().stream()?;
        for row in ROWS.into_iter().filter(|row| row.0[4] == dim) {
            let spec = spec(row)?;
            let problem = spec.validate()?;
            let plans = executors.iter().map(|executor| Ok(executor.attention(&problem)?.0)).collect::<Result<Vec<_>>>()?;
            let passes: Vec<&Pass> = plans.iter().map(|plan| &**plan as &Pass).collect();
            let ms = times(&stream, &spec, &passes)?;
            println!("{row:?}: usual {:.4} ms, other turns {:.4}, {} keys {:.4}", ms[0], ms[1], usual.keys - 16, ms[2]);
        }
    }
    Ok(())
}
