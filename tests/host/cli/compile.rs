//! Plan files made on a machine without a GPU, with the real cuDNN.

use super::tool::{Folder, binary, code, errors, json, sdpa, stdout, words};
use conformance::offline::{RUNTIMES, Runtime};
use conformance::recorder;
use conformance::say::skip;
use cudnn_graph::{DeviceProfile, Search};
use sdpa::cuda::KernelHead;
use sdpa::cudnn::planfile::{self, PlanFile, Record};
use sdpa::cudnn::{CudnnExecutor, CudnnOptions};
use sdpa::{AttentionSpec, DType, Layout, Mask, Shape};
use std::path::Path;
use std::process::Command;

const PROBLEMS: &str = r#"
[[problem]]
name = "prefill"
shape = [1, 4, 2, 130, 130, 64]
mask = ["causal"]

[[problem]]
shape = [2, 2, 2, 65, 65, 64]
dtype = "f16"
layout = "bshd"
score_mod = ["softcap:30"]
bias = true
backward = true
wrt = ["bias"]
"#;

fn runtime(name: &'static str) -> Option<Runtime> {
    Runtime::find(name, Path::new(env!("CARGO_BIN_EXE_offline"))).map_err(|why| skip("offline", &why)).ok()
}

fn compile(runtime: &Runtime, rest: &str) -> std::process::Output {
    let places = format!("--cudnn {} --driver {}", runtime.library.display(), runtime.driver.display());
    sdpa(words(&format!("compile {places} {rest}")))
}

#[test]
fn plans_are_compiled_into_a_file_and_what_is_there_stays() {
    for name in RUNTIMES {
        let Some(runtime) = runtime(name) else { return };
        let folder = Folder::new();
        let (problems, plans) = (folder.path("p.toml"), folder.path("plans"));
        std::fs::write(&problems, PROBLEMS).unwrap();
        let line = format!("--problems {} --device h200 --out {} --json", problems, plans);
        let told = json(&compile(&runtime, &line));
        assert_eq!((&told["plans"], &told["unsupported"]), (&3.into(), &0.into()), "{told}");
        let passes: Vec<_> =
            told["compiled"].as_array().unwrap().iter().map(|c| (c["problem"].as_str().unwrap(), c["pass"].as_str().unwrap())).collect();
        assert_eq!(passes, [("prefill", "forward"), ("problem 2", "forward"), ("problem 2", "backward")]);
        let keys = |path: &str| {
            let file = PlanFile::open(path).unwrap();
            assert_eq!(file.header().cudnn, format!("{name}.0"));
            let profile = DeviceProfile::from_json(&file.header().profile).unwrap();
            assert!(profile.same_kernels(&DeviceProfile::named("h200").unwrap()));
            file.entries().map(|e| (e.key, file.read(&e.key).unwrap().unwrap().len())).collect::<Vec<_>>()
        };
        let first = keys(&plans);
        assert!(first.len() == 3 && first.iter().all(|(_, bytes)| *bytes > 10_000));
        // The same problem has the same key in another process; another is added; one that is unsupported is told of.
        let more = "[[problem]]\nshape = [1, 4, 2, 130, 130, 64]\nmask = [\"causal\"]\n[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n\
                    [[problem]]\nname = \"wide\"\nshape = [1, 2, 2, 8, 8, 64]\ndtype = \"f32\"\n";
        std::fs::write(&problems, more).unwrap();
        let out = compile(&runtime, &line);
        assert_eq!(code(&out), 3);
        let told = json(&out);
        assert_eq!((&told["plans"], &told["unsupported"]), (&2.into(), &1.into()), "{told}");
        assert!(told["compiled"][2]["unsupported"].as_str().unwrap().contains("f32"), "{told}");
        let second = keys(&plans);
        assert!(second.len() == 4 && first.iter().all(|(key, _)| second.iter().any(|(k, _)| k == key)));
        let text = compile(&runtime, &line.replace(" --json", ""));
        assert!(stdout(&text).contains("unsupported: ") && stdout(&text).contains("2, 1 unsupported"), "{}", stdout(&text));
    }
}

