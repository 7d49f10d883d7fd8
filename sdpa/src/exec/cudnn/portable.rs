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
const VERSION: u32 = 3;

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
    /// The pass is lowered to another graph than one of its plans was made of.
    #[error("{name} was made of another graph: of another release, or for another pass")]
    Graph {
        /// What that plan is for.
        name: String,
    },
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
    /// Every plan: the attention's, copies, conversions, sums.
    plans: Vec<Part>,
}

/// A plan among the bytes.
#[derive(Serialize, Deserialize)]
struct Part {
    /// What it is for.
    name: String,
    /// Of the graph that it is of, and of what is bound to it.
    graph: Digest,
    /// Its length.
    bytes: u64,
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

/// Of a graph beside the attention, and of which of its tensors is which.
fn helper_digest(graph: &Verified, bound: &str, runtime: Version) -> Result<Digest, Error> {
    let program = encode(graph, runtime).map_err(cudnn_graph::Error::from)?;
    let program = serde_json::to_vec(&program).map_err(|e| bug(&e.to_string()))?;
    Ok(Digest::parts().part(&program).part(bound.as_bytes()).finish())
}

fn copy_digest(copy: &lower::Copy, runtime: Version) -> Result<Digest, Error> {
    let lower::Copy { graph, from, second, to, zeros, repeats, from_step, to_step } = copy;
    helper_digest(graph, &format!("{from:?} {second:?} {to:?} {zeros:?} {repeats} {from_step} {to_step}"), runtime)
}

fn sum_digest(sum: &lower::Sum, runtime: Version) -> Result<Digest, Error> {
    let lower::Sum { graph, from, ones, terms, dtype, to } = sum;
    helper_digest(graph, &format!("{from:?} {ones:?} {terms} {dtype:?} {to:?}"), runtime)
}

/// A plan's name in a file, the digest of its graph, the plan.
type NamedPlan<'a> = (String, Digest, &'a Arc<Plan>);

/// The plans around the attention's have these names in a file.
fn copy_name(operand: lower::Operand) -> String {
    format!("copy of {operand}")
}

fn conversion_name(names: &[String]) -> String {
    format!("conversion of {}", names.join(" and "))
}

fn sum_name(name: &str, step: usize) -> String {
    format!("sum {step} of the gradient of {name}")
}

fn rounding_name(name: &str) -> String {
    format!("rounding of the gradient of {name}")
}

