//! The last stage of `inspect`: a cuDNN plan, for a device or a device profile.

use crate::args::PlaceArgs;
use crate::exit::{Failure, Line};
use crate::memory;
use crate::progress::Progress;
use crate::stand_in;
use crate::table::{Table, list};
use cudnn_graph::{Candidate, DeviceProfile, Library, Outcome, Source, Target};
use sdpa::cudnn::lower::{Form, Job};
use sdpa::cudnn::{CudnnExecutor, PlanOptions, Planned, plan};
use sdpa::{Error, ExecutorName};
use serde::Serialize;
use std::sync::Arc;

/// An offered engine, and its tag in NVIDIA's tools.
#[derive(Serialize)]
struct Offer {
    tag: String,
    #[serde(flatten)]
    candidate: Candidate,
}

/// A heuristics list that cuDNN failed to return.
#[derive(Serialize)]
struct Refused {
    list: Source,
    text: String,
}

/// The report of `inspect` on a cuDNN plan.
#[derive(Serialize)]
pub(crate) struct PlanReport {
    stage: &'static str,
    library: String,
    version: String,
    device: String,
    sm: u32,
    pass: &'static str,
    form: Form,
    engine: String,
    workspace_bytes: u64,
    copied: Vec<&'static str>,
    offers: Vec<Offer>,
    lists_refused: Vec<Refused>,
    /// cuDNN's own JSON; `None` if the engine does not support it.
    plan: Option<serde_json::Value>,
    /// The reason why there is none.
    plan_refused: Option<String>,
}

fn failure(error: &Error) -> Failure {
    if let Error::Unsupported(unsupported) = error {
        return Failure::Executor(unsupported.reasons.iter().map(|r| Line::new(unsupported.executor, r)).collect());
    }
    Failure::Executor(vec![Line::new("cudnn", error)])
}

/// Builds the cuDNN plan of a pass, and reports on it.
pub(crate) fn make(
    job: &Job,
    form: Option<Form>,
    profile: Option<&DeviceProfile>,
    places: &PlaceArgs,
    progress: Progress,
) -> Result<PlanReport, Failure> {
    let _step = progress.spinner("asking cuDNN");
    let mut options = places.options();
    options.plan = PlanOptions::default().with_form(form);
    let environment = |e: cudnn_graph::Error| failure(&Error::failed(ExecutorName::CUDNN, e));
    if let Some(profile) = profile {
        let library = stand_in::load(&options.search).map_err(environment)?;
        let planned = plan::build(library, &Target::Profile(profile), job, &options.plan).map_err(|e| failure(&e.into()))?;
        return Ok(tell(library, (profile.name(), profile.sm()), job, &planned));
    }
    let executor = CudnnExecutor::new(options).map_err(environment)?;
    let (planned, _): (Arc<Planned>, bool) = match job {
        Job::Forward(problem) => executor.attention(problem),
        Job::Backward(problem) => executor.attention_backward(problem),
    }
    .map_err(|e| failure(&e.into()))?;
    Ok(tell(executor.library(), (executor.device().name(), executor.device().sm()), job, &planned))
}

fn tell(library: &Library, (device, sm): (&str, u32), job: &Job, planned: &Planned) -> PlanReport {
    let report = planned.plan.report();
    let json = planned.plan.to_json().map_err(|e| e.to_string());
    let json = json.and_then(|text| serde_json::from_str(&text).map_err(|e| format!("is not JSON: {e}")));
    let (plan, plan_refused) = match json {
        Ok(value) => (Some(value), None),
        Err(e) => (None, Some(e)),
    };
    PlanReport {
        stage: "plan",
        library: library.path().display().to_string(),
        version: library.version().to_string(),
        device: device.to_owned(),
        sm,
        pass: job.name(),
        form: planned.lowered.form,
        engine: planned.engine.clone(),
        workspace_bytes: planned.workspace_bytes(),
        copied: planned.copied(),
        offers: report.candidates.iter().map(|c| Offer { tag: c.tag(), candidate: c.clone() }).collect(),
        lists_refused: report.lists_refused.iter().map(|(list, text)| Refused { list: *list, text: text.clone() }).collect(),
        plan,
        plan_refused,
    }
}

impl Offer {
    fn text(&self) -> String {
        let Candidate { source, workspace, shared_memory, numerical_notes, behavior_notes, outcome, engine: _, knobs: _ } = &self.candidate;
        let became = match outcome {
            Outcome::NotTried => "not tried".to_owned(),
            Outcome::Chosen => "chosen".to_owned(),
            Outcome::PassedOver(why) => format!("passed over: {why}"),
            Outcome::Refused { status, text } => format!("refused: {status}, {}", text.replace('\n', "; ")),
            Outcome::Failed { status, text } => format!("failed: {status}, {}", text.replace('\n', "; ")),
        };
        let mut text = format!("{} ({source:?}): {became}", self.tag);
        if let Some(bytes) = workspace {
            text.push_str(&format!("\n  workspace {}", memory::human(u128::from(*bytes))));
        }
        if let Some(bytes) = shared_memory {
            text.push_str(&format!("\n  shared memory {bytes} bytes"));
        }
        let notes: Vec<String> =
            numerical_notes.iter().map(ToString::to_string).chain(behavior_notes.iter().map(ToString::to_string)).collect();
        text.push_str(&format!("\n  notes {}", list(&notes)));
        text
    }
}

impl PlanReport {
    /// Returns the report as text, without cuDNN's JSON.
    pub(crate) fn text(&self) -> String {
        let mut table = Table::default();
        table.row("library", format!("cuDNN {}, {}", self.version, self.library));
        table.row("device", format!("{}, sm {}", self.device, self.sm));
        table.row("pass", self.pass);
        table.row("form", self.form.name());
        table.row("engine", self.engine.clone());
        table.row("workspace", memory::human(u128::from(self.workspace_bytes)));
        table.row("copied", list(&self.copied));
        table.rows("offers", self.offers.iter().map(Offer::text));
        table.rows("refused", self.lists_refused.iter().map(|r| format!("list {:?}: {}", r.list, r.text)));
        table.rows("no JSON", self.plan_refused.iter().cloned());
        table.render()
    }
}
