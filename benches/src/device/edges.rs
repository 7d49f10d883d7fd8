//! Where rules of floats end, on every executor of this device: each weight of each rule.

use crate::cuda;
use crate::setup::{Result, executor};
use conformance::runner::Edges;
use sdpa::Executor;
use sdpa::cuda::{CudaOptions, Family};
use sdpa::cudnn::PlanOptions;
use std::ops::Range;

fn look(name: &str, executor: &dyn Executor, seeds: Range<u64>) -> u64 {
    let (mut right, mut unsupported, mut failed) = (0, 0, 0);
    for seed in seeds {
        match Edges::drawn(seed).look(executor) {
            Ok(Some(_)) => right += 1,
            Ok(None) => unsupported += 1,
            Err(how) => {
                failed += 1;
                println!("FAIL {name} {seed}: {how}");
            }
        }
    }
    println!("{name}, edges of rules of floats: {right} right, {unsupported} unsupported, {failed} failed");
    failed
}

pub(crate) fn run(seeds: &Range<u64>) -> Result<()> {
    let mut failed = look("cudnn", &executor(PlanOptions::default())?, seeds.clone());
    for family in [Family::Wgmma, Family::Mma] {
        let executor = cuda::executor_of(CudaOptions::default().with_family(family))?;
        failed += look(&format!("cuda, {family:?}"), &executor, seeds.clone());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
