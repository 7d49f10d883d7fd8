//! `inspect`: any stage on the way from a specification to a plan.

use crate::args::{InspectArgs, PlaceArgs};
use crate::exit::{Answer, Failure, Line, Mistakes, Outcome};
use crate::names::{self, Stage};
use crate::plan;
use crate::progress::Progress;
use crate::request::Request;
use crate::table::{Table, list};
use cudnn_graph::encode::encode;
use cudnn_graph::{DeviceProfile, Graph, Library, Program, Version};
use sdpa::lower::{self, Form};
use sdpa::{AttentionSpec, Problem, Region, TensorSpec};
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// Assumed where no library is found.
const ASSUMED: Version = Version::new(9, 27, 0);

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
        let request = Request::read(&args.problem, false, &mut mistakes);
        let stage = mistakes.take("--stage", args.stage.as_deref().map_or(Ok(Stage::Graph), names::stage));
        let form = args.form.as_deref().map(|text| mistakes.take("--form", names::form(text)));
        let runtime = args.runtime.as_deref().map(|text| mistakes.take("--runtime", names::runtime(text)));
        let profile = args.device_profile.as_deref().map(|path| mistakes.take(path.display(), profile(path)));
        let idle = match stage {
            None => [false; 3],
            Some(Stage::Spec | Stage::Problem) => [true; 3],
            Some(Stage::Graph | Stage::Program) => [false, false, true],
            Some(Stage::Plan) => [false, true, false],
        };
        let options = [("--form", form.is_some()), ("--runtime", runtime.is_some()), ("--device-profile", profile.is_some())];
        for ((option, given), idle) in options.into_iter().zip(idle) {
            if given && idle {
                mistakes.add(option, "has no bearing on this --stage");
            }
        }
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

fn profile(path: &Path) -> Result<DeviceProfile, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot be read: {e}"))?;
    DeviceProfile::from_json(&text).map_err(|e| e.to_string())
}

/// Runs the command.
pub(crate) fn run(args: &InspectArgs, json: bool) -> Result<Answer, Failure> {
    let order = Order::read(args)?;
    let Order { request, .. } = &order;
    match order.stage {
        Stage::Spec => Answer::new(json, &SpecStage { stage: "spec", spec: &request.spec }, || spec_text(&request.spec), Outcome::Good),
        Stage::Problem => {
            let stage = ProblemStage { stage: "problem", problem: &request.problem };
            Answer::new(json, &stage, || problem_text(request), Outcome::Good)
        }
        Stage::Graph | Stage::Program => lowered(&order, &args.places, json),
        Stage::Plan => {
            let report = plan::make(&request.problem, order.form, order.profile.as_ref(), &args.places, Progress::new(json))?;
            Answer::new(json, &report, || report.text(), Outcome::Good)
        }
    }
}

#[derive(Serialize)]
struct SpecStage<'a> {
    stage: &'static str,
    spec: &'a AttentionSpec,
}

#[derive(Serialize)]
struct ProblemStage<'a> {
    stage: &'static str,
    problem: &'a Problem,
}

/// A graph or a program, and what it was made for.
#[derive(Serialize)]
struct Lowered<'a> {
    stage: &'static str,
    form: Form,
    runtime: String,
    runtime_from: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<&'a Graph>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<&'a Program>,
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
    let problem = &order.request.problem;
    let (runtime, runtime_from) = runtime(order.runtime, places)?;
    let form = order.form.or_else(|| lower::forms(&problem.clone().into(), runtime).first().copied()).unwrap_or(Form::Composite);
    let refused = |e: &dyn std::fmt::Display| Failure::Executor(vec![Line::new(format!("{form} form"), e)]);
    let forward = lower::lower(&problem.clone().into(), form, runtime).map_err(|e| refused(&e))?;
    let program = match order.stage {
        Stage::Program => Some(encode(&forward.graph, runtime).map_err(|e| refused(&e))?),
        Stage::Spec | Stage::Problem | Stage::Graph | Stage::Plan => None,
    };
    if !json {
        // The stage alone goes to stdout; a closed stderr is no reason to stop.
        writeln!(std::io::stderr(), "note: {form} form for cuDNN {runtime} ({runtime_from})").ok();
    }
    let (stage, graph) = if program.is_some() { ("program", None) } else { ("graph", Some(forward.graph.graph())) };
    let value = Lowered { stage, form, runtime: runtime.to_string(), runtime_from, graph, program: program.as_ref() };
    let text = || program.as_ref().map_or_else(|| forward.graph.to_string(), Program::to_string);
    Answer::new(json, &value, text, Outcome::Good)
}

fn tensors(table: &mut Table, tensors: [&TensorSpec; 4]) {
    for (name, t) in ["q", "k", "v", "o"].into_iter().zip(tensors) {
        table.row(name, format!("{:?} strides {:?} alignment {}", t.dims, t.strides, t.alignment));
    }
}

fn yes(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

fn spec_text(spec: &AttentionSpec) -> String {
    let mut table = Table::default();
    table.row("dtype", spec.dtype.name());
    tensors(&mut table, [&spec.q, &spec.k, &spec.v, &spec.o]);
    table.row("masks", list(&spec.masks.iter().map(ToString::to_string).collect::<Vec<_>>()));
    table.row("stats", yes(spec.stats));
    table.render()
}

/// The conjunction of all masks, as a rule on the indices of a query and a key.
fn region_text(region: &Region) -> String {
    let rules = [
        region.lower.map(|n| format!("k - q > {n}")),
        region.upper.map(|n| format!("k - q <= {n}")),
        region.prefix.map(|n| format!("k <= q or k < {n}")),
    ];
    let rules: Vec<String> = rules.into_iter().flatten().collect();
    if rules.is_empty() { "every key".to_owned() } else { rules.join(" and ") }
}

fn problem_text(request: &Request) -> String {
    let p = &request.problem;
    let mut table = Table::default();
    table.row("dtype", p.dtype().name());
    table.row("batch", p.batch().to_string());
    table.row("heads", format!("{} on {}, groups of {}", p.heads_q(), p.heads_kv(), p.group()));
    table.row("lengths", format!("{} queries, {} keys", p.seq_q(), p.seq_kv()));
    table.row("dims", format!("{} and {}", p.dim_qk(), p.dim_v()));
    let [q, k, v, o] = p.tensors();
    tensors(&mut table, [q, k, v, o]);
    table.row("keeps", region_text(p.region()));
    table.row("stats", yes(p.stats()));
    table.row("scale", request.attn_scale().to_string());
    table.row("work", format!("{:.3e} operations", p.flops()));
    table.render()
}
