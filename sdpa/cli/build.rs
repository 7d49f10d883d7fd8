//! Compiles the stand-in for the CUDA driver into a shared library, whose bytes the tool includes (`src/stand_in.rs`).

use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "null-driver/lib.rs";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|e| panic!("{name}, which cargo sets: {e}"));
    let library = PathBuf::from(variable("OUT_DIR")).join("libnull_driver.so");
    // Only on Linux does cuDNN make plans, so other targets need no stand-in for the driver.
    if variable("CARGO_CFG_TARGET_OS") == "linux" && compile(&variable, &library) {
        return;
    }
    std::fs::write(&library, []).unwrap_or_else(|e| panic!("writing {}: {e}", library.display()));
}

/// Compiles the library and returns true on success. Some targets have no shared libraries (musl, linked statically); there the tool has no stand-in.
fn compile(variable: &dyn Fn(&str) -> String, library: &PathBuf) -> bool {
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "null_driver", "--target", &variable("TARGET")]);
    rustc.args(["-Copt-level=2", "-Cpanic=abort", "-Cstrip=symbols", "-Clink-arg=-Wl,-soname,libcuda.so.1"]);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    match rustc.arg("-o").arg(library).arg(SOURCE).status() {
        Ok(status) if status.success() => true,
        Ok(status) => warn(&status),
        Err(e) => warn(&e),
    }
}

fn warn(why: &dyn std::fmt::Display) -> bool {
    println!("cargo::warning=the stand-in for the CUDA driver was not compiled ({why}): without a driver, planning will need --driver");
    false
}
