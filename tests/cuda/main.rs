//! Native CUDA kernels for NVIDIA GPUs, compiled for the CPU and run there thread by thread, against the oracle.

mod deterministic;
mod disk;
mod documents;
mod emptied;
mod empty;
mod far;
mod fault_cases;
mod faults;
mod files;
mod fixed_point_faults;
mod function_faults;
mod invariant;
mod invariant_faults;
mod kept_map;
mod large;
mod late_faults;
mod lists;
mod mean_error;
mod mma;
mod mma_faults;
mod mutants;
mod not_numbers;
mod pages;
mod pair_faults;
mod places;
mod ring_faults;
mod statistics;
mod survivors;

use conformance::case::Case;
use conformance::compare::GradientDistance;
use conformance::covering::Strength;
use conformance::emulated;
use conformance::invariance::Features;
use conformance::random::Random;
use conformance::runner::{
    Draw, Outcome, Source, Stays, Tally, edges, in_rows_of_16_bytes, random_backward, random_ends, random_few, random_packed,
    random_padded, random_padded_backward, random_paged, random_spec, run, run_backward, run_backward_case, run_case, run_covered,
    run_tree, side_by_side, stays,
};
use conformance::say::{say, skip};
use conformance::share::{new_seeds, of_today, on_request, seeds_of_today};
use sdpa::cuda::CudaExecutor;
use sdpa::{AttentionSpec, BackwardSpec, DType, Executor, SINK, StatsBase};
use std::sync::Mutex;

const NAME: &str = "cuda-emulated";

/// Days until every problem of the covering has been run.
const COVERING_DAYS: u64 = 3;

/// What the kernels take.
const NARROW: [DType; 2] = [DType::BF16, DType::F16];

/// The features that comparisons of bits begin with.
const CAUSAL: Features = Features {
    dtype: DType::BF16,
    heads: [4, 2],
    dims: [64, 40],
    score_mods: &[],
    masks: &["causal-ends"],
    sink: false,
    lengths: &[[20, 20]],
    from_the_end: true,
    gradients: true,
    batch_invariant: true,
};

fn executor() -> Option<CudaExecutor> {
    emulated::executor().map_err(|why| skip("cuda", &why)).ok()
}

/// Cases of the types that the kernels take.
fn narrow(cases: impl IntoIterator<Item = Result<Vec<Case>, String>>) -> Vec<Case> {
    cases.into_iter().flat_map(Result::unwrap).filter(|case| NARROW.contains(&case.dtype)).collect()
}

/// Runs each of a list, and says how many were right.
///
/// # Panics
/// Where one was wrong, or none ran.
fn each<T: Sync>(what: &str, name: &str, list: &[T], run: impl Fn(&T, &Mutex<Tally>) + Sync) {
    let tally = Mutex::new(Tally::default());
    side_by_side(list, |item| run(item, &tally));
    let tally = tally.into_inner().unwrap();
    say(&format!("{what} {}", tally.summary(name)));
    assert_eq!(tally.failed, 0, "cases failed");
    assert!(tally.passed > 0, "no case ran");
}

/// Cases, forward; problems that the kernels do not support are skipped, and nothing else.
fn forward_on(executor: &CudaExecutor, name: &str, what: &str, cases: &[Case]) {
    each(what, name, cases, |case, tally| {
        let unsupported = || case.spec().unwrap().validate().is_ok_and(|problem| executor.supports(&problem).is_err());
        let outcome = run_case(case, executor).skip_only_if(unsupported, || case.repro(executor.name()));
        tally.lock().unwrap().add(name, &case.name, &outcome);
    });
}

/// Cases, backward, from the oracle's outputs and stats or from the kernels' own.
fn backward_on(executor: &CudaExecutor, name: &str, what: &str, cases: &[Case], sources: &[Source]) {
    let runs: Vec<(&Case, Source)> = cases.iter().flat_map(|case| sources.iter().map(move |source| (case, *source))).collect();
    each(what, name, &runs, |&(case, source), tally| {
        let unsupported = || case.backward_spec().unwrap().validate().is_ok_and(|problem| executor.supports_backward(&problem).is_err());
        let outcome = run_backward_case(case, source, executor).skip_only_if(unsupported, || case.backward_repro(executor.name()));
        tally.lock().unwrap().add(name, &format!("{}{}", case.name, source.suffix()), &outcome);
    });
}

/// Runs the forward pass of hand-written cases where `SDPA_SHARE` asks for them: the covering replaces them in a daily run.
fn forward(what: &str, cases: Vec<Case>) {
    let Some(executor) = executor() else { return };
    let cases = on_request(&format!("{what} {NAME}"), cases);
    if !cases.is_empty() {
        forward_on(&executor, NAME, what, &cases);
    }
}

/// Runs the backward pass of hand-written cases, as [`forward`].
fn backward(what: &str, cases: Vec<Case>, sources: &[Source]) {
    let Some(executor) = executor() else { return };
    let cases = on_request(&format!("{what} {NAME}"), cases);
    if !cases.is_empty() {
        backward_on(&executor, NAME, what, &cases, sources);
    }
}

#[test]
fn forward_cases() {
    forward("forward", narrow([Case::all(), Case::all_sinks(), Case::all_ends(), Case::all_tables()]));
}

#[test]
fn dropout_cases() {
    forward("dropout", narrow([Case::all_dropout()]));
    backward("dropout backward", narrow([Case::all_dropout()]), &Source::ALL);
}

