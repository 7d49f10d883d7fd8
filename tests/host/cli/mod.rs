//! The command line tool, from outside: arguments and files in, text, JSON, files and exit codes out.

mod backward;
mod cache;
mod check;
mod compile;
mod dropout;
mod empty;
mod kernels;
mod limits;
mod narrow;
mod newcomer;
mod options;
mod packed;
mod paged;
mod prove;
mod rules;
mod show;
mod sink;
mod statistics;
mod support;
mod tensors;
pub(crate) mod tool;

use conformance::random::Random;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::path::Path;
use tensors::{K, LAYOUTS, Q, V, compare, file, from_bytes, input, shapes};
use tool::{Folder, code, errors, json, sdpa, stdout, words};

#[test]
fn without_arguments_an_example_is_checked() {
    let out = sdpa(["run"]);
    assert_eq!(code(&out), 0);
    assert!(stdout(&out).contains("check        passed") && stdout(&out).contains("TFLOP/s"), "{}", stdout(&out));
    assert!(out.stderr.is_empty());
    let told = json(&sdpa(words("run --json --seed 3")));
    assert_eq!((&told["check"]["passed"], &told["dtype"], &told["seed"]), (&true.into(), &"bf16".into(), &3.into()));
    assert!(told["compute_ms"].as_f64().unwrap() > 0.0 && told["tflops"].as_f64().unwrap() > 0.0);
    assert!(told["check"]["o"]["ratio"].as_f64().unwrap() <= 1.0);
}

#[test]
fn files_of_every_dtype_and_layout_are_read_computed_and_written() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in.safetensors"), folder.path("out.safetensors"));
    let dtypes = [
        (Dtype::F32, "", Dtype::F32, 1e-5),
        (Dtype::F16, "", Dtype::F16, 4e-3),
        (Dtype::BF16, "", Dtype::BF16, 3e-2),
        (Dtype::F64, "--dtype f32", Dtype::F32, 1e-5),
        (Dtype::BF16, "--dtype f16", Dtype::F16, 4e-3),
        (Dtype::F32, "--dtype bf16", Dtype::BF16, 3e-2),
    ];
    for (layout, order) in LAYOUTS {
        for (dtype, option, result, tolerance) in dtypes {
            let bytes = input(dtype, order);
            std::fs::write(&from, &bytes).unwrap();
            let masks = "--mask window:4,inf:bottom-right --mask none --mask causal-bottom-right";
            let line =
                format!("run --input {from} --output {to} --layout {layout} {option} {masks} --executor cpu --scale 0.3 --check --json");
            let out = sdpa(words(&line));
            assert_eq!(code(&out), 0, "{line}: {}", stdout(&out));
            assert_eq!(json(&out)["masks"], serde_json::json!(["window:4,inf:bottom-right", "causal-bottom-right"]));
            let written = std::fs::read(&to).unwrap();
            assert_eq!(SafeTensors::deserialize(&written).unwrap().tensor("o").unwrap().dtype(), result);
            compare(&bytes, &written, order, 0.3, tolerance, |i, j| j > i && j <= i + 4);
        }
    }
    assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn operands_of_different_types_are_converted_and_rows_may_be_empty() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let [q, k, v] = shapes([0, 1, 2, 3], [1, 2, 6, 8], [1, 2, 3, 8], [1, 2, 3, 8]);
    let bytes = file(&[("v", Dtype::F64, &v), ("other", Dtype::I8, &[3]), ("q", Dtype::F16, &q), ("k", Dtype::BF16, &k)]);
    std::fs::write(&from, &bytes).unwrap();
    let out = sdpa(words(&format!("run --input {from} --output {to} --dtype f32 --mask prefix-lm:2 --mask window:2,1 --check")));
    assert_eq!(code(&out), 0, "{}", stdout(&out));
    // Query 5 keeps keys 4 to 6 of 3.
    compare(&bytes, &std::fs::read(&to).unwrap(), [0, 1, 2, 3], 8f64.sqrt().recip(), 1e-5, |i, j| {
        j + 2 > i && j <= i + 1 && (j <= i || j < 2)
    });
    let stats = std::fs::read(&to).unwrap();
    let stats = from_bytes(SafeTensors::deserialize(&stats).unwrap().tensor("stats").unwrap().data(), Dtype::F32);
    assert_eq!(stats[5], f64::NEG_INFINITY);
}

