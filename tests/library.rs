//! Every case with score_mods and masks of the library on every executor of this process, against plain closures: the forward
//! pass, and the backward pass alone and chained.

use conformance::case::Case;
use conformance::library::Library;
use conformance::random::Random;
use conformance::runner::{Outcome, Source, Tally, run_backward_case, run_case, run_tree};
use conformance::say::{required, say, skip};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::library::{MASKS, SCORE_MODS, softcap};
use sdpa::metal::MetalExecutor;
use sdpa::{AttentionSpec, DType, Elements, ElementsMut, Executor, HostForward, Layout, Param, ParamValue, Reason, Shape, Unsupported};

fn cases() -> Vec<Case> {
    Case::all_library().unwrap()
}

fn documented(e: &Unsupported, case: &Case, executor: &dyn Executor) -> bool {
    let known = |reason: &Reason| match reason {
        Reason::Limit { .. } | Reason::KnownBad { .. } => true,
        // Gradients that engines do not sum are refused by name.
        Reason::Refused { text, .. } => case.backward.as_ref().is_some_and(|b| !b.wrt.is_empty()) && text.contains("the gradient of"),
        Reason::Absent(_) | Reason::Failed(_) => false,
    };
    !required(executor.name().name()) || e.reasons.iter().all(known)
}

/// Runs every case; the skips that nothing excuses are failures.
fn run_all(executor: &dyn Executor, may_skip: bool) {
    let (mut forward, mut backward) = (Tally::default(), Tally::default());
    let name = executor.name();
    for case in cases() {
        let problem = case.backward_spec().unwrap().validate().unwrap();
        let plain = case.spec().unwrap().validate().unwrap();
        let excused = |said: Result<(), Unsupported>| may_skip && said.is_err_and(|e| documented(&e, &case, executor));
        let outcome = run_case(&case, executor).skip_only_if(|| excused(executor.supports(&plain)), || case.repro(name));
        forward.add(name.name(), &case.name, &outcome);
        for source in Source::ALL {
            let said = || executor.supports_backward(&problem).and_then(|()| executor.supports(problem.forward()));
            let outcome = run_backward_case(&case, source, executor).skip_only_if(|| excused(said()), || case.backward_repro(name));
            backward.add(name.name(), &format!("{}{}", case.name, source.suffix()), &outcome);
        }
    }
    say(&format!("library forward {}", forward.summary(name.name())));
    say(&format!("library backward {}", backward.summary(name.name())));
    assert_eq!((forward.failed, backward.failed), (0, 0), "cases failed on {name}");
    assert!(forward.passed > 0 && backward.passed > 0, "no case ran on {name}");
}

#[test]
fn cpu_runs_every_case() {
    run_all(&CpuExecutor::default(), false);
}

#[test]
fn cpu_runs_random_score_mods() {
    let (mut forward, mut backward) = (Tally::default(), Tally::default());
    let cpu = CpuExecutor::default();
    for seed in 0..60 {
        let tree = run_tree(seed, &[DType::F32, DType::BF16, DType::F16], &cpu).unwrap();
        if !matches!((&tree.forward, &tree.backward), (Outcome::Pass(..), Outcome::Pass(..))) {
            say(&tree.text);
        }
        forward.add("cpu", &format!("tree {seed}"), &tree.forward);
        backward.add("cpu", &format!("tree backward {seed}"), &tree.backward);
    }
    assert_eq!((forward.passed, backward.passed), (60, 60));
}

#[test]
fn cudnn_runs_every_case() {
    match CudnnExecutor::new(CudnnOptions::default()) {
        Ok(cudnn) => run_all(&cudnn, true),
        Err(e) => skip("cudnn", &format!("all {} cases of the library: {e}", cases().len())),
    }
}

#[test]
fn metal_runs_every_case() {
    let metal = MetalExecutor::new();
    match metal.supports(&cases()[0].spec().unwrap().validate().unwrap()) {
        Ok(()) => run_all(&metal, true),
        Err(e) => skip("metal", &format!("all {} cases of the library: {e}", cases().len())),
    }
}

