//! `inspect`: any stage on the way from a specification to a plan.

mod kernel;

use crate::args::{InspectArgs, PlaceArgs};
use crate::compile::profile;
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::names::{self, Stage};
use crate::plan;
use crate::progress::Progress;
use crate::request::{Request, Wanted};
use crate::table::{Table, list};
use cudnn_graph::encode::encode;
use cudnn_graph::{DeviceProfile, Graph, Library, Program, Version};
use sdpa::cudnn::lower::{self, Form};
use sdpa::cudnn::plan::schedule as schedule_of;
use sdpa::cudnn::schedule::ScheduleReport;
use sdpa::cudnn::{Pieces, cost, pieces};
use sdpa::mask::{SEQ_LEN_KV, SEQ_LEN_Q};
use sdpa::paged::PAGE_TABLE;
use sdpa::{
    AttentionSpec, BackwardProblem, BackwardSpec, ExecutorName, GradientSpec, Kept, Packed, Paged, Problem, Side, StatsBase, TensorSpec,
};
use serde::Serialize;
use std::io::Write;

/// Assumed where no library is found.
pub(crate) const ASSUMED: Version = Version::new(9, 27, 0);

/// Everything that was asked for.
struct Order {
    request: Request,
    stage: Stage,
    form: Option<Form>,
    runtime: Option<Version>,
    profile: Option<DeviceProfile>,
}

impl Order {
    fn read(args: &InspectArgs) -> Result<Order, Failure> {
        let mut mistakes = Mistakes::default();
        let stage = mistakes.take("--stage", args.stage.as_deref().map_or(Ok(Stage::Graph), names::stage));
        let mut gradient = args.backward.clone();
        gradient.backward |= stage == Some(Stage::Gradient);
        let request = Request::read(&args.problem, &Wanted { gradient: Some(&gradient), ..Wanted::default() }, &mut mistakes);
        let form = args.form.as_deref().map(|text| mistakes.take("--form", names::form(text)));
        let runtime = args.runtime.as_deref().map(|text| mistakes.take("--runtime", names::runtime(text)));
        let profile = args.device_profile.as_deref().map(|path| mistakes.take(path.display(), profile(path)));
        let idle = match stage {
            None => [false; 3],
            Some(Stage::Spec | Stage::Problem | Stage::Trace | Stage::Gradient) => [true; 3],
            Some(Stage::Graph | Stage::Program | Stage::Schedule) => [false, false, true],
            Some(Stage::Plan) => [false, true, false],
            Some(Stage::Kernel) => [true, true, false],
        };
        let options = [("--form", form.is_some()), ("--runtime", runtime.is_some()), ("--device-profile", profile.is_some())];
        for ((option, given), idle) in options.into_iter().zip(idle) {
            if given && idle {
                mistakes.add(option, "has no bearing on this --stage");
            }
        }
        args.places.check(&mut mistakes);
        let order = request.zip(stage).map(|(request, stage)| Order {
            request,
            stage,
            form: form.flatten(),
            runtime: runtime.flatten(),
            profile: profile.flatten(),
        });
        mistakes.finish(order)
    }
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let Order { request, .. } = &order;
    match order.stage {
        Stage::Spec => {
            let backward = request.backward.as_ref().map(|b| &b.spec);
            let stage = SpecStage { stage: "spec", spec: &request.spec, backward };
            Answer::new(json, &stage, || spec_text(request), Outcome::Good)
        }
        Stage::Problem => {
            let backward = request.backward.as_ref().map(|b| &b.problem);
            let stage = ProblemStage { stage: "problem", problem: &request.problem, backward };
            Answer::new(json, &stage, || problem_text(request), Outcome::Good)
        }
        Stage::Trace => {
            let stage = TraceStage::new(request);
            Answer::new(json, &stage, || stage.text(request), Outcome::Good)
        }
        Stage::Gradient => {
            let stage = GradientStage::new(request);
            Answer::new(json, &stage, || stage.text(), Outcome::Good)
        }
        Stage::Graph | Stage::Program | Stage::Schedule => lowered(&order, &args.places, json),
        Stage::Plan => {
            let report = plan::make(&request.job(), order.form, order.profile.as_ref(), &args.places, Progress::new(json))?;
            Answer::new(json, &report, || report.text(), Outcome::Good)
        }
        Stage::Kernel => kernel::run(&request.job(), order.profile.as_ref(), json),
    }
}

