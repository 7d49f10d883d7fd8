//! Rows of scores that are very low or very high but finite, in both kernel families: every cut of tiles, splits of the keys, sinks.

use super::{executor, mma};
use conformance::runner::{LargeScores, side_by_side};
use conformance::share::{DAYS, of_today};
use sdpa::DType;
use sdpa::cuda::CudaExecutor;
use std::sync::Mutex;

fn check(name: &str, executor: &CudaExecutor, dtypes: &[DType]) {
    let problems = of_today(&format!("large scores {name}"), 2 * DAYS, LargeScores::all(dtypes), |problem| {
        let LargeScores { shape, dtype, place, added, sink } = problem;
        vec![format!("{shape:?}"), dtype.to_string(), format!("{place:?}"), added.to_string(), sink.to_string()]
    });
    let wrong = Mutex::new(Vec::new());
    side_by_side(&problems, |problem| {
        if let Err(how) = problem.run(executor) {
            wrong.lock().unwrap().push(format!("{problem:?}: {how}"));
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} are wrong:\n{}", wrong.len(), problems.len(), wrong.join("\n"));
}

#[test]
fn large_scores_of_wgmma() {
    executor().iter().for_each(|executor| check("wgmma", executor, &[DType::BF16, DType::F16]));
}

#[test]
fn large_scores_of_mma() {
    mma::executor().iter().for_each(|executor| check("mma", executor, &[DType::BF16, DType::F32, DType::F16]));
}
