//! What is near and far in one step: problems that are made and not written down, numbers that only a closer look than a tolerance tells
//! apart, operands that nobody should read. On executors to which a problem costs little; the kernels of Metal are in `msl`.

use conformance::case::Case;
use conformance::covering::Strength;
use conformance::random::Random;
use conformance::runner::{
    Draw, Drops, Edges, Source, Tally, dropped, random_fp8, random_fp8_gradients, rounding, run, run_backward, run_backward_case, run_case,
    run_covered, stays,
};
use conformance::say::say;
use conformance::share::of_today;
use sdpa::{Executor, ExecutorName};
use std::sync::Mutex;

/// Days until every problem of the three-way covering has been run.
const THREE_WAY_DAYS: u64 = 3;

/// Longer than a block of keys or queries of any executor here.
const BLOCK: i64 = 33;

pub(crate) fn edges(executor: &dyn Executor) {
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

pub(crate) fn covering(executor: &dyn Executor) {
    let name = executor.name();
    let tally = Mutex::new(Tally::default());
    let three =
        of_today(&format!("three-way covering {name}"), THREE_WAY_DAYS, Strength::Three.problems_for(executor).unwrap(), |_| Vec::new());
    Strength::Two
        .problems_for(executor)
        .unwrap()
        .iter()
        .chain(&three)
        .for_each(|problem| run_covered(problem, name.name(), executor, &tally));
    let tally = tally.into_inner().unwrap();
    say(&format!("covering {}", tally.summary(name.name())));
    assert_eq!(tally.failed, 0, "problems failed on {name}");
    assert!(name != ExecutorName::CPU || tally.skipped == 0, "{name} skipped problems");
}

pub(crate) fn rounds_to_the_nearest(executor: &dyn Executor) {
    rounding(executor).unwrap();
}

pub(crate) fn takes_anything_where_it_is_dropped(executor: &dyn Executor) {
    let cpu = [Drops::Mask, Drops::Blocks, Drops::One, Drops::Wide];
    let all: &[Drops] = if executor.name() == ExecutorName::CPU { &cpu } else { &Drops::ALL };
    all.iter().for_each(|drops| dropped(*drops, executor).unwrap());
}

pub(crate) fn edges_of_rules(executor: &dyn Executor) {
    let found: Vec<_> = (1..=36).map(|seed| Edges::drawn(seed).look(executor).unwrap_or_else(|e| panic!("{seed}: {e}"))).collect();
    assert!(found.iter().any(Option::is_some), "{} supports no rule", executor.name());
    let unsupported = found.iter().filter(|looked| looked.is_none()).count();
    say(&format!(
        "edges {}: {} weights of rules of floats, {unsupported} rules unsupported",
        executor.name(),
        found.iter().flatten().sum::<usize>()
    ));
}

pub(crate) fn drops_the_weights_that_the_generator_says(executor: &dyn Executor) {
    let compared = stays(executor).unwrap();
    say(&format!(
        "dropout {}: {} bits forward and {} backward, each as the generator says",
        executor.name(),
        compared.forward,
        compared.backward
    ));
    assert!(compared.forward > 500_000 && compared.backward > 500_000, "{compared:?}");
}

/// Random problems of 8-bit floats, both passes, alone and chained; forward, blocks have scales too.
pub(crate) fn narrow_numbers(executor: &dyn Executor) {
    let name = executor.name();
    let mut tally = Tally::default();
    for seed in 0..30 {
        let mut random = Random::new(seed * 7919 + 41);
        let spec = random_fp8(&mut random);
        tally.add(name.name(), &format!("8 bits {seed}"), &run(&spec, None, 1.0, seed, executor));
        let in_blocks = spec.clone().with_block_scales();
        tally.add(name.name(), &format!("8 bits in blocks {seed}"), &run(&in_blocks, None, 1.0, seed, executor));
        let source = Source::ALL[(seed % 2) as usize];
        let backward = random_fp8_gradients(spec, &mut random);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        tally.add(name.name(), &format!("8 bits {seed}, backward{}", source.suffix()), &run_backward(&backward, &draw, source, executor));
    }
    say(&format!("8-bit floats {}", tally.summary(name.name())));
    assert_eq!(tally.failed, 0, "problems failed on {name}");
}