/// Scores of 1e50 are infinite in f32 and not in f64: a result that is really wrong.
#[test]
fn a_failed_check_has_an_exit_code_of_its_own() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let large: Vec<u8> = [1e25f32; 8].iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = || TensorView::new(Dtype::F32, vec![1, 1, 1, 8], &large).unwrap();
    std::fs::write(&from, serialize([("q", view()), ("k", view()), ("v", view())], None).unwrap()).unwrap();
    let line = format!("run --input {from} --output {to} --executor cpu --check");
    let out = sdpa(words(&line));
    assert_eq!(code(&out), 1);
    assert!(stdout(&out).contains("check      FAILED"), "{}", stdout(&out));
    let out = sdpa(words(&format!("{line} --json")));
    assert_eq!((code(&out), &json(&out)["check"]["passed"]), (1, &false.into()));
    assert_eq!(code(&sdpa(words(&line.replace("--check", "")))), 0);
}

#[test]
fn a_seed_is_a_problem() {
    let folder = Folder::new();
    let run = |seed: u64, name: &str| {
        let to = folder.path(name);
        let line = format!("run --shape 1,2,1,33,40,8 --dtype f32 --seed {seed} --executor cpu --output {to}");
        assert_eq!(code(&sdpa(words(&line))), 0);
        std::fs::read(to).unwrap()
    };
    let first = run(1, "a");
    assert_eq!(first, run(1, "b"));
    assert_ne!(first, run(2, "a"));
}

#[test]
fn every_mistake_is_told_at_once_and_nothing_is_written() {
    let folder = Folder::new();
    let from = folder.path("in");
    std::fs::write(&from, file(&[("q", Dtype::F16, &[2, 3, 5, 8]), ("k", Dtype::F32, &[3, 2, 9, 8]), ("w", Dtype::F16, &[1])])).unwrap();
    let line = format!(
        "run --input {from} --shape 1,2,x,-1,5 --mask causal --mask wnidow --mask window:0,-1 --scale nan --layout bhsd --seed x --executor gpu \
         --output /nowhere/out"
    );
    let wanted = [
        "\"wnidow\"",
        "left: got 0",
        "right: got -1",
        "got nan, expected a finite",
        "HKV: got \"x\"",
        "SQ: got -1",
        "has 5 numbers",
        "expected one of them",
        "no tensor v; it has",
        "q is F16, k is F32",
        "k.dims[0] (batch): got 3",
        "q.dims[1] (heads_q): got 3",
        "got \"gpu\", expected one of auto, cpu, cuda, cudnn, metal",
        "no folder /nowhere",
        "--seed: got \"x\"",
    ];
    let out = sdpa(words(&line));
    assert_eq!(code(&out), 2);
    let told = errors(&out);
    for what in wanted {
        assert_eq!(told.iter().filter(|line| line.contains(what)).count(), 1, "{what} in {told:#?}");
    }
    let told: Vec<String> = told.into_iter().filter(|line| !wanted.iter().any(|what| line.contains(what))).collect();
    // A seed that would have no use.
    assert!(told.iter().all(|line| line.contains("which contains the numbers")), "{told:#?}");
    let as_json = json(&sdpa(words(&format!("{line} --json"))));
    assert_eq!((&as_json["error"]["exit_code"], &as_json["error"]["kind"]), (&2.into(), &"mistakes".into()));
    assert_eq!(as_json["error"]["lines"].as_array().unwrap().len(), errors(&out).len());
    assert_eq!(folder.names(), ["in"]);
}

