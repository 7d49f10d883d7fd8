//! Score_mods, masks and their parameters, from outside.

use super::tensors::{file_of, from_bytes, numbers};
use super::tool::{Folder, code, errors, json, sdpa, stdout, words};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// A batch entry's extents: heads, queries, keys, dim.
const SHAPE: [usize; 5] = [2, 2, 3, 4, 8];

/// Attention written out: o in f64, with a function of the score that says also what is dropped.
fn attention(qkv: [&[f64]; 3], modify: impl Fn(f64, [usize; 4]) -> Option<f64>) -> Vec<f64> {
    let [batch, heads, seq_q, seq_kv, dim] = SHAPE;
    let [q, k, v] = qkv;
    let mut o = Vec::new();
    for (b, h, i) in (0..batch * heads * seq_q).map(|n| (n / seq_q / heads, n / seq_q % heads, n % seq_q)) {
        let row = |x: &[f64], seq: usize, s: usize| x[((b * heads + h) * seq + s) * dim..][..dim].to_vec();
        let dot = |x: Vec<f64>, y: Vec<f64>| x.iter().zip(&y).map(|(x, y)| x * y).sum::<f64>();
        let score = |j: usize| modify(0.5 * dot(row(q, seq_q, i), row(k, seq_kv, j)), [b, h, i, j]);
        let kept: Vec<(usize, f64)> = (0..seq_kv).filter_map(|j| Some((j, score(j)?.exp()))).collect();
        let sum: f64 = kept.iter().map(|(_, w)| w).sum();
        o.extend((0..dim).map(|d| kept.iter().map(|&(j, w)| w / sum * row(v, seq_kv, j)[d]).sum::<f64>()));
    }
    o
}

struct Input {
    qkv: [Vec<f64>; 3],
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
}

fn input() -> Input {
    let [batch, heads, seq_q, seq_kv, dim] = SHAPE;
    let mut input = Input { qkv: [Vec::new(), Vec::new(), Vec::new()], tensors: Vec::new() };
    for (n, (name, seq)) in [("q", seq_q), ("k", seq_kv), ("v", seq_kv)].into_iter().enumerate() {
        let (values, bytes) = numbers(batch * heads * seq * dim, Dtype::F32, n as u64);
        input.qkv[n] = values;
        input.tensors.push((name, Dtype::F32, vec![batch, heads, seq, dim], bytes));
    }
    input
}

