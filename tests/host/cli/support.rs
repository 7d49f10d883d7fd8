//! Who takes a problem, from outside: by the rules of a version that is not here. With engines asked, `tests/offline` has the answers.

use super::tool::{code, errors, json, sdpa, stdout, words};

/// No runtime of this version was ever released, so none is found.
const NOWHERE: &str = "--cudnn 9.26.77";

#[test]
fn what_is_taken_is_told_for_each_device() {
    let out = sdpa(words(&format!("support --shape 2,8,2,300,300,64 --mask causal --sink {NOWHERE}")));
    assert_eq!(code(&out), 0, "{}", String::from_utf8_lossy(&out.stderr));
    let told = stdout(&out);
    for device in ["a100", "l40s", "h200", "b200"] {
        assert!(told.lines().any(|line| line.starts_with(device) && line.ends_with("supported, composite")), "{told}");
    }
    assert!(told.contains("9.26.77, which is not installed") && told.contains("forward bf16 (2,8,2,300,300,64) sink causal"), "{told}");
    assert!(["cuda     a100: supported, forward mma.sync", "h200: supported, forward "].iter().all(|part| told.contains(part)), "{told}");
    assert!(told.lines().any(|line| line.starts_with("cpu") && line.ends_with("supported")), "{told}");
}

#[test]
fn what_is_unsupported_is_told_with_what_would_allow_it() {
    let of = |line: &str| {
        let out = sdpa(words(&format!("support {line} --json")));
        assert_eq!(code(&out), 0, "{line}: {}", String::from_utf8_lossy(&out.stderr));
        json(&out)
    };
    let allowed = |told: &serde_json::Value| told["devices"][0]["allowed"].to_string();
    let dims = of(&format!("--shape 1,2,2,5,5,7 --device b200 {NOWHERE}"));
    assert!(dims["devices"][0]["form"].is_null() && dims["devices"][0]["reasons"].as_array().is_some_and(|r| r.len() == 2), "{dims}");
    assert_eq!(dims["devices"][0]["allowed"], serde_json::json!(["with dims of 8 and 8: composite"]));
    assert_eq!((&dims["cpu"]["supported"], &dims["metal"]["supported"]), (&true.into(), &true.into()));
    // Native CUDA kernels have a family that takes any dims up to 256.
    assert!(dims["cuda"][0]["tile"].as_str().unwrap().contains("mma.sync"), "{dims}");
    let wide = of(&format!("--shape 1,2,2,5,5,264 --device h200 {NOWHERE}"));
    let unsupported = &wide["cuda"][0];
    assert!(unsupported["tile"].is_null() && unsupported["reasons"][0] == "dim_qk: got 264, expected at most 256", "{wide}");

    // Two things at once.
    let both = of(&format!("--shape 1,2,2,5,5,7 --dtype f32 --device h200 {NOWHERE}"));
    assert!(allowed(&both).contains("with dims of 8 and 8 and in bf16: composite"), "{both}");

    // Lengths go wrong before 9.19: without them, or on a newer version.
    let lengths = of("--shape 4,8,2,100,100,64 --mask causal --mask padding --device h200 --cudnn 9.16.77");
    assert!(allowed(&lengths).contains("without --mask padding: composite"), "{lengths}");
    assert!(allowed(&lengths).contains("by cuDNN 9.19.0, according to the rules"), "{lengths}");
    assert!(!allowed(&lengths).contains("without --mask causal"), "{lengths}");

    let documents = of(&format!("--shape 4,8,2,100,100,64 --cu-seqlens 0,100,200,300,380 --backward --device a100 {NOWHERE}"));
    assert!(
        allowed(&documents).contains("with batch entries that are padded") && allowed(&documents).contains("forward alone"),
        "{documents}"
    );
    assert_eq!(documents["metal"]["supported"], true);
    let pages = of(&format!("--shape 4,8,2,100,100,64 --paged 16 --device a100 {NOWHERE}"));
    assert_eq!((&pages["cpu"]["supported"], &pages["metal"]["supported"]), (&true.into(), &true.into()));
    // Rows that get sinks behind the attention lie dense.
    let decode = of(&format!("--shape 3,8,2,1,100,64 --paged 16 --cu-seqlens-q 0,1,1,2 --sink --device h200 {NOWHERE}"));
    assert!(decode["metal"]["reasons"][0].as_str().unwrap().contains("none with a paged KV cache"), "{decode}");
    let told = allowed(&decode);
    assert!(told.contains("without --sink: unified") && told.contains("with batch entries that are padded: unified"), "{decode}");
}

