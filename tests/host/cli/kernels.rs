//! The kernel cache on disk, from outside: its commands, its switches, and over the emulation what is compiled.

use super::tool::{Folder, code, errors, json, sdpa_with, stdout, words};
use conformance::emulated;
use conformance::msl::Toolchain;
use conformance::say::skip;
use serde_json::json;

#[test]
fn the_folder_is_told_and_cleared() {
    let folder = Folder::new();
    let base = folder.path("base");
    let run = |line: &str| sdpa_with(words(line), [("SDPA_CACHE", String::new()), ("SDPA_CACHE_DIR", base.clone())]);
    let kernels = format!("{base}/kernels");
    let facts = |kernels_there: usize, bytes: usize| json!({ "on": true, "folder": kernels, "limit_bytes": 256 << 20, "kernels": kernels_there, "bytes": bytes });
    assert_eq!(json(&run("cache info --json")), facts(0, 0));
    assert!(!std::path::Path::new(&base).exists(), "asking makes nothing");
    std::fs::create_dir_all(&kernels).unwrap();
    std::fs::write(format!("{kernels}/0.record"), "machine code").unwrap();
    assert_eq!(json(&run("cache info --json")), facts(1, 12));
    let out = run("cache info");
    assert!(stdout(&out).contains("1 kernel, 12 bytes") && stdout(&out).contains("256.0 MiB"), "{}", stdout(&out));
    let mut cleared = facts(0, 0);
    cleared["cleared"] = json!({ "kernels": 1, "bytes": 12 });
    assert_eq!(json(&run("cache clear --json")), cleared);
    let off = sdpa_with(words("cache info --json"), []);
    assert_eq!((code(&off), json(&off)), (0, json!({ "on": false })));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&kernels, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(json(&run("cache info --json"))["refused"].as_str().unwrap().contains("other users may write to it"));
        let out = run("cache clear");
        assert_eq!(code(&out), 4);
        assert!(errors(&out)[0].starts_with("the kernel cache: ") && errors(&out)[0].contains("chmod go-w"), "{:?}", errors(&out));
    }
}

#[test]
fn variables_without_a_meaning_are_mistakes() {
    for line in ["cache info", "cache clear", "doctor", "run --shape 1,1,1,8,8,8 --executor cpu"] {
        let out = sdpa_with(words(line), [("SDPA_CACHE", "0".to_owned())]);
        assert_eq!((code(&out), errors(&out)), (2, vec!["SDPA_CACHE: got \"0\", expected `on` or `off`".to_owned()]), "{line}");
        let out = sdpa_with(words(line), [("SDPA_CACHE", "on".to_owned()), ("SDPA_CACHE_DIR", "here".to_owned())]);
        assert_eq!((code(&out), errors(&out)), (2, vec!["SDPA_CACHE_DIR: got \"here\", expected an absolute path".to_owned()]), "{line}");
    }
    let off = sdpa_with(words("run --shape 1,1,1,8,8,8 --executor cpu --no-kernel-cache"), [("SDPA_CACHE", "0".to_owned())]);
    assert_eq!(code(&off), 0, "an option comes before the variable");
}

#[test]
fn a_second_run_compiles_nothing() {
    let library = match Toolchain::find().map(drop).and_then(|()| emulated::find()) {
        Ok(library) => library.display().to_string(),
        Err(why) => return skip("cli", &why),
    };
    let folder = Folder::new();
    let base = folder.path("base");
    let run = |line: &str, switch: &str| {
        let line = format!("run --shape 1,2,1,70,90,64 --mask causal --executor cuda --json {line}");
        let variables = [("SDPA_CACHE", switch.to_owned()), ("SDPA_CACHE_DIR", base.clone())];
        let libraries = [("CUDNN_GRAPH_DRIVER", library.clone()), ("SDPA_NVRTC", library.clone())];
        let out = sdpa_with(words(&line), variables.into_iter().chain(libraries));
        assert_eq!(code(&out), 0, "{line}: {}", String::from_utf8_lossy(&out.stderr));
        let plan = json(&out)["plans"][0].clone();
        [&plan["from_file"], &plan["from_cache"]].map(|is| is.as_bool().unwrap())
    };
    assert_eq!([run("--no-kernel-cache", "on"), run("", "off")], [[false; 2]; 2]);
    assert!(!std::path::Path::new(&base).exists(), "switched off, nothing is written");
    assert_eq!([run("", ""), run("", ""), run("--no-kernel-cache", "")], [[false, false], [false, true], [false, false]]);
    let kernels = folder.path("kernels.bin");
    assert_eq!(run(&format!("--save-plans {kernels}"), ""), [false, true]);
    assert_eq!(run(&format!("--plans {kernels}"), ""), [true, false]);
}
