//! Sinks, from outside.

use super::tensors::{file_of, from_bytes};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// One query and two keys of scores 0 for each of two heads, values 1 and 3, and these sinks.
fn file(path: &str, sink: Option<(&[usize], Dtype, Vec<u8>)>) {
    let (one, two): (&[usize], &[usize]) = (&[1, 2, 1, 1], &[1, 2, 2, 1]);
    let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = vec![
        ("q", Dtype::F32, one, floats(&[0.0, 0.0])),
        ("k", Dtype::F32, two, floats(&[1.0, 2.0, 3.0, 4.0])),
        ("v", Dtype::F32, two, floats(&[1.0, 3.0, 1.0, 3.0])),
        ("do", Dtype::F32, one, floats(&[1.0, 1.0])),
    ];
    tensors.extend(sink.map(|(shape, dtype, bytes)| ("sink", dtype, shape, bytes)));
    std::fs::write(path, file_of(&tensors)).unwrap();
}

fn read(path: &str, name: &str) -> Vec<f64> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    from_bytes(file.tensor(name).unwrap().data(), Dtype::F32)
}

#[test]
fn random_sinks_are_right_in_both_passes() {
    for rest in ["--mask window:9,0", "--layout bshd --score-mod softcap:20 --dtype f16", "--cu-seqlens 0,5,5,19 --bias --dtype f32"] {
        let shape = if rest.contains("cu-seqlens") { "3,4,2,14,14,16" } else { "2,4,2,21,30,16,24" };
        let out = sdpa(words(&format!("run --shape {shape} --sink {rest} --backward --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!(told["check"]["passed"], true, "{told}");
        assert_eq!(told["check"]["gradients"].as_array().map(Vec::len), Some(if rest.contains("bias") { 5 } else { 4 }));
    }
}

#[test]
fn a_file_says_what_the_sinks_are() {
    let folder = Folder::new();
    let [path, to] = ["sinks.safetensors", "o.safetensors"].map(|name| folder.path(name));
    // Weights 1/4, 1/4 and a half for the sink of one head; none for that of the other.
    file(&path, Some((&[2], Dtype::F32, floats(&[2f32.ln(), f32::NEG_INFINITY]))));
    let out = sdpa(words(&format!("run --input {path} --sink --backward --check --output {to} --executor cpu")));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let near = |name: &str, want: [f64; 2]| {
        let got = read(&to, name);
        assert!(got.iter().zip(want).all(|(x, y)| (x - y).abs() < 1e-6), "{name} is {got:?}, not {want:?}");
    };
    near("o", [1.0, 2.0]);
    near("stats", [4f64.ln(), 2f64.ln()]);
    near("dsink", [-0.5, 0.0]);
}

#[test]
fn mistakes_with_sinks_are_told_at_once() {
    let folder = Folder::new();
    let path = folder.path("sinks.safetensors");
    let told = |line: String| {
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 2, "{line}");
        errors(&out).join("\n")
    };
    file(&path, None);
    let lacks = told(format!("run --input {path} --sink --executor cpu"));
    assert!(lacks.contains("lacks sink") || lacks.contains("no tensor sink"), "{lacks}");
    file(&path, Some((&[3], Dtype::I32, vec![0; 12])));
    let wrong = told(format!("run --input {path} --sink --mask window:0,0 --executor cpu"));
    assert!(wrong.contains("sink: got shape [3], expected [2] (head)") && wrong.contains("sink: got type I32"), "{wrong}");
    assert!(wrong.contains("left"), "{wrong}");
    let twice = {
        let own = "tensor sink[head]: f32; score + sink";
        errors(&sdpa(["run", "--shape", "1,2,2,4,4,8", "--sink", "--score-mod", own, "--executor", "cpu"])).join("\n")
    };
    assert!(twice.contains("parameter sink") && twice.contains("a reserved name"), "{twice}");
    let absent = told("run --shape 1,2,2,4,4,8 --backward --wrt sink --executor cpu".to_owned());
    assert!(absent.contains("--wrt: got sink, expected a declared parameter"), "{absent}");
}
