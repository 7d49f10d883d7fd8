//! Builds compiled plans for a pass: chooses the form, the engine, and the operands that are copied first.

use super::bind::Takes;
use super::engine_order;
use super::keep_alive::Used;
use super::pieces::{self, Part};
use super::requested_engines;
use super::schedule::{self, PIECE, Role, Run, Schedule, outline};
use super::unsupported;
use crate::error::Error;
use crate::kernels::Loaded;
use crate::lower::{self, Form, Job, LowerError, Lowered, Spelling, Vectors};
use cudnn_graph::{Buffer, Library, Outcome, Plan, Planner, Policy, Target, Version};
use sdpa_cache::{BuildTime, CacheValue, Weight};
use sdpa_core::empty;
use sdpa_core::error::{ExecutorName, Reason, Unsupported};
use std::sync::Arc;
use std::time::Instant;

pub use crate::options::{Pieces, PlanOptions};

/// The compiled plans of a pass.
#[derive(Debug)]
pub struct Planned {
    /// The pass that the attention plan computes, in which copied operands are dense.
    pub job: Job,
    /// The attention graph; for a pass that is computed in pieces, the graph of the first piece.
    pub lowered: Arc<Lowered>,
    /// The attention plan; for a pass that is computed in pieces, the plan of the first piece.
    pub plan: Arc<Plan>,
    /// The graphs and plans of the second and later pieces; empty for a pass that is not computed in pieces.
    pub pieces: Vec<Attention>,
    /// The memory that a call needs and the steps that it runs. The attention plan is one of the steps.
    pub schedule: Schedule<Arc<Plan>>,
    /// The tag of the attention's engine, such as `eng2_k24=7` for engine 2 with value 7 of knob 24.
    pub engine: String,
    /// The build time of each stage: lowering, heuristics, compiling, tuning and loading.
    pub time: BuildTime,
    /// The tables that the schedule reads, in device memory: see [`Planned::upload_tables`].
    pub tables: Vec<Arc<Buffer>>,
    /// Whether kernels of this crate run.
    pub(super) launches: bool,
    /// These kernels, on the device of the tables.
    pub(super) kernels: Option<&'static Loaded>,
    /// The kind of value of each declared parameter.
    pub(super) takes: Vec<Takes>,
    /// Workspace bytes that cuDNN's plans need.
    pub(super) base: u64,
    pub(super) used: Used,
}

impl Planned {
    /// Builds plans for every graph of a schedule other than the attention's.
    ///
    /// # Errors
    /// Returns the first error of `make`, which builds each plan.
    pub(super) fn around<E>(
        job: Job,
        made: Made,
        schedule: Schedule<()>,
        mut make: impl FnMut(&Run<()>) -> Result<Arc<Plan>, E>,
    ) -> Result<Planned, E> {
        let Made { first: (lowered, plan), pieces } = made;
        let piece = |n: usize| pieces.get(n.wrapping_sub(1)).map(|(_, plan)| plan);
        let schedule = schedule.try_map(|run| match run.role {
            Role::Attention => Ok(plan.clone()),
            Role::Piece(n) => piece(n).cloned().map_or_else(|| make(run), Ok),
            Role::Copy(_)
            | Role::Conversion(_)
            | Role::Sum(..)
            | Role::Rounding(_)
            | Role::Documents
            | Role::Entries(_)
            | Role::Sink
            | Role::SinkGradient
            | Role::RowSums
            | Role::Merge(_)
            | Role::Unpaired(_) => make(run),
        })?;
        let most = schedule.runs().map(|run| run.plan.workspace_bytes()).max().unwrap_or(0);
        let base = if schedule.scratch() == 0 { most } else { most.next_multiple_of(PIECE) };
        let extents = job.problem().extents();
        let takes = job.params().iter().map(|p| Takes::of(p, extents)).collect();
        let engine = tags(std::iter::once(&plan).chain(pieces.iter().map(|(_, plan)| plan)));
        let launches = schedule.kernels().next().is_some();
        let (time, tables, used) = (BuildTime::default(), Vec::new(), Used::default());
        Ok(Planned { job, lowered, plan, pieces, schedule, engine, time, tables, launches, kernels: None, takes, base, used })
    }

    /// Builds the plans of a pass whose attention graph has a plan already: those of copies, conversions and sums. In that graph,
    /// operands that engines cannot use in place must be dense.
    ///
    /// # Errors
    /// Fails as [`build`] does.
    pub fn of(library: &'static Library, target: &Target<'_>, job: &Job, attention: Attention) -> Result<Planned, Error> {
        Planned::beside(library, target, job, Made::whole(attention), None)
    }

