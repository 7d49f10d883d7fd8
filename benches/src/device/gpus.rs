//! Several GPUs in one process: an executor for each, the same problems with the same inputs on all of them, from one thread that goes from
//! one to the next and from a thread each. Every device gives the same bits.
#![allow(unsafe_code)]

use crate::graphs::spec;
use crate::memory::Memory;
use crate::setup::Result;
use cudnn_graph::{Driver, Stream};
use sdpa::AttentionSpec;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, Replay};
use std::sync::Arc;

const ROUNDS: usize = 25;

fn specs() -> Result<Vec<AttentionSpec>> {
    Ok(vec![spec(300, &[], &["causal"])?, spec(129, &["softcap:30"], &["causal"])?, spec(129, &["alibi"], &["sliding-window:50"])?])
}

/// What one device works with.
struct Place {
    executor: CudnnExecutor,
    stream: Arc<Stream>,
    memories: Vec<Memory>,
    replays: Vec<Replay>,
}

impl Place {
    fn new(ordinal: u32, specs: &[AttentionSpec]) -> Result<Place> {
        let executor = CudnnExecutor::new(CudnnOptions::default().with_ordinal(ordinal))?;
        let stream = Arc::new(executor.device().stream()?);
        let (mut memories, mut replays) = (Vec::new(), Vec::new());
        for (n, spec) in specs.iter().enumerate() {
            let planned = executor.attention(&spec.validate()?)?.0;
            memories.push(Memory::seeded(&stream, &planned.job, planned.workspace_bytes(), n as u64)?);
            replays.push(Replay::new(planned, stream.clone())?);
        }
        Ok(Place { executor, stream, memories, replays })
    }

    /// One call of a problem, functional or replayed; what it gives.
    fn call(&mut self, n: usize, spec: &AttentionSpec, replayed: bool) -> Result<Vec<Vec<u8>>> {
        self.memories[n].poison(&self.stream)?;
        if replayed {
            // SAFETY: whole buffers of this device, which outlive the synchronisation behind the call.
            unsafe { self.memories[n].replay(&mut self.replays[n], None) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.memories[n].functional(&self.executor, &self.stream, spec) }?;
        }
        self.memories[n].results(&self.stream)
    }
}

pub(crate) fn run() -> Result<()> {
    let count = Driver::load(None)?.device_count()?;
    if count < 2 {
        return Err(format!("several GPUs are needed, and the driver sees {count}").into());
    }
    let specs = specs()?;
    let mut places = (0..count).map(|ordinal| Place::new(ordinal, &specs)).collect::<Result<Vec<_>>>()?;
    for place in &places {
        println!("{} on {}", place.executor.library().version(), place.executor.device().name());
    }
    let mut want = Vec::new();
    for (n, spec) in specs.iter().enumerate() {
        want.push(places[0].call(n, spec, false)?);
    }
    let mut calls = 0;
    for round in 0..ROUNDS {
        for (n, spec) in specs.iter().enumerate() {
            for (ordinal, place) in places.iter_mut().enumerate() {
                if place.call(n, spec, round % 2 == 1)? != want[n] {
                    return Err(format!("device {ordinal} gave something else from the thread of all, problem {n}").into());
                }
                calls += 1;
            }
        }
    }
    let alone: Vec<std::result::Result<usize, String>> = std::thread::scope(|scope| {
        let (specs, want) = (&specs, &want);
        let threads: Vec<_> = places
            .iter_mut()
            .enumerate()
            .map(|(ordinal, place)| {
                scope.spawn(move || {
                    let mut calls = 0;
                    for round in 0..ROUNDS {
                        for (n, spec) in specs.iter().enumerate() {
                            if place.call(n, spec, round % 2 == 1).map_err(|e| e.to_string())? != want[n] {
                                return Err(format!("device {ordinal} gave something else from its own thread, problem {n}"));
                            }
                            calls += 1;
                        }
                    }
                    Ok(calls)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    for outcome in alone {
        calls += outcome?;
    }
    println!("gpus: {calls} calls on {count} devices, functional and replayed, from one thread and from a thread each: the same bits");
    Ok(())
}
