//! Every case, and random specifications, against the oracle.

use crate::setup::{Result, executor};
use conformance::runner::{self, Draw, Outcome, Source, Tally};
use conformance::{Case, random::Random};
use sdpa::DType;
use sdpa::cudnn::lower::Form;
use sdpa::cudnn::{CudnnExecutor, PlanOptions};

pub(crate) fn run(random: u64) -> Result<()> {
    let first = executor(PlanOptions::default())?;
    let mut failed = 0;
    let mut forms = vec![None];
    if first.library().version() >= sdpa::cudnn::lower::UNIFIED_PLAIN_SINCE {
        forms.push(Some(Form::Unified));
    }
    for form in forms {
        let executor = executor(PlanOptions { form, ..PlanOptions::default() })?;
        let label = form.map_or("cudnn", Form::name);
        let mut cases = Tally::default();
        for case in Case::all()? {
            cases.add(label, &case.name, &runner::run_case(&case, &executor));
        }
        let mut others = Tally::default();
        for seed in 0..random {
            let mut stream = Random::new(seed * 7919 + 13);
            let spec = runner::random_spec(&mut stream, &[DType::BF16, DType::F16]);
            let outcome = runner::run(&spec, None, 1.0, seed, &executor);
            if matches!(outcome, Outcome::Fail(_)) {
                println!("{spec:?}");
            }
            others.add(label, &format!("random {seed}"), &outcome);
        }
        println!("{}", cases.summary(&format!("{label}, cases")));
        println!("{}", others.summary(&format!("{label}, random")));
        failed += cases.failed + others.failed;
        let [cases, others] = runner::backward_suite(label, random, &executor)?;
        println!("{}", cases.summary(&format!("{label}, backward cases")));
        println!("{}", others.summary(&format!("{label}, backward random")));
        failed += cases.failed + others.failed;
        if form.is_none() {
            failed += packed(label, random, &executor)?;
        }
        failed += score_mods(label, random, &executor)?;
        println!("{label}, cache: {:?}", executor.cache_stats());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}

/// Packed documents alone.
pub(crate) fn documents(random: u64) -> Result<()> {
    match packed("cudnn", random, &executor(PlanOptions::default())?)? {
        0 => Ok(()),
        failed => Err(format!("{failed} failed").into()),
    }
}

/// Packed documents: every case, and random ones, both passes of each; how many failed.
fn packed(label: &str, random: u64, executor: &CudnnExecutor) -> Result<usize> {
    let (mut cases, mut others) = (Tally::default(), Tally::default());
    for case in Case::all_packed()? {
        cases.add(label, &case.name, &runner::run_case(&case, executor));
        for source in Source::ALL {
            let outcome = runner::run_backward_case(&case, source, executor);
            cases.add(label, &format!("{}{}, backward", case.name, source.suffix()), &outcome);
        }
    }
    let narrow = [DType::BF16, DType::F16];
    for seed in 0..random {
        let mut stream = Random::new(seed * 7919 + 29);
        let spec = runner::random_packed(&mut stream, &narrow);
        others.add(label, &format!("packed {seed}"), &runner::run(&spec, None, 1.0, seed, executor));
        let source = if seed % 2 == 0 { Source::Oracle } else { Source::Executor };
        let backward = runner::gradients_elsewhere(spec, &mut stream);
        let draw = Draw { attn_scale: None, spread: 1.0, shift: 0.0, seed };
        let outcome = runner::run_backward(&backward, &draw, source, executor);
        others.add(label, &format!("packed backward {seed}{}", source.suffix()), &outcome);
    }
    println!("{}", cases.summary(&format!("{label}, packed cases")));
    println!("{}", others.summary(&format!("{label}, packed random")));
    Ok(cases.failed + others.failed)
}

/// Score_mods and masks of the library, and random ones; how many failed.
fn score_mods(label: &str, random: u64, executor: &CudnnExecutor) -> Result<usize> {
    let [forward, backward] = runner::library_suite(label, executor)?;
    println!("{}", forward.summary(&format!("{label}, score_mods")));
    println!("{}", backward.summary(&format!("{label}, score_mods backward")));
    let (mut first, mut second) = (Tally::default(), Tally::default());
    for seed in 0..random {
        let tree = runner::run_tree(seed, &[DType::BF16, DType::F16], executor)?;
        if matches!(tree.forward, Outcome::Fail(_)) || matches!(tree.backward, Outcome::Fail(_)) {
            println!("{}", tree.text);
        }
        first.add(label, &format!("tree {seed}"), &tree.forward);
        second.add(label, &format!("tree backward {seed}"), &tree.backward);
    }
    println!("{}", first.summary(&format!("{label}, random score_mods")));
    println!("{}", second.summary(&format!("{label}, random score_mods backward")));
    Ok(forward.failed + backward.failed + first.failed + second.failed)
}
