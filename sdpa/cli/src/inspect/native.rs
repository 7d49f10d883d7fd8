//! Native CUDA kernels: their sources, and the schedule of a pass.

use crate::exit::{Answer, Failure, Line, Outcome};
use cudnn_graph::DeviceProfile;
use sdpa::cuda::kernel::KernelKey;
use sdpa::cuda::{EntryPoint, ScheduleReport, Target};
use sdpa::cudnn::lower::Job;
use sdpa::{ExecutorName, Unsupported};
use serde::Serialize;
use std::io::Write;

/// The default device.
const USUAL: &str = "h200";

#[derive(Serialize)]
struct Entry {
    name: String,
    shared_bytes: u32,
}

#[derive(Serialize)]
struct Text {
    tile: String,
    architecture: String,
    entries: Vec<Entry>,
    source: String,
}

#[derive(Serialize)]
struct KernelStage {
    stage: &'static str,
    pass: &'static str,
    device: String,
    kernels: Vec<Text>,
}

impl Text {
    fn new(key: KernelKey) -> Text {
        let entry = |(point, shared_bytes): (EntryPoint, u32)| Entry { name: point.to_string(), shared_bytes };
        Text {
            tile: key.tile,
            architecture: key.architecture,
            entries: key.entries.into_iter().map(entry).collect(),
            source: key.source.to_string(),
        }
    }

    fn text(&self) -> String {
        let entries = self.entries.iter().map(|entry| format!("// {}, {} bytes of shared memory\n", entry.name, entry.shared_bytes));
        format!("// {}, {}\n{}{}", self.tile, self.architecture, entries.collect::<String>(), self.source)
    }
}

/// A schedule, and the device that it is for.
#[derive(Serialize)]
struct ScheduleStage {
    stage: &'static str,
    pass: &'static str,
    executor: &'static str,
    device: String,
    schedule: ScheduleReport,
}

/// Returns the device of a profile and a target for it; an H200 without a profile.
fn target(profile: Option<&DeviceProfile>) -> Result<(String, Target), Failure> {
    let usual = || DeviceProfile::named(USUAL).map_err(|e| Failure::Executor(vec![Line::new(ExecutorName::CUDA, e)]));
    let profile = profile.map_or_else(usual, |profile| Ok(profile.clone()))?;
    Ok((profile.name().to_owned(), Target::new(profile.sm(), profile.sm_count())))
}

fn unsupported(why: &Unsupported) -> Failure {
    Failure::Executor(why.reasons.iter().map(|reason| Line::new(ExecutorName::CUDA, reason)).collect())
}

/// Prints the kernel sources of a pass.
pub(super) fn kernels(job: &Job, profile: Option<&DeviceProfile>, json: bool) -> Result<Answer, Failure> {
    let (device, target) = target(profile)?;
    let kernels: Vec<Text> = target.kernels(job).map_err(|why| unsupported(&why))?.into_iter().map(Text::new).collect();
    if !json {
        writeln!(std::io::stderr(), "note: {} kernel text(s) for {device}", kernels.len()).ok();
    }
    let stage = KernelStage { stage: "kernel", pass: job.name(), device, kernels };
    Answer::new(json, &stage, || stage.kernels.iter().map(Text::text).collect::<Vec<_>>().join("\n"), Outcome::Good)
}

/// Prints the slots and steps of a pass.
pub(super) fn schedule(job: &Job, profile: Option<&DeviceProfile>, json: bool) -> Result<Answer, Failure> {
    let (device, target) = target(profile)?;
    let schedule = target.schedule(job).map_err(|why| unsupported(&why))?;
    if !json {
        writeln!(std::io::stderr(), "note: schedule of native CUDA kernels for {device}").ok();
    }
    let stage = ScheduleStage { stage: "schedule", pass: job.name(), executor: ExecutorName::CUDA.name(), device, schedule };
    Answer::new(json, &stage, || stage.schedule.to_string(), Outcome::Good)
}
