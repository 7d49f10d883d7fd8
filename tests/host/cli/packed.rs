//! Packed documents, from outside.

use super::tensors::{file_of, from_bytes, numbers};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 16;

#[test]
fn random_documents_are_right_in_both_layouts_and_passes() {
    let sides = ["--cu-seqlens 0,5,5,24,25", "--cu-seqlens-q 2,7,7,26,26 --cu-seqlens-kv 0,0,9,40,41"];
    for (boundaries, shape) in sides.into_iter().zip(["4,4,2,21,21,16", "4,4,2,19,31,16,24"]) {
        for rest in ["--mask causal", "--layout bhsd --bias --dtype f32", "--score-mod alibi --mask window:7,2 --dtype f16"] {
            let out = sdpa(words(&format!("run --shape {shape} {boundaries} {rest} --backward --check --json --executor cpu")));
            assert_eq!(code(&out), 0, "{boundaries} {rest}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
            let told = json(&out);
            assert_eq!(told["check"]["passed"], true, "{told}");
            assert_eq!(told["check"]["gradients"].as_array().map(Vec::len), Some(if rest.contains("bias") { 4 } else { 3 }));
        }
    }
}

/// Heads are one token apart then, wherever tokens would be.
#[test]
fn one_token_in_all_is_right_in_both_layouts_and_passes() {
    for (shape, boundaries) in [("1,2,2,1,1,16", "0,1"), ("2,2,1,1,1,16", "0,1,1"), ("2,2,1,1,1,16", "0,0,1")] {
        for layout in ["bhsd", "bshd"] {
            let line = format!("run --shape {shape} --cu-seqlens {boundaries} --layout {layout} --backward --check --json --executor cpu");
            let out = sdpa(words(&line));
            assert_eq!(code(&out), 0, "{line}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        }
    }
}

#[test]
fn documents_of_a_mask_are_told_what_packed_ones_would_cost() {
    let folder = Folder::new();
    let path = folder.path("documents.safetensors");
    let numbers = vec![0.5; 24 * 4 * DIM];
    let with = |ids: [i32; 24]| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let floats: Vec<u8> = numbers.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> =
            ["q", "k", "v"].map(|name| (name, Dtype::F32, &[1usize, 4, 24, DIM][..], floats.clone())).to_vec();
        tensors.extend(["doc_q", "doc_k"].map(|name| (name, Dtype::I32, &[1usize, 24][..], bytes.clone())));
        std::fs::write(&path, file_of(&tensors)).unwrap();
        let out = sdpa(words(&format!("run --input {path} --mask document --json --executor cpu")));
        assert_eq!(code(&out), 0, "{}", String::from_utf8_lossy(&out.stderr));
        json(&out)["notes"].to_string()
    };
    let of = |number: fn(usize) -> i32| with(std::array::from_fn(number));
    // Three of eight: 576 pairs of 192.
    let told = of(|at| at as i32 / 8);
    assert!(told.contains("3 documents") && told.contains("3.0 times fewer"), "{told}");
    assert_eq!(of(|_| 7), "[]");
    let told = of(|at| at as i32 / 8 % 2);
    assert!(told.contains("not one contiguous run of tokens") && told.contains("batch entry 0, token 16"), "{told}");
}

/// Rows of tokens of (total, heads, dim).
fn cut(all: &[f64], heads: usize, tokens: std::ops::Range<usize>) -> &[f64] {
    &all[tokens.start * heads * DIM..tokens.end * heads * DIM]
}

fn write(path: &str, tensors: &[(&str, Vec<usize>, &[f64])], boundaries: Option<&[i64]>) {
    let mut all: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, shape, values) in tensors {
        all.push((*name, Dtype::F32, shape.clone(), values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect()));
    }
    if let Some(boundaries) = boundaries {
        all.push(("cu_seqlens", Dtype::I64, vec![boundaries.len()], boundaries.iter().flat_map(|n| n.to_le_bytes()).collect()));
    }
    let tensors: Vec<_> = all.iter().map(|(name, dtype, shape, bytes)| (*name, *dtype, &shape[..], bytes.clone())).collect();
    std::fs::write(path, file_of(&tensors)).unwrap();
}

fn read(path: &str, name: &str) -> (Vec<usize>, Vec<f64>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    (tensor.shape().to_vec(), from_bytes(tensor.data(), Dtype::F32))
}

#[test]
fn documents_of_a_file_are_what_they_are_by_themselves() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let total = 30;
    let [of_q, of_k] = HEADS;
    let tensors = [("q", of_q), ("k", of_k), ("v", of_k), ("do", of_q)];
    let values: Vec<Vec<f64>> =
        tensors.iter().enumerate().map(|(n, (_, heads))| numbers(total * heads * DIM, Dtype::F32, n as u64).0).collect();
    let all = |tokens: std::ops::Range<usize>, batch: &[usize]| {
        let one = |((name, heads), values): (&(&'static str, usize), _)| {
            (*name, [batch, &[tokens.len(), *heads, DIM]].concat(), cut(values, *heads, tokens.clone()))
        };
        tensors.iter().zip(values.iter().map(|v| &v[..])).map(one).collect::<Vec<_>>()
    };
    write(&from, &all(0..total, &[]), Some(&[3, 12, 12, 28]));
    for boundaries in ["input", "3,12,12,28"] {
        let line = format!("run --input {from} --cu-seqlens {boundaries} --mask causal --backward --output {to} --check --executor cpu");
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        assert_eq!(read(&to, "stats").0, [total, of_q]);
        for document in [3..12, 12..28] {
            let (own_from, own_to) = (folder.path("own"), folder.path("own-out"));
            write(&own_from, &all(document.clone(), &[1]), None);
            let line = format!("run --input {own_from} --layout bshd --mask causal --backward --output {own_to} --executor cpu");
            assert_eq!(code(&sdpa(words(&line))), 0);
            for (name, heads) in [("o", of_q), ("dq", of_q), ("dk", of_k), ("dv", of_k)] {
                let (shape, got) = read(&to, name);
                assert_eq!(shape, [total, heads, DIM], "{name}");
                let got = cut(&got, heads, document.clone());
                let (_, want) = read(&own_to, name);
                assert!(got.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-5) && got.iter().any(|x| *x != 0.0), "{name} {document:?}");
            }
        }
        let (_, o) = read(&to, "o");
        assert!(cut(&o, of_q, 0..3).iter().chain(cut(&o, of_q, 28..30)).all(|x| *x == 0.0));
    }
    let out = sdpa(words(&format!("run --input {from} --cu-seqlens 3,12,12,31 --executor cpu")));
    assert_eq!(
        (code(&out), errors(&out).join("\n").contains("got 31, expected at most 30, the number of tokens in the input")),
        (2, true),
        "{:?}",
        errors(&out)
    );
}

