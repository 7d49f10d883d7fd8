//! The proof of an executor: every problem of a covering, in a process for each processor, so that a fault of the device ends one of them alone.

use crate::setup::Result;
use conformance::covering::{Covering, Strength, features};
use conformance::prove::{About, Answer, Auto, Count, State, Summary, Workers, serve};
use cudnn_graph::{DeviceProfile, Library, Search, Target};
use sdpa::cpu::CpuExecutor;
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::cudnn::lower::Job;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions, PlanOptions, plan};
use sdpa::{BackwardProblem, Dispatcher, Error, Executor, ExecutorName, Prepared, PreparedBackward, Problem, Reason, Unsupported};
use serde::Serialize;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// An executor that may be proven.
const EXECUTORS: [&str; 5] = ["cpu", "cuda", "cuda-mma", "cudnn", "auto"];

/// The executor, and what it runs on.
fn executor(name: &str) -> Result<(Box<dyn Executor>, String)> {
    let kernels = |family| {
        let cuda = CudaExecutor::new(CudaOptions::default().with_family(family))?;
        let [major, minor] = cuda.nvrtc().version();
        let on = format!("{}, sm {}, NVRTC {major}.{minor}", cuda.device().name(), cuda.device().sm());
        Ok::<(Box<dyn Executor>, String), Box<dyn std::error::Error>>((Box::new(cuda), on))
    };
    match name {
        "cpu" => Ok((Box::new(CpuExecutor::default()), "the processor".to_owned())),
        "cuda" => kernels(None),
        "cuda-mma" => kernels(Some(Family::Mma)),
        "cudnn" => {
            let cudnn = CudnnExecutor::new(CudnnOptions::default())?;
            let on = format!("{}, sm {}, cuDNN {}", cudnn.device().name(), cudnn.device().sm(), cudnn.library().version());
            Ok((Box::new(cudnn), on))
        }
        "auto" => {
            let dispatcher = Dispatcher::new(CudnnOptions::default());
            let device = dispatcher.cuda().map_or_else(|e| e.to_string(), |cuda| cuda.device().name().to_owned());
            let version = dispatcher.cudnn().map_or_else(|e| e.to_string(), |cudnn| cudnn.library().version().to_string());
            Ok((Box::new(Auto::new(dispatcher)), format!("{device}, cuDNN {version}")))
        }
        _ => Err(format!("{name:?} is no executor that is proven: {}", EXECUTORS.join(", ")).into()),
    }
}

/// Answers questions, a line each, until there are none.
///
/// # Errors
/// An executor that is not there.
pub(crate) fn worker(name: &str) -> Result<()> {
    let (executor, _) = executor(name)?;
    Ok(serve(&*executor)?)
}

/// The summary of a proof, as its file has it.
#[derive(Serialize)]
struct Proof<'a> {
    #[serde(flatten)]
    about: &'a About,
    strength: &'a str,
    problems: usize,
    seconds: f64,
    #[serde(flatten)]
    summary: Summary,
    /// Features that met in fewer problems than wanted: no problem was found that has them and that the executor supports.
    unproven: Vec<Vec<String>>,
}