/// What the table in `sdpa::library` lists; axes in every number.
#[test]
fn every_name_has_a_case() {
    let cases = cases();
    let has = |mods: bool, name: &str| {
        let of = |case: &Case| if mods { case.score_mod.clone() } else { case.mask.clone() };
        cases.iter().flat_map(of).any(|text| text == name || text.split_once(':').is_some_and(|(n, _)| n == name))
    };
    for named in SCORE_MODS {
        assert!(has(true, named.name()), "{}", named.spelling);
    }
    for named in MASKS {
        assert!(has(false, named.name()), "{}", named.spelling);
    }
    for text in cases.iter().flat_map(|c| &c.score_mod) {
        assert_eq!(text.parse::<sdpa::ScoreMod>().unwrap().to_string(), *text, "it is a name of the library");
    }
    for case in &cases {
        case.backward_spec().unwrap().validate().unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let problem = case.spec().unwrap().validate().unwrap();
        let library = case.library().unwrap();
        let drawn = library.as_ref().map_or_else(Vec::new, Library::params);
        problem.bind(&drawn).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    }
    let draws: Vec<Library> = cases.iter().filter_map(|c| c.library().unwrap()).collect();
    let lengths: Vec<f64> = draws.iter().filter_map(Library::key_lengths).flatten().copied().collect();
    assert!(lengths.contains(&0.0) && lengths.iter().any(|n| *n > 1.0), "{lengths:?}");
    let caps = draws.iter().filter(|d| d.bound.iter().any(|b| b.name == "cap")).count();
    assert!(caps > 0 && caps < cases.iter().filter(|c| c.score_mod.iter().any(|m| m.starts_with("softcap"))).count());
}

#[test]
fn names_without_a_closure_are_errors() {
    let draw = |mods: &[&str], masks: &[&str]| {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        Library::draw(&own(mods), &own(masks), [1, 2, 3, 4], &mut Random::new(1)).map(|_| ())
    };
    assert!(draw(&["softcap:2"], &["causal"]).is_ok());
    for (mods, masks) in [(&["soft"][..], &[][..]), (&["softcap:x"], &[]), (&["bias:z"], &[]), (&[], &["q < k"]), (&[], &["window:1"])] {
        assert!(draw(mods, masks).is_err(), "{mods:?} {masks:?}");
    }
}

/// One program, two values of a scalar: bound, and by default. A cache must not keep the value of the first problem.
fn keeps_values_apart(executor: &dyn Executor, may_skip: bool) {
    let shape = Shape { batch: 1, heads_q: 1, heads_kv: 1, seq_q: 1, seq_kv: 2, dim_qk: 8, dim_v: 8 };
    let problems = [1.0, 4.0].map(|cap| AttentionSpec::dense(DType::F16, shape, Layout::Bhsd).score_mod(softcap(cap)).validate().unwrap());
    assert_eq!(problems[0], problems[1]);
    if let Err(e) = executor.supports(&problems[0]) {
        assert!(may_skip, "{e}");
        return skip(executor.name().name(), &format!("values of scalars: {e}"));
    }
    let half = |x: f32| half::f16::from_f32(x);
    // Scores 0 and 8.
    let (q, k) = ([half(1.0); 8], [[half(0.0); 8], [half(1.0); 8]].concat());
    let v = [[half(0.0); 8], [half(1.0); 8]].concat();
    let prepared = problems.each_ref().map(|p| executor.prepare(p).unwrap());
    let run = |which: usize, cap: Option<f32>| {
        let mut o = [half(f32::NAN); 8];
        let params: Vec<Param<'_>> = cap.map(|cap| Param { name: "cap", value: ParamValue::Scalar(cap) }).into_iter().collect();
        let call = HostForward {
            q: Elements::F16(&q),
            k: Elements::F16(&k),
            v: Elements::F16(&v),
            o: ElementsMut::F16(&mut o),
            stats: None,
            attn_scale: Some(1.0),
            params: &params,
        };
        prepared[which].forward(call).unwrap();
        f64::from(o[0])
    };
    let want = |cap: f64| 1.0 / (1.0 + (-cap * (8.0 / cap).tanh()).exp());
    for (which, cap, means) in
        [(0, None, 1.0), (1, None, 4.0), (0, Some(2.0), 2.0), (1, Some(2.0), 2.0), (0, None, 1.0), (1, Some(1.0), 1.0)]
    {
        let got = run(which, cap);
        assert!((got - want(means)).abs() < 2e-3, "problem {which}, {cap:?}: {got}, not {}", want(means));
    }
}

#[test]
fn a_cpu_call_has_the_values_of_its_problem() {
    keeps_values_apart(&CpuExecutor::default(), false);
}

#[test]
fn a_cudnn_call_has_the_values_of_its_problem() {
    match CudnnExecutor::new(CudnnOptions::default()) {
        Ok(cudnn) => keeps_values_apart(&cudnn, true),
        Err(e) => skip("cudnn", &format!("values of scalars: {e}")),
    }
}
