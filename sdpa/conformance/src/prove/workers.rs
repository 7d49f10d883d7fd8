//! Worker processes that run problems. A fault of a device ends one process, not the proof.

use super::{Answer, ProveError, State, Verdict};
use crate::covering::{Problem, Row};
use sdpa::Executor;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of bad answers after which [`Workers::new`] ends a proof.
pub const MOST_BAD: usize = 20;

/// Prefixes of the line that a worker prints once its executor is available, and of the line of each answer. Libraries may print other lines.
const READY: &str = "ready: ";
const ANSWER: &str = "answer: ";

/// A request to a worker: the name of a problem, and its row.
type Question = (String, Row);

/// Answers the requests of [`Workers::prove`] on stdin with one line each on stdout. It returns when there are no more requests, and
/// after a wrong result, because results of a device after a fault are meaningless. The main function of a worker process calls it.
///
/// # Errors
/// Fails if a pipe is broken, or if a line is not a request.
pub fn serve(executor: &dyn Executor) -> std::io::Result<()> {
    say(READY, executor.name().name())?;
    for line in std::io::stdin().lines() {
        let (name, row): Question = serde_json::from_str(&line?)?;
        let problem = Problem::of(&name, &row).map_err(|why| std::io::Error::new(std::io::ErrorKind::InvalidData, why))?;
        let answer = Answer::of(&problem, executor);
        say(ANSWER, &serde_json::to_string(&answer)?)?;
        if answer.verdict.is_bad() {
            break;
        }
    }
    Ok(())
}

fn say(begin: &str, text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{begin}{text}\n").as_bytes())?;
    out.flush()
}

/// The progress of a run of worker processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of answered problems.
    pub answered: usize,
    /// Number of problems that the run requests.
    pub total: usize,
    /// Number of bad answers.
    pub bad: usize,
}

/// The configuration of worker processes that run problems, and the limits that end a run.
pub struct Workers<'a> {
    /// Returns the command that starts a worker, which calls [`serve`]. Its stdin and stdout become pipes. `RAYON_NUM_THREADS` becomes 1, because the processes
    /// share the processors.
    pub command: &'a (dyn Fn() -> Command + Sync),
    /// Number of worker processes that run concurrently.
    pub processes: usize,
    /// Number of bad answers after which a run ends.
    pub most_bad: usize,
    /// Time limit for one problem. A process that exceeds it is killed, and the verdict is [`Verdict::Exit`].
    pub time_limit: Duration,
}

