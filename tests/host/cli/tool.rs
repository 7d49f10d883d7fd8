//! Running the tool and reading what it says.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The tool, built once with the profile and into the target folder of these tests.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // target/[triple/]profile/deps/cli-…
        let exe = std::env::current_exe().unwrap();
        let profile = exe.parent().and_then(Path::parent).unwrap();
        let name = profile.file_name().unwrap().to_str().unwrap();
        let mut target = profile.parent().unwrap();
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
        // As a part of the workspace, whose tests have compiled all that it is made of.
        cargo.args(["build", "--workspace", "--bin", "cargo-sdpa", "--message-format", "json"]);
        cargo.args(["--profile", if name == "debug" { "dev" } else { name }]);
        if let Some(features) = std::env::var_os("SDPA_TEST_FEATURES") {
            cargo.arg("--features").arg(features);
        }
        if !target.join(".rustc_info.json").exists() {
            cargo.arg("--target").arg(target.file_name().unwrap());
            target = target.parent().unwrap();
        }
        let out = cargo.arg("--target-dir").arg(target).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let messages = String::from_utf8(out.stdout).unwrap();
        let built = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        built.filter_map(|m| m["executable"].as_str().map(PathBuf::from)).next_back().unwrap()
    })
}

pub(crate) fn sdpa<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    sdpa_with(args, [])
}

/// With variables. The kernel cache of whoever runs the tests is left alone.
pub(crate) fn sdpa_with<S: AsRef<std::ffi::OsStr>>(
    args: impl IntoIterator<Item = S>,
    variables: impl IntoIterator<Item = (&'static str, String)>,
) -> Output {
    let mut command = Command::new(binary());
    command.args(args).env_remove("RUST_LOG").env("SDPA_CACHE", "off").env_remove("SDPA_CACHE_DIR").envs(variables).output().unwrap()
}

/// Words of a line as arguments.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

pub(crate) fn code(out: &Output) -> i32 {
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
    out.status.code().unwrap()
}

pub(crate) fn stdout(out: &Output) -> &str {
    std::str::from_utf8(&out.stdout).unwrap()
}

/// The lines that begin with `error: `; there is nothing else on stderr.
pub(crate) fn errors(out: &Output) -> Vec<String> {
    let stderr = String::from_utf8(out.stderr.clone()).unwrap();
    stderr.lines().map(|line| line.strip_prefix("error: ").unwrap_or_else(|| panic!("{stderr}")).to_owned()).collect()
}

pub(crate) fn json(out: &Output) -> Value {
    serde_json::from_str(stdout(out)).unwrap_or_else(|e| panic!("{e}: {}", stdout(out)))
}

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}
