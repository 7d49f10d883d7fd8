//! `run`: compute, write, check, tell.

use crate::args::RunArgs;
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::memory;
use crate::names;
use crate::operands::{self, Operands};
use crate::progress::Progress;
use crate::request::{Request, Source};
use crate::save::Destination;
use crate::table::{Table, list};
use crate::tolerance::{Distance, Worst};
use sdpa::dispatch::{Choice, Dispatcher, Preference};
use sdpa::exec::cudnn::guard;
use sdpa::{Error, ExecutorName, Reason, Report, Shape, Unsupported};
use serde::Serialize;

/// Everything that was asked for.
struct Order {
    request: Request,
    preference: Preference,
    destination: Option<Destination>,
    check: bool,
    seed: u64,
}

impl Order {
    fn read(args: &RunArgs) -> Result<Order, Failure> {
        let example = args.problem.input.is_none() && args.problem.shape.is_none();
        let check = args.check || example;
        let mut mistakes = Mistakes::default();
        let request = Request::read(&args.problem, args.output.is_some() || example, &mut mistakes);
        if let Some(request) = &request {
            mistakes.take("memory", operands::fits(request, check));
        }
        let preference = mistakes.take("--executor", args.executor.as_deref().map_or(Ok(Preference::Auto), names::executor));
        let seed = mistakes.take("--seed", args.seed.as_deref().map_or(Ok(0), names::seed));
        if args.seed.is_some() && args.problem.input.is_some() {
            mistakes.add("--seed", "the --input has numbers already");
        }
        let destination = args.output.as_deref().map(|path| {
            let input = args.problem.input.as_deref();
            mistakes.take(format!("--output {}", path.display()), Destination::new(path, input))
        });
        let order = request.zip(preference).zip(seed).map(|((request, preference), seed)| Order {
            request,
            preference,
            destination: destination.flatten(),
            check,
            seed,
        });
        mistakes.finish(order)
    }
}

/// What speaks against an executor.
#[derive(Serialize)]
struct Declined {
    executor: ExecutorName,
    reasons: Vec<Reason>,
    text: String,
}

impl Declined {
    fn new(unsupported: &Unsupported) -> Declined {
        let text = unsupported.reasons.iter().map(Reason::to_string).collect::<Vec<_>>().join("; ").replace('\n', "; ");
        Declined { executor: unsupported.executor, reasons: unsupported.reasons.clone(), text }
    }
}

#[derive(Serialize)]
struct Checked {
    passed: bool,
    o_relative: f64,
    o: Worst,
    stats: Option<Worst>,
}

impl Checked {
    fn new(distance: &Distance) -> Checked {
        Checked { passed: distance.passes(), o_relative: distance.o_relative(), o: distance.o, stats: distance.stats }
    }
}

/// What a run has to tell.
#[derive(Serialize)]
struct Told {
    executor: ExecutorName,
    declined: Vec<Declined>,
    shape: Shape,
    layout: &'static str,
    masks: Vec<String>,
    dtype: &'static str,
    scale: f32,
    stats: bool,
    input: Option<String>,
    seed: Option<u64>,
    engine: String,
    copied: Vec<&'static str>,
    workspace_bytes: u64,
    compute_ms: f64,
    tflops: f64,
    check: Option<Checked>,
    output: Option<String>,
    notes: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &RunArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let progress = Progress::new(json);
    let Order { request, .. } = &order;
    let scale = request.attn_scale();

    let dispatcher = Dispatcher::new(args.places.options());
    let choice = {
        let _step = progress.spinner("preparing");
        choose(&dispatcher, request, order.preference)?
    };
    let mut operands = Operands::load(request, order.seed, progress)?;
    let report = {
        let _step = progress.spinner("computing");
        let mut compute = || {
            let computed = operands.forward(choice.prepared.as_ref(), scale);
            computed.map_err(|e| Failure::Environment(lines(choice.executor, &e)))
        };
        if choice.executor != ExecutorName::Cpu {
            // A first execution loads its kernel, which takes longer than most attention: the time told is the second's.
            compute()?;
        }
        compute()?
    };
    if let Some(destination) = &order.destination {
        let _step = progress.spinner("writing");
        let written = destination.write(&request.spec, request.layout, &operands.o, operands.stats.as_deref());
        written.map_err(|e| Failure::environment(destination.path.display(), format!("cannot be written: {e}")))?;
    }
    let distance = order.check.then(|| operands.check(&request.spec, scale, progress));
    let outcome = if distance.is_none_or(|d| d.passes()) { Outcome::Good } else { Outcome::PastTolerance };
    let told = tell(&order, choice, report, distance, operands.notes);
    Answer::new(json, &told, || text(&told), outcome)
}

/// The lines of an error about an executor.
pub(crate) fn lines(executor: ExecutorName, error: &Error) -> Vec<Line> {
    if let Error::Unsupported(unsupported) = error {
        return unsupported.reasons.iter().map(|reason| Line::new(unsupported.executor, reason)).collect();
    }
    vec![Line::new(executor, error)]
}

