//! Mutants of the kernels: each is found, or `equivalent.toml` says why it cannot be.
//!
//! `scripts/faults.sh cuda` runs it. A process of its own tries each mutant, as one may end it or never end: the problems whose kernels have the mutant's line run
//! until one fails.

use super::{NAME, far, faults, function_faults, late_faults, mma, mma_faults, pair_faults, ring_faults, survivors};
use conformance::case::Case;
use conformance::covering::{Problem, Strength};
use conformance::edits::{Edit, Equivalent};
use conformance::emulated;
use conformance::mutants;
use conformance::runner::{LargeScores, Outcome, Source, run_backward_case, run_case, side_by_side};
use conformance::say::say;
use conformance::share::features;
use sdpa::cuda::CudaExecutor;
use sdpa::{DType, Executor, Shape};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::panic::AssertUnwindSafe;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of mutants that compile and that some problem has, where `SDPA_MUTANTS` names no other and no file with mutants to try again.
const MUTANTS: usize = 100;
/// Seconds without news of a mutant after which it counts as one that never ends.
const PATIENCE: Duration = Duration::from_secs(100);
/// Before each line that the process of a mutant tells.
const TELLS: &str = "mutant: ";

/// The suite that a problem belongs to. A mutant is tried on the suites in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Covering,
    /// Cases of the lists of faults and of survivors.
    Faults,
    ByHand,
    LargeScores,
    Far,
}

/// How many problems of each origin a mutant runs at most. Those in which it changes no machine code are compiled and not run, up to [`COMPILED`] times as many.
const ORIGINS: [(Origin, usize); 5] =
    [(Origin::Covering, 16), (Origin::Faults, 12), (Origin::ByHand, 10), (Origin::LargeScores, 8), (Origin::Far, 4)];

/// Problems that are compiled at most for each that may run.
const COMPILED: usize = 5;

/// The work of a trial.
enum Work {
    /// A pass: backward where there is a source.
    Pass(Box<Case>, Option<Source>),
    /// Both passes.
    Large(LargeScores),
    /// Forward passes over tensors that are larger than 32 bits count: what it is called, and the test, which panics.
    Far(&'static str, fn(&CudaExecutor)),
}

/// A problem on a device.
struct Trial {
    device: &'static str,
    origin: Origin,
    features: Vec<String>,
    work: Work,
}

impl Trial {
    fn told(&self) -> String {
        match &self.work {
            Work::Pass(case, None) => format!("{}, {}", case.name, self.device),
            Work::Pass(case, Some(_)) => format!("{}, backward, {}", case.name, self.device),
            Work::Large(LargeScores { shape, dtype, place, added, sink }) => {
                let Shape { batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v } = shape;
                let shape = [batch, heads_q, heads_kv, seq_q, seq_kv, dim_qk, dim_v].map(ToString::to_string).join(",");
                format!("large scores of {shape} {dtype} {place:?} {added:e} {sink}, {}", self.device)
            }
            Work::Far(name, _) => format!("{name}, {}", self.device),
        }
    }

    /// Compiles its kernels, where that is possible without running them.
    fn prepare(&self, executor: &CudaExecutor) -> Result<(), String> {
        let Work::Pass(case, source) = &self.work else { return Ok(()) };
        let text = |e: sdpa::Error| e.to_string();
        if source.is_none() {
            let problem = case.spec()?.validate().map_err(|e| e.to_string())?;
            return executor.prepare(&problem).map(drop).map_err(text);
        }
        let problem = case.backward_spec()?.validate().map_err(|e| e.to_string())?;
        executor.prepare_backward(&problem).map(drop).map_err(text)?;
        if *source == Some(Source::Executor) {
            executor.prepare(problem.forward()).map(drop).map_err(text)?;
        }
        Ok(())
    }

