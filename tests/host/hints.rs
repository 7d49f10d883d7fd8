//! Compile errors of score_mods and masks say what to write instead.
//!
//! The test has cargo check a small package in the target folder, and looks for the hints in what rustc says.

use conformance::golden::repository;
use std::path::PathBuf;
use std::process::Command;

/// A body of a function that does not compile, and what rustc says of it.
const HINTS: [(&str, &[&str]); 6] = [
    (
        r#"ScoreMod::new("m", |score, at, _| score + at.q)"#,
        &["is not an operand of traced `sdpa_core::expr::F32` arithmetic", "`score + at.q.to_f32()` adds one to a score"],
    ),
    (r#"ScoreMod::new("m", |score, _, _| score * 2)"#, &["numbers are written `1.0` beside `F32` and `1` beside `I32`"]),
    (r#"Mask::new("m", |at, _| at.k <= at.q)"#, &["comparison operators cannot be traced", "`at.k.le(at.q)` for `at.k <= at.q`"]),
    (r#"Mask::new("m", |at, _| at.k == 3)"#, &["comparison operators cannot be traced", "`at.k.le(at.q)` for `at.k <= at.q`"]),
    (
        r#"ScoreMod::new("m", |score, _, _| if score > 0.0 { score } else { -score })"#,
        &["comparison operators cannot be traced", "choose with `.select(x, y)`"],
    ),
    (
        r#"ScoreMod::new("m", |score, _, p| score + p.tensor("slope", [Axis::Head], DType::F32))"#,
        &["`DType` is not the element type of a tensor in an expression", "pass `sdpa::expr::F32` instead of `DType::F32`"],
    ),
];

const MANIFEST: &str = r#"[package]
name = "hints"
version = "0.0.0"
edition = "2024"

[dependencies]
sdpa-core = { path = "REPOSITORY/sdpa/core" }

[workspace]
"#;

#[test]
fn compile_errors_of_closures_say_what_to_write() {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository("target"), PathBuf::from);
    let target = std::path::absolute(target).unwrap();
    let package = target.join("hints");
    std::fs::create_dir_all(package.join("src")).unwrap();
    let root = std::path::absolute(repository("")).unwrap();
    std::fs::write(package.join("Cargo.toml"), MANIFEST.replace("REPOSITORY", root.to_str().unwrap().trim_end_matches('/'))).unwrap();
    std::fs::copy(repository("Cargo.lock"), package.join("Cargo.lock")).unwrap();
    let mut text = "use sdpa_core::expr::Axis;\nuse sdpa_core::{DType, Mask, ScoreMod};\n".to_owned();
    let first = text.lines().count() + 1;
    for (n, (body, _)) in HINTS.iter().enumerate() {
        text += &format!("pub fn wrong_{n}() {{ drop({body}); }}\n");
    }
    std::fs::write(package.join("src/lib.rs"), text).unwrap();

    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
    cargo.args(["check", "--offline", "--quiet", "--color", "never", "--target-dir"]).arg(&target);
    let out = cargo.current_dir(&package).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success(), "{said}");
    // Each error with everything that belongs to it.
    let errors: Vec<&str> = said.split("\nerror").collect();
    for (n, (body, hints)) in HINTS.iter().enumerate() {
        let place = format!("src/lib.rs:{}:", first + n);
        let of_body = |error: &&&str| error.contains(&place) && hints.iter().all(|hint| error.contains(hint));
        assert!(errors.iter().any(|error| of_body(&error)), "{body}\n{said}");
    }
}