impl Planned {
    /// Every plan with its name and the digest of its graph, in the order of [`Planned::plans`].
    fn parts(&self) -> Result<Vec<NamedPlan<'_>>, Error> {
        let runtime = self.plan.library().version();
        let mut all = vec![("attention".to_owned(), digest(&self.lowered, runtime)?, &self.plan)];
        for copy in &self.copies {
            all.push((copy_name(copy.operand), copy_digest(&copy.copy, runtime)?, &copy.plan));
        }
        for conversion in &self.conversions {
            all.push((conversion_name(&conversion.names), copy_digest(&conversion.copy, runtime)?, &conversion.plan));
        }
        for sums in &self.sums {
            for (n, (sum, plan)) in sums.steps.iter().enumerate() {
                all.push((sum_name(&sums.name, n), sum_digest(sum, runtime)?, plan));
            }
            all.push((rounding_name(&sums.name), copy_digest(&sums.rounding.0, runtime)?, &sums.rounding.1));
        }
        Ok(all)
    }

    /// Every plan in one piece of bytes, compiled kernels included.
    ///
    /// # Errors
    /// cuDNN's own: engines that were not compiled at run time have no JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let (mut plans, mut texts) = (Vec::new(), Vec::new());
        for (name, graph, plan) in self.parts()? {
            let text = plan.to_json()?;
            plans.push(Part { name, graph, bytes: text.len() as u64 });
            texts.push(text);
        }
        let head = Head { version: VERSION, form: self.lowered.form, spelling: self.lowered.spelling, engine: self.engine.clone(), plans };
        let mut bytes = serde_json::to_vec(&head).map_err(|e| bug(&e.to_string()))?;
        bytes.push(b'\n');
        texts.iter().for_each(|text| bytes.extend_from_slice(text.as_bytes()));
        Ok(bytes)
    }

    /// The plans of a pass from their bytes. Tables are not in device memory yet: see [`Planned::upload_tables`].
    ///
    /// # Safety
    /// The bytes are what [`Planned::to_bytes`] gave, unchanged: they contain machine code, which the device runs.
    ///
    /// # Errors
    /// What makes the bytes no plans of this pass; cuDNN's own.
    #[allow(unsafe_code, reason = "machine code from bytes: where they come from is the caller's to know")]
    pub unsafe fn from_bytes(library: &'static Library, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
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
        let mut texts = Texts { rest: &bytes[end + 1..], parts: head.plans.iter() };
        let mut load = |name: &str, made_of: Digest, graph: &Verified| -> Result<Arc<Plan>, PayloadError> {
            let text = texts.take(name, made_of)?;
            // SAFETY: the text is what was written for a plan of this graph: the caller answers for the bytes, and the digests are equal.
            #[allow(unsafe_code, reason = "machine code from bytes: the caller's contract")]
            let plan = unsafe { Plan::from_json(library, text, graph, target) }?;
            Ok(Arc::new(plan))
        };
        let plan = load("attention", digest(&lowered, runtime)?, &lowered.graph)?;
        let mut copies = Vec::new();
        for operand in copied {
            let copy = copy_graph(job, &dense, operand)?;
            let plan = load(&copy_name(operand), copy_digest(&copy, runtime)?, &copy.graph)?;
            copies.push(PlannedCopy { operand, plan, copy });
        }
        let mut converted = Vec::new();
        for (tensor, names, copy) in conversions(&lowered)? {
            let plan = load(&conversion_name(&names), copy_digest(&copy, runtime)?, &copy.graph)?;
            converted.push(PlannedConversion { tensor, names, plan, copy });
        }
        let mut summed = Vec::new();
        for sums in lowered.sums()? {
            let mut steps = Vec::new();
            for (n, step) in sums.steps.into_iter().enumerate() {
                let plan = load(&sum_name(&sums.name, n), sum_digest(&step, runtime)?, &step.graph)?;
                steps.push((step, plan));
            }
            let rounding = load(&rounding_name(&sums.name), copy_digest(&sums.rounding, runtime)?, &sums.rounding.graph)?;
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
        // By their bits: tables and defaults may hold NaN.
        let same = digest(&lowered, runtime).map_err(|e| Error::Bug(e.to_string()))? == digest(&self.lowered, runtime)?;
        if same && lowered.operands == self.lowered.operands { Ok(()) } else { wrong("graph") }
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
    parts: std::slice::Iter<'a, Part>,
}

impl<'a> Texts<'a> {
    /// The next, which is of this name and graph.
    fn take(&mut self, name: &str, graph: Digest) -> Result<&'a str, PayloadError> {
        let wrong = |text: &str| PayloadError::Plans(text.to_owned());
        let part = self.parts.next().ok_or_else(|| wrong("there are too few plans"))?;
        if part.name != name || part.graph != graph {
            return Err(PayloadError::Graph { name: part.name.clone() });
        }
        let length = usize::try_from(part.bytes).unwrap_or(usize::MAX);
        let text = self.rest.get(..length).ok_or_else(|| wrong("a plan is cut off"))?;
        self.rest = &self.rest[length..];
        std::str::from_utf8(text).map_err(|_| wrong("a plan is no text"))
    }

    fn finish(self) -> Result<(), PayloadError> {
        if self.rest.is_empty() && self.parts.len() == 0 {
            return Ok(());
        }
        Err(PayloadError::Plans("there are more plans than the pass has".to_owned()))
    }
}