#[test]
fn each_bad_input_has_its_line() {
    let folder = Folder::new();
    let (from, to) = (folder.path("in"), folder.path("out"));
    let good = input(Dtype::F32, [0, 1, 2, 3]);
    std::fs::write(&to, "kept").unwrap();
    let f = Dtype::F32;
    let of = |q: &[usize], k: &[usize], v: &[usize]| file(&[("q", f, q), ("k", f, k), ("v", f, v)]);
    let [q, k, v] = [&Q[..], &K[..], &V[..]];
    let mut lying = good.clone();
    let at = lying.windows(3).position(|w| w == b"[2,").unwrap() + 1;
    lying[at] = b'3';
    let huge = br#"{"q":{"dtype":"F32","shape":[4294967295,4294967295,4294967295,8],"data_offsets":[0,4]}}"#;
    let huge = [&(huge.len() as u64).to_le_bytes()[..], huge, &[0; 4]].concat();
    let cases: Vec<(Vec<u8>, &str, &str)> = vec![
        (of(&[4, 5, 8], k, v), "", "four axes (batch, head, seq, dim)"),
        (of(&[4, 5, 8], k, v), "--layout sbhd", "four axes (seq, batch, head, dim)"),
        (of(q, k, &[2, 2, 7, 16]), "", "v.dims[2] (seq_kv): got 7"),
        (of(q, &[2, 3, 9, 8], &[2, 3, 9, 8]), "", "multiple of heads_kv, which is 3"),
        (of(q, &[2, 2, 9, 16], v), "", "k.dims[3] (dim_qk): got 16"),
        (of(&[2, 0, 9, 8], k, v), "", "q.dims[1] (head): got 0"),
        (file(&[("q", f, q), ("k", f, k)]), "", "has no tensor v; it has k, q"),
        (file(&[]), "", "has no tensor q; it has none"),
        (file(&[("q", Dtype::I32, q), ("k", f, k), ("v", f, v)]), "", "q: got type I32"),
        // A type is compared also where the shape is wrong.
        (file(&[("q", f, q), ("k", f, k), ("v", Dtype::F16, &[2, 9, 8])]), "", "q is F32, k is F32, v is F16"),
        (input(Dtype::F64, [0, 1, 2, 3]), "", "--dtype"),
        (file(&[("q", f, q), ("k", Dtype::F16, k), ("v", f, v)]), "", "q is F32, k is F16, v is F32"),
        (good[..good.len() - 1].to_vec(), "", "its header describes"),
        ([&good[..], b"x"].concat(), "", "its header describes"),
        (lying, "", "broken safetensors header"),
        (huge, "", "broken safetensors header"),
        (good[..5].to_vec(), "", "no header"),
        (Vec::new(), "", "no header"),
        (u64::MAX.to_le_bytes().to_vec(), "", "exceeds the file (8 bytes)"),
        (good.clone(), "--layout bsdh", "got \"bsdh\", expected one of"),
        (good.clone(), "--dtype f64", "got \"f64\", expected one of"),
        (good.clone(), "--seed 3", "which contains the numbers"),
        (good.clone(), "--scale 1e39", "expected a finite"),
        (good.clone(), "--mask prefix-lm:-1", "len: got -1"),
        (good, "--executor rocm", "got \"rocm\", expected one of"),
    ];
    for (bytes, options, what) in cases {
        std::fs::write(&from, &bytes).unwrap();
        let out = sdpa(words(&format!("run --input {from} --output {to} {options}")));
        assert_eq!(code(&out), 2, "{what}");
        assert!(errors(&out).iter().any(|line| line.contains(what)), "{what} in {:?}", errors(&out));
        assert!(errors(&out).len() <= 3, "{:?}", errors(&out));
        assert_eq!(
            (folder.names(), std::fs::read_to_string(&to).unwrap().as_str()),
            (vec!["in".to_owned(), "out".to_owned()], "kept"),
            "{what}"
        );
    }
}