#[derive(Serialize)]
struct SpecStage<'a> {
    stage: &'static str,
    spec: &'a AttentionSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<&'a BackwardSpec>,
}

#[derive(Serialize)]
struct ProblemStage<'a> {
    stage: &'static str,
    problem: &'a Problem,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<&'a BackwardProblem>,
}

/// A declared parameter, in words.
fn declared(request: &Request) -> Vec<String> {
    request
        .params
        .iter()
        .map(|p| match p.scalar() {
            Some(value) => format!("{} = {value}", p.declared.name),
            None => format!("{}: {}", p.declared.name, p.kind()),
        })
        .collect()
}

/// A statement to a line.
fn lines(trace: &impl std::fmt::Display) -> String {
    trace.to_string().replace("; ", ";\n")
}

/// What score_mods and masks come to.
#[derive(Serialize)]
struct TraceStage<'a> {
    stage: &'static str,
    /// `None`: scores stay as they are.
    score_mod: Option<String>,
    kept: &'a Kept,
    params: Vec<String>,
}

impl TraceStage<'_> {
    fn new(request: &Request) -> TraceStage<'_> {
        let score_mod = request.problem.score_mod().map(ToString::to_string);
        TraceStage { stage: "trace", score_mod, kept: request.problem.kept(), params: declared(request) }
    }

    fn text(&self, request: &Request) -> String {
        let mut table = Table::default();
        table.row("score_mod", self.score_mod.as_ref().map_or_else(|| "none".to_owned(), lines));
        table.row("keeps", bands_text(request.problem.kept()));
        let lengths = [(self.kept.seq_len_q, SEQ_LEN_Q), (self.kept.seq_len_kv, SEQ_LEN_KV)];
        table.row("lengths", list(&lengths.iter().filter(|(there, _)| *there).map(|(_, name)| *name).collect::<Vec<_>>()));
        table.row("rest", self.kept.rest.as_ref().map_or_else(|| "none".to_owned(), lines));
        table.row("params", if self.params.is_empty() { "none".to_owned() } else { self.params.join("\n") });
        table.render()
    }
}

/// The derived gradient.
#[derive(Serialize)]
struct GradientStage {
    stage: &'static str,
    /// What each value of the trace is.
    roots: Vec<String>,
    trace: String,
}

impl GradientStage {
    fn new(request: &Request) -> GradientStage {
        let gradient = request.backward.as_ref().and_then(|b| b.problem.gradient());
        let wrt = gradient.iter().flat_map(|g| &g.wrt).map(|name| format!("d{name}"));
        let roots = ["score", "dscore"].into_iter().map(str::to_owned).chain(wrt).collect();
        // Without score_mods, the gradient goes through.
        let trace = gradient.map_or_else(|| "score, upstream".to_owned(), |g| g.trace.to_string());
        GradientStage { stage: "gradient", roots, trace }
    }

    fn text(&self) -> String {
        let mut table = Table::default();
        table.row("values", list(&self.roots));
        table.row("trace", lines(&self.trace));
        table.render()
    }
}

/// A graph, a program or a schedule, and what it was made for.
#[derive(Serialize)]
struct Lowered<'a> {
    stage: &'static str,
    pass: &'static str,
    form: Form,
    runtime: String,
    runtime_from: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<&'a Graph>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a Program>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule: Option<&'a ScheduleReport>,
}

fn runtime(given: Option<Version>, places: &PlaceArgs) -> Result<(Version, &'static str), Failure> {
    if let Some(version) = given {
        return Ok((version, "--runtime"));
    }
    match Library::load(&places.options().search) {
        Ok(library) => Ok((library.version(), "library")),
        // Whoever names a library wants that one.
        Err(e) if places.cudnn.is_some() || places.driver.is_some() => Err(Failure::Executor(vec![Line::new("cudnn", e)])),
        Err(_) => Ok((ASSUMED, "assumed")),
    }
}

