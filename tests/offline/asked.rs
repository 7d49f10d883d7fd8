//! The real cuDNN plans attention for four devices on a machine without a GPU: what it takes, and that it was sent what we meant.

use conformance::golden;
use conformance::matrix::{self, FP8_SAMPLE, SAMPLE};
use conformance::offline::{Answer, Asked, Compiled, PROFILES, RUNTIMES, Runtime, Wanted, asked_today};
use conformance::say::{say, skip};
use conformance::share::is_whole;
use conformance::support;
use std::path::Path;

fn worker() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_offline"))
}

/// Every runtime, or none and a word about it.
pub(super) fn runtimes() -> Vec<Runtime> {
    find(&RUNTIMES)
}

fn find(names: &[&'static str]) -> Vec<Runtime> {
    let found: Result<Vec<Runtime>, String> = names.iter().map(|name| Runtime::find(name, worker())).collect();
    found.unwrap_or_else(|why| {
        skip("offline", &why);
        Vec::new()
    })
}

/// One worker per runtime, side by side.
pub(super) fn on_each<T: Send + for<'a> serde::Deserialize<'a>>(runtimes: &[Runtime], arguments: &[&str]) -> Vec<(&'static str, Vec<T>)> {
    let run = |runtime: &Runtime| (runtime.name, runtime.worker(worker(), arguments));
    let results: Vec<(&'static str, Result<Vec<T>, String>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = runtimes.iter().map(|runtime| scope.spawn(move || run(runtime))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker's thread does not panic")).collect()
    });
    results.into_iter().map(|(name, lines)| (name, lines.unwrap_or_else(|e| panic!("{e}")))).collect()
}