    /// How it fails, if it does.
    fn run(&self, executor: &CudaExecutor) -> Option<String> {
        fn how<T>(outcome: Outcome<T>) -> Option<String> {
            match outcome {
                Outcome::Fail(how) => Some(how),
                Outcome::Pass(..) | Outcome::Skip(_) => None,
            }
        }
        match &self.work {
            Work::Pass(case, None) => how(run_case(case, executor)),
            Work::Pass(case, Some(source)) => how(run_backward_case(case, *source, executor)),
            Work::Large(problem) => problem.run(executor).err(),
            Work::Far(_, test) => {
                let result = std::panic::catch_unwind(AssertUnwindSafe(|| test(executor)));
                result.err().map(|why| why.downcast_ref::<String>().cloned().unwrap_or_default())
            }
        }
    }

    /// About how long it takes.
    fn size(&self) -> i64 {
        let shape = match &self.work {
            Work::Pass(case, _) => &case.shape,
            Work::Large(problem) => &problem.shape,
            Work::Far(..) => return 0,
        };
        shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv * (shape.dim_qk + shape.dim_v)
    }
}

fn executor_of(device: &str) -> Option<CudaExecutor> {
    if device == NAME { super::executor() } else { mma::executor() }
}

/// Every problem, on both devices.
fn trials() -> Vec<Trial> {
    let mut all = Vec::new();
    let mut add = |device: &'static str, origin, features: Vec<String>, work| {
        let features = features.into_iter().chain([device.to_owned()]).collect();
        all.push(Trial { device, origin, features, work });
    };
    for device in [NAME, mma::NAME] {
        for Problem { case, source, features, .. } in Strength::Two.problems().unwrap() {
            add(device, Origin::Covering, features, Work::Pass(Box::new(case), source));
        }
    }
    let lists: [(&'static str, &[&str]); 8] = [
        (NAME, &survivors::CASES),
        (NAME, &faults::CASES),
        (NAME, &late_faults::CASES),
        (NAME, &ring_faults::CASES),
        (NAME, &pair_faults::CASES),
        (NAME, &function_faults::CASES),
        (mma::NAME, &survivors::CASES),
        (mma::NAME, &mma_faults::CASES),
    ];
    let of_lists = lists
        .iter()
        .flat_map(|(device, texts)| texts.iter().flat_map(|text| Case::parse(text).unwrap()).map(|case| (Origin::Faults, *device, case)));
    let of_files = [Case::all_few(), Case::all_statistics(), Case::all_ends(), Case::all_backward()];
    let of_files = of_files
        .into_iter()
        .flat_map(Result::unwrap)
        .flat_map(|case| [NAME, mma::NAME].map(|device| (Origin::ByHand, device, case.clone())));
    for (origin, device, case) in of_lists.chain(of_files) {
        let forward_alone = case.paged.is_some() || case.row_max || case.sum_exp;
        for source in [None].into_iter().chain((!forward_alone).then_some(Some(Source::Oracle))) {
            let features = features(&case).into_iter().chain([format!("{source:?}")]).collect();
            add(device, origin, features, Work::Pass(Box::new(case.clone()), source));
        }
    }
    for (device, dtypes) in [(NAME, &super::NARROW[..]), (mma::NAME, &[DType::BF16, DType::F32, DType::F16])] {
        for problem in LargeScores::all(dtypes) {
            let LargeScores { shape, dtype, place, added, sink } = problem;
            let features = vec![format!("{shape:?}"), dtype.to_string(), format!("{place:?}"), added.to_string(), sink.to_string()];
            add(device, Origin::LargeScores, features, Work::Large(problem));
        }
        for (name, test) in [("last keys", far::last_keys as fn(&CudaExecutor)), ("last tokens", far::last_tokens)] {
            add(device, Origin::Far, vec![name.to_owned()], Work::Far(name, test));
        }
    }
    all
}

/// The places of the trials that a mutant meets, of those that have its line: each next has the most features that none before has, and takes the least.
fn plan(trials: &[Trial], with_line: &[usize]) -> Vec<usize> {
    let mut chosen = Vec::new();
    for (origin, most) in ORIGINS {
        let mut left: Vec<usize> = with_line.iter().copied().filter(|n| trials[*n].origin == origin).collect();
        let mut seen = BTreeSet::new();
        for _ in 0..most * COMPILED {
            let gain = |n: usize| trials[n].features.iter().filter(|feature| !seen.contains(*feature)).count();
            // A few features more are not worth a problem that takes much longer.
            let worth = |n: usize| (gain(n) / 4, -trials[n].size());
            let Some(best) = (0..left.len()).max_by_key(|at| worth(left[*at])) else { break };
            let n = left.swap_remove(best);
            seen.extend(trials[n].features.iter().cloned());
            chosen.push(n);
        }
    }
    chosen
}

/// The outcome for a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    /// Found: by which problem, and how.
    Found(String),
    /// The compiler does not take it.
    Refused,
    /// No problem's machine code has it.
    Unused,
    /// Nothing finds it; so many problems ran.
    Survived(usize),
}

