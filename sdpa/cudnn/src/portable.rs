//! Serialised plans: their key, which equal devices share, and their bytes.
//!
//! The key is a digest of everything that decides the build. It covers the programs of every pattern that would be tried, their bindings, strides
//! that need copies, options, and the runtime. The bytes are cuDNN's own JSON of each plan of a [`Planned`], after a header line that identifies
//! them. A plan is used only for exactly the graph from which it was made.

use super::fact;
use super::pieces;
use super::plan::{Made, PlanOptions, Planned, in_pieces, spellings};
use super::schedule::{Role, Schedule, outline, outline_digest};
use super::unsupported;
use crate::error::Error;
use crate::lower::{self, Form, Job, LowerError, Lowered, Spelling};
use crate::planfile::{Digest, Header, Parts};
use cudnn_graph::{DeviceProfile, Library, Plan, Target, Version};
use sdpa_cache::BuildTime;
use sdpa_core::error::{ExecutorName, Unsupported};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// The version of the byte format. Changes of the lowering appear in the digests instead.
const VERSION: u32 = 5;

/// The reason why serialised bytes cannot be used as the plans of a pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PayloadError {
    /// The header line cannot be parsed.
    #[error("the header line cannot be parsed ({0}); expected bytes from `Planned::to_bytes`")]
    Head(String),
    /// Another release of this crate wrote the bytes.
    #[error("got format version {found}, expected {known}; build the plans again with this release")]
    Version {
        /// The version of the format in which the bytes were written.
        found: u32,
        /// The format version that this release reads.
        known: u32,
    },
    /// A plan in the bytes is for another graph than the one that the lowering returns now.
    #[error("{name}: the plan was built for another graph, by another release or for another pass; build it again")]
    Graph {
        /// The role of the plan in its pass, such as the attention or a copy.
        name: String,
    },
    /// The number or the lengths of the plans differ from those in the header line.
    #[error("{0}")]
    Plans(String),
    /// cuDNN failed, or a graph of the pass could not be built.
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

/// The header line.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// The pattern of the attention, or of each of its pieces.
    spelled: Vec<Spelled>,
    engine: String,
    /// The plan of every graph of the schedule, in order.
    plans: Vec<Part>,
}

/// Form and pattern of an attention graph.
#[derive(Serialize, Deserialize)]
struct Spelled {
    form: Form,
    spelling: Option<Spelling>,
}

impl Spelled {
    fn of(lowered: &Lowered) -> Spelled {
        Spelled { form: lowered.form, spelling: lowered.spelling }
    }

    /// Lowers a pass with this pattern.
    fn lower(&self, job: &Job, runtime: Version) -> Result<Lowered, LowerError> {
        match (job, self.spelling) {
            (Job::Backward(problem), Some(spelling)) => lower::lower_backward(problem, runtime, spelling),
            (Job::Forward(_) | Job::Backward(_), _) => lower::lower(job, self.form, runtime),
        }
    }
}

/// Returns the graphs of a pass, or of its pieces, with these patterns, and the schedule around them.
fn spelled(job: &Job, dense: &Job, spelled: &[Spelled], runtime: Version) -> Result<(Vec<Arc<Lowered>>, Schedule<()>), PayloadError> {
    if let [one] = spelled {
        let lowered = one.lower(dense, runtime)?;
        let schedule = outline(job, dense, &lowered)?;
        return Ok((vec![Arc::new(lowered)], schedule));
    }
    let parts = pieces::parts(dense).unwrap_or_default();
    if parts.len() != spelled.len() {
        return Err(PayloadError::Plans(format!("{} pieces of a pass that has {}", spelled.len(), parts.len())));
    }
    let each = parts.iter().zip(spelled).map(|(part, spelled)| spelled.lower(&part.job, runtime).map(Arc::new));
    let lowered = each.collect::<Result<Vec<_>, _>>()?;
    let schedule = in_pieces(dense, &lowered.iter().map(|lowered| &**lowered).collect::<Vec<_>>())?;
    Ok((lowered, schedule))
}

/// Header entry of one plan.
#[derive(Serialize, Deserialize)]
struct Part {
    /// The role of the graph.
    name: String,
    /// Digest of the graph and its bindings.
    graph: Digest,
    /// Length of the plan in bytes.
    bytes: u64,
}