fn lowered(order: &Order, places: &PlaceArgs, json: bool) -> Result<Answer, Failure> {
    let job = order.request.job();
    if let Some(empty) = sdpa::empty::declined(&order.request.problem) {
        return Err(Failure::Executor(vec![Line::new(ExecutorName::CUDNN, empty)]));
    }
    let (runtime, runtime_from) = runtime(order.runtime, places)?;
    let form = order.form.or_else(|| lower::forms(&job, runtime).first().copied()).unwrap_or(Form::Composite);
    let refused = |e: &dyn std::fmt::Display| Failure::Executor(vec![Line::new(format!("{form} form"), e)]);
    let lowered = lower::lower(&job, form, runtime).map_err(|e| refused(&e))?;
    let (mut program, mut schedule) = (None, None);
    match order.stage {
        Stage::Program => program = Some(encode(&lowered.graph, runtime).map_err(|e| refused(&e))?),
        Stage::Schedule => {
            schedule = Some(schedule_of(&job, form, runtime, Pieces::default()).map_err(|e| refused(&e))?.told(job.params()))
        }
        Stage::Spec | Stage::Problem | Stage::Trace | Stage::Gradient | Stage::Graph | Stage::Plan | Stage::Kernel => {}
    }
    if !json {
        // The stage alone goes to stdout; a closed stderr is no reason to stop.
        writeln!(std::io::stderr(), "note: {form} form for cuDNN {runtime} ({runtime_from})").ok();
    }
    let (stage, graph) = match (&program, &schedule) {
        (Some(_), _) => ("program", None),
        (None, Some(_)) => ("schedule", None),
        (None, None) => ("graph", Some(lowered.graph.graph())),
    };
    let (program, schedule, runtime) = (program.as_ref(), schedule.as_ref(), runtime.to_string());
    let value = Lowered { stage, pass: job.name(), form, runtime, runtime_from, graph, program, schedule };
    let text = || match (program, schedule) {
        (Some(program), _) => program.to_string(),
        (None, Some(schedule)) => schedule.to_string(),
        (None, None) => lowered.graph.to_string(),
    };
    Answer::new(json, &value, text, Outcome::Good)
}

fn tensors(table: &mut Table, names: [&str; 4], tensors: [&TensorSpec; 4]) {
    for (name, t) in names.into_iter().zip(tensors) {
        table.row(name, format!("{:?} strides {:?} alignment {}", t.dims, t.strides, t.alignment));
    }
}