/// An executor for a request. The scale is no part of a problem, so what speaks against it is found here.
fn choose(dispatcher: &Dispatcher, request: &Request, preference: Preference) -> Result<Choice, Failure> {
    let problem = &request.problem;
    let bad_scale = guard::check_scale(request.attn_scale()).err().map(|errors| {
        let limit = |e: sdpa::SpecError| Reason::Limit { field: e.field, value: e.value, limit: e.rule };
        Unsupported { executor: ExecutorName::Cudnn, reasons: errors.0.into_iter().map(limit).collect() }
    });
    match (preference, bad_scale) {
        (Preference::Named(name), bad_scale) => {
            let mut against = Vec::new();
            if let Some(unsupported) = bad_scale.filter(|_| name == ExecutorName::Cudnn) {
                against.extend(lines(name, &Error::Unsupported(unsupported)));
            }
            match dispatcher.prepare(problem, preference) {
                Ok(choice) if against.is_empty() => return Ok(choice),
                Ok(_) => {}
                Err(e) => against.extend(lines(name, &e)),
            }
            Err(Failure::Executor(against))
        }
        (Preference::Auto, None) => {
            dispatcher.prepare(problem, preference).map_err(|e| Failure::Environment(lines(ExecutorName::Cudnn, &e)))
        }
        (Preference::Auto, Some(bad_scale)) => {
            let mut declined = vec![bad_scale];
            for name in ExecutorName::ALL.into_iter().filter(|&name| name != ExecutorName::Cudnn) {
                match dispatcher.prepare(problem, Preference::Named(name)) {
                    Ok(choice) => return Ok(Choice { declined, ..choice }),
                    Err(Error::Unsupported(unsupported)) => declined.push(unsupported),
                    Err(e) => declined.push(Unsupported { executor: name, reasons: vec![Reason::Absent(e.to_string())] }),
                }
            }
            Err(Failure::Executor(declined.into_iter().flat_map(|d| lines(d.executor, &Error::Unsupported(d))).collect()))
        }
    }
}

fn tell(order: &Order, choice: Choice, report: Report, distance: Option<Distance>, notes: Vec<String>) -> Told {
    let request = &order.request;
    let (input, seed) = match &request.source {
        Source::File(header, _) => (Some(header.path.display().to_string()), None),
        Source::Random => (None, Some(order.seed)),
    };
    Told {
        executor: choice.executor,
        declined: choice.declined.iter().map(Declined::new).collect(),
        shape: request.shape(),
        layout: request.layout.name(),
        masks: request.masks(),
        dtype: request.element.dtype().name(),
        scale: request.attn_scale(),
        stats: request.spec.stats,
        input,
        seed,
        engine: report.engine,
        copied: report.copied,
        workspace_bytes: report.workspace_bytes,
        compute_ms: report.compute_ms,
        tflops: request.problem.flops() / (report.compute_ms.max(1e-6) * 1e9),
        check: distance.as_ref().map(Checked::new),
        output: order.destination.as_ref().map(|d| d.path.display().to_string()),
        notes,
    }
}

fn worst(name: &str, worst: &Worst) -> String {
    format!("{name}: error {:.1e}, tolerance {:.1e} ({:.0} % of it)", worst.error, worst.tolerance, worst.ratio * 100.0)
}

fn text(told: &Told) -> String {
    let mut table = Table::default();
    let s = &told.shape;
    table.row("executor", told.executor.name());
    table.rows("declined", told.declined.iter().map(|d| format!("{}: {}", d.executor, d.text)));
    table.row(
        "shape",
        format!(
            "batch {}, heads {} on {}, queries {}, keys {}, dims {} and {}, {}",
            s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv, s.dim_qk, s.dim_v, told.layout
        ),
    );
    table.row("masks", list(&told.masks));
    table.row("dtype", told.dtype);
    table.row("scale", told.scale.to_string());
    table.rows("input", told.input.iter().cloned());
    table.rows("seed", told.seed.iter().map(u64::to_string));
    table.rows("note", told.notes.iter().cloned());
    table.row("engine", told.engine.clone());
    table.row("copied", list(&told.copied));
    table.row("workspace", memory::human(u128::from(told.workspace_bytes)));
    table.row("compute", format!("{:.3} ms, {:.3} TFLOP/s", told.compute_ms, told.tflops));
    table.rows("output", told.output.iter().cloned());
    if let Some(check) = &told.check {
        table.row("check", if check.passed { "passed" } else { "FAILED" });
        table.row("", format!("{}; relative {:.1e}", worst("o", &check.o), check.o_relative));
        table.rows("", check.stats.iter().map(|s| worst("stats", s)));
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Data, Element};
    use sdpa::{AttentionSpec, Layout};

    /// The exit code of a run depends on this alone.
    #[test]
    fn one_wrong_element_is_past_the_tolerance() {
        let shape = Shape { batch: 2, heads_q: 4, heads_kv: 2, seq_q: 33, seq_kv: 40, dim_qk: 16, dim_v: 8 };
        for (element, layout) in Element::ALL.into_iter().zip([Layout::Bhsd, Layout::Bshd, Layout::Sbhd]) {
            let spec = AttentionSpec::dense(element.dtype(), shape, layout).mask(sdpa::Mask::causal()).with_stats();
            let choice = Dispatcher::default().prepare(&spec.validate().unwrap(), Preference::Named(ExecutorName::Cpu)).unwrap();
            let mut operands = Operands::random(&spec, element, 1).unwrap();
            operands.forward(choice.prepared.as_ref(), 0.25).unwrap();
            let passes = |operands: &Operands| operands.check(&spec, 0.25, Progress::new(true)).passes();
            assert!(passes(&operands));
            assert!(!operands.check(&spec, 0.26, Progress::new(true)).passes());
            let stats = operands.stats.as_mut().unwrap();
            stats[77] += 0.01;
            assert!(!passes(&operands));
            operands.stats.as_mut().unwrap()[77] -= 0.01;
            match &mut operands.o {
                Data::F32(o) => o[1000] += 1e-3,
                Data::F16(o) => o[1000] = half::f16::from_f32(o[1000].to_f32() + 0.05),
                Data::BF16(o) => o[1000] = half::bf16::from_f32(o[1000].to_f32() + 0.2),
            }
            assert!(!passes(&operands));
        }
    }
}
