//! Dropout, from outside.

use super::tool::{Folder, code, errors, json, sdpa, stdout, words};

#[test]
fn what_is_dropped_is_right_in_both_passes() {
    for rest in [
        "--mask window:9,0 --dropout-seed 77 --dropout-offset 5",
        "--layout bshd --score-mod softcap:20 --dtype f16 --sink --dropout-seed -1",
        "--cu-seqlens 0,5,5,19 --bias --dtype f32 --dropout-offset 9223372036854775807",
    ] {
        let shape = if rest.contains("cu-seqlens") { "3,4,2,14,14,16" } else { "2,4,2,21,30,16,24" };
        let out = sdpa(words(&format!("run --shape {shape} --dropout 0.3 {rest} --backward --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        assert_eq!(json(&out)["check"]["passed"], true, "{rest}");
    }
}

#[test]
fn the_numbers_say_what_is_dropped() {
    let folder = Folder::new();
    let output = |name: &str, rest: &str| {
        let to = folder.path(name);
        let out = sdpa(words(&format!("run --shape 1,2,2,40,50,16 --dropout 0.5 {rest} --output {to} --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}", String::from_utf8_lossy(&out.stderr));
        std::fs::read(to).unwrap()
    };
    let one = output("one", "--dropout-seed 3");
    assert_eq!(one, output("again", "--dropout-seed 3 --dropout-offset 0"));
    assert!(one != output("seed", "--dropout-seed 4") && one != output("offset", "--dropout-seed 3 --dropout-offset 1"));
}

#[test]
fn a_stage_shows_it() {
    let out = sdpa(words("inspect --stage problem --shape 1,2,2,40,50,16 --dropout 0.25"));
    assert!(stdout(&out).lines().any(|line| line.starts_with("dropout") && line.contains("0.25")), "{}", stdout(&out));
    let graph = sdpa(words("inspect --stage graph --runtime 9.19.0 --form composite --shape 1,2,2,40,50,16 --dropout 0.25"));
    assert!(stdout(&graph).contains("rng") && stdout(&graph).contains("dropout_seed"), "{}", stdout(&graph));
    let unified = sdpa(words("inspect --stage graph --runtime 9.27.0 --form unified --shape 1,2,2,40,50,16 --dropout 0.25"));
    assert!(code(&unified) != 0 && errors(&unified).join("\n").contains("has no dropout"), "{unified:?}");
}

#[test]
fn mistakes_with_dropout_are_told_at_once() {
    let told = |line: &str| {
        let out = sdpa(words(line));
        assert_eq!(code(&out), 2, "{line}");
        errors(&out).join("\n")
    };
    for p in ["0", "1", "-0.5", "nan", "half"] {
        let wrong =
            told(&format!("run --shape 1,2,2,4,4,8 --dropout {p} --dropout-seed x --dropout-offset 1.5 --mask window:0,0 --executor cpu"));
        assert!(wrong.contains("--dropout: ") && wrong.contains("expected a probability above 0 and below 1"), "{wrong}");
        assert!(
            wrong.contains("--dropout-seed: got \"x\"") && wrong.contains("--dropout-offset: got \"1.5\"") && wrong.contains("left"),
            "{wrong}"
        );
    }
    let alone = told("run --shape 1,2,2,4,4,8 --dropout-seed 3 --executor cpu");
    assert!(alone.contains("--dropout-seed: requires --dropout"), "{alone}");
    let own = "tensor dropout_seed[head]: f32; score + dropout_seed";
    let twice = errors(&sdpa(["run", "--shape", "1,2,2,4,4,8", "--dropout", "0.5", "--score-mod", own, "--executor", "cpu"])).join("\n");
    assert!(twice.contains("parameter dropout_seed") && twice.contains("a reserved name"), "{twice}");
}