/// Runs a process that tries a mutant on some trials: as many of each origin as [`ORIGINS`] says, or all of them.
fn fate(n: usize, trials: &[usize], all: bool) -> Fate {
    let places: Vec<String> = trials.iter().map(usize::to_string).collect();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mutants::one_mutant", "--ignored", "--nocapture", "--test-threads=1"])
        .env("SDPA_MUTANT", n.to_string())
        .env("SDPA_MUTANT_TRIALS", places.join(","))
        .env("SDPA_MUTANT_ALL", if all { "1" } else { "" })
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (send, receive) = channel();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
    let (mut tried, mut ran, mut refused) = ("nothing".to_owned(), 0, false);
    let fate = loop {
        match receive.recv_timeout(PATIENCE) {
            Ok(line) => {
                let Some((_, told)) = line.split_once(TELLS) else { continue };
                match told.split_once(' ') {
                    Some(("try", name)) => name.clone_into(&mut tried),
                    Some(("passed", _)) => ran += 1,
                    Some(("refused", _)) => refused = true,
                    Some(("failed", how)) => break Fate::Found(format!("{tried}: {how}")),
                    Some(("end", _)) if refused => break Fate::Refused,
                    Some(("end", _)) => break if ran == 0 { Fate::Unused } else { Fate::Survived(ran) },
                    _ => {}
                }
            }
            Err(RecvTimeoutError::Timeout) => break Fate::Found(format!("{tried}: TIME LIMIT")),
            Err(RecvTimeoutError::Disconnected) => break Fate::Found(format!("{tried}: CRASH, the process ended")),
        }
    };
    let _ = child.kill();
    let _ = child.wait();
    fate
}

/// The outcome of one trial of a mutant.
enum Said {
    /// The compiler does not take it.
    Refused,
    /// It changes no machine code of this trial's.
    Same,
    Passed,
    Failed(String),
}

/// Runs a trial with a mutant: in an executor of its own, as another would not compile again what it has compiled.
fn try_one(edit: &Edit, trial: &Trial) -> Said {
    let of_failure = |how: String| {
        let of_the_compiler = how.contains("error generated") || how.contains("errors generated");
        if of_the_compiler { Said::Refused } else { Said::Failed(how) }
    };
    let executor = executor_of(trial.device).unwrap();
    let said = emulated::edited(edit, |different| {
        if let Err(why) = trial.prepare(&executor) {
            return of_failure(why);
        }
        let prepared = matches!(trial.work, Work::Pass(..));
        if prepared && different() == 0 {
            return Said::Same;
        }
        match trial.run(&executor) {
            Some(how) => of_failure(how),
            None if !prepared && different() == 0 => Said::Same,
            None => Said::Passed,
        }
    });
    // A trial that fails without the mutant finds nothing.
    let failed = matches!(said, Said::Failed(_));
    if failed && trial.run(&executor_of(trial.device).unwrap()).is_some() { Said::Same } else { said }
}

