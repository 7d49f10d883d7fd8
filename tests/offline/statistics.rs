//! Row maxima and sums of exponentials: what takes them, and that it is sent them.

use super::asked::{on_each, runtimes};
use conformance::offline::{Answer, Asked, Compiled, Wanted};
use conformance::say::say;

/// Before 9.21 maxima and sums are not written, and before 9.27 there is no base two.
fn is_unsupported(case: &str, runtime: &str) -> bool {
    case == "statistics_sink_decode" || runtime == "9.19"
}

#[test]
fn row_statistics_are_taken_wherever_the_rest_is() {
    for (runtime, asked) in on_each::<Asked>(&runtimes(), &["ask-statistics"]) {
        for a in asked.iter().filter(|a| a.wanted == Wanted::Any) {
            let unsupported = matches!(a.answer, Answer::Unsupported(_));
            assert!(!matches!(a.answer, Answer::Fails(_)), "{runtime} {} {}: {:?}", a.profile, a.row, a.answer);
            assert_eq!(unsupported, is_unsupported(&a.row, runtime), "{runtime} {} {}: {:?}", a.profile, a.row, a.answer);
        }
        say(&format!("offline: cuDNN {runtime} was asked {} questions of row statistics", asked.len()));
    }
}

/// Cases that are compiled; the others differ in what the graphs of other tests have too.
const COMPILED: [&str; 9] = [
    "statistics_plain",
    "statistics_without_stats",
    "statistics_row_max_alone",
    "statistics_sum_exp_alone",
    "statistics_lengths",
    "statistics_sink",
    "statistics_packed",
    "statistics_paged",
    "statistics_base_two",
];

/// Beside lengths of batch entries engine 2 of 9.27 for compute capability 9.0 is offered, and its kernel does not compile: the next offer is taken.
fn falls_through(case: &str, runtime: &str, profile: &str) -> bool {
    let has_lengths = ["lengths", "packed", "paged"].iter().any(|what| case.contains(what));
    has_lengths && runtime == "9.27" && profile == "h200"
}

#[test]
fn plans_of_row_statistics_record_what_was_sent() {
    let arguments: Vec<&str> = std::iter::once("compile").chain(COMPILED).collect();
    for (runtime, plans) in on_each::<Compiled>(&runtimes(), &arguments) {
        for p in &plans {
            let (known, wrong): (Vec<&String>, Vec<&String>) = p.wrong.iter().partition(|text| text.contains("NVRTC_SUCCESS"));
            assert!(wrong.is_empty(), "{runtime} {} {:?} {}: {wrong:?}", p.profile, p.wanted, p.row);
            let what = format!("{runtime} {} {:?} {}: {known:?}", p.profile, p.wanted, p.row);
            assert_eq!(!known.is_empty(), falls_through(&p.row, runtime, &p.profile), "{what}");
            assert_eq!(p.unsupported, is_unsupported(&p.row, runtime), "{what}");
        }
    }
}
