//! `inspect`: prints a stage on the way from a specification to a plan.

mod native;

use crate::args::{InspectArgs, PlaceArgs};
use crate::compile::profile;
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::names::{self, Scheduler, Stage};
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
    AttentionSpec, BackwardProblem, BackwardSpec, ExecutorName, Fact, GradientSpec, Kept, Operand, Packed, Paged, Problem, Side, Statistic,
    StatsBase, TensorSpec,
};
use serde::Serialize;
use std::io::Write;

/// The version of cuDNN that is assumed if no library is found.
pub(crate) const ASSUMED: Version = Version::new(9, 27, 0);

/// The parsed arguments.
struct Order {
    request: Request,
    stage: Stage,
    scheduler: Scheduler,
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
        let executor = args.executor.as_deref().map(|text| mistakes.take("--executor", names::scheduler(text)));
        let scheduler = executor.flatten().unwrap_or(Scheduler::Cudnn);
        let form = args.form.as_deref().map(|text| mistakes.take("--form", names::form(text)));
        let runtime = args.runtime.as_deref().map(|text| mistakes.take("--runtime", names::runtime(text)));
        let profile = args.device_profile.as_deref().map(|path| mistakes.take(path.display(), profile(path)));
        let idle = match (stage, scheduler) {
            (None, _) => [false; 4],
            (Some(Stage::Spec | Stage::Problem | Stage::Trace | Stage::Gradient), _) => [true; 4],
            (Some(Stage::Graph | Stage::Program), _) => [true, false, false, true],
            (Some(Stage::Schedule), Scheduler::Cudnn) => [false, false, false, true],
            (Some(Stage::Schedule), Scheduler::Cuda) => [false, true, true, false],
            (Some(Stage::Plan), _) => [true, false, true, false],
            (Some(Stage::Kernel), _) => [true, true, true, false],
        };
        let options = [
            ("--executor", executor.is_some()),
            ("--form", form.is_some()),
            ("--runtime", runtime.is_some()),
            ("--device-profile", profile.is_some()),
        ];
        for ((option, given), idle) in options.into_iter().zip(idle) {
            if given && idle {
                let of = if stage == Some(Stage::Schedule) && option != "--executor" { " and --executor" } else { "" };
                mistakes.add(option, format!("has no effect with this --stage{of}; remove it"));
            }
        }
        args.places.check(&mut mistakes);
        let order = request.zip(stage).map(|(request, stage)| Order {
            request,
            stage,
            scheduler,
            form: form.flatten(),
            runtime: runtime.flatten(),
            profile: profile.flatten(),
        });
        mistakes.finish(order)
    }
}

/// Runs the command `inspect` and returns its output.
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
        Stage::Schedule if order.scheduler == Scheduler::Cuda => native::schedule(&request.job(), order.profile.as_ref(), json),
        Stage::Graph | Stage::Program | Stage::Schedule => lowered(&order, &args.places, json),
        Stage::Plan => {
            let report = plan::make(&request.job(), order.form, order.profile.as_ref(), &args.places, Progress::new(json))?;
            Answer::new(json, &report, || report.text(), Outcome::Good)
        }
        Stage::Kernel => native::kernels(&request.job(), order.profile.as_ref(), json),
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

/// Describes the declared parameters.
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

/// Prints one statement per line.
fn lines(trace: &impl std::fmt::Display) -> String {
    trace.to_string().replace("; ", ";\n")
}

/// The normal form of score_mods and masks.
#[derive(Serialize)]
struct TraceStage<'a> {
    stage: &'static str,
    /// `None` without score_mods.
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
    /// Descriptions of the roots of the trace.
    roots: Vec<String>,
    trace: String,
}

impl GradientStage {
    fn new(request: &Request) -> GradientStage {
        let gradient = request.backward.as_ref().and_then(|b| b.problem.gradient());
        let wrt = gradient.iter().flat_map(|g| &g.wrt).map(|name| format!("d{name}"));
        let roots = ["score", "dscore"].into_iter().map(str::to_owned).chain(wrt).collect();
        // Without score_mods, the gradient of the score is the upstream gradient.
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

/// A graph, a program or a schedule, and the runtime that it is for.
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
        // If the user named a library, it must be used, so failing to load it is fatal.
        Err(e) if places.cudnn.is_some() || places.driver.is_some() => Err(Failure::Executor(vec![Line::new("cudnn", e)])),
        Err(_) => Ok((ASSUMED, "assumed")),
    }
}

