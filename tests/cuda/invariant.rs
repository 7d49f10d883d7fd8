//! Batch-invariant forward passes of the WGMMA kernels, whose splits have a fixed size.

use super::{CAUSAL, NARROW, based, each};
use conformance::case::Case;
use conformance::emulated::{Emulated, executor_with};
use conformance::invariance::{Features, compare};
use conformance::random::Random;
use conformance::runner::{fixed_split_problems, run};
use conformance::say::{say, skip};
use conformance::share::{new_seeds, one_of_today};
use sdpa::cuda::{CudaExecutor, CudaOptions, Family};
use sdpa::{DType, Executor};

pub(super) const NAME: &str = "cuda-fixed-splits-emulated";

pub(super) fn executor() -> Option<CudaExecutor> {
    let options = CudaOptions::default().with_family(Family::Wgmma);
    executor_with(Emulated::H200, options).map_err(|why| skip("cuda", &why)).ok()
}

/// The bits of a sequence's results alone and in other calls. Splits have 2,048 keys. The emulated device has five SMs, so that some calls divide the
/// splits of a tile among thread blocks, and others do not.
#[test]
fn results_of_a_sequence_do_not_depend_on_the_rest_of_the_call() {
    let Some(executor) = executor() else { return };
    let causal = Features { lengths: &[[20, 20], [1, 2150], [30, 4300], [140, 2100]], gradients: false, ..CAUSAL };
    let all = [
        causal,
        // So many heads that thread blocks merge the splits of few queries too.
        Features { dtype: DType::F16, heads: [8, 8], dims: [128, 128], sink: true, masks: &["window:2600,0:ends"], ..causal },
        Features { heads: [2, 2], dims: [96, 64], masks: &["causal-ends", "(q + k) % 3 != 1"], from_the_end: false, ..causal },
        Features {
            heads: [5, 1],
            score_mods: &["softcap:5"],
            masks: &[],
            lengths: &[[3, 4096], [90, 2049], [7, 4300]],
            from_the_end: false,
            ..causal
        },
    ];
    for features in one_of_today(&format!("invariant {NAME}"), &all) {
        let compared = compare(&executor, &features).unwrap_or_else(|why| panic!("{features:?}: {why}"));
        say(&format!("batch_invariant {NAME}: {compared} equal results of {features:?}"));
    }
}

#[test]
fn cases() {
    let Some(executor) = executor() else { return };
    let cases = Case::all_invariant().unwrap().into_iter().filter(|case| NARROW.contains(&case.dtype)).collect::<Vec<_>>();
    super::forward_on(&executor, NAME, "invariant", &cases);
}

#[test]
fn random_problems() {
    let Some(executor) = executor() else { return };
    let seeds = new_seeds(NAME, 3);
    each("random", NAME, &seeds, |&seed, tally| {
        for (what, spec) in fixed_split_problems(&mut Random::new(seed * 7919 + 47)) {
            let spec = based(spec, seed);
            let unsupported = || spec.validate().is_ok_and(|problem| executor.supports(&problem).is_err());
            let outcome = run(&spec, None, 1.0, seed, &executor).skip_only_if(unsupported, || format!("{spec:?}"));
            tally.lock().unwrap().add(NAME, &format!("SDPA_SEED={seed}, {what}"), &outcome);
        }
    });
}
