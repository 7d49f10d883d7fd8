//! Every case on every executor of this machine, against the oracle, under a name of its own: `cpu::forward::gqa_causal`. Forward passes;
//! backward passes, alone and chained to the executor's own forward pass; both with score_mods and masks of the library.

mod replaced;
mod sweeps;
mod values;

use conformance::case::Case;
use conformance::compare::Measured;
use conformance::runner::{Outcome, Replaced, Source, Tally, run_backward_case, run_case, run_tree};
use conformance::say::{required, say, skip};
use libtest_mimic::{Arguments, Failed, FormatSetting, Trial};
use sdpa::cpu::CpuExecutor;
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::metal::MetalExecutor;
use sdpa::{DType, Executor, ExecutorName, Reason, Unsupported};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// An executor under test, and what became of its cases.
struct Subject {
    executor: Arc<dyn Executor>,
    /// A device runs one case at a time.
    turn: Mutex<()>,
    forward: Mutex<Tally>,
    backward: Mutex<Tally>,
    /// Whether what passes is told too.
    talkative: bool,
}

impl Subject {
    fn name(&self) -> ExecutorName {
        self.executor.name()
    }

    fn on_cpu(&self) -> bool {
        self.name() == ExecutorName::CPU
    }

    /// Counts; a failure is the test's.
    fn judge<D: Measured>(&self, tally: &Mutex<Tally>, name: &str, outcome: &Outcome<D>) -> Result<(), Failed> {
        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Outcome::Pass(..) if !self.talkative => tally.count(outcome),
            Outcome::Pass(..) | Outcome::Skip(_) => tally.add(self.name().name(), name, outcome),
            Outcome::Fail(how) => {
                tally.count(outcome);
                return Err(how.into());
            }
        }
        Ok(())
    }

    /// Whether a case may be skipped: where it says so, or every reason is a documented limit or a known-bad runtime.
    fn excused(&self, case: &Case, said: impl FnOnce() -> Result<(), Unsupported>) -> bool {
        let name = self.name().name();
        let documented = |reason: &Reason| match reason {
            Reason::Limit { .. } | Reason::KnownBad { .. } => true,
            // Gradients that engines do not sum are refused by name.
            Reason::Refused { text, .. } => case.backward.as_ref().is_some_and(|b| !b.wrt.is_empty()) && text.contains("the gradient of"),
            Reason::Absent(_) | Reason::Failed(_) | _ => false,
        };
        case.skip.contains_key(name) || !self.on_cpu() && (!required(name) || said().is_err_and(|e| e.reasons.iter().all(documented)))
    }

    fn forward(&self, case: &Case) -> Result<(), Failed> {
        let problem = case.spec()?.validate().map_err(|e| e.to_string())?;
        let outcome = run_case(case, &*self.executor);
        let outcome = outcome.skip_only_if(|| self.excused(case, || self.executor.supports(&problem)), || case.repro(self.name()));
        self.judge(&self.forward, &case.name, &outcome)
    }

    fn backward(&self, case: &Case, source: Source) -> Result<(), Failed> {
        let problem = case.backward_spec()?.validate().map_err(|e| e.to_string())?;
        // A chained case is skipped by either pass.
        let said = || self.executor.supports_backward(&problem).and_then(|()| self.executor.supports(problem.forward()));
        let outcome = run_backward_case(case, source, &*self.executor);
        let outcome = outcome.skip_only_if(|| self.excused(case, said), || case.backward_repro(self.name()));
        self.judge(&self.backward, &format!("{}{}", case.name, source.suffix()), &outcome)
    }

    fn random_score_mod(&self, seed: u64) -> Result<(), Failed> {
        let tree = run_tree(seed, &[DType::F32, DType::BF16, DType::F16], &*self.executor)?;
        let name = format!("tree {seed}, {}", tree.text);
        if !matches!((&tree.forward, &tree.backward), (Outcome::Pass(..), Outcome::Pass(..))) {
            say(&tree.text);
        }
        self.judge(&self.forward, &name, &tree.forward)?;
        self.judge(&self.backward, &name, &tree.backward)
    }
}

type Executors = [(ExecutorName, Result<Arc<dyn Executor>, String>); 3];

/// Every executor, or why it is not here.
fn executors() -> Executors {
    let cudnn = CudnnExecutor::new(CudnnOptions::default()).map(|cudnn| Arc::new(cudnn) as Arc<dyn Executor>);
    let metal = MetalExecutor::new();
    let plain = Case::all().unwrap()[0].spec().unwrap().validate().unwrap();
    let metal = metal.supports(&plain).map(|()| Arc::new(metal) as Arc<dyn Executor>);
    [
        (ExecutorName::CPU, Ok(Arc::new(CpuExecutor::default()))),
        (ExecutorName::CUDNN, cudnn.map_err(|e| e.to_string())),
        (ExecutorName::METAL, metal.map_err(|e| e.to_string())),
    ]
}

type Check = fn(&dyn Executor);