#[test]
fn shapes_that_overflow_or_do_not_fit_are_refused() {
    for (shape, what) in [
        ("1,1,1,2147483647,2147483647,2147483647", "fewer than 2^60 elements"),
        ("1,2,1,99999999999,4,8", "SQ: got 99999999999"),
        ("1,4096,4096,1000000,1000000,256", "are needed"),
        ("1,3,2,4,4,8", "multiple of heads_kv"),
        ("-1,2,1,4,4,8", "B: got -1"),
        ("1,2,1,4,4", "has 5 numbers"),
    ] {
        let out = sdpa(["run", "--shape", shape]);
        assert_eq!(code(&out), 2, "{shape}");
        assert!(errors(&out).iter().any(|line| line.contains(what)), "{shape}: {:?}", errors(&out));
    }
}

#[test]
fn no_file_makes_it_panic() {
    let folder = Folder::new();
    let from = folder.path("in");
    let good = input(Dtype::F16, [0, 1, 2, 3]);
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut random = Random::new(1);
    for n in 0..120 {
        let mut bytes = good.clone();
        match n % 3 {
            0 => bytes = (0..random.between(0, 300)).map(|_| random.bits() as u8).collect(),
            1 => bytes.truncate(random.between(0, good.len() as i64 - 1) as usize),
            // The data are numbers whatever they are; the header is not a header any more, or lies.
            _ => (0..random.between(1, 4)).for_each(|_| bytes[random.between(0, header as i64 - 1) as usize] = random.bits() as u8),
        }
        std::fs::write(&from, &bytes).unwrap();
        let out = sdpa(["run", "--input", &from, "--executor", "cpu"]);
        let allowed: &[i32] = if n % 3 == 2 { &[0, 2] } else { &[2] };
        assert!(allowed.contains(&code(&out)), "{n}: {:?}", errors(&out));
        assert!(code(&out) == 0 || !errors(&out).is_empty());
    }
}