/// Over the library that writes down what it is given: which plan is used does not depend on what it computes.
#[test]
fn plans_of_a_file_are_used_and_files_of_no_use_are_refused() {
    let recording = match recorder::find() {
        Ok(file) => file,
        Err(why) => return skip("recording", &why),
    };
    let places = format!("--cudnn {0} --driver {0}", recording.display());
    let folder = Folder::new();
    let (plans, empty) = (folder.path("plans"), folder.path("empty"));
    let shape = Shape { batch: 1, heads_q: 4, heads_kv: 2, seq_q: 130, seq_kv: 130, dim_qk: 64, dim_v: 64 };
    let problem = AttentionSpec::dense(DType::BF16, shape, Layout::Bhsd).mask(Mask::causal()).validate().unwrap();
    let search = Search::default().with_library(recording.clone()).with_driver(recording);
    let executor = CudnnExecutor::new(CudnnOptions::default().with_search(search)).unwrap();
    executor.save_plan(&problem.into(), &plans).unwrap();
    let run = |rest: &str| sdpa(words(&format!("run {places} --executor cudnn --shape 1,4,2,130,130,64 --json {rest}")));
    let from_file = |rest: &str| {
        let out = run(rest);
        assert_eq!(code(&out), 0, "{}", stdout(&out));
        let told = json(&out);
        let passes = told["plans"].as_array().unwrap().iter();
        passes.map(|p| (p["pass"].as_str().unwrap().to_owned(), p["from_file"].as_bool().unwrap())).collect::<Vec<_>>()
    };
    let told = |all: &[(&str, bool)]| all.iter().map(|(pass, from_file)| ((*pass).to_owned(), *from_file)).collect::<Vec<_>>();
    assert_eq!(from_file(&format!("--mask causal --plans {plans}")), told(&[("forward", true)]));
    assert_eq!(from_file("--mask causal"), told(&[("forward", false)]));
    // Its forward pass has stats, which the file's has not; a backward pass is not in the file at all.
    let backward = format!("--mask causal --backward --plans {plans}");
    assert_eq!(from_file(&backward), told(&[("forward", false), ("backward", false)]));
    // Why is told, of each file.
    let why = |rest: &str, pass: usize| json(&run(rest))["plans"][pass]["why"].clone();
    let absent = serde_json::json!([format!("{plans} has no plan for this problem")]);
    assert_eq!((why(&backward, 0), why(&backward, 1)), (absent.clone(), absent));
    assert!(why(&format!("--mask causal --plans {plans}"), 0).is_null() && why("--mask causal", 0).is_null());
    let (there, other) = (PlanFile::open(&plans).unwrap(), folder.path("other"));
    let key = there.entries().next().unwrap().key;
    let record = Record { key, label: "of another release".to_owned(), payload: b"nonsense".to_vec() };
    planfile::add(&other, there.header(), [record]).unwrap();
    let both = format!("--mask causal --backward --plans {other} --plans {plans}");
    assert!(why(&both, 1).as_array().unwrap().len() == 2, "{}", why(&both, 1));
    let of_no_use = format!("--mask causal --plans {other}");
    assert_eq!(from_file(&of_no_use), told(&[("forward", false)]));
    let said = why(&of_no_use, 0)[0].as_str().unwrap().to_owned();
    assert!(said.starts_with(&format!("{other} has a plan for this problem that cannot be used: ")), "{said}");
    let text = run(&of_no_use.replace("--json", ""));
    assert!(stdout(&text).contains("that cannot be used"), "{}", stdout(&text));

    std::fs::write(&empty, "").unwrap();
    let out = run(&format!("--plans {empty} --plans {plans} --plans {}", folder.path("none")));
    let lines = json(&out)["error"]["lines"].as_array().unwrap().len();
    assert_eq!((code(&out), lines), (2, 2), "{}", stdout(&out));
    // Where no cuDNN is, whoever leaves the choice gets another executor.
    let none = format!("run --cudnn {0} --driver {0} --plans {plans} --shape 1,1,1,8,8,8 --json", folder.path("none"));
    let out = sdpa(words(&none));
    assert_eq!((code(&out), &json(&out)["executor"]), (0, &"cpu".into()), "{}", stdout(&out));
    assert_eq!(code(&sdpa(words(&format!("{none} --executor cudnn")))), 3);
    let out = sdpa(words(&format!("run --executor cpu --plans {plans}")));
    assert_eq!(
        (code(&out), errors(&out)),
        (2, vec!["--plans: got --executor cpu, expected cudnn or cuda: no other executor reads plan files".to_owned()])
    );
}

