//! Both passes of 8-bit floats beside bf16's, call by call in turns.
#![allow(unsafe_code)]

use crate::memory::Memory;
use crate::setup::{Result, executor, fp8_row, median};
use cudnn_graph::{Handle, Policy, Stream, Target};
use sdpa::cudnn::lower::{Form, Job};
use sdpa::cudnn::plan::ask;
use sdpa::cudnn::{CudnnExecutor, PlanOptions, Planned};
use sdpa::{AttentionSpec, DType, Mask};
use std::sync::Arc;

const WARM: usize = 5;
const RUNS: usize = 20;

/// One that takes turns.
struct Ready {
    name: String,
    planned: Arc<Planned>,
    memory: Memory,
    flops: f64,
    times: Vec<f64>,
}

pub(crate) fn turns() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    let stream = executor.device().stream()?;
    let handle = executor.library().handle(&stream)?;
    for (batch, seq) in [(4, 4096), (1, 16384)] {
        for masks in [&[][..], &[Mask::causal()]] {
            for backward in [false, true] {
                let mut all = Vec::new();
                for dtype in [DType::BF16, DType::F8E4M3] {
                    let (name, spec) = fp8_row(batch, 16, seq, masks, dtype);
                    let name = format!("{} {name}", if backward { "backward" } else { "forward" });
                    match ready(&executor, &stream, &handle, name.clone(), &spec.with_stats(), backward) {
                        Ok(one) => all.push(one),
                        Err(e) => println!("# {name}: {e}"),
                    }
                }
                take(&mut all, &stream, &handle)?;
                let ms: Vec<f64> = all.iter().map(|one| median(one.times.clone())).collect();
                for (one, ms) in all.iter().zip(&ms) {
                    let engine = one.planned.plan.engine().map(|c| c.tag()).unwrap_or_default();
                    println!("{}: {ms:.4} ms, {:.1} TFLOP/s, {engine}", one.name, one.flops / ms / 1e9);
                }
                if let [wide, narrow] = ms[..] {
                    println!("    {:.2} times as fast", wide / narrow);
                }
            }
        }
    }
    Ok(())
}

fn ready(executor: &CudnnExecutor, stream: &Stream, handle: &Handle, name: String, spec: &AttentionSpec, backward: bool) -> Result<Ready> {
    let (job, flops, taken) = if backward {
        let problem = spec.clone().backward().validate()?;
        (Job::from(problem.clone()), problem.flops(), executor.attention_backward(&problem))
    } else {
        let problem = spec.validate()?;
        (Job::from(problem.clone()), problem.flops(), executor.attention(&problem))
    };
    let planned = match taken {
        Ok((planned, _)) => planned,
        Err(why) => {
            println!("# {name}: {}; timed all the same", why.to_string().replace('\n', "; "));
            let target = Target::Handle(handle);
            let (lowered, planner) = ask(executor.library(), &target, &job, Form::Composite, &Policy::default())?;
            let plan = planner.nth(0, &target)?;
            Arc::new(Planned::of(executor.library(), &target, &job, (lowered, plan.into()))?)
        }
    };
    let mut memory = Memory::new(stream, &planned, planned.workspace_bytes())?;
    if backward {
        memory.forward_first(executor, stream, spec)?;
    }
    Ok(Ready { name, planned, memory, flops, times: Vec::new() })
}

fn take(all: &mut [Ready], stream: &Stream, handle: &Handle) -> Result<()> {
    for round in 0..WARM + RUNS {
        for turn in 0..all.len() {
            let n = (turn + round) % all.len();
            let start = stream.record(true)?;
            // SAFETY: the memory is whole buffers of this device that outlive the loop; the stream is waited for below.
            unsafe { all[n].memory.submit(&all[n].planned, handle) }?;
            let end = stream.record(true)?;
            end.synchronize()?;
            if round >= WARM {
                all[n].times.push(f64::from(end.since(&start)?));
            }
        }
    }
    Ok(())
}