#[test]
fn places_that_take_no_output_are_refused_before_anything_is_computed() {
    let folder = Folder::new();
    let from = folder.path("in");
    std::fs::write(&from, input(Dtype::F32, [0, 1, 2, 3])).unwrap();
    std::fs::create_dir(folder.path("folder")).unwrap();
    std::os::unix::fs::symlink(&from, folder.path("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path("socket")).unwrap();
    for (to, what) in [
        (folder.path("folder"), "is a folder"),
        (folder.path("none/out"), "there is no folder"),
        (from.clone(), "is the input file; name another file"),
        (folder.path("link"), "is the input file; name another file"),
        (folder.path("folder/../in"), "is the input file; name another file"),
        (folder.path("socket"), "is not a file"),
        ("/proc/out".to_owned(), "cannot be written"),
    ] {
        let out = sdpa(["run", "--input", &from, "--output", &to]);
        assert_eq!(code(&out), 2, "{to}");
        assert!(matches!(&errors(&out)[..], [line] if line.contains(what)), "{to}: {:?}", errors(&out));
    }
    for (from, what) in
        [(folder.path("none"), "cannot be read"), (folder.path("folder"), "is not a file"), ("/dev/zero".to_owned(), "is not a file")]
    {
        let out = sdpa(["run", "--input", &from]);
        assert_eq!(code(&out), 2, "{from}");
        assert!(matches!(&errors(&out)[..], [line] if line.contains(what)), "{from}: {:?}", errors(&out));
    }
    assert_eq!(folder.names(), ["folder", "in", "link", "socket"]);
}

#[test]
fn a_named_executor_that_is_absent_is_an_error_of_its_own() {
    let out = sdpa(words("run --executor cudnn --driver /nowhere/libcuda.so.1 --scale -1"));
    assert_eq!(code(&out), 3);
    let told = errors(&out);
    assert!(told.iter().any(|line| line.contains("/nowhere/libcuda.so.1")), "{told:?}");
    assert!(told.iter().any(|line| line.contains("attn_scale: got -1")), "{told:?}");
    let as_json = json(&sdpa(words("run --executor cudnn --driver /nowhere/libcuda.so.1 --json")));
    assert_eq!((&as_json["error"]["exit_code"], &as_json["error"]["kind"]), (&3.into(), &"executor".into()));
    if cfg!(not(target_vendor = "apple")) {
        assert_eq!(code(&sdpa(words("run --executor metal"))), 3);
    }
}

#[test]
fn a_scale_that_cudnn_does_not_take_goes_to_another_executor() {
    for scale in ["-0.5", "0"] {
        let told = json(&sdpa(["run", "--json", "--scale", scale]));
        assert_eq!((&told["executor"], &told["check"]["passed"]), (&"cpu".into(), &true.into()));
        let unsupported = told["unsupported"].as_array().unwrap().iter().find(|unsupported| unsupported["executor"] == "cudnn").unwrap();
        assert!(unsupported["text"].as_str().unwrap().starts_with("attn_scale: got"), "{unsupported}");
    }
}

#[test]
fn every_stage_is_printed() {
    let problem = "--shape 1,4,2,64,96,16 --dtype f16 --mask causal --stats";
    let inspect = |options: &str| sdpa(words(&format!("inspect {problem} {options}")));
    let text = |options: &str| {
        let out = inspect(options);
        assert_eq!(code(&out), 0, "{options}: {}", String::from_utf8_lossy(&out.stderr));
        stdout(&out).to_owned()
    };
    let value = |options: &str| json(&inspect(&format!("{options} --json")));

    assert!(text("--stage spec").contains("masks  causal"));
    assert_eq!(value("--stage spec")["spec"]["q"]["dims"], serde_json::json!([1, 4, 64, 16]));
    assert!(text("--stage problem").contains("k - q <= 0"));
    assert_eq!(value("--stage problem")["problem"]["kept"]["region"]["upper"], 0);
    for runtime in ["9.19.0", "9.27.0"] {
        let graph = text(&format!("--stage graph --runtime {runtime}"));
        assert!(graph.starts_with("t0 \"q\" f16") && graph.contains("matmul"), "{graph}");
        let as_json = value(&format!("--stage graph --runtime {runtime}"));
        assert_eq!((&as_json["runtime"], &as_json["form"]), (&runtime.into(), &"composite".into()));
        assert!(as_json["graph"]["ops"].as_array().unwrap().len() > 3);
        assert!(text(&format!("--stage program --runtime {runtime}")).contains("OPERATIONGRAPH"));
        assert!(value(&format!("--stage program --runtime {runtime}"))["program"]["descriptors"].as_array().unwrap().len() > 10);
    }
    // The lengths are clamped first; of the bias, whose gradient is not asked for, nothing else happens.
    let options = "--stage schedule --runtime 9.27.0 --mask padding --score-mod bias:qk";
    let schedule = text(options);
    let places = ["slots\n", "parameter seq_len_q", "steps\n", "check of seq_len_q and seq_len_kv", "attention", "workspace: "]
        .map(|part| schedule.find(part));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}\n{schedule}");
    let schedule = &value(options)["schedule"];
    assert_eq!(schedule["steps"].as_array().unwrap().len(), 2);
    assert_eq!((&schedule["slots"][0]["name"], &schedule["slots"][0]["bytes"]), (&"q".into(), &(4 * 64 * 16 * 2).into()));
    assert_eq!(schedule["steps"][0]["spared_by"], serde_json::json!(["seq_len_q", "seq_len_kv"]));
    // Native CUDA kernels: block lists of a mask that reads a tensor, then the kernel, for an H200 or the device of a profile.
    let options = "--stage schedule --executor cuda --mask document";
    let native = text(options);
    let places = ["sm_90a", "slots\n", "block lists", "steps\n", "attention_block_lists: grid", "attention_forward: grid", "workspace: "]
        .map(|part| native.find(part));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}\n{native}");
    let native = &value(options);
    assert_eq!((&native["executor"], &native["schedule"]["slots"][0]["offset"]), (&"cuda".into(), &0.into()));
    assert_eq!(native["schedule"]["steps"][1]["launch"]["kernel"], "attention_forward");
    let a100 = &value("--stage schedule --executor cuda --backward --device-profile ../cudnn-graph/devprops/a100.json")["schedule"];
    assert_eq!((&a100["architecture"], &a100["sources"]), (&"sm_80".into(), &2.into()));
    let idle = inspect("--stage schedule --executor cuda --form unified --runtime 9.27.0");
    assert_eq!(
        errors(&idle),
        ["--form", "--runtime"].map(|option| format!("{option}: has no effect with this --stage and --executor; remove it"))
    );
    assert_eq!(errors(&inspect("--stage graph --executor cuda")), ["--executor: has no effect with this --stage; remove it"]);
    assert!(text("--stage graph --form unified --runtime 9.27.0").contains("sdpa_forward"));
    assert_eq!(text("--runtime 9.27.0"), text("--stage graph --runtime 9.27.0"));
    let kernel = text("--stage kernel --score-mod softcap:30");
    assert!(["sm_90a", "wgmma.mma_async", "precise::tanh", "__global__"].iter().all(|part| kernel.contains(part)));
    let a100 = &value("--stage kernel --backward --device-profile ../cudnn-graph/devprops/a100.json")["kernels"];
    assert!(a100.as_array().unwrap().len() == 2 && a100[1]["architecture"] == "sm_80", "{}", a100[1]["architecture"]);
    let wide = sdpa(words("inspect --stage kernel --shape 1,2,2,9,9,264 --runtime 9.27.0"));
    assert_eq!(errors(&wide), ["--runtime: has no effect with this --stage; remove it"]);
    let wide = sdpa(words("inspect --stage kernel --shape 1,2,2,9,9,264"));
    assert!(code(&wide) == 3 && errors(&wide)[0].contains("dim_qk: got 264"), "{:?}", errors(&wide));
    let too_new = inspect("--stage program --form unified --runtime 9.12.0");
    assert_eq!(code(&too_new), 3);
    assert!(errors(&too_new)[0].contains("9.12.0 lacks"), "{:?}", errors(&too_new));
    let absent = inspect("--stage plan --driver /nowhere/libcuda.so.1 --device-profile ../cudnn-graph/devprops/h200.json");
    assert_eq!(code(&absent), 3);
}

