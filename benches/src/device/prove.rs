//! The proof of an executor: every problem of a covering, in a process for each processor, so that a fault of the device ends one of them alone.

use crate::setup::Result;
use conformance::covering::{Covering, FACTORS, Problem, Row, Strength};
use conformance::prove::{About, Answer, State, Summary, Verdict};
use sdpa::cpu::CpuExecutor;
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::{
    BackwardProblem, Dispatcher, Error, Executor, ExecutorName, Preference, Prepared, PreparedBackward, Problem as Attention, Unsupported,
};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Answers that speak against the executor, after which a run ends.
const MOST_BAD: usize = 20;
/// A problem that has no answer after so long has none.
const LONGEST: Duration = Duration::from_secs(120);
/// Begins the line that a worker prints once its executor is ready, and the line of each answer.
const READY: &str = "ready: ";
const ANSWER: &str = "answer: ";

/// An executor that may be proven.
const EXECUTORS: [&str; 5] = ["cpu", "cuda", "cuda-mma", "cudnn", "auto"];

/// Whatever an automatic choice takes, each pass by itself.
#[derive(Debug)]
struct Auto(Dispatcher);

impl Executor for Auto {
    fn name(&self) -> ExecutorName {
        conformance::runner::AUTO
    }

    fn supports(&self, _: &Attention) -> std::result::Result<(), Unsupported> {
        Ok(())
    }

    fn prepare(&self, problem: &Attention) -> std::result::Result<Arc<dyn Prepared>, Error> {
        Ok(self.0.prepare(problem, Preference::Auto)?.prepared)
    }

    fn supports_backward(&self, _: &BackwardProblem) -> std::result::Result<(), Unsupported> {
        Ok(())
    }

    fn prepare_backward(&self, problem: &BackwardProblem) -> std::result::Result<Arc<dyn PreparedBackward>, Error> {
        Ok(self.0.prepare_backward(problem, Preference::Auto)?.prepared)
    }
}

/// The executor, and what it runs on.
fn executor(name: &str) -> Result<(Box<dyn Executor>, String)> {
    let kernels = |family| {
        let cuda = CudaExecutor::new(CudaOptions { family, ..CudaOptions::default() })?;
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
            Ok((Box::new(Auto(dispatcher)), format!("{device}, cuDNN {version}")))
        }
        _ => Err(format!("{name:?} is no executor that is proven: {}", EXECUTORS.join(", ")).into()),
    }
}

/// A question to a worker: the name of a problem, and its row.
type Question = (String, Row);

/// Answers questions, a line each, until there are none.
///
/// # Errors
/// An executor that is not there.
pub(crate) fn worker(name: &str) -> Result<()> {
    let (executor, on) = executor(name)?;
    println!("{READY}{on}");
    for line in std::io::stdin().lines() {
        let (name, row): Question = serde_json::from_str(&line?)?;
        let answer = Answer::of(&Problem::of(&name, &row)?, &*executor);
        println!("{ANSWER}{}", serde_json::to_string(&answer)?);
        // Whatever a device says after a fault says nothing of the next problem.
        if answer.verdict.is_bad() {
            break;
        }
    }
    Ok(())
}

/// A process that answers.
struct Worker {
    child: Child,
    questions: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    /// Starts one, and waits until its executor is there.
    fn start(name: &str) -> Result<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["prove-worker", name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        // The processes share the processors among them already.
        let mut child = command.env("RAYON_NUM_THREADS", "1").spawn()?;
        let (Some(questions), Some(out)) = (child.stdin.take(), child.stdout.take()) else { return Err("a worker has no pipes".into()) };
        let (send, lines) = channel();
        std::thread::spawn(move || BufReader::new(out).lines().map_while(std::result::Result::ok).try_for_each(|line| send.send(line)));
        let mut worker = Worker { child, questions, lines };
        let mut said = Vec::new();
        while let Ok(line) = worker.lines.recv_timeout(LONGEST) {
            if line.starts_with(READY) {
                return Ok(worker);
            }
            said.push(line);
        }
        let status = worker.end();
        Err(format!("the executor {name} is not there: {} ({status})", said.join("; ")).into())
    }

