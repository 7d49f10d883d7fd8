//! Random score_mods by their seeds, in one form: what to run under a sanitizer when the suite says that a seed fails.

use crate::setup::{Result, executor};
use conformance::runner::{self, Outcome, Tally};
use sdpa::DType;
use sdpa::cudnn::PlanOptions;
use sdpa::cudnn::lower::Form;

/// `count` seeds from this one, in the better form if none is named.
pub(crate) fn run(first: u64, count: u64, form: Option<&str>) -> Result<()> {
    let form = match form {
        None => None,
        Some("composite") => Some(Form::Composite),
        Some("unified") => Some(Form::Unified),
        Some(other) => return Err(format!("a form is composite or unified, not {other}").into()),
    };
    let executor = executor(PlanOptions { form, ..PlanOptions::default() })?;
    let label = form.map_or("cudnn", Form::name);
    let (mut forward, mut backward) = (Tally::default(), Tally::default());
    for seed in first..first + count {
        let tree = runner::run_tree(seed, &[DType::BF16, DType::F16], &executor)?;
        if count == 1 || matches!(tree.forward, Outcome::Fail(_)) || matches!(tree.backward, Outcome::Fail(_)) {
            println!("{}", tree.text);
        }
        forward.add(label, &format!("tree {seed}"), &tree.forward);
        backward.add(label, &format!("tree backward {seed}"), &tree.backward);
    }
    println!("{}\n{}", forward.summary(&format!("{label}, forward")), backward.summary(&format!("{label}, backward")));
    let failed = forward.failed + backward.failed;
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