#[test]
fn windows_at_ends_are_told_and_are_in_every_graph() {
    let inspect = |options: &str| sdpa(words(&format!("inspect --shape 2,4,2,64,96,16 --dtype f16 --mask window:9,0:ends {options}")));
    let told = "(k - q) - (len_kv - len_q) > -9 and (k - q) - (len_kv - len_q) <= 0";
    assert!(stdout(&inspect("--stage problem --mask padding")).contains(told));
    let kept = &json(&inspect("--stage trace --mask padding --json"))["kept"];
    assert_eq!((&kept["ends"]["lower"], &kept["ends"]["upper"]), (&(-9).into(), &0.into()));
    assert!(stdout(&inspect("--stage problem")).contains("k - q > 23 and k - q <= 32"));
    for options in ["", "--backward", "--form unified"] {
        let out = inspect(&format!("--stage graph --runtime 9.27.0 --mask padding {options}"));
        let bands: Vec<&str> = stdout(&out).lines().filter(|line| line.contains("= band_mask(")).collect();
        assert!(bands.len() == 2 && bands.iter().all(|band| band.contains("seq_q") && band.contains("seq_kv")), "{options}: {bands:?}");
    }
    // Without lengths the corner is that of the extents.
    assert!(!stdout(&inspect("--stage graph --runtime 9.27.0")).contains("seq_q t"));
}