    /// As [`Planned::of`], but reuses the plans that `other` has of the same graphs.
    pub(super) fn beside(
        library: &'static Library,
        target: &Target<'_>,
        job: &Job,
        made: Made,
        other: Option<&Planned>,
    ) -> Result<Planned, Error> {
        let (dense, _) = lower::densify(job);
        let schedule = made.schedule(job, &dense)?;
        Planned::around(dense, made, schedule, |run| {
            let same = |there: &&Run<Arc<Plan>>| there.role == run.role && there.graph == run.graph;
            if let Some(there) = other.and_then(|other| other.schedule.runs().find(same)) {
                return Ok(there.plan.clone());
            }
            let plan = Plan::build(library, run.graph.clone(), target, &Policy::default());
            plan.map(Arc::new).map_err(|e| refused(run.role.to_string(), e.into()))
        })
    }

    /// Returns every plan, in the order of the steps.
    pub(super) fn plans(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.schedule.runs().map(|run| &run.plan)
    }

    /// Returns the size of the workspace that a call needs, in bytes: for plans, copied operands and intermediate results.
    pub fn workspace_bytes(&self) -> u64 {
        self.base + self.schedule.scratch()
    }

    /// Returns the names of the operands that each call copies, because engines cannot use them in place.
    pub fn copied(&self) -> Vec<&'static str> {
        let copied = self.schedule.runs().filter_map(|run| match &run.role {
            Role::Copy(operand) => Some(operand.name()),
            Role::Attention
            | Role::Piece(_)
            | Role::Merge(_)
            | Role::Conversion(_)
            | Role::Sum(..)
            | Role::Rounding(_)
            | Role::Documents
            | Role::Entries(_)
            | Role::Sink
            | Role::SinkGradient
            | Role::RowSums
            | Role::Unpaired(_) => None,
        });
        copied.collect()
    }

    /// Returns the attention graphs and plans.
    pub(super) fn made(&self) -> Made {
        Made { first: (self.lowered.clone(), self.plan.clone()), pieces: self.pieces.clone() }
    }
}

/// Joins the distinct tags of engines.
fn tags<'a>(plans: impl Iterator<Item = &'a Arc<Plan>>) -> String {
    let mut tags: Vec<String> = Vec::new();
    for tag in plans.filter_map(|plan| plan.engine()).map(|engine| engine.tag()) {
        if !tags.contains(&tag) {
            tags.push(tag);
        }
    }
    tags.join(" + ")
}

/// The attention plans of a pass: one, or one per piece.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub(super) first: Attention,
    pub(super) pieces: Vec<Attention>,
}

impl Made {
    pub(super) fn whole(first: Attention) -> Made {
        Made { first, pieces: Vec::new() }
    }

    /// Returns the schedule of a pass around these plans.
    fn schedule(&self, job: &Job, dense: &Job) -> Result<Schedule<()>, Error> {
        if self.pieces.is_empty() {
            return outline(job, dense, &self.first.0);
        }
        let all: Vec<&Lowered> = std::iter::once(&self.first).chain(&self.pieces).map(|(lowered, _)| &**lowered).collect();
        in_pieces(dense, &all)
    }
}

/// Returns the schedule of a pass in pieces.
///
/// # Errors
/// Fails if the pass does not have this many pieces, which is a bug.
pub(super) fn in_pieces(dense: &Job, lowered: &[&Lowered]) -> Result<Schedule<()>, Error> {
    let parts = pieces::parts(dense).unwrap_or_default();
    if parts.len() != lowered.len() {
        return Err(Error::Bug(format!("{} pieces of a pass that has {}", lowered.len(), parts.len())));
    }
    schedule::pieces(dense, parts.iter().zip(lowered.iter().copied()))
}

impl CacheValue for Planned {
    fn weight(&self) -> Weight {
        let code: u64 = self.plans().map(|plan| plan.code_bytes()).sum();
        let tables: u64 = self.tables.iter().map(|table| table.bytes() as u64).sum();
        Weight { host: code + DESCRIPTORS, device: code + tables, workspace: self.workspace_bytes() }
    }

    fn engine(&self) -> String {
        self.engine.clone()
    }

    fn build_time(&self) -> BuildTime {
        self.time
    }
}

/// Approximate host memory of a plan's descriptors.
const DESCRIPTORS: u64 = 256 << 10;

fn unsupported(reasons: Vec<Reason>) -> Error {
    Error::Unsupported(Unsupported::new(ExecutorName::CUDNN, reasons))
}