/// What is asked of an executor besides cases.
const CHECKS: [(&str, Check); 8] = [
    ("computes_problems_in_which_any_two_features_meet", sweeps::covering),
    ("meets_every_edge", sweeps::edges),
    ("rounds_to_the_nearest", sweeps::rounds_to_the_nearest),
    ("narrows_as_it_is_said_to", sweeps::narrow_numbers),
    ("takes_anything_where_it_is_dropped", sweeps::takes_anything_where_it_is_dropped),
    ("drops_the_weights_that_the_generator_says", sweeps::drops_the_weights_that_the_generator_says),
    ("ends_rules_of_floats_where_they_are_written_to", sweeps::edges_of_rules),
    ("a_call_has_the_values_of_its_problem", values::keeps_values_apart),
];

type Run = Box<dyn FnOnce(&Subject) -> Result<(), Failed> + Send>;

/// The tests of an executor.
fn trials(subject: &Arc<Subject>) -> Vec<Trial> {
    let name = subject.name().name();
    let trial = |kind: &str, what: &str, run: Run| {
        let subject = Arc::clone(subject);
        let what = what.replace(", ", "_").replace(' ', "_");
        Trial::test(format!("{name}::{kind}{what}"), move || {
            let _turn = (!subject.on_cpu()).then(|| subject.turn.lock().unwrap_or_else(PoisonError::into_inner));
            run(&subject)
        })
    };
    let both = [
        Case::all_library(),
        Case::all_packed(),
        Case::all_ends(),
        Case::all_sinks(),
        Case::all_dropout(),
        Case::all_fp8(),
        Case::all_tables(),
        Case::all_functions(),
        Case::all_invariant(),
    ];
    let both: Vec<Case> = both.into_iter().flat_map(Result::unwrap).collect();
    let mut trials = Vec::new();
    let forward = [Case::all(), Case::all_paged(), Case::all_statistics(), Case::all_block_scaled()].into_iter().flat_map(Result::unwrap);
    for case in forward.chain(both.clone()) {
        trials.push(trial("forward::", &case.name.clone(), Box::new(move |subject| subject.forward(&case))));
    }
    for case in Case::all_backward().unwrap().into_iter().chain(both) {
        for source in Source::ALL {
            let (what, case) = (format!("{}{}", case.name, source.suffix()), case.clone());
            trials.push(trial("backward::", &what, Box::new(move |subject| subject.backward(&case, source))));
        }
    }
    for (what, check) in CHECKS {
        let run = move |subject: &Subject| {
            check(&*subject.executor);
            Ok(())
        };
        trials.push(trial("", what, Box::new(run)));
    }
    if subject.on_cpu() {
        let seeds =
            (0..60).map(|seed| trial("random_score_mod::", &seed.to_string(), Box::new(move |subject| subject.random_score_mod(seed))));
        trials.extend(seeds);
    }
    trials
}

/// One test for each pass whose results are replaced, which adds what the check says.
fn replacements(sum: &Arc<Mutex<Replaced>>) -> Vec<Trial> {
    let trial = |entry: replaced::Entry| {
        let (sum, name) = (Arc::clone(sum), entry.name.replace(", ", "_").replace(' ', "_"));
        Trial::test(format!("cpu::replaced::{name}"), move || {
            let replaced = entry.look()?;
            sum.lock().unwrap_or_else(PoisonError::into_inner).merge(&replaced);
            Ok(())
        })
    };
    replaced::entries().into_iter().map(trial).collect()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let whole = arguments.filter.is_none() && !arguments.list;
    // Hundreds of lines that say ok say nothing.
    if whole && !arguments.nocapture {
        arguments.format.get_or_insert(FormatSetting::Terse);
    }
    let (mut all, mut subjects) = (Vec::new(), Vec::new());
    for (name, executor) in executors() {
        match executor {
            Ok(executor) => {
                let (turn, forward, backward) = Default::default();
                let subject = Arc::new(Subject { executor, turn, forward, backward, talkative: arguments.nocapture });
                all.extend(trials(&subject));
                subjects.push(subject);
            }
            Err(why) => all.push(Trial::test(name.name(), move || {
                skip(name.name(), &format!("every case: {why}"));
                Ok(())
            })),
        }
    }
    let sum: Arc<Mutex<Replaced>> = Arc::default();
    all.extend(replacements(&sum));
    let mut code = libtest_mimic::run(&arguments, all).exit_code();
    for subject in subjects {
        for (pass, tally) in [("forward", &subject.forward), ("backward", &subject.backward)] {
            let tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
            if whole {
                say(&format!("{pass} {}", tally.summary(subject.name().name())));
            }
            if whole && tally.passed == 0 {
                say(&format!("no {pass} case ran on {}", subject.name()));
                code = ExitCode::FAILURE;
            }
        }
    }
    let sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
    if whole || arguments.nocapture {
        sum.table().lines().for_each(say);
    }
    if whole && sum.seen() == 0 {
        say("no result was replaced");
        code = ExitCode::FAILURE;
    }
    code
}