fn write(path: &str, tensors: &[(&'static str, Dtype, Vec<usize>, Vec<u8>)]) {
    let tensors: Vec<_> = tensors.iter().map(|(name, dtype, shape, bytes)| (*name, *dtype, &shape[..], bytes.clone())).collect();
    std::fs::write(path, file_of(&tensors)).unwrap();
}

#[test]
fn declared_tensors_come_from_the_input_in_every_shape_that_fits() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let Input { qkv, tensors } = input();
    let slopes: Vec<u8> = [0.5f32, -0.25].iter().flat_map(|x| x.to_le_bytes()).collect();
    let (bias, bias_bytes) = numbers(2 * 3 * 4, Dtype::BF16, 9);
    let mask = [true, true, false, true, false, true, true, true, true, false, false, true];
    let mask_bytes: Vec<u8> = mask.iter().map(|&m| u8::from(m)).collect();
    let ints = |x: [i64; 2], wide: bool| -> Vec<u8> {
        x.iter().flat_map(|&n| if wide { n.to_le_bytes().to_vec() } else { (n as i32).to_le_bytes().to_vec() }).collect()
    };
    for (slopes_shape, bias_shape, mask_shape, wide) in [
        (vec![2], vec![2, 3, 4], vec![3, 4], false),
        (vec![1, 2, 1, 1], vec![1, 2, 3, 4], vec![1, 3, 4], true),
        (vec![2, 1, 1], vec![2, 3, 4], vec![1, 1, 3, 4], true),
    ] {
        let mut tensors = tensors.clone();
        tensors.push(("slopes", Dtype::F32, slopes_shape, slopes.clone()));
        tensors.push(("bias", Dtype::BF16, bias_shape, bias_bytes.clone()));
        tensors.push(("mask", Dtype::BOOL, mask_shape, mask_bytes.clone()));
        let ty = if wide { Dtype::I64 } else { Dtype::I32 };
        tensors.push(("seq_len_q", ty, vec![2], ints([3, 2], wide)));
        tensors.push(("seq_len_kv", ty, vec![2], ints([4, 3], wide)));
        write(&from, &tensors);
        let line = format!(
            "run --input {from} --output {to} --scale 0.5 --bias --score-mod softcap:30 --score-mod alibi-slopes --param cap=2 --mask array \
             --mask padding --check --json --executor cpu"
        );
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 0, "{}", String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!((&told["masks"], &told["check"]["passed"]), (&serde_json::json!(["array:qk", "padding"]), &true.into()));
        assert_eq!((&told["params"][1]["name"], &told["params"][1]["value"]), (&"cap".into(), &2.0.into()));
        let written = std::fs::read(&to).unwrap();
        let o = from_bytes(SafeTensors::deserialize(&written).unwrap().tensor("o").unwrap().data(), Dtype::F32);
        let want = attention([&qkv[0], &qkv[1], &qkv[2]], |score, [b, h, i, j]| {
            let kept = mask[i * 4 + j] && i < [3, 2][b] && j < [4, 3][b];
            let capped = 2.0 * ((score + bias[(h * 3 + i) * 4 + j]) / 2.0).tanh();
            kept.then_some(capped + [0.5, -0.25][h] * (j as f64 - i as f64))
        });
        for (n, (got, want)) in o.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < 1e-5 || (want.is_nan() && *got == 0.0), "{n}: {got}, not {want}");
        }
    }
}

#[test]
fn expressions_come_as_text_and_from_files() {
    let folder = Folder::new();
    let (from, to, text) = (folder.path("in"), folder.path("out"), folder.path("mod.txt"));
    let Input { qkv, tensors } = input();
    write(&from, &tensors);
    std::fs::write(&text, "# twice, and nearer is better\nscalar slope = 0.25;\nscore * 2.0 - f32(abs(q - k)) * slope\n").unwrap();
    let from_file = format!("@{text}");
    let inline = "score * 2.0 - f32(abs(q - k)) * 0.5";
    for (score_mod, param) in [(from_file.as_str(), Some("slope=0.5")), (inline, None)] {
        let mut args =
            vec!["run", "--input", &from, "--output", &to, "--scale", "0.5", "--score-mod", score_mod, "--mask", "(q + k) % 3 != 0"];
        args.extend(param.iter().flat_map(|p| ["--param", *p]));
        let out = sdpa(args.iter().chain(&["--check", "--executor", "cpu"]));
        assert_eq!(code(&out), 0, "{}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let written = std::fs::read(&to).unwrap();
        let o = from_bytes(SafeTensors::deserialize(&written).unwrap().tensor("o").unwrap().data(), Dtype::F32);
        let want = attention([&qkv[0], &qkv[1], &qkv[2]], |score, [_, _, i, j]| {
            ((i + j) % 3 != 0).then_some(2.0 * score - 0.5 * i.abs_diff(j) as f64)
        });
        assert!(o.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-5), "{score_mod}");
    }
}

