//! Every forward case on every executor of this process, against the oracle.

use conformance::case::Case;
use conformance::runner::{Tally, run_case};
use conformance::say::{required, say, skip};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::metal::MetalExecutor;
use sdpa::{Executor, Reason};

/// Runs every case and counts; the skips that `excused` does not accept are failures.
fn run_all(executor: &dyn Executor, excused: impl Fn(&Case) -> bool) {
    let mut tally = Tally::default();
    let name = executor.name();
    for case in Case::all().unwrap() {
        let outcome = run_case(&case, executor).skip_only_if(|| excused(&case), || case.repro(name));
        tally.add(name.name(), &case.name, &outcome);
    }
    say(&format!("forward {}", tally.summary(name.name())));
    assert_eq!(tally.failed, 0, "cases failed on {name}");
    assert!(tally.passed > 0, "no case ran on {name}");
}

#[test]
fn cpu_runs_every_case() {
    let cpu = CpuExecutor::default();
    run_all(&cpu, |case| case.skip.contains_key(cpu.name().name()));
}

/// Where the case says so, or every reason is a documented limit or a known-bad runtime.
fn excused(executor: &dyn Executor, case: &Case) -> bool {
    if case.skip.contains_key(executor.name().name()) || !required(executor.name().name()) {
        return true;
    }
    let problem = case.spec().unwrap().validate().unwrap();
    let documented = |reason: &Reason| match reason {
        Reason::Limit { .. } | Reason::KnownBad { .. } => true,
        Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) => false,
    };
    executor.supports(&problem).is_err_and(|e| e.reasons.iter().all(documented))
}

#[test]
fn cudnn_runs_every_case() {
    match CudnnExecutor::new(CudnnOptions::default()) {
        Ok(cudnn) => run_all(&cudnn, |case| excused(&cudnn, case)),
        Err(e) => skip("cudnn", &format!("all {} forward cases: {e}", Case::all().unwrap().len())),
    }
}

#[test]
fn metal_runs_every_case() {
    let metal = MetalExecutor::new();
    let problem = Case::all().unwrap()[0].spec().unwrap().validate().unwrap();
    match metal.supports(&problem) {
        Ok(()) => run_all(&metal, |case| excused(&metal, case)),
        Err(e) => skip("metal", &format!("all {} forward cases: {e}", Case::all().unwrap().len())),
    }
}
