//! Plans that outlive a process: their key among equal devices, and their bytes.
//!
//! The key is a digest of everything that decides what is built: the programs of every spelling that would be asked for, what is
//! bound to them, strides that need copies, options, the runtime. The bytes are cuDNN's own JSON of each plan of a [`Planned`],
//! behind a line that says what they are of. A plan is taken only for the very graph that it was made of.

use super::guard;
use super::plan::{PlanOptions, Planned, PlannedConversion, PlannedCopy, PlannedSums, conversions, copy_graph, spellings};
use super::used::Used;
use crate::cache::BuildTime;
use crate::error::Error;
use crate::lower::{self, Form, Job, LowerError, Lowered, Spelling, Supply, Table};
use crate::planfile::{Digest, Header};
use cudnn_graph::encode::encode;
use cudnn_graph::{DeviceProfile, Library, Plan, Target, Verified, Version};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// Of the bytes. Rules of lowering show in the digest of what is lowered.
const VERSION: u32 = 2;

/// Why bytes are no plan for a pass.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The first line cannot be read.
    #[error("the first line cannot be read: {0}")]
    Head(String),
    /// Made by a newer or older release.
    #[error("version {found}, this reads {known}")]
    Version {
        /// What it says.
        found: u32,
        /// What this reads.
        known: u32,
    },
    /// The pass is lowered to another graph than the plan was made of.
    #[error("it was made of another graph: of another release, or for another pass")]
    Graph,
    /// Not as many plans, or not as long, as the first line says.
    #[error("{0}")]
    Plans(String),
    /// cuDNN's own, or the lowering's.
    #[error(transparent)]
    Other(#[from] Error),
}

impl From<cudnn_graph::Error> for PayloadError {
    fn from(error: cudnn_graph::Error) -> PayloadError {
        PayloadError::Other(error.into())
    }
}

impl From<LowerError> for PayloadError {
    fn from(error: LowerError) -> PayloadError {
        PayloadError::Plans(error.to_string())
    }
}

/// The first line.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    form: Form,
    spelling: Option<Spelling>,
    engine: String,
    lowered: Digest,
    /// Bytes of each plan: the attention's, copies, conversions, sums.
    plans: Vec<u64>,
}

/// What a plan file must say to be of use here.
pub fn header(library: &Library, profile: &DeviceProfile) -> Header {
    Header { cudnn: library.version().to_string(), profile: profile.to_string(), lowering: VERSION }
}