#[test]
fn weights_stay_as_the_generator_says() {
    let Some(executor) = executor() else { return };
    let Stays { forward, backward } = stays(&executor).unwrap();
    say(&format!("dropout {NAME}: {forward} bits forward and {backward} backward, each as the generator says"));
}

#[test]
fn rules_of_floats_end_where_they_are_written_to() {
    executor().iter().for_each(|executor| edges(executor, NAME, &seeds_of_today(&format!("edges {NAME}"), 36)));
}

#[test]
fn statistics_cases() {
    forward("statistics", narrow([Case::all_statistics()]));
}

#[test]
fn paged_cases() {
    forward("paged", narrow([Case::all_paged()]));
}

#[test]
fn few_cases() {
    forward("few", narrow([Case::all_few()]));
}

#[test]
fn packed_cases() {
    forward("packed", narrow([Case::all_packed()]));
    backward("packed backward", narrow([Case::all_packed()]), &Source::ALL);
}

/// Runs problems in which any two features meet.
fn covering_on(executor: &CudaExecutor, name: &str) {
    let problems = of_today(&format!("covering {name}"), COVERING_DAYS, Strength::Two.problems_for(executor).unwrap(), |_| Vec::new());
    each("covering", name, &problems, |problem, tally| run_covered(problem, name, executor, tally));
}

#[test]
fn any_two_features_meet() {
    executor().iter().for_each(|executor| covering_on(executor, NAME));
}

#[test]
fn gradients_of_parameters_with_wide_heads() {
    backward("parameters with wide heads", narrow([Case::wide_parameters()]), &[Source::Oracle]);
}

#[test]
fn backward_cases() {
    backward("backward", narrow([Case::all_backward(), Case::all_ends()]), &Source::ALL);
    backward("sinks and tables backward", narrow([Case::all_sinks(), Case::all_tables()]), &[Source::Oracle]);
}

#[test]
fn score_mod_cases() {
    forward("score_mod", narrow([Case::all_library(), Case::all_functions()]));
    backward("score_mod backward", narrow([Case::all_library(), Case::all_functions()]), &[Source::Oracle]);
}

/// The gradient of such a problem, that of its sink too if it has one.
fn gradient(spec: AttentionSpec) -> BackwardSpec {
    gradient_of(in_rows_of_16_bytes(spec))
}

/// The gradient of a problem, that of its sink too if it has one.
fn gradient_of(spec: AttentionSpec) -> BackwardSpec {
    if spec.sink { spec.backward().wrt(SINK, DType::F32) } else { spec.backward() }
}

/// The same with stats in base two, of every other seed.
fn based(mut spec: AttentionSpec, seed: u64) -> AttentionSpec {
    spec.stats_base = if seed.is_multiple_of(2) { StatsBase::Two } else { StatsBase::Natural };
    spec
}

fn judged(outcome: Outcome<GradientDistance>, spec: &BackwardSpec, executor: &CudaExecutor) -> Outcome<GradientDistance> {
    let unsupported = || spec.validate().is_ok_and(|problem| executor.supports_backward(&problem).is_err());
    outcome.skip_only_if(unsupported, || format!("{spec:?}"))
}

/// Random lengths, heads, masks, windows about the ends, sinks and score_mods.
#[test]
fn random_problems() {
    let Some(executor) = executor() else { return };
    let seeds = new_seeds(NAME, 2);
    each("random", NAME, &seeds, |&seed, tally| {
        let random = &mut Random::new(seed * 7919 + 41);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let forward = |spec: AttentionSpec, what: &str, tally: &Mutex<Tally>| {
            let spec = in_rows_of_16_bytes(based(spec, seed));
            let unsupported = || spec.validate().is_ok_and(|problem| executor.supports(&problem).is_err());
            let outcome = run(&spec, None, 1.0, seed, &executor).skip_only_if(unsupported, || format!("{spec:?}"));
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}"), &outcome);
        };
        forward(random_spec(random, &NARROW), "dense", tally);
        forward(random_ends(random, &NARROW), "ends", tally);
        forward(random_packed(random, &NARROW), "packed", tally);
        forward(random_few(random, &NARROW), "few", tally);
        forward(random_paged(random, &NARROW), "paged", tally);
        forward(random_padded(random, &NARROW).with_sink(), "sink", tally);
        let backward = |spec: BackwardSpec, what: &str, tally: &Mutex<Tally>| {
            let source = Source::ALL[(seed % 2) as usize];
            let outcome = judged(run_backward(&spec, &draw, source, &executor), &spec, &executor);
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}{}", source.suffix()), &outcome);
        };
        backward(random_backward(random, &NARROW), "backward of any strides", tally);
        backward(random_padded_backward(random, &NARROW), "backward of lengths and any strides", tally);
        backward(gradient(random_spec(random, &NARROW)), "backward", tally);
        backward(gradient(random_packed(random, &NARROW)), "backward of documents", tally);
        backward(gradient(random_ends(random, &NARROW)), "backward of ends", tally);
        backward(gradient(random_padded(random, &NARROW).with_sink()), "backward of a sink", tally);
        let tree = run_tree(seed, &NARROW, &executor).unwrap();
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, tree: {}", tree.text), &tree.forward);
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, backward of the tree: {}", tree.text), &tree.backward);
    });
}
