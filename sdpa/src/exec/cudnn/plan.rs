//! From a pass to compiled plans: which form, which engine, which operands are copied first.

use super::guard;
use super::named;
use super::order;
use super::used::Used;
use crate::cache::{BuildTime, CacheValue, Weight};
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::lower::{self, Copy, Form, Job, LowerError, Lowered, Operand, Spelling, Sum, Supply, Vectors};
use cudnn_graph::ir::TensorId;
use cudnn_graph::{Library, Outcome, Plan, Planner, Policy, Target, Verified};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// What plans of attention may look like.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct PlanOptions {
    /// Only this form; `None`: the better one first, then the other.
    pub form: Option<Form>,
    /// Which engines.
    pub policy: Policy,
}

/// Compiled plans for a pass.
#[derive(Debug)]
pub struct Planned {
    /// The pass as the attention plan sees it: operands that are copied first are dense.
    pub job: Job,
    /// The attention graph.
    pub lowered: Arc<Lowered>,
    /// The attention plan.
    pub plan: Arc<Plan>,
    /// Copies, by operand; those of results come after the attention.
    pub copies: Vec<PlannedCopy>,
    /// Conversions of declared tensors that engines do not read as they are.
    pub conversions: Vec<PlannedConversion>,
    /// Sums of gradients that the attention plan writes over more axes than were asked for.
    pub sums: Vec<PlannedSums>,
    /// The tag of the attention's engine.
    pub engine: String,
    /// Where the time of making it went.
    pub time: BuildTime,
    /// Tables in device memory: one for each that the graph reads, in the order of its supplies, then the ones of each sum.
    pub tables: Vec<Arc<cudnn_graph::Buffer>>,
    pub(super) used: Used,
}

impl Planned {
    /// Every plan: the attention's, of copies, conversions and sums.
    pub(super) fn plans(&self) -> impl Iterator<Item = &Arc<Plan>> {
        let copies = self.copies.iter().map(|c| &c.plan).chain(self.conversions.iter().map(|c| &c.plan));
        let sums = self.sums.iter().flat_map(|s| s.steps.iter().map(|(_, plan)| plan).chain([&s.rounding.1]));
        [&self.plan].into_iter().chain(copies).chain(sums)
    }