/// The name of the plans of a pass among all devices with the same kernels.
///
/// # Errors
/// A bug of the lowering, the environment's.
pub fn key(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Digest, Error> {
    let runtime = library.version();
    let (dense, copied) = lower::densify(job);
    let text = serde_json::to_string(options).map_err(|e| bug(&e.to_string()))?;
    let mut parts = Digest::parts().part(runtime.to_string().as_bytes()).part(text.as_bytes()).part(&[u8::from(job.deterministic())]);
    for operand in copied {
        // Both ends of a copy.
        parts = parts.part(format!("{operand} {:?} {:?}", job.tensor(operand), dense.tensor(operand)).as_bytes());
    }
    for form in lower::forms(&dense, runtime).iter().filter(|form| options.form.is_none_or(|only| only == **form)) {
        parts = parts.part(form.name().as_bytes());
        match spellings(library, target, &dense, *form, &options.policy) {
            Ok(all) => {
                for (lowered, policy) in all {
                    let policy = serde_json::to_string(&policy).map_err(|e| bug(&e.to_string()))?;
                    parts = parts.part(&digest(&lowered, runtime)?.0).part(policy.as_bytes());
                }
            }
            Err(refusal) => parts = parts.part(refusal.text()?.as_bytes()),
        }
    }
    Ok(parts.finish())
}

fn bug(text: &str) -> Error {
    Error::Backend(cudnn_graph::Error::PlanJson(text.to_owned()))
}

/// Of what cuDNN is sent, and of what is bound to it.
fn digest(lowered: &Lowered, runtime: Version) -> Result<Digest, Error> {
    let program = encode(&lowered.graph, runtime).map_err(cudnn_graph::Error::from)?;
    let program = serde_json::to_vec(&program).map_err(|e| bug(&e.to_string()))?;
    let mut parts = Digest::parts().part(&program).part(format!("{:?}", lowered.operands).as_bytes());
    for (id, supply) in &lowered.supplies {
        parts = parts.part(format!("{id:?}").as_bytes());
        parts = match supply {
            // Defaults of scalars are values of a call.
            Supply::Number(trace) => parts.part(b"number").part(trace.without_defaults().to_string().as_bytes()),
            Supply::Table(Table::F32(x)) => parts.part(b"f32").part(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
            Supply::Table(Table::I32(x)) => parts.part(b"i32").part(&x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
            Supply::Param(_)
            | Supply::Spread { .. }
            | Supply::Guarded(_)
            | Supply::Scratch
            | Supply::Gradient(_)
            | Supply::Terms { .. } => parts.part(format!("{supply:?}").as_bytes()),
        };
    }
    Ok(parts.finish())
}

impl Planned {
    /// Every plan in one piece of bytes, compiled kernels included.
    ///
    /// # Errors
    /// cuDNN's own: engines that were not compiled at run time have no JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let texts: Vec<String> = self.plans().map(|plan| plan.to_json()).collect::<Result<_, _>>()?;
        let head = Head {
            version: VERSION,
            form: self.lowered.form,
            spelling: self.lowered.spelling,
            engine: self.engine.clone(),
            lowered: digest(&self.lowered, self.plan.library().version())?,
            plans: texts.iter().map(|text| text.len() as u64).collect(),
        };
        let mut bytes = serde_json::to_vec(&head).map_err(|e| bug(&e.to_string()))?;
        bytes.push(b'\n');
        texts.iter().for_each(|text| bytes.extend_from_slice(text.as_bytes()));
        Ok(bytes)
    }

    /// The plans of a pass from their bytes. Tables are not in device memory yet: see [`Planned::upload_tables`].
    ///
    /// # Errors
    /// What makes the bytes no plans of this pass; cuDNN's own.
    pub fn from_bytes(library: &'static Library, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
        let start = Instant::now();
        let runtime = library.version();
        let end = bytes.iter().position(|b| *b == b'\n').ok_or_else(|| PayloadError::Head("it has no end".to_owned()))?;
        let head: Head = serde_json::from_slice(&bytes[..end]).map_err(|e| PayloadError::Head(e.to_string()))?;
        if head.version != VERSION {
            return Err(PayloadError::Version { found: head.version, known: VERSION });
        }
        let known = guard::reasons(job, runtime, target.sm(), job.deterministic());
        if !known.is_empty() {
            return Err(
                Error::Unsupported(crate::error::Unsupported { executor: crate::error::ExecutorName::Cudnn, reasons: known }).into()
            );
        }
        let (dense, copied) = lower::densify(job);
        let lowered = spelled(&dense, head.form, head.spelling, runtime)?;
        if digest(&lowered, runtime)? != head.lowered {
            return Err(PayloadError::Graph);
        }
        let mut texts = Texts { rest: &bytes[end + 1..], lengths: head.plans.iter() };
        let mut load =
            |graph: &Verified| -> Result<Arc<Plan>, PayloadError> { Ok(Arc::new(Plan::from_json(library, texts.take()?, graph, target)?)) };
        let plan = load(&lowered.graph)?;
        let mut copies = Vec::new();
        for operand in copied {
            let copy = copy_graph(job, &dense, operand)?;
            copies.push(PlannedCopy { operand, plan: load(&copy.graph)?, copy });
        }
        let mut converted = Vec::new();
        for (tensor, names, copy) in conversions(&lowered)? {
            converted.push(PlannedConversion { tensor, names, plan: load(&copy.graph)?, copy });
        }
        let mut summed = Vec::new();
        for sums in lowered.sums()? {
            let step = |step: lower::Sum| load(&step.graph).map(|plan| (step, plan));
            let steps = sums.steps.into_iter().map(step).collect::<Result<_, _>>()?;
            let rounding = load(&sums.rounding.graph)?;
            summed.push(PlannedSums { tensor: sums.tensor, name: sums.name, steps, rounding: (sums.rounding, rounding) });
        }
        texts.finish()?;
        let load = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(Planned {
            job: dense,
            lowered: Arc::new(lowered),
            plan,
            copies,
            conversions: converted,
            sums: summed,
            engine: head.engine,
            time: BuildTime { total: load, load, ..BuildTime::default() },
            tables: Vec::new(),
            used: Used::default(),
        })
    }
}

impl Planned {
    /// Lowers a pass again, and compares with what these plans are of: whether they may be called for it.
    ///
    /// # Errors
    /// [`Error::Bug`], where they are of another graph.
    pub fn recheck(&self, job: &Job, runtime: Version) -> Result<(), Error> {
        let (dense, _) = lower::densify(job);
        let wrong = |what: &str| Err(Error::Bug(format!("the plans for {} are of another {what}", crate::cache::CacheKey::label(job))));
        if dense != self.job {
            return wrong("problem");
        }
        let lowered = spelled(&dense, self.lowered.form, self.lowered.spelling, runtime).map_err(|e| Error::Bug(e.to_string()))?;
        let supplies = lowered.supplies == self.lowered.supplies && lowered.operands == self.lowered.operands;
        if lowered.graph == self.lowered.graph && supplies { Ok(()) } else { wrong("graph") }
    }
}

/// A pass in one form and spelling.
fn spelled(job: &Job, form: Form, spelling: Option<Spelling>, runtime: Version) -> Result<Lowered, LowerError> {
    match (job, spelling) {
        (Job::Backward(problem), Some(spelling)) => lower::lower_backward(problem, runtime, spelling),
        (Job::Forward(_) | Job::Backward(_), _) => lower::lower(job, form, runtime),
    }
}

/// Texts one after the other.
struct Texts<'a> {
    rest: &'a [u8],
    lengths: std::slice::Iter<'a, u64>,
}

impl<'a> Texts<'a> {
    fn take(&mut self) -> Result<&'a str, PayloadError> {
        let wrong = |text: &str| PayloadError::Plans(text.to_owned());
        let length = self.lengths.next().ok_or_else(|| wrong("there are too few plans"))?;
        let length = usize::try_from(*length).unwrap_or(usize::MAX);
        let text = self.rest.get(..length).ok_or_else(|| wrong("a plan is cut off"))?;
        self.rest = &self.rest[length..];
        std::str::from_utf8(text).map_err(|_| wrong("a plan is no text"))
    }

    fn finish(self) -> Result<(), PayloadError> {
        if self.rest.is_empty() && self.lengths.len() == 0 {
            return Ok(());
        }
        Err(PayloadError::Plans("there are more plans than the pass has".to_owned()))
    }
}