#[test]
fn every_problem_is_supported_or_has_a_reason_and_the_table_says_so() {
    let runtimes = find(&asked_today());
    if runtimes.is_empty() {
        return;
    }
    let (rows, told) = matrix::of_today(matrix::rows().unwrap());
    say(&format!("offline: problems {told}"));
    let answers: Vec<(&str, Vec<Asked>)> = on_each(&runtimes, &["ask"]);
    let mut problems = Vec::new();
    for (runtime, asked) in &answers {
        for (profile, _) in PROFILES {
            let n = asked.iter().filter(|a| a.profile == profile && a.wanted == Wanted::Any).count();
            assert_eq!(n, rows.len(), "questions to cuDNN {runtime} about {profile}");
        }
        for a in asked {
            let wrong = match &a.answer {
                Answer::Supported { .. } => None,
                Answer::Unsupported(reasons) if reasons.is_empty() => Some("unsupported for no reason".to_owned()),
                Answer::Unsupported(reasons) => {
                    let mute = |text: &str| text.trim().is_empty() || text.contains("gives no reason");
                    reasons.iter().map(ToString::to_string).find(|text| mute(text)).map(|text| format!("unsupported mutely: {text}"))
                }
                Answer::Fails(text) => Some(text.clone()),
            };
            problems.extend(wrong.map(|text| format!("{runtime} {} {:?} {}: {text}", a.profile, a.wanted, a.row)));
        }
        let taken = asked.iter().filter(|a| a.answer.is_supported()).count();
        say(&format!("offline: cuDNN {runtime} was asked {} questions and took {taken}", asked.len()));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    let mut stored = support::stored().unwrap();
    let mut different = Vec::new();
    if is_whole() {
        for (runtime, asked) in &mut stored {
            if let Some((_, new)) = answers.iter().find(|(answered, _)| answered == runtime) {
                asked.clone_from(new);
            }
        }
        different.extend(support::files(&rows, &stored).unwrap().iter().filter_map(|(file, text)| golden::check(file, text).err()));
    } else {
        let lines = |asked: &[Asked]| support::told_out(&support::detail(&rows, asked));
        for (runtime, asked) in &answers {
            let recorded = stored.iter().find(|(name, _)| name == runtime).map(|(_, asked)| lines(asked)).unwrap_or_default();
            let made = lines(asked);
            assert!(made.len() >= rows.len(), "{} lines of {} problems", made.len(), rows.len());
            different.extend(made.difference(&recorded).map(|line| format!("not recorded for {runtime}: {line}")));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Rows of the sample that a device may not support: in the backward pass, dims past 128, a third value for each query and packed documents
/// need engines of compute capability 9.0 or newer, and one query is known to be wrong on one runtime.
const MAY_BE_UNSUPPORTED: usize = 4;

#[test]
fn what_is_taken_compiles_and_is_what_was_sent() {
    let runtimes = runtimes();
    if runtimes.is_empty() {
        return;
    }
    let all = std::env::var("SDPA_OFFLINE").is_ok_and(|value| value == "all");
    let mut arguments = vec!["compile"];
    if all {
        arguments.push("all");
    } else {
        arguments.extend(SAMPLE);
        arguments.extend(FP8_SAMPLE);
    }
    let compiled: Vec<(&str, Vec<Compiled>)> = on_each(&runtimes, &arguments);
    let mut problems = Vec::new();
    for (runtime, plans) in &compiled {
        for (profile, _) in PROFILES {
            let here = plans.iter().filter(|p| p.profile == profile && p.wanted == Wanted::Any);
            let narrow = |p: &Compiled| FP8_SAMPLE.contains(&p.row.as_str());
            let unsupported = here.clone().filter(|p| p.unsupported && !narrow(p)).count();
            // What engines for compute capability 9 get wrong.
            let on_hopper = |p: &Compiled| {
                p.row.contains("padding")
                    || p.row.contains("several masks")
                    || p.row.contains("score_mod softcap")
                    || (p.row.starts_with("backward") && *runtime == "9.19")
            };
            let refused = |p: &Compiled| ["a100", "l40s"].contains(&profile) || profile == "h200" && on_hopper(p);
            let wrong: Vec<&str> = here.clone().filter(|p| narrow(p) && p.unsupported != refused(p)).map(|p| p.row.as_str()).collect();
            assert!(wrong.is_empty(), "cuDNN {runtime}, 8-bit floats on {profile}: {wrong:#?}");
            let taken = here.clone().any(|p| narrow(p) && !p.unsupported);
            assert_eq!(taken, !["a100", "l40s"].contains(&profile), "cuDNN {runtime}, 8-bit floats on {profile}");
            let n = here.count();
            assert!(
                n >= if all || is_whole() { SAMPLE.len() } else { SAMPLE.len() / 3 },
                "cuDNN {runtime} was asked for {n} plans for {profile}"
            );
            assert!(
                all || unsupported <= MAY_BE_UNSUPPORTED,
                "cuDNN {runtime} does not support {unsupported} rows of the sample for {profile}"
            );
        }
        for (backward, pass) in [(false, "forward"), (true, "backward")] {
            let mut of_pass = plans.iter().filter(|p| p.row.contains("backward") == backward);
            assert!(of_pass.any(|p| p.copies > 0), "no {pass} plan of the sample copies an operand");
        }
        assert!(plans.iter().any(|p| p.conversions > 0), "no plan of the sample converts a declared tensor");
        problems.extend(
            plans
                .iter()
                .filter(|p| !p.wrong.is_empty())
                .map(|p| format!("{runtime} {} {:?} {}: {}", p.profile, p.wanted, p.row, p.wrong.join("\n  "))),
        );
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    for (runtime, plans) in &compiled {
        let made = plans.iter().filter(|p| !p.unsupported).count();
        say(&format!("offline: cuDNN {runtime} made {made} plans, and each records what was sent"));
    }
}

/// Bounds of masks and constants of score_mods are sent at each call: a plan serves problems that differ in those alone.
#[test]
fn problems_that_differ_in_numbers_share_plans() {
    for (runtime, lines) in on_each::<(String, String, bool, bool)>(&runtimes(), &["twins"]) {
        let shared: Vec<bool> = lines.iter().map(|(_, _, key, taken)| *key && *taken).collect();
        assert_eq!(shared, [true, true, true, false, false], "{runtime}: {lines:?}");
        assert!(lines.iter().all(|(_, _, key, taken)| key == taken), "{runtime}: {lines:?}");
    }
}
