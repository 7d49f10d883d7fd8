//! `batch_invariant` on the CPU executor, bit by bit.

use conformance::invariance::{Features, bits_alone, compare};
use conformance::say::say;
use sdpa::DType;
use sdpa::cpu::CpuExecutor;

const CAUSAL: Features = Features {
    dtype: DType::F32,
    heads: [6, 2],
    dims: [40, 24],
    score_mods: &[],
    masks: &["causal-ends"],
    sink: false,
    lengths: &[[40, 40], [1, 700], [70, 2500], [333, 333], [5, 5200]],
    from_the_end: true,
    gradients: true,
    batch_invariant: true,
};

const ALL: [Features; 6] = [
    CAUSAL,
    Features { dtype: DType::BF16, sink: true, masks: &["window:300,0:ends"], ..CAUSAL },
    Features { heads: [2, 2], dims: [64, 64], score_mods: &["softcap:5"], masks: &[], from_the_end: false, ..CAUSAL },
    Features { dtype: DType::F16, dims: [128, 128], score_mods: &["alibi"], from_the_end: false, ..CAUSAL },
    // Windows that begin anywhere and have more keys than f32 sums take.
    Features { masks: &["window:2600,0:ends"], lengths: &[[30, 3000], [260, 5200]], gradients: false, ..CAUSAL },
    Features { heads: [3, 1], masks: &["causal-ends", "(q + k) % 3 != 1"], from_the_end: false, ..CAUSAL },
];

/// Runs with this number of threads.
fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

#[test]
fn results_of_a_sequence_do_not_depend_on_the_rest_of_the_call() {
    let executor = CpuExecutor::new();
    for features in ALL {
        let compared = with_threads(3, || compare(&executor, &features)).unwrap_or_else(|why| panic!("{features:?}: {why}"));
        say(&format!("batch_invariant cpu: {compared} equal results of {features:?}"));
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let executor = CpuExecutor::new();
    for features in [CAUSAL, ALL[1]] {
        let [one, other] = [1, 5].map(|threads| with_threads(threads, || bits_alone(&executor, &features)).unwrap());
        assert!(!one.is_empty() && one == other, "{features:?}");
    }
}

/// The comparison sees the differences that there are without the option.
#[test]
fn without_the_option_results_differ() {
    let features = Features { batch_invariant: false, ..CAUSAL };
    let told = with_threads(3, || compare(&CpuExecutor::new(), &features)).unwrap_err();
    assert!(told.contains("alone"), "{told}");
}