#[test]
fn kernels_are_compiled_into_files_of_their_own() {
    let nvrtc = match conformance::nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skip("offline", &why),
    };
    let folder = Folder::new();
    let (problems, kernels) = (folder.path("p.toml"), folder.path("kernels"));
    let longer = "[[problem]]\nshape = [1, 2, 2, 40, 40, 64]\n[[problem]]\nshape = [1, 2, 2, 60, 70, 64]\n";
    std::fs::write(&problems, format!("{longer}[[problem]]\nname = \"wide\"\nshape = [1, 2, 2, 8, 8, 320]\n")).unwrap();
    let place = nvrtc.path().display().to_string();
    let made = |device: &str, rest: &str| {
        let line = format!("compile --executor cuda --nvrtc {place} --problems {problems} --device {device} --out {kernels} {rest}");
        sdpa(words(&line))
    };
    let out = made("a100", "--json");
    let told = json(&out);
    assert_eq!((code(&out), &told["plans"], &told["unsupported"], &told["executor"]), (3, &2.into(), &1.into(), &"cuda".into()), "{told}");
    assert!(told["compiler"].as_str().unwrap().starts_with("NVRTC "), "{told}");
    assert!(told["compiled"][2]["unsupported"].as_str().unwrap().contains("dim_qk: got 320"), "{told}");
    // Both problems have one text; that of another device is another.
    let entries = || sdpa_nvidia::planfile::PlanFile::<KernelHead>::open(&kernels).unwrap().entries().len();
    assert_eq!(entries(), 1);
    std::fs::write(&problems, longer).unwrap();
    assert_eq!((code(&made("a100", "")), entries()), (0, 1));
    assert_eq!((code(&made("l40s", "")), entries()), (0, 2));
    // A file of cuDNN's plans takes none, and the other way round; each compiler has its option.
    let before = std::fs::read(&kernels).unwrap();
    let Some(runtime) = runtime("9.27") else { return };
    let told = errors(&compile(&runtime, &format!("--problems {problems} --device h200 --out {kernels}")));
    assert!(told.len() == 1 && told[0].contains("name another file"), "{told:?}");
    assert_eq!(std::fs::read(&kernels).unwrap(), before);
    let told = errors(&made("h200", "--cudnn 9.27 --driver x"));
    assert!(told.len() == 2 && told[0].starts_with("--cudnn: has no effect with --executor cuda"), "{told:?}");
    let told = errors(&sdpa(words(&format!("compile --nvrtc {place} --problems {problems} --device h200 --out {kernels}"))));
    assert!(told.len() == 1 && told[0].starts_with("--nvrtc: has no effect without --executor cuda"), "{told:?}");
    // Neither what is cut off nor a kernel with another bit is thrown away without a word.
    let mut flipped = before.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let damaged = folder.path("damaged");
    for bytes in [&before[..before.len() / 2], &flipped] {
        std::fs::write(&damaged, bytes).unwrap();
        let line = format!("compile --executor cuda --nvrtc {place} --problems {problems} --device h200 --out {damaged}");
        let out = sdpa(words(&line));
        assert!(code(&out) == 2 && errors(&out)[0].contains("name another file"), "{:?}", errors(&out));
        assert_eq!(std::fs::read(&damaged).unwrap(), bytes);
    }
    // A damaged header does not say whose file it is.
    let mut flipped = before;
    flipped[20] ^= 1;
    std::fs::write(&damaged, &flipped).unwrap();
    for executor in ["cuda", "cudnn", "auto"] {
        let out = sdpa(words(&format!("run --shape 1,1,1,8,8,8 --executor {executor} --plans {damaged}")));
        let told = format!("--plans {damaged}: {damaged} is damaged: the checksum of its header does not match");
        assert_eq!((code(&out), errors(&out)), (2, vec![told]), "{executor}");
    }
}