/// Returns the header of plan files for this version of cuDNN and this kind of device.
pub fn header(library: &Library, profile: &DeviceProfile) -> Header {
    Header { cudnn: library.version().to_string(), profile: profile.to_string(), lowering: VERSION }
}

/// Returns the key of a pass in plan files. The key is equal on all devices that can use the same kernels.
///
/// # Errors
/// Fails if the environment does, or because of a bug of the lowering.
pub fn key(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Digest, Error> {
    let runtime = library.version();
    let (dense, _) = lower::densify(job);
    let text = serde_json::to_string(options).map_err(|e| bug(&e.to_string()))?;
    // A forward pass has no determinism flag and gets the byte of a nondeterministic pass, 0.
    let beside = job.facts().find_map(|fact| fact::beside_programs(&fact)).unwrap_or_default();
    let mut parts = Digest::parts().part(runtime.to_string().as_bytes()).part(text.as_bytes()).part(&[beside]);
    for (n, part) in options.pieces.of(job).into_iter().flatten().enumerate() {
        let piece = format!("piece {n}: {:?}", part.piece);
        parts = candidates(library, target, (&part.job, &part.job), options, parts.part(piece.as_bytes()))?;
    }
    Ok(candidates(library, target, (job, &dense), options, parts)?.finish())
}

/// Adds every pattern of a pass that would be tried.
fn candidates(
    library: &'static Library,
    target: &Target<'_>,
    (job, dense): (&Job, &Job),
    options: &PlanOptions,
    mut parts: Parts,
) -> Result<Parts, Error> {
    let runtime = library.version();
    for form in lower::forms(dense, runtime).iter().filter(|form| options.form.is_none_or(|only| only == **form)) {
        parts = parts.part(form.name().as_bytes());
        match spellings(library, target, dense, *form, &options.policy) {
            Ok(all) => {
                for (lowered, policy) in all {
                    let policy = serde_json::to_string(&policy).map_err(|e| bug(&e.to_string()))?;
                    let schedule = outline(job, dense, &lowered)?;
                    parts = parts.part(&outline_digest(&schedule, runtime)?.0).part(policy.as_bytes());
                }
            }
            Err(refusal) => parts = parts.part(refusal.text()?.as_bytes()),
        }
    }
    Ok(parts)
}

fn bug(text: &str) -> Error {
    Error::Backend(cudnn_graph::Error::PlanJson(text.to_owned()))
}

impl Planned {
    /// Serialises every plan of a pass with its compiled kernels, for [`Planned::from_bytes`].
    ///
    /// # Errors
    /// Returns cuDNN's error. Plans of engines that were not compiled at run time cannot be serialised.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let (mut plans, mut texts) = (Vec::new(), Vec::new());
        for (run, graph) in self.schedule.digests(self.plan.library().version())? {
            let text = run.plan.to_json()?;
            plans.push(Part { name: run.role.to_string(), graph, bytes: text.len() as u64 });
            texts.push(text);
        }
        let spelled = self.spelled();
        let head = Head { version: VERSION, spelled, engine: self.engine.clone(), plans };
        let mut bytes = serde_json::to_vec(&head).map_err(|e| bug(&e.to_string()))?;
        bytes.push(b'\n');
        texts.iter().for_each(|text| bytes.extend_from_slice(text.as_bytes()));
        Ok(bytes)
    }

    /// Deserialises the plans of a pass. The tables that they read must then be copied to device memory with [`Planned::upload_tables`].
    ///
    /// # Safety
    /// The bytes must be unchanged output of [`Planned::to_bytes`]: they contain machine code, which the device runs.
    ///
    /// # Errors
    /// Fails if the bytes are not plans of this pass, or if cuDNN does.
    #[allow(unsafe_code, reason = "machine code from bytes: where they come from is the caller's to know")]
    pub unsafe fn from_bytes(library: &'static Library, target: &Target<'_>, job: &Job, bytes: &[u8]) -> Result<Planned, PayloadError> {
        let start = Instant::now();
        let runtime = library.version();
        let end = bytes.iter().position(|b| *b == b'\n').ok_or_else(|| PayloadError::Head("it has no end".to_owned()))?;
        let head: Head = serde_json::from_slice(&bytes[..end]).map_err(|e| PayloadError::Head(e.to_string()))?;
        if head.version != VERSION {
            return Err(PayloadError::Version { found: head.version, known: VERSION });
        }
        let known = unsupported::reasons(job, runtime, target.sm(), job.deterministic());
        if !known.is_empty() {
            return Err(Error::Unsupported(Unsupported::new(ExecutorName::CUDNN, known)).into());
        }
        let (dense, _) = lower::densify(job);
        let (lowered, schedule) = spelled(job, &dense, &head.spelled, runtime)?;
        let made_of: Vec<(String, Digest)> =
            schedule.digests(runtime)?.into_iter().map(|(run, digest)| (run.role.to_string(), digest)).collect();
        let mut texts = Texts { rest: &bytes[end + 1..], parts: head.plans.iter() };
        let mut plans = Vec::with_capacity(made_of.len());
        for (run, (name, digest)) in schedule.runs().zip(&made_of) {
            let text = texts.take(name, *digest)?;
            // SAFETY: the text was written for a plan of this graph: the caller vouches for the bytes, and the digests are equal.
            #[allow(unsafe_code, reason = "machine code from bytes: the caller's contract")]
            let plan = unsafe { Plan::from_json(library, text, &run.graph, target) }?;
            plans.push((run.role.clone(), Arc::new(plan)));
        }
        texts.finish()?;
        let attention = |role: &Role| matches!(role, Role::Attention | Role::Piece(_));
        let (made, plans): (Vec<_>, Vec<_>) = plans.into_iter().partition(|(role, _)| attention(role));
        let mut made = lowered.into_iter().zip(made.into_iter().map(|(_, plan)| plan));
        let first = made.next().ok_or_else(|| PayloadError::Plans("got no plan of the attention".to_owned()))?;
        let mut plans = plans.into_iter().map(|(_, plan)| plan);
        let mut planned = Planned::around(dense, Made { first, pieces: made.collect() }, schedule, |run| {
            plans.next().ok_or_else(|| PayloadError::Plans(format!("there is no {}", run.role)))
        })?;
        let load = start.elapsed();
        planned.engine = head.engine;
        planned.time = BuildTime { total: load, load, ..BuildTime::default() };
        Ok(planned)
    }
}

