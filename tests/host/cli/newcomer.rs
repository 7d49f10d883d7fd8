//! What somebody meets who does not know the tool: names, hints, mistakes, and texts of others.

use super::tensors::{file_of, numbers};
use super::tool::{Folder, binary, code, errors, json, sdpa, stdout, words};
use safetensors::tensor::Dtype;
use sdpa::expr::{Binary, Made, Spelling, Unary};
use sdpa::library::{MASKS, SCORE_MODS, T5, t5_bias};
use std::process::Command;

const SMALL: [&str; 5] = ["run", "--executor", "cpu", "--shape", "1,2,2,9,9,8"];

fn small(options: &[&str]) -> std::process::Output {
    sdpa(SMALL.iter().chain(options))
}

#[test]
fn the_language_is_told_whole() {
    let (text, told) = (sdpa(["language"]), json(&sdpa(["language", "--json"])));
    let page = std::fs::read_to_string(conformance::golden::repository("docs/expressions.md")).unwrap();
    let spellings = Unary::ALL.iter().map(|f| f.spelling()).chain(Binary::ALL.iter().map(|f| f.spelling()));
    let mut calls: Vec<String> = Made::ALL.iter().map(|f| format!("{}(", f.name())).chain(["select(".to_owned()]).collect();
    let mut signs = Vec::new();
    for spelling in spellings {
        match spelling {
            Spelling::Call(name) => calls.push(format!("{name}(")),
            Spelling::Infix(sign, _) => signs.push(format!("x {sign} y")),
            Spelling::Prefix(sign) => signs.push(format!("{sign}x")),
        }
    }
    let names = SCORE_MODS
        .iter()
        .map(|n| n.spelling)
        .chain(MASKS.iter().map(|n| n.spelling))
        .map(str::to_owned)
        .chain(["t5:BUCKETS,FAR[,both]".to_owned()]);
    let written = |list: &str| told[list].as_array().unwrap().iter().map(|w| w["written"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let all = [written("operators"), written("functions"), written("score_mods"), written("masks")].concat();
    // T5 is a table in a file, of which the library makes a bias.
    assert_eq!(all.len(), calls.len() + signs.len() + SCORE_MODS.len() + MASKS.len() + 1);
    for word in calls.into_iter().chain(signs.clone()).chain(names) {
        assert!(all.iter().any(|w| w.starts_with(&word)) && stdout(&text).contains(&word), "{word}");
        let sign = word.trim_start_matches("x ").trim_end_matches(" y").replace('|', "\\|");
        assert!(
            page.contains(&format!("`{word}")) || (signs.contains(&word) && page.contains(&sign)),
            "{word} is not in docs/expressions.md"
        );
    }
}

#[test]
fn named_masks_join_with_operators() {
    let graph = |masks: &[&str]| {
        let always = ["inspect", "--stage", "trace", "--shape", "1,2,2,9,9,8"];
        let out = sdpa(always.into_iter().chain(masks.iter().flat_map(|mask| ["--mask", mask])));
        assert_eq!(code(&out), 0, "{masks:?}: {:?}", String::from_utf8_lossy(&out.stderr));
        stdout(&out).to_owned()
    };
    assert_eq!(graph(&["causal & document"]), graph(&["causal", "document"]));
    assert_eq!(graph(&["causal & sliding-window:4"]), graph(&["window:4,0"]));
    assert!(graph(&["!document | k < 3"]).contains("doc_q == doc_k"));
    let out = small(&["--mask", "causal & !(document | k < 2)", "--check"]);
    assert_eq!(code(&out), 0, "{}", stdout(&out));
    assert_eq!(graph(&["array & causal"]), graph(&["array", "causal"]));
    let folder = Folder::new();
    let path = folder.path("mask.txt");
    std::fs::write(&path, "# a comment | &\ntensor kind[k]: i32;\ncausal &\n  kind == nope\n").unwrap();
    let told = errors(&small(&["--mask", &format!("@{path}")]));
    assert!(told.len() == 1 && told[0].contains("4:11") && told[0].contains("\"nope\" is not declared"), "{told:?}");
}

#[test]
fn hints_lead_to_what_was_meant() {
    for (options, hint) in [
        (&["--score-mod", "tahn(score)"][..], "did you mean tanh?"),
        (&["--score-mod", "sofcap:30"], "did you mean softcap?"),
        (&["--mask", "causl"], "did you mean causal?"),
        (&["--mask", "causl & document"], "did you mean causal?"),
        (&["--score-mod", "softcap:30", "--score-mod", "softcap:20"], "NAME[OLD=NEW]"),
        (&["--score-mod", "softcap:30[cup=x]"], "softcap:30 declares no cup; it declares cap"),
        (&["--score-mod", "softcap:30[cap]"], "got \"cap\", expected OLD=NEW"),
        (&["--score-mod", "softcap:30[cap=score]"], "is not a reserved word"),
    ] {
        let out = small(options);
        let told = errors(&out);
        assert!(code(&out) == 2 && told.len() == 1 && told[0].contains(hint), "{options:?}: {told:?}");
    }
    let told = errors(&sdpa(words("run --executor cudnn --driver /nowhere/libcuda.so.1")));
    assert!(told.iter().any(|line| line.contains("cargo sdpa doctor")), "{told:?}");
}

#[test]
fn one_function_is_used_twice_with_other_names() {
    let out = small(&["--score-mod", "softcap:30", "--score-mod", "softcap:2[cap=outer]", "--param", "outer=3", "--check", "--json"]);
    assert_eq!(code(&out), 0, "{}", stdout(&out));
    let told = json(&out);
    let params: Vec<(&str, f64)> =
        told["params"].as_array().unwrap().iter().map(|p| (p["name"].as_str().unwrap(), p["value"].as_f64().unwrap())).collect();
    assert_eq!(params, [("cap", 30.0), ("outer", 3.0)]);
}

#[test]
fn relative_positions_have_a_name() {
    let folder = Folder::new();
    let (from, table, bias) = (folder.path("in"), folder.path("table"), folder.path("bias"));
    let (heads, seq_q, seq_kv) = (2, 9, 11);
    let t5 = T5 { buckets: 8, max_distance: 16, bidirectional: true };
    let (numbers_of_table, bytes_of_table) = numbers(heads * t5.buckets, Dtype::F32, 7);
    let floats: Vec<f32> = numbers_of_table.iter().map(|x| *x as f32).collect();
    let bytes_of_bias: Vec<u8> = t5_bias(&floats, t5, seq_q, seq_kv).into_iter().flat_map(f32::to_le_bytes).collect();
    let [q, kv] = [[1, heads, seq_q, 8], [1, heads, seq_kv, 8]];
    let (_, bytes_of_q) = numbers(heads * seq_q * 8, Dtype::F32, 1);
    let (_, bytes_of_k) = numbers(heads * seq_kv * 8, Dtype::F32, 2);
    let tensors =
        [("q", Dtype::F32, &q[..], bytes_of_q), ("k", Dtype::F32, &kv[..], bytes_of_k.clone()), ("v", Dtype::F32, &kv[..], bytes_of_k)];
    let own = [("t5", Dtype::F32, &[heads, 8][..], bytes_of_table), ("bias", Dtype::F32, &[heads, seq_q, seq_kv][..], bytes_of_bias)];
    std::fs::write(&from, file_of(&[&tensors[..], &own].concat())).unwrap();
    let run = |to: &str, options: &[&str]| {
        let out = sdpa(["run", "--executor", "cpu", "--input", &from, "--output", to, "--check"].iter().chain(options));
        assert_eq!(code(&out), 0, "{options:?}: {}{}", stdout(&out), String::from_utf8_lossy(&out.stderr));
        std::fs::read(to).unwrap()
    };
    assert_eq!(run(&table, &["--score-mod", "t5:8,16,both"]), run(&bias, &["--bias"]));
    assert_ne!(run(&table, &["--score-mod", "t5:8,16"]), run(&bias, &["--bias"]));
    let out = small(&["--score-mod", "t5:32,128", "--check", "--backward", "--wrt", "t5"]);
    assert_eq!(code(&out), 0, "{}", stdout(&out));
    let told = errors(&sdpa(["run", "--input", &from, "--score-mod", "t5:32,128"]));
    assert!(told.len() == 1 && told[0].contains("t5: got shape [2, 8], expected [2, 32] (query heads, buckets)"), "{told:?}");
    for wrong in ["t5", "t5:8", "t5:1,16", "t5:8,3", "t5:8,16,left", "t5:x,3", "t5:99999999,3"] {
        let told = errors(&small(&["--score-mod", wrong]));
        assert!(told.len() == 1 && told[0].contains("t5:BUCKETS,FAR[,both]"), "{wrong}: {told:?}");
    }
    let told = errors(&small(&["--score-mod", "t5:8,16", "--score-mod", "t5:16,32"]));
    assert!(told.len() == 1 && told[0].contains("got two t5 score_mods"), "{told:?}");
}

#[test]
fn numbers_that_become_infinite_are_counted_for_parameters_too() {
    let folder = Folder::new();
    let path = folder.path("in");
    let (_, bytes) = numbers(16, Dtype::F32, 1);
    let bias: Vec<u8> = [1e39f64, 0.0, -1e300, 1.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let shape = [1, 1, 2, 8];
    let qkv = ["q", "k", "v"].map(|name| (name, Dtype::F32, &shape[..], bytes.clone()));
    std::fs::write(&path, file_of(&[&qkv[..], &[("bias", Dtype::F64, &[2, 2], bias)]].concat())).unwrap();
    let told = json(&sdpa(["run", "--executor", "cpu", "--input", &path, "--bias", "--json"]));
    assert_eq!(told["notes"][0], "bias: 2 finite numbers are infinite in f32", "{told}");
}

#[test]
fn mistakes_in_toml_have_their_place() {
    let folder = Folder::new();
    let path = folder.path("p.toml");
    for (text, place, said) in [
        ("[[problem]]\nshape = [1, 2]\nmask = [\"causal\" \"x\"]\n", "3:18", ">>>\"x\"]"),
        ("[[problem]]\nshape = 3\n", "2:9", ">>>3"),
        ("[[problem]]\n  shap = [1]\nshape = [1]\n", "2:3", "unknown field `shap`"),
    ] {
        std::fs::write(&path, text).unwrap();
        let told = errors(&sdpa(["compile", "--problems", &path, "--device", "h200", "--out", &folder.path("o")]));
        assert!(told.len() == 1 && told[0].starts_with(&format!("{path}:{place}: ")) && told[0].contains(said), "{told:?}");
    }
}

#[test]
fn scores_that_are_kept_and_no_numbers_are_seen() {
    let folder = Folder::new();
    let to = folder.path("a.svg");
    let score_mod = "select(k == 3, nan, select(q == 2, -inf, select(q == 7 & k == 1, inf, score)))";
    let always = ["show", "--shape", "1,1,1,16,16,8", "--mask", "causal", "--output", &to, "--score-mod"];
    let out = sdpa(always.into_iter().chain([score_mod]));
    let (said, svg) = (stdout(&out), std::fs::read_to_string(&to).unwrap());
    assert!(
        said.contains("N is not a number; ^ is inf; v is -inf") && said.contains("|vvvN  ") && said.contains("first at query 2, key 0"),
        "{said}"
    );
    let count = |class: &str| svg.matches(&format!("class=\"{class}\"")).count();
    assert_eq!((count("nan"), count("minus-inf"), count("inf"), count("cell")), (13, 3, 1, 136 - 17));
    let told = json(&sdpa(always.into_iter().chain([score_mod, "--json"])));
    let want = serde_json::json!({"not_a_number": 13, "infinite": 1, "minus_infinite": 3, "of": 256, "first": [2, 0]});
    assert_eq!(told["not_finite"], want);
    let none = sdpa(always.into_iter().chain(["nan * score"]));
    assert!(stdout(&none).contains("no score that is kept is finite"), "{}", stdout(&none));
    assert!(json(&sdpa(always.into_iter().chain(["score", "--json"])))["not_finite"].is_null());
}

#[test]
fn texts_of_others_do_not_reach_the_terminal_as_they_are() {
    let folder = Folder::new();
    let path = folder.path("in\u{1b}[31m\u{9b}");
    let (_, bytes) = numbers(8, Dtype::F32, 1);
    let name = "evil\u{1b}]0;title\u{7}\u{202e}";
    std::fs::write(&path, file_of(&[(name, Dtype::F32, &[1, 1, 1, 8], bytes)])).unwrap();
    for options in [&["--input", &path][..], &["--input", &path, "--json"]] {
        let out = sdpa(["run", "--executor", "cpu"].iter().chain(options));
        assert_eq!(code(&out), 2);
        let all = [out.stdout, out.stderr].concat();
        let said = String::from_utf8(all).unwrap();
        assert!(said.contains("evil") && !said.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{said:?}");
    }
    let out = sdpa(["run", "--mask", "\u{1b}[2Jx"]);
    assert!(!String::from_utf8_lossy(&out.stderr).contains('\u{1b}'), "{:?}", errors(&out));
}

#[test]
fn mistakes_are_as_long_as_a_line() {
    let folder = Folder::new();
    let long = format!("{}0", "tahn(score) + ".repeat(8000));
    let (text, problems) = (folder.path("long.txt"), folder.path("p.toml"));
    std::fs::write(&text, &long).unwrap();
    std::fs::write(&problems, "[[problem]]\nshape = [1]\n".repeat(5000)).unwrap();
    for words in [
        &["run", "--score-mod", &long][..],
        &["run", "--mask", &format!("@{text}")],
        &["run", "--param", &long],
        &["run", "--layout", &long],
        &["run", "--shape", &long],
        &["run", &format!("--{}", "x".repeat(50_000))],
        &["run", "--json", "--dtype", &long],
        &["compile", "--problems", &problems, "--device", &long, "--out", &folder.path("o")],
    ] {
        let out = Command::new(binary()).args(words).env_remove("RUST_LOG").output().unwrap();
        assert_eq!(code(&out), 2, "{}", words[1]);
        let said = out.stdout.len() + out.stderr.len();
        assert!(said > 20 && said < 200_000, "{} {}: {said} bytes", words[0], words[1]);
        let lines = String::from_utf8_lossy(&out.stderr).lines().map(str::len).max().unwrap_or(0);
        assert!(lines < 2000, "{} {}: a line of {lines} bytes", words[0], words[1]);
    }
}

#[test]
fn a_header_that_is_wrong_names_its_tensor() {
    let folder = Folder::new();
    let path = folder.path("in");
    let write = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.extend(std::iter::repeat_n(0, data));
        std::fs::write(&path, bytes).unwrap();
    };
    let good = r#""q":{"dtype":"F32","shape":[1,1,1,2],"data_offsets":[0,8]}"#;
    for (bad, said) in [
        (r#""k":{"dtype":"F32","shape":[1,1,1,3],"data_offsets":[8,16]}"#, "tensor k: the shape [1, 1, 1, 3] of F32 has 12 bytes"),
        (r#""k":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[8,16]}"#, "tensor k: the shape"),
        (r#""k":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[12,16]}"#, "tensor k: its data_offsets begin at 12, not at 8"),
        (r#""k":{"dtype":"F99","shape":[1,1,1,1],"data_offsets":[8,12]}"#, "tensor k: unknown variant"),
        (r#""k":{"dtype":"F32","data_offsets":[8,12]}"#, "tensor k: missing field `shape`"),
        (r#""k":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}"#, "tensor k: the shape"),
    ] {
        write(&format!("{{{good},{bad}}}"), 8);
        let out = sdpa(["run", "--input", &path]);
        let told = errors(&out);
        assert!(code(&out) == 2 && told.iter().any(|line| line.contains(said)), "{bad}: {told:?}");
    }
}

#[test]
fn names_of_files_that_are_too_long_are_told_before_anything_is_computed() {
    let folder = Folder::new();
    let long = folder.path(&"x".repeat(256));
    for words in [
        &["run", "--executor", "cpu", "--output", &long][..],
        &["show", "--output", &format!("{long}.svg")],
        &["cache", "report", "/dev/null", "--output", &long],
    ] {
        let out = sdpa(words);
        assert!(code(&out) == 2 && errors(&out).iter().any(|line| line.contains("too long")), "{words:?}: {:?}", errors(&out));
    }
    // The lock of a plan file has a longer name.
    let problems = folder.path("p.toml");
    std::fs::write(&problems, "[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n").unwrap();
    for length in [252, 256] {
        let out = sdpa(["compile", "--problems", &problems, "--device", "h200", "--out", &folder.path(&"x".repeat(length))]);
        assert!(code(&out) == 2 && errors(&out).iter().any(|line| line.contains("too long")), "{length}: {:?}", errors(&out));
    }
    assert_eq!(folder.names(), ["p.toml"]);
}
