//! What `--check` says: passed, failed, or that it cannot tell.

use super::tensors::{file_of, to_bytes};
use super::tool::{Folder, code, json, sdpa, stdout};
use safetensors::tensor::Dtype;
use serde_json::Value;

fn run(words: &[&str]) -> (i32, Value) {
    let always = ["run", "--check", "--json", "--executor", "cpu"];
    let out = sdpa(always.iter().chain(words));
    (code(&out), json(&out))
}

/// A tensor whose numbers a function of their places gives.
type Made<'a> = (&'a str, [usize; 4], &'a dyn Fn(usize) -> f64);

/// A file with tensors of one shape, of numbers that a function of their places gives.
fn tensors(dtype: Dtype, all: &[Made<'_>]) -> Vec<u8> {
    let all: Vec<_> = all
        .iter()
        .map(|(name, shape, number)| {
            let bytes = (0..shape.iter().product()).flat_map(|n| to_bytes(number(n), dtype)).collect();
            (*name, dtype, &shape[..], bytes)
        })
        .collect();
    file_of(&all)
}

#[test]
fn a_tolerance_that_forgives_anything_is_no_pass() {
    for words in [
        &["--shape", "1,1,1,2,300,8", "--dtype", "f32", "--score-mod", "score - 1e7", "--backward"][..],
        &["--shape", "1,1,1,4,4,4", "--dtype", "f32", "--score-mod", "score * 1e9"],
        &["--shape", "1,1,1,4,4,4", "--dtype", "f32", "--scale", "1e8", "--backward"],
    ] {
        let (code, told) = run(words);
        let check = &told["check"];
        assert_eq!((code, &check["passed"]), (5, &Value::Bool(true)), "{words:?}: {check}");
        let of = |x: &Value| x["undecided"].as_u64().unwrap_or(0);
        let gradients = check["gradients"].as_array().into_iter().flatten();
        let each = of(&check["o"]) + of(&check["stats"]) + gradients.map(of).sum::<u64>();
        assert!(of(check) > 0 && of(check) == each, "{words:?}: {check}");
    }
    let words = ["run", "--check", "--shape", "1,1,1,4,4,4", "--dtype", "f32", "--scale", "1e8"];
    let out = sdpa(words);
    assert!(stdout(&out).contains("check        UNDECIDED") && stdout(&out).contains("elements undecided"), "{}", stdout(&out));
}

/// f32 rounds such scores to numbers that are equal or far apart, so there is one right result, and the CPU executor has it.
#[test]
fn rows_whose_every_score_is_extremely_low_are_checked() {
    for dtype in ["f32", "f16", "bf16"] {
        for score_mod in [
            "score - 1e9",
            "score + 1e9",
            "score - 1e30",
            "score - 3.4028234e38",
            "select(k < 3 | q > 4, -1e9, score)",
            "score + select(q < 9, -1e9, f32(k) * 0.1)",
            "select(k % 2 == 0, 3e38, 2.5e38)",
        ] {
            let shape = ["--shape", "1,2,1,33,45,16", "--dtype", dtype, "--score-mod", score_mod, "--backward"];
            let (code, told) = run(&shape);
            assert_eq!((code, &told["check"]["undecided"]), (0, &0.into()), "{dtype} {score_mod}: {}", told["check"]);
        }
    }
}

/// The sum of the worst cases of all pairs is more than the gradient itself.
#[test]
fn the_norm_of_a_gradient_of_a_parameter_is_bounded() {
    let of = |score_mod: &str, wrt: &str| {
        let (code, told) = run(&["--shape", "1,2,2,40,50,64,256", "--score-mod", score_mod, "--wrt", wrt, "--backward"]);
        let gradients = told["check"]["gradients"].as_array().unwrap().clone();
        assert!(
            gradients[..3].iter().all(|operand| operand["bound"].as_f64().is_some_and(|bound| bound < 1.0) && operand["decided"] == true),
            "{gradients:?}"
        );
        (code, gradients[3].clone())
    };
    let (code, slopes) = of("alibi-slopes", "slopes");
    let number = |name: &str| slopes[name].as_f64().unwrap();
    assert!(code == 0 && slopes["decided"] == true && number("bound") > 0.0, "{slopes}");
    // Errors as large as the gradient exceed the bound.
    assert!(number("bound") / number("relative") > 1.5, "{slopes}");
    // A number that is added to all scores of a head changes nothing: its gradient is 0, and zeros are right.
    let (code, bias) = of("bias:h", "bias");
    assert_eq!((code, &bias["decided"]), (0, &true.into()), "{bias}");
}

/// Keys of next to no weight may have scores of any size: that is how others write masks.
#[test]
fn scores_without_weight_decide_nothing_and_hide_nothing() {
    for dtype in ["f32", "bf16"] {
        for score_mod in ["select(k > q, -1e9, score)", "select(k > q, -3e38, score)", "select(k > q, -inf, score)", "softcap:5"] {
            let (code, told) = run(&["--shape", "1,2,1,65,90,16", "--dtype", dtype, "--score-mod", score_mod, "--backward"]);
            assert_eq!((code, &told["check"]["undecided"]), (0, &0.into()), "{dtype} {score_mod}: {}", told["check"]);
        }
    }
}

#[test]
fn what_overflows_rightly_is_right() {
    let folder = Folder::new();
    let path = folder.path("in");
    let number = |size: f64| move |n: usize| size * ((n * 37 % 19) as f64 / 9.0 - 1.0);
    let (large, small) = (number(200.0), number(1e-3));
    let shape = [1, 1, 6, 8];
    let all: [Made<'_>; 4] = [("q", shape, &small), ("k", shape, &large), ("v", shape, &large), ("do", shape, &large)];
    std::fs::write(&path, tensors(Dtype::F16, &all)).unwrap();
    let output = folder.path("out");
    let (code, told) = run(&["--input", &path, "--scale", "3", "--backward", "--output", &output]);
    let file = std::fs::read(&output).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let infinite = super::tensors::from_bytes(file.tensor("dq").unwrap().data(), Dtype::F16).iter().filter(|x| x.is_infinite()).count();
    assert!(infinite > 5, "{infinite}");
    assert_eq!(code, 0, "{}", told["check"]);
}

/// Where a choice takes the other value, nothing of a gradient arrives, not even what is no number.
#[test]
fn what_has_no_slope_has_no_gradient_even_of_what_is_no_number() {
    let folder = Folder::new();
    let path = folder.path("in");
    let number = |n: usize| (n * 37 % 19) as f64 / 9.0 - 1.0;
    let with_nan = |n: usize| if n == 17 { f64::NAN } else { number(n) };
    let shape = [1, 1, 6, 8];
    for (q, v, score_mods) in [
        // Every row is not-a-number, by a value or by a score; keys of odd places have no slope.
        (&number as &dyn Fn(usize) -> f64, &with_nan as &dyn Fn(usize) -> f64, &["select(k % 2 == 0, score, 0.5)"][..]),
        (&with_nan, &number, &["select(k % 2 == 0, score, 0.5)"]),
        // A score that is not-a-number is not the smaller one.
        (&with_nan, &number, &["min(score, 0.5)", "max(-1.0, score)", "select(q == 2, min(score, 0.25), score)"]),
    ] {
        for score_mod in score_mods {
            std::fs::write(&path, tensors(Dtype::F32, &[("q", shape, q), ("k", shape, &number), ("v", shape, v), ("do", shape, &number)]))
                .unwrap();
            let (_, told) = run(&["--input", &path, "--score-mod", score_mod, "--backward"]);
            // The norm of six rows, some of which are no numbers, may be undecided.
            let check = &told["check"];
            assert_eq!((&check["passed"], &check["undecided"]), (&Value::Bool(true), &0.into()), "{score_mod}: {check}");
        }
    }
}
