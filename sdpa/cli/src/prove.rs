//! `prove`: computes problems that combine features on an executor, and compares each with textbook attention in f64.

pub(crate) mod args;
mod evidence;
mod subject;
mod tell;

use crate::exit::{Answer as Told, Failure, Line, Mistakes};
use crate::names;
use crate::progress::Progress;
use args::{ProveArgs, WorkerArgs};
use sdpa::nvidia::user;
use sdpa::{ExecutorName, Preference};
use sdpa_conformance::covering::{Problem, Strength, features};
use sdpa_conformance::prove::{Answer, Count, MOST_BAD, ProveError, State, Workers, serve};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use subject::Subject;
use tell::{Proof, Proven, Removed};

/// The parsed arguments.
struct Order {
    preference: Preference,
    strength: Strength,
    only: Option<String>,
    most: Option<usize>,
    /// The file of the executor's answers.
    state: PathBuf,
    /// The folder for answers and ledger, if the caller gives one.
    folder: Option<PathBuf>,
}

impl Order {
    fn read(args: &ProveArgs) -> Result<Order, Failure> {
        let mut mistakes = Mistakes::default();
        let preference = mistakes.take("EXECUTOR", names::executor(&args.executor));
        let named = args.only.as_deref().map(|only| mistakes.take("--only", strength_of(only)));
        let strength = args.strength.as_deref().map(|text| mistakes.take("--strength", names::strength(text)));
        let most = args.problems.as_deref().map(|text| mistakes.take("--problems", names::count(text)));
        if let (Some(Some(named)), Some(Some(strength)), Some(only)) = (named, strength, &args.only)
            && named != strength
        {
            mistakes.add("--only", format!("{only:?} is a problem of --strength {}, not of {}", named.name(), strength.name()));
        }
        let others = [("--only", args.only.is_some()), ("--strength", strength.is_some()), ("--problems", most.is_some())];
        for (option, _) in others.into_iter().filter(|(_, there)| args.remove && *there) {
            mistakes.add("--remove", format!("cannot be combined with {option}: --remove computes nothing"));
        }
        if args.only.is_some() && most.is_some() {
            mistakes.add("--problems", "cannot be combined with --only, which names one problem");
        }
        args.places.check(&mut mistakes);
        let folder = match &args.state {
            Some(folder) if folder.exists() && !folder.is_dir() => {
                mistakes.add(format!("--state {}", folder.display()), "got a file, expected a folder");
                None
            }
            Some(folder) => Some(folder.clone()),
            None => user_folder(&mut mistakes),
        };
        let order = preference.zip(folder).map(|(preference, folder)| Order {
            preference,
            strength: named.flatten().or(strength.flatten()).unwrap_or_else(|| usual(preference)),
            only: args.only.clone(),
            most: most.flatten(),
            state: folder.join(format!("{}.jsonl", subject::name(preference))),
            folder: args.state.clone(),
        });
        mistakes.finish(order)
    }
}

/// Returns the default strength: answers of cuDNN form a ledger.
fn usual(preference: Preference) -> Strength {
    match preference {
        Preference::Named(ExecutorName::CUDNN) => Strength::Ledger,
        Preference::Named(_) | Preference::Auto => Strength::Two,
    }
}

/// Returns the strength that a problem's name belongs to.
fn strength_of(problem: &str) -> Result<Strength, String> {
    Strength::of(problem)
        .ok_or_else(|| format!("got {problem:?}, expected the name of a problem, such as \"two-way 5\", \"three-way 5\" or \"ledger 5\""))
}

/// Returns the folder `proofs`, next to that of the kernel cache. Proofs are stored even if the kernel cache is off.
fn user_folder(mistakes: &mut Mistakes) -> Option<PathBuf> {
    match user::folder("proofs") {
        Ok(Some(folder)) => Some(folder),
        Ok(None) => {
            mistakes.add("--state", "this user has no folder for caches: name a folder");
            None
        }
        Err(e) => {
            mistakes.add(e.variable, format!("got {:?}, expected {}", e.value, e.expected));
            None
        }
    }
}

/// Classifies an error of a proof: a mistake in the arguments, or a failure of the environment.
fn failure(error: &ProveError) -> Failure {
    let mistake = |help: &str| Failure::Mistakes(vec![Line::new("--state", format!("{error}{help}"))]);
    match error {
        ProveError::NotAState { .. } | ProveError::Other { .. } => mistake("; name another folder, or delete the answers with --remove"),
        ProveError::Busy { .. } => mistake("; wait until it ends, or name another folder"),
        ProveError::Io { .. } => Failure::environment("--state", format!("{error}; name another folder")),
        ProveError::Worker { .. } | _ => Failure::environment("prove", error),
    }
}

