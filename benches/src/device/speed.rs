//! Device time of the chosen plan next to every configuration that cuDNN offers, in both forms, in turns.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, executor, fp8_problems, median, problems, short_problems};
use cudnn_graph::{Policy, Target};
use sdpa::AttentionSpec;
use sdpa::cudnn::lower::{self, Form, Job};
use sdpa::cudnn::plan::ask;
use sdpa::cudnn::{PlanOptions, Planned};

const WARM: usize = 5;
const RUNS: usize = 20;

/// The speed table, forward.
pub(crate) fn run() -> Result<()> {
    measure(problems(), false)
}

/// The speed table, backward.
pub(crate) fn backward() -> Result<()> {
    measure(problems().into_iter().map(|(name, spec)| (name, spec.with_stats())).collect(), true)
}

/// Short prompts, where another engine may be the better one.
pub(crate) fn short() -> Result<()> {
    measure(short_problems(), false)
}

/// 8-bit floats, with bf16 beside them.
pub(crate) fn fp8() -> Result<()> {
    measure(fp8_problems(), false)
}

fn measure(problems: Vec<(String, AttentionSpec)>, backward: bool) -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = executor.device().stream()?;
    let handle = executor.library().handle(&stream)?;
    let target = Target::Handle(&handle);
    for (name, spec) in problems {
        let (job, chosen, flops) = if backward {
            let problem = spec.backward().validate()?;
            (Job::from(problem.clone()), executor.attention_backward(&problem)?.0, problem.flops())
        } else {
            let problem = spec.validate()?;
            (Job::from(problem.clone()), executor.attention(&problem)?.0, problem.flops())
        };
        let mut rivals: Vec<(String, Planned)> = Vec::new();
        for form in [Form::Composite, Form::Unified] {
            if !lower::forms(&job, executor.library().version()).contains(&form) {
                continue;
            }
            let Ok((lowered, planner)) = ask(executor.library(), &target, &job, form, &Policy::default()) else { continue };
            for (n, candidate) in planner.report().candidates.iter().enumerate() {
                match planner.nth(n, &target) {
                    Ok(plan) => rivals.push((
                        format!("{form} {} {:?}", candidate.tag(), candidate.source),
                        Planned::of(executor.library(), &target, &job, (lowered.clone(), plan.into()))?,
                    )),
                    Err(e) => println!("# {name}: {form} {} was offered and refused: {e}", candidate.tag()),
                }
            }
        }
        let workspace = rivals.iter().map(|(_, p)| p.workspace_bytes()).chain([chosen.workspace_bytes()]).max().unwrap_or(0);
        let mut call = Memory::new(&stream, &chosen, workspace)?;
        if backward {
            call.forward_first(&executor, &stream, &spec)?;
        }
        let label = format!("{} {}", chosen.lowered.form, chosen.plan.engine().map(|c| c.tag()).unwrap_or_default());
        let mut all: Vec<(&str, &Planned)> = vec![("chosen", &chosen)];
        all.extend(rivals.iter().map(|(n, p)| (n.as_str(), p)));
        let mut times = vec![Vec::new(); all.len()];
        for round in 0..WARM + RUNS {
            // A plan's neighbour in time leaves the cache and the clock as it likes them: take turns at that, too.
            for turn in 0..all.len() {
                let n = (turn + round) % all.len();
                let (planned, times) = (all[n].1, &mut times[n]);
                let start = stream.record(true)?;
                // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
                unsafe { call.submit(planned, &handle) }?;
                let end = stream.record(true)?;
                end.synchronize()?;
                if round >= WARM {
                    times.push(f64::from(end.since(&start)?));
                }
            }
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        let best = medians[1..].iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "{name}: chosen {label} {:.4} ms, {:.1} TFLOP/s, {:.3} of the best of {}",
            medians[0],
            flops / medians[0] / 1e9,
            medians[0] / best,
            rivals.len()
        );
        for ((name, _), ms) in all.iter().zip(&medians).skip(1) {
            println!("    {name}: {ms:.4} ms");
        }
    }
    Ok(())
}
