//! Kernels with `mma.sync`, on a device of compute capability 8.0.

use super::{each, gradient_of, judged};
use conformance::case::Case;
use conformance::emulated::{Emulated, executor_on};
use conformance::random::Random;
use conformance::runner::{
    Draw, Source, random_backward, random_ends, random_padded, random_padded_backward, random_spec, run, run_backward, run_backward_case,
    run_case, run_tree,
};
use conformance::say::skip;
use sdpa::cuda::CudaExecutor;
use sdpa::{AttentionSpec, BackwardSpec, DType, Executor};

const NAME: &str = "cuda-mma-emulated";

/// What the kernels take.
const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

pub(crate) fn executor() -> Option<CudaExecutor> {
    executor_on(Emulated::A100, None).map_err(|why| skip("cuda", &why)).ok()
}

fn floats(cases: impl IntoIterator<Item = Result<Vec<Case>, String>>) -> Vec<Case> {
    cases.into_iter().flat_map(Result::unwrap).filter(|case| FLOATS.contains(&case.dtype)).collect()
}

fn forward(what: &str, cases: Vec<Case>) {
    let Some(executor) = executor() else { return };
    each(what, NAME, &cases, |case, tally| {
        let declined = || case.spec().unwrap().validate().is_ok_and(|problem| executor.supports(&problem).is_err());
        let outcome = run_case(case, &executor).skip_only_if(declined, || case.repro(executor.name()));
        tally.lock().unwrap().add(NAME, &case.name, &outcome);
    });
}

fn backward(what: &str, cases: Vec<Case>, sources: &[Source]) {
    let Some(executor) = executor() else { return };
    let runs: Vec<(&Case, Source)> = cases.iter().flat_map(|case| sources.iter().map(move |source| (case, *source))).collect();
    each(what, NAME, &runs, |&(case, source), tally| {
        let declined = || case.backward_spec().unwrap().validate().is_ok_and(|problem| executor.supports_backward(&problem).is_err());
        let outcome = run_backward_case(case, source, &executor).skip_only_if(declined, || case.backward_repro(executor.name()));
        tally.lock().unwrap().add(NAME, &format!("{}{}", case.name, source.suffix()), &outcome);
    });
}

#[test]
fn forward_cases() {
    forward("forward", floats([Case::all(), Case::all_sinks(), Case::all_ends(), Case::all_tables()]));
}

#[test]
fn backward_cases() {
    backward("backward", floats([Case::all_backward(), Case::all_ends()]), &[Source::Oracle]);
    backward("sinks and tables backward", floats([Case::all_sinks(), Case::all_tables()]), &[Source::Executor]);
}

/// Every few of the library's score_mods under masks: each is a text of its own.
const EVERY: usize = 13;

#[test]
fn score_mod_cases() {
    let some: Vec<Case> = floats([Case::all_library()]).into_iter().step_by(EVERY).collect();
    forward("score_mod", some.clone());
    backward("score_mod backward", some, &[Source::Oracle]);
}

/// Random lengths, heads, dims, strides, masks, windows about the ends, sinks and score_mods, as they are drawn.
#[test]
fn random_problems() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, n) = (number("SDPA_SEED").unwrap_or(1), number("SDPA_CASES").unwrap_or(6));
    let Some(executor) = executor() else { return };
    let seeds: Vec<u64> = (first..first + n).collect();
    each("random", NAME, &seeds, |&seed, tally| {
        let random = &mut Random::new(seed * 7919 + 41);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let forward = |spec: AttentionSpec, what: &str| {
            let declined = || spec.validate().is_ok_and(|problem| executor.supports(&problem).is_err());
            let outcome = run(&spec, None, 1.0, seed, &executor).skip_only_if(declined, || format!("{spec:?}"));
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}"), &outcome);
        };
        forward(random_spec(random, &FLOATS), "dense");
        forward(random_ends(random, &FLOATS), "ends");
        forward(random_padded(random, &FLOATS).with_sink(), "sink");
        let backward = |spec: BackwardSpec, what: &str| {
            let source = Source::ALL[(seed % 2) as usize];
            let outcome = judged(run_backward(&spec, &draw, source, &executor), &spec, &executor);
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}{}", source.suffix()), &outcome);
        };
        backward(random_backward(random, &FLOATS), "backward");
        backward(random_padded_backward(random, &FLOATS), "backward of lengths");
        // Where no parameter's gradient but the sink's is asked for.
        backward(gradient_of(random_ends(random, &FLOATS)).deterministic(), "deterministic backward of ends");
        backward(gradient_of(random_padded(random, &FLOATS).with_sink()).deterministic(), "deterministic backward of a sink");
        let tree = run_tree(seed, &FLOATS, &executor).unwrap();
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, tree: {}", tree.text), &tree.forward);
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, backward of the tree: {}", tree.text), &tree.backward);
    });
}