impl Planned {
    /// Checks that these plans may be called for the pass `job`: lowers the pass again, and compares its graphs with those of the plans.
    ///
    /// # Errors
    /// Returns [`Error::Bug`] if a graph differs.
    pub fn recheck(&self, job: &Job, runtime: Version) -> Result<(), Error> {
        let (dense, _) = lower::densify(job);
        let wrong = |what: &str| Err(Error::Bug(format!("the plans for {} are of another {what}", sdpa_cache::CacheKey::label(job))));
        if dense != self.job {
            return wrong("problem");
        }
        let (_, again) = spelled(job, &dense, &self.spelled(), runtime).map_err(|e| Error::Bug(e.to_string()))?;
        let same = outline_digest(&again, runtime)? == outline_digest(&self.schedule, runtime)?;
        if same { Ok(()) } else { wrong("graph") }
    }

    fn spelled(&self) -> Vec<Spelled> {
        std::iter::once(&self.lowered).chain(self.pieces.iter().map(|(lowered, _)| lowered)).map(|lowered| Spelled::of(lowered)).collect()
    }
}

/// Splits concatenated texts.
struct Texts<'a> {
    rest: &'a [u8],
    parts: std::slice::Iter<'a, Part>,
}

impl<'a> Texts<'a> {
    /// Returns the next text, and checks that its name and graph are these.
    fn take(&mut self, name: &str, graph: Digest) -> Result<&'a str, PayloadError> {
        let wrong = |text: &str| PayloadError::Plans(text.to_owned());
        let part = self.parts.next().ok_or_else(|| wrong("there are too few plans"))?;
        if part.name != name || part.graph != graph {
            return Err(PayloadError::Graph { name: part.name.clone() });
        }
        let length = usize::try_from(part.bytes).unwrap_or(usize::MAX);
        let text = self.rest.get(..length).ok_or_else(|| wrong("a plan is cut off"))?;
        self.rest = &self.rest[length..];
        std::str::from_utf8(text).map_err(|_| wrong("a plan is not UTF-8 text"))
    }

    fn finish(self) -> Result<(), PayloadError> {
        if self.rest.is_empty() && self.parts.len() == 0 {
            return Ok(());
        }
        Err(PayloadError::Plans("there are more plans than the pass has".to_owned()))
    }
}
