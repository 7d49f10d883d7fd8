//! Every case, and random specifications, against the oracle.

use crate::setup::{Result, executor};
use conformance::runner::{self, Outcome, Tally};
use conformance::{Case, random::Random};
use sdpa::DType;
use sdpa::exec::cudnn::PlanOptions;
use sdpa::lower::Form;

pub(crate) fn run(random: u64) -> Result<()> {
    let first = executor(PlanOptions::default())?;
    let mut failed = 0;
    let mut forms = vec![None];
    if first.library().version() >= sdpa::lower::UNIFIED_PLAIN_SINCE {
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
        println!("{label}, cache: {:?}", executor.cache_stats());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
