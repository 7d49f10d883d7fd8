//! Row maxima and sums of exponentials, from outside.

use super::tensors::{file_of, from_bytes};
use super::tool::{Folder, code, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn they_are_checked_where_they_are_asked_for() {
    for (rest, asked) in [
        ("--row-max --sum-exp --mask causal", [true, true]),
        ("--row-max --sink --layout bshd --dtype f16", [true, false]),
        ("--sum-exp --cu-seqlens 0,5,5,19 --dtype f32", [false, true]),
        ("--row-max --sum-exp --backward --score-mod softcap:20", [true, true]),
        ("--mask causal", [false, false]),
    ] {
        let shape = if rest.contains("cu-seqlens") { "3,4,2,14,14,16" } else { "2,4,2,21,30,16,24" };
        let out = sdpa(words(&format!("run --shape {shape} {rest} --check --json --executor cpu")));
        assert_eq!(code(&out), 0, "{rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!(told["check"]["passed"], true, "{told}");
        let checked = ["row_max", "sum_exp"].map(|name| told["check"][name].is_object() && told[name] == true);
        assert_eq!(checked, asked, "{rest}: {told}");
    }
    let out = sdpa(words("run --shape 1,2,1,9,3000,16 --stats-base-2 --row-max --check --json --executor cpu"));
    assert_eq!((code(&out), json(&out)["check"]["passed"].as_bool()), (0, Some(true)), "{}", stdout(&out));
    let out = sdpa(words("run --shape 1,2,1,9,30,16 --stats-base-2 --backward --executor cpu"));
    assert!(code(&out) != 0 && String::from_utf8_lossy(&out.stderr).contains("natural"), "{}", String::from_utf8_lossy(&out.stderr));
    let out = sdpa(words("run --shape 1,1,1,3,3,8 --stats-base-2 --executor metal"));
    assert_eq!(code(&out), 3, "{}", stdout(&out));
    assert!(String::from_utf8_lossy(&out.stderr).contains("stats_base"), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn they_are_written_as_stats_are() {
    let folder = Folder::new();
    let [path, to] = ["given.safetensors", "o.safetensors"].map(|name| folder.path(name));
    // Scores 0 and ln 3.
    let (one, two): (&[usize], &[usize]) = (&[1, 1, 1, 1], &[1, 1, 2, 1]);
    let tensors: [(&str, Dtype, &[usize], Vec<u8>); 3] = [
        ("q", Dtype::F32, one, floats(&[1.0])),
        ("k", Dtype::F32, two, floats(&[0.0, 3f32.ln()])),
        ("v", Dtype::F32, two, floats(&[1.0, 5.0])),
    ];
    std::fs::write(&path, file_of(&tensors)).unwrap();
    let out = sdpa(words(&format!("run --input {path} --row-max --sum-exp --output {to} --executor cpu")));
    assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    let bytes = std::fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, want) in [("stats", 4f64.ln()), ("row_max", 3f64.ln()), ("sum_exp", 4.0 / 3.0)] {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[1, 1, 1][..]));
        assert!((from_bytes(tensor.data(), Dtype::F32)[0] - want).abs() < 1e-6, "{name}");
    }
}