fn lowered(order: &Order, places: &PlaceArgs, json: bool) -> Result<Answer, Failure> {
    let job = order.request.job();
    if let Some(empty) = sdpa::empty::unsupported(&order.request.problem) {
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
        // Print the note to stderr, because stdout has only the stage. A closed stderr is ignored.
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

fn tensor_text(t: &TensorSpec) -> String {
    format!("{:?} strides {:?} alignment {}", t.dims, t.strides, t.alignment)
}

fn tensors(table: &mut Table, operands: [Operand; 4], tensors: [&TensorSpec; 4]) {
    for (operand, tensor) in operands.into_iter().zip(tensors) {
        table.row(row_of(operand), tensor_text(tensor));
    }
}

/// Returns the name of an operand's row.
fn row_of(operand: Operand) -> &'static str {
    if operand == Operand::DO { "do" } else { operand.name() }
}

fn yes(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

const FORWARD: [Operand; 4] = [Operand::Q, Operand::K, Operand::V, Operand::O];
const BACKWARD: [Operand; 4] = [Operand::DO, Operand::DQ, Operand::DK, Operand::DV];

/// Describes the requested gradients of parameters.
fn wrt_text(wrt: &[GradientSpec]) -> String {
    list(&wrt.iter().map(|g| format!("{} in {}", g.name, g.dtype)).collect::<Vec<_>>())
}

/// Describes packed sequences: the sides with offsets, and the numbers of tokens.
fn packed_text(packed: Option<&Packed>, paged: Option<&Paged>) -> Option<String> {
    let packed = packed?;
    let side = |side: Side| {
        format!("{}, {}", packed.boundaries(side), packed.total(side).map_or("any number of".to_owned(), |n| format!("at most {n}")))
    };
    let sides = if packed.cross && paged.is_none() { &Side::ALL[..] } else { &Side::ALL[..1] };
    Some(format!("{} tokens", sides.iter().map(|s| side(*s)).collect::<Vec<_>>().join("; ")))
}

/// Describes pages: their number and size.
fn paged_text(paged: Option<&Paged>) -> Option<String> {
    paged.map(|paged| format!("{} pages of {} tokens, by {PAGE_TABLE}", paged.pages, paged.page_size))
}

fn spec_text(request: &Request) -> String {
    let AttentionSpec {
        dtype,
        o_dtype,
        block_scaled,
        q,
        k,
        v,
        o,
        // Score_mods are printed from the request, as the user wrote them.
        score_mods: _,
        packed,
        paged,
        masks,
        sink,
        dropout,
        stats,
        stats_base,
        row_max,
        sum_exp,
        batch_invariant,
        ..
    } = &request.spec;
    let mut table = Table::default();
    table.row("dtype", dtype.name());
    table.rows("dtype of o", o_dtype.map(|dtype| dtype.name().to_owned()));
    table.rows("scales", block_scaled.then(|| "of blocks of 32 elements".to_owned()));
    tensors(&mut table, FORWARD, [q, k, v, o]);
    table.rows("packed", packed_text(packed.as_ref(), paged.as_ref()));
    table.rows("paged", paged_text(paged.as_ref()));
    table.rows("score_mod", request.score_mods());
    table.rows("sink", sink.then(|| "in the denominator of each query head".to_owned()));
    table.rows("dropout", dropout.map(|dropout| format!("{} of the weights", dropout.p())));
    table.row("masks", list(&masks.iter().map(ToString::to_string).collect::<Vec<_>>()));
    table.row("stats", yes(*stats));
    table.rows("stats_base", (*stats_base != StatsBase::Natural).then(|| stats_base.to_string()));
    table.rows("row_max", row_max.then(|| yes(true).to_owned()));
    table.rows("sum_exp", sum_exp.then(|| yes(true).to_owned()));
    table.rows("batch_invariant", batch_invariant.then(|| yes(true).to_owned()));
    if let Some(b) = request.backward.as_ref().map(|b| &b.spec) {
        let BackwardSpec { forward: _, d_o, dq, dk, dv, wrt, deterministic, d_o_dtype, gradient_dtype, .. } = b;
        table.rows("dtype of do", d_o_dtype.map(|dtype| dtype.name().to_owned()));
        table.rows("dtype of gradients", gradient_dtype.map(|dtype| dtype.name().to_owned()));
        tensors(&mut table, BACKWARD, [d_o, dq, dk, dv]);
        table.row("wrt", wrt_text(wrt));
        table.row("deterministic", yes(*deterministic));
    }
    table.render()
}

/// Returns the conjunction of all masks, as a rule on the indices of a query and a key.
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

/// Adds the rows of a fact. A fact without rows is part of another fact's row.
fn fact_text(table: &mut Table, request: &Request, fact: &Fact<'_>) {
    let p = &request.problem;
    match fact {
        Fact::Dtype(dtype) => table.row("dtype", dtype.name()),
        Fact::OutputDtype(dtype) => table.rows("dtype of o", (*dtype != p.dtype()).then(|| dtype.name().to_owned())),
        Fact::BlockScaled(is_scaled) => table.rows("scales", is_scaled.then(|| "of blocks of 32 elements".to_owned())),
        Fact::Batch(batch) => table.row("batch", batch.to_string()),
        Fact::HeadsQ(heads_q) => table.row("heads", format!("{heads_q} on {}, groups of {}", p.heads_kv(), p.group())),
        Fact::SeqQ(seq_q) => table.row("lengths", format!("{seq_q} queries, {} keys", p.seq_kv())),
        Fact::DimQk(dim_qk) => table.row("dims", format!("{dim_qk} and {}", p.dim_v())),
        Fact::HeadsKv(_) | Fact::SeqKv(_) | Fact::DimV(_) => {}
        Fact::Strides(operand, _) => {
            let backward = request.backward.as_ref().map(|b| b.problem.tensor(*operand));
            table.rows(row_of(*operand), p.tensor(*operand).or(backward).map(tensor_text));
        }
        Fact::Alignment(..) => {}
        Fact::Packed(_) => table.rows("packed", packed_text(p.packed(), p.paged())),
        Fact::CrossPacked(_) | Fact::WideBoundaries(_) | Fact::MostTokens(..) => {}
        Fact::Sink(has_sink) => table.rows("sink", has_sink.then(|| "in the denominator of each query head".to_owned())),
        Fact::Dropout(dropout) => table.rows("dropout", dropout.map(|dropout| format!("{} of the weights", dropout.p()))),
        Fact::Pages(_) => table.rows("paged", paged_text(p.paged())),
        Fact::PageSize(_) => {}
        Fact::ScoreMod(score_mod) => table.rows("score_mod", score_mod.map(lines)),
        Fact::Band(..) => table.row("keeps", bands_text(p.kept())),
        Fact::Prefix(_) | Fact::Ends(..) => {}
        // Lengths are shown in the row of parameters.
        Fact::Lengths(..) => {}
        Fact::Keep(keep) => {
            table.rows("and", keep.map(lines));
            table.rows("order", request.cudnn_first().map(ToString::to_string));
            table.rows("on cudnn", cost::notes(&request.job(), Pieces::default()));
            table.rows("in pieces", pieces::worthwhile(&request.job()).into_iter().flatten().map(|part| part.piece.to_string()));
        }
        Fact::Parameters(_) => table.rows("params", declared(request)),
        Fact::Statistic(Statistic::Stats, is_computed) => table.row("stats", yes(*is_computed)),
        Fact::Statistic(statistic, is_computed) => table.rows(statistic.name(), is_computed.then(|| yes(true).to_owned())),
        Fact::StatsBase(base) => {
            table.rows("stats_base", (*base != StatsBase::Natural).then(|| base.to_string()));
            table.row("scale", request.attn_scale().to_string());
        }
        Fact::BatchInvariant(is_invariant) => table.rows("batch_invariant", is_invariant.then(|| yes(true).to_owned())),
        Fact::UpstreamDtype(dtype) => table.rows("dtype of do", (*dtype != p.dtype()).then(|| dtype.name().to_owned())),
        Fact::GradientDtype(dtype) => table.rows("dtype of gradients", (*dtype != p.dtype()).then(|| dtype.name().to_owned())),
        // The gradient is printed as a stage of its own.
        Fact::Gradient(_) => {}
        Fact::GradientsOf(wrt) => table.row("wrt", wrt_text(wrt)),
        Fact::BackwardParameters(_) => {}
        Fact::Deterministic(is_deterministic) => table.row("deterministic", yes(*is_deterministic)),
    }
}

fn problem_text(request: &Request) -> String {
    let mut table = Table::default();
    match &request.backward {
        Some(b) => b.problem.facts().for_each(|fact| fact_text(&mut table, request, &fact)),
        None => request.problem.facts().for_each(|fact| fact_text(&mut table, request, &fact)),
    }
    let work = request.backward.as_ref().map_or_else(|| request.problem.flops(), |b| b.problem.flops());
    table.row("work", format!("{work:.3e} operations"));
    table.render()
}