/// Proves an executor with the problems of a covering that it supports, as far as a folder has no answers of them, or such as speak against it. The folder gets
/// `EXECUTOR-STRENGTH.jsonl`, an answer on each line, and `EXECUTOR-STRENGTH.json`, the summary.
///
/// # Errors
/// An executor that is not there; answers that speak against it.
pub(crate) fn run(name: &str, strength: &str, folder: &Path, only: Option<&str>) -> Result<()> {
    let strength = Strength::named(strength).ok_or("a strength is two, three or ledger")?;
    let start = Instant::now();
    let (executor, on) = executor(name)?;
    let about = About { executor: name.to_owned(), runs_on: on };
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(format!("{name}-{}.jsonl", strength.name()));
    let mut state = State::open(&path, &about)?;
    let Covering { rows, impossible, .. } = state.covering(strength, &*executor)?;
    let problems = strength.problems_of(&rows)?;
    if let Some(only) = only {
        let problem = problems.iter().find(|problem| problem.case.name == only).ok_or_else(|| format!("there is no problem {only:?}"))?;
        let answer = Answer::of(problem, &*executor);
        println!("{}\n{}\n{:?}: {}", about.runs_on, problem.features.join("; "), answer.verdict, answer.told);
        return if answer.verdict.is_bad() { Err("it is wrong".into()) } else { Ok(()) };
    }
    let open = problems.iter().filter(|problem| !state.has(problem)).count();
    let told = format!("{} problems, {} to ask, {} combinations of features without one", problems.len(), open, impossible.len());
    println!("{name} on {}: {told}, made in {:.1} s", about.runs_on, start.elapsed().as_secs_f64());
    let this = std::env::current_exe()?;
    let command = || {
        let mut command = Command::new(&this);
        command.args(["prove-worker", name]);
        command
    };
    let wrong = |_: Count, answer: &Answer| {
        if answer.verdict.is_bad() {
            let again = format!("device prove {name} {} . '{}'", strength.name(), answer.name);
            println!("{:?} {} ({}): {}\n  {again}", answer.verdict, answer.name, answer.features.join("; "), answer.told);
        }
    };
    Workers::new(&command).prove(&problems, &mut state, &wrong)?;

    let summary = state.summary(&problems);
    let answered = summary.answered();
    println!("{name}: {}, {} open, {:.0} s", summary.told(), problems.len() - answered, start.elapsed().as_secs_f64());
    let mut reasons: Vec<_> = summary.reasons.iter().collect();
    reasons.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    reasons.iter().take(8).for_each(|(why, n)| println!("  {n} unsupported: {why}"));
    let bad = summary.bad.len();
    let unproven = impossible.iter().map(|combination| features(combination)).collect();
    let proof = Proof {
        about: &about,
        strength: strength.name(),
        problems: problems.len(),
        seconds: start.elapsed().as_secs_f64(),
        summary,
        unproven,
    };
    std::fs::write(path.with_extension("json"), serde_json::to_string_pretty(&proof)?)?;
    let left = problems.len() - answered;
    if bad == 0 && left == 0 { Ok(()) } else { Err(format!("{bad} speak against {name}, {left} are open").into()) }
}

/// cuDNN without a device, for a description of one: it says what is supported, and runs nothing.
#[derive(Debug)]
struct Offline {
    library: &'static Library,
    profile: DeviceProfile,
}

impl Offline {
    fn asked(&self, job: &Job) -> std::result::Result<(), Unsupported> {
        let failed = |why: String| Unsupported::new(ExecutorName::CUDNN, vec![Reason::Failed(why)]);
        match plan::supports(self.library, &Target::Profile(&self.profile), job, &PlanOptions::default()) {
            Ok(_) => Ok(()),
            Err(sdpa::cudnn::Error::Unsupported(reasons)) => Err(reasons),
            Err(other) => Err(failed(other.to_string())),
        }
    }

    fn runs_nothing() -> Error {
        Unsupported::new(ExecutorName::CUDNN, vec![Reason::Absent("there is no device".to_owned())]).into()
    }
}

impl Executor for Offline {
    fn name(&self) -> ExecutorName {
        ExecutorName::CUDNN
    }

    fn supports(&self, problem: &Problem) -> std::result::Result<(), Unsupported> {
        if problem.is_empty() { Ok(()) } else { self.asked(&problem.clone().into()) }
    }

    fn prepare(&self, _: &Problem) -> std::result::Result<Arc<dyn Prepared>, Error> {
        Err(Offline::runs_nothing())
    }

    fn supports_backward(&self, problem: &BackwardProblem) -> std::result::Result<(), Unsupported> {
        if problem.forward().is_empty() { Ok(()) } else { self.asked(&problem.clone().into()) }
    }

    fn prepare_backward(&self, _: &BackwardProblem) -> std::result::Result<Arc<dyn PreparedBackward>, Error> {
        Err(Offline::runs_nothing())
    }
}

/// Begins the state of a proof of cuDNN on a machine without a GPU: the rows that it supports on a device of this profile, which takes minutes. The name of
/// the device is that of the machine that answers.
///
/// # Errors
/// A cuDNN or a profile that is not there.
pub(crate) fn rows(strength: &str, folder: &Path, profile: &Path, device: &str) -> Result<()> {
    let strength = Strength::named(strength).ok_or("a strength is two, three or ledger")?;
    let library = Library::load(&Search::default())?;
    let profile = DeviceProfile::from_json(&std::fs::read_to_string(profile)?)?;
    let on = format!("{device}, sm {}, cuDNN {}", profile.sm(), library.version());
    let about = About { executor: "cudnn".to_owned(), runs_on: on };
    std::fs::create_dir_all(folder)?;
    let mut state = State::open(&folder.join(format!("cudnn-{}.jsonl", strength.name())), &about)?;
    let start = Instant::now();
    let covering = state.covering(strength, &Offline { library, profile })?;
    println!("{} rows for {}, made in {:.0} s", covering.rows.len(), about.runs_on, start.elapsed().as_secs_f64());
    Ok(())
}
