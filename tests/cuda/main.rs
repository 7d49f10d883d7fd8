//! Kernels of our own on the CPU: compiled by clang, run thread by thread, beside the oracle.

use conformance::case::Case;
use conformance::emulated;
use conformance::runner::{Source, Tally, run_backward_case, run_case};
use conformance::say::skip;

#[test]
fn backward() {
    let executor = match emulated::executor() {
        Ok(executor) => executor,
        Err(why) => return skip("cuda", &why),
    };
    let mut tally = Tally::default();
    let only = std::env::var("ONLY").ok();
    for case in Case::all_backward().unwrap() {
        if only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
            continue;
        }
        let t = std::time::Instant::now();
        let outcome = run_backward_case(&case, Source::Oracle, &executor);
        println!("{} {:?}", case.name, t.elapsed());
        tally.add("cuda-emulated", &case.name, &outcome);
    }
    println!("{}", tally.summary("cuda-emulated"));
    assert_eq!(tally.failed, 0);
}

#[test]
fn cases() {
    let executor = match emulated::executor() {
        Ok(executor) => executor,
        Err(why) => return skip("cuda", &why),
    };
    let mut tally = Tally::default();
    let only = std::env::var("ONLY").ok();
    for case in Case::all().unwrap() {
        if only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
            continue;
        }
        let outcome = run_case(&case, &executor);
        tally.add("cuda-emulated", &case.name, &outcome);
    }
    println!("{}", tally.summary("cuda-emulated"));
    assert_eq!(tally.failed, 0);
}
