//! Native CUDA kernels with `mma.sync`, on whatever GPU is here: every case and random problems of any strides and dims, against the oracle.

use crate::cuda::{executor_of, some};
use crate::setup::Result;
use conformance::random::Random;
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use conformance::{Case, compare::GradientDistance};
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::{AttentionSpec, BackwardSpec, DType, SINK};

const NAME: &str = "cuda-mma";
const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Cases, some of the library and random problems, forward and gradients; `first` is where random ones begin.
pub(crate) fn run(random: u64, first: u64) -> Result<()> {
    let executor = &executor_of(CudaOptions::default().with_family(Family::Mma))?;
    let mut failed = 0;
    let mut ends = |part: &str, tally: Tally| {
        println!("{}", tally.summary(&format!("{NAME}, {part}")));
        failed += tally.failed;
    };
    let mut tally = Tally::default();
    for case in [Case::all()?, Case::all_sinks()?, Case::all_ends()?, Case::all_tables()?, Case::all_packed()?].into_iter().flatten() {
        tally.add(NAME, &case.name, &runner::run_case(&case, executor));
    }
    ends("cases", tally);
    let mut tally = Tally::default();
    let all = [Case::all_backward()?, Case::all_sinks()?, Case::all_ends()?, Case::all_tables()?, Case::all_packed()?];
    for (case, source) in all.iter().flatten().flat_map(|case| Source::ALL.map(|source| (case, source))) {
        let outcome = runner::run_backward_case(case, source, executor);
        tally.add(NAME, &format!("gradient of {}{}", case.name, source.suffix()), &outcome);
    }
    ends("gradients", tally);
    let mut tally = Tally::default();
    for case in some(first, random)? {
        tally.add(NAME, &case.name, &runner::run_case(&case, executor));
        tally.add(NAME, &format!("gradient of {}", case.name), &runner::run_backward_case(&case, Source::Executor, executor));
    }
    ends("library", tally);
    let mut tally = Tally::default();
    for seed in first..first + random {
        drawn(&mut tally, seed, executor);
        let tree = runner::run_tree(seed, &FLOATS, executor)?;
        tally.add(NAME, &format!("tree {seed}: {}", tree.text), &tree.forward);
        tally.add(NAME, &format!("gradient of tree {seed}: {}", tree.text), &tree.backward);
    }
    ends("random", tally);
    println!("plans and kernels: {:?}", executor.snapshots().map(|snapshot| snapshot.stats));
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Random problems of one seed.
fn drawn(tally: &mut Tally, seed: u64, executor: &CudaExecutor) {
    let random = &mut Random::new(seed * 7919 + 41);
    let forwards: [(&str, AttentionSpec); 4] = [
        ("any", runner::random_padded(random, &FLOATS)),
        ("ends", runner::random_ends(random, &FLOATS)),
        ("sink", runner::random_padded(random, &FLOATS).with_sink()),
        ("documents", runner::random_packed(random, &FLOATS)),
    ];
    for (what, spec) in forwards {
        let outcome = runner::run(&spec, None, 1.0, seed, executor);
        if matches!(outcome, Outcome::Fail(_)) {
            println!("{spec:?}");
        }
        tally.add(NAME, &format!("{seed}, {what}"), &outcome);
    }
    let with_sink = |spec: AttentionSpec| if spec.sink { spec.backward().wrt(SINK, DType::F32) } else { spec.backward() };
    let backwards: [(&str, BackwardSpec); 5] = [
        ("any strides", runner::random_backward(random, &FLOATS)),
        ("lengths and any strides", runner::random_padded_backward(random, &FLOATS)),
        ("deterministic, documents", with_sink(runner::random_packed(random, &FLOATS)).deterministic()),
        ("deterministic, ends", with_sink(runner::random_ends(random, &FLOATS)).deterministic()),
        ("deterministic, sink", with_sink(runner::random_padded(random, &FLOATS).with_sink()).deterministic()),
    ];
    for (what, spec) in backwards {
        let source = Source::ALL[(seed % 2) as usize];
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let outcome: Outcome<GradientDistance> = runner::run_backward(&spec, &draw, source, executor);
        if matches!(outcome, Outcome::Fail(_)) {
            println!("{spec:?}");
        }
        tally.add(NAME, &format!("gradient {seed}, {what}{}", source.suffix()), &outcome);
    }
}
