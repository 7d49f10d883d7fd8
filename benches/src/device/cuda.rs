//! Native CUDA kernels: every case and random problems against the oracle.

use crate::setup::Result;
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use conformance::{Case, random::Random};
use sdpa::cuda::tile_config::Tile;
use sdpa::cuda::{CudaExecutor, CudaOptions};
use sdpa::{AttentionSpec, BackwardSpec, DType, SINK};
use std::sync::{Mutex, PoisonError};

pub(crate) fn executor(tile: Option<Tile>) -> Result<CudaExecutor> {
    executor_of(CudaOptions::default().with_tile(tile))
}

pub(crate) fn executor_of(options: CudaOptions) -> Result<CudaExecutor> {
    let executor = CudaExecutor::new(options)?;
    let [major, minor] = executor.nvrtc().version();
    println!("{}, NVRTC {major}.{minor} from {}", executor.device().name(), executor.nvrtc().path().display());
    Ok(executor)
}

/// What is tried, in a process each where there are processors for it: a kernel takes a second to compile.
const PARTS: [&str; 12] = [
    "cases",
    "large",
    "packed",
    "few",
    "paged",
    "library",
    "random",
    "ends",
    "trees",
    "gradients",
    "gradients-library",
    "gradients-random",
];

/// Cases and random problems, those of one part or all; `first` is where random ones begin. `portable` is a part by itself: the kernels with `mma.sync`.
pub(crate) fn run(random: u64, part: Option<&str>, first: u64) -> Result<()> {
    if part == Some("portable") {
        return crate::cuda_portable::run(random, first);
    }
    let executor = &executor(None)?;
    let mut failed = 0;
    for part in PARTS.into_iter().filter(|name| part.is_none_or(|part| part == *name)) {
        let mut tally = Tally::default();
        let seeds = first..first + random;
        match part {
            "cases" => {
                for case in [Case::all()?, Case::all_sinks()?, Case::all_ends()?, Case::all_tables()?].into_iter().flatten() {
                    tally.add("cuda", &case.name, &runner::run_case(&case, executor));
                }
            }
            "large" => {
                let failed = Mutex::new(0);
                let all = runner::LargeScores::all(&[DType::BF16, DType::F16, DType::F32]);
                runner::side_by_side(&all, |problem| {
                    if let Err(how) = problem.run(executor) {
                        println!("FAIL {problem:?}: {how}");
                        *failed.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                    }
                });
                tally.failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
                tally.passed = all.len() - tally.failed;
            }
            "packed" => {
                Case::all_packed()?.iter().for_each(|case| tally.add("cuda", &case.name, &runner::run_case(case, executor)));
                seeds.for_each(|seed| drawn(&mut tally, part, seed, executor, |r| runner::random_packed(r, &NARROW)));
            }
            "few" => {
                Case::all_few()?.iter().for_each(|case| tally.add("cuda", &case.name, &runner::run_case(case, executor)));
                seeds.for_each(|seed| drawn(&mut tally, part, seed, executor, |r| runner::random_few(r, &NARROW)));
            }
            "paged" => {
                Case::all_paged()?.iter().for_each(|case| tally.add("cuda", &case.name, &runner::run_case(case, executor)));
                seeds.for_each(|seed| drawn(&mut tally, part, seed, executor, |r| runner::random_paged(r, &NARROW)));
            }
            "library" => some(first, random)?.for_each(|case| tally.add("cuda", &case.name, &runner::run_case(&case, executor))),
            "random" => seeds.for_each(|seed| drawn(&mut tally, part, seed, executor, |r| runner::random_spec(r, &NARROW))),
            "ends" => seeds.for_each(|seed| {
                drawn(&mut tally, part, seed, executor, |r| {
                    if seed % 2 == 0 { runner::random_ends(r, &NARROW) } else { runner::random_padded(r, &NARROW).with_sink() }
                });
            }),
            "trees" => {
                for seed in seeds {
                    let tree = runner::run_tree(seed, &NARROW, executor)?;
                    if matches!(tree.forward, Outcome::Fail(_)) || matches!(tree.backward, Outcome::Fail(_)) {
                        println!("{}", tree.text);
                    }
                    tally.add("cuda", &format!("tree {seed}"), &tree.forward);
                    tally.add("cuda", &format!("gradient of tree {seed}"), &tree.backward);
                }
            }
            "gradients" => {
                let all = [
                    Case::all_backward()?,
                    Case::all_packed()?,
                    Case::all_sinks()?,
                    Case::all_ends()?,
                    Case::all_tables()?,
                    Case::wide_parameters()?,
                ];
                for (case, source) in all.iter().flatten().flat_map(|case| Source::ALL.map(|source| (case, source))) {
                    let outcome = runner::run_backward_case(case, source, executor);
                    tally.add("cuda", &format!("{}{}", case.name, source.suffix()), &outcome);
                }
            }
            "gradients-library" => some(first, random)?.for_each(|case| {
                let outcome = runner::run_backward_case(&case, Source::Executor, executor);
                tally.add("cuda", &format!("gradient of {}", case.name), &outcome);
            }),
            _ => seeds.for_each(|seed| gradients_drawn(&mut tally, seed, executor)),
        }
        println!("{}", tally.summary(&format!("cuda, {part}")));
        failed += tally.failed;
    }
    println!("plans and kernels: {:?}", executor.snapshots().map(|snapshot| snapshot.stats));
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

/// Some of the library's score_mods under masks: a text of its own each.
pub(crate) fn some(first: u64, count: u64) -> Result<impl Iterator<Item = Case>> {
    let all = [Case::all_functions()?, Case::all_library()?].concat();
    let first = usize::try_from(first)?.min(all.len());
    Ok(all.into_iter().skip(first).take(usize::try_from(count)?))
}

fn drawn(tally: &mut Tally, part: &str, seed: u64, executor: &CudaExecutor, draw: impl Fn(&mut Random) -> AttentionSpec) {
    let spec = runner::in_rows_of_16_bytes(draw(&mut Random::new(seed * 7919 + 41)));
    let outcome = runner::run(&spec, None, 1.0, seed, executor);
    if matches!(outcome, Outcome::Fail(_)) {
        println!("{spec:?}");
    }
    tally.add("cuda", &format!("{part} {seed}"), &outcome);
}

fn gradients_drawn(tally: &mut Tally, seed: u64, executor: &CudaExecutor) {
    let random = &mut Random::new(seed * 7919 + 41);
    let with_sink = |spec: AttentionSpec| if spec.sink { spec.backward().wrt(SINK, DType::F32) } else { spec.backward() };
    let specs: [(&str, BackwardSpec); 6] = [
        ("any strides", runner::random_backward(random, &NARROW)),
        ("lengths and any strides", runner::random_padded_backward(random, &NARROW)),
        ("dense", with_sink(runner::in_rows_of_16_bytes(runner::random_spec(random, &NARROW)))),
        ("documents", with_sink(runner::in_rows_of_16_bytes(runner::random_packed(random, &NARROW)))),
        ("ends", with_sink(runner::in_rows_of_16_bytes(runner::random_ends(random, &NARROW)))),
        ("sink", with_sink(runner::in_rows_of_16_bytes(runner::random_padded(random, &NARROW).with_sink()))),
    ];
    for (what, spec) in specs {
        let source = Source::ALL[(seed % 2) as usize];
        let outcome = runner::run_backward(&spec, &Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed }, source, executor);
        if matches!(outcome, Outcome::Fail(_)) {
            println!("{spec:?}");
        }
        tally.add("cuda", &format!("gradient {seed}, {what}{}", source.suffix()), &outcome);
    }
}
