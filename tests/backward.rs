//! Every backward case on every executor of this process, against the oracle: alone, and chained to the executor's forward pass.

use conformance::case::Case;
use conformance::runner::{Source, Tally, run_backward_case};
use conformance::say::{required, say, skip};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::metal::MetalExecutor;
use sdpa::{BackwardProblem, Executor, Reason, Unsupported};

fn cases() -> Vec<Case> {
    Case::all_backward().unwrap()
}

fn problem(case: &Case) -> BackwardProblem {
    case.backward_spec().unwrap().validate().unwrap()
}

/// Runs every case and counts; the skips that `excused` does not accept are failures.
fn run_all(executor: &dyn Executor, excused: impl Fn(&Case) -> bool) {
    let mut tally = Tally::default();
    let name = executor.name();
    for case in cases() {
        for source in Source::ALL {
            let outcome = run_backward_case(&case, source, executor);
            let outcome = outcome.skip_only_if(|| excused(&case), || case.backward_repro(name));
            tally.add(name.name(), &format!("{}{}", case.name, source.suffix()), &outcome);
        }
    }
    say(&format!("backward {}", tally.summary(name.name())));
    assert_eq!(tally.failed, 0, "cases failed on {name}");
    assert!(tally.passed > 0, "no case ran on {name}");
}

/// Where the case says so, or every reason is a documented limit or a known-bad runtime.
fn excused(executor: &dyn Executor, case: &Case) -> bool {
    if case.skip.contains_key(executor.name().name()) || !required(executor.name().name()) {
        return true;
    }
    let documented = |e: Unsupported| {
        e.reasons.iter().all(|reason| match reason {
            Reason::Limit { .. } | Reason::KnownBad { .. } => true,
            Reason::Refused { .. } | Reason::Absent(_) | Reason::Failed(_) => false,
        })
    };
    let problem = problem(case);
    // A chained case is skipped by either pass.
    let said = executor.supports_backward(&problem).and_then(|()| executor.supports(problem.forward()));
    said.is_err_and(documented)
}

/// Whether the executor has a backward pass at all; where it has none, that is one line.
fn has_backward(executor: &dyn Executor) -> bool {
    let absent = |e: &Unsupported| e.reasons.iter().all(|reason| matches!(reason, Reason::Absent(_)));
    match executor.supports_backward(&problem(&cases()[0])) {
        Err(e) if absent(&e) => {
            skip(executor.name().name(), &format!("all {} backward cases: {e}", cases().len()));
            false
        }
        Ok(()) | Err(_) => true,
    }
}

#[test]
fn cpu_runs_every_case() {
    let cpu = CpuExecutor::default();
    run_all(&cpu, |case| case.skip.contains_key(cpu.name().name()));
}

#[test]
fn cudnn_runs_every_case() {
    match CudnnExecutor::new(CudnnOptions::default()) {
        Ok(cudnn) if has_backward(&cudnn) => run_all(&cudnn, |case| excused(&cudnn, case)),
        Ok(_) => {}
        Err(e) => skip("cudnn", &format!("all {} backward cases: {e}", cases().len())),
    }
}

#[test]
fn metal_runs_every_case() {
    let metal = MetalExecutor::new();
    if has_backward(&metal) {
        run_all(&metal, |case| excused(&metal, case));
    }
}
