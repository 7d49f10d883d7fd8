//! Kernels with `mma.sync`, on a device of compute capability 8.0.

use super::{CAUSAL, backward_on, based, covering_on, each, forward_on, gradient_of, judged};
use conformance::case::Case;
use conformance::emulated::{Emulated, executor_on};
use conformance::invariance::{Features, compare};
use conformance::random::Random;
use conformance::runner::{
    Draw, Outcome, Source, Stays, edges, random_backward, random_ends, random_packed, random_padded, random_padded_backward, random_paged,
    run, run_backward, run_tree, stays,
};
use conformance::say::{say, skip};
use conformance::share::{new_seeds, on_request, one_of_today, seeds_of_today};
use sdpa::cuda::{CudaExecutor, Family};
use sdpa::{AttentionSpec, BackwardSpec, DType, Layout, Mask, Paged, Shape};

pub(crate) const NAME: &str = "cuda-mma-emulated";

/// What the kernels take.
const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

pub(crate) fn executor() -> Option<CudaExecutor> {
    executor_on(Emulated::A100, None).map_err(|why| skip("cuda", &why)).ok()
}

fn floats(cases: impl IntoIterator<Item = Result<Vec<Case>, String>>) -> Vec<Case> {
    cases.into_iter().flat_map(Result::unwrap).filter(|case| FLOATS.contains(&case.dtype)).collect()
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
    forward("forward", floats([Case::all(), Case::all_sinks(), Case::all_ends(), Case::all_tables()]));
}

#[test]
fn any_two_features_meet() {
    executor().iter().for_each(|executor| covering_on(executor, NAME));
}

#[test]
fn gradients_of_parameters_with_wide_heads() {
    backward("parameters with wide heads", floats([Case::wide_parameters()]), &[Source::Oracle]);
}

#[test]
fn dropout_cases() {
    forward("dropout", floats([Case::all_dropout()]));
    backward("dropout backward", floats([Case::all_dropout()]), &Source::ALL);
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
fn paged_cases() {
    forward("paged", floats([Case::all_paged()]));
}

#[test]
fn packed_cases() {
    forward("packed", floats([Case::all_packed()]));
    backward("packed backward", floats([Case::all_packed()]), &[Source::Oracle]);
}

#[test]
fn statistics_cases() {
    forward("statistics", floats([Case::all_statistics()]));
}

#[test]
fn invariant_cases() {
    forward("invariant", floats([Case::all_invariant()]));
    backward("invariant backward", floats([Case::all_invariant()]), &[Source::Oracle]);
}

/// The bits of a sequence's results alone and in other calls.
#[test]
fn results_of_a_sequence_do_not_depend_on_the_rest_of_the_call() {
    let Some(executor) = executor() else { return };
    let causal = Features { lengths: &[[20, 20], [1, 150], [30, 140], [70, 70]], ..CAUSAL };
    let all = [
        causal,
        Features { dtype: DType::F32, dims: [32, 32], sink: true, masks: &["window:50,0:ends"], ..causal },
        Features {
            heads: [2, 2],
            score_mods: &["softcap:5", "alibi"],
            masks: &["causal-ends", "(q + k) % 3 != 1"],
            from_the_end: false,
            ..causal
        },
    ];
    for features in one_of_today(&format!("invariant {NAME}"), &all) {
        let compared = compare(&executor, &features).unwrap_or_else(|why| panic!("{features:?}: {why}"));
        say(&format!("batch_invariant {NAME}: {compared} equal results of {features:?}"));
    }
}

#[test]
fn backward_cases() {
    backward("backward", floats([Case::all_backward(), Case::all_ends()]), &[Source::Oracle]);
    backward("sinks and tables backward", floats([Case::all_sinks(), Case::all_tables()]), &[Source::Executor]);
}

#[test]
fn score_mod_cases() {
    forward("score_mod", floats([Case::all_library(), Case::all_functions()]));
    backward("score_mod backward", floats([Case::all_library(), Case::all_functions()]), &[Source::Oracle]);
}

/// Random lengths, heads, dims, strides, masks, windows about the ends, sinks and score_mods, as they are drawn.
#[test]
fn random_problems() {
    let Some(executor) = executor() else { return };
    let seeds = new_seeds(NAME, 2);
    each("random", NAME, &seeds, |&seed, tally| {
        let random = &mut Random::new(seed * 7919 + 41);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let forward = |spec: AttentionSpec, what: &str| {
            let outcome = run(&based(spec, seed), None, 1.0, seed, &executor).skip_only_if(|| false, || what.to_owned());
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}"), &outcome);
        };
        forward(random_padded(random, &FLOATS), "any");
        forward(random_paged(random, &FLOATS), "pages");
        forward(random_packed(random, &FLOATS), "documents");
        forward(random_ends(random, &FLOATS), "ends");
        forward(random_padded(random, &FLOATS).with_sink(), "sink");
        let backward = |spec: BackwardSpec, what: &str| {
            let source = Source::ALL[(seed % 2) as usize];
            let outcome = judged(run_backward(&spec, &draw, source, &executor), &spec, &executor);
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}{}", source.suffix()), &outcome);
        };
        backward(random_backward(random, &FLOATS), "backward");
        backward(random_padded_backward(random, &FLOATS), "backward of lengths");
        backward(gradient_of(random_packed(random, &FLOATS)), "backward of documents");
        backward(gradient_of(random_packed(random, &FLOATS)).deterministic(), "deterministic backward of documents");
        backward(gradient_of(random_ends(random, &FLOATS)).deterministic(), "deterministic backward of ends");
        backward(gradient_of(random_padded(random, &FLOATS).with_sink()).deterministic(), "deterministic backward of a sink");
        let tree = run_tree(seed, &FLOATS, &executor).unwrap();
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, tree: {}", tree.text), &tree.forward);
        tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, backward of the tree: {}", tree.text), &tree.backward);
    });
}