impl<'a> Workers<'a> {
    /// Creates workers with the default limits: one process per processor, [`MOST_BAD`] bad answers, and two minutes per problem.
    pub fn new(command: &'a (dyn Fn() -> Command + Sync)) -> Workers<'a> {
        let processes = std::thread::available_parallelism().map_or(1, usize::from);
        Workers { command, processes, most_bad: MOST_BAD, time_limit: Duration::from_secs(120) }
    }

    /// Runs each problem that has no good answer in the state, and adds the answers to the state. Calls `progress` after each answer.
    ///
    /// # Errors
    /// Fails if a worker does not start, or if the state cannot be written. The state keeps all answers before the error.
    pub fn prove(&self, problems: &[Problem], state: &mut State, progress: &(dyn Fn(Count, &Answer) + Sync)) -> Result<Count, ProveError> {
        let open: Vec<&Problem> = problems.iter().filter(|problem| !state.has(problem)).collect();
        self.ask(&open, state, progress)
    }

    /// Runs all of these problems, including those with answers, and adds the answers to the state. Calls `progress` after each answer.
    ///
    /// # Errors
    /// Fails as [`Workers::prove`] does.
    pub fn ask(&self, problems: &[&Problem], state: &mut State, progress: &(dyn Fn(Count, &Answer) + Sync)) -> Result<Count, ProveError> {
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let shared = Mutex::new((state, Count { total: problems.len(), ..Count::default() }));
        let locked = || shared.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = || !failed.load(Ordering::Relaxed) && locked().1.bad < self.most_bad;
        let ask_all = || -> Result<(), ProveError> {
            let mut worker = None;
            while goes_on() {
                let Some(&problem) = problems.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let asked = match &mut worker {
                    Some(worker) => worker,
                    none => none.insert(self.start()?),
                };
                let question = (problem.case.name.clone(), problem.row.clone());
                let answer = asked.ask(&question).unwrap_or_else(|why| Answer::without(problem, Verdict::Exit, why));
                if answer.verdict.is_bad() {
                    worker = None;
                }
                let (state, count) = &mut *locked();
                state.add(answer.clone())?;
                count.answered += 1;
                count.bad += usize::from(answer.verdict.is_bad());
                progress(*count, &answer);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let ask_all = || ask_all().inspect_err(|_| failed.store(true, Ordering::Relaxed));
            let all: Vec<_> = (0..self.processes.max(1).min(problems.len())).map(|_| scope.spawn(ask_all)).collect();
            all.into_iter().try_for_each(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        let (_, count) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(count)
    }

    /// Starts a process, and waits until its executor is available.
    fn start(&self) -> Result<Worker, ProveError> {
        let failed = |why: String| ProveError::Worker { why };
        let mut command = (self.command)();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).env("RAYON_NUM_THREADS", "1");
        let mut child = command.spawn().map_err(|e| failed(format!("{}: {e}", command.get_program().display())))?;
        let (Some(questions), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes".to_owned()));
        };
        let (send, lines) = channel();
        std::thread::spawn(move || BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        let mut worker = Worker { child, questions, lines, time_limit: self.time_limit };
        let mut printed = Vec::new();
        while let Ok(line) = worker.lines.recv_timeout(self.time_limit) {
            if line.starts_with(READY) {
                return Ok(worker);
            }
            printed.push(line);
        }
        printed.push(worker.end());
        Err(failed(printed.join("; ")))
    }
}

/// A running worker process.
struct Worker {
    child: Child,
    questions: ChildStdin,
    lines: Receiver<String>,
    time_limit: Duration,
}

impl Worker {
    fn end(&mut self) -> String {
        let _ = self.child.kill();
        self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string())
    }

    /// Returns the answer, or the reason why there is none.
    fn ask(&mut self, question: &Question) -> Result<Answer, String> {
        let line = serde_json::to_string(question).map_err(|e| e.to_string())? + "\n";
        if let Err(e) = self.questions.write_all(line.as_bytes()) {
            return Err(format!("the process ended: {e}, {}", self.end()));
        }
        let start = Instant::now();
        loop {
            match self.lines.recv_timeout(self.time_limit.saturating_sub(start.elapsed())) {
                Ok(line) => {
                    if let Some(answer) = line.strip_prefix(ANSWER) {
                        return serde_json::from_str(answer).map_err(|e| e.to_string());
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Err(format!("no answer within {} s; {}", self.time_limit.as_secs(), self.end())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::covering::Strength;
    use crate::prove::{About, Auto};
    use sdpa::cpu::CpuExecutor;
    use sdpa::{BackwardProblem, DType, Dispatcher, Error, ExecutorName, Prepared, PreparedBackward, Problem as Attention, Unsupported};
    use std::path::Path;
    use std::sync::Arc;

    /// Environment variable that turns a process of this test binary into a worker. Its value is the way in which the worker fails.
    const MODE: &str = "SDPA_CONFORMANCE_TEST_WORKER";

    /// The CPU executor, with a fault for every problem of f16.
    #[derive(Debug)]
    struct Faulty(CpuExecutor, String);

    impl Faulty {
        fn fault(&self, dtype: DType) {
            match (dtype, self.1.as_str()) {
                (DType::F16, "exits") => std::process::exit(7),
                (DType::F16, "hangs") => std::thread::sleep(Duration::from_secs(3600)),
                (DType::F16, "panics") => panic!("on purpose"),
                _ => {}
            }
        }
    }

    impl Executor for Faulty {
        fn name(&self) -> ExecutorName {
            self.0.name()
        }
        fn supports(&self, problem: &Attention) -> Result<(), Unsupported> {
            self.0.supports(problem)
        }
        fn prepare(&self, problem: &Attention) -> Result<Arc<dyn Prepared>, Error> {
            self.fault(problem.dtype());
            self.0.prepare(problem)
        }
        fn supports_backward(&self, problem: &BackwardProblem) -> Result<(), Unsupported> {
            self.0.supports_backward(problem)
        }
        fn prepare_backward(&self, problem: &BackwardProblem) -> Result<Arc<dyn PreparedBackward>, Error> {
            self.fault(problem.forward().dtype());
            self.0.prepare_backward(problem)
        }
    }

    /// The worker process of the other tests; without the variable it does nothing.
    #[test]
    fn worker() {
        let Ok(mode) = std::env::var(MODE) else { return };
        match mode.as_str() {
            "absent" => println!("no device for {mode}"),
            "auto" => serve(&Auto::new(Dispatcher::default())).unwrap(),
            _ => serve(&Faulty(CpuExecutor::default(), mode)).unwrap(),
        }
    }

    fn command(mode: &'static str) -> impl Fn() -> Command + Sync {
        move || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "prove::workers::tests::worker", "--nocapture"]).env(MODE, mode).stderr(Stdio::null());
            command
        }
    }

    /// Returns small problems, `of_f16` of which are of f16.
    fn problems(of_f16: usize) -> Vec<Problem> {
        let all = Strength::Two.problems().unwrap();
        let small = |problem: &&Problem| problem.features.contains(&"size: below a tile".to_owned());
        let (f16, others): (Vec<_>, Vec<_>) = all.iter().filter(small).cloned().partition(|problem| problem.case.dtype == DType::F16);
        f16.into_iter().take(of_f16).chain(others.into_iter().take(3)).collect()
    }

    fn state(folder: &Path) -> State {
        State::open(&folder.join("state.jsonl"), &About { executor: "cpu".to_owned(), runs_on: "this".to_owned() }).unwrap()
    }

    /// Runs a proof with two processes.
    fn proven(mode: &'static str, problems: &[Problem], state: &mut State, change: impl Fn(&mut Workers<'_>)) -> Result<Count, ProveError> {
        let command = command(mode);
        let mut workers = Workers { processes: 2, ..Workers::new(&command) };
        change(&mut workers);
        let seen = Mutex::new(Vec::new());
        let count = workers.prove(problems, state, &|count, answer| seen.lock().unwrap().push((count, answer.name.clone())))?;
        let seen = seen.into_inner().unwrap();
        assert_eq!(seen.last().map(|(count, _)| *count), Some(count).filter(|_| !seen.is_empty()), "the last progress is the result");
        assert!(seen.iter().enumerate().all(|(n, (count, _))| count.answered == n + 1), "{seen:?}");
        Ok(count)
    }

    #[test]
    fn answers_are_added_and_a_second_run_asks_none() {
        for mode in ["right", "auto"] {
            let folder = tempfile::tempdir().unwrap();
            let (problems, mut state) = (problems(1), state(folder.path()));
            assert_eq!(proven(mode, &problems, &mut state, |_| ()).unwrap(), Count { answered: 4, total: 4, bad: 0 });
            assert_eq!(state.summary(&problems).told(), "4 right, 0 unsupported, 0 wrong, 0 exits");
            assert_eq!(proven(mode, &problems, &mut state, |_| ()).unwrap(), Count::default());
        }
    }

    #[test]
    fn a_process_that_ends_is_an_answer_and_is_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        let (problems, mut state) = (problems(1), state(folder.path()));
        assert_eq!(proven("exits", &problems, &mut state, |_| ()).unwrap(), Count { answered: 4, total: 4, bad: 1 });
        assert_eq!(state.summary(&problems).told(), "3 right, 0 unsupported, 0 wrong, 1 exits");
        let exit = state.summary(&problems).bad.remove(0);
        assert!(exit.told.contains("the process ended") && exit.told.contains('7'), "{}", exit.told);
        assert_eq!(proven("right", &problems, &mut state, |_| ()).unwrap(), Count { answered: 1, total: 1, bad: 0 });
        assert_eq!(state.summary(&problems).told(), "4 right, 0 unsupported, 0 wrong, 0 exits");
    }

    #[test]
    fn a_process_that_hangs_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (problems, mut state) = (problems(1), state(folder.path()));
        let count = proven("hangs", &problems, &mut state, |workers| workers.time_limit = Duration::from_secs(10)).unwrap();
        assert_eq!((count.answered, count.bad), (4, 1));
        let answer = state.of(&problems[0]).unwrap();
        assert!(answer.verdict == Verdict::Exit && answer.told.contains("no answer within 10 s"), "{answer:?}");
    }

    #[test]
    fn a_run_ends_after_as_many_bad_answers_as_it_may_have() {
        let folder = tempfile::tempdir().unwrap();
        let (problems, mut state) = (problems(5), state(folder.path()));
        let count = proven("panics", &problems, &mut state, |workers| (workers.processes, workers.most_bad) = (1, 2)).unwrap();
        assert_eq!(count, Count { answered: 2, total: problems.len(), bad: 2 });
        let bad = state.summary(&problems).bad;
        assert!(bad.iter().all(|answer| answer.verdict == Verdict::Exit && answer.told == "it panicked: on purpose"), "{bad:?}");
    }

    #[test]
    fn a_worker_without_an_executor_is_an_error_with_its_words() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = state(folder.path());
        let error = proven("absent", &problems(1), &mut state, |_| ()).unwrap_err();
        assert!(matches!(&error, ProveError::Worker { why } if why.contains("no device for absent")), "{error}");
        let none = Workers::new(&|| Command::new("/no/such/program")).prove(&problems(1), &mut state, &|_, _| ()).unwrap_err();
        assert!(none.to_string().contains("/no/such/program"), "{none}");
        assert_eq!(state.answers().count(), 0);
    }
}