/// Runs the command `prove` and returns its output.
pub(crate) fn run(args: &ProveArgs, json: bool) -> Result<Told, Failure> {
    let order = Order::read(args)?;
    if args.remove {
        return remove(&order, json);
    }
    let start = Instant::now();
    let Subject { executor, about, ledger } = Subject::open(order.preference, &args.places)?;
    let folder = order.state.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .map_err(|e| Failure::environment("--state", format!("making {}: {e}; name another folder", folder.display())))?;
    let mut state = State::open(&order.state, &about).map_err(|e| failure(&e))?;

    let progress = Progress::new(json);
    let kept = order.only.as_deref().and_then(|name| state.named(name)?.problem().ok());
    let (problems, impossible) = match kept {
        // The state already has this problem, so the executor need not be asked what it supports.
        Some(problem) => (vec![problem], Vec::new()),
        None => {
            let _step = progress.spinner("choosing problems");
            let covering = state.covering(order.strength, &*executor).map_err(|e| failure(&e))?;
            let problems = order.strength.problems_of(&covering.rows).map_err(|e| Failure::environment("prove", e))?;
            match &order.only {
                None => (problems, covering.impossible),
                Some(only) => {
                    let names = |problem: Option<&Problem>| problem.map_or_else(String::new, |problem| problem.case.name.clone());
                    let [first, last] = [problems.first(), problems.last()].map(names);
                    let found: Vec<Problem> = problems.into_iter().filter(|problem| problem.case.name == *only).collect();
                    if found.is_empty() {
                        let why = format!("got {only:?}, expected a problem of this executor: {first:?} to {last:?}");
                        return Err(Failure::Mistakes(vec![Line::new("--only", why)]));
                    }
                    (found, Vec::new())
                }
            }
        }
    };
    // Each worker opens the executor itself; a context of this process would occupy device memory.
    drop(executor);
    let asked: Vec<&Problem> = problems.iter().filter(|problem| order.only.is_some() || !state.has(problem)).collect();
    let asked = &asked[..order.most.unwrap_or(asked.len()).min(asked.len())];
    let this = std::env::current_exe().map_err(|e| Failure::environment("prove", e))?;
    let command = || {
        let mut command = Command::new(&this);
        command.args(["prove-worker", subject::name(order.preference)]);
        for (option, path) in [("--cudnn", &args.places.cudnn), ("--driver", &args.places.driver)] {
            if let Some(path) = path {
                command.arg(option).arg(path);
            }
        }
        command
    };
    {
        let bar = progress.bar("proving", asked.len() as u64);
        let tell = |Count { answered, total, bad }: Count, _: &Answer| {
            bar.message(format!("{answered}/{total} answered, {bad} wrong"));
            bar.advance(1);
        };
        Workers::new(&command).ask(asked, &mut state, &tell).map_err(|e| failure(&e))?;
    }

    let summary = state.summary(&problems);
    // A ledger made from only some of the problems would reject features that the other problems show to be correct.
    let is_done = order.only.is_none() && (summary.answered() == problems.len() || summary.bad.len() >= MOST_BAD);
    let ledger = match ledger {
        Some(about) if is_done => {
            evidence::write(about, &state, order.folder.as_deref()).map_err(|e| Failure::environment("the ledger", e))?
        }
        Some(_) | None => None,
    };
    let proven = Proven {
        about,
        strength: order.strength,
        problems: problems.len(),
        open: problems.len() - summary.answered(),
        unproven: impossible.iter().map(|combination| features(combination)).collect(),
        state: state.path().to_owned(),
        ledger,
        seconds: start.elapsed().as_secs_f64(),
        only: order.only.as_ref().and_then(|_| state.of(problems.first()?).cloned()),
        summary,
    };
    let proof = Proof::of(proven, &|name| tell::repeat(args, name));
    Told::new(json, &proof, || proof.text(), proof.outcome())
}

/// Deletes the answers of an executor, and for cuDNN the ledgers made from them.
fn remove(order: &Order, json: bool) -> Result<Told, Failure> {
    let state = &order.state;
    let removed = match std::fs::remove_file(state) {
        Ok(()) => true,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        Err(e) => return Err(Failure::environment("--state", format!("deleting {}: {e}", state.display()))),
    };
    let ledgers = match order.preference {
        Preference::Named(ExecutorName::CUDNN) => {
            evidence::remove(order.folder.as_deref()).map_err(|e| Failure::environment("the ledger", e))?
        }
        Preference::Named(_) | Preference::Auto => 0,
    };
    Removed { state: state.clone(), removed, ledgers }.answer(json)
}

/// Runs a worker process: answers the requests of [`run`] and returns the exit code.
pub(crate) fn worker(args: &WorkerArgs) -> u8 {
    // Print nothing on a panic: the answer contains its message.
    std::panic::set_hook(Box::new(|_| ()));
    let opened = names::executor(&args.executor).map_err(|e| Failure::environment("EXECUTOR", e));
    let served = opened
        .and_then(|preference| Subject::open(preference, &args.places))
        .and_then(|subject| serve(&*subject.executor).map_err(|e| Failure::environment("prove-worker", e)));
    match served {
        Ok(()) => 0,
        Err(failure) => {
            // Print to stdout, which the parent process reads.
            failure.lines().iter().for_each(|line| println!("{}: {}", line.about, line.message));
            failure.code()
        }
    }
}