/// Rules alone refuse a problem, and the answers that are kept stand beside them.
#[test]
fn a_version_that_is_not_here_is_answered_by_rules_and_by_what_it_said() {
    let of = |version: &str| {
        let line = "support --shape 4,32,8,64,4096,192 --paged 16 --mask padding --mask window:128,0 --score-mod softcap:30 --device a100";
        let out = sdpa(words(&format!("{line} --cudnn {version} --json")));
        assert_eq!(code(&out), 0, "{}", String::from_utf8_lossy(&out.stderr));
        json(&out)["devices"][0].clone()
    };
    let told = of("9.13.77");
    let (reasons, allowed) = (told["reasons"].to_string(), told["allowed"].to_string());
    assert!(reasons.contains("batch entries without queries or keys get NaN"), "{told}");
    assert!(allowed.contains("without --mask padding: composite") && allowed.contains("by cuDNN 9.19.0, according to the rules"), "{told}");
    assert_eq!((&told["recorded"]["runtime"], &told["recorded"]["kind"]), (&"9.13".into(), &"paged KV caches".into()), "{told}");
    assert!(told["recorded"]["supported"].as_u64() < told["recorded"]["problems"].as_u64(), "{told}");
    let told = of("9.9.77");
    let reasons = told["reasons"].to_string();
    assert!(
        ["on compute capability 8 before cuDNN 9.10", "with a paged KV cache before cuDNN 9.10"].iter().all(|rule| reasons.contains(rule)),
        "{told}"
    );
    assert!(told["recorded"].is_null(), "{told}");
}

#[test]
fn what_a_mask_costs_is_told() {
    let notes = |line: &str| {
        let out = sdpa(words(&format!("support {line} --device h200 {NOWHERE} --json")));
        assert_eq!(code(&out), 0, "{line}: {}", String::from_utf8_lossy(&out.stderr));
        json(&out)["notes"].clone()
    };
    let documents = notes("--shape 1,8,2,500,500,64 --mask document --mask causal");
    assert!(documents[0].as_str().unwrap().starts_with("every tile is computed: which document"), "{documents}");
    assert!(documents[1].as_str().unwrap().contains("packed documents (cu_seqlens)"), "{documents}");
    assert_eq!(notes("--shape 1,8,2,500,500,64 --mask causal"), serde_json::json!([]));
    let pieces = "--shape 4,32,8,4096,4096,128 --mask prefix-lm:512";
    assert!(notes(pieces)[0].as_str().unwrap().starts_with("in 2 pieces"), "{}", notes(pieces));
    let text = stdout(&sdpa(words(&format!("support {pieces} --device h200 {NOWHERE}")))).to_owned();
    assert!(text.lines().any(|line| line.starts_with("mask ") && line.contains("in 2 pieces")), "{text}");
    let text = stdout(&sdpa(words(&format!("inspect --stage problem {pieces} --sink")))).to_owned();
    assert!(text.contains("on cudnn") && text.contains("a sink needs all keys of a row"), "{text}");
}

#[test]
fn mistakes_are_told_at_once() {
    let out = sdpa(words("support --shape 2,8,3,10,10,64 --device b201 --device h200 --cudnn 8"));
    assert_eq!(code(&out), 2);
    let told = errors(&out).join("\n");
    for what in ["heads_kv", "got \"b201\", expected one of a100, l40s, h200, b200", "got \"8\", expected a version"] {
        assert!(told.contains(what), "{what}: {told}");
    }
}