/// Tries one mutant: `SDPA_MUTANT` is its place in the list, `SDPA_MUTANT_TRIALS` are those of trials.
#[test]
#[ignore = "a process of scripts/faults.sh cuda"]
fn one_mutant() {
    let number = |text: &str| text.parse::<usize>().unwrap();
    let edit = mutants::all().unwrap().swap_remove(number(&std::env::var("SDPA_MUTANT").unwrap()));
    let tell = |text: String| println!("{TELLS}{}", text.replace('\n', " ").chars().take(400).collect::<String>());
    let trials = trials();
    let all = std::env::var("SDPA_MUTANT_ALL").is_ok_and(|all| !all.is_empty());
    let mut left = ORIGINS.map(|(_, most)| if all { usize::MAX } else { most });
    for n in std::env::var("SDPA_MUTANT_TRIALS").unwrap().split(',').map(number) {
        let left = &mut left[trials[n].origin as usize];
        if *left == 0 {
            continue;
        }
        tell(format!("try {}", trials[n].told()));
        match try_one(&edit, &trials[n]) {
            Said::Same => continue,
            Said::Passed => tell("passed it".to_owned()),
            Said::Failed(how) => return tell(format!("failed {how}")),
            Said::Refused => {
                tell("refused by the compiler".to_owned());
                break;
            }
        }
        *left -= 1;
    }
    tell("end of trials".to_owned());
}

/// By lines of kernels' files, the places of the trials whose kernels have them.
fn survey(trials: &[Trial]) -> BTreeMap<String, Vec<usize>> {
    let all = Mutex::new(BTreeMap::<String, Vec<usize>>::new());
    let places: Vec<usize> = (0..trials.len()).collect();
    side_by_side(&places, |&n| {
        // Its own: what another one compiled would not be compiled again.
        let Some(executor) = executor_of(trials[n].device) else { return };
        let (prepared, lines) = emulated::lines(|| trials[n].prepare(&executor));
        if prepared.is_ok() {
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            lines.into_iter().for_each(|line| all.entry(line).or_default().push(n));
        }
    });
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    // A trial that cannot be preprocessed alone may contain any line of the source.
    let others: Vec<usize> = places.into_iter().filter(|n| !matches!(trials[*n].work, Work::Pass(..))).collect();
    all.values_mut().for_each(|trials| {
        trials.sort_unstable();
        trials.extend(&others);
    });
    all
}