fn yes(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

const FORWARD: [&str; 4] = ["q", "k", "v", "o"];
const BACKWARD: [&str; 4] = ["do", "dq", "dk", "dv"];

/// The gradients that are asked for besides, and how.
fn wrt_text(table: &mut Table, wrt: &[GradientSpec], deterministic: bool) {
    table.row("wrt", list(&wrt.iter().map(|g| format!("{} in {}", g.name, g.dtype)).collect::<Vec<_>>()));
    table.row("deterministic", yes(deterministic));
}

/// Whose boundaries there are, and how many tokens.
fn packed_text(packed: Option<&Packed>, paged: Option<&Paged>) -> Option<String> {
    let packed = packed?;
    let side =
        |side: Side| format!("{}, {}", packed.boundaries(side), packed.total(side).map_or("any number".to_owned(), |n| n.to_string()));
    let sides = if packed.cross && paged.is_none() { &Side::ALL[..] } else { &Side::ALL[..1] };
    Some(format!("{} tokens at most", sides.iter().map(|s| side(*s)).collect::<Vec<_>>().join("; ")))
}

/// How many pages there are, and how long.
fn paged_text(paged: Option<&Paged>) -> Option<String> {
    paged.map(|paged| format!("{} pages of {} tokens, by {PAGE_TABLE}", paged.pages, paged.page_size))
}

fn spec_text(request: &Request) -> String {
    let spec = &request.spec;
    let mut table = Table::default();
    table.row("dtype", spec.dtype.name());
    table.rows("dtype of o", spec.o_dtype.map(|dtype| dtype.name().to_owned()));
    table.rows("scales", spec.block_scaled.then(|| "of blocks of 32 elements".to_owned()));
    tensors(&mut table, FORWARD, [&spec.q, &spec.k, &spec.v, &spec.o]);
    table.rows("packed", packed_text(spec.packed.as_ref(), spec.paged.as_ref()));
    table.rows("paged", paged_text(spec.paged.as_ref()));
    table.rows("score_mod", request.score_mods());
    table.rows("sink", spec.sink.then(|| "in the denominator of each query head".to_owned()));
    table.rows("dropout", spec.dropout.map(|dropout| format!("{} of the weights", dropout.p())));
    table.row("masks", list(&spec.masks.iter().map(ToString::to_string).collect::<Vec<_>>()));
    table.row("stats", yes(spec.stats));
    table.rows("stats_base", (spec.stats_base != StatsBase::Natural).then(|| spec.stats_base.to_string()));
    table.rows("row_max", spec.row_max.then(|| yes(true).to_owned()));
    table.rows("sum_exp", spec.sum_exp.then(|| yes(true).to_owned()));
    if let Some(b) = request.backward.as_ref().map(|b| &b.spec) {
        table.rows("dtype of do", b.d_o_dtype.map(|dtype| dtype.name().to_owned()));
        table.rows("dtype of gradients", b.gradient_dtype.map(|dtype| dtype.name().to_owned()));
        tensors(&mut table, BACKWARD, [&b.d_o, &b.dq, &b.dk, &b.dv]);
        wrt_text(&mut table, &b.wrt, b.deterministic);
    }
    table.render()
}

/// The conjunction of all masks, as a rule on the indices of a query and a key.
fn bands_text(kept: &Kept) -> String {
    let Kept { region, ends, seq_len_q: _, seq_len_kv: _, rest: _ } = kept;
    let rules = [
        region.lower.map(|n| format!("k - q > {n}")),
        region.upper.map(|n| format!("k - q <= {n}")),
        region.prefix.map(|n| format!("k <= q or k < {n}")),
        ends.lower.map(|n| format!("(k - q) - (len_kv - len_q) > {n}")),
        ends.upper.map(|n| format!("(k - q) - (len_kv - len_q) <= {n}")),
    ];
    let rules: Vec<String> = rules.into_iter().flatten().collect();
    if rules.is_empty() { "every key".to_owned() } else { rules.join(" and ") }
}

fn problem_text(request: &Request) -> String {
    let p = &request.problem;
    let mut table = Table::default();
    table.row("dtype", p.dtype().name());
    table.rows("scales", p.block_scaled().then(|| "of blocks of 32 elements".to_owned()));
    table.row("batch", p.batch().to_string());
    table.row("heads", format!("{} on {}, groups of {}", p.heads_q(), p.heads_kv(), p.group()));
    table.row("lengths", format!("{} queries, {} keys", p.seq_q(), p.seq_kv()));
    table.row("dims", format!("{} and {}", p.dim_qk(), p.dim_v()));
    let [q, k, v, o] = p.tensors();
    tensors(&mut table, FORWARD, [q, k, v, o]);
    table.rows("packed", packed_text(p.packed(), p.paged()));
    table.rows("paged", paged_text(p.paged()));
    table.rows("score_mod", p.score_mod().map(lines));
    table.rows("sink", p.sink().then(|| "in the denominator of each query head".to_owned()));
    table.rows("dropout", p.dropout().map(|dropout| format!("{} of the weights", dropout.p())));
    table.row("keeps", bands_text(p.kept()));
    table.rows("and", p.kept().rest.iter().map(lines));
    table.rows("cuda is", request.measured().map(|measured| measured.to_string()));
    table.rows("on cudnn", cost::notes(&request.job(), Pieces::default()));
    table.rows("in pieces", pieces::worthwhile(&request.job()).into_iter().flatten().map(|part| part.piece.to_string()));
    table.rows("params", declared(request));
    table.row("stats", yes(p.stats()));
    table.rows("stats_base", (p.stats_base() != StatsBase::Natural).then(|| p.stats_base().to_string()));
    table.rows("row_max", p.row_max().then(|| yes(true).to_owned()));
    table.rows("sum_exp", p.sum_exp().then(|| yes(true).to_owned()));
    table.row("scale", request.attn_scale().to_string());
    if let Some(b) = request.backward.as_ref().map(|b| &b.problem) {
        tensors(&mut table, BACKWARD, [b.d_o(), b.dq(), b.dk(), b.dv()]);
        wrt_text(&mut table, b.wrt(), b.deterministic());
    }
    let work = request.backward.as_ref().map_or(p.flops(), |b| b.problem.flops());
    table.row("work", format!("{work:.3e} operations"));
    table.render()
}