/// Why a form was not used.
pub(super) enum Refusal {
    /// The form cannot express the pass.
    NoSpelling(String),
    /// cuDNN or the environment failed.
    Other(Error),
}

impl Refusal {
    /// Returns the reason as text if the pass is unsupported, else the error.
    pub(super) fn text(self) -> Result<String, Error> {
        match self {
            Refusal::NoSpelling(text) => Ok(text),
            Refusal::Other(error) => Err(error),
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Other(error)
    }
}

impl From<cudnn_graph::Error> for Refusal {
    fn from(error: cudnn_graph::Error) -> Refusal {
        Refusal::Other(error.into())
    }
}

/// Queries cuDNN for the engines of a pass in one form of graph, without compiling.
///
/// # Errors
/// Returns [`Error::Unsupported`] with cuDNN's message, or with the reason why the form cannot express the pass. Any other error is a
/// failure of the environment.
pub fn ask(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    form: Form,
    policy: &Policy,
) -> Result<(Arc<Lowered>, Planner), Error> {
    try_ask(library, target, job, form, policy).map_err(|refusal| told(form, refusal))
}

fn told(form: Form, refusal: Refusal) -> Error {
    match refusal {
        Refusal::NoSpelling(text) => unsupported(vec![Reason::Refused { form: form.name().to_owned(), text }]),
        Refusal::Other(error) => error,
    }
}

/// Returns the schedule of a pass in one form of graph. It uses the graph pattern that is tried first. It needs only the version of
/// cuDNN, not the library.
///
/// # Errors
/// Returns [`Error::Unsupported`] if the form cannot express the pass.
pub fn schedule(job: &Job, form: Form, runtime: Version, pieces: Pieces) -> Result<Schedule<()>, Error> {
    if let Some(empty) = empty::unsupported(job.problem()) {
        return Err(unsupported(vec![empty]));
    }
    let lower = |job: &Job| spelled(lower::lower(job, form, runtime)).map_err(|refusal| told(form, refusal));
    if let Some(parts) = pieces.of(job) {
        let lowered = parts.iter().map(|part| lower(&part.job)).collect::<Result<Vec<_>, _>>()?;
        return in_pieces(job, &lowered.iter().map(|lowered| &**lowered).collect::<Vec<_>>());
    }
    let (dense, _) = lower::densify(job);
    outline(job, &dense, &*lower(&dense)?)
}

/// Returns the graph patterns of a pass in one form, the better one first. They differ in the requested engine and in how vectors along queries are
/// read.
pub(super) fn spellings(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    form: Form,
    policy: &Policy,
) -> Result<Vec<(Arc<Lowered>, Policy)>, Refusal> {
    let runtime = library.version();
    let mut usual = policy.clone();
    usual.deterministic |= job.deterministic();
    usual.prefer.extend(engine_order::prefer(job, form, runtime, target));
    let problem = match job {
        Job::Backward(problem) if form == Form::Composite => problem,
        Job::Backward(_) | Job::Forward(_) => return Ok(vec![(spelled(lower::lower(job, form, runtime))?, usual)]),
    };
    let spell = |query_gradient| -> Result<Vec<Arc<Lowered>>, Refusal> {
        let with = |vectors| spelled(lower::lower_backward(problem, runtime, Spelling { query_gradient, vectors }));
        let (vectors, spread) = (with(Vectors::AlongQueries)?, with(Vectors::Spread)?);
        Ok(if vectors.graph == spread.graph { vec![vectors] } else { vec![vectors, spread] })
    };
    let offered = spell(Spelling::usual(problem).query_gradient)?;
    let named = if policy.pin.is_none() { requested_engines::engine(problem, runtime, target.sm()) } else { None };
    let Some(named) = named else { return Ok(offered.into_iter().map(|lowered| (lowered, usual.clone())).collect()) };
    // Do not filter by determinism: cuDNN's determinism note describes the whole engine, not this configuration of it.
    let pinned = policy.clone().with_pin(named.pin).with_deterministic(false);
    let pinned = spell(named.query_gradient)?.into_iter().map(|lowered| (lowered, pinned.clone()));
    if !named.first {
        usual.max_workspace.get_or_insert(requested_engines::LARGE_WORKSPACE);
    }
    let usual = offered.into_iter().map(|lowered| (lowered, usual.clone()));
    Ok(if named.first { pinned.chain(usual).collect() } else { usual.chain(pinned).collect() })
}

/// Returns the first success; else the first failure that does not mean unsupported, or else the last refusal.
fn first<T>(
    spellings: Vec<(Arc<Lowered>, Policy)>,
    mut make: impl FnMut(&Arc<Lowered>, &Policy) -> Result<T, cudnn_graph::Error>,
) -> Result<(Arc<Lowered>, T), Refusal> {
    let (mut refused, mut failed) = (None, None);
    for (lowered, policy) in spellings {
        match make(&lowered, &policy) {
            Ok(made) => return Ok((lowered, made)),
            Err(e) if e.is_fatal() => return Err(e.into()),
            Err(e) if e.is_unsupported() => refused = Some(e),
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    Err(failed.or(refused).map_or_else(|| Refusal::NoSpelling("there is none".to_owned()), Refusal::from))
}

fn try_ask(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    form: Form,
    policy: &Policy,
) -> Result<(Arc<Lowered>, Planner), Refusal> {
    let spellings = spellings(library, target, job, form, policy)?;
    first(spellings, |lowered, policy| Planner::new(library, Arc::new(lowered.graph.clone()), target, policy))
}

fn spelled(lowered: Result<Lowered, LowerError>) -> Result<Arc<Lowered>, Refusal> {
    match lowered {
        Ok(lowered) => Ok(Arc::new(lowered)),
        Err(LowerError::Unsupported(text)) => Err(Refusal::NoSpelling(text)),
        Err(LowerError::Bug(e)) => Err(e.into()),
    }
}

fn try_build(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    form: Form,
    policy: &Policy,
    time: &mut BuildTime,
) -> Result<(Arc<Lowered>, Plan), Refusal> {
    let start = Instant::now();
    let spellings = spellings(library, target, job, form, policy)?;
    time.lower += start.elapsed();
    first(spellings, |lowered, policy| {
        let start = Instant::now();
        let planner = Planner::new(library, Arc::new(lowered.graph.clone()), target, policy);
        time.heuristics += start.elapsed();
        let start = Instant::now();
        let plan = planner?.first(target);
        time.compile += start.elapsed();
        plan
    })
}

/// Runs `make` over the forms that the options allow, in order, until one succeeds.
fn first_form<T>(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    options: &PlanOptions,
    mut make: impl FnMut(&Job, Form) -> Result<T, Refusal>,
) -> Result<(Job, T), Error> {
    let known = unsupported::reasons(job, library.version(), target.sm(), options.policy.deterministic || job.deterministic());
    if !known.is_empty() {
        return Err(unsupported(known));
    }
    let (dense, _) = lower::densify(job);
    let forms = lower::forms(&dense, library.version()).iter().copied().filter(|f| options.form.is_none_or(|only| only == *f));
    let (mut reasons, mut failed) = (Vec::new(), None);
    for form in forms {
        let refused = |text: String| Reason::Refused { form: form.name().to_owned(), text: text.replace('\n', "; ") };
        match make(&dense, form) {
            Ok(made) => return Ok((dense, made)),
            Err(Refusal::NoSpelling(text)) => reasons.push(refused(text)),
            Err(Refusal::Other(Error::Backend(e))) if e.is_unsupported() => {
                tracing::debug!(%form, reason = %e, "refused");
                reasons.push(refused(e.to_string()));
            }
            // This error does not mean that the job is unsupported. Another form may still succeed, so report the error only if none
            // does.
            Err(Refusal::Other(Error::Backend(e))) if !e.is_fatal() => {
                tracing::warn!(%form, error = %e, key = sdpa_cache::CacheKey::label(job), "failed");
                failed = failed.or(Some(e));
            }
            Err(Refusal::Other(other)) => return Err(other),
        }
    }
    if let Some(failed) = failed {
        return Err(failed.into());
    }
    if reasons.is_empty() {
        let form = options.form.map_or("any", Form::name);
        let limit = format!("the composite form: cuDNN {} has no unified form of this {} pass", library.version(), job.name());
        reasons.push(Reason::Limit { field: "form".to_owned(), value: form.to_owned(), limit });
    }
    Err(unsupported(reasons))
}

/// Returns the form of graph, composite or unified, in which cuDNN has an engine for a pass on a device. It compiles and submits nothing.
///
/// # Errors
/// Returns [`Error::Unsupported`] with every reason if cuDNN has no such engine. Any other error is a failure of the environment.
pub fn supports(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Form, Error> {
    if let Some(parts) = options.pieces.of(job) {
        let form = |part: &Part| {
            let asked =
                first_form(library, target, &part.job, options, |j, form| try_ask(library, target, j, form, &options.policy).map(|_| form));
            asked.map(|(_, form)| form)
        };
        match parts.iter().map(form).collect::<Result<Vec<_>, _>>() {
            Ok(forms) => return Ok(forms[0]),
            Err(why) => passed_over(job, why)?,
        }
    }
    let (dense, (form, lowered)) = first_form(library, target, job, options, |j, form| {
        let (lowered, _) = try_ask(library, target, j, form, &options.policy)?;
        Ok((form, lowered))
    })?;
    for run in outline(job, &dense, &lowered)?.runs().filter(|run| run.role != Role::Attention) {
        Planner::new(library, run.graph.clone(), target, &Policy::default()).map_err(|e| refused(run.role.to_string(), e.into()))?;
    }
    Ok(form)
}

fn refused(form: String, error: Error) -> Error {
    if let Error::Backend(e) = &error
        && e.is_unsupported()
    {
        let text = e.to_string().replace('\n', "; ");
        return unsupported(vec![Reason::Refused { form, text }]);
    }
    error
}

/// Builds the plans of a pass. The tables that they read must then be copied to device memory with [`Planned::upload_tables`].
///
/// # Errors
/// Fails as [`supports`] does. Out of memory and a missing library are failures of the environment, never *unsupported*.
pub fn build(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Planned, Error> {
    let mut time = BuildTime::default();
    if let Some(parts) = options.pieces.of(job) {
        match build_pieces(library, target, job, &parts, options, &mut time) {
            Ok(mut planned) => {
                planned.time = time;
                return Ok(planned);
            }
            Err(why) => passed_over(job, why)?,
        }
    }
    let made = first_form(library, target, job, options, |j, form| try_build(library, target, j, form, &options.policy, &mut time));
    let (_, (lowered, plan)) = made?;
    let helpers = Instant::now();
    let mut planned = Planned::of(library, target, job, (lowered, Arc::new(plan)))?;
    time.compile += helpers.elapsed();
    planned.time = time;
    Ok(planned)
}

/// Accepts that pieces have no engine: the pass may have one as a whole. Other errors are returned.
fn passed_over(job: &Job, why: Error) -> Result<(), Error> {
    match why {
        Error::Unsupported(why) => {
            tracing::debug!(key = sdpa_cache::CacheKey::label(job), reason = %why, "not in pieces");
            Ok(())
        }
        Error::Spec(_) | Error::Backend(_) | Error::Bug(_) => Err(why),
    }
}

fn build_pieces(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    parts: &[Part],
    options: &PlanOptions,
    time: &mut BuildTime,
) -> Result<Planned, Error> {
    let mut made = Vec::with_capacity(parts.len());
    for part in parts {
        let build = |j: &Job, form| try_build(library, target, j, form, &options.policy, time);
        let (_, (lowered, plan)) = first_form(library, target, &part.job, options, build)?;
        made.push((lowered, Arc::new(plan)));
    }
    let mut made = made.into_iter();
    let first = made.next().ok_or_else(|| Error::Bug("no pieces".to_owned()))?;
    let helpers = Instant::now();
    let planned = Planned::beside(library, target, job, Made { first, pieces: made.collect() }, None)?;
    time.compile += helpers.elapsed();
    Ok(planned)
}

/// The attention graph of a pass, and the compiled plan of that graph.
pub type Attention = (Arc<Lowered>, Arc<Plan>);

/// Returns every configuration that cuDNN offers and compiles for a pass, in every form and pattern that the options allow.
///
/// # Errors
/// Returns a failure of the environment.
pub(super) fn offered(
    library: &'static Library,
    target: &Target<'_>,
    dense: &Job,
    options: &PlanOptions,
) -> Result<Vec<(Arc<Lowered>, Plan)>, Error> {
    let mut all = Vec::new();
    for form in lower::forms(dense, library.version()).iter().filter(|form| options.form.is_none_or(|only| only == **form)) {
        let spellings = match spellings(library, target, dense, *form, &options.policy) {
            Ok(spellings) => spellings,
            Err(refusal) => {
                refusal.text()?;
                continue;
            }
        };
        for (lowered, policy) in spellings {
            let planner = match Planner::new(library, Arc::new(lowered.graph.clone()), target, &policy) {
                Ok(planner) => planner,
                Err(e) if !e.is_fatal() => continue,
                Err(e) => return Err(e.into()),
            };
            for (n, candidate) in planner.report().candidates.iter().enumerate() {
                if candidate.outcome != Outcome::NotTried {
                    continue;
                }
                match planner.nth(n, target) {
                    Ok(plan) if policy.max_workspace.is_some_and(|limit| plan.workspace_bytes() > limit) => {}
                    Ok(plan) => all.push((lowered.clone(), plan)),
                    Err(e) if !e.is_fatal() => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
    }
    Ok(all)
}
