//! Compares the machine code of the native CUDA kernels with that of another revision: a refactoring must leave every bit of it.
//!
//! `machine_code save FOLDER [FILTER]` compiles every kernel of the offline table with NVRTC and keeps source and machine code in a folder.
//! `machine_code compare FOLDER [FILTER]` compiles them again, lists the kernels whose `.text` sections differ, and exits with 1 if there are any.
//! Names of kernels and line information are not compared. `FILTER` selects kernels whose name contains it.

use conformance::kernel_table::{TableKernel, all};
use conformance::runner::side_by_side;
use conformance::{elf, nvrtc};
use sdpa::cuda::kernel::compile_for;
use sdpa_driver::Nvrtc;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["save", folder] => save(Path::new(folder), ""),
        ["save", folder, filter] => save(Path::new(folder), filter),
        ["compare", folder] => compare(Path::new(folder), ""),
        ["compare", folder, filter] => compare(Path::new(folder), filter),
        _ => Err("machine_code save FOLDER [FILTER] | machine_code compare FOLDER [FILTER]".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// The files of a kernel: its source, and its machine code.
fn files(folder: &Path, kernel: &TableKernel) -> [PathBuf; 2] {
    let name: String = kernel.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    ["cu", "cubin"].map(|extension| folder.join(format!("{name}.{extension}")))
}

fn selected(filter: &str) -> Result<Vec<TableKernel>, String> {
    let kernels: Vec<TableKernel> = all().into_iter().filter(|kernel| kernel.name.contains(filter)).collect();
    if kernels.is_empty() { Err(format!("no kernel of the table has {filter:?} in its name")) } else { Ok(kernels) }
}

fn compiled(nvrtc: &Nvrtc, kernel: &TableKernel) -> Result<Vec<u8>, String> {
    compile_for(nvrtc, &kernel.source, kernel.architecture).map(|made| made.code).map_err(|e| format!("{}: {e}", kernel.name))
}

/// Calls `each` for every kernel and returns what it says, the first error first.
fn for_each(kernels: &[TableKernel], each: impl Fn(&TableKernel) -> Result<(), String> + Sync) -> Vec<String> {
    let said = Mutex::new(Vec::new());
    side_by_side(kernels, |kernel| {
        if let Err(e) = each(kernel) {
            said.lock().unwrap().push(e);
        }
    });
    said.into_inner().unwrap()
}

fn outcome(kernels: usize, said: &[String], what: &str) -> Result<(), String> {
    if said.is_empty() {
        println!("{kernels} kernels {what}");
        return Ok(());
    }
    Err(format!("{}\n{} of {kernels} kernels", said.join("\n"), said.len()))
}

fn save(folder: &Path, filter: &str) -> Result<(), String> {
    let (nvrtc, kernels) = (nvrtc::find()?, selected(filter)?);
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let said = for_each(&kernels, |kernel| {
        let [source, code] = files(folder, kernel);
        let write = |path: &Path, contents: &[u8]| std::fs::write(path, contents).map_err(|e| format!("{}: {e}", path.display()));
        write(&source, kernel.source.as_bytes())?;
        write(&code, &compiled(&nvrtc, kernel)?)
    });
    outcome(kernels.len(), &said, "saved")
}

/// Compares one kernel with the saved one. The same source needs no compiler.
fn compare_one(nvrtc: &Nvrtc, folder: &Path, kernel: &TableKernel) -> Result<(), String> {
    let [source, code] = files(folder, kernel);
    let read = |path: &Path| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
    if read(&source)? == kernel.source.as_bytes() {
        return Ok(());
    }
    let (saved, made) = (read(&code)?, compiled(nvrtc, kernel)?);
    let sections = |file| elf::machine_code(file).map_err(|e| format!("{}: {e}", kernel.name));
    let (saved, made) = (sections(&saved)?, sections(&made)?);
    if saved == made {
        return Ok(());
    }
    let bytes = |code: &[&[u8]]| code.iter().map(|section| section.len().to_string()).collect::<Vec<_>>().join(" + ");
    let differing = made.iter().filter(|section| !saved.contains(section)).count();
    Err(format!("{}: {differing} of {} sections differ; {} bytes, were {}", kernel.name, made.len(), bytes(&made), bytes(&saved)))
}

fn compare(folder: &Path, filter: &str) -> Result<(), String> {
    let (nvrtc, kernels) = (nvrtc::find()?, selected(filter)?);
    let said = for_each(&kernels, |kernel| compare_one(&nvrtc, folder, kernel));
    outcome(kernels.len(), &said, "have the same machine code")
}
