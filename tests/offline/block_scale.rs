//! 8-bit floats whose blocks have scales: who takes them, and that it is sent them.

use super::asked::{on_each, runtimes};
use conformance::offline::{Answer, Asked, Compiled, Wanted};
use conformance::say::say;
use sdpa::Reason;

/// The field that every answer of a runtime and a device has among its reasons; none where cases are taken.
fn field(runtime: &str, profile: &str) -> Option<&'static str> {
    match (runtime, profile) {
        (_, "a100" | "l40s" | "h200") => Some("block_scaled"),
        ("9.19", _) => Some("cudnn"),
        _ => None,
    }
}

/// What is unsupported for compute capability 10 too, and the field that says why.
const UNSUPPORTED: [(&str, &str); 5] = [
    ("block_scale_odd_values", "dim_qk and dim_v"),
    ("block_scale_rows_apart", "dim_qk and dim_v"),
    ("block_scale_dims_256", "dim_qk and dim_v"),
    ("block_scale_decode", "seq_q"),
    ("block_scale_softcap_and_bias", "score_mods"),
];

fn reason(runtime: &str, profile: &str, case: &str) -> Option<&'static str> {
    let of_case = || UNSUPPORTED.iter().find(|(name, _)| *name == case).map(|(_, field)| *field);
    field(runtime, profile).or_else(of_case)
}

#[test]
fn block_scales_are_taken_for_compute_capability_10() {
    let mut taken = 0;
    for (runtime, asked) in on_each::<Asked>(&runtimes(), &["ask-block-scales"]) {
        for a in asked.iter().filter(|a| a.wanted == Wanted::Any) {
            let what = format!("{runtime} {} {}: {:?}", a.profile, a.row, a.answer);
            match (&a.answer, reason(runtime, &a.profile, &a.row)) {
                (Answer::Supported { .. }, None) => taken += 1,
                (Answer::Unsupported(reasons), Some(wanted)) => {
                    let told = |reason: &Reason| matches!(reason, Reason::Limit { field, .. } if field == wanted);
                    assert!(reasons.iter().any(told), "{what}");
                }
                (Answer::Supported { .. } | Answer::Unsupported(_) | Answer::Fails(_), _) => panic!("{what}"),
            }
        }
        say(&format!("offline: cuDNN {runtime} was asked {} questions of block scales", asked.len()));
    }
    assert!(runtimes().is_empty() || taken > 7, "{taken} cases are taken");
}

/// Cases that are compiled: a plan has no record of random numbers that a test has compared.
const COMPILED: [&str; 9] = [
    "block_scale_plain",
    "block_scale_e5m2_causal",
    "block_scale_narrow_output",
    "block_scale_gqa_ragged_blocks",
    "block_scale_few_keys",
    "block_scale_padding",
    "block_scale_softcap",
    "block_scale_sink",
    "block_scale_statistics",
];

#[test]
fn plans_of_block_scales_record_what_was_sent() {
    let arguments: Vec<&str> = std::iter::once("compile").chain(COMPILED).collect();
    for (runtime, plans) in on_each::<Compiled>(&runtimes(), &arguments) {
        for p in plans.iter().filter(|p| p.wanted == Wanted::Any) {
            let what = format!("{runtime} {} {}: {:?}", p.profile, p.row, p.wrong);
            assert!(p.wrong.is_empty(), "{what}");
            assert_eq!(p.unsupported, field(runtime, &p.profile).is_some(), "{what}");
        }
    }
}
