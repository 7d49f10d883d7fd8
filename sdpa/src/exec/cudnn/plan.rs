//! From a problem to compiled plans: which form, which engine, which operands are copied first.

use super::guard;
use super::order;
use crate::error::{Error, ExecutorName, Reason, Unsupported};
use crate::lower::{self, Copy, Form, Forward};
use crate::problem::{OPERANDS, Problem};
use cudnn_graph::{Library, Plan, Planner, Policy, Target};
use serde::Serialize;
use std::sync::Arc;

/// What plans of attention may look like.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct PlanOptions {
    /// Only this form; `None`: the better one first, then the other.
    pub form: Option<Form>,
    /// Which engines.
    pub policy: Policy,
}

/// Compiled plans for a problem.
#[derive(Debug)]
pub struct Planned {
    /// The problem as the attention plan sees it: operands that are copied first are dense.
    pub problem: Problem,
    /// The attention graph.
    pub forward: Arc<Forward>,
    /// The attention plan.
    pub plan: Arc<Plan>,
    /// Copies, by operand; that of `o` comes after the attention.
    pub copies: Vec<PlannedCopy>,
}

/// A copy of one operand.
#[derive(Debug)]
pub struct PlannedCopy {
    /// Which operand, in the order of [`OPERANDS`].
    pub operand: usize,
    /// The copy's graph.
    pub copy: Copy,
    /// The copy's plan.
    pub plan: Arc<Plan>,
}

impl PlannedCopy {
    /// `q`, `k`, `v` or `o`.
    pub fn name(&self) -> &'static str {
        OPERANDS[self.operand]
    }
}

fn unsupported(reasons: Vec<Reason>) -> Error {
    Error::Unsupported(Unsupported { executor: ExecutorName::Cudnn, reasons })
}

/// Asks cuDNN for the engines of a problem's forward pass, in one form. Nothing is compiled.
///
/// # Errors
/// [`Error::Unsupported`] with cuDNN's own words; the environment's.
pub fn ask(
    library: &'static Library,
    target: &Target<'_>,
    problem: &Problem,
    form: Form,
    policy: &Policy,
) -> Result<(Arc<Forward>, Planner), Error> {
    let forward = Arc::new(lower::forward(problem, form, library.version())?);
    let mut policy = policy.clone();
    policy.prefer.extend(order::prefer(problem, form, library.version(), target));
    let planner = Planner::new(library, Arc::new(forward.graph.clone()), target, &policy)?;
    Ok((forward, planner))
}

/// Runs `make` over the forms that the options allow, in order, until one succeeds.
fn first_form<T>(
    library: &'static Library,
    target: &Target<'_>,
    problem: &Problem,
    options: &PlanOptions,
    mut make: impl FnMut(&Problem, Form) -> Result<T, Error>,
) -> Result<(Problem, Vec<usize>, T), Error> {
    let known = guard::reasons(problem, library.version(), target.sm(), options.policy.deterministic);
    if !known.is_empty() {
        return Err(unsupported(known));
    }
    let (dense, copied) = lower::densify(problem);
    let forms = lower::forms(&dense, library.version()).iter().copied().filter(|f| options.form.is_none_or(|only| only == *f));
    let mut reasons = Vec::new();
    for form in forms {
        match make(&dense, form) {
            Ok(made) => return Ok((dense, copied, made)),
            Err(Error::Backend(e)) if e.is_unsupported() => {
                tracing::debug!(%form, reason = %e, "refused");
                reasons.push(Reason::Refused { form: form.name().to_owned(), text: e.to_string().replace('\n', "; ") });
            }
            Err(other) => return Err(other),
        }
    }
    if reasons.is_empty() {
        let form = options.form.map_or("any", Form::name);
        let limit = format!("the unified form needs cuDNN {}, this is {}", lower::UNIFIED_SINCE, library.version());
        reasons.push(Reason::Limit { field: "form".to_owned(), value: form.to_owned(), limit });
    }
    Err(unsupported(reasons))
}

/// Whether cuDNN has an engine for a problem on a device, and in which form. Nothing is compiled or submitted.
///
/// # Errors
/// [`Error::Unsupported`] with every reason; the environment's.
pub fn supports(library: &'static Library, target: &Target<'_>, problem: &Problem, options: &PlanOptions) -> Result<Form, Error> {
    let (dense, copied, form) =
        first_form(library, target, problem, options, |p, form| ask(library, target, p, form, &options.policy).map(|_| form))?;
    for operand in copied {
        copy_graph(problem, &dense, operand)
            .and_then(|c| Ok(Planner::new(library, Arc::new(c.graph), target, &Policy::default())?))
            .map_err(|e| refused_copy(operand, e))?;
    }
    Ok(form)
}

fn copy_graph(problem: &Problem, dense: &Problem, operand: usize) -> Result<Copy, Error> {
    let (given, used) = (&problem.tensors()[operand], &dense.tensors()[operand]);
    let (from, to) = if OPERANDS[operand] == "o" { (used, given) } else { (given, used) };
    Ok(lower::copy(problem.dtype(), from, to)?)
}

fn refused_copy(operand: usize, error: Error) -> Error {
    if let Error::Backend(e) = &error
        && e.is_unsupported()
    {
        let text = e.to_string().replace('\n', "; ");
        return unsupported(vec![Reason::Refused { form: format!("copy of {}", OPERANDS[operand]), text }]);
    }
    error
}

/// Makes the plans of a problem's forward pass.
///
/// # Errors
/// As [`supports`]; out of memory and a missing library are the environment's and never *unsupported*.
pub fn build(library: &'static Library, target: &Target<'_>, problem: &Problem, options: &PlanOptions) -> Result<Planned, Error> {
    let (dense, copied, (forward, plan)) = first_form(library, target, problem, options, |p, form| {
        let (forward, planner) = ask(library, target, p, form, &options.policy)?;
        Ok((forward, planner.first(target)?))
    })?;
    let copies = copied
        .into_iter()
        .map(|operand| {
            let copy = copy_graph(problem, &dense, operand)?;
            let plan = Plan::build(library, Arc::new(copy.graph.clone()), target, &Policy::default())
                .map_err(|e| refused_copy(operand, Error::Backend(e)))?;
            Ok(PlannedCopy { operand, copy, plan: Arc::new(plan) })
        })
        .collect::<Result<_, Error>>()?;
    Ok(Planned { problem: dense, forward, plan: Arc::new(plan), copies })
}
