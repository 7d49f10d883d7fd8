//! Timing: passes that were prepared for one problem, by any executors, run in turns over the same memory.
#![allow(unsafe_code)]

mod memory;
mod results;

pub use memory::{Memory, Results};

use crate::job::Job;
use sdpa_core::device::DevicePrepared;
use sdpa_driver::{DeviceSlice, Stream};
use std::time::Duration;

/// Rounds in which every contender runs once. The very first run does not count.
const ROUNDS: usize = 7;
/// A contender that takes this many times as long as the fastest drops out of the next round.
const HOPELESS: f32 = 1.5;

/// A prepared pass that [`race`] times against others.
#[derive(Clone, Copy, Debug)]
pub struct Contender<'a> {
    /// The name of the executor or configuration, for logs.
    pub name: &'a str,
    /// The pass to time.
    pub ready: &'a dyn DevicePrepared<Memory = DeviceSlice, Stream = Stream>,
}

/// The reason why [`race`] timed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RaceError {
    /// The environment failed, typically because there was not enough memory for the operands.
    #[error(transparent)]
    Driver(#[from] sdpa_driver::Error),
    /// A call of a contender failed.
    #[error(transparent)]
    Pass(#[from] sdpa_core::Error),
}

/// Times prepared passes of one problem against each other, on random numbers, the longest lengths and consecutive pages. Returns the
/// shortest time of a whole pass for each contender. The first contender is the reference; `None` stands for a contender whose results
/// are not close to those of the reference.
///
/// # Errors
/// Returns a failure of the environment, or the error of a contender's call.
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
            tracing::warn!(contender = contender.name, "not timed: its results differ from those of the default contender");
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
    /// Runs the whole pass once and returns its time in milliseconds.
    fn run(&self, stream: &Stream, memory: &Memory<'_>) -> Result<f32, RaceError> {
        let start = stream.record(true)?;
        // SAFETY: the memory is on this device with the stated size, outlives the wait below, and nothing else uses it.
        let submitted = memory.call(|call| unsafe { self.ready.submit(stream, call) });
        let end = stream.record(true)?;
        end.synchronize()?;
        submitted?;
        Ok(end.since(&start)?)
    }
}
