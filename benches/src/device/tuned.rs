//! Timed plans: every case of the library on an executor that keeps the fastest configuration, against the oracle; and how often that
//! is another than the one that is chosen without timing.

use crate::setup::{Result, problems};
use conformance::runner;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};

pub(crate) fn run() -> Result<()> {
    let timed = CudnnExecutor::new(CudnnOptions::default().with_tune(true))?;
    let usual = CudnnExecutor::new(CudnnOptions::default())?;
    println!("{}, cuDNN {}", timed.device().name(), timed.library().version());
    for (name, spec) in problems() {
        let problem = spec.validate()?;
        let (fastest, chosen) = (timed.attention(&problem)?.0, usual.attention(&problem)?.0);
        let label = |p: &sdpa::cudnn::Planned| format!("{} {}", p.lowered.form, p.plan.engine().map(|c| c.tag()).unwrap_or_default());
        println!("{name}: timed {} in {} ms, chosen {}", label(&fastest), fastest.time.tune.as_millis(), label(&chosen));
    }
    let [forward, backward] = runner::library_suite("timed", &timed)?;
    println!("{}", forward.summary("timed, forward"));
    println!("{}", backward.summary("timed, backward"));
    let [forward_cache, backward_cache] = [timed.forward_cache(), timed.backward_cache()];
    let (mut same, mut other) = (0, 0);
    for (job, planned) in forward_cache.values().into_iter().chain(backward_cache.values()) {
        let chosen = match &job {
            sdpa::cudnn::lower::Job::Forward(problem) => usual.attention(problem)?.0,
            sdpa::cudnn::lower::Job::Backward(problem) => usual.attention_backward(problem)?.0,
        };
        if chosen.plan.engine().map(|c| c.tag()) == planned.plan.engine().map(|c| c.tag()) && chosen.lowered.form == planned.lowered.form {
            same += 1;
        } else {
            other += 1;
        }
    }
    println!("{same} timed plans are those that are chosen without timing, {other} are others");
    if forward.failed + backward.failed == 0 { Ok(()) } else { Err("a timed plan is wrong".into()) }
}
