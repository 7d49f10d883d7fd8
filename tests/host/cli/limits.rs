//! Files that do not end, texts that are long, problems that are large: told of, in little time and memory.
#![cfg(target_os = "linux")]

use super::tool::{Folder, binary, code};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs the tool with an address space of so many MiB; more than a minute is a failure.
fn limited(mib: u64, words: &[&str]) -> Output {
    let start = Instant::now();
    let mut command = Command::new("timeout");
    command.args(["60", "sh", "-c", &format!("ulimit -v {}; exec \"$0\" \"$@\"", mib * 1024)]).arg(binary()).args(words);
    let out = command.env_remove("RUST_LOG").output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{words:?} takes too long");
    out
}

#[test]
fn what_does_not_end_is_not_read() {
    let folder = Folder::new();
    let (pipe, problems, plans) = (folder.path("pipe"), folder.path("p.toml"), folder.path("plans"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::write(&problems, "[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n").unwrap();
    for endless in ["/dev/zero", "/dev/urandom", &pipe] {
        let at = format!("@{endless}");
        for words in [
            &["run", "--mask", &at][..],
            &["run", "--score-mod", &at],
            &["show", "--score-mod", &at, "--output", &folder.path("s.svg")],
            &["compile", "--problems", endless, "--device", "h200", "--out", &plans],
            &["compile", "--problems", &problems, "--device", endless, "--out", &plans],
            &["inspect", "--stage", "plan", "--device-profile", endless],
            &["cache", "report", endless, "--output", &folder.path("c.html")],
            &["run", "--input", endless],
            &["run", "--plans", endless, "--executor", "cudnn", "--driver", endless],
            &["doctor", "--cudnn", endless],
        ] {
            let out = limited(4096, words);
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(code(&out), 2, "{words:?}: {said}");
            assert!(said.contains("is not a file") || said.contains("is neither a file nor a folder"), "{words:?}: {said}");
        }
    }
}

/// A limit on the size of files, as a quota is: the write fails, and nothing stays behind.
#[test]
fn a_file_past_the_limit_of_the_process_is_an_error_and_leaves_nothing() {
    let folder = Folder::new();
    let problems = folder.path("p.toml");
    std::fs::write(&problems, "[[problem]]\nshape = [1, 2, 2, 8, 8, 64]\n").unwrap();
    let names = folder.names();
    let output = folder.path("out.safetensors");
    let figure = folder.path("figure.svg");
    for (words, about) in [
        (&["run", "--shape", "1,2,2,100,100,64", "--executor", "cpu", "--output", &output][..], "out.safetensors"),
        (&["show", "--mask", "causal", "--shape", "1,1,1,100,100,8", "--output", &figure], "figure.svg"),
    ] {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -f 1; exec \"$0\" \"$@\""]).arg(binary()).args(words);
        let out = command.env_remove("RUST_LOG").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(4), "{words:?}: {out:?}");
        assert!(said.contains("File too large") && said.contains(about), "{words:?}: {said}");
        assert_eq!(folder.names(), names, "{words:?}");
    }
}

#[test]
fn files_that_are_too_large_are_not_read() {
    let folder = Folder::new();
    let large = folder.path("large");
    std::fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    for words in [
        &["run", "--mask", &format!("@{large}")][..],
        &["compile", "--problems", &large, "--device", &large, "--out", &folder.path("plans")],
        &["inspect", "--stage", "plan", "--device-profile", &large],
    ] {
        let out = limited(4096, words);
        assert!(code(&out) == 2 && String::from_utf8_lossy(&out.stderr).contains("the most that is read"), "{words:?}: {out:?}");
    }
}

/// Forty thousand terms are a quarter of the longest text.
#[test]
fn a_long_row_of_operators_takes_memory_in_proportion() {
    let folder = Folder::new();
    let path = folder.path("long.txt");
    let many = |sign: &str, of: &str| (0..40_000).map(|n| of.replace('N', &n.to_string())).collect::<Vec<_>>().join(sign);
    for text in [many(" + ", "score * N.5"), format!("score + {}", many(" - ", "f32(k * N)")), format!("score * {}", many(" * ", "N.5"))] {
        std::fs::write(&path, &text).unwrap();
        let at = format!("@{path}");
        for words in [
            &["inspect", "--stage", "trace", "--score-mod", &at, "--shape", "1,1,1,4,4,8"][..],
            &["inspect", "--stage", "gradient", "--backward", "--score-mod", &at, "--shape", "1,1,1,4,4,8"],
            &["run", "--executor", "cpu", "--score-mod", &at, "--shape", "1,1,1,4,4,8", "--dtype", "f32", "--backward"],
        ] {
            let out = limited(2048, words);
            assert_eq!(code(&out), 0, "{words:?} {}...: {}", &text[..40], String::from_utf8_lossy(&out.stderr));
        }
    }
}

#[test]
fn dims_that_no_memory_has_room_for_are_told_of() {
    for backward in [&[][..], &["--backward"]] {
        let words = ["run", "--executor", "cpu", "--shape", "1,1,1,1,1,100000000", "--dtype", "f32"];
        let out = limited(6144, &[&words[..], backward].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        // Where the machine has less than is needed that is told at once, where only this process has, by who needs it.
        assert!(matches!(code(&out), 2 | 4) && said.starts_with("error: ") && said.contains("memory"), "{said}");
    }
}