fn spec(dtype: DType, dim: i64) -> AttentionSpec {
    let shape = Shape { batch: 1, heads_q: 2, heads_kv: 1, seq_q: 40, seq_kv: 50, dim_qk: dim, dim_v: dim };
    AttentionSpec::dense(dtype, shape, Layout::Bshd)
}

/// On compute capability 9.0 the family written for it has what it takes, and this one the rest; elsewhere this one has all.
#[test]
fn each_device_and_problem_has_its_family() {
    let on = |device, family| executor_on(device, family).map_err(|why| skip("cuda", &why)).ok();
    let (Some(h200), Some(a100), Some(l40)) = (on(Emulated::H200, None), on(Emulated::A100, None), on(Emulated::L40, None)) else { return };
    let paged = |page_size| {
        let shape = Shape { batch: 2, heads_q: 2, heads_kv: 1, seq_q: 5, seq_kv: 50, dim_qk: 64, dim_v: 64 };
        AttentionSpec::paged(DType::BF16, shape, Paged::new(page_size, 2 * (50 + page_size - 1) / page_size)).mask(Mask::padding())
    };
    // Forward alone.
    for (page_size, family) in [(16, Family::Wgmma), (4, Family::Mma), (7, Family::Mma)] {
        assert_eq!(h200.family(&paged(page_size).validate().unwrap()), Ok(family), "pages of {page_size}");
        let outcome = run(&paged(page_size), None, 1.0, 5, &h200);
        assert!(matches!(outcome, Outcome::Pass(..)), "{outcome:?}");
    }
    let mut broadcast = spec(DType::F16, 64);
    broadcast.k.strides[2] = 0;
    let table = [
        (spec(DType::BF16, 64), Family::Wgmma),
        (spec(DType::F32, 64), Family::Mma),
        (spec(DType::BF16, 13), Family::Mma),
        (broadcast, Family::Mma),
    ];
    for (spec, family) in table {
        let problem = spec.validate().unwrap();
        assert_eq!(h200.family(&problem), Ok(family), "{spec:?}");
        assert_eq!(h200.backward_family(&spec.clone().backward().deterministic().validate().unwrap()), Ok(family), "{spec:?}");
        for executor in [&a100, &l40] {
            assert_eq!(executor.family(&problem), Ok(Family::Mma), "{spec:?}");
            let outcome = run(&spec, None, 1.0, 5, executor);
            assert!(matches!(outcome, Outcome::Pass(..)), "{outcome:?}");
        }
    }
    let outcome = run_backward(
        &spec(DType::F32, 40).backward().deterministic(),
        &Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed: 3 },
        Source::Oracle,
        &l40,
    );
    assert!(matches!(outcome, Outcome::Pass(..)), "{outcome:?}");
}

/// What one family takes has no reasons; what none does has those of the family that would take the most of it.
#[test]
fn reasons_are_given_where_no_family_takes_a_problem() {
    let on = |device, family| executor_on(device, family).map_err(|why| skip("cuda", &why)).ok();
    let (Some(h200), Some(narrow), Some(old)) =
        (on(Emulated::H200, None), on(Emulated::H200, Some(Family::Wgmma)), on(Emulated::A100, Some(Family::Wgmma)))
    else {
        return;
    };
    let told = |executor: &CudaExecutor, spec: AttentionSpec| executor.family(&spec.validate().unwrap()).unwrap_err().to_string();
    let both = told(&h200, spec(DType::F32, 260));
    assert!(both.contains("dim_qk") && !both.contains("dtype"), "{both}");
    let alone = told(&narrow, spec(DType::F32, 64));
    assert!(alone.contains("dtype: got f32"), "{alone}");
    let elsewhere = told(&old, spec(DType::BF16, 64));
    assert!(elsewhere.contains("compute capability: got 8.0"), "{elsewhere}");
}