#[test]
#[ignore = "an hour: scripts/faults.sh cuda"]
fn mutants_are_found() {
    let all = mutants::all().unwrap();
    let equivalents = mutants::equivalents(&all).unwrap();
    let is_known = |edit: &Edit| equivalents.iter().any(|e: &Equivalent| e.is(edit));
    let seed = std::env::var("SDPA_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let asked = std::env::var("SDPA_MUTANTS").unwrap_or_default();
    let chosen: Vec<usize> = match std::fs::read_to_string(&asked) {
        Ok(text) => (0..all.len()).filter(|n| text.contains(&format!("{} [", all[*n].told()))).collect(),
        Err(_) => mutants::order(&all, seed),
    };
    let wanted = asked.parse().unwrap_or(MUTANTS);
    let trials = trials();
    let begun = Instant::now();
    let lines = survey(&trials);
    say(&format!("mutants: {} problems have {} lines, {} s", trials.len(), lines.len(), begun.elapsed().as_secs()));
    let with_line = |edit: &Edit| lines.get(&format!("{}:{}", edit.file, edit.line)).map_or(&[][..], Vec::as_slice);
    let made = all.iter().filter(|edit| !with_line(edit).is_empty()).count();
    let order = Mutex::new(chosen.into_iter());
    let fates = Mutex::new(Vec::new());
    let counts = |fates: &[(usize, Fate)]| fates.iter().filter(|(_, fate)| matches!(fate, Fate::Found(_) | Fate::Survived(_))).count();
    // Each thread takes the next until so many are tried: those that do not compile or that nothing has are replaced.
    let under_way = Mutex::new(0usize);
    let threads: Vec<usize> = (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    side_by_side(&threads, |_| {
        loop {
            {
                let mut under_way = under_way.lock().unwrap();
                if counts(&fates.lock().unwrap()) + *under_way >= wanted {
                    return;
                }
                *under_way += 1;
            }
            let next = order.lock().unwrap().next();
            let Some(n) = next else { return };
            let edit = &all[n];
            let begun = Instant::now();
            let trials_of = plan(&trials, with_line(edit));
            let mut result = if trials_of.is_empty() { Fate::Unused } else { fate(n, &trials_of, false) };
            if let Fate::Survived(ran) = result
                && !is_known(edit)
            {
                // CI computes the whole covering in three days, so a mutant survives only if all of it passes.
                let is_left = |trial: &usize| trials[*trial].origin == Origin::Covering && !trials_of.contains(trial);
                let covering: Vec<usize> = with_line(edit).iter().copied().filter(is_left).collect();
                result = match fate(n, &covering, true) {
                    Fate::Found(how) => Fate::Found(how),
                    Fate::Survived(more) => Fate::Survived(ran + more),
                    Fate::Refused | Fate::Unused => Fate::Survived(ran),
                };
            }
            let fate = result;
            let how = match &fate {
                Fate::Found(how) => format!("found by {how}"),
                Fate::Refused => "the compiler refuses it".to_owned(),
                Fate::Unused => "no problem has it".to_owned(),
                Fate::Survived(ran) if is_known(edit) => format!("equivalent, {ran} problems"),
                Fate::Survived(ran) => format!("SURVIVED {ran} problems"),
            };
            println!("fault {} [{}]; {how}; {} s", edit.told(), edit.rule, begun.elapsed().as_secs());
            fates.lock().unwrap().push((n, fate));
            *under_way.lock().unwrap() -= 1;
        }
    });
    let fates = fates.into_inner().unwrap();
    let count = |is: &dyn Fn(&Edit, &Fate) -> bool| fates.iter().filter(|(n, fate)| is(&all[*n], fate)).count();
    let survived = |edit: &Edit, fate: &Fate| matches!(fate, Fate::Survived(_)) && !is_known(edit);
    let ends = |fate: &Fate, how: &str| matches!(fate, Fate::Found(found) if found.contains(how));
    say(&format!(
        "mutants of seed {seed}: {} possible of {made} that problems have, {} tried: {} found, of which {} by the time limit and {} by a crash, {} equivalent, {} survived; \
         {} refused by the compiler and {} unused were replaced; {} s",
        all.len(),
        counts(&fates),
        count(&|_, fate| matches!(fate, Fate::Found(_))),
        count(&|_, fate| ends(fate, "TIME LIMIT")),
        count(&|_, fate| ends(fate, "CRASH")),
        count(&|edit, fate| matches!(fate, Fate::Survived(_)) && is_known(edit)),
        count(&survived),
        count(&|_, fate| *fate == Fate::Refused),
        count(&|_, fate| *fate == Fate::Unused),
        begun.elapsed().as_secs(),
    ));
    let wrong: Vec<String> = fates
        .iter()
        .map(|(n, fate)| (&all[*n], fate))
        .filter(|(edit, fate)| survived(edit, fate) || (matches!(fate, Fate::Found(_)) && is_known(edit)))
        .map(|(edit, fate)| format!("{}; {fate:?}", edit.told()))
        .collect();
    assert!(wrong.is_empty(), "{} survive, or are found and called equivalent\n{}", wrong.len(), wrong.join("\n"));
}
