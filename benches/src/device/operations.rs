//! Random problems of the operations of `cudnn-graph` other than attention: each is planned and executed by cuDNN, and compared with the interpreter in f64.
//! A refusal is counted with cuDNN's reason, and so is a kernel that cuDNN fails to compile; any other error, and any wrong or unwritten element, is a failure.
#![allow(unsafe_code)]

#[path = "../../../cudnn-graph/tests/operations/compare.rs"]
mod compare;
#[path = "../../../cudnn-graph/tests/operations/draw.rs"]
mod draw;
#[path = "../../../cudnn-graph/tests/operations/values.rs"]
mod values;

use crate::setup::Result;
use cudnn_graph::ffi::codes::Status;
use cudnn_graph::{
    Buffer, DType, Device, DeviceProfile, Driver, Error, Library, Limits, OwnedBindings, Plan, Plans, Policy, Search, Stream, Target,
    Verified, launch_addressed,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes after each result, which an execution must leave as they are.
const GUARD: usize = 256;
const POISON: u8 = 0xff;
const THREADS: usize = 16;

/// The outcome of a problem.
enum Outcome {
    /// The largest error, in tolerances.
    Right(f64),
    /// Planned for a profile only.
    Planned,
    Refused(String),
    Wrong(String),
}

/// The outcomes of one operation in one type.
#[derive(Default)]
struct Row {
    right: u64,
    planned: u64,
    refused: u64,
    wrong: u64,
    worst: f64,
}

#[derive(Default)]
struct Table {
    rows: BTreeMap<(&'static str, &'static str), Row>,
    /// Problems by operation and reason.
    reasons: BTreeMap<(&'static str, String), u64>,
}

/// The target of plans: a device, which also executes them, or a device profile.
#[derive(Clone, Copy)]
enum Place<'a> {
    Device(&'static Device),
    Profile(&'a DeviceProfile),
}

/// The most seeds that are tried for a problem that differs from another in extents alone.
const PARTNERS: u64 = 300;

/// A problem that differs from another in extents alone, and its seed; `None` if no near seed has one.
fn partner(problem: &draw::Problem, seed: u64) -> Option<(u64, draw::Problem)> {
    let structure = |problem: &draw::Problem| problem.graph.clone().verify().map(|graph| graph.structure());
    let wanted = structure(problem).ok()?;
    let seeds = (1..=PARTNERS).map(|n| seed + n * draw::round());
    seeds
        .map(|seed| (seed, draw::problem(seed)))
        .find(|(_, other)| structure(other).is_ok_and(|it| it == wanted) && other.graph != problem.graph)
}

/// Runs the problems with seeds from `first` on. With the name of a profile, such as `h200`, problems are only planned for it, without a GPU. If the policy
/// says that shapes are dynamic, each problem is followed by one of other extents, whose plan may take its kernels.
pub(crate) fn run(problems: u64, first: u64, profile: Option<&str>, policy: &Policy) -> Result<()> {
    let library = Library::load(&Search::default())?;
    let profile = profile.map(DeviceProfile::named).transpose()?;
    let place = match &profile {
        Some(profile) => Place::Profile(profile),
        None => Place::Device(Driver::load(None)?.device(0)?),
    };
    let on = match place {
        Place::Device(device) => device.name().to_owned(),
        Place::Profile(profile) => format!("plans only, for {}", profile.name()),
    };
    let faulty = if policy.known_faults { ", with engines that have known faults" } else { "" };
    let dynamic = if policy.dynamic_shapes { ", with dynamic shapes" } else { "" };
    println!("{on}, cuDNN {} from {}{faulty}{dynamic}", library.version(), library.path().display());
    let plans = Plans::new(library, policy.clone(), Limits::default());
    if problems < draw::round() {
        println!("{problems} problems have not every operation; {} do", draw::round());
    }
    let (next, stop, table) = (AtomicU64::new(first), AtomicBool::new(false), Mutex::new(Table::default()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let failures = std::thread::scope(|scope| {
        let work = || -> std::result::Result<(), String> {
            let stream = match place {
                Place::Device(device) => Some(Arc::new(device.stream().map_err(|e| e.to_string())?)),
                Place::Profile(_) => None,
            };
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + problems || stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let problem = draw::problem(seed);
                let other = if policy.dynamic_shapes { partner(&problem, seed) } else { None };
                for (seed, problem) in std::iter::once((seed, problem)).chain(other) {
                    let outcome = outcome(library, place, &plans, stream.as_ref(), &problem, seed, &stop);
                    if let Outcome::Wrong(why) = &outcome {
                        println!("WRONG seed {seed}, {} of {}: {why}\n{}", problem.operation, problem.dtype, problem.graph);
                    }
                    table.lock().unwrap_or_else(PoisonError::into_inner).add(problem.operation, problem.dtype, outcome);
                }
            }
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ended = running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())));
        ended.filter_map(std::result::Result::err).collect::<Vec<_>>()
    });
    let table = table.into_inner().unwrap_or_else(PoisonError::into_inner);
    table.print();
    if policy.dynamic_shapes {
        println!("{:?}", plans.kernel_stats());
    }
    let sum = |of: fn(&Row) -> u64| table.rows.values().map(of).sum::<u64>();
    let (right, refused, wrong) = (sum(|row| row.right), sum(|row| row.refused), sum(|row| row.wrong));
    let planned = sum(|row| row.planned);
    println!("{right} right, {planned} planned only, {refused} refused, {wrong} failed; seeds {first} to {}", first + problems - 1);
    if !failures.is_empty() || stop.load(Ordering::Relaxed) {
        return Err(format!("the run ended early; {}", failures.join("; ")).into());
    }
    if wrong > 0 {
        return Err(format!("{wrong} problems failed").into());
    }
    if right + planned == 0 {
        return Err("no problem was executed".into());
    }
    Ok(())
}

fn outcome(
    library: &'static Library,
    place: Place<'_>,
    plans: &Plans,
    stream: Option<&Arc<Stream>>,
    problem: &draw::Problem,
    seed: u64,
    stop: &AtomicBool,
) -> Outcome {
    let graph = match problem.graph.clone().verify() {
        Ok(graph) => Arc::new(graph),
        Err(e) => return Outcome::Wrong(format!("verify refuses it: {e}")),
    };
    let failed = |error: Error| {
        if error.is_unsupported() || does_not_compile(&error) {
            return Outcome::Refused(reason(&error));
        }
        if error.is_fatal() {
            stop.store(true, Ordering::Relaxed);
        }
        Outcome::Wrong(error.to_string())
    };
    let plan = match (place, stream) {
        (Place::Device(_), Some(stream)) => {
            let planned = library.handle(stream).and_then(|handle| plans.get(&graph, &Target::Handle(&handle)));
            match planned {
                Ok(plan) => plan,
                Err(e) => return failed(e),
            }
        }
        (Place::Profile(profile), _) => {
            return match plans.get(&graph, &Target::Profile(profile)) {
                Ok(_) => Outcome::Planned,
                // Some engines load their kernel here, which needs the device.
                Err(Error::Cudnn { status, .. }) if status.is_execution() => Outcome::Planned,
                Err(e) => failed(e),
            };
        }
        (Place::Device(_), None) => return Outcome::Wrong("there is no stream".to_owned()),
    };
    let Some(stream) = stream else { return Outcome::Wrong("there is no stream".to_owned()) };
    match execute(&plan, stream, &graph, problem, seed) {
        Ok(Ok(worst)) => Outcome::Right(worst),
        Ok(Err(why)) => {
            let engine = plan.report().chosen().map_or_else(String::new, |candidate| candidate.tag());
            let kernels = if plan.kernels_reused() == Some(true) { ", whose kernels were compiled for other extents" } else { "" };
            Outcome::Wrong(format!("engine {engine}{kernels}: {why}"))
        }
        Err(e) => {
            // A failed execution leaves the device in an unknown state.
            stop.store(true, Ordering::Relaxed);
            Outcome::Wrong(format!("the execution failed: {e}"))
        }
    }
}

/// Executes a plan on random inputs. Returns the largest error in tolerances, or what is wrong.
fn execute(
    plan: &Arc<Plan>,
    stream: &Arc<Stream>,
    graph: &Verified,
    problem: &draw::Problem,
    seed: u64,
) -> Result<std::result::Result<f64, String>> {
    let inputs = values::inputs(problem, graph, seed);
    let want = match compare::expected(graph, &inputs) {
        Ok(want) => want,
        Err(e) => return Ok(Err(format!("the interpreter refuses it: {e}"))),
    };
    let mut bindings = OwnedBindings::new();
    for (&id, value) in &inputs {
        let Some(tensor) = graph.get(id) else { continue };
        let bytes = match values::to_bytes(tensor, value) {
            Ok(bytes) => bytes,
            Err(why) => return Ok(Err(why)),
        };
        let mut buffer = Buffer::new(stream.device(), bytes.len())?;
        buffer.upload(stream, 0, &bytes)?;
        bindings = bindings.buffer(id, &Arc::new(buffer));
    }
    let mut results = Vec::new();
    for &id in want.keys() {
        let Some(tensor) = graph.get(id) else { continue };
        let bytes = tensor.bytes().unwrap_or(0) as usize;
        let mut buffer = Buffer::new(stream.device(), bytes + GUARD)?;
        buffer.fill(stream, POISON)?;
        let buffer = Arc::new(buffer);
        bindings = bindings.buffer(id, &buffer);
        results.push((id, tensor, bytes, buffer));
    }
    let workspace = Buffer::new(stream.device(), plan.workspace_bytes() as usize)?;
    // SAFETY: indices and first rows of experts are drawn within the rows.
    unsafe { launch_addressed(plan, stream, bindings, workspace)? }.wait()?;
    let mut worst = 0.0f64;
    for (id, tensor, length, buffer) in results {
        let mut bytes = vec![0u8; length + GUARD];
        buffer.download(stream, 0, &mut bytes)?;
        let (own, guard) = bytes.split_at(length);
        if let Some(at) = guard.iter().position(|&byte| byte != POISON) {
            return Ok(Err(format!("{}: byte {at} after the result was written", tensor.name)));
        }
        let checked = values::from_bytes(tensor, own).and_then(|got| want.get(&id).map_or(Ok(0.0), |want| want.check(&got)));
        match checked {
            Ok(error) => worst = worst.max(error),
            Err(why) => return Ok(Err(why)),
        }
    }
    Ok(Ok(worst))
}

/// Returns whether cuDNN failed to compile its own kernel: it offers the engine, but nothing was executed, so nothing is wrong.
fn does_not_compile(error: &Error) -> bool {
    matches!(error, Error::Cudnn { status: Status::INTERNAL_ERROR_COMPILATION_FAILED, .. })
}

/// cuDNN's reasons in one line, each once, without the names of the engines.
fn reason(error: &Error) -> String {
    let text = error.to_string().replace("no engine supports the graph:\n", "");
    let mut parts: Vec<&str> = Vec::new();
    for part in text.split([';', '\n']) {
        let why = ["): refused: ", "): passed over: "].iter().find_map(|verb| part.split_once(verb));
        let part = why.map_or(part, |(_, why)| why);
        let part = part.strip_prefix("cuDNN offers none: ").unwrap_or(part).trim();
        if !part.is_empty() && !parts.contains(&part) {
            parts.push(part);
        }
    }
    parts.join("; ")
}

impl Table {
    fn add(&mut self, operation: &'static str, dtype: DType, outcome: Outcome) {
        let row = self.rows.entry((operation, dtype.name())).or_default();
        match outcome {
            Outcome::Right(worst) => {
                row.right += 1;
                row.worst = row.worst.max(worst);
            }
            Outcome::Planned => row.planned += 1,
            Outcome::Refused(why) => {
                row.refused += 1;
                *self.reasons.entry((operation, why)).or_default() += 1;
            }
            Outcome::Wrong(_) => row.wrong += 1,
        }
    }

    fn print(&self) {
        println!(
            "| operation | type | right | planned only | refused | failed | worst error, of the tolerance |\n|---|---|---|---|---|---|---|"
        );
        for ((operation, dtype), row) in &self.rows {
            let Row { right, planned, refused, wrong, worst } = row;
            println!("| {operation} | {dtype} | {right} | {planned} | {refused} | {wrong} | {worst:.2} |");
        }
        println!("\nReasons for refusals, each with its number of problems:");
        for ((operation, why), n) in &self.reasons {
            println!("- {operation}, {n}: {why}");
        }
        let ran = |name: &str| self.rows.iter().any(|((operation, _), row)| *operation == name && row.right > 0);
        let never: Vec<&str> = draw::names().filter(|name| !ran(name)).collect();
        println!("\nNever executed: {}", if never.is_empty() { "none".to_owned() } else { never.join(", ") });
    }
}