/// Every score_mod and every mask of the library, both passes, on random parameters.
#[test]
fn everything_in_the_library_runs_and_is_right() {
    let mods = ["softcap:5", "alibi", "alibi-slopes", "bias:hqk", "bias16:bk", "sandwich:3", "score * score * 0.1"];
    let masks = [
        "none",
        "causal",
        "causal-bottom-right",
        "window:9,2",
        "sliding-window:7",
        "prefix-lm:5",
        "dilated:3",
        "document",
        "document-runs",
        "shared-prefix:4",
        "padding",
        "global-local:4,2",
        "natten:5",
        "array",
        "array:qk",
        "q / 8 == k / 8",
    ];
    let names: Vec<(&str, &str)> = masks.iter().enumerate().map(|(n, mask)| (mods[n % mods.len()], *mask)).collect();
    let dtypes = ["f32", "f16", "bf16"];
    for (n, (score_mod, mask)) in names.into_iter().enumerate() {
        let line = format!("run --shape 2,4,2,21,26,16 --dtype {} --backward --check --json --executor cpu --seed {n}", dtypes[n % 3]);
        let out = sdpa(words(&line).into_iter().chain(["--score-mod", score_mod, "--mask", mask]));
        assert_eq!(code(&out), 0, "{score_mod} {mask}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        let told = json(&out);
        assert_eq!(told["check"]["gradients"].as_array().unwrap().len(), 3);
        assert!(told["check"]["o"]["error"].as_f64().is_some() && told["backward"]["compute_ms"].as_f64().is_some(), "{told}");
    }
}

/// Both passes: by lengths, by documents, within a rule, and by the extents where there is nothing else.
#[test]
fn windows_at_ends_are_checked() {
    let documents = "--cu-seqlens-q 0,9,9,30 --cu-seqlens-kv 0,26,31,40";
    for (n, options) in [
        "--mask padding --mask causal-ends",
        "--mask window:5,2:ends --mask padding --score-mod softcap:5 --sink",
        "--mask padding&(window:4,0:ends|k<3)",
        "--mask padding --mask !window:7,inf:ends",
        "--mask window:5,2:ends --mask causal",
        &format!("{documents} --mask causal-ends --mask dilated:2"),
        "--cu-seqlens 0,9,9,21 --mask window:5,0:ends",
    ]
    .into_iter()
    .enumerate()
    {
        let seq_kv = if options.contains("--cu-seqlens ") { 21 } else { 26 };
        let line = format!("run --shape 3,4,2,21,{seq_kv},16 --dtype f32 --backward --check --json --executor cpu --seed {n} {options}");
        let out = sdpa(words(&line));
        assert_eq!(code(&out), 0, "{options}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
    }
    let out = sdpa(words(&format!("run --shape 3,4,2,21,26,16 {documents} --mask causal-ends|k<3 --executor cpu")));
    assert_eq!((code(&out), errors(&out).join(" ").contains("join it to the other masks by &")), (2, true), "{:?}", errors(&out));
}

#[test]
fn mistakes_in_rules_are_told_at_once() {
    let folder = Folder::new();
    let (from, bad, typed) = (folder.path("in"), folder.path("bad.txt"), folder.path("typed.txt"));
    let mut tensors = input().tensors;
    tensors.push(("bias", Dtype::F32, vec![5], vec![0; 20]));
    tensors.push(("slopes", Dtype::F32, vec![3], vec![0; 12]));
    tensors.push(("doc_q", Dtype::F32, vec![2, 3], vec![0; 24]));
    write(&from, &tensors);
    std::fs::write(&bad, "scalar c = 1.0;\nscore +* c").unwrap();
    std::fs::write(&typed, "# a mask\nlet a = q + k;\n  a < 3\n").unwrap();
    let (bad, typed) = (format!("@{bad}"), format!("@{typed}"));
    let run = |more: &[&str]| sdpa(["run", "--input", &from].iter().chain(more));
    let told = |more: &[&str]| {
        let out = run(more);
        assert_eq!(code(&out), 2, "{more:?}");
        errors(&out)
    };
    let all = told(&[
        "--score-mod",
        &bad,
        "--score-mod",
        &typed,
        "--score-mod",
        "sofcap:3",
        "--mask",
        "score > 0.0",
        "--mask",
        "natten:4",
        "--mask",
        "document",
        "--param",
        "of-what-could-not-be-read=1",
        "--bias",
    ]);
    for (what, n) in [
        ("bad.txt:2:8: expected a value", 1),
        ("typed.txt:3:3: it yields bool", 1),
        ("--score-mod: \"sofcap:3\": expected one of softcap:CAP", 1),
        ("a mask cannot read the score, only indices and tensors", 1),
        ("natten:N takes an odd number", 1),
        ("bias: got shape [5], expected one that broadcasts to [2, 2, 3, 4]", 1),
        ("doc_q: got type F32, expected i32 as declared", 1),
        ("has no tensor doc_k, which is declared", 1),
    ] {
        assert_eq!(all.iter().filter(|line| line.contains(what)).count(), n, "{what} in {all:#?}");
    }
    assert_eq!(all.len(), 8, "{all:#?}");

    let all =
        told(&["--score-mod", "alibi-slopes", "--score-mod", "softcap:3", "--mask", "document", "--param", "cap=x", "--param", "slopes=1"]);
    for what in [
        "slopes: got shape [3], expected [2] (head), or [1, 2, 1, 1]",
        "doc_q: got type F32, expected i32 as declared",
        "no tensor doc_k, which is declared",
        "got \"x\", expected a number",
    ] {
        assert_eq!(all.iter().filter(|line| line.contains(what)).count(), 1, "{what} in {all:#?}");
    }
    let all = told(&["--score-mod", "softcap:3", "--param", "cap=1", "--param", "cap=2", "--param", "cup=2", "--param", "cap"]);
    for what in ["cap is given twice", "cup is not declared; declared: cap", "got \"cap\", expected NAME=VALUE"] {
        assert_eq!(all.iter().filter(|line| line.contains(what)).count(), 1, "{what} in {all:#?}");
    }
    assert!(told(&["--mask", "array"])[0].contains("has no tensor mask, which --mask array reads"));
    assert!(told(&["--score-mod", "@/nowhere/mod.txt"])[0].contains("cannot be read"));
    let twice = told(&["--score-mod", "softcap:3", "--score-mod", "softcap:4"]);
    assert!(matches!(&twice[..], [line] if line.contains("cap")), "{twice:?}");
}

#[test]
fn stages_of_rules_are_printed() {
    let line = "inspect --shape 2,4,2,64,96,16 --score-mod softcap:30 --score-mod alibi-slopes --mask causal --mask padding --mask document --param cap=5";
    let text = |more: &str| {
        let out = sdpa(words(&format!("{line} {more}")));
        assert_eq!(code(&out), 0, "{more}: {}", String::from_utf8_lossy(&out.stderr));
        stdout(&out).to_owned()
    };
    let trace = text("--stage trace");
    for what in ["tanh(score / cap)", "k - q <= 0", "seq_len_q, seq_len_kv", "doc_q == doc_k", "cap = 5", "slopes: a tensor [head] of f32"]
    {
        assert!(trace.contains(what), "{what} in {trace}");
    }
    let value = json(&sdpa(words(&format!("{line} --stage trace --json"))));
    assert_eq!((&value["kept"]["region"]["upper"], &value["kept"]["seq_len_kv"]), (&0.into(), &true.into()));
    let gradient = text("--stage gradient --backward --wrt cap");
    assert!(gradient.contains("score, dscore, dcap") && gradient.contains("upstream"), "{gradient}");
    let value = json(&sdpa(words(&format!("{line} --stage gradient --json"))));
    assert_eq!(value["roots"], serde_json::json!(["score", "dscore"]));
    let plain = sdpa(words("inspect --stage gradient"));
    assert!(stdout(&plain).contains("score, upstream"));
    assert!(text("--stage graph --runtime 9.27.0").contains("tanh(x"));
    assert!(text("--stage spec --backward").contains("dq") && text("--stage problem --backward --deterministic").contains("yes"));
    for stage in ["graph", "program", "schedule"] {
        let value = json(&sdpa(words(&format!("{line} --backward --stage {stage} --runtime 9.27.0 --json"))));
        assert_eq!(value["pass"], "backward", "{value}");
    }
}
