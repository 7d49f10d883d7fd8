//! The texts that kernels of our own are compiled from.

use crate::exit::{Answer, Failure, Line, Outcome};
use cudnn_graph::DeviceProfile;
use sdpa::ExecutorName;
use sdpa::cuda::{EntryPoint, Target};
use sdpa::cuda::kernel::KernelKey;
use sdpa::cudnn::lower::Job;
use serde::Serialize;
use std::io::Write;

/// The device where none is named.
const USUAL: &str = "h200";

#[derive(Serialize)]
struct Entry {
    name: String,
    shared_bytes: u32,
}

#[derive(Serialize)]
struct Text {
    cut: String,
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
            cut: key.cut,
            architecture: key.architecture,
            entries: key.entries.into_iter().map(entry).collect(),
            source: key.source.to_string(),
        }
    }

    fn text(&self) -> String {
        let entries = self.entries.iter().map(|entry| format!("// {}, {} bytes of shared memory\n", entry.name, entry.shared_bytes));
        format!("// {}, {}\n{}{}", self.cut, self.architecture, entries.collect::<String>(), self.source)
    }
}

/// Runs the stage.
pub(super) fn run(job: &Job, profile: Option<&DeviceProfile>, json: bool) -> Result<Answer, Failure> {
    let refused = |message: String| Failure::Executor(vec![Line::new(ExecutorName::CUDA, message)]);
    let usual = || DeviceProfile::named(USUAL).map_err(|e| refused(e.to_string()));
    let profile = profile.map_or_else(usual, |profile| Ok(profile.clone()))?;
    let kernels = Target::new(profile.sm(), profile.sm_count()).kernels(job);
    let kernels: Vec<Text> = kernels
        .map_err(|why| Failure::Executor(why.reasons.iter().map(|reason| Line::new(ExecutorName::CUDA, reason)).collect()))?
        .into_iter()
        .map(Text::new)
        .collect();
    if !json {
        writeln!(std::io::stderr(), "note: {} kernel text(s) for {}", kernels.len(), profile.name()).ok();
    }
    let stage = KernelStage { stage: "kernel", pass: job.name(), device: profile.name().to_owned(), kernels };
    Answer::new(json, &stage, || stage.kernels.iter().map(Text::text).collect::<Vec<_>>().join("\n"), Outcome::Good)
}
