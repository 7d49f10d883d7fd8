//! Timing: passes that were made ready for one problem, by whomever, run in turns over the same memory.
#![allow(unsafe_code)]

mod memory;
mod results;

pub use memory::{Memory, Results};

use crate::job::Job;
use sdpa_core::device::DevicePrepared;
use sdpa_driver::{DeviceSlice, Stream};
use std::time::Duration;

/// Rounds in which every contender runs once; the first of all is not counted.
const ROUNDS: usize = 7;
/// An executor that takes this many times as long as the fastest one drops out of the next round.
const HOPELESS: f32 = 1.5;

/// A pass that takes part.
#[derive(Clone, Copy, Debug)]
pub struct Contender<'a> {
    /// For logs.
    pub name: &'a str,
    /// The pass to time.
    pub ready: &'a dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>,
}

/// Why nothing was timed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RaceError {
    /// The environment: out of memory for the operands above all.
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// A contender does not run.
    #[error(transparent)]
    Pass(#[from] sdpa_core::Error),
}

/// The least time of each contender, a whole pass each: on random numbers, lengths as long as they may be, pages one behind the other. `None` for one whose
/// results are not close to those of the first, which is the one to be trusted.
///
/// # Errors
/// The environment's, and whatever a contender's call says.
pub fn race(stream: &Stream, job: &Job, contenders: &[Contender<'_>]) -> Result<Vec<Option<Duration>>, RaceError> {
    let workspace = contenders.iter().map(|c| c.ready.workspace_bytes()).max().unwrap_or(0);
    let mut memory = Memory::new(stream, job, workspace)?;
    let mut want = None;
    let mut right = Vec::new();
    for contender in contenders {
        memory.poison()?;
        contender.run(stream, &memory)?;
        let results = memory.read()?;
        let close = want.as_ref().is_none_or(|want| results::close(want, &results));
        want.get_or_insert(results);
        if !close {
            tracing::warn!(contender = contender.name, "computes something else than the one that is used without timing");
        }
        right.push(close);
    }
    let mut least = vec![f32::INFINITY; contenders.len()];
    for round in 0..=ROUNDS {
        let best = least.iter().copied().fold(f32::INFINITY, f32::min);
        for (n, contender) in contenders.iter().enumerate().filter(|(n, _)| right[*n]) {
            if round > 1 && least[n] > best * HOPELESS {
                continue;
            }
            let ms = contender.run(stream, &memory)?;
            if round > 0 {
                least[n] = least[n].min(ms);
            }
        }
    }
    let times = least.into_iter().zip(contenders).map(|(ms, contender)| {
        let time = ms.is_finite().then(|| Duration::from_secs_f32(ms / 1e3));
        tracing::debug!(contender = contender.name, ?time, "timed");
        time
    });
    Ok(times.collect())
}

impl Contender<'_> {
    /// Runs the whole pass once; the time that it took, in milliseconds.
    fn run(&self, stream: &Stream, memory: &Memory<'_>) -> Result<f32, RaceError> {
        let start = stream.record(true)?;
        // SAFETY: the memory is this device's, as large as it says, outlives the wait below, and nobody else has it.
        let submitted = memory.call(|call| unsafe { self.ready.submit(stream, call) });
        let end = stream.record(true)?;
        end.synchronize()?;
        submitted?;
        Ok(end.since(&start)?)
    }
}
