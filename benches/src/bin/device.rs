//! Everything that needs a GPU, in one binary.
use conformance::runner::{self, Tally};
use conformance::{Case, random::Random};
use sdpa::exec::cudnn::*;
use sdpa::*;
fn main() {
    let ex = match CudnnExecutor::new(CudnnOptions::default()) { Ok(e) => e, Err(e) => { println!("{e}"); std::process::exit(1) } };
    println!("cuDNN {} {}", ex.library().version(), ex.library().path().display());
    let mut tally = Tally::default();
    for case in Case::all().unwrap() {
        tally.add("cudnn", &case.name, &runner::run_case(&case, &ex));
    }
    println!("{}", tally.summary("cudnn"));
    let n: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(50);
    let start: u64 = std::env::args().nth(2).and_then(|a| a.parse().ok()).unwrap_or(0);
    let mut tally = Tally::default();
    for seed in start..start + n {
        let mut r = Random::new(seed * 7919 + 13);
        let spec = runner::random_spec(&mut r, &[DType::BF16, DType::F16]);
        let out = runner::run(&spec, None, 1.0, seed, &ex);
        if let conformance::Outcome::Fail(_) = &out { println!("{spec:?}"); }
        tally.add("cudnn", &format!("random {seed}"), &out);
    }
    println!("{}", tally.summary("cudnn random"));
}