#[test]
fn mistakes_are_told_at_once_and_nothing_is_written() {
    let folder = Folder::new();
    let (problems, plans) = (folder.path("p.toml"), folder.path("plans"));
    let text =
        "[[problem]]\nshape = [1, 2]\n[[problem]]\nname = \"odd\"\nshape = [1, 2, 2, 8, 8, 64]\nmask = [\"cuasal\"]\ndtype = \"f99\"\n";
    std::fs::write(&problems, text).unwrap();
    let line = |device: &str| format!("compile --problems {} --device {device} --out {}", problems, plans);
    let out = sdpa(words(&line("h300")));
    assert_eq!(code(&out), 2);
    let told = errors(&out);
    for what in ["got \"h300\", expected one of a100, l40s, h200, b200", "problem 1: --shape", "odd: --dtype", "odd: --mask"] {
        assert!(told.iter().any(|line| line.contains(what)), "{what} in {told:?}");
    }
    let nowhere = folder.path("none/plans");
    let told = errors(&sdpa(words(&format!("compile --problems {problems} --device h300 --out {nowhere}"))));
    assert!(told.iter().any(|line| line.starts_with("--out: there is no folder")) && told.len() == 5, "{told:?}");
    for text in ["", "[[problem]]\nshap = [1]\n", "problem = 3"] {
        std::fs::write(&problems, text).unwrap();
        assert_eq!(code(&sdpa(words(&line("h200")))), 2, "{text}");
    }
    assert!(!Path::new(&plans).exists());
}

#[test]
fn what_is_no_file_of_plans_for_the_device_is_left_alone() {
    let Some(runtime) = runtime("9.27") else { return };
    let folder = Folder::new();
    let (problems, plans) = (folder.path("p.toml"), folder.path("plans"));
    std::fs::write(&problems, "[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n").unwrap();
    let line = |device: &str| format!("--problems {problems} --device {device} --out {plans}");
    assert_eq!(code(&compile(&runtime, &line("a100"))), 0);
    let before = std::fs::read(&plans).unwrap();
    let out = compile(&runtime, &line("h200"));
    let told = errors(&out);
    assert!(code(&out) == 2 && told.len() == 1 && told[0].contains("name another file"), "{told:?}");
    assert_eq!(std::fs::read(&plans).unwrap(), before);
    // What is damaged may be repaired from somewhere else; it is not thrown away without a word.
    for damage in [0, before.len() / 2, before.len() - 1] {
        let mut damaged = before.clone();
        damaged[damage] ^= 1;
        for damaged in [damaged, before[..damage].to_vec()] {
            std::fs::write(&plans, &damaged).unwrap();
            let out = compile(&runtime, &line("a100"));
            assert!(code(&out) == 2 && errors(&out).len() == 1, "{damage}: {}", stdout(&out));
            assert_eq!(std::fs::read(&plans).unwrap(), damaged);
        }
    }
    std::fs::write(&plans, "a letter").unwrap();
    let out = compile(&runtime, &line("a100"));
    assert!(code(&out) == 2 && errors(&out)[0].contains("is not a plan file"), "{:?}", errors(&out));
    assert_eq!(std::fs::read(&plans).unwrap(), b"a letter");
}

#[test]
fn another_version_than_was_asked_for_is_refused() {
    let Some(runtime) = runtime("9.27") else { return };
    let folder = Folder::new();
    let problems = folder.path("p.toml");
    std::fs::write(&problems, "[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n").unwrap();
    let line = |version| format!("compile --problems {} --device a100 --cudnn {version} --out {}", problems, folder.path("plans"));
    let run = |version| {
        let mut command = Command::new(binary());
        command.args(words(&line(version))).env_remove("RUST_LOG");
        command.env("CUDNN_GRAPH_LIBRARY", &runtime.library).env("CUDNN_GRAPH_DRIVER", &runtime.driver).output().unwrap()
    };
    let out = run("9.19");
    assert_eq!(code(&out), 3);
    assert!(errors(&out)[0].contains("found cuDNN 9.27.0 instead"), "{:?}", errors(&out));
    assert_eq!(code(&run("9.27")), 0);
}