#[test]
fn every_mistake_in_boundaries_is_told_with_the_others() {
    let folder = Folder::new();
    let to = folder.path("out");
    for (options, told) in [
        ("--shape 3,4,2,7,7,16 --cu-seqlens 0,5,4,22 --scale nan", &["at least 5, the offset before it", "--scale"][..]),
        ("--shape 3,4,2,7,7,16 --cu-seqlens=-1,5,6,7 --dtype f31", &["cu_seqlens[0]: got -1, expected at least 0", "--dtype"]),
        (
            "--shape 3,4,2,7,7,16 --cu-seqlens 0,5,16,17 --mask nothing",
            &["at most 7, the longest sequence of the problem (this is sequence 1)", "--mask"],
        ),
        ("--shape 3,4,2,7,7,16 --cu-seqlens 0,5,x,99999999999", &["got \"x\", \"99999999999\", expected offsets"]),
        ("--shape 3,4,2,7,7,16 --cu-seqlens 0,5,7", &["cu_seqlens length: got 3, expected 4 elements"]),
        ("--shape 3,4,2,7,7,16 --cu-seqlens 0", &["expected at least 2"]),
        ("--shape 2,4,2,7,7,16 --cu-seqlens-q 0,5,4 --layout sbhd", &["requires --cu-seqlens-kv", "--layout", "cu_seqlens_q[2]: got 4"]),
        ("--shape 2,4,2,7,9,16 --cu-seqlens-q 0,5,4 --cu-seqlens-kv 9,1,2", &["cu_seqlens_q[2]: got 4", "cu_seqlens_kv[1]: got 1"]),
        ("--shape 2,4,2,7,7,16 --cu-seqlens 0,5,7 --cu-seqlens-q 0,1,2", &["sets queries and keys"]),
        ("--shape 2,4,2,7,9,16 --cu-seqlens 0,5,7", &["k.dims[2] (seq_kv): got 9"]),
        ("--shape 2,4,2,7,9,16 --cu-seqlens-q 0,5,7 --cu-seqlens-kv 0,9,9 --mask causal-bottom-right", &["bottom-right"]),
        ("--shape 2,4,2,7,7,16 --cu-seqlens input", &["requires --input"]),
        ("--cu-seqlens 0,5,7", &["requires --shape"]),
    ] {
        let out = sdpa(words(&format!("run {options} --executor cpu --output {to}")));
        let errors = errors(&out);
        assert_eq!(code(&out), 2, "{options}: {errors:?}");
        for told in told {
            assert!(errors.iter().any(|line| line.contains(told)), "{options}: {told} in {errors:?}");
        }
        assert!(folder.names().is_empty(), "{options}");
    }
}

#[test]
fn a_problem_of_packed_documents_is_inspected_and_read_from_toml() {
    let out = sdpa(words("inspect --stage problem --shape 3,4,2,7,9,16 --cu-seqlens-q 0,5,5,12 --cu-seqlens-kv 1,1,9,10"));
    assert_eq!(code(&out), 0);
    assert!(stdout(&out).contains("cu_seqlens_q, at most 12; cu_seqlens_kv, at most 10 tokens"), "{}", stdout(&out));
    let folder = Folder::new();
    let (problems, plans) = (folder.path("p.toml"), folder.path("plans"));
    let compile = |packed: &str, want: i32| {
        let problem = format!("[[problem]]\nname = \"documents\"\nshape = [3, 4, 2, 70, 90, 64]\npacked = {packed}\n");
        std::fs::write(&problems, problem).unwrap();
        let out = sdpa(words(&format!("compile --problems {problems} --device h200 --cudnn /nowhere/libcudnn.so.9 --out {plans}")));
        let told = errors(&out).join("\n");
        assert_eq!(code(&out), want, "{told}");
        told
    };
    // Nothing is wrong with the problem: cuDNN is not there.
    assert!(!compile("{ cross = true, total_q = 100, total_kv = 200 }", 3).contains("documents"));
    for (packed, rule) in [
        ("{ total_q = 100 }", "documents: --shape: k.dims[2] (seq_kv): got 90"),
        ("{ cross = true, total_q = 0 }", "packed.total_q: got 0"),
        ("{ crss = true }", "unknown field `crss`"),
    ] {
        let told = compile(packed, 2);
        assert!(told.contains(rule), "{told}");
    }
}
