//! Host time of a call that hits, next to a bare loop over `cudnnBackendExecute` in the same process, in turns.
#![allow(unsafe_code)]

mod rows;

use crate::setup::{Result, Tensors, bare_pack, executor, problems};
use sdpa::cudnn::{PlanOptions, Replay};
use std::sync::Arc;
use std::time::Instant;

const BATCH: usize = 50;
const ROUNDS: usize = 1500;

/// The least time of a call, in microseconds, over batches with no synchronisation inside.
fn least(best: &mut f64, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    for _ in 0..BATCH {
        call()?;
    }
    *best = best.min(start.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
    Ok(())
}

pub(crate) fn run() -> Result<()> {
    let executor = executor(PlanOptions::default())?;
    // The bare calls need it; and a thread that calls often has it.
    executor.device().make_current()?;
    let stream = Arc::new(executor.device().stream()?);
    // The smallest kernel, so that the queue never fills.
    let (name, spec) = problems().swap_remove(2);
    let problem = spec.validate()?;
    let (planned, _) = executor.attention(&problem)?;
    let tensors = Tensors::new(&stream, &spec, planned.workspace_bytes(), 1)?;
    let others = Tensors::new(&stream, &spec, planned.workspace_bytes(), 2)?;
    let mut many = Vec::new();
    for seed in 0..16 {
        many.push(Tensors::new(&stream, &spec, planned.workspace_bytes(), seed)?);
    }
    let call = tensors.call(None);
    let handle = executor.library().handle(&stream)?;
    let mut pack = bare_pack(&planned, &tensors)?;
    let kept = call.workspace(None);
    let other = others.call(None).workspace(None);
    let mut replay = Replay::new(planned.clone(), stream.clone())?;
    let bare_graph = {
        let aside = executor.device().stream()?;
        let handle = executor.library().handle(&aside)?;
        // SAFETY: as below.
        aside.capture(|| unsafe { pack.execute(&handle, planned.plan.descriptor()) })?
    };
    let mut best = [f64::INFINITY; 12];
    for round in 0..ROUNDS {
        // SAFETY: everything bound is a buffer of this device that outlives the synchronisation at the end of the round.
        least(&mut best[0], || Ok(unsafe { pack.execute(&handle, planned.plan.descriptor()) }?))?;
        stream.synchronize()?;
        // SAFETY: as above.
        least(&mut best[1], || Ok(unsafe { planned.forward(&handle, &call) }?))?;
        stream.synchronize()?;
        least(&mut best[2], || {
            let (planned, _) = executor.attention(&problem)?;
            let handle = executor.library().handle(&stream)?;
            // SAFETY: as above.
            Ok(unsafe { planned.forward(&handle, &call) }?)
        })?;
        stream.synchronize()?;
        let mut turn = 0;
        least(&mut best[3], || {
            turn += 1;
            let tensors: &Tensors = if turn % 2 == 0 { &tensors } else { &others };
            // SAFETY: as above.
            Ok(unsafe { planned.forward(&handle, &tensors.call(None)) }?)
        })?;
        stream.synchronize()?;
        least(&mut best[4], || {
            turn += 1;
            // SAFETY: as above.
            Ok(unsafe { planned.forward(&handle, &many[turn % many.len()].call(None)) }?)
        })?;
        stream.synchronize()?;
        // SAFETY: as above.
        least(&mut best[5], || Ok(unsafe { executor.sdpa(&stream, &spec, &kept) }?))?;
        stream.synchronize()?;
        least(&mut best[6], || {
            turn += 1;
            // SAFETY: as above.
            Ok(unsafe { executor.sdpa(&stream, &spec, if turn % 2 == 0 { &kept } else { &other }) }?)
        })?;
        stream.synchronize()?;
        // SAFETY: as above.
        least(&mut best[7], || Ok(unsafe { replay.forward(&kept) }?))?;
        stream.synchronize()?;
        // SAFETY: as above.
        least(&mut best[11], || Ok(unsafe { bare_graph.launch(&stream) }?))?;
        stream.synchronize()?;
        if round < 20 {
            least(&mut best[8], || {
                turn += 1;
                // SAFETY: as above.
                Ok(unsafe { replay.forward(if turn % 2 == 0 { &kept } else { &other }) }?)
            })?;
            stream.synchronize()?;
        }
        least(&mut best[9], || {
            std::hint::black_box(executor.attention(std::hint::black_box(&problem))?);
            Ok(())
        })?;
        least(&mut best[10], || {
            std::hint::black_box(spec.validate()?);
            Ok(())
        })?;
    }
    println!("a captured call: {} nodes; the bare one: {}", replay.captured_nodes().unwrap_or(0), bare_graph.nodes());
    println!("{name}, microseconds per call, least of {ROUNDS} batches of {BATCH}:");
    let rows = [
        "bare cudnnBackendExecute, one pack",
        "plan in hand, addresses repeat",
        "looked up in the cache, handle from the pool, addresses repeat",
        "plan in hand, two sets of addresses in turn",
        "plan in hand, sixteen sets of addresses in turn",
        "functional: specification, kept workspace, addresses repeat",
        "functional, two sets of addresses in turn",
        "replay of a captured call",
        "replay, two sets of addresses in turn: captured each time",
        "lookup alone",
        "validating the specification alone",
        "bare cuGraphLaunch of the same kernel",
    ];
    for (row, us) in rows.into_iter().zip(best) {
        println!("    {us:8.3}  {:+.3}  {row}", us - best[0]);
    }
    rows::run(&executor, &stream, &spec)
}
