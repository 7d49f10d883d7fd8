//! The backward pass, from outside.

use super::tensors::{file_of, from_bytes, numbers};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

const Q: [usize; 4] = [1, 4, 5, 8];
const K: [usize; 4] = [1, 2, 6, 8];

type Tensors = Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &str, tensors: &Tensors) {
    let tensors: Vec<_> = tensors.iter().map(|(name, dtype, shape, bytes)| (*name, *dtype, &shape[..], bytes.clone())).collect();
    std::fs::write(path, file_of(&tensors)).unwrap();
}

fn input() -> (Tensors, Vec<Vec<f64>>) {
    let mut values = Vec::new();
    let mut tensors = Vec::new();
    for (n, (name, shape)) in [("q", &Q[..]), ("k", &K), ("v", &K), ("do", &Q), ("bias", &[4, 5, 6])].into_iter().enumerate() {
        let (numbers, bytes) = numbers(shape.iter().product(), Dtype::F32, 20 + n as u64);
        values.push(numbers);
        tensors.push((name, Dtype::F32, shape.to_vec(), bytes));
    }
    (tensors, values)
}

/// Σ o∘do, causal, of softcap(2) of the biased scores.
fn loss(x: &[Vec<f64>], cap: f64) -> f64 {
    let [_, heads, seq_q, dim] = Q;
    let seq_kv = K[2];
    let mut sum = 0.0;
    for (h, i) in (0..heads * seq_q).map(|n| (n / seq_q, n % seq_q)) {
        let row = |t: usize, head: usize, seq: usize, s: usize| &x[t][(head * seq + s) * dim..][..dim];
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let weight = |j: usize| {
            let score = 0.5 * dot(row(0, h, seq_q, i), row(1, h / 2, seq_kv, j)) + x[4][(h * seq_q + i) * seq_kv + j];
            (cap * (score / cap).tanh()).exp()
        };
        let total: f64 = (0..=i).map(weight).sum();
        sum += (0..=i).map(|j| weight(j) / total * dot(row(2, h / 2, seq_kv, j), row(3, h, seq_q, i))).sum::<f64>();
    }
    sum
}

/// The derivative along one element, or along the cap.
fn derivative(x: &[Vec<f64>], at: Option<(usize, usize)>) -> f64 {
    let moved = |step: f64| {
        let mut x = x.to_vec();
        let mut cap = 2.0;
        match at {
            Some((tensor, n)) => x[tensor][n] += step,
            None => cap += step,
        }
        loss(&x, cap)
    };
    (moved(1e-5) - moved(-1e-5)) / 2e-5
}

#[test]
fn gradients_are_limits_of_differences() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let (tensors, values) = input();
    write(&from, &tensors);
    let line = format!(
        "run --input {from} --output {to} --scale 0.5 --bias --score-mod softcap:2 --mask causal --backward --wrt cap --check --json --executor cpu"
    );
    let out = sdpa(words(&line));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let told = json(&out);
    assert_eq!(told["backward"]["wrt"], serde_json::json!(["bias", "cap"]));
    let checked: Vec<&str> = told["check"]["gradients"].as_array().unwrap().iter().map(|g| g["name"].as_str().unwrap()).collect();
    assert_eq!(checked, ["dq", "dk", "dv", "dbias", "dcap"]);
    let written = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["dbias", "dcap", "dk", "dq", "dv", "o", "stats"]);
    for (tensor, name, shape) in [(0, "dq", &Q[..]), (1, "dk", &K), (2, "dv", &K), (4, "dbias", &[4, 5, 6])] {
        let view = file.tensor(name).unwrap();
        assert_eq!((view.shape(), view.dtype()), (shape, Dtype::F32), "{name}");
        for (n, got) in from_bytes(view.data(), Dtype::F32).into_iter().enumerate().step_by(3) {
            let want = derivative(&values, Some((tensor, n)));
            assert!((got - want).abs() < 1e-5, "{name} {n}: {got}, not {want}");
        }
    }
    let dcap = file.tensor("dcap").unwrap();
    let (got, want) = (from_bytes(dcap.data(), Dtype::F32)[0], derivative(&values, None));
    assert!(dcap.shape().is_empty() && (got - want).abs() < 1e-5, "{got}, not {want}");
}

