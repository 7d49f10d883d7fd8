//! What is near and far in one step: problems that are made and not written down, numbers that only a closer look than a tolerance tells
//! apart, operands that nobody should read. On executors to which a problem costs little; the kernels of Metal are in `msl`.

use conformance::case::Case;
use conformance::runner::{Drops, Source, Tally, dropped, rounding, run_backward_case, run_case};
use conformance::say::{say, skip};
use sdpa::Executor;
use sdpa::cpu::CpuExecutor;
use sdpa::metal::MetalExecutor;

/// Longer than a block of keys or queries of any executor here.
const BLOCK: i64 = 33;

fn run_all(executor: &dyn Executor) {
    let name = executor.name();
    let mut tally = Tally::default();
    let unexcused = || false;
    for case in [Case::edges(BLOCK), Case::axes(), Case::scales()].into_iter().flat_map(Result::unwrap) {
        let outcome = run_case(&case, executor).skip_only_if(unexcused, || case.repro(name));
        tally.add(name.name(), &case.name, &outcome);
        let outcome = run_backward_case(&case, Source::Oracle, executor).skip_only_if(unexcused, || case.backward_repro(name));
        tally.add(name.name(), &format!("{}, backward", case.name), &outcome);
    }
    say(&format!("sweeps {}", tally.summary(name.name())));
    assert_eq!(tally.failed, 0, "cases failed on {name}");
    assert!(tally.passed > 300, "only {} cases ran on {name}", tally.passed);
}

fn metal() -> Option<MetalExecutor> {
    let metal = MetalExecutor::new();
    let problem = Case::scales().unwrap()[0].spec().unwrap().validate().unwrap();
    metal.supports(&problem).map_err(|e| skip("metal", &format!("sweeps: {e}"))).ok().map(|()| metal)
}

#[test]
fn cpu_meets_every_edge() {
    run_all(&CpuExecutor::default());
}

#[test]
fn metal_meets_every_edge() {
    metal().iter().for_each(|metal| run_all(metal));
}

#[test]
fn cpu_rounds_to_the_nearest() {
    rounding(&CpuExecutor::default()).unwrap();
}

#[test]
fn metal_rounds_to_the_nearest() {
    metal().iter().for_each(|metal| rounding(metal).unwrap());
}

#[test]
fn cpu_takes_anything_where_it_is_dropped() {
    for drops in [Drops::Mask, Drops::Blocks, Drops::One, Drops::Wide] {
        dropped(drops, &CpuExecutor::default()).unwrap();
    }
}

#[test]
fn metal_takes_anything_where_it_is_dropped() {
    metal().iter().for_each(|metal| Drops::ALL.into_iter().for_each(|drops| dropped(drops, metal).unwrap()));
}
