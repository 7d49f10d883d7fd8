//! An option that nothing reads does not compile: the compiler stops the core, then every executor and every key.
//!
//! The test changes a copy of the crates in the target folder, one option at a time, and has cargo check it. Crates that no change concerns stay compiled
//! there between runs.

use conformance::golden::repository;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that the copy has.
const CRATES: [&str; 11] = [
    "cudnn-graph",
    "metal-fallback",
    "sdpa/cache",
    "sdpa/core",
    "sdpa/cpu",
    "sdpa/cuda",
    "sdpa/cudnn",
    "sdpa/driver",
    "sdpa/emit",
    "sdpa/nvidia",
    "sdpa/oracle",
];

/// A file of the core, a struct of it, and the files that have to stop when the struct has a new field.
type Stopped = (&'static str, &'static str, &'static [&'static str]);

const STOPPED: [Stopped; 10] = [
    ("spec.rs", "AttentionSpec", &["problem.rs"]),
    ("backward.rs", "BackwardSpec", &["backward.rs"]),
    // The hash is the key's.
    ("problem.rs", "Problem", &["fact.rs", "problem.rs", "piece.rs", "empty.rs"]),
    ("backward.rs", "BackwardProblem", &["fact.rs", "backward.rs", "piece.rs", "empty.rs"]),
    ("spec.rs", "TensorSpec", &["fact.rs"]),
    ("packed.rs", "Packed", &["fact.rs"]),
    ("paged.rs", "Paged", &["fact.rs"]),
    ("mask/kept.rs", "Kept", &["fact.rs"]),
    ("mask/region.rs", "Region", &["fact.rs"]),
    ("mask/ends.rs", "Ends", &["fact.rs"]),
];

/// The name of the new field of a struct.
fn field_of(name: &str) -> String {
    format!("unread_of_{}", name.to_lowercase())
}

/// A change to the text of a file, which is named from the root of the repository.
type Change<'a> = &'a dyn Fn(&str, String) -> String;

/// Inserts text after the only line that is `line`.
fn insert(text: &str, line: &str, new: &str) -> String {
    let line = format!("{line}\n");
    assert_eq!(text.matches(&line).count(), 1, "{line}");
    text.replace(&line, &format!("{line}{new}\n"))
}

/// Copies a folder. What is the same already stays as it is, so that cargo compiles nothing again.
fn copy(from: &Path, to: &Path, name: &str, change: Change<'_>) {
    std::fs::create_dir_all(to).unwrap();
    // An earlier copy may have files that are gone.
    for entry in std::fs::read_dir(to).into_iter().flatten().map(Result::unwrap) {
        let is_gone = !from.join(entry.file_name()).exists();
        if is_gone && entry.path().is_dir() {
            std::fs::remove_dir_all(entry.path()).unwrap();
        } else if is_gone {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), format!("{name}/{}", entry.file_name().to_string_lossy()));
        let to = to.join(entry.file_name());
        if path.is_dir() {
            copy(&path, &to, &name, change);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            write(&to, &change(&name, text));
        }
    }
}

fn write(to: &Path, text: &str) {
    if std::fs::read_to_string(to).ok().as_deref() != Some(text) {
        std::fs::write(to, text).unwrap();
    }
}

/// Has cargo check crates of the changed copy, and returns the lines with errors of the compiler.
fn errors(packages: &[&str], change: Change<'_>) -> Vec<String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
    // In the target folder of the workspace: clippy has checked most of what the copy depends on there.
    let target = std::path::absolute(target).unwrap();
    let source = target.join("facts/source");
    for folder in CRATES {
        copy(&repository(folder), &source.join(folder), folder, change);
    }
    let manifest = std::fs::read_to_string(repository("Cargo.toml")).unwrap();
    let of_copy = |line: &str| match line {
        line if line.starts_with("members = ") => format!("members = {CRATES:?}\n"),
        line if line.starts_with("default-members = ") => String::new(),
        // Otherwise cargo takes what it compiled of the copy for the crates of the workspace: the hash in a file's name has no absolute path.
        line if line.starts_with("version = ") => "version = \"0.1.99\"\n".to_owned(),
        line => format!("{line}\n"),
    };
    write(&source.join("Cargo.toml"), &manifest.lines().map(of_copy).collect::<String>());
    write(&source.join("Cargo.lock"), &std::fs::read_to_string(repository("Cargo.lock")).unwrap());

    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
    cargo.args(["check", "--offline", "--keep-going", "--message-format", "short", "--target-dir"]).arg(target);
    cargo.args(packages.iter().flat_map(|package| ["--package", *package]));
    let out = cargo.current_dir(&source).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    let errors: Vec<String> = text.lines().filter(|line| line.contains("error[E")).map(str::to_owned).collect();
    assert!(!out.status.success() && !errors.is_empty(), "{text}");
    errors
}

/// Whether a file has an error of this code that names the word.
fn is_stopped(errors: &[String], file: &str, code: &str, word: &str) -> bool {
    errors.iter().any(|line| line.starts_with(&format!("{file}:")) && line.contains(code) && line.contains(word))
}

/// One test, as it has one copy.
#[test]
fn an_option_that_nothing_reads_does_not_compile() {
    // A new field, in everything that a problem consists of.
    let errors_of_fields = errors(&["sdpa-core"], &|name, mut text| {
        let of_file = STOPPED.iter().filter(|(file, ..)| name == format!("sdpa/core/src/{file}"));
        for (_, of, _) in of_file {
            let field = format!("    /// An option that nothing reads.\n    pub {}: bool,", field_of(of));
            text = insert(&text, &format!("pub struct {of} {{"), &field);
        }
        text
    });
    for (_, of, files) in STOPPED {
        for file in files {
            let word = format!("does not mention field `{}`", field_of(of));
            let file = format!("sdpa/core/src/{file}");
            assert!(is_stopped(&errors_of_fields, &file, "E0027", &word), "{file} takes a new field of {of}: {errors_of_fields:#?}");
        }
    }

    // A new fact, which no executor and no key answers.
    let fact = |name: &str, text: String| match name {
        "sdpa/core/src/fact.rs" => insert(&text, "pub enum Fact<'a> {", "    /// An option that nothing reads.\n    Unanswered,"),
        _ => text,
    };
    let mut errors_of_facts = errors(&["sdpa-cpu", "metal-fallback", "sdpa-nvidia"], &fact);
    let in_key = errors_of_facts.iter().filter(|line| line.starts_with("sdpa/nvidia/src/key.rs:")).count();
    assert_eq!(in_key, 2, "the label and the fields of a key: {errors_of_facts:#?}");
    // The executors over `sdpa-nvidia` are compiled where that is: its matches have an arm now.
    errors_of_facts.extend(errors(&["sdpa-cuda", "sdpa-cudnn"], &|name, text| match name {
        "sdpa/nvidia/src/key.rs" => text.replace("    match fact {\n", "    match fact {\n        Fact::Unanswered => None,\n"),
        _ => fact(name, text),
    }));
    for file in ["sdpa/cpu/src", "sdpa/cuda/src", "sdpa/cuda/src/mma", "sdpa/cudnn/src", "metal-fallback/src/executor"] {
        let file = format!("{file}/fact.rs");
        assert!(is_stopped(&errors_of_facts, &file, "E0004", "Unanswered"), "{file} takes a new fact: {errors_of_facts:#?}");
    }
    // What an executor supports, and what is in the key of a plan file.
    assert_eq!(errors_of_facts.iter().filter(|line| line.starts_with("sdpa/cudnn/src/fact.rs:")).count(), 2);
}