    /// A plan of the attention graph with nothing around it, for callers that plan by themselves: no operand is copied, and the graph
    /// reads no tables and writes no gradients of parameters.
    pub fn alone(job: Job, lowered: Arc<Lowered>, plan: impl Into<Arc<Plan>>) -> Planned {
        let plan = plan.into();
        let engine = plan.engine().map(|c| c.tag()).unwrap_or_default();
        Planned {
            job,
            lowered,
            plan,
            copies: Vec::new(),
            conversions: Vec::new(),
            sums: Vec::new(),
            engine,
            time: BuildTime::default(),
            tables: Vec::new(),
            used: Used::default(),
        }
    }
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

/// Host memory of a plan's descriptors, about.
const DESCRIPTORS: u64 = 256 << 10;

/// A copy of one operand.
#[derive(Debug)]
pub struct PlannedCopy {
    /// Which operand.
    pub operand: Operand,
    /// The copy's graph.
    pub copy: Copy,
    /// The copy's plan.
    pub plan: Arc<Plan>,
}

/// A conversion of declared tensors into one that the attention graph reads.
#[derive(Debug)]
pub struct PlannedConversion {
    /// The tensor of the attention graph.
    pub tensor: TensorId,
    /// The names of the parameters that the copy reads.
    pub names: Vec<String>,
    /// The conversion's graph.
    pub copy: Copy,
    /// The conversion's plan.
    pub plan: Arc<Plan>,
}

/// The sums that make one gradient.
#[derive(Debug)]
pub struct PlannedSums {
    /// The tensor of the attention graph.
    pub tensor: TensorId,
    /// The parameter's name.
    pub name: String,
    /// Each sum's graph and plan.
    pub steps: Vec<(Sum, Arc<Plan>)>,
    /// What brings the last sum from f32 to the type of the gradient.
    pub rounding: (Copy, Arc<Plan>),
}

fn unsupported(reasons: Vec<Reason>) -> Error {
    Error::Unsupported(Unsupported { executor: ExecutorName::Cudnn, reasons })
}

/// Why one form was passed over.
pub(super) enum Refusal {
    /// The form has no spelling for it.
    NoSpelling(String),
    /// The library's, or the environment's.
    Other(Error),
}

impl Refusal {
    /// In words, where it is no error.
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

/// Asks cuDNN for the engines of a pass, in one form. Nothing is compiled.
///
/// # Errors
/// [`Error::Unsupported`] with cuDNN's own words, or for what the form cannot express; the environment's.
pub fn ask(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    form: Form,
    policy: &Policy,
) -> Result<(Arc<Lowered>, Planner), Error> {
    try_ask(library, target, job, form, policy).map_err(|refusal| match refusal {
        Refusal::NoSpelling(text) => unsupported(vec![Reason::Refused { form: form.name().to_owned(), text }]),
        Refusal::Other(error) => error,
    })
}

/// The spellings of a pass in one form, the better one first: with an engine that has to be asked for by name, as it is usual, and
/// with fewer vectors along queries.
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
    usual.prefer.extend(order::prefer(job, form, runtime, target));
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
    let named = if policy.pin.is_none() { named::engine(problem, runtime, target.sm()) } else { None };
    let Some(named) = named else { return Ok(offered.into_iter().map(|lowered| (lowered, usual.clone())).collect()) };
    // The notes are those of the engine, not of this configuration of it.
    let pinned = Policy { pin: Some(named.pin), deterministic: false, ..policy.clone() };
    let pinned = spell(named.query_gradient)?.into_iter().map(|lowered| (lowered, pinned.clone()));
    if !named.first {
        usual.max_workspace.get_or_insert(named::LARGE_WORKSPACE);
    }
    let usual = offered.into_iter().map(|lowered| (lowered, usual.clone()));
    Ok(if named.first { pinned.chain(usual).collect() } else { usual.chain(pinned).collect() })
}

/// The first result; else the first failure that says nothing about what is supported, or the last refusal.
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
    time.lower += micros(start);
    first(spellings, |lowered, policy| {
        let start = Instant::now();
        let planner = Planner::new(library, Arc::new(lowered.graph.clone()), target, policy);
        time.heuristics += micros(start);
        let start = Instant::now();
        let plan = planner?.first(target);
        time.compile += micros(start);
        plan
    })
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Runs `make` over the forms that the options allow, in order, until one succeeds.
fn first_form<T>(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    options: &PlanOptions,
    mut make: impl FnMut(&Job, Form) -> Result<T, Refusal>,
) -> Result<(Job, Vec<Operand>, T), Error> {
    let known = guard::reasons(job, library.version(), target.sm(), options.policy.deterministic || job.deterministic());
    if !known.is_empty() {
        return Err(unsupported(known));
    }
    let (dense, copied) = lower::densify(job);
    let forms = lower::forms(&dense, library.version()).iter().copied().filter(|f| options.form.is_none_or(|only| only == *f));
    let (mut reasons, mut failed) = (Vec::new(), None);
    for form in forms {
        let refused = |text: String| Reason::Refused { form: form.name().to_owned(), text: text.replace('\n', "; ") };
        match make(&dense, form) {
            Ok(made) => return Ok((dense, copied, made)),
            Err(Refusal::NoSpelling(text)) => reasons.push(refused(text)),
            Err(Refusal::Other(Error::Backend(e))) if e.is_unsupported() => {
                tracing::debug!(%form, reason = %e, "refused");
                reasons.push(refused(e.to_string()));
            }
            // Another form may do, but nothing is known to be unsupported.
            Err(Refusal::Other(Error::Backend(e))) if !e.is_fatal() => {
                tracing::warn!(%form, error = %e, key = crate::cache::CacheKey::label(job), "failed");
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
        let limit = format!("the unified form does not have this {} pass on cuDNN {}", job.name(), library.version());
        reasons.push(Reason::Limit { field: "form".to_owned(), value: form.to_owned(), limit });
    }
    Err(unsupported(reasons))
}

/// Whether cuDNN has an engine for a pass on a device, and in which form. Nothing is compiled or submitted.
///
/// # Errors
/// [`Error::Unsupported`] with every reason; the environment's.
pub fn supports(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Form, Error> {
    let (dense, copied, (form, lowered)) = first_form(library, target, job, options, |j, form| {
        let (lowered, _) = try_ask(library, target, j, form, &options.policy)?;
        Ok((form, lowered))
    })?;
    for (_, names, copy) in conversions(&lowered)? {
        Planner::new(library, Arc::new(copy.graph), target, &Policy::default())
            .map_err(|e| refused(format!("conversion of {}", names.join(" and ")), e.into()))?;
    }
    for sums in lowered.sums()? {
        let steps = sums.steps.into_iter().map(|step| step.graph);
        for graph in steps.chain([sums.rounding.graph]) {
            Planner::new(library, Arc::new(graph), target, &Policy::default())
                .map_err(|e| refused(format!("sum of the gradient of {}", sums.name), e.into()))?;
        }
    }
    for operand in copied {
        copy_graph(job, &dense, operand)
            .and_then(|c| Ok(Planner::new(library, Arc::new(c.graph), target, &Policy::default())?))
            .map_err(|e| refused(format!("copy of {operand}"), e))?;
    }
    Ok(form)
}

pub(super) fn copy_graph(job: &Job, dense: &Job, operand: Operand) -> Result<Copy, Error> {
    let (Some(given), Some(used)) = (job.tensor(operand), dense.tensor(operand)) else {
        return Err(unsupported(vec![Reason::Absent(format!("the {} pass has no {operand}", job.name()))]));
    };
    let (from, to) = if job.writes(operand) { (used, given) } else { (given, used) };
    Ok(lower::copy(job.problem().dtype(), &from, &to)?)
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

/// Makes the plans of a pass. Tables are not in device memory yet: see [`Planned::upload_tables`].
///
/// # Errors
/// As [`supports`]; out of memory and a missing library are the environment's and never *unsupported*.
pub fn build(library: &'static Library, target: &Target<'_>, job: &Job, options: &PlanOptions) -> Result<Planned, Error> {
    let mut time = BuildTime::default();
    let made = first_form(library, target, job, options, |j, form| try_build(library, target, j, form, &options.policy, &mut time));
    let (dense, copied, (lowered, plan)) = made?;
    assemble(library, target, job, (dense, copied), (lowered, Arc::new(plan)), time)
}

/// The graph of the attention itself, and a plan of it.
pub(super) type Attention = (Arc<Lowered>, Arc<Plan>);

/// Every configuration that cuDNN offers and compiles for a pass, in every form and spelling that the options allow.
///
/// # Errors
/// The environment's.
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

/// The same plans with another configuration of the attention; of the same pass, so that helpers may differ with its spelling.
///
/// # Errors
/// As [`build`].
pub(super) fn with_attention(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    attention: Attention,
    time: BuildTime,
) -> Result<Planned, Error> {
    assemble(library, target, job, lower::densify(job), attention, time)
}

/// The plans around the attention's.
fn assemble(
    library: &'static Library,
    target: &Target<'_>,
    job: &Job,
    (dense, copied): (Job, Vec<Operand>),
    (lowered, plan): Attention,
    mut time: BuildTime,
) -> Result<Planned, Error> {
    let helpers = Instant::now();
    let copies = copied
        .into_iter()
        .map(|operand| {
            let copy = copy_graph(job, &dense, operand)?;
            let plan = Plan::build(library, Arc::new(copy.graph.clone()), target, &Policy::default())
                .map_err(|e| refused(format!("copy of {operand}"), Error::Backend(e)))?;
            Ok(PlannedCopy { operand, copy, plan: Arc::new(plan) })
        })
        .collect::<Result<_, Error>>()?;
    let conversions = conversions(&lowered)?
        .into_iter()
        .map(|(tensor, names, copy)| {
            let plan = Plan::build(library, Arc::new(copy.graph.clone()), target, &Policy::default())
                .map_err(|e| refused(format!("conversion of {}", names.join(" and ")), Error::Backend(e)))?;
            Ok(PlannedConversion { tensor, names, copy, plan: Arc::new(plan) })
        })
        .collect::<Result<_, Error>>()?;
    let sums = lowered
        .sums()?
        .into_iter()
        .map(|sums| {
            let plan = |graph: &Verified| {
                let plan = Plan::build(library, Arc::new(graph.clone()), target, &Policy::default());
                let plan = plan.map_err(|e| refused(format!("sum of the gradient of {}", sums.name), Error::Backend(e)))?;
                Ok::<_, Error>(Arc::new(plan))
            };
            let rounding = plan(&sums.rounding.graph)?;
            let steps = sums.steps.into_iter().map(|step| plan(&step.graph).map(|plan| (step, plan))).collect::<Result<_, Error>>()?;
            Ok(PlannedSums { tensor: sums.tensor, name: sums.name, steps, rounding: (sums.rounding, rounding) })
        })
        .collect::<Result<_, Error>>()?;
    time.compile += micros(helpers);
    let mut planned = Planned::alone(dense, lowered, plan);
    (planned.copies, planned.conversions, planned.sums, planned.time) = (copies, conversions, sums, time);
    Ok(planned)
}

/// The declared tensors that a graph reads in another form, with what makes it.
pub(super) fn conversions(lowered: &Lowered) -> Result<Vec<(TensorId, Vec<String>, Copy)>, Error> {
    let mut all = Vec::new();
    for (id, supply) in &lowered.supplies {
        let Some(tensor) = lowered.graph.graph().get(*id) else { continue };
        let [batch, head, q, k] = tensor.dims.0[..] else { continue };
        match supply {
            Supply::Spread { name, dtype, dims } => {
                all.push((*id, vec![name.clone()], lower::spread([*dtype, tensor.dtype], *dims, [batch, head, q, k])?));
            }
            Supply::Guarded(which) => {
                let names = which.params().iter().map(|&name| name.to_owned()).collect();
                all.push((*id, names, lower::guarded(*which, batch)?));
            }
            Supply::Number(_) | Supply::Param(_) | Supply::Table(_) | Supply::Scratch | Supply::Gradient(_) | Supply::Terms { .. } => {}
        }
    }
    Ok(all)
}