    fn end(&mut self) -> String {
        let _ = self.child.kill();
        self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string())
    }

    /// The answer, or why there is none.
    fn ask(&mut self, question: &Question) -> std::result::Result<Answer, String> {
        let line = serde_json::to_string(question).map_err(|e| e.to_string())?;
        if let Err(e) = writeln!(self.questions, "{line}") {
            return Err(format!("the process ended: {e}, {}", self.end()));
        }
        let start = Instant::now();
        loop {
            match self.lines.recv_timeout(LONGEST.saturating_sub(start.elapsed())) {
                Ok(line) => {
                    if let Some(answer) = line.strip_prefix(ANSWER) {
                        return serde_json::from_str(answer).map_err(|e| e.to_string());
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(format!("no answer within {} s; {}", LONGEST.as_secs(), self.end())),
                Err(RecvTimeoutError::Disconnected) => return Err(format!("the process ended: {}", self.end())),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// The summary of a proof, as its file has it.
#[derive(Serialize)]
struct Proof<'a> {
    #[serde(flatten)]
    about: &'a About,
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
    let supported = |row: &Row| Problem::of("", row).is_ok_and(|problem| problem.is_supported(&*executor));
    let Covering { rows, impossible, .. } = strength.rows(&supported);
    let problems = strength.problems_of(&rows)?;
    if let Some(only) = only {
        let problem = problems.iter().find(|problem| problem.case.name == only).ok_or_else(|| format!("there is no problem {only:?}"))?;
        let answer = Answer::of(problem, &*executor);
        println!("{on}\n{}\n{:?}: {}", problem.features.join("; "), answer.verdict, answer.told);
        return if answer.verdict.is_bad() { Err("it is wrong".into()) } else { Ok(()) };
    }
    let about = About { executor: name.to_owned(), runs_on: on, strength: strength.name().to_owned() };
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(format!("{name}-{}.jsonl", strength.name()));
    let state = State::open(&path, &about)?;
    let open: Vec<usize> = (0..problems.len()).filter(|n| !state.has(&problems[*n])).collect();
    let told = format!("{} problems, {} to ask, {} combinations of features without one", problems.len(), open.len(), impossible.len());
    println!("{name} on {}: {told}, made in {:.1} s", about.runs_on, start.elapsed().as_secs_f64());
    let state = Mutex::new(state);
    let questions: Vec<(Question, &Problem)> =
        open.iter().map(|&n| ((problems[n].case.name.clone(), rows[n].clone()), &problems[n])).collect();
    prove(name, strength, &questions, &state)?;

    let state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    let summary = state.summary();
    let answered: usize = summary.answers.values().sum();
    println!("{name}: {}, {} open, {:.0} s", summary.told(), problems.len() - answered, start.elapsed().as_secs_f64());
    let mut reasons: Vec<_> = summary.reasons.iter().collect();
    reasons.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    reasons.iter().take(8).for_each(|(why, n)| println!("  {n} unsupported: {why}"));
    let bad = summary.bad.len();
    let named = |(factor, value): &(usize, usize)| format!("{}: {}", FACTORS[*factor].name, FACTORS[*factor].values[*value]);
    let unproven = impossible.iter().map(|combination| combination.iter().map(named).collect()).collect();
    let proof = Proof { about: &about, problems: problems.len(), seconds: start.elapsed().as_secs_f64(), summary, unproven };
    std::fs::write(path.with_extension("json"), serde_json::to_string_pretty(&proof)?)?;
    let left = problems.len() - answered;
    if bad == 0 && left == 0 { Ok(()) } else { Err(format!("{bad} speak against {name}, {left} are open").into()) }
}

/// Asks every question, and adds the answers.
fn prove(name: &str, strength: Strength, questions: &[(Question, &Problem)], state: &Mutex<State>) -> Result<()> {
    let (next, bad, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(questions.len());
    let ask_all = || -> std::result::Result<(), String> {
        let mut worker = None;
        while bad.load(Ordering::Relaxed) < MOST_BAD && !failed.load(Ordering::Relaxed) {
            let Some((question, problem)) = questions.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let asked = match &mut worker {
                Some(worker) => worker,
                none => none.insert(Worker::start(name).map_err(|e| e.to_string())?),
            };
            let answer = asked.ask(question).unwrap_or_else(|why| Answer::without(problem, Verdict::Exit, why));
            if answer.verdict.is_bad() {
                worker = None;
                bad.fetch_add(1, Ordering::Relaxed);
                let again = format!("device prove {name} {} . '{}'", strength.name(), answer.name);
                println!("{:?} {} ({}): {}\n  {again}", answer.verdict, answer.name, answer.features.join("; "), answer.told);
            }
            state.lock().unwrap_or_else(PoisonError::into_inner).add(answer)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..workers).map(|_| scope.spawn(|| ask_all().inspect_err(|_| failed.store(true, Ordering::Relaxed)))).collect();
        all.into_iter().try_for_each(|one| one.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
    })?;
    Ok(())
}