#[test]
fn a_forward_pass_that_is_there_is_not_computed_again() {
    let folder = Folder::new();
    let (first, from, to) = (folder.path("first"), folder.path("in"), folder.path("out"));
    let (mut tensors, _) = input();
    write(&first, &tensors);
    let options = "--mask causal --backward --deterministic --check --executor cpu --json";
    let whole = sdpa(words(&format!("run --input {first} --output {to} {options}")));
    assert_eq!(code(&whole), 0, "{}", stdout(&whole));
    let written = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&written).unwrap();
    for (name, shape) in [("o", Q.to_vec()), ("stats", vec![1, 4, 5, 1])] {
        tensors.push((name, Dtype::F32, shape, file.tensor(name).unwrap().data().to_vec()));
    }
    write(&from, &tensors);
    let out = sdpa(words(&format!("run --input {from} --output {to} {options}")));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let told = json(&out);
    assert!(told["engine"].is_null() && told["check"]["o"].is_null() && told["backward"]["engine"].is_string(), "{told}");
    let again = std::fs::read(&to).unwrap();
    let again = SafeTensors::deserialize(&again).unwrap();
    assert_eq!(again.len(), 3);
    for name in ["dq", "dk", "dv"] {
        assert_eq!(again.tensor(name).unwrap().data(), file.tensor(name).unwrap().data(), "{name}");
    }
    // Another output than that of these operands makes other gradients.
    let o = tensors.iter_mut().find(|t| t.0 == "o").unwrap();
    o.3 = numbers(Q.iter().product(), Dtype::F32, 77).1;
    write(&from, &tensors);
    assert_eq!(code(&sdpa(words(&format!("run --input {from} {options}")))), 1);
}

#[test]
fn every_dtype_and_layout_has_gradients() {
    for (n, layout) in ["bhsd", "bshd", "sbhd"].into_iter().enumerate() {
        for dtype in ["f32", "f16", "bf16"] {
            let line = format!(
                "run --shape 2,6,2,33,40,24,16 --layout {layout} --dtype {dtype} --mask causal-bottom-right --bias --backward --check --json --executor cpu --seed {n}"
            );
            let out = sdpa(words(&line));
            assert_eq!(code(&out), 0, "{line}: {}", stdout(&out));
        }
    }
}

#[test]
fn mistakes_in_gradients_are_told_at_once() {
    let folder = Folder::new();
    let from = folder.path("in");
    let (mut tensors, _) = input();
    tensors.retain(|t| t.0 != "do");
    write(&from, &tensors);
    let told = |line: &str| {
        let out = sdpa(words(line));
        assert_eq!(code(&out), 2, "{line}");
        errors(&out)
    };
    let all = told(&format!("run --input {from} --backward --score-mod softcap:3 --wrt cup --wrt cap --wrt cap --mask document"));
    for what in [
        "has no tensor do, which --backward reads",
        "--wrt: got cup, expected a declared parameter; declared: cap, doc_q, doc_k",
        "got cap, expected each name once",
        "no tensor doc_q",
    ] {
        assert!(all.iter().any(|line| line.contains(what)), "{what} in {all:#?}");
    }
    assert!(told("run --shape 1,2,2,4,4,8 --backward --mask document --wrt doc_q")[0].contains("floating-point"));
    assert_eq!(told("run --wrt cap --deterministic --score-mod softcap:3").len(), 2);
    tensors.push(("do", Dtype::F32, vec![1, 4, 5, 4], vec![0; 320]));
    write(&from, &tensors);
    assert!(told(&format!("run --input {from} --backward"))[0].contains("do: got shape [1, 4, 5, 4]"));
}

/// The square root of a negative score: all of it is told, whatever the check says.
#[test]
fn elements_that_are_not_numbers_are_told() {
    let out = sdpa(["run", "--shape", "1,2,2,8,8,8", "--score-mod", "sqrt(score)", "--executor", "cpu", "--json", "--backward"]);
    assert_eq!(code(&out), 0);
    let notes: Vec<String> = json(&out)["notes"].as_array().unwrap().iter().map(|n| n.as_str().unwrap().to_owned()).collect();
    for name in ["o", "stats", "dq", "dk", "dv"] {
        assert!(notes.iter().any(|n| n.starts_with(&format!("{name}: ")) && n.ends_with("elements are not a number")), "{notes:?}");
    }
}

#[test]
fn a_backward_pass_is_shown_with_the_forward_pass() {
    let out = sdpa(words("run --backward --executor cpu"));
    assert_eq!(code(&out), 0);
    let text = stdout(&out);
    assert_eq!(text.matches("TFLOP/s").count(), 2, "{text}");
    assert!(text.contains("backward   dq, dk, dv") && text.contains("check      passed") && text.contains("dv: error"), "{text}");
}