#[test]
fn mistakes_of_inspect_are_told_at_once() {
    let out = sdpa(words("inspect --stage plna --form fused --runtime 8.9 --device-profile /nowhere.json --shape 1 --dtype i8"));
    assert_eq!(code(&out), 2);
    assert_eq!(errors(&out).len(), 6, "{:?}", errors(&out));
    let folder = Folder::new();
    std::fs::write(folder.path("p.json"), "{}").unwrap();
    for line in [
        "--stage spec --form unified",
        "--stage plan --runtime 9.19.0",
        &format!("--stage plan --device-profile {}", folder.path("p.json")),
    ] {
        let out = sdpa(words(&format!("inspect {line}")));
        assert_eq!((code(&out), errors(&out).len()), (2, 1), "{line}: {:?}", errors(&out));
    }
}

/// Needs a cuDNN (and a driver or a stand-in for one), found as the tool finds it.
#[test]
fn a_plan_is_made_from_a_profile() {
    let profile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cudnn-graph/devprops/h200.json");
    let line = format!("inspect --stage plan --mask causal --json --device-profile {}", profile.display());
    let out = sdpa(words(&line));
    let told = json(&out);
    if code(&out) == 3 && told["error"]["lines"][0]["message"].as_str().unwrap().contains("was not loaded") {
        println!("SKIP plan: {}", told["error"]["lines"][0]["message"]);
        assert!(!std::env::var("SDPA_REQUIRE").is_ok_and(|r| r.split(',').any(|r| r == "cudnn")), "cuDNN is required");
        return;
    }
    assert_eq!(code(&out), 0, "{told}");
    let offers = told["offers"].as_array().unwrap();
    assert_eq!(offers.iter().filter(|o| o["outcome"] == "chosen" && o["tag"] == told["engine"]).count(), 1, "{offers:?}");
    assert!(told["plan"]["cudnnVersion"].is_number() && told["workspace_bytes"].is_number());
    let text = sdpa(words(&line.replace("--json", "")));
    assert!(stdout(&text).contains("chosen"), "{}", stdout(&text));
}

#[test]
fn the_doctor_says_what_is_there_and_what_to_install() {
    let out = sdpa(words("doctor --driver /nowhere/libcuda.so.1"));
    assert_eq!(code(&out), 0);
    for what in
        ["cpu ", "thread", "cudnn ", "metal ", "install the NVIDIA driver", "pip install nvidia-cudnn-cu13", "/nowhere/libcuda.so.1"]
    {
        assert!(stdout(&out).contains(what), "{what} in {}", stdout(&out));
    }
    let told = json(&sdpa(words("doctor --json --driver /nowhere/libcuda.so.1")));
    let executors = told["executors"].as_array().unwrap();
    assert_eq!(executors.iter().map(|e| e["executor"].as_str().unwrap()).collect::<Vec<_>>(), ["cpu", "cuda", "cudnn", "metal"]);
    assert_eq!(executors[0]["works"], true);
    for n in [1, 2] {
        assert_eq!((&executors[n]["works"], &executors[n]["missing"][0]["what"]), (&false.into(), &"driver".into()));
    }
    if cfg!(not(target_vendor = "apple")) {
        let metal = &executors[3]["missing"][0];
        assert_eq!((&metal["what"], &metal["install"]), (&"device".into(), &"nothing: Metal is on Apple machines".into()));
        assert!(metal["why"].as_str().unwrap().contains(std::env::consts::OS), "{metal}");
    }
}

#[test]
fn help_has_the_exit_codes_and_wrong_arguments_are_json_too() {
    for line in ["--help", "compile --help", "prove --help"] {
        let out = sdpa(words(line));
        assert_eq!(code(&out), 0);
        assert!(stdout(&out).contains("Exit codes:"), "{line}");
    }
    assert_eq!(code(&sdpa(words("run --frobnicate"))), 2);
    let told = json(&sdpa(words("run --frobnicate --json")));
    assert!(told["error"]["lines"][0]["message"].as_str().unwrap().contains("--frobnicate"));
}
